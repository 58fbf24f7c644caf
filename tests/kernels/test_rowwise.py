"""The row-wise kernels, interpreted on the CPU, say what the reference says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from guard import poisoned
from kernel_cases import bits, error, rounding_floor, same_bits
from torch import Tensor

from truegraft.ops.interface import AttentionShape, KVCache, QKNorm, TokenBatch
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.triton import memory, rowwise

# The interpreter computes with NumPy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

FP16, FP32 = torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
PAGE = 64
NAN, INF = math.nan, math.inf


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs hold NaN before they are written."""
    with memory.allocator(poisoned):
        yield


# ------------------------------------------------------------------ add + norm


@DTYPES
@pytest.mark.parametrize("width", [1, 5, 64, 320, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_add_norm(dtype: torch.dtype, width: int, with_residual: bool, indexed: bool) -> None:
    x, weight = randn(5, width, dtype=dtype) * 3, randn(width, dtype=dtype, seed=1)
    residual = randn(5, width, dtype=dtype, seed=2) * 40 if with_residual else None
    index = torch.tensor([4, 0, 4, 3]) if indexed else None
    y, r = rowwise.add_norm(x, residual, weight, 1e-5, index)
    want_y, want_r = ReferenceOps(dtype).add_norm(x, residual, weight, 1e-5, index)
    assert same_bits(r, want_r)
    exact = r.double() / (r.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert y.shape == want_y.shape and y.dtype == dtype
    assert error(y, exact) <= (2 if dtype == FP16 else 4) * max(
        rounding_floor(exact, dtype), torch.finfo(dtype).eps / 8
    )
    if dtype == FP16:  # a norm of r before its rounding would differ in every fourth place
        assert float((y != want_y).double().mean()) <= 0.02


def test_add_norm_divides_by_the_root_of_the_mean_and_eps() -> None:
    y, _ = rowwise.add_norm(torch.zeros(1, 8), None, torch.ones(8), 1e-5)
    assert torch.equal(y, torch.zeros(1, 8)), "eps keeps a row of zeros finite"
    y, _ = rowwise.add_norm(torch.full((1, 3), 3.0), None, torch.tensor([1.0, 2.0, -4.0]), 7.0)
    assert torch.equal(y, torch.tensor([[0.75, 1.5, -3.0]])), "3 / √(9 + 7)"


@DTYPES
def test_add_norm_of_a_row_is_its_own(dtype: torch.dtype) -> None:
    x, residual = randn(6, 96, dtype=dtype), randn(6, 96, dtype=dtype, seed=1)
    weight = randn(96, dtype=dtype, seed=2)
    x[2, 7], residual[4, 0] = NAN, INF
    y, r = rowwise.add_norm(x, residual, weight, 1e-6)
    for row in range(6):
        alone = rowwise.add_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-6)
        assert same_bits(y[row : row + 1], alone[0]) and same_bits(r[row : row + 1], alone[1])
    assert y.isfinite().all(1).tolist() == [True, True, False, True, False, True]


# ------------------------------------------------------------------ activation


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 1024, 1025])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    x = randn(3, 2 * width, dtype=dtype) * 6
    y = rowwise.silu_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    assert y.shape == (3, width) and y.dtype == dtype
    ulp = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    # The interpreter does not fuse the sum that repairs exp's argument: |gate| / 2 units more.
    slack = 0.51 if dtype == FP16 else 3 + gate.abs()
    assert bool(((y.double() - exact).abs() <= slack * ulp).all())


def test_silu_mul_at_the_edges() -> None:
    edges = [0.0, -0.0, INF, -INF, NAN, 86.9, 87.1, 88.8, 104.0, 1e4, 3e38, 1e-40]
    gate = torch.tensor([[*edges, *(-edge for edge in edges)]])
    for up in (1.0, -1.0, 1e30):
        x = torch.cat((gate, torch.full_like(gate, up)), dim=-1)
        y, want = rowwise.silu_mul(x), ReferenceOps(FP32).silu_mul(x)
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.signbit() | y.isnan(), want.signbit() | y.isnan())
        torch.testing.assert_close(y, want, rtol=1e-5, atol=0, equal_nan=True)


# ------------------------------------------------------------------ rope

SHAPES = [(4, 2, 32), (5, 1, 64), (2, 2, 80), (14, 2, 96), (3, 3, 128), (6, 1, 256), (40, 20, 64)]


class Rope:
    """Rows at shuffled places of a poisoned cache; the last two rows are padding."""

    rows = 6

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.shape = AttentionShape(heads, kv_heads, dim)
        self.dtype = dtype
        self.qkv = randn(self.rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        angles = randn(self.rows, dim // 2, seed=3) * 10
        self.cos_sin = (angles.cos() * 1.25, angles.sin() * 1.25)
        self.norm = QKNorm(randn(dim, dtype=dtype, seed=1), randn(dim, dtype=dtype, seed=2), 1e-6)
        tokens = self.rows - 2
        numbers = torch.zeros(self.rows, dtype=torch.int64)
        self.batch = TokenBatch(
            num_tokens=tokens,
            token_ids=numbers,
            positions=numbers,
            slots=numbers.int(),
            kv_block=torch.tensor([3, 0, 2, 3]),
            kv_offset=torch.tensor([63, 0, 17, 1]),
            seq_row=numbers[:1],
            seq_offset=torch.tensor([0, tokens]),
            seq_start=numbers[:1],
            block_tables=torch.tensor([[3, 0, 2, 1]], dtype=torch.int32),
            max_query=tokens,
            max_context=256,
        )

    def cache(self) -> KVCache:
        size = (4, self.shape.num_kv_heads, PAGE, self.shape.head_dim)
        return KVCache(*(torch.full(size, NAN, dtype=self.dtype) for _ in range(2)))

    def run(self, norm: QKNorm | None, batch: TokenBatch | None = None) -> tuple[Tensor, KVCache]:
        cache = self.cache()
        batch = batch or self.batch
        return rowwise.rope_write(self.qkv, self.shape, self.cos_sin, norm, cache, batch), cache

    def reference(self, norm: QKNorm | None) -> tuple[Tensor, KVCache]:
        cache = self.cache()
        ops = ReferenceOps(self.dtype)
        return ops.rope_write(self.qkv, self.shape, self.cos_sin, norm, cache, self.batch), cache


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_rope_has_the_bits_of_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    rope = Rope(heads, kv_heads, dim, dtype)
    q, cache = rope.run(None)
    want_q, want_cache = rope.reference(None)
    assert q.shape == (rope.rows, heads, dim) and same_bits(q, want_q)
    assert same_bits(cache.k, want_cache.k) and same_bits(cache.v, want_cache.v)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_rope_norms_queries_and_keys_first(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    rope = Rope(heads, kv_heads, dim, dtype)
    q, cache = rope.run(rope.norm)
    want_q, want_cache = rope.reference(rope.norm)
    # A unit in the last place of the norm, turned by cosines and sines up to 1.25.
    tolerance = 4 * torch.finfo(dtype).eps * float(want_q.abs().max())
    torch.testing.assert_close(q, want_q, rtol=0, atol=tolerance)
    torch.testing.assert_close(cache.k, want_cache.k, rtol=0, atol=tolerance, equal_nan=True)
    if dtype == FP16:  # a norm that is not rounded would differ in every fourth place
        assert float((q != want_q).double().mean()) <= 0.02
    assert same_bits(cache.v, want_cache.v)


def test_rows_without_a_block_are_written_nowhere() -> None:
    rope = Rope(4, 2, 32, FP16)
    whole, _ = rope.run(rope.norm)
    batch = replace(
        rope.batch,
        num_tokens=rope.rows,
        kv_block=torch.tensor([-1, 1, -1, 2, -7, -1]),
        kv_offset=torch.tensor([0, 5, 70, 6, 0, 0]),
    )
    q, cache = rope.run(rope.norm, batch)
    assert same_bits(q, whole)
    for held in (cache.k, cache.v):
        written = ~held.isnan()
        assert written[1, :, 5].all() and written[2, :, 6].all()
        assert int(written.sum()) == 2 * 2 * 32


def test_a_value_that_is_not_finite_is_hidden_by_its_key() -> None:
    rope = Rope(4, 2, 32, FP16)
    values = rope.qkv.view(rope.rows, 8, 32)[:, 6:]
    values[0, 0, 3], values[1, 1, 31], values[2, 0, 16] = NAN, INF, -INF
    rope.qkv.view(rope.rows, 8, 32)[3, 4, 9] = INF  # a key: it stays in its own head
    q, cache = rope.run(None)
    want_q, want_cache = rope.reference(None)
    at = (rope.batch.kv_block, slice(None), rope.batch.kv_offset)
    k, v = cache.k[at], cache.v[at]
    assert v.isfinite().all() and same_bits(v, want_cache.v[at]) and same_bits(q, want_q)
    broken = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert torch.equal(k.isnan().all(-1), broken) and not v[broken].any()
    assert torch.equal(k.isnan(), want_cache.k[at].isnan())
    finite = want_cache.k[at].isfinite()
    assert torch.equal(bits(k)[finite], bits(want_cache.k[at])[finite])


def test_what_kernels_cannot_read_is_refused() -> None:
    wide = randn(4, 32, dtype=FP16)
    with pytest.raises(AssertionError):
        rowwise.silu_mul(wide[:, ::2])
    with pytest.raises(AssertionError):
        rowwise.silu_mul(wide.flatten()[1:65].view(2, 32))
    with pytest.raises(AssertionError):
        rowwise.add_norm(wide, None, randn(32), 1e-5)
    rope = Rope(4, 2, 32, FP16)
    rope.cos_sin = (rope.cos_sin[0].half(), rope.cos_sin[1])
    with pytest.raises(AssertionError):
        rope.run(None)
