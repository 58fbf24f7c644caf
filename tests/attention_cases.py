"""Sequences over a shuffled paged cache, on any device, and what attention should make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from guard import poisoned
from torch import Tensor

from truegraft.ops.interface import AttentionShape, KVCache, TokenBatch
from truegraft.ops.triton import attention as kernels
from truegraft.ops.triton import memory

BLOCK = 64
GARBAGE = 2**30  # a block id far outside of any pool

Rows = Sequence[tuple[int, int, int]]  # of a batch: sequence, position of its first row, rows


@dataclass(frozen=True)
class World:
    """Whole sequences in a cache whose spare places are poisoned.

    Blocks are shuffled, tables longer than the sequences end in garbage, and places past a sequence
    hold keys that are NaN and values of 1000.
    """

    shape: AttentionShape
    lengths: tuple[int, ...]
    queries: tuple[Tensor, ...]  # of each sequence [length, H, D]
    keys: tuple[Tensor, ...]  # [G, length, D]
    values: tuple[Tensor, ...]
    cache: KVCache
    tables: Tensor  # [rows, max blocks] int32
    table_rows: tuple[int, ...]  # of each sequence

    def batch(
        self,
        rows: Rows,
        *,
        max_query: int | None = None,
        max_context: int | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> TokenBatch:
        """A step of these rows. padding: rows, sequences more than there are."""
        device = self.tables.device
        counts = [count for _, _, count in rows]
        total, spare, empty = sum(counts), *padding

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        offsets = torch.tensor([0, *counts, *[0] * empty]).cumsum(0)
        nowhere = torch.zeros(total + spare, dtype=torch.int64, device=device)
        return TokenBatch(
            num_tokens=total,
            token_ids=nowhere,
            positions=nowhere,
            slots=nowhere.int(),
            kv_block=nowhere,
            kv_offset=nowhere,
            seq_row=ints([self.table_rows[s] for s, _, _ in rows] + [0] * empty),
            seq_offset=offsets.to(device),
            seq_start=ints([start for _, start, _ in rows] + [0] * empty),
            block_tables=self.tables,
            max_query=max_query or max(counts),
            max_context=max_context or max(start + count for _, start, count in rows),
        )

    def q(self, rows: Rows, spare: int = 0) -> Tensor:
        """Queries of these rows, and of `spare` rows of padding, which are NaN."""
        parts = [self.queries[s][start : start + count] for s, start, count in rows]
        parts.append(torch.full_like(self.queries[0][:1], torch.nan).repeat(spare, 1, 1))
        return torch.cat(parts).contiguous()

    def attend(
        self,
        rows: Rows,
        *,
        max_query: int | None = None,
        max_context: int | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """What the kernels make of these rows, from poisoned memory: [rows, H·D]."""
        batch = self.batch(rows, max_query=max_query, max_context=max_context, padding=padding)
        with memory.allocator(poisoned):
            plan = kernels.plan_attention(batch, [self.shape])
            out = kernels.attention(self.q(rows, padding[0]), self.shape, self.cache, plan)
        assert len(out) == batch.num_tokens + padding[0]
        return out[: batch.num_tokens]

    def exact(self, rows: Rows) -> Tensor:
        """The same in float64."""
        return torch.cat([self._exact(*row) for row in rows])

    def _exact(self, sequence: int, start: int, count: int) -> Tensor:
        shape, end = self.shape, start + count
        q = self.queries[sequence][start:end].double()
        q = q.view(count, shape.num_kv_heads, shape.group, -1).permute(1, 2, 0, 3)
        keys, values = (t[sequence][:, None, :end].double() for t in (self.keys, self.values))
        place = torch.arange(end, device=q.device)
        query = torch.arange(start, end, device=q.device)[:, None]
        hidden = place > query
        if shape.window is not None:
            hidden = hidden | (place <= query - shape.window)
        scores = q @ keys.transpose(2, 3) * shape.head_dim**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        exact: Tensor = (weights @ values).permute(2, 0, 1, 3).reshape(count, -1)
        return exact

    def everything(self) -> Rows:
        """Each sequence's prefill."""
        return [(s, 0, length) for s, length in enumerate(self.lengths)]

    def offset(self, sequence: int, position: int) -> int:
        """Where a row is among those of `everything`."""
        return sum(self.lengths[:sequence]) + position

    def where(self, rows: Rows) -> Tensor:
        """`offset` of each of these rows."""
        places = [self.offset(s, start) + i for s, start, count in rows for i in range(count)]
        return torch.tensor(places, device=self.tables.device)

    def with_key(self, sequence: int, position: int, value: float) -> World:
        """The same with one key set to `value`, in the cache alone."""
        block = int(self.tables[self.table_rows[sequence], position // BLOCK])
        k = self.cache.k.clone()
        k[block, :, position % BLOCK] = value
        return replace(self, cache=replace(self.cache, k=k))


def make_world(
    shape: AttentionShape,
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    loud: float = 2.0,
) -> World:
    """Random sequences. loud: standard deviation of queries, so that weights differ much."""
    random = torch.Generator(device=device).manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim

    def randn(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=random, device=device) * std).to(dtype)

    needed = [-(-length // BLOCK) for length in lengths]
    pool = torch.randperm(sum(needed) + 3, generator=order)
    k = torch.full((len(pool), kv_heads, BLOCK, dim), torch.nan, dtype=dtype, device=device)
    v = torch.full_like(k, 1000.0)
    tables = torch.full((len(lengths) + 2, max(needed) + 2), GARBAGE, dtype=torch.int32)
    table_rows = torch.randperm(len(tables), generator=order)[: len(lengths)].tolist()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    used = 0
    for length, count, row in zip(lengths, needed, table_rows, strict=True):
        blocks = pool[used : used + count]
        used += count
        tables[row, :count] = blocks.int()
        for held, cached in ((keys, k), (values, v)):
            fresh = randn(kv_heads, length, dim)
            held.append(fresh)
            for number, block in enumerate(blocks.tolist()):
                piece = fresh[:, number * BLOCK : (number + 1) * BLOCK]
                cached[block, :, : piece.shape[1]] = piece
    queries = tuple(randn(length, heads, dim, std=loud) for length in lengths)
    return World(
        shape,
        tuple(lengths),
        queries,
        tuple(keys),
        tuple(values),
        KVCache(k, v),
        tables.to(device),
        tuple(table_rows),
    )
