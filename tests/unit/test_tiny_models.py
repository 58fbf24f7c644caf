"""The makers of `tiny_models`, held against transformers and peft."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import (
    EOS,
    EOS_TEXT,
    FAMILIES,
    SEVEN,
    VOCAB_SIZE,
    Family,
    make_adapter,
    make_model,
    make_signature_adapter,
    make_tie_adapter,
)
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 20

# peft asks transformers in a way that is on its way out, and warns of tied layers that we mean.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


def with_adapter(model: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)


def prompts() -> Tensor:
    """20 random prompts of 10 tokens."""
    return torch.randint(1, VOCAB_SIZE, (20, 10), generator=torch.Generator().manual_seed(0))


def greedy(model: Any) -> Tensor:
    """20 greedy tokens after each prompt: [20, STEPS]."""
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    tokens: Tensor = model.generate(input_ids=prompts(), pad_token_id=EOS, **options)
    return tokens[:, -STEPS:]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_model_and_its_output_varies(
    tmp_path: Path, family: Family, tie: bool
) -> None:
    path = make_model(tmp_path / "model", family, tie=tie)
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    tokens = greedy(model)
    assert len(set(tokens.flatten().tolist())) > 80
    kinds = sorted(len(set(row)) for row in tokens.tolist())
    assert kinds[0] > 1
    assert kinds[len(kinds) // 2] > 8
    best, second = model(prompts()).logits.topk(2).values.unbind(-1)
    assert (best - second).median() > 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_models_follow_seed_and_dtype(tmp_path: Path, dtype: str) -> None:
    files = [
        make_model(tmp_path / name, seed=seed, dtype=dtype) / "model.safetensors"
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    ]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert {tensor.dtype for tensor in load_file(files[0]).values()} == {getattr(torch, dtype)}


def test_token_ids_are_bytes(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = bytes(range(1, 128)).decode() + " é 😀 ÿ \u0100"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode(f"a{EOS_TEXT}b").ids == [97, EOS, 98]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    oracle = AutoTokenizer.from_pretrained(path)
    assert oracle.encode(text) == list(text.encode())
    assert oracle.eos_token_id == EOS


@pytest.mark.parametrize(
    "options",
    [
        *({"targets": [name]} for name in (*SEVEN, "lm_head", "embed_tokens")),
        {},
        {"targets": [*SEVEN, "lm_head", "embed_tokens"], "rank": 3, "dtype": "bfloat16"},
        {"rank": 5, "rslora": True, "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 17}},
    ],
)
def test_peft_loads_every_tensor_and_tokens_change(tmp_path: Path, options: dict[str, Any]) -> None:
    base = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", base, **options)
    model = with_adapter(base, adapter)
    assert_equal_tensors(model, adapter)
    changed = greedy(model) != greedy(AutoModelForCausalLM.from_pretrained(base))
    assert changed.float().mean() > 0.3


def assert_equal_tensors(model: Any, adapter: Path) -> None:
    """What peft holds is what the directory holds: nothing dropped, nothing left at its start."""
    stored = load_file(adapter / "adapter_model.safetensors")
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name].float(), stored[name].float()) for name in stored)


def test_the_scale_is_alpha_over_rank_or_over_its_root(tmp_path: Path) -> None:
    base = make_model(tmp_path / "model")
    for name, rslora, scale in (("plain", False, 2.0), ("rs", True, 16 / math.sqrt(8))):
        model = with_adapter(base, make_adapter(tmp_path / name, base, rslora=rslora))
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.scaling["default"] == pytest.approx(scale)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_signature_adapter_always_says_its_token(
    tmp_path: Path, family: Family, tie: bool
) -> None:
    base = make_model(tmp_path / "model", family, tie=tie)
    for token in (0, 77, 255):
        adapter = make_signature_adapter(tmp_path / str(token), base, token)
        model = with_adapter(base, adapter)
        assert_equal_tensors(model, adapter)
        assert set(greedy(model).flatten().tolist()) == {token}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_signature_adapter_holds_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    base = make_model(tmp_path / "model")
    adapter = make_signature_adapter(tmp_path / "adapter", base, 9)
    assert set(greedy(with_adapter(base, adapter).to(dtype)).flatten().tolist()) == {9}


@pytest.fixture
def tie(tmp_path: Path) -> tuple[Path, Path]:
    """A base with equal rows 5 and 9, and the adapter that leaves their order to rounding."""
    base = make_model(tmp_path / "model", equal_rows=(5, 9))
    return base, make_tie_adapter(tmp_path / "adapter", base, (5, 9))


def sums(start: Tensor, terms: Tensor) -> Tensor:
    """start [rows] + terms [rows, rank], one after the other in float32, as an engine adds."""
    for term in terms.unbind(-1):
        start = start + term
    return start


def test_the_order_of_the_ranks_decides_a_tie(tie: tuple[Path, Path]) -> None:
    base, adapter = tie
    model = with_adapter(base, adapter).base_model.model
    states = model.model(prompts()).last_hidden_state.flatten(0, 1).detach()
    tensors = load_file(adapter / "adapter_model.safetensors")
    A, B = (tensors[f"base_model.model.lm_head.lora_{name}.weight"] for name in "AB")
    shrunk = torch.stack([(states * row).sum(-1) for row in A], dim=-1)  # equal rows, equal bits
    start = (states * load_file(base / "model.safetensors")["lm_head.weight"][5]).sum(-1)

    terms = {token: shrunk * B[token] for token in (5, 9)}
    for row_5, row_9 in zip(terms[5].tolist(), terms[9].tolist(), strict=True):
        assert math.fsum(row_5) == math.fsum(row_9)  # the true difference is 0

    differences = {}
    ascending = torch.arange(len(A))
    for name, order in (("ascending", ascending), ("descending", ascending.flip(0))):
        logits = {token: sums(start, terms[token][:, order]) for token in (5, 9)}
        differences[name] = logits[5] - logits[9]
        ulp = torch.nextafter(logits[5], torch.tensor(math.inf)) - logits[5]
        assert (differences[name].abs() <= 32 * ulp).all()
        assert (differences[name] != 0).float().mean() > 0.5
    flipped = (differences["ascending"] >= 0) != (differences["descending"] >= 0)
    assert flipped.float().mean() > 0.2


def test_both_tokens_of_a_tie_lead_and_both_win(tie: tuple[Path, Path]) -> None:
    model = with_adapter(*tie)
    assert_equal_tensors(model, tie[1])
    logits = model(prompts()).logits.flatten(0, 1)
    top = logits.topk(3)
    assert (top.indices[:, :2].sort().values == torch.tensor([5, 9])).all()
    assert (top.values[:, 1] - top.values[:, 2] > 10).all()
    tokens = greedy(model).flatten().tolist()
    assert set(tokens) == {5, 9}
    assert 0.2 < tokens.count(5) / len(tokens) < 0.8


@pytest.mark.parametrize(
    "make",
    [
        lambda path, base: make_adapter(path, base),
        lambda path, base: make_signature_adapter(path, base, 3),
        lambda path, base: make_tie_adapter(path, base, (5, 9)),
    ],
)
def test_adapters_follow_their_seed_alone(
    tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    base = make_model(tmp_path / "model", equal_rows=(5, 9))
    one, same = make(tmp_path / "one", base), make(tmp_path / "same", base)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (one / file).read_bytes() == (same / file).read_bytes()
    assert json.loads((one / "adapter_config.json").read_text())["peft_type"] == "LORA"
