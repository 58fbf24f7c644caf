"""The test that this project began with: LoRA with speculation is LoRA without, 100 of 100.

The engine that taught us this accepts 90 equal answers of 100 here, and once fell to 76 when its
captured graphs left the adapters out. A floor is not what exact means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from truegraft import LLM, LoRARequest, RequestOutput, SamplingParams, demo

HELD_OUT = Path(__file__).parents[1] / "data" / "demo"
TASKS = sorted(file.stem for file in HELD_OUT.glob("*.jsonl"))  # each has its adapter
NUM_PROMPTS = 100
PARAMS = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}

Loras = Sequence[LoRARequest | None]


def held_out_prompts(task: str) -> list[str]:
    lines = (HELD_OUT / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def lora(task: str) -> LoRARequest:
    return LoRARequest(task, lora_path=str(demo.adapters()[task]))


def answers(prompts: Sequence[str], loras: Loras, **options: Any) -> list[RequestOutput]:
    llm = LLM(demo.model_path(), enable_lora=True, max_num_seqs=NUM_PROMPTS, **options)
    try:
        return llm.generate(prompts, PARAMS, loras, use_tqdm=False)
    finally:
        llm.close()


def count_equal(plain: Sequence[RequestOutput], drafted: Sequence[RequestOutput]) -> int:
    """How many pairs are equal; each that differs is printed."""
    equal = 0
    for index, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        found, wanted = ours.outputs[0], theirs.outputs[0]
        assert len(wanted.token_ids) == PARAMS.max_tokens
        if found.token_ids == wanted.token_ids and found.text == wanted.text:
            equal += 1
        else:
            pair = f"  plain   {wanted.text!r}\n  drafted {found.text!r}\n"
            sys.stdout.write(f"{index}: {ours.prompt!r}\n{pair}")
    return equal


def assert_drafts_went_both_ways(drafted: Sequence[RequestOutput]) -> None:
    stats = [output.outputs[0].speculation for output in drafted]
    accepted = sum(s.num_accepted_tokens for s in stats)
    assert 0 < accepted < sum(s.num_draft_tokens for s in stats)


@pytest.mark.parametrize("task", TASKS)
def test_batch_inference_correctness(task: str) -> None:
    prompt = held_out_prompts(task)[0]
    prompts, loras = [prompt] * NUM_PROMPTS, [lora(task)] * NUM_PROMPTS
    # One row more asks the base: what the adapter says must be its own.
    plain = answers([*prompts, prompt], [*loras, None])
    drafted = answers(prompts, loras, speculative_config=NGRAM)
    assert count_equal(plain[:-1], drafted) == NUM_PROMPTS
    assert_drafts_went_both_ways(drafted)
    assert all(o.outputs[0].text != plain[-1].outputs[0].text for o in drafted)


def test_mixed_batch_correctness() -> None:
    """100 distinct prompts over the base and all adapters, in one batch."""
    names = [None, *TASKS]
    share = NUM_PROMPTS // len(names)
    prompts, loras = list[str](), list[LoRARequest | None]()
    for index, name in enumerate(names):
        task = name or TASKS[0]
        start = share * index  # the base reads prompts that the first adapter does not
        prompts += held_out_prompts(task)[start : start + share]
        loras += [lora(name) if name else None] * share
    assert len(set(prompts)) == NUM_PROMPTS and len(TASKS) == 4
    plain = answers(prompts, loras)
    drafted = answers(prompts, loras, speculative_config=NGRAM)
    assert count_equal(plain, drafted) == NUM_PROMPTS
    assert_drafts_went_both_ways(drafted)
    for index, name in enumerate(names):
        span = drafted[share * index : share * (index + 1)]
        fingerprints = {output.adapter_fingerprint for output in span}
        assert len(fingerprints) == 1 and (None in fingerprints) == (name is None)
