"""From logits rows to tokens: how each row is sampled, drafts verified, logprobs reported.

A verify row's history is the row's tokens up to its position, drafts included: read from the
token buffer, never counted along the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from truegraft.api import SamplingParams
from truegraft.core.plan import RowOpening, RowResult, RowWork, TokenLogprobs
from truegraft.ops.interface import Ops, SamplingRow
from truegraft.runner.rows import Rows
from truegraft.speculation.verify import accept


class Sampler:
    """Samples the logits of a step; holds nothing between steps."""

    def __init__(self, ops: Ops, rows: Rows) -> None:
        self._ops = ops
        self._rows = rows

    def sample(self, work: Sequence[RowWork], logits: Tensor) -> list[RowResult]:
        """One result per RowWork. logits: raw, [L, V] float32, each work's rows in order."""
        sampling = list(chain.from_iterable(self._sampling_rows(w) for w in work))
        sampling += [None] * (len(logits) - len(sampling))
        drawn = self._ops.sample(self._ops.adjust(logits, sampling), sampling).tolist()
        # NaN shows in both extremes; this reads a row twice where isfinite().all() reads it often.
        finite = (logits.amax(-1).isfinite() & logits.amin(-1).isfinite()).tolist()
        results, start = [], 0
        for item in work:
            span = slice(start, start + item.num_logits)
            results.append(self._verify(item, drawn[span], finite[span], logits[span]))
            start = span.stop
        return results

    def _verify(
        self, work: RowWork, drawn: list[int], finite: list[bool], logits: Tensor
    ) -> RowResult:
        """Keep what plain decoding would have emitted; later rows followed a wrong draft."""
        if not drawn:
            return RowResult()
        count = accept(work.draft, drawn) + 1
        if not all(finite[:count]):
            return RowResult(finite=False)
        tokens = tuple(drawn[:count])
        top = self._rows.opening(work.row).sampling.logprobs
        if top is None:
            return RowResult(tokens)
        return RowResult(tokens, tuple(self.token_logprobs(logits[:count], tokens, top)))

    def token_logprobs(
        self, logits: Tensor, tokens: Sequence[int], top: int
    ) -> list[TokenLogprobs]:
        """Raw logprobs of given tokens and of the `top` likeliest: logits [n, V], n tokens."""
        padding = -len(logits) % self._ops.row_multiple
        padded = torch.nn.functional.pad(logits, (0, 0, 0, padding))
        return [
            _describe(row, token, top)
            for row, token in zip(self._ops.logprobs(padded), tokens, strict=False)
        ]

    def _sampling_rows(self, work: RowWork) -> list[SamplingRow | None]:
        opening = self._rows.opening(work.row)
        last = work.start + work.num_tokens - work.num_logits
        return [self._sampling_row(opening, last + i) for i in range(work.num_logits)]

    def _sampling_row(self, opening: RowOpening, position: int) -> SamplingRow | None:
        """How the token after `position` is drawn; None where plain argmax is meant."""
        params = opening.sampling
        if _is_plain(params):
            return None
        history = self._rows.token_ids[opening.row, : position + 1]
        num_output = position + 1 - opening.num_prompt_tokens
        banned = opening.stop_token_ids if num_output < params.min_tokens else ()
        row = SamplingRow(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            prompt=history[: opening.num_prompt_tokens],
            output=history[opening.num_prompt_tokens :],
            bias=tuple((params.logit_bias or {}).items()),
            allowed=None if params.allowed_token_ids is None else (*params.allowed_token_ids,),
            banned=banned,
            seed=opening.seed,
            sample_index=opening.sample_index,
            position=position + 1,
        )
        return row if row.draws or row.adjusts else None


def _is_plain(params: SamplingParams) -> bool:
    """Whether every token is the argmax of raw logits: then no row need be looked at."""
    return (
        params.greedy
        and params.min_tokens == 0
        and params.repetition_penalty == 1.0
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.logit_bias is None
        and params.allowed_token_ids is None
    )


def _describe(logprobs: Tensor, token: int, top: int) -> TokenLogprobs:
    """One position's report from its log-softmax [V]; equal values go by token id."""
    chosen = logprobs[token]
    rank = int((logprobs > chosen).sum()) + 1
    if top == 0:
        return TokenLogprobs(token, float(chosen), rank)
    least = logprobs.topk(min(top, len(logprobs))).values[-1]
    candidates = (logprobs >= least).nonzero().flatten()
    order = logprobs[candidates].sort(descending=True, stable=True)
    ids = candidates[order.indices[:top]].tolist()
    return TokenLogprobs(token, float(chosen), rank, tuple(ids), tuple(order.values[:top].tolist()))
