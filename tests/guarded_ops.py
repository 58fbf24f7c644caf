"""Every op on small odd shapes, its inputs, outputs and workspaces in guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from guard import Guard, unwritten
from torch import Tensor

from truegraft.ops.interface import (
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    QKNorm,
    RowPlan,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.triton import memory, production
from truegraft.ops.triton.ops import TritonOps

BLOCK = 64
NUM_SLOTS, ORDINALS, NUM_PAGES = 3, 2, 7
VOCABULARY = 301
PAGE_OF = ((0, 1), (6, -1), (-1, -1))  # slot 2 has no page of this module: not every adapter does

Case = Callable[["Lab"], Sequence[Tensor]]


class Lab:
    """Random guarded inputs for one dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.guard = Guard()
        self.dtype, self.device = dtype, device
        self.ops = TritonOps(dtype, device)
        self._random = torch.Generator().manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype | None = None, std: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._random) * std
        return self.guard.place(values.to(self.device, dtype or self.dtype))

    def given(self, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.guard.place(torch.as_tensor(values).to(self.device, dtype))

    def slots(self, rows: int) -> Tensor:
        return self.given([row * 7 % (NUM_SLOTS + 1) - 1 for row in range(rows)], torch.int32)

    def pages(self, k: int, n: int) -> LoraPages:
        pages = self.ops.new_pages((NUM_PAGES, NUM_SLOTS, ORDINALS), k, n)
        pages.a.copy_(self.randn(*pages.a.shape, std=k**-0.5))
        pages.b.copy_(self.randn(*pages.b.shape))
        return replace(
            pages,
            a=self.guard.place(pages.a),
            b=self.guard.place(pages.b),
            page_of=self.given(torch.tensor(PAGE_OF), torch.int32),
            rank=self.given((32, 9, 0), torch.int32),
            scale=self.given(torch.tensor([0.5, 1.0, 2.0]), torch.float32),
        )

    def base_plan(self, rows: int) -> RowPlan:
        return self.ops.plan_rows(self.given([-1] * rows, torch.int32))

    def plan(self, rows: int) -> RowPlan:
        depth = self.given((2, 1, 0), torch.int32)
        return self.ops.plan_rows(self.slots(rows), depth)

    def batch(self, counts: Sequence[int], starts: Sequence[int]) -> TokenBatch:
        """Sequences of `counts` rows after `starts` tokens, over shuffled blocks."""
        total = sum(counts)
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        width = -(-longest // BLOCK)
        order = torch.randperm(len(counts) * width, generator=self._random).view(-1, width)
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        return TokenBatch(
            num_tokens=total,
            token_ids=self.given(torch.zeros(total)),
            positions=self.given(positions),
            slots=self.slots(total),
            kv_block=self.given(order[owner, positions // BLOCK]),
            kv_offset=self.given(positions % BLOCK),
            seq_row=self.given(torch.arange(len(counts))),
            seq_offset=self.given(torch.tensor([0, *counts]).cumsum(0)),
            seq_start=self.given(starts),
            block_tables=self.given(order, torch.int32),
            max_query=max(counts),
            max_context=longest,
        )

    def cache(self, shape: AttentionShape, batch: TokenBatch) -> KVCache:
        size = (batch.block_tables.numel(), shape.num_kv_heads, BLOCK, shape.head_dim)
        return KVCache(self.randn(*size), self.randn(*size))


def run(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Run a case; assert that it wrote all of its outputs and nothing else."""
    lab = Lab(dtype, device)
    with memory.allocator(lab.guard):
        outputs = case(lab)
    if device.type == "cuda":
        torch.cuda.synchronize()
    lab.guard.check()
    assert outputs, "a case has outputs"
    for number, output in enumerate(outputs):
        assert not unwritten(output), f"output {number} was not written in full"


def cases(tiny: bool) -> dict[str, Case]:
    """Cases by name. tiny: small enough for the interpreter.

    On a GPU what costs time is the compiler: cases differ in shape more than in specialisation.
    """
    rows = (1, 5, 19) if tiny else (1, 17, 65, 300)
    found: dict[str, Case] = {}
    for count in rows:
        for sizes, k in (((40, 24, 24), 72), ((33,), 100)):
            name = f"linear {count}x{k} to {'+'.join(map(str, sizes))}"
            found[name] = _linear(count, sizes, k, adapters=False)
            found[f"{name}, adapters"] = _linear(count, sizes, k, adapters=True)
        found[f"embed {count}"] = _embed(count)
        found[f"add_norm {count}"] = _add_norm(count, 72)
        found[f"silu_mul {count}"] = _silu_mul(count, 104)
    widths = ((4, 2, 64, None), (6, 2, 80, None)) if tiny else ((6, 2, 80, None), (7, 1, 128, 100))
    for heads, kv_heads, dim, window in widths:
        shape = AttentionShape(heads, kv_heads, dim, window)
        for counts, starts in _sequences(tiny):
            name = f"{heads}/{kv_heads}x{dim}, window {window}, rows {counts} after {starts}"
            found[f"rope_write {name}"] = _rope(shape, counts, starts)
            found[f"attention {name}"] = _attention(shape, counts, starts)
    for count in (1, 3):
        found[f"argmax {count}"] = _sample(count, None)
        found[f"logprobs {count}"] = _logprobs(count)
        for number, row in enumerate(production.SAMPLING):
            found[f"sample {count}, feature {number}"] = _sample(count, row)
    return found


def _sequences(tiny: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    few = [((1,), (0,)), ((1, 1, 1), (63, 64, 65)), ((5, 1, 3), (0, 70, 60))]
    return few if tiny else [*few, ((1, 1), (255, 600)), ((130, 1, 5, 65), (0, 256, 300, 1))]


def _linear(rows: int, sizes: tuple[int, ...], k: int, *, adapters: bool) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        weight = lab.guard.place(lab.ops.pack(lab.randn(sum(sizes), k, std=k**-0.5)))
        parts, offset = [], 0
        for size in sizes:
            parts.append(LinearPart(offset, size, lab.pages(k, size) if adapters else None))
            offset += size
        layer = Linear(weight, lab.randn(offset), tuple(parts))
        x, plan = lab.randn(rows, k), lab.plan(rows) if adapters else lab.base_plan(rows)
        outputs = [lab.ops.linear(x, layer, plan)]
        if not adapters:
            outputs.append(lab.ops.linear(x, layer, plan, torch.float32))
        return outputs

    return case


def _embed(rows: int) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        weight, ids = lab.randn(VOCABULARY, 72), lab.given(torch.arange(rows) * 50 % VOCABULARY)
        pages, plan = lab.pages(VOCABULARY, 72), lab.plan(rows)
        base = lab.ops.embed(ids, Embedding(weight), plan)
        return base, lab.ops.embed(ids, Embedding(weight, pages), plan)

    return case


def _add_norm(rows: int, width: int) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        x, residual, weight = lab.randn(rows, width), lab.randn(rows, width), lab.randn(width)
        index = lab.given([rows - 1, 0])
        outputs: list[Tensor] = []
        for other in (None, residual):
            for chosen in (None, index):
                outputs += lab.ops.add_norm(x, other, weight, 1e-5, chosen)
        return outputs

    return case


def _silu_mul(rows: int, width: int) -> Case:
    return lambda lab: [lab.ops.silu_mul(lab.randn(rows, 2 * width))]


def _rope(shape: AttentionShape, counts: Sequence[int], starts: Sequence[int]) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        batch = lab.batch(counts, starts)
        cache = lab.cache(shape, batch)
        total, dim = batch.num_tokens, shape.head_dim
        table = lab.randn(2, total, dim // 2, dtype=torch.float32)
        tables = (lab.guard.place(table[0]), lab.guard.place(table[1]))
        outputs = [cache.k, cache.v]
        for norm in (None, QKNorm(lab.randn(dim), lab.randn(dim), 1e-6)):
            qkv = lab.randn(total, (shape.num_heads + 2 * shape.num_kv_heads) * dim)
            outputs.append(lab.ops.rope_write(qkv, shape, tables, norm, cache, batch))
        return outputs

    return case


def _attention(shape: AttentionShape, counts: Sequence[int], starts: Sequence[int]) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        batch = lab.batch(counts, starts)
        q = lab.randn(batch.num_tokens, shape.num_heads, shape.head_dim)
        plan = lab.ops.plan_attention(batch, [shape])
        return [lab.ops.attention(q, shape, lab.cache(shape, batch), plan)]

    return case


def _sample(count: int, row: SamplingRow | None) -> Case:
    def case(lab: Lab) -> Sequence[Tensor]:
        logits = lab.randn(count, VOCABULARY, dtype=torch.float32)
        rows = [row if index % 2 == 0 else None for index in range(count)]
        adjusted = lab.ops.adjust(logits, rows)
        return adjusted, lab.ops.sample(adjusted, rows)

    return case


def _logprobs(count: int) -> Case:
    return lambda lab: [lab.ops.logprobs(lab.randn(count, VOCABULARY, dtype=torch.float32))]
