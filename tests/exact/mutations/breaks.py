"""Ways to break the engine that keep it running: each answers, and answers wrongly.

A break is put in with monkeypatch and knows what cells must notice it. Most are habits seen in
other engines: host state of one batch that leaks into a row's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from truegraft.adapters.table import AdapterTable
from truegraft.config import BLOCK_SIZE
from truegraft.core.blocks import BlockKey
from truegraft.core.plan import RowWork
from truegraft.model.decoder import Decoder
from truegraft.ops.cpu import CpuOps
from truegraft.ops.interface import (
    PAGE_RANK,
    AttentionShape,
    KVCache,
    RowPlan,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.reference import ReferenceOps
from truegraft.runner import inputs
from truegraft.runner.rows import Rows
from truegraft.runner.runner import Hidden, Runner
from truegraft.runner.sampler import Sampler
from truegraft.speculation.verify import accept

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Break:
    """One fault. cells: the perturbation whose cells must notice, or "features-7" or "samples"."""

    name: str
    cells: str
    apply: Callable[[Patch], None]


# ---------------------------------------------------------------------- adapters


def skip_one_row(patch: Patch) -> None:
    """The last adapter row of a batch of several runs on the base."""
    plan = Runner._row_plan

    def row_plan(self: Runner, slots: Tensor) -> RowPlan:
        adapted = (slots >= 0).nonzero().flatten()
        if len(adapted) > 1:
            slots = slots.index_fill(0, adapted[-1:], -1)
        return plan(self, slots)

    patch.setattr(Runner, "_row_plan", row_plan)


def read_the_neighbours_slot(patch: Patch) -> None:
    """Every row takes the slot of the row before it."""
    _change_batch(patch, lambda work, rows, batch: replace(batch, slots=batch.slots.roll(1)))


def drop_the_scale(patch: Patch) -> None:
    """Every adapter is applied with scale 1."""
    load = AdapterTable.load

    def unscaled(self: AdapterTable, slot: int, adapter: Any) -> None:
        load(self, slot, adapter)
        for table in self.pages.values():
            table.scale[slot] = 1.0

    patch.setattr(AdapterTable, "load", unscaled)


def keep_a_stale_slot(patch: Patch) -> None:
    """A cleared slot still points to the pages of its last user."""

    def clear(self: AdapterTable, slot: int) -> None:
        adapter, self._slots[slot] = self._slots[slot], None
        for module in adapter.modules if adapter else ():
            used = self.pages[module].page_of[slot].tolist()
            self._free[module] += [p for p in used if p >= 0 and p not in self._free[module]]

    patch.setattr(AdapterTable, "clear", clear)


def keep_the_first_adapter(patch: Patch) -> None:
    """A slot that was loaded once is not loaded again: pages of the evicted adapter answer."""
    load = AdapterTable.load
    seen: set[tuple[int, int]] = set()

    def load_once(self: AdapterTable, slot: int, adapter: Any) -> None:
        if (id(self), slot) not in seen:
            load(self, slot, adapter)
        seen.add((id(self), slot))

    patch.setattr(AdapterTable, "load", load_once)
    patch.setattr(AdapterTable, "clear", lambda self, slot: None)


def forget_verify_rows(patch: Patch) -> None:
    """Draft rows run without their adapter."""

    def change(work: Sequence[RowWork], rows: Rows, batch: TokenBatch) -> TokenBatch:
        slots = batch.slots.clone()
        for item, end in zip(work, batch.seq_offset.tolist()[1:], strict=True):
            slots[end - len(item.draft) : end] = -1
        return replace(batch, slots=slots)

    _change_batch(patch, change)


def forget_prompt_logprobs(patch: Patch) -> None:
    """Prompt logprobs of a chunked prompt come from the base's lm_head."""
    report = Runner._prompt_logprobs

    def without_adapter(self: Runner, work: RowWork, offset: int, hidden: Hidden) -> Any:
        if work.start > 0:
            slots = torch.full_like(hidden.batch.slots, -1)
            hidden = replace(hidden, batch=replace(hidden.batch, slots=slots))
        return report(self, work, offset, hidden)

    patch.setattr(Runner, "_prompt_logprobs", without_adapter)


# ---------------------------------------------------------------------- orders of summation


def split_k_by_batch(patch: Patch) -> None:
    """A linear over many rows sums its input features in two halves."""
    whole = ReferenceOps._matmul

    def split(self: ReferenceOps, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[0] <= 16:
            return whole(self, x, weight)
        half = x.shape[1] // 2
        return x[:, :half] @ weight[:half] + x[:, half:] @ weight[half:]

    patch.setattr(ReferenceOps, "_matmul", split)


def reverse_the_ranks(patch: Patch) -> None:
    """lm_head adds an adapter's pages in descending order when several rows are sampled."""
    logits = Decoder.logits

    def descending(
        self: Decoder, x: Tensor, residual: Tensor, index: Tensor, rows: RowPlan
    ) -> Tensor:
        pages = self.lm_head.parts[0].pages
        assert pages is not None
        ascending = pages.page_of.clone()
        for slot, held in enumerate((ascending >= 0).sum(-1).tolist()):
            if (
                len(index) > 4 and pages.rank[slot] == held * PAGE_RANK
            ):  # whole pages can change places
                pages.page_of[slot, :held] = ascending[slot, :held].flip(0)
        values = logits(self, x, residual, index, rows)
        pages.page_of[:] = ascending
        return values

    patch.setattr(Decoder, "logits", descending)


def split_attention_by_batch(patch: Patch) -> None:
    """A decode among several sequences reads all its keys at once, not in splits."""
    batches: list[TokenBatch] = []

    def note(work: Sequence[RowWork], rows: Rows, batch: TokenBatch) -> TokenBatch:
        batches[:] = [batch]
        return batch

    def attention(attend: Callable[..., Tensor], *args: Any) -> Tensor:
        _, q, shape, cache, _ = args
        out = attend(*args)
        [batch] = batches
        for sequence, row in enumerate(batch.seq_offset.tolist()[:-1]):
            if len(batch.seq_row) > 1 and int(batch.seq_offset[sequence + 1]) == row + 1:
                blocks = batch.block_tables[batch.seq_row[sequence]].long()
                length = int(batch.positions[row]) + 1
                out[row] = _plain_attention(q[row], shape, cache, blocks, length)
        return out

    _change_batch(patch, note)
    _wrap_op(patch, "attention", attention)


def _plain_attention(
    q: Tensor, shape: AttentionShape, cache: KVCache, blocks: Tensor, length: int
) -> Tensor:
    """One query [H, D] over the first `length` keys of these blocks: [H·D]."""
    k, v = (c[blocks].transpose(1, 2).flatten(0, 1)[:length].float() for c in (cache.k, cache.v))
    k, v = (t.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for t in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q.float(), k) * shape.head_dim**-0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).flatten()


# ---------------------------------------------------------------------- speculation


def accept_a_wrong_draft(patch: Patch) -> None:
    """The first draft that differs is taken to be right."""

    def generous(draft: Sequence[int], target: Sequence[int]) -> int:
        return min(accept(draft, target) + 1, len(draft))

    patch.setattr("truegraft.runner.sampler.accept", generous)


def keep_rejected_keys(patch: Patch) -> None:
    """A position of the KV cache that a rejected draft wrote is not written again."""
    written: dict[int, int] = {}  # row -> positions below this have been written
    stale: list[Tensor] = []

    def note(work: Sequence[RowWork], rows: Rows, batch: TokenBatch) -> TokenBatch:
        kept = torch.zeros(batch.num_tokens, dtype=torch.bool)
        offsets = batch.seq_offset.tolist()
        for item, first in zip(work, offsets[:-1], strict=True):
            known = written.get(item.row, 0) if item.samples and item.start > 1 else 0
            kept[first : first + max(0, min(known - item.start, item.num_tokens))] = True
            written[item.row] = item.start + item.num_tokens
        stale[:] = [kept.nonzero().flatten()]
        return batch

    def rope_write(write: Callable[..., Tensor], *args: Any) -> Tensor:
        cache, batch = args[-2:]
        index = (batch.kv_block[stale[0]], slice(None), batch.kv_offset[stale[0]])
        k, v = cache.k[index].clone(), cache.v[index].clone()
        q = write(*args)
        cache.k[index], cache.v[index] = k, v
        return q

    _change_batch(patch, note)
    _wrap_op(patch, "rope_write", rope_write)


def count_no_drafts(patch: Patch) -> None:
    """Penalties of a verify row count the history before the step, not its earlier drafts."""
    describe = Sampler._sampling_rows

    def without_drafts(self: Sampler, work: RowWork) -> list[SamplingRow | None]:
        rows = describe(self, work)
        return [
            row and replace(row, output=row.output[: len(row.output) - index])
            for index, row in enumerate(rows)
        ]

    patch.setattr(Sampler, "_sampling_rows", without_drafts)


# ---------------------------------------------------------------------- noise


def key_noise_by_batch_index(patch: Patch) -> None:
    """A row's noise follows its place in the batch."""
    _change_rows(patch, lambda row, index: replace(row, seed=row.seed + index))


def key_noise_by_draft_index(patch: Patch) -> None:
    """A verify row's noise is that of the step's first row: the position is forgotten."""
    describe = Sampler._sampling_rows

    def same_position(self: Sampler, work: RowWork) -> list[SamplingRow | None]:
        rows = describe(self, work)
        return [
            row and replace(row, position=row.position - index) for index, row in enumerate(rows)
        ]

    patch.setattr(Sampler, "_sampling_rows", same_position)


def share_noise_among_samples(patch: Patch) -> None:
    """The samples of one prompt draw the same noise."""
    _change_rows(patch, lambda row, index: replace(row, sample_index=0))


# ---------------------------------------------------------------------- cache and schedule


def key_the_cache_by_tokens(patch: Patch) -> None:
    """Equal tokens are one cache entry, whatever adapter computed them."""

    def key(parent: int, tokens: tuple[int, ...], adapter: str | None, salt: str | None) -> Any:
        return BlockKey(parent, tokens, None, salt)

    for module in ("blocks", "scheduler"):
        patch.setattr(f"truegraft.core.{module}.BlockKey", key)


def shift_positions_after_preemption(patch: Patch) -> None:
    """Tokens generated before a preemption are recomputed one position too late."""

    def change(work: Sequence[RowWork], rows: Rows, batch: TokenBatch) -> TokenBatch:
        positions = batch.positions.clone()
        for item, first in zip(work, batch.seq_offset.tolist()[:-1], strict=True):
            opening = rows.opening(item.row)
            span = positions[first : first + item.num_tokens]
            known = len(opening.token_ids)
            span += (span >= opening.num_prompt_tokens) & (span < known)
        return replace(batch, positions=positions)

    _change_batch(patch, change)


def misread_the_start(patch: Patch) -> None:
    """Later chunks of a prompt find another block where its first one is."""

    def change(work: Sequence[RowWork], rows: Rows, batch: TokenBatch) -> TokenBatch:
        tables = batch.block_tables.clone()
        for item in work:
            if item.start >= BLOCK_SIZE and item.num_tokens > 1:
                tables[item.row, 0] = tables[item.row, 1]
        return replace(batch, block_tables=tables)

    _change_batch(patch, change)


# ---------------------------------------------------------------------- where to put them in


def _change_batch(
    patch: Patch, change: Callable[[Sequence[RowWork], Rows, TokenBatch], TokenBatch]
) -> None:
    def build_batch(work: Sequence[RowWork], rows: Rows, *sizes: int) -> TokenBatch:
        return change(work, rows, inputs.build_batch(work, rows, *sizes))

    patch.setattr("truegraft.runner.runner.build_batch", build_batch)


def _change_rows(patch: Patch, change: Callable[[SamplingRow, int], SamplingRow]) -> None:
    sample = ReferenceOps.sample

    def changed(self: ReferenceOps, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        return sample(self, logits, [row and change(row, i) for i, row in enumerate(rows)])

    patch.setattr(ReferenceOps, "sample", changed)


def _wrap_op(patch: Patch, name: str, wrapper: Callable[..., Tensor]) -> None:
    """Call `wrapper(op, self, …)` for an op, in whichever back end defines it."""
    for back_end in (ReferenceOps, CpuOps):
        if name in vars(back_end):
            op = getattr(back_end, name)
            wrapped = partialmethod(_call_wrapped, wrapper, op)
            patch.setattr(back_end, name, wrapped)


def _call_wrapped(
    self: object, wrapper: Callable[..., Tensor], op: Callable[..., Tensor], *args: Any
) -> Tensor:
    return wrapper(op, self, *args)


BREAKS: tuple[Break, ...] = (
    Break("adapter skipped for one row", "batch-7", skip_one_row),
    Break("neighbour's slot read", "batch-7", read_the_neighbours_slot),
    Break("scale dropped", "batch-1", drop_the_scale),
    Break("stale slot not cleared", "evicted", keep_a_stale_slot),
    Break("evicted adapter stays", "evicted", keep_the_first_adapter),
    Break("no adapter on verify rows", "ngram-3", forget_verify_rows),
    Break("no adapter in prompt logprobs", "chunk-64", forget_prompt_logprobs),
    Break("K split by batch", "batch-32", split_k_by_batch),
    Break("ranks added in another order", "batch-7", reverse_the_ranks),
    Break("attention split by batch", "batch-7", split_attention_by_batch),
    Break("one wrong draft accepted", "ngram-3", accept_a_wrong_draft),
    Break("rejected keys kept", "ngram-3", keep_rejected_keys),
    Break("penalties without drafts", "features-7", count_no_drafts),
    Break("noise keyed by batch index", "batch-7", key_noise_by_batch_index),
    Break("noise keyed by step", "ngram-3", key_noise_by_draft_index),
    Break("noise shared by samples", "samples", share_noise_among_samples),
    Break("cache key without fingerprint", "cache-cold", key_the_cache_by_tokens),
    Break("positions off after preemption", "preempted", shift_positions_after_preemption),
    Break("chunks that miss the start", "chunk-64", misread_the_start),
)
