"""What a step's attention has to do: query tiles of its sequences, listed on the device.

The host knows bounds alone (rows, longest query, longest context) and chooses tile heights, grids
and memory by them; the lengths are read by a kernel, so a captured graph may be replayed with
others. How a sequence is cut into tiles and items moves no bit. Knows nothing about values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from truegraft.ops.interface import SPLIT, AttentionPlan, AttentionShape, TokenBatch
from truegraft.ops.triton import memory
from truegraft.ops.triton.launch import launch, wait_for_inputs

FIELDS = (
    8  # int32 of an item: first row, tokens, table row, position, splits from, to, slot, direct
)
FOLD_FIELDS = 4  # int32 of a row to be folded: row, token of its tile, first slot, splits

# None of these moves a bit: they say how work is spread.
SMALL = 32  # rows × heads of a group, in a tile of a short sequence beside long ones
LARGE = 64  # of a long sequence; also the highest tile of a verify step
BUSY = 128  # programs of equal length that fill the chip: no tile is cut
RESIDENT = 396  # programs that run at once, three on each of 132 SMs
MIN_ITEM, MAX_ITEM = 1, 8  # splits of an item, where tiles are cut
PROGRAMS = 792  # launched at most, unless there are more tiles
WORKSPACE = 1 << 26  # bytes of partial sums, at most

MAX_SEQUENCES = (64, 1024, 16384)  # variants of the planning kernel
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class TileList:
    """Tiles of one height: one launch, and one more that folds the splits of tiles that are cut."""

    height: int  # rows × heads of a group, padded
    held: int  # rows × heads of a group that a tile has at most: rows of a slot
    programs: int  # to launch
    max_splits: int  # of a tile
    items: Tensor  # [items, 8] int32, filled by `plan_tiles_kernel`
    folds: Tensor  # [rows, 4] int32, likewise
    counts: Tensor  # [2] int32, likewise: items, folds
    sums: Tensor | None  # [slots · G · held, D] float32, filled by the layers; None: none is cut
    stats: Tensor | None  # [slots · G · held, 2] float32: maximum and sum of weights


@dataclass(frozen=True)
class TritonAttentionPlan(AttentionPlan):
    """A step's tiles for each distinct layer shape."""

    block_tables: Tensor  # [rows, max blocks] int32
    lists: dict[AttentionShape, tuple[TileList, ...]]


@dataclass(frozen=True)
class _Kind:
    """Sequences of more than `above` rows and at most `upto`, in tiles of `tokens` rows."""

    height: int
    tokens: int
    above: int
    upto: int
    tiles: int  # at most, in this step
    even: bool  # whether tiles must be of like length for none to be cut


def plan_attention(batch: TokenBatch, shapes: Sequence[AttentionShape]) -> TritonAttentionPlan:
    """List a step's attention work for every distinct layer shape. See `Ops.plan_attention`."""
    sequences = len(batch.seq_row)
    assert len(batch.seq_offset) == sequences + 1 and len(batch.seq_start) == sequences
    assert batch.block_tables.stride(1) == 1 and batch.block_tables.dtype == torch.int32
    for tensor in (batch.seq_row, batch.seq_offset, batch.seq_start):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    lists = {
        shape: tuple(_plan_list(batch, shape, kind) for kind in _kinds(batch, shape))
        for shape in dict.fromkeys(shapes)
    }
    return TritonAttentionPlan(batch.block_tables, lists)


def _kinds(batch: TokenBatch, shape: AttentionShape) -> tuple[_Kind, ...]:
    """Which tiles hold the step's sequences; chosen by what the host knows."""
    rows, sequences = len(batch.token_ids), len(batch.seq_row)
    longest, group = batch.max_query, shape.group
    if longest * group <= LARGE or longest == 1:  # decode or verify: a sequence is one tile
        height = _height(longest * group)
        return (_Kind(height, height // group, 0, longest, min(rows, sequences), even=True),)
    short = SMALL // group if sequences > 1 else 0
    height = _height(max(group, LARGE))
    tokens = height // group
    long_ones = min(sequences, rows // (short + 1))
    large = _Kind(height, tokens, short, longest, rows // tokens + long_ones, even=False)
    if not short:
        return (large,)
    return (large, _Kind(SMALL, short, 0, short, min(rows, sequences), even=True))


def _height(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


def _plan_list(batch: TokenBatch, shape: AttentionShape, kind: _Kind) -> TileList:
    """Allocate one list and launch the kernel that fills it."""
    rows, sequences, device = len(batch.token_ids), len(batch.seq_row), batch.seq_row.device
    max_splits = _max_splits(batch.max_context, shape.window, kind.tokens)
    held = min(kind.tokens, batch.max_query) * shape.group
    slots = _slots(batch, shape, kind, max_splits, held)
    every = kind.tiles * max_splits
    cut = max(-(-RESIDENT // shape.num_kv_heads), -(-every // MAX_ITEM))
    num_items = min(every, kind.tiles + cut) if slots else kind.tiles
    most = max(kind.tiles * shape.num_kv_heads, PROGRAMS)
    partial_rows = slots * shape.num_kv_heads * held

    def ints(*size: int) -> Tensor:
        return memory.empty(*size, dtype=torch.int32, device=device)

    def floats(*size: int) -> Tensor | None:
        return memory.empty(*size, dtype=torch.float32, device=device) if slots else None

    tiles = TileList(
        kind.height,
        held,
        min(num_items * shape.num_kv_heads, most),
        max_splits,
        ints(num_items, FIELDS),
        ints(rows, FOLD_FIELDS),
        ints(2),
        floats(partial_rows, shape.head_dim),
        floats(partial_rows, 2),
    )
    block = next(size for size in MAX_SEQUENCES if sequences <= size)
    launch(
        plan_tiles_kernel,
        (sequences,),
        *(batch.seq_offset, batch.seq_start, batch.seq_row),
        *(tiles.items, tiles.folds, tiles.counts, sequences),
        *(kind.tokens, kind.above, kind.upto, shape.window or 0),
        *(shape.num_kv_heads, slots, MIN_ITEM, MAX_ITEM, BUSY, int(kind.even)),
        SEQUENCES=block,
        TOKENS=LARGE,
        WIDTH=SPLIT,
        RUNNING=RESIDENT,
        FIELD=FIELDS,
        FOLD=FOLD_FIELDS,
        num_warps=1 if block == MAX_SEQUENCES[0] else 8,
        settles=True,
    )
    return tiles


def _max_splits(max_context: int, window: int | None, tokens: int) -> int:
    """Most splits that a tile can see."""
    splits = -(-max_context // SPLIT)
    if window is None:
        return splits
    return min(splits, (window + tokens - 2) // SPLIT + 2)


def _slots(
    batch: TokenBatch, shape: AttentionShape, kind: _Kind, max_splits: int, held: int
) -> int:
    """Splits whose partial sums there is memory for; 0: no tile is cut."""
    if max_splits == 1 or (kind.even and _alike(batch, shape)):
        return 0
    least = (len(batch.token_ids) - len(batch.seq_row) * kind.above) // kind.tokens
    if not kind.even and least * shape.num_kv_heads >= BUSY:
        return 0
    one = shape.num_kv_heads * held * (shape.head_dim + 2) * _FLOAT
    return min(kind.tiles * max_splits, WORKSPACE // one)


def _alike(batch: TokenBatch, shape: AttentionShape) -> bool:
    """Whether sequences of about equal length keep the chip busy: then there is nothing to fold."""
    sequences = len(batch.seq_row)
    if sequences * shape.num_kv_heads < BUSY:
        return False
    return 2 * batch.max_context * sequences <= 3 * batch.total_context


@triton.jit
def _tile(number, tiles, rows, start, tokens, window, WIDTH: tl.constexpr):
    """The number-th tile of a sequence, the last one first: (token, tokens, first split, splits).

    All are zero past the sequence's tiles.
    """
    exists = number < tiles
    token = tl.where(exists, (tiles - 1 - number) * tokens, 0)
    size = tl.where(exists, tl.minimum(rows - token, tokens), 0)
    begin = tl.where(window > 0, tl.maximum(start + token - window + 1, 0), 0) // WIDTH
    end = (start + token + size - 1) // WIDTH + 1
    return token, size, begin, tl.where(exists, end - begin, 0)


@triton.jit(
    do_not_specialize=[
        *("sequences", "tokens", "above", "upto", "window", "kv_heads"),
        *("slots", "min_item", "max_item", "busy", "even"),
    ]
)
def plan_tiles_kernel(
    offsets,
    starts,
    table_rows,
    items,
    folds,
    counts,
    sequences,
    tokens,
    above,
    upto,
    window,
    kv_heads,
    slots,
    min_item,
    max_item,
    busy,
    even,
    SEQUENCES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNNING: tl.constexpr,
    FIELD: tl.constexpr,
    FOLD: tl.constexpr,
):
    """One sequence's items and folds; every program works out the totals and its place by itself.

    A tile of at most `item` splits is one direct item. Others are cut, and have slots and folds.
    """
    wait_for_inputs()
    own = tl.program_id(0)
    every = tl.arange(0, SEQUENCES)
    inside = every < sequences
    first = tl.load(offsets + every, mask=inside, other=0)
    rows = (tl.load(offsets + every + 1, mask=inside, other=0) - first).to(tl.int32)
    start = tl.load(starts + every, mask=inside, other=0).to(tl.int32)
    tiles = tl.where((rows > above) & (rows <= upto), (rows + tokens - 1) // tokens, 0)
    deepest = tl.max(tiles, 0)

    splits = tl.zeros([SEQUENCES], tl.int32)
    longest = tl.zeros([SEQUENCES], tl.int32)
    for number in range(0, deepest):
        _, _, _, count = _tile(number, tiles, rows, start, tokens, window, WIDTH)
        splits += count
        longest = tl.maximum(longest, count)
    total, most, num_tiles = tl.sum(splits, 0), tl.max(longest, 0), tl.sum(tiles, 0)
    item = tl.maximum((total * kv_heads + RUNNING - 1) // RUNNING, min_item)
    item = tl.minimum(item, max_item)
    alike = (even == 0) | (2 * most * num_tiles <= 3 * total)
    item = tl.where((num_tiles * kv_heads >= busy) & alike, tl.maximum(most, item), item)

    parts = tl.zeros([SEQUENCES], tl.int32)
    cut_splits = tl.zeros([SEQUENCES], tl.int32)
    cut_tokens = tl.zeros([SEQUENCES], tl.int32)
    for number in range(0, deepest):
        _, size, _, count = _tile(number, tiles, rows, start, tokens, window, WIDTH)
        parts += (count + item - 1) // item
        cut_splits += tl.where(count > item, count, 0)
        cut_tokens += tl.where(count > item, size, 0)
    if tl.sum(cut_splits, 0) > slots:  # no room: nothing is cut
        item = tl.maximum(most, 1)
        parts = tiles
        cut_splits = tl.zeros([SEQUENCES], tl.int32)
        cut_tokens = tl.zeros([SEQUENCES], tl.int32)
    if own == 0:
        tl.store(counts, tl.sum(parts, 0))
        tl.store(counts + 1, tl.sum(cut_tokens, 0))

    before = every < own
    place = tl.sum(tl.where(before, parts, 0), 0)
    slot = tl.sum(tl.where(before, cut_splits, 0), 0)
    fold = tl.sum(tl.where(before, cut_tokens, 0), 0)
    is_own = every == own
    own_tiles = tl.sum(tl.where(is_own, tiles, 0), 0)
    own_rows = tl.sum(tl.where(is_own, rows, 0), 0)
    own_start = tl.sum(tl.where(is_own, start, 0), 0)
    own_first = tl.load(offsets + own).to(tl.int32)
    table_row = tl.load(table_rows + own).to(tl.int32)
    lanes = tl.arange(0, TOKENS)
    for number in range(0, own_tiles):
        token, size, begin, count = _tile(
            number, own_tiles, own_rows, own_start, tokens, window, WIDTH
        )
        pieces = (count + item - 1) // item
        direct = (pieces == 1).to(tl.int32)
        for piece in range(0, pieces):
            target = items + (place + piece) * FIELD
            tl.store(target, own_first + token)
            tl.store(target + 1, size)
            tl.store(target + 2, table_row)
            tl.store(target + 3, own_start + token)
            tl.store(target + 4, begin + count * piece // pieces)
            tl.store(target + 5, begin + count * (piece + 1) // pieces)
            tl.store(target + 6, slot - begin)  # + split: its slot
            tl.store(target + 7, direct)
        place += pieces
        if pieces > 1:
            target = folds + (fold + lanes) * FOLD
            present = lanes < size
            tl.store(target, own_first + token + lanes, mask=present)
            tl.store(target + 1, lanes, mask=present)
            tl.store(target + 2, tl.zeros([TOKENS], tl.int32) + slot, mask=present)
            tl.store(target + 3, tl.zeros([TOKENS], tl.int32) + count, mask=present)
            slot += count
            fold += size
