"""Row-wise ops and the embedding on the GPU: a row's bits are its own, and right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from guard import poisoned
from kernel_cases import error, rounding_floor, same_bits
from torch import Tensor

from truegraft.ops.interface import (
    PAGE_RANK,
    AttentionShape,
    Embedding,
    KVCache,
    LoraPages,
    QKNorm,
    TokenBatch,
)
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.triton import embedding, memory, rowwise

GPU = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 200
PAGE = 64
NAN, INF = math.nan, math.inf
EPS = 1e-6

# Width, dtype: of demo models, of usual ones, and an odd one whose rows are read byte by byte.
WIDTHS = [
    (192, BF16),
    (320, FP32),
    (333, FP16),
    (896, BF16),
    (2048, FP16),
    (4096, BF16),
    (4096, FP32),
    (14336, BF16),
    (16384, FP32),
]
HEADS = [
    (32, 8, 128, BF16),
    (14, 2, 64, BF16),
    (5, 1, 80, FP16),
    (32, 32, 96, BF16),
    (8, 1, 256, FP16),
    (3, 3, 64, FP32),
]
TABLES = [(32000, 4096, BF16), (1003, 320, FP32), (501, 333, FP16)]  # vocabulary, width
SIZES = (2, 3, 8, 17, 64)  # of random batches

Run = Callable[[Tensor], tuple[Tensor, ...]]
with_widths = pytest.mark.parametrize(("width", "dtype"), WIDTHS)
with_heads = pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), HEADS)
with_tables = pytest.mark.parametrize(("vocabulary", "width", "dtype"), TABLES)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs hold NaN before they are written."""
    with memory.allocator(poisoned):
        yield


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, std: float = 1.0) -> Tensor:
    random = torch.Generator(device=GPU).manual_seed(seed)
    return (torch.randn(shape, generator=random, device=GPU) * std).to(dtype)


def every() -> Tensor:
    return torch.arange(ROWS, device=GPU)


def permuted(seed: int) -> Tensor:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(GPU)


def assert_rows_are_their_own(run: Run) -> None:
    """run: computes the rows of an index as one batch. Alone, among any others, and again."""
    whole = run(every())
    alone = [every()[row : row + 1] for row in (0, 1, ROWS // 2, ROWS - 1)]
    some = [permuted(size)[:size] for size in SIZES]
    for index in (*alone, *some, permuted(0)):
        for got, want in zip(run(index), whole, strict=True):
            assert same_bits(got, want[index]), f"{len(index)} rows"
    for _ in range(20):
        assert all(map(same_bits, run(every()), whole))


def assert_others_are_unmoved(run: Run, spoil: Callable[[int], None]) -> None:
    """spoil(row) makes a row's inputs NaN: no other row may change by a bit."""
    clean, victim = run(every()), ROWS // 3
    spoil(victim)
    others = every() != victim
    for got, want in zip(run(every()), clean, strict=True):
        assert same_bits(got[others], want[others]) and got[victim].isnan().any()


def assert_accurate(y: Tensor, exact: Tensor, roundings: float = 4) -> None:
    """Within twice the error of rounding alone, and nearly every value correctly rounded.

    float32: within `roundings` times, since each operation on the way rounds as coarsely as the
    last.
    """
    assert y.isfinite().all()
    floor = rounding_floor(exact, y.dtype)
    assert error(y, exact) <= (roundings if y.dtype == FP32 else 2) * floor
    if y.dtype != FP32:
        assert float((y != exact.to(y.dtype)).double().mean()) < 0.01


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


# ------------------------------------------------------------------ add + norm


@with_widths
def test_add_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = randn(ROWS, width, dtype=dtype), randn(ROWS, width, dtype=dtype, seed=1, std=5)
    weight = randn(width, dtype=dtype, seed=2)

    def run(index: Tensor) -> tuple[Tensor, ...]:
        return rowwise.add_norm(x[index], residual[index], weight, EPS)

    assert_rows_are_their_own(run)
    y, r = run(every())
    assert same_bits(r, (x.float() + residual.float()).to(dtype))
    assert_accurate(y, rms_norm(r, weight))
    first, _ = rowwise.add_norm(r, None, weight, EPS)
    assert same_bits(first, y), "with and without a residual"

    index = torch.cat((permuted(1)[:29], every()[:2], every()[:2]))
    for got, want in zip(rowwise.add_norm(x, residual, weight, EPS, index), (y, r), strict=True):
        assert same_bits(got, want[index])
    for got, want in zip(rowwise.add_norm(r, None, weight, EPS, index), (y, r), strict=True):
        assert same_bits(got, want[index])

    def spoil(row: int) -> None:
        x[row, width // 2] = NAN

    assert_others_are_unmoved(run, spoil)


# ------------------------------------------------------------------ activation


@with_widths
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    x = randn(ROWS, 2 * width, dtype=dtype, std=4)

    def run(index: Tensor) -> tuple[Tensor, ...]:
        return (rowwise.silu_mul(x[index]),)

    assert_rows_are_their_own(run)
    (y,) = run(every())
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    assert_accurate(y, exact)
    info = torch.finfo(dtype)
    # float32: exp2 of the chip alone is up to 2 off.
    allowed = (5 if dtype == FP32 else 0.51) * info.eps * exact.abs().clamp(min=info.tiny)
    assert bool(((y.double() - exact).abs() <= allowed).all()), "in the worst place too"

    def spoil(row: int) -> None:
        x[row] = NAN

    assert_others_are_unmoved(run, spoil)


def test_silu_mul_at_the_edges() -> None:
    edges = [0.0, -0.0, INF, -INF, NAN, 80.0, 86.9, 87.1, 88.0, 104.0, 1e4, 3e38]
    gate = torch.tensor([[*edges, *(-edge for edge in edges)]], device=GPU)
    for factor in (1.0, -1.0, 1e30):
        up = torch.full_like(gate, factor)
        y = rowwise.silu_mul(torch.cat((gate, up), dim=-1))
        want = gate / ((-gate).exp() + 1.0) * up
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.signbit() | y.isnan(), want.signbit() | y.isnan())
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-37, equal_nan=True)


# ------------------------------------------------------------------ rope


class Rope:
    """ROWS rows, each with a place of its own somewhere in a poisoned cache."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = AttentionShape(heads, kv_heads, dim), dtype
        self.qkv = randn(ROWS, (heads + 2 * kv_heads) * dim, dtype=dtype)
        angles = randn(ROWS, dim // 2, dtype=FP32, seed=1, std=100)
        self.cos, self.sin = angles.cos() * 1.25, angles.sin() * 1.25
        self.norm = QKNorm(randn(dim, dtype=dtype, seed=2), randn(dim, dtype=dtype, seed=3), EPS)
        self.blocks = ROWS // 30 + 1
        random = torch.Generator().manual_seed(4)
        place = torch.randperm(self.blocks * PAGE, generator=random)[:ROWS].to(GPU)
        self.kv_block, self.kv_offset = place // PAGE, place % PAGE

    def batch(self, index: Tensor, tokens: int | None = None) -> TokenBatch:
        numbers = torch.zeros(len(index), dtype=torch.int64, device=GPU)
        return TokenBatch(
            num_tokens=len(index) if tokens is None else tokens,
            token_ids=numbers,
            positions=numbers,
            slots=numbers.int(),
            kv_block=self.kv_block[index][:tokens].contiguous(),
            kv_offset=self.kv_offset[index][:tokens].contiguous(),
            seq_row=numbers[:1],
            seq_offset=numbers[:1],
            seq_start=numbers[:1],
            block_tables=numbers[:1, None].int(),
            max_query=len(index),
            max_context=len(index),
        )

    def cache(self) -> KVCache:
        size = (self.blocks, self.shape.num_kv_heads, PAGE, self.shape.head_dim)
        return KVCache(*(torch.full(size, 77.0, dtype=self.dtype, device=GPU) for _ in range(2)))

    def run(self, index: Tensor, batch: TokenBatch, norm: QKNorm | None) -> tuple[Tensor, ...]:
        """q, k and v of some rows, after a look at every other place of the cache."""
        cache, poison = self.cache(), self.cache()
        cos_sin = (self.cos[index], self.sin[index])
        q = rowwise.rope_write(self.qkv[index], self.shape, cos_sin, norm, cache, batch)
        written = batch.kv_block >= 0
        at = (batch.kv_block[written], slice(None), batch.kv_offset[written])
        k, v = cache.k[at], cache.v[at]
        for held, clean in ((cache.k, poison.k), (cache.v, poison.v)):
            held[at] = 77.0
            assert same_bits(held, clean), "another place was written"
        return q, k, v

    def exact(self, norm: QKNorm | None) -> tuple[Tensor, Tensor]:
        """q and k in float64, the norm rounded as the definition says."""
        shape = self.shape
        by_head = self.qkv.view(ROWS, -1, shape.head_dim).double()
        q = by_head[:, : shape.num_heads]
        k = by_head[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
        if norm is not None:
            q = rms_norm(q, norm.q).to(self.dtype).double()
            k = rms_norm(k, norm.k).to(self.dtype).double()
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        return rotated(q), rotated(k)


@with_heads
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, with_norm: bool
) -> None:
    rope = Rope(heads, kv_heads, dim, dtype)
    norm = rope.norm if with_norm else None

    def run(index: Tensor) -> tuple[Tensor, ...]:
        return rope.run(index, rope.batch(index), norm)

    assert_rows_are_their_own(run)
    q, k, v = run(every())
    for got, exact in zip((q, k), rope.exact(norm), strict=True):
        assert_accurate(got, exact)
    assert same_bits(v, rope.qkv.view(ROWS, -1, dim)[:, heads + kv_heads :])
    if norm is None:
        batch, cache = rope.batch(every()), rope.cache()
        ops, cos_sin = ReferenceOps(dtype), (rope.cos, rope.sin)
        assert same_bits(q, ops.rope_write(rope.qkv, rope.shape, cos_sin, None, cache, batch))
        assert same_bits(k, cache.k[batch.kv_block, :, batch.kv_offset])

    clean = run(every())
    victim = ROWS // 3
    rope.qkv[victim, : (heads + kv_heads) * dim] = NAN
    rope.qkv[victim, -1] = INF
    spoiled = run(every())
    others = every() != victim
    for got, want in zip(spoiled, clean, strict=True):
        assert same_bits(got[others], want[others])
    assert spoiled[0][victim].isnan().all() and spoiled[1][victim].isnan().all()
    assert spoiled[2].isfinite().all(), "the cache's values are always finite"
    assert not spoiled[2][victim, -1].any()


@with_heads
def test_padding_is_written_nowhere(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    rope = Rope(heads, kv_heads, dim, dtype)
    whole = rope.run(every(), rope.batch(every()), None)
    for tokens in (0, 1, ROWS // 2):
        q, k, v = rope.run(every(), rope.batch(every(), tokens), None)
        assert same_bits(q, whole[0])
        assert same_bits(k, whole[1][:tokens]) and same_bits(v, whole[2][:tokens])
    batch = rope.batch(every())
    hidden = every() % 3 == 1
    batch = replace(batch, kv_block=batch.kv_block.masked_fill(hidden, -1))
    q, k, v = rope.run(every(), batch, None)
    assert same_bits(q, whole[0])
    assert same_bits(k, whole[1][~hidden]) and same_bits(v, whole[2][~hidden])


@with_heads
def test_values_that_are_not_finite_are_hidden_by_their_keys(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    rope = Rope(heads, kv_heads, dim, dtype)
    clean = rope.run(every(), rope.batch(every()), None)
    broken = torch.zeros(ROWS, kv_heads, dtype=torch.bool, device=GPU)
    values = rope.qkv.view(ROWS, -1, dim)[:, heads + kv_heads :]
    for number, bad in enumerate((NAN, INF, -INF)):
        for lane in range(0, dim, 7):  # any lane of either half
            row, head = (number * 67 + lane) % ROWS, lane % kv_heads
            values[row, head, lane] = bad
            broken[row, head] = True
    q, k, v = rope.run(every(), rope.batch(every()), None)
    assert same_bits(q, clean[0])
    assert same_bits(k[~broken], clean[1][~broken]) and same_bits(v[~broken], clean[2][~broken])
    assert k[broken].isnan().all() and not v[broken].any()


# ------------------------------------------------------------------ embedding


@dataclass(frozen=True)
class Rows:
    slots: Tensor


class Table:
    """An embedding with adapters of 0 to 4 pages, and rows of every kind."""

    def __init__(self, vocabulary: int, width: int, dtype: torch.dtype) -> None:
        a = randn(9, PAGE_RANK, vocabulary, dtype=dtype, seed=1)
        b = randn(9, width, PAGE_RANK, dtype=dtype, seed=2, std=0.3)
        a[2, 5:], b[2, :, 5:] = 0.0, 0.0
        a[4], b[4] = NAN, NAN  # a free page
        table = [[2, -1, -1, -1], [6, 3, 5, 1], [-1, -1, -1, -1], [0, 8, -1, -1], [7, -1, -1, -1]]
        numbers = torch.tensor(table, dtype=torch.int32, device=GPU)
        held = torch.tensor([5, 64, 0, 32, 16], dtype=torch.int32, device=GPU)
        scale = torch.tensor([2.0, 0.3, 9.0, 0.5, 1.7], device=GPU)
        self.pages = LoraPages(a, b.transpose(1, 2), numbers, held, scale)
        self.weight = randn(vocabulary, width, dtype=dtype)
        self.weight[:, 1] = -0.0
        random = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, vocabulary, (ROWS,), generator=random).to(GPU)
        self.slots = torch.randint(-1, 5, (ROWS,), generator=random, dtype=torch.int32).to(GPU)

    def run(self, index: Tensor) -> tuple[Tensor, ...]:
        table = Embedding(self.weight, self.pages)
        return (embedding.embed(self.tokens[index], table, Rows(self.slots[index])),)

    def base(self, index: Tensor) -> tuple[Tensor, ...]:
        rows = Rows(torch.full_like(self.slots[index], -1))
        return (embedding.embed(self.tokens[index], Embedding(self.weight), rows),)

    def chain(self, wide: torch.dtype) -> Tensor:
        """Every row, one product and one sum at a time, in the order of the definition."""
        pages, slots = self.pages, self.slots.clamp(min=0)
        total = self.weight[self.tokens].to(wide)
        for ordinal in range(pages.page_of.shape[1]):
            page = pages.page_of[slots, ordinal].masked_fill(self.slots < 0, -1)
            has, page = (page >= 0)[:, None], page.clamp(min=0)
            for rank in range(PAGE_RANK):
                s = pages.scale[slots] * pages.a[page, rank, self.tokens].float()
                s = s.to(self.weight.dtype).to(wide)[:, None]
                total = torch.where(has, total + s * pages.b[page, rank].to(wide), total)
        return total


@with_tables
def test_embed(vocabulary: int, width: int, dtype: torch.dtype) -> None:
    table = Table(vocabulary, width, dtype)
    assert_rows_are_their_own(table.run)
    assert_rows_are_their_own(table.base)
    (y,), (base,) = table.run(every()), table.base(every())
    assert_accurate(y, table.chain(torch.float64), roundings=16)  # up to 64 sums
    if dtype != FP32:  # products are exact in float32: a fused sum is a sum
        assert same_bits(y, table.chain(FP32).to(dtype))
    assert same_bits(base, table.weight[table.tokens])
    plain = (table.slots == -1) | (table.slots == 2)
    assert 0 < int(plain.sum()) < ROWS
    assert same_bits(y[plain], base[plain])
    assert (y[~plain] != base[~plain]).any(-1).all(), "no adapter is left out"

    def spoil(row: int) -> None:
        victim = int(table.tokens[row])
        table.tokens[table.tokens == victim] = (victim + 1) % vocabulary
        table.tokens[row] = victim
        table.weight[victim] = NAN

    tokens = table.tokens.clone()
    spoil(ROWS // 3)
    same = (table.tokens == tokens) & (every() != ROWS // 3)
    (spoiled,) = table.run(every())
    assert same_bits(spoiled[same], y[same]) and spoiled[ROWS // 3].isnan().any()


@with_tables
def test_tokens_and_slots_that_do_not_exist_give_nan(
    vocabulary: int, width: int, dtype: torch.dtype
) -> None:
    table = Table(vocabulary, width, dtype)
    (clean,) = table.run(every())
    bad_tokens = [-1, vocabulary, 2**40, -(2**62), vocabulary + 12345]
    bad_slots = [-2, -(2**31), 5, 2**31 - 1]
    for row, token in enumerate(bad_tokens):
        table.tokens[row] = token
    for row, slot in enumerate(bad_slots, start=len(bad_tokens)):
        table.slots[row] = slot
    (y,) = table.run(every())
    count = len(bad_tokens) + len(bad_slots)
    assert y[:count].isnan().all() and same_bits(y[count:], clean[count:])
