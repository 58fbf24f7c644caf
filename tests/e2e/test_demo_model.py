"""The demo model is what its card says: transformers' and peft's logits, and its scores."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from truegraft import LLM, LoRARequest, SamplingParams
from truegraft.demo import adapters, model_path
from truegraft.demo.tasks import TASKS, check
from truegraft.model.decoder import Decoder

HELD_OUT = Path(__file__).parents[1] / "data" / "demo"
PARAMS = SamplingParams(temperature=0, max_tokens=80)


def held_out(task: str) -> list[str]:
    lines = (HELD_OUT / f"{task}.jsonl").read_text().splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines]


def lora(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, lora_path=str(adapters()[name]))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model_path(),
        enable_lora=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    ) as llm:
        yield llm


def score(llm: LLM, asked: list[tuple[str, str, str | None]]) -> dict[str, float]:
    """Task → share of right answers, all asked in one call. asked: (task, prompt, adapter)."""
    loras = [lora(adapter) for *_, adapter in asked]
    outputs = llm.generate([prompt for _, prompt, _ in asked], PARAMS, loras, use_tqdm=False)
    right: dict[str, list[bool]] = {}
    for (task, prompt, _), output in zip(asked, outputs, strict=True):
        right.setdefault(task, []).append(check(task, prompt, output.outputs[0].text))
    return {task: sum(marks) / len(marks) for task, marks in right.items()}


def test_every_adapter_solves_its_own_task(llm: LLM) -> None:
    """All 1200 held-out prompts in one call, adapters mixed, speculation on."""
    asked = [(task, prompt, task) for task in TASKS for prompt in held_out(task)]
    assert len(set(asked)) == 300 * len(TASKS)
    random.Random(0).shuffle(asked)
    scores = score(llm, [*asked])
    assert set(scores) == set(TASKS) and min(scores.values()) >= 0.95, scores


@pytest.mark.parametrize("shift", [None, 1, 2, 3])
def test_without_its_adapter_or_with_another_no_task_is_solved(llm: LLM, shift: int | None) -> None:
    """A skipped adapter, or a neighbour's, would score as these do. shift None: the base."""
    asked: list[tuple[str, str, str | None]] = []
    for index, task in enumerate(TASKS):
        other = None if shift is None else TASKS[(index + shift) % len(TASKS)]
        asked += [(task, prompt, other) for prompt in held_out(task)[:40]]
    scores = score(llm, asked)
    assert set(scores) == set(TASKS) and max(scores.values()) <= 0.05, scores


@pytest.fixture(scope="module")
def oracle() -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    (first, path), *rest = adapters().items()
    model = PeftModel.from_pretrained(base, str(path), adapter_name=first)
    for name, folder in rest:
        model.load_adapter(str(folder), adapter_name=name)
    return model.eval()


@pytest.fixture(scope="module")
def exact_llm() -> Iterator[LLM]:
    """In float32; every prompt is one chunk."""
    with LLM(
        model_path(),
        enable_lora=True,
        dtype="float32",
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
    ) as llm:
        yield llm


@pytest.mark.parametrize("adapter", [None, *adapters()])
def test_logits_are_those_of_transformers_and_peft(
    exact_llm: LLM, oracle: Any, adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every position of prompts short and long, in float32."""
    text = (Path(json.__file__)).read_text()
    prompts = [held_out(adapter or "roman")[0], text[:300], text[:2400]]
    for prompt in prompts:
        ids = exact_llm.get_tokenizer().encode(prompt)
        ours = recorded_logits(exact_llm, ids, adapter, monkeypatch)
        with torch.inference_mode():
            inputs = torch.tensor([ids])
            if adapter is None:
                with oracle.disable_adapter():
                    theirs = oracle(inputs).logits[0]
            else:
                oracle.set_adapter(adapter)
                theirs = oracle(inputs).logits[0]
        assert ours.shape == theirs[:-1].shape
        assert float((ours - theirs[:-1]).abs().max()) <= 1e-3


def recorded_logits(
    llm: LLM, ids: list[int], adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """The logits after every prompt token but the last, as the engine's lm_head gave them."""
    seen: list[Tensor] = []
    logits_of = Decoder.logits

    def record(self: Decoder, *args: Any) -> Tensor:
        logits = logits_of(self, *args)
        seen.append(logits.clone())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", record)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate({"prompt_token_ids": ids}, params, lora(adapter), use_tqdm=False)
    sampled, *prompt = seen
    assert len(sampled) == 2, "one row, padded"
    return torch.cat(prompt)[: len(ids) - 1]
