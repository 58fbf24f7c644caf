"""Paged attention, one algorithm for decode, verify, chunk and prefill.

A row's keys are taken in tiles of 64 and splits of 256, both at absolute positions and ascending;
splits are folded from the left, in the program that computed them or in a kernel of their own, by
one formula. Tiles that a row does not see change no bit of it, so neither tile heights nor the cut
of the work (`attention_plan.py`) nor neighbours can. Knows nothing about sequences.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from truegraft.ops.interface import SPLIT, AttentionShape, KVCache
from truegraft.ops.triton import memory
from truegraft.ops.triton.attention_plan import (
    FIELDS,
    FOLD_FIELDS,
    RESIDENT,
    TileList,
    TritonAttentionPlan,
    plan_attention,
)
from truegraft.ops.triton.launch import INTERPRETED, launch, release_dependents, wait_for_inputs

__all__ = ["TritonAttentionPlan", "attention", "plan_attention"]

_ASSEMBLY = tl.constexpr(not INTERPRETED)
BLOCK = 64  # keys of a tile and of a cache block. Part of the numerics, as SPLIT is
FOLD_PROGRAMS = 2112  # launched at most
_ONES = (BLOCK * 0x3F800000 + 2**31) % 2**32 - 2**31  # a tile's sum of the bits of 1.0, wrapped


def attention(
    q: Tensor, shape: AttentionShape, cache: KVCache, plan: TritonAttentionPlan
) -> Tensor:
    """Softmax(q kᵀ / √D) v over the keys that a row sees: [M, H, D] → [M, H·D], q's dtype.

    Values in the cache must be finite, also where nobody has written. See `Ops.attention`.
    """
    m, dim = len(q), shape.head_dim
    assert q.shape == (m, shape.num_heads, dim) and q.is_contiguous()
    assert dim * q.itemsize % 16 == 0, "rows of the cache are read by the tensor memory accelerator"
    for held in (cache.k, cache.v):
        assert held.shape[1:] == (shape.num_kv_heads, BLOCK, dim) and held.is_contiguous()
        assert held.dtype == q.dtype and held.data_ptr() % 16 == 0
    out = memory.empty(m, shape.num_heads * dim, dtype=q.dtype, device=q.device)
    for tiles in plan.lists[shape]:
        _attend(q, shape, cache, plan.block_tables, tiles, out)
        if tiles.sums is not None:
            _fold(shape, tiles, out)
    return out


def _attend(
    q: Tensor,
    shape: AttentionShape,
    cache: KVCache,
    block_tables: Tensor,
    tiles: TileList,
    out: Tensor,
) -> None:
    padded = triton.next_power_of_2(shape.head_dim)
    warps, stages, nested = _cut(tiles, padded, q.dtype)
    launch(
        attend_kernel,
        (tiles.programs,),
        *(q, _tiles_of(cache.k, padded), _tiles_of(cache.v, padded), out),
        *(tiles.sums, tiles.stats, tiles.items, tiles.counts),
        *(block_tables, block_tables.stride(0), tiles.held),
        HEIGHT=tiles.height,
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        DIM=shape.head_dim,
        PADDED=padded,
        SCALE=math.log2(math.e) / math.sqrt(shape.head_dim),
        WINDOW=shape.window or 0,
        CUT=tiles.sums is not None,
        NESTED=nested,
        TILE=BLOCK,
        WIDTH=SPLIT,
        ONES=_ONES,
        FIELD=FIELDS,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )


def _tiles_of(part: Tensor, padded: int) -> TensorDescriptor:
    """[blocks, G, 64, D] as rows, read a block of one head at a time; columns past D are zero."""
    dim = part.shape[3]
    return TensorDescriptor(part, [part.numel() // dim, dim], [dim, 1], [BLOCK, padded])


def _cut(tiles: TileList, padded: int, dtype: torch.dtype) -> tuple[int, int, bool]:
    """(warps, stages, loop over splits and then tiles). They move no bit.

    So that no value spills and, but for heads of 256, two programs fit an SM. The nested loop is
    the faster one where products are large; the flat one keeps loads in flight between splits.
    """
    if dtype == torch.float32:
        return 8, 2, True
    if padded > 128:
        return 8 if tiles.height > 16 else 4, 3, False
    if tiles.height > 32:
        warps = 4 if tiles.height == 64 else 8
        return warps, 4 if tiles.sums is not None else 5, tiles.sums is None
    return 4, 5, False


def _fold(shape: AttentionShape, tiles: TileList, out: Tensor) -> None:
    padded = triton.next_power_of_2(shape.head_dim)
    programs = min(len(out) * shape.num_heads, FOLD_PROGRAMS)
    launch(
        fold_kernel,
        (programs,),
        *(tiles.sums, tiles.stats, tiles.folds, tiles.counts, out, tiles.held),
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        DIM=shape.head_dim,
        PADDED=padded,
        ROUND=_round(tiles.max_splits, programs),
        FIELD=FOLD_FIELDS,
        num_warps=max(padded // 32, 1),
    )


def _round(max_splits: int, programs: int) -> int:
    """Splits whose sums are loaded together, before the first is used. It moves no bit.

    Many hide the latency of a few long rows, but their registers leave room for few programs.
    """
    if max_splits <= 16:
        return 4 if max_splits <= 4 else 8
    return 32 if programs <= RESIDENT else 16


@triton.jit
def _dot(a, b, acc):
    """acc + a b, the inner dimension ascending; in float32 16 at a time, for want of registers."""
    if a.dtype == tl.float32 and a.shape[1] > 16:
        HALF: tl.constexpr = a.shape[1] // 2
        left = tl.permute(tl.reshape(a, [a.shape[0], 2, HALF]), [0, 2, 1])
        right = tl.permute(tl.reshape(b, [2, HALF, b.shape[1]]), [1, 2, 0])
        left_low, left_high = tl.split(left)
        right_low, right_high = tl.split(right)
        return _dot(left_high, right_high, _dot(left_low, right_low, acc))
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _add_tile(
    top,
    total,
    acc,
    q,
    keys,
    values,
    tile,
    position,
    seen_from,
    seen_to,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    ONES: tl.constexpr,
):
    """Add one tile of keys to a split's running maximum, sum of weights and accumulator.

    Tiles from `seen_from` and before `seen_to` are seen by every row of the query tile in full.
    """
    scores = _dot(q, keys.T, tl.zeros([q.shape[0], TILE], tl.float32))
    if (tile < seen_from) | (tile >= seen_to):
        place = tile * TILE + tl.arange(0, TILE)
        seen = place[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        # NOTE: before the maximum. A key that is not seen may be NaN.
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.full(scores.shape, SCALE, tl.float32)
    weights = tl.exp2(tl.fma(scores, factor, tl.broadcast_to(-safe[:, None], scores.shape)))
    keep = tl.exp2(top - safe)
    # Weights are summed as integers, which is exact: a float sum would follow the layout, and that
    # follows the height of the tile. The bits of w + 1 count units of 2⁻²³ above those of 1.
    units = tl.sum((weights + 1.0).to(tl.int32, bitcast=True), 1) - ONES
    total = tl.fma(total, keep, units.to(tl.float32) * 1.1920928955078125e-07)
    acc = _dot(weights.to(values.dtype), values, acc * keep[:, None])
    return new_top, total, acc


@triton.jit
def _weights(top, new_top):
    """Factors of the state before and of the part that is folded into it."""
    return tl.exp2(top - tl.where(new_top == float("-inf"), 0.0, new_top))


@triton.jit
def _again(number):
    """The same number, as if it had just been computed.

    Else the compiler computes all places ahead of all loops and keeps them, and registers run out.
    """
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return number


@triton.jit
def _lanes(zero, HEIGHT: tl.constexpr):
    """0, 1, … HEIGHT - 1."""
    return tl.arange(0, HEIGHT) + _again(zero)


@triton.jit
def _places(
    row,
    size,
    head,
    HEIGHT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Where a tile's rows of one kv head are in [M, H, D], and which there are."""
    lanes = _lanes(row - row, HEIGHT)
    columns = tl.arange(0, PADDED)
    token = lanes // GROUP
    heads = token * (KV_HEADS * GROUP) + head * GROUP + lanes % GROUP
    first = _again(row).to(tl.int64) * (KV_HEADS * GROUP * DIM)
    present = token < _again(size)
    place = first + (heads[:, None] * DIM + columns[None, :])
    return place, present[:, None] & (columns < DIM)[None, :]


@triton.jit
def _nothing_seen(HEIGHT: tl.constexpr, PADDED: tl.constexpr):
    """(maximum, sum of weights, accumulator) of no keys."""
    top = tl.full([HEIGHT], float("-inf"), tl.float32)
    return top, tl.zeros([HEIGHT], tl.float32), tl.zeros([HEIGHT, PADDED], tl.float32)


@triton.jit
def _merge(all_top, all_total, all_acc, top, total, acc):
    """Fold a split into the state of those before it. `fold_kernel` has the same formula.

    Folded into nothing, a split stays what it is.
    """
    new_top = tl.maximum(all_top, top)
    keep = _weights(all_top, new_top)
    add = _weights(top, new_top)
    all_total = tl.fma(total, add, all_total * keep)
    all_acc = tl.fma(acc, tl.broadcast_to(add[:, None], acc.shape), all_acc * keep[:, None])
    return new_top, all_total, all_acc


@triton.jit
def _store_part(sums, stats, part, top, total, acc, size, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Write a split's state to the rows of the workspace from `part` on."""
    lanes = _lanes(size - size, acc.shape[0])
    columns = tl.arange(0, acc.shape[1])
    present = lanes < _again(size) * GROUP
    tl.store(stats + (part + lanes) * 2, top, mask=present)
    tl.store(stats + (part + lanes) * 2 + 1, total, mask=present)
    place = sums + part * DIM + (lanes[:, None] * DIM + columns[None, :])
    tl.store(place, acc, mask=present[:, None] & (columns < DIM)[None, :])


@triton.jit
def _quotient(acc, total):
    """acc / total; the sign of a zero, which could follow tiles that are not seen, is dropped."""
    return acc / total + 0.0


@triton.jit(do_not_specialize=["table_stride", "held"])
def attend_kernel(
    q,
    k,
    v,
    out,
    sums,
    stats,
    items,
    counts,
    tables,
    table_stride,
    held,
    HEIGHT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CUT: tl.constexpr,
    NESTED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ONES: tl.constexpr,
    FIELD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One item and kv head after the other: the rows' attention, or each split's part of it."""
    release_dependents()
    EACH: tl.constexpr = WIDTH // TILE
    units = tl.load(counts, cache_modifier=".cg") * KV_HEADS
    wait_for_inputs()
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head = unit % KV_HEADS
        item = items + unit // KV_HEADS * FIELD
        row = tl.load(item)
        size = tl.load(item + 1)
        table_row = tl.load(item + 2)
        start = tl.load(item + 3)
        begin = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)
        direct = tl.load(item + 7)
        table = tables + table_row.to(tl.int64) * table_stride
        # NOTE: of rows that there are not, too: they see what they will, and nobody sees them.
        position = start + _lanes(start - start, HEIGHT) // GROUP
        last = start + size - 1
        from_tile = begin * EACH
        to_tile = tl.minimum(end * EACH, last // TILE + 1)
        seen_from = 0
        if WINDOW > 0:
            from_tile = tl.maximum(from_tile, tl.maximum(start - WINDOW + 1, 0) // TILE)
            seen_from = tl.maximum(last - WINDOW + TILE, 0) // TILE
        seen_to = (start + 1) // TILE

        place, valid = _places(row, size, head, HEIGHT, KV_HEADS, GROUP, DIM, PADDED)
        queries = tl.load(q + place, mask=valid, other=0.0)

        top, total, acc = _nothing_seen(HEIGHT, PADDED)
        all_top, all_total, all_acc = _nothing_seen(HEIGHT, PADDED)
        if NESTED:
            for split in range(begin, end):
                low = tl.maximum(split * EACH, from_tile)
                high = tl.minimum(split * EACH + EACH, to_tile)
                top, total, acc = _nothing_seen(HEIGHT, PADDED)
                for tile in tl.range(low, high, num_stages=STAGES):
                    block = (tl.load(table + tile) * KV_HEADS + head) * TILE
                    keys = k.load([block, 0])
                    values = v.load([block, 0])
                    top, total, acc = _add_tile(
                        *(top, total, acc, queries, keys, values, tile, position),
                        *(seen_from, seen_to, SCALE, WINDOW, TILE, ONES),
                    )
                all_top, all_total, all_acc = _merge(all_top, all_total, all_acc, top, total, acc)
                if CUT and direct == 0:
                    part = ((slot + split) * KV_HEADS + head) * held
                    _store_part(sums, stats, part, all_top, all_total, all_acc, size, GROUP, DIM)
                    all_top, all_total, all_acc = _nothing_seen(HEIGHT, PADDED)
        else:
            for tile in tl.range(from_tile, to_tile, num_stages=STAGES):
                block = (tl.load(table + tile) * KV_HEADS + head) * TILE
                keys = k.load([block, 0])
                values = v.load([block, 0])
                top, total, acc = _add_tile(
                    *(top, total, acc, queries, keys, values, tile, position),
                    *(seen_from, seen_to, SCALE, WINDOW, TILE, ONES),
                )
                if (tile % EACH == EACH - 1) | (tile == to_tile - 1):
                    all_top, all_total, all_acc = _merge(
                        all_top, all_total, all_acc, top, total, acc
                    )
                    if CUT and direct == 0:
                        part = ((slot + tile // EACH) * KV_HEADS + head) * held
                        _store_part(
                            sums, stats, part, all_top, all_total, all_acc, size, GROUP, DIM
                        )
                        all_top, all_total, all_acc = _nothing_seen(HEIGHT, PADDED)
                    top, total, acc = _nothing_seen(HEIGHT, PADDED)
        if direct == 1:
            place, valid = _places(row, size, head, HEIGHT, KV_HEADS, GROUP, DIM, PADDED)
            result = _quotient(all_acc, all_total[:, None])
            tl.store(out + place, result.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["held"])
def fold_kernel(
    sums,
    stats,
    folds,
    counts,
    out,
    held,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROUND: tl.constexpr,
    FIELD: tl.constexpr,
):
    """One row and query head after the other: fold its splits, ascending, and divide."""
    release_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    columns = tl.arange(0, PADDED)
    units = tl.load(counts + 1, cache_modifier=".cg") * HEADS
    wait_for_inputs()
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head = unit % HEADS
        fold = folds + unit // HEADS * FIELD
        row = tl.load(fold)
        token = tl.load(fold + 1)
        slot = tl.load(fold + 2)
        count = tl.load(fold + 3)
        first = (slot * KV_HEADS + head // GROUP) * held + token * GROUP + head % GROUP
        top = tl.full([PADDED], float("-inf"), tl.float32)
        total = tl.zeros([PADDED], tl.float32)
        acc = tl.zeros([PADDED], tl.float32)
        for begin in tl.range(0, count, ROUND, num_stages=1):
            tops = ()
            totals = ()
            parts = ()
            for step in tl.static_range(ROUND):
                index = first + (begin + step) * (KV_HEADS * held)
                exists = begin + step < count
                tops = _append(tops, _stat(stats + index * 2, exists, float("-inf")))
                totals = _append(totals, _stat(stats + index * 2 + 1, exists, 0.0))
                place = sums + index * DIM + columns
                mask = exists & (columns < DIM)
                part = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
                parts = _append(parts, part)
            for step in tl.static_range(ROUND):
                new_top = tl.maximum(top, tops[step])
                keep = _weights(top, new_top)
                add = _weights(tops[step], new_top)
                total = tl.fma(totals[step], add, total * keep)
                acc = tl.fma(parts[step], add, acc * keep)
                top = new_top
        place = out + row.to(tl.int64) * (HEADS * DIM) + head * DIM + columns
        result = _quotient(acc, total)
        tl.store(place, result.to(out.dtype.element_ty), mask=columns < DIM)


@triton.jit
def _stat(place, exists, other: tl.constexpr):
    return tl.load(place, mask=exists, other=other, cache_modifier=".cg")


@triton.jit
def _append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no starred expressions)
