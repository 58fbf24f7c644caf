"""The runner: a step plan in, a step result out.

Owns the weights, the KV cache, the adapter table and the persistent rows of one device. Knows
nothing about why a plan is what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truegraft.adapters.store import AdapterStore
from truegraft.adapters.table import AdapterTable
from truegraft.core.plan import RowResult, RowWork, StepPlan, StepResult, TokenLogprobs
from truegraft.model.decoder import Decoder
from truegraft.ops.interface import KVCache, Ops, RowPlan, TokenBatch
from truegraft.runner.inputs import build_batch, pad_index
from truegraft.runner.rows import Rows
from truegraft.runner.sampler import Sampler

PROMPT_LOGPROB_ROWS = 64  # logits rows of one lm_head call for prompt logprobs


@dataclass(frozen=True)
class Hidden:
    """What the last layer left of a step's rows."""

    x: Tensor  # [M, hidden]
    residual: Tensor  # [M, hidden]
    batch: TokenBatch


class Runner:
    """One device's model, executing one step at a time.

    table and store are None when adapters are off.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        caches: Sequence[KVCache],
        rows: Rows,
        table: AdapterTable | None,
        store: AdapterStore | None,
    ) -> None:
        self.table = table
        self._decoder = decoder
        self._ops = ops
        self._caches = caches
        self._rows = rows
        self._store = store
        self._sampler = Sampler(ops, rows)
        self._block_size = caches[0].k.shape[2]
        self._row_plans: dict[tuple[int, ...], RowPlan] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Rows, slots and blocks change in the order of the plan's fields."""
        self._change_adapters(plan)
        self._change_rows(plan)
        if not plan.work:
            return StepResult(())
        batch = build_batch(plan.work, self._rows, self._ops.row_multiple, self._block_size)
        x, residual = self._decoder.hidden(batch, self._row_plan(batch.slots), self._caches)
        hidden = Hidden(x, residual, batch)
        results = self._sample(plan.work, hidden)
        return StepResult(tuple(self._add_prompt_logprobs(plan.work, results, hidden)))

    def _change_adapters(self, plan: StepPlan) -> None:
        if not plan.unloads and not plan.loads:
            return
        assert self.table is not None and self._store is not None, "adapters are off"
        self._row_plans.clear()  # they point to pages that change now
        for slot in plan.unloads:
            self.table.clear(slot)
        for load in plan.loads:
            version = self._store.by_fingerprint(load.fingerprint)
            self.table.load(load.slot, version.adapter)

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.closed:
            self._rows.close(row)
        for opening in plan.opened:
            self._rows.open(opening)
        for work in plan.work:
            if work.new_blocks:
                self._rows.append_blocks(work.row, work.new_blocks)
            if work.draft:
                end = work.start + work.num_tokens
                self._rows.write(work.row, end - len(work.draft), work.draft)

    def _row_plan(self, slots: Tensor) -> RowPlan:
        """The adapter work of these rows; decode steps with the same slots share one."""
        key = tuple(slots.tolist())
        plan = self._row_plans.get(key)
        if plan is None:
            if len(self._row_plans) >= 4:  # the last few: backbone and head, decode and prefill
                del self._row_plans[next(iter(self._row_plans))]
            plan = self._row_plans[key] = self._plan_rows(slots, key)
        return plan

    def _plan_rows(self, slots: Tensor, key: tuple[int, ...]) -> RowPlan:
        if self.table is None:
            return self._ops.plan_rows(slots)
        pages = sum(self.table.num_pages(slot) for slot in set(key) if slot >= 0)
        return self._ops.plan_rows(slots, self.table.depth, pages)

    def _logits(self, hidden: Hidden, index: Sequence[int]) -> Tensor:
        """Logits of chosen rows, padded to the row multiple: [L, V] float32."""
        chosen = pad_index(index, self._ops.row_multiple)
        rows = self._row_plan(hidden.batch.slots[chosen])
        return self._decoder.logits(hidden.x, hidden.residual, chosen, rows)

    def _sample(self, work: Sequence[RowWork], hidden: Hidden) -> list[RowResult]:
        """Sample the last rows of each work that samples, and note the tokens in their rows."""
        index: list[int] = []
        for item, end in zip(work, hidden.batch.seq_offset.tolist()[1:], strict=True):
            index += range(end - item.num_logits, end)
        if not index:
            return [RowResult()] * len(work)
        results = self._sampler.sample(work, self._logits(hidden, index))
        for item, result in zip(work, results, strict=True):
            if result.token_ids:
                known = item.start + item.num_tokens - len(item.draft)
                self._rows.write(item.row, known, result.token_ids)
        return results

    def _add_prompt_logprobs(
        self, work: Sequence[RowWork], results: Sequence[RowResult], hidden: Hidden
    ) -> list[RowResult]:
        offsets = hidden.batch.seq_offset.tolist()
        return [
            replace(result, prompt_logprobs=tuple(self._prompt_logprobs(item, offset, hidden)))
            if item.prompt_logprobs
            else result
            for item, result, offset in zip(work, results, offsets[:-1], strict=True)
        ]

    def _prompt_logprobs(self, work: RowWork, offset: int, hidden: Hidden) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens after each of this chunk's prompt rows."""
        opening = self._rows.opening(work.row)
        count = min(work.num_tokens, opening.num_prompt_tokens - 1 - work.start)
        top = opening.sampling.prompt_logprobs or 0
        reports: list[TokenLogprobs] = []
        for first in range(0, count, PROMPT_LOGPROB_ROWS):
            index = range(offset + first, offset + min(first + PROMPT_LOGPROB_ROWS, count))
            after = slice(work.start + first + 1, work.start + first + 1 + len(index))
            tokens = opening.token_ids[after]
            reports += self._sampler.token_logprobs(self._logits(hidden, index), tokens, top)
        return reports
