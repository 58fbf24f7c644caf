"""Row-wise ops: add + RMSNorm, SiLU · up, and q/k norm + RoPE + the write to the KV cache.

A row is reduced inside one program, in an order that follows the layer's shape: blocks and warps
do, and every tensor is 16-byte aligned, because Triton lays threads out by alignment too. Nothing
is fused that the reference rounds apart (RoPE: two products, then their sum); division and square
root are IEEE. Knows nothing about sequences: where a key goes is read from the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from truegraft.ops.interface import AttentionShape, KVCache, QKNorm, TokenBatch
from truegraft.ops.triton import memory
from truegraft.ops.triton.launch import launch, release_dependents, wait_for_inputs

ALIGNMENT = 16  # bytes
MAX_WIDTH = 16384  # of a norm: a row is held in registers
SILU_BLOCK = 1024
HEADS_BLOCK = 1024  # elements of the heads that one program rotates

_LOG2_E = tl.constexpr(1.4426950216293335)  # float32(log2(e))
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)  # log2(e) less that
_LN_2 = tl.constexpr(0.6931471805599453)


def check_aligned(*tensors: Tensor | None) -> None:
    """Assert that tensors are contiguous and start where 16-byte loads may."""
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous()
        assert tensor is None or tensor.data_ptr() % ALIGNMENT == 0


# ------------------------------------------------------------------ add + norm


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """r = round(x + residual); y = round(r / √(mean(r²) + eps) · weight): (y, r), [M, N].

    index: [L] int64, compute only these rows, in this order: (y, r), [L, N].
    """
    width = x.shape[1]
    assert width <= MAX_WIDTH and weight.shape == (width,) and weight.dtype == x.dtype
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    assert index is None or (index.dtype == torch.int64 and index.is_contiguous())
    rows = x.shape[0] if index is None else len(index)
    y = memory.empty(rows, width, dtype=x.dtype, device=x.device)
    r = None  # x itself
    if residual is not None or index is not None:
        r = memory.empty(rows, width, dtype=x.dtype, device=x.device)
    check_aligned(x, residual, weight, y, r)
    block = triton.next_power_of_2(width)
    launch(
        add_norm_kernel,
        (rows,),
        *(x, residual, weight, index, y, r, eps),
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y, x if r is None else r


@triton.jit
def add_norm_kernel(
    x, residual, weight, index, y, r, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of y and r."""
    release_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    source = row
    if index is not None:
        source = tl.load(index + row)
    value = tl.load(x + source * WIDTH + column, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + source * WIDTH + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    if r is not None:
        tl.store(r + row * WIDTH + column, value, mask=inside)
    value = value.to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 0), WIDTH * 1.0)
    normed = tl.div_rn(value, tl.sqrt_rn(mean + eps)) * gain
    tl.store(y + row * WIDTH + column, normed.to(y.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------ activation


def silu_mul(x: Tensor) -> Tensor:
    """y = round(g / (1 + exp(-g)) · u), [g | u] = x: [M, 2N] → [M, N]."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert x.shape[1] == 2 * width
    y = memory.empty(rows, width, dtype=x.dtype, device=x.device)
    check_aligned(x, y)
    launch(
        silu_mul_kernel,
        (rows * -(-width // SILU_BLOCK),),
        *(x, y),
        WIDTH=width,
        BLOCK=SILU_BLOCK,
        num_warps=4,
    )
    return y


@triton.jit
def silu_mul_kernel(x, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One block of columns of one row."""
    release_dependents()
    wait_for_inputs()
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = x + row * (2 * WIDTH) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    product = tl.div_rn(gate, 1.0 + _exp(-gate)) * up
    tl.store(y + row * WIDTH + column, product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _exp(x):
    """exp(x) to about 2 units in the last place.

    exp2 of the rounded product x · log2(e) alone would be |x| / 2 units off: the rest of the
    product is put back. Not where exp overflows or vanishes: the rest times infinity is NaN.
    """
    power = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E_REST, tl.fma(x, _LOG2_E, -power)) * _LN_2
    raised = tl.exp2(power)
    return tl.where(tl.abs(x) < 87.0, tl.fma(raised, rest, raised), raised)


# ------------------------------------------------------------------ rope


def rope_write(
    qkv: Tensor,
    shape: AttentionShape,
    cos_sin: tuple[Tensor, Tensor],
    norm: QKNorm | None,
    cache: KVCache,
    batch: TokenBatch,
) -> Tensor:
    """Norm and rotate q and k, write k and v to the cache (mutated): [M, (H + 2G)·D] → [M, H, D].

    cos_sin: [M, D/2] each, float32. Rows past `batch.kv_block`, or whose block is negative, are
    written nowhere. A value that is not finite is written as zeros, and its key as NaN.
    """
    num_q, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    rows = len(qkv)
    q = memory.empty(rows, num_q, dim, dtype=qkv.dtype, device=qkv.device)
    _check_rope(qkv, shape, cos_sin, norm, cache, batch)
    check_aligned(qkv, *cos_sin, cache.k, cache.v, q)
    half = triton.next_power_of_2(dim // 2)
    heads = min(max(HEADS_BLOCK // (2 * half), 1), triton.next_power_of_2(max(num_q, num_kv)))
    query_parts, kv_parts = -(-num_q // heads), -(-num_kv // heads)
    launch(
        rope_write_kernel,
        (rows * (query_parts + kv_parts),),
        *(qkv, *cos_sin, norm and norm.q, norm and norm.k, q, cache.k, cache.v),
        *(batch.kv_block, batch.kv_offset, len(batch.kv_block), norm.eps if norm else 0.0),
        NUM_Q=num_q,
        NUM_KV=num_kv,
        DIM=dim,
        PAGE=cache.k.shape[2],
        HEADS=heads,
        HALF_BLOCK=half,
        QUERY_PARTS=query_parts,
        KV_PARTS=kv_parts,
        num_warps=2,
    )
    return q


def _check_rope(
    qkv: Tensor,
    shape: AttentionShape,
    cos_sin: tuple[Tensor, Tensor],
    norm: QKNorm | None,
    cache: KVCache,
    batch: TokenBatch,
) -> None:
    """Assert the shapes and dtypes of `rope_write`."""
    num_kv, dim, rows = shape.num_kv_heads, shape.head_dim, len(qkv)
    assert dim % 2 == 0 and qkv.shape[1] == (shape.num_heads + 2 * num_kv) * dim
    for table in cos_sin:
        assert table.shape == (rows, dim // 2) and table.dtype == torch.float32
    for held in (cache.k, cache.v):
        assert held.shape[1] == num_kv and held.shape[3] == dim and held.dtype == qkv.dtype
    for place in (batch.kv_block, batch.kv_offset):
        assert place.dtype == torch.int64 and place.is_contiguous() and len(place) <= rows
    if norm is not None:
        check_aligned(norm.q, norm.k)
        assert norm.q.shape == norm.k.shape == (dim,) and norm.q.dtype == qkv.dtype


@triton.jit(do_not_specialize=["tokens"])
def rope_write_kernel(
    qkv,
    cos,
    sin,
    norm_q,
    norm_k,
    q,
    cache_k,
    cache_v,
    kv_block,
    kv_offset,
    tokens,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KV_PARTS: tl.constexpr,
):
    """HEADS query heads of one row, or as many of its key and value heads."""
    release_dependents()
    PARTS: tl.constexpr = QUERY_PARTS + KV_PARTS
    HALF: tl.constexpr = DIM // 2
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    is_query = part < QUERY_PARTS
    head = tl.where(is_query, part, part - QUERY_PARTS) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF_BLOCK)
    inside = (head < tl.where(is_query, NUM_Q, NUM_KV))[:, None] & (lane < HALF)[None, :]
    at = head[:, None] * DIM + lane[None, :]
    # Tables are read once a head, as wide as the heads are: no exchange between threads.
    spread = head[:, None] * 0 + lane[None, :]
    gain_1, gain_2 = None, None
    if norm_q is not None:
        gain = norm_q
        if part >= QUERY_PARTS:
            gain = norm_k
        gain_1 = tl.load(gain + spread, mask=inside, other=0.0).to(tl.float32)
        gain_2 = tl.load(gain + HALF + spread, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs()

    writes = (part >= QUERY_PARTS) & (row < tokens)
    block = tl.load(kv_block + row, mask=writes, other=-1)
    offset = tl.load(kv_offset + row, mask=writes, other=0)
    source = qkv + row * ((NUM_Q + 2 * NUM_KV) * DIM) + tl.where(is_query, 0, NUM_Q * DIM) + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    value_1 = tl.load(source + NUM_KV * DIM, mask=inside & writes, other=0.0)
    value_2 = tl.load(source + NUM_KV * DIM + HALF, mask=inside & writes, other=0.0)
    turn_cos = tl.load(cos + row * HALF + spread, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + spread, mask=inside, other=0.0)
    if norm_q is not None:
        first, second = _normed(first, second, gain_1, gain_2, eps, DIM)
    first, second = first.to(tl.float32), second.to(tl.float32)
    turned_1 = (first * turn_cos - second * turn_sin).to(q.dtype.element_ty)
    turned_2 = (second * turn_cos + first * turn_sin).to(q.dtype.element_ty)
    if is_query:
        place = q + row * (NUM_Q * DIM) + at
        tl.store(place, turned_1, mask=inside)
        tl.store(place + HALF, turned_2, mask=inside)
    elif block >= 0:
        # NOTE: 0 · NaN is NaN, so a value that is not finite would pass through a mask of
        # attention. Its key is spoiled instead: masks hide keys.
        broken = tl.max((_not_finite(value_1) | _not_finite(value_2)).to(tl.int32), 1) > 0
        broken = broken[:, None]
        place = ((block * NUM_KV + head) * PAGE + offset)[:, None] * DIM + lane[None, :]
        tl.store(cache_k + place, tl.where(broken, float("nan"), turned_1), mask=inside)
        tl.store(cache_k + place + HALF, tl.where(broken, float("nan"), turned_2), mask=inside)
        tl.store(cache_v + place, tl.where(broken, 0.0, value_1), mask=inside)
        tl.store(cache_v + place + HALF, tl.where(broken, 0.0, value_2), mask=inside)


@triton.jit
def _normed(first, second, gain_1, gain_2, eps, DIM: tl.constexpr):
    """RMSNorm of the two halves of some heads, rounded."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    mean = tl.div_rn(tl.sum(first * first + second * second, 1), DIM * 1.0)
    root = tl.sqrt_rn(mean + eps)[:, None]
    first, second = tl.div_rn(first, root) * gain_1, tl.div_rn(second, root) * gain_2
    return first.to(dtype), second.to(dtype)


@triton.jit
def _not_finite(x):
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0
