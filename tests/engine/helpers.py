"""What every test of the engine says again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truegraft import LLM, LoRARequest, RequestOutput, SamplingParams


def greedy(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    """The likeliest tokens, exactly `max_tokens` of them, with their logprobs."""
    fields = {"temperature": 0, "ignore_eos": True, "logprobs": 0} | fields
    return SamplingParams(max_tokens=max_tokens, **fields)


def seeded(max_tokens: int = 12, seed: int = 3, **fields: Any) -> SamplingParams:
    """Sampled with a seed of its own."""
    return greedy(max_tokens, temperature=0.8, top_p=0.9, seed=seed, **fields)


def ids(seed: int, count: int) -> list[int]:
    """`count` token ids that look random; none of them ends a text."""
    return [(seed * 7919 + i * i * 31 + i * 17) % 255 + 1 for i in range(count)]


def tokens(output: RequestOutput, sample: int = 0) -> list[int]:
    return output.outputs[sample].token_ids


def facts(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and logprobs of every sample: what must not depend on any neighbour."""
    return [
        (
            sample.token_ids,
            [at[sample.token_ids[i]].logprob for i, at in enumerate(sample.logprobs or ())],
        )
        for sample in output.outputs
    ]


def alone(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    adapters: Sequence[LoRARequest | None],
) -> list[list[tuple[list[int], list[float]]]]:
    """Each prompt in a call of its own."""
    return [
        facts(llm.generate([prompt], params, adapter)[0])
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
