"""How fast is each GPU kernel, beside the bytes it must move and beside what torch has?

µs from replays of CUDA graphs (median), on fresh random inputs, over rotated weights and caches so
that the L2 does not help; what is timed is checked against float64 in the same run. `floor` is
bytes at 4.3 TB/s or flops at 750 TFLOP/s, `wanted` is what our prototypes reached.

    scripts/bench gpu-kernels [--only linears,layers,attention,rowwise,sampling]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _gpu import BANDWIDTH, GPU, Row, check, copies, floor, graph_time, record, table
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention

from truegraft.ops.interface import (
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    RowPlan,
    TokenBatch,
)
from truegraft.ops.triton import launch, production, sampling
from truegraft.ops.triton.ops import TritonOps
from truegraft.ops.triton.sampling_rows import pack

BF16 = torch.bfloat16
ROUNDED = 2.5e-3  # error of a right bfloat16 result: rounding alone makes 1.65e-3
SLOTS, LAYERS, BLOCK = 32, 8, 64
VOCABULARY, HIDDEN, INNER = 128256, 4096, 14336
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), HIDDEN),
    "o": ((4096,), HIDDEN),
    "gate_up": ((INNER, INNER), HIDDEN),
    "down": ((HIDDEN,), INNER),
    "lm_head": ((VOCABULARY,), HIDDEN),
}
LAYER = ("qkv", "o", "gate_up", "down")
SHAPE = AttentionShape(32, 8, 128)

# rows, adapters, rank, µs a layer that the prototype took and how much more than its base, in %
LAYER_CASES = (
    (1, 1, 16, 118.9, 1.9),
    (8, 8, 16, 125.3, 7.3),
    (64, 0, 16, 125.7, -0.5),
    (64, 1, 16, 129.3, 1.7),
    (64, 8, 16, 139.1, 9.4),
    (64, 32, 16, 174.1, 37.3),
    (64, 8, 64, 187.0, 47.1),
)
_lengths = random.Random(5)  # the lengths that the prototype was measured at
MIXED = tuple(int(100 * 80 ** _lengths.random()) for _ in range(64))
MIXED_VERIFY = tuple(int(100 * 80 ** _lengths.random()) for _ in range(8))
# sequences of (rows, context), µs a layer wanted (attention.md 1), whether it is one prefill
ATTENTION_CASES: tuple[tuple[str, tuple[tuple[int, int], ...], float], ...] = (
    *((f"decode {n} x 1000", ((1, 1000),) * n, us) for n, us in (
        (1, 7.6), (8, 13.9), (16, 21.1), (32, 36.5), (64, 68.1), (128, 130.0))),
    ("decode 1 x 16k", ((1, 16384),), 24.5),
    ("decode 16 x 16k", ((1, 16384),) * 16, 247.0),
    ("decode 64 x 100..8000", tuple((1, context) for context in MIXED), 145.0),
    ("verify 5, 8 x 1000", ((5, 1000),) * 8, 15.4),
    ("verify 5, 64 x 1000", ((5, 1000),) * 64, 71.3),
    ("verify 5, 8 mixed", tuple((5, context) for context in MIXED_VERIFY), 23.1),
    ("prefill 1 x 4096", ((4096, 4096),), 358.0),
    ("prefill 8 x 1000", ((1000, 1000),) * 8, 214.0),
    ("chunk 512 at 8k", ((512, 8192),), 161.0),
)  # fmt: skip


def randn(*shape: int, std: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Values of the wanted scale, made without a float32 copy of the whole."""
    return torch.randn(shape, device=GPU, dtype=dtype) * std


def _each(run: Callable[[Any], Any], inputs: Iterable[Any]) -> list[Any]:
    return [run(x) for x in inputs]


# ------------------------------------------------------------------ linears


def base_linear(name: str) -> Linear:
    sizes, k = SIZES[name]
    parts, offset = [], 0
    for size in sizes:
        parts.append(LinearPart(offset, size))
        offset += size
    return Linear(randn(offset, k, std=k**-0.5), None, tuple(parts))


def linears() -> list[Row]:
    """Base linears beside cuBLAS. ours: as in a step; plain: launched like cuBLAS, one by one.

    speed: of ours, against cuBLAS.
    """
    ops, rows = TritonOps(BF16, GPU), []
    for name, (sizes, k) in SIZES.items():
        n = sum(sizes)
        layers = [base_linear(name) for _ in range(copies(n * k * 2))]
        for m in (1, 16, 64) if name == "lm_head" else (1, 16, 64, 1024, 4096):
            rows.append(_linear_row(ops, name, layers, m, (n, k)))
            print(".", end="", flush=True)
        del layers
        gc.collect()
        torch.cuda.empty_cache()
    table("linears, µs", rows)
    totals = []
    for m in (1, 16, 64, 1024, 4096):
        chosen = [row for row in rows if row["M"] == m and row["linear"] in LAYER]
        total: Row = {"linear": "layer", "M": m}
        for key in ("floor", "cublas", "plain", "ours"):
            total[key] = sum(row[key] for row in chosen)
        totals.append({**total, "speed": total["cublas"] / total["ours"]})
    table("sum over a layer, µs", totals)
    return rows + totals


def _linear_row(
    ops: TritonOps, name: str, layers: Sequence[Linear], m: int, size: tuple[int, int]
) -> Row:
    n, k = size
    x = randn(m, k)
    plan = ops.plan_rows(torch.full((m,), -1, dtype=torch.int32, device=GPU))
    used = layers if m <= 64 else layers[:4]

    def ours() -> list[Tensor]:
        return [ops.linear(x, layer, plan) for layer in used]

    def cublas() -> list[Tensor]:
        return [torch_linear(x, layer.weight) for layer in used]

    few = slice(0, 64)
    exact = x[few].double() @ layers[0].weight.double().T
    wrong = check(f"{name} M={m}", ours()[0][few], exact, ROUNDED)
    del exact
    with launch.replaced(launch.serial):
        plain = graph_time(ours, len(used))
    theirs, overlapped = graph_time(cublas, len(used)), graph_time(ours, len(used))
    return {
        "linear": name,
        "M": m,
        "floor": floor(2 * (n * k + m * (n + k)), 2.0 * m * n * k),
        "cublas": theirs,
        "plain": plain,
        "ours": overlapped,
        "speed": theirs / overlapped,
        "error": wrong,
    }


# ------------------------------------------------------------------ layers


class Chain:
    """Eight layers of linears, each with its own weights and the adapters of every slot."""

    def __init__(self, rank: int) -> None:
        self.ops = TritonOps(BF16, GPU)
        self.rank, self.ordinals = rank, rank // 16
        self.depth = torch.full((SLOTS,), self.ordinals, dtype=torch.int32, device=GPU)
        self.layers = [[self._linear(*SIZES[name]) for name in LAYER] for _ in range(LAYERS)]
        self.bare = [
            [replace(x, parts=tuple(replace(p, pages=None) for p in x.parts)) for x in layer]
            for layer in self.layers
        ]

    def _linear(self, sizes: tuple[int, ...], k: int) -> Linear:
        parts, offset = [], 0
        for size in sizes:
            parts.append(LinearPart(offset, size, self._pages(k, size)))
            offset += size
        return Linear(randn(offset, k, std=k**-0.5), None, tuple(parts))

    def _pages(self, k: int, n: int) -> LoraPages:
        count = SLOTS * self.ordinals
        pages = self.ops.new_pages((count, SLOTS, self.ordinals), k, n)
        pages.a.normal_(std=k**-0.5)
        pages.b.normal_(std=0.25)
        pages.page_of.copy_(torch.randperm(count).view(SLOTS, -1))
        pages.rank.fill_(self.rank)
        pages.scale.fill_(1.0)
        return pages

    def slots(self, rows: int, adapters: int) -> Tensor:
        """Rows that take turns among some adapters; 0: base."""
        self.adapters = adapters
        if not adapters:
            return torch.full((rows,), -1, dtype=torch.int32, device=GPU)
        ids = torch.randperm(SLOTS)[:adapters].int()
        return ids[torch.arange(rows) % adapters].to(GPU)

    def run(self, xs: Sequence[Tensor], slots: Tensor, with_adapters: bool) -> list[Tensor]:
        """A step's linears; the row plan is part of it, as it is part of a step's graph."""
        plan = self.plan(slots, with_adapters)
        layers = self.layers if with_adapters else self.bare
        return [
            self.ops.linear(x, held, plan)
            for layer in layers
            for x, held in zip(xs, layer, strict=True)
        ]

    def plan_time(self, slots: Tensor, with_adapters: bool) -> float:
        return graph_time(lambda: self.plan(slots, with_adapters), 1)

    def plan(self, slots: Tensor, with_adapters: bool) -> RowPlan:
        depth = self.depth if with_adapters else None
        return self.ops.plan_rows(slots, depth, self.adapters * self.ordinals)

    def layer_time(self, xs: Sequence[Tensor], slots: Tensor, with_adapters: bool) -> float:
        """µs a layer, less the row plan, which a step makes once."""
        whole = graph_time(lambda: self.run(xs, slots, with_adapters), 1)
        return (whole - self.plan_time(slots, with_adapters)) / LAYERS

    def expected(self, x: Tensor, number: int, slots: Tensor) -> Tensor:
        """One linear of the first layer in float64, S rounded as the definition says."""
        held = self.layers[0][number]
        y = x.double() @ held.weight.double().T
        for row, slot in enumerate(slots.tolist()):
            for part in held.parts if slot >= 0 else ():
                pages = part.pages
                assert pages is not None
                columns = slice(part.offset, part.offset + part.size)
                for page in pages.page_of[slot].tolist():
                    s = (x[row].double() @ pages.a[page].double().T).to(BF16).double()
                    y[row, columns] += s @ pages.b[page].double()
        return y


def layers() -> list[Row]:
    """Chains of linears with adapters. base: plain launches, no adapters; the % are against it."""
    rows: list[Row] = []
    for rank in sorted({case[2] for case in LAYER_CASES}):
        chain = Chain(rank)
        bases: dict[int, tuple[float, float]] = {}
        for m, adapters, case_rank, *wanted in LAYER_CASES:
            if case_rank == rank:
                rows.append(_layer_row(chain, (m, adapters), wanted, bases))
                print(".", end="", flush=True)
        del chain
        gc.collect()
        torch.cuda.empty_cache()
    table("8 layers of linears, µs a layer", rows)
    return rows


def _layer_row(
    chain: Chain,
    case: tuple[int, int],
    wanted: Sequence[float],
    bases: dict[int, tuple[float, float]],
) -> Row:
    m, adapters = case
    xs = [randn(m, SIZES[name][1]) for name in LAYER]
    slots = chain.slots(m, adapters)
    found = chain.run(xs, slots, with_adapters=True)
    wrong = max(
        check(f"{name} {m}/{adapters}", found[i], chain.expected(xs[i], i, slots), ROUNDED)
        for i, name in enumerate(LAYER)
    )
    if m not in bases:
        base = torch.full((m,), -1, dtype=torch.int32, device=GPU)
        with launch.replaced(launch.serial):
            plain = chain.layer_time(xs, base, with_adapters=False)
        bases[m] = plain, chain.layer_time(xs, base, with_adapters=False)
    alone, dependent = bases[m]
    ours = chain.layer_time(xs, slots, with_adapters=True)
    width = sum(k * len(sizes) + sum(sizes) for sizes, k in (SIZES[name] for name in LAYER))
    weights = sum(sum(sizes) * k for sizes, k in (SIZES[name] for name in LAYER))
    return {
        "rows": m,
        "adapters": adapters,
        "rank": chain.rank,
        "floor": floor(2 * (weights + adapters * chain.rank * width)),
        "base": alone,
        "base dependent": dependent,
        "ours": ours,
        "overhead %": 100 * (ours / alone - 1),
        "wanted %": wanted[1],
        "wanted": wanted[0],
        "plan": chain.plan_time(slots, with_adapters=True),
        "error": wrong,
    }


# ------------------------------------------------------------------ attention


def attention_batch(cases: Sequence[tuple[int, int]]) -> TokenBatch:
    """The last `rows` rows of sequences of `context` tokens, over shuffled blocks."""
    counts = torch.tensor([rows for rows, _ in cases])
    starts = torch.tensor([context - rows for rows, context in cases])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    owner = torch.repeat_interleave(torch.arange(len(cases)), counts)
    total = int(offsets[-1])
    positions = torch.arange(total) - offsets[owner] + starts[owner]
    blocks = [-(-context // BLOCK) for _, context in cases]
    tables = torch.zeros(len(cases), max(blocks), dtype=torch.int32)
    order, first = torch.randperm(sum(blocks)).int(), 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[first : first + count]
        first += count
    return TokenBatch(
        num_tokens=total,
        token_ids=torch.zeros(total, dtype=torch.int64, device=GPU),
        positions=positions.to(GPU),
        slots=torch.full((total,), -1, dtype=torch.int32, device=GPU),
        kv_block=tables[owner, positions // BLOCK].long().to(GPU),
        kv_offset=(positions % BLOCK).to(GPU),
        seq_row=torch.arange(len(cases), device=GPU),
        seq_offset=offsets.to(GPU),
        seq_start=starts.to(GPU),
        block_tables=tables.to(GPU),
        max_query=int(counts.max()),
        max_context=max(context for _, context in cases),
        total_context=sum(context for _, context in cases),
    )


def attention() -> list[Row]:
    """One layer's attention, without the step's plan (its column), over rotated caches."""
    ops, rows = TritonOps(BF16, GPU), []
    for name, cases, wanted in ATTENTION_CASES:
        rows.append(_attention_row(ops, name, cases, wanted))
        print(".", end="", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    table("attention 32/8 heads of 128, bfloat16, µs a layer", rows)
    return rows


def _attention_row(
    ops: TritonOps, name: str, cases: Sequence[tuple[int, int]], wanted: float
) -> Row:
    batch = attention_batch(cases)
    num_blocks = sum(-(-context // BLOCK) for _, context in cases)
    size = (num_blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
    used = copies(2 * 2 * num_blocks * SHAPE.num_kv_heads * BLOCK * SHAPE.head_dim, 3, 48)
    caches = [KVCache(randn(*size), randn(*size)) for _ in range(used)]
    q = randn(batch.num_tokens, SHAPE.num_heads, SHAPE.head_dim)
    plan = ops.plan_attention(batch, [SHAPE])

    def ours() -> list[Tensor]:
        return [ops.attention(q, SHAPE, cache, plan) for cache in caches]

    rows = sorted({0, 1, batch.num_tokens // 2, batch.num_tokens - 1} - {batch.num_tokens})
    exact = _expected_attention(q, caches[0], batch, rows)
    wrong = check(name, ours()[0][rows], exact, ROUNDED)
    kv = sum(context for _, context in cases) * 2 * SHAPE.num_kv_heads * SHAPE.head_dim
    pairs = sum(n * (2 * context - n + 1) / 2 for n, context in cases)
    return {
        "case": name,
        "floor": floor(2 * (kv + 2 * q.numel()), 4 * pairs * SHAPE.num_heads * SHAPE.head_dim),
        "ours": (took := graph_time(ours, used)),
        "wanted": wanted,
        "of wanted": took / wanted,
        "sdpa": _sdpa_time(q, caches, batch, cases),
        "plan": graph_time(lambda: ops.plan_attention(batch, [SHAPE]), 1),
        "error": wrong,
    }


def _gathered(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """A sequence's keys or values: [G, context, D]."""
    blocks = cache[table[: -(-context // BLOCK)].long()]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context]


def _expected_attention(
    q: Tensor, cache: KVCache, batch: TokenBatch, rows: Sequence[int]
) -> Tensor:
    """Some rows in float64: [rows, H·D]."""
    offsets, found = batch.seq_offset.tolist(), []
    for row in rows:
        sequence = next(i for i, end in enumerate(offsets[1:]) if row < end)
        context = int(batch.positions[row]) + 1
        table = batch.block_tables[sequence]
        k, v = (_gathered(held, table, context).double() for held in (cache.k, cache.v))
        grouped = q[row].double().view(SHAPE.num_kv_heads, SHAPE.group, -1)
        weights = (grouped @ k.transpose(1, 2) * SHAPE.head_dim**-0.5).softmax(-1)
        found.append((weights @ v).flatten())
    return torch.stack(found)


def _sdpa_time(
    q: Tensor, caches: Sequence[KVCache], batch: TokenBatch, cases: Sequence[tuple[int, int]]
) -> float | None:
    """torch's attention on gathered keys, for orientation; None where it has no such mask."""
    (rows, context), *others = cases
    if any(other != (rows, context) for other in others) or rows not in (1, context):
        return None
    count = len(cases)
    kv = [
        tuple(
            torch.stack([_gathered(held, table, context) for table in batch.block_tables])
            for held in (cache.k, cache.v)
        )
        for cache in caches
    ]
    asked = q.view(count, rows, SHAPE.num_heads, -1).transpose(1, 2)

    def run() -> list[Tensor]:
        return [
            scaled_dot_product_attention(asked, k, v, is_causal=rows > 1, enable_gqa=True)
            for k, v in kv
        ]

    return graph_time(run, len(caches))


# ------------------------------------------------------------------ row-wise


def rowwise() -> list[Row]:
    """Row-wise ops over rotated inputs; at few rows they cost a launch, whatever the bytes."""
    ops, rows = TritonOps(BF16, GPU), []
    for m in (1, 64, 4096):
        for name, size, run in _rowwise_cases(ops, m):
            used = copies(size, least=8)
            took = graph_time(partial(_each, run, range(used)), used)
            rows.append({"op": name, "M": m, "floor": floor(size), "ours": took})
    table("row-wise, µs", rows)
    return rows


def _rowwise_cases(ops: TritonOps, m: int) -> list[tuple[str, int, Callable[[int], Any]]]:
    """Name, bytes, and a call on its number-th inputs."""
    most = 64
    count = min(most, max(8, int(1.2e9 / (m * 2 * 2 * INNER))))
    x, r = randn(count, m, HIDDEN), randn(count, m, HIDDEN)
    weight, wide = randn(HIDDEN), randn(count, m, 2 * INNER)
    qkv = randn(count, m, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim)
    batch = attention_batch([(1, 500)] * m if m <= 64 else [(m, m)])
    blocks = int(batch.block_tables.max()) + 1
    size = (blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
    cache = KVCache(
        torch.zeros(size, dtype=BF16, device=GPU), torch.zeros(size, dtype=BF16, device=GPU)
    )
    cos, sin = randn(2, m, SHAPE.head_dim // 2, dtype=torch.float32)
    embedding = Embedding(randn(VOCABULARY, HIDDEN))
    ids = torch.randint(VOCABULARY, (count, m), device=GPU)
    plan: RowPlan = ops.plan_rows(torch.full((m,), -1, dtype=torch.int32, device=GPU))
    r64 = x[0].double() + r[0].double()
    normed = r64.to(BF16).double()
    exact = normed * (normed.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    check("add_norm", ops.add_norm(x[0], r[0], weight, 1e-5)[0], exact, ROUNDED)
    gate, up = wide[0].double().chunk(2, -1)
    check("silu_mul", ops.silu_mul(wide[0]), gate * gate.sigmoid() * up, ROUNDED)
    tables = (cos, sin)
    return [
        (
            "add_norm",
            4 * 2 * m * HIDDEN,
            lambda i: ops.add_norm(x[i % count], r[i % count], weight, 1e-5),
        ),
        ("silu_mul", 3 * 2 * m * INNER, lambda i: ops.silu_mul(wide[i % count])),
        (
            "rope_write",
            2 * qkv[0].nbytes,
            lambda i: ops.rope_write(qkv[i % count], SHAPE, tables, None, cache, batch),
        ),
        ("embed", 2 * 2 * m * HIDDEN, lambda i: ops.embed(ids[i % count], embedding, plan)),
    ]


# ------------------------------------------------------------------ sampling


def sampling_section() -> list[Row]:
    """Ops on logits [L, 128256] float32. drawn: temperature 0.8 and what is named."""
    plain = replace(production.SAMPLING[-1], presence_penalty=0.0, frequency_penalty=0.0)
    plain = replace(plain, repetition_penalty=1.0, bias=(), allowed=None, banned=())
    kinds = {
        "temperature": replace(plain, top_k=0, top_p=1.0, min_p=0.0),
        "min-p 0.05": replace(plain, top_k=0, top_p=1.0),
        "top-k 40": replace(plain, top_p=1.0, min_p=0.0),
        "top-p 0.9": replace(plain, top_k=0, min_p=0.0),
        "top-k, top-p, min-p": plain,
    }
    rows: list[Row] = []
    for count in (1, 64):
        size = count * VOCABULARY * 4
        used = copies(size, least=8)
        logits = [randn(count, VOCABULARY, std=3.0, dtype=torch.float32) for _ in range(used)]
        greedy = pack([None] * count, VOCABULARY, GPU)
        chosen = sampling.sample(logits[0], greedy)
        if not torch.equal(chosen, logits[0].max(-1).indices):
            raise SystemExit("argmax is wrong")
        check("logprobs", sampling.logprobs(logits[0]), logits[0].double().log_softmax(-1), 1e-6)
        cases: list[tuple[str, int, Callable[[Tensor], Any]]] = [
            ("argmax", size, partial(sampling.sample, batch=greedy)),
            ("torch argmax", size, lambda x: x.max(-1)),
            ("logprobs", 2 * size, sampling.logprobs),
            ("torch log_softmax", 2 * size, lambda x: x.log_softmax(-1)),
        ]
        for name, row in kinds.items():
            batch = pack([replace(row, seed=i) for i in range(count)], VOCABULARY, GPU)
            cases.append((name, size, partial(sampling.sample, batch=batch)))
        for name, moved, run in cases:
            took = graph_time(partial(_each, run, logits), used)
            rows.append({"op": name, "L": count, "floor": floor(moved), "ours": took})
        del logits
    table("sampling, µs", rows)
    return rows


SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "linears": linears,
    "layers": layers,
    "attention": attention,
    "rowwise": rowwise,
    "sampling": sampling_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench gpu-kernels")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections: a,b,…; default: all")
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no section {sorted(unknown)}; there are: {', '.join(SECTIONS)}")
    torch.manual_seed(time.time_ns() % 2**32)  # fresh inputs in each run
    print(f"{torch.cuda.get_device_name()}, floors at {BANDWIDTH / 1e12} TB/s", flush=True)
    held: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        rows = SECTIONS[name]()
        held = record("gpu-kernels", name, rows)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(json.dumps(held))


if __name__ == "__main__":
    main()
