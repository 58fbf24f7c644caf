"""Tiny models and adapters, made once, and one engine that most tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import SEVEN, make_adapter, make_model

from truegraft import LLM, LoRARequest
from truegraft.ops.prove import Shapes, choose_tiles
from truegraft.ops.reference import ReferenceOps, Tiles
from truegraft.runner import build


@pytest.fixture(scope="session", autouse=True)
def _one_proof_for_equal_shapes() -> Iterator[None]:
    """The proof has its own tests; here equal shapes are proved once, not once an engine."""
    known: dict[object, Tiles] = {}

    def choose_once(
        shapes: Shapes, dtype: torch.dtype, make: Callable[[torch.dtype, Tiles], ReferenceOps]
    ) -> Tiles:
        key = (shapes, dtype, type(make(dtype, Tiles())))
        if key not in known:
            known[key] = choose_tiles(shapes, dtype, make)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_tiles", choose_once)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, 256 byte tokens, id 0 ends a text."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> dict[str, LoRARequest]:
    """Four adapters of the Llama: r4-q, r8 on the seven, r17 with head and embedding, r3 on v."""
    folder = tmp_path_factory.mktemp("adapters")
    everywhere = (*SEVEN, "embed_tokens", "lm_head")
    paths = {
        "r4-q": make_adapter(folder / "a", llama, rank=4, targets=["q_proj"], seed=1, scale_b=1.0),
        "r8-seven": make_adapter(folder / "b", llama, rank=8, seed=2),
        "r17-all": make_adapter(folder / "c", llama, rank=17, targets=everywhere, seed=3),
        "r3-v": make_adapter(folder / "d", llama, rank=3, targets=["v_proj"], seed=4),
    }
    return {name: LoRARequest(name, lora_path=str(path)) for name, path in paths.items()}


@pytest.fixture(scope="session")
def shared_llm(llama: Path) -> Iterator[LLM]:
    """Small limits, so that chunks, queues and full batches are nothing special."""
    with LLM(
        llama,
        enable_lora=True,
        max_loras=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
        seed=7,
    ) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared engine, with an empty prefix cache; every test must leave it clean."""
    shared_llm.engine.scheduler.blocks.clear_cache()
    yield shared_llm
    engine = shared_llm.engine
    left = list(engine._generations)
    for request_id in left:  # a test that failed must not fail the next ones
        engine.abort(request_id)
        engine._generations.pop(request_id, None)
    assert not left and not engine.scheduler.has_work
    engine.check_integrity()
