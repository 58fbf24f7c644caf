"""The proof at load: on this machine and these shapes, no row's bits follow its neighbours.

Each op of `interface.py` computes some rows alone and again among random rows, at several places
of every call size that the back end uses; results are compared bit for bit. `choose_tiles` takes
the first of an op family's candidates that passes, down to one row at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from truegraft.errors import ExactnessError
from truegraft.ops.interface import (
    SPLIT,
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    QKNorm,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.reference import ReferenceOps, Tiles
from truegraft.ops.reference_attention import BLOCK

SEQUENCE = SPLIT + 44  # tokens: crosses a split and several blocks
LARGE_STEP = 528  # rows of row-wise ops: more than a default step has
STEP = 256  # rows of linears: calls of every size, and units of every size for each adapter
LOGITS_ROWS = 32  # sampling takes each row by itself: some are as good as many
RANKS = (16, 32)  # of the proof's two adapters: one page and two

_CANDIDATES: dict[str, tuple[Any, ...]] = {
    "linear": (
        (2, 4, 8, 16, 32, 64, 128, 256),
        (2, 4, 8, 16, 32, 64),
        (4, 16, 32, 64, 128, 256),
        (4, 16, 32, 64),
        (16, 64, 256),
        (16, 64),
        (16,),
        (32,),
        (1,),
    ),
    "attention": ((4, 64), (8, 64), (16, 64), (8,), (16,), (32,), (1,)),
    "lora": ((4, 32), (8, 32), (16, 64), (8,), (16,), (1,)),
}


@dataclass(frozen=True)
class Shapes:
    """Every distinct shape that a model gives the ops.

    linears: (in, out of each fused part); adapters: whether they carry LoRA; embedding:
    (vocabulary, hidden); widths: of norms; inner: of silu_mul.
    """

    linears: frozenset[tuple[int, tuple[int, ...]]]
    adapters: bool
    embedding: tuple[int, int]
    widths: frozenset[int]
    inner: frozenset[int]
    attention: frozenset[AttentionShape]
    qk_norm: bool


def choose_tiles(
    shapes: Shapes, dtype: torch.dtype, make: Callable[[torch.dtype, Tiles], ReferenceOps]
) -> Tiles:
    """The fastest tiles under which every op passes, in float32 and in the model dtype.

    Tiles are chosen in float32: sums that differ by an ulp mostly round alike in bfloat16 (and the
    matrix products are float32 in any dtype, so that they need no second proof). Warns,
    naming the cost, where only one row at a time passes; raises ExactnessError if nothing does.
    """
    tiles = Tiles()
    for family, candidates in _CANDIDATES.items():
        for candidate in candidates:
            chosen = replace(tiles, **{family: candidate})
            failure = next(_failures(make(torch.float32, chosen), shapes, family), "")
            if not failure:
                break
        else:
            raise ExactnessError(_refusal(failure))
        tiles = chosen
        if candidate == (1,):
            warnings.warn(
                f"{family} runs one row at a time: no faster tile is exact here.", stacklevel=2
            )
    left = [(torch.float32, "rowwise")]
    if dtype != torch.float32:
        left += [(dtype, family) for family in ("attention", "lora", "rowwise")]
    for proved_in, family in left:
        for failure in _failures(make(proved_in, tiles), shapes, family):
            raise ExactnessError(_refusal(failure))
    return tiles


def _refusal(failure: str) -> str:
    return (
        f"{failure}: a row's bits follow its neighbours on this machine, so the engine does not "
        "start. Try another thread count (OMP_NUM_THREADS) or torch build."
    )


def _failures(ops: ReferenceOps, shapes: Shapes, family: str) -> Iterator[str]:
    """Name each op and shape of a family that breaks the contract."""
    proof = _Proof(ops)
    checks: dict[str, Iterator[tuple[str, bool]]] = {
        "linear": proof.linears(shapes),
        "attention": proof.attentions(shapes),
        "lora": proof.adapters(shapes),
        "rowwise": proof.rowwise(shapes),
    }
    return (name for name, passed in checks[family] if not passed)


class _Proof:
    """Runs ops on rows alone and in company. Random values are seeded: a proof is repeatable."""

    def __init__(self, ops: ReferenceOps) -> None:
        self._ops = ops
        self._random = torch.Generator().manual_seed(0)
        sizes = {*ops.tiles.linear, *ops.tiles.lora, ops.row_multiple * 3, LARGE_STEP}
        self._counts = sorted(-(-size // ops.row_multiple) * ops.row_multiple for size in sizes)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self._ops.dtype)

    def _slots(self, count: int, num_slots: int) -> Tensor:
        return torch.randint(-1, num_slots, (count,), generator=self._random, dtype=torch.int32)

    def linears(self, shapes: Shapes) -> Iterator[tuple[str, bool]]:
        for k, sizes in sorted(shapes.linears):
            yield (
                f"linear {k}→{'+'.join(map(str, sizes))}",
                self._linear_rows(k, sizes, adapters=False),
            )

    def adapters(self, shapes: Shapes) -> Iterator[tuple[str, bool]]:
        for k, sizes in sorted(shapes.linears) if shapes.adapters else ():
            yield (
                f"linear with LoRA {k}→{'+'.join(map(str, sizes))}",
                self._linear_rows(k, sizes, adapters=True),
            )
        vocabulary, hidden = shapes.embedding
        pages = self._pages(vocabulary, hidden) if shapes.adapters else None
        table = Embedding(self._randn(vocabulary, hidden), pages)

        def embed(x: Tensor, slots: Tensor) -> Tensor:
            return self._ops.embed(x[:, 0].long(), table, self._ops.plan_rows(slots))

        ids = torch.randint(0, vocabulary, (max(self._counts), 1), generator=self._random)
        yield "embedding", self._same_rows(ids, self._slots(len(ids), len(RANKS)), embed)

    def _pages(self, k: int, n: int) -> LoraPages:
        """Two slots: ranks 16 and 32."""
        pages = self._ops.new_pages((3, len(RANKS), 2), k, n)
        pages.a.copy_(self._randn(*pages.a.shape))
        pages.b.copy_(self._randn(*pages.b.shape))
        pages.page_of.copy_(torch.tensor([[1, -1], [2, 0]]))
        pages.scale.copy_(torch.tensor([0.5, 2.0]))
        return pages

    def _linear_rows(self, k: int, sizes: Sequence[int], *, adapters: bool) -> bool:
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = tuple(
            LinearPart(offset, n, self._pages(k, n) if adapters else None)
            for offset, n in zip(offsets, sizes, strict=True)
        )
        width = sum(sizes)
        bias = self._randn(width) if adapters else None
        linear = Linear(self._ops.pack(self._randn(width, k)), bias, parts)

        def run(x: Tensor, slots: Tensor) -> Tensor:
            return self._ops.linear(x, linear, self._ops.plan_rows(slots), torch.float32)

        slots = self._slots(STEP, len(RANKS) if adapters else 0)
        return self._same_rows(self._randn(STEP, k), slots, run)

    def _same_rows(self, x: Tensor, slots: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Whether rows of x keep their bits in calls of every size and at every place."""
        whole = run(x, slots)
        for count in (count for count in self._counts if count <= len(x)):
            for start in {0, len(x) - count}:
                part = slice(start, start + count)
                if not _equal(run(x[part], slots[part]), whole[part]):
                    return False
            order = torch.randperm(len(x), generator=self._random)[:count]
            if not _equal(run(x[order], slots[order]), whole[order]):
                return False
        return True

    def rowwise(self, shapes: Shapes) -> Iterator[tuple[str, bool]]:
        ops, count = self._ops, max(self._counts)
        none = torch.full((count,), -1, dtype=torch.int32)
        for width in sorted(shapes.widths):
            weight, residual = self._randn(width), self._randn(width)
            yield (
                f"add_norm {width}",
                self._same_rows(self._randn(count, width), none, self._norm(weight, residual)),
            )
        for inner in sorted(shapes.inner):
            x = self._randn(count, 2 * inner)
            yield f"silu_mul {inner}", self._same_rows(x, none, lambda x, _: ops.silu_mul(x))
        few = torch.randn(LOGITS_ROWS, shapes.embedding[0], generator=self._random)
        yield "logprobs", self._same_rows(few, none, lambda x, _: ops.logprobs(x))
        yield "sample", self._same_rows(few, none, self._draw)
        for shape in sorted(shapes.attention, key=repr):
            yield f"rope_write {shape}", self._rope_rows(shape, shapes.qk_norm)

    def _norm(self, weight: Tensor, residual: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, _: self._ops.add_norm(x, residual.expand_as(x), weight, 1e-5)[0]

    def _draw(self, logits: Tensor, _: Tensor) -> Tensor:
        """Adjust and sample as two kinds of request do; returns what the noise was added to."""
        history = torch.arange(8)
        row = SamplingRow(
            temperature=0.8,
            top_k=40,
            top_p=0.9,
            min_p=0.01,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            prompt=history,
            output=history,
            bias=((3, 1.5),),
            allowed=None,
            banned=(1,),
            seed=7,
            sample_index=0,
            position=5,
        )
        rows = [row] * len(logits)
        return self._ops.sample(self._ops.adjust(logits, rows), rows)

    def _rope_rows(self, shape: AttentionShape, with_norm: bool) -> bool:
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        cos, sin = torch.randn(2, shape.head_dim // 2, generator=self._random)
        norm = QKNorm(self._randn(shape.head_dim), self._randn(shape.head_dim), 1e-6)

        def run(x: Tensor, _: Tensor) -> Tensor:
            count = len(x)
            cache = _empty_cache(shape, -(-count // BLOCK), self._ops.dtype)
            batch = _batch([(0, 0, count)], count, torch.arange(len(cache.k)).view(1, -1))
            tables = (cos.expand(count, -1), sin.expand(count, -1))
            q = self._ops.rope_write(x, shape, tables, norm if with_norm else None, cache, batch)
            written = [
                c.transpose(1, 2).flatten(0, 1)[:count].flatten(1) for c in (cache.k, cache.v)
            ]
            return torch.cat((q.flatten(1), *written), dim=1)

        x = self._randn(max(self._counts), width)
        return self._same_rows(x, torch.zeros(len(x)), run)

    def attentions(self, shapes: Shapes) -> Iterator[tuple[str, bool]]:
        for shape in sorted(shapes.attention, key=repr):
            yield f"attention {shape}", self._attention_rows(shape)

    def _attention_rows(self, shape: AttentionShape) -> bool:
        """A sequence in one prefill, in chunks beside others, and row by row: the same rows."""
        num_blocks = -(-SEQUENCE // BLOCK)
        cache = _empty_cache(shape, 2 * num_blocks, self._ops.dtype)
        cache.k.copy_(self._randn(*cache.k.shape))
        cache.v.copy_(self._randn(*cache.v.shape))
        order = torch.randperm(2 * num_blocks, generator=self._random).view(2, -1)
        q = self._randn(2, SEQUENCE, shape.num_heads, shape.head_dim)

        def run(parts: Sequence[tuple[int, int, int]]) -> Tensor:
            """Attention of (sequence, start, count) parts in one call."""
            rows = torch.cat([q[row, start : start + count] for row, start, count in parts])
            padding = -len(rows) % self._ops.row_multiple
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding))
            batch = _batch(parts, len(padded), order)
            plan = self._ops.plan_attention(batch, [shape])
            return self._ops.attention(padded, shape, cache, plan)[: len(rows)]

        whole = run([(0, 0, SEQUENCE)])
        last = SEQUENCE - 1
        chunked = torch.cat([run([(0, 0, 37)]), run([(1, 0, 5), (0, 37, last - 37)])[5:]])
        alone = [(at, run([(0, at, 1)])) for at in (0, 63, 64, SPLIT - 1, SPLIT, last)]
        mixed = run([(1, SEQUENCE - 5, 5), (0, last, 1), (1, 40, 1), (0, 100, 4)])
        return (
            _equal(chunked, whole[:last])
            and all(_equal(row, whole[at : at + 1]) for at, row in alone)
            and _equal(mixed[5:6], whole[last:])
            and _equal(mixed[7:], whole[100:104])
        )


def _empty_cache(shape: AttentionShape, num_blocks: int, dtype: torch.dtype) -> KVCache:
    size = (num_blocks, shape.num_kv_heads, BLOCK, shape.head_dim)
    return KVCache(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))


def _batch(parts: Sequence[tuple[int, int, int]], num_rows: int, tables: Tensor) -> TokenBatch:
    """A batch of (sequence, start, count) parts over block tables [sequences, blocks]."""
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
    owner = torch.cat([torch.full((count,), row) for row, _, count in parts])
    offsets = torch.tensor([0, *(count for *_, count in parts)]).cumsum(0)
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    return TokenBatch(
        num_tokens=len(positions),
        token_ids=zeros,
        positions=positions,
        slots=zeros.int() - 1,
        kv_block=tables[owner, positions // BLOCK],
        kv_offset=positions % BLOCK,
        seq_row=torch.tensor([row for row, *_ in parts]),
        seq_offset=offsets,
        seq_start=torch.tensor([start for _, start, _ in parts]),
        block_tables=tables,
        max_query=max(count for *_, count in parts),
        max_context=max(start + count for _, start, count in parts),
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality: -0.0 differs from 0.0, a NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool((left.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8)).all())
