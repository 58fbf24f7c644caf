"""Paged attention of the reference back end: query tiles × splits of 256 keys.

A tile is a few query rows of one sequence and the heads of one group, as one matmul operand of a
proved height. A split's blocks of 64 keys are summed in ascending order, and splits are folded in
ascending order, so that keys which a row does not see change no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from truegraft.ops.interface import SPLIT, AttentionPlan, AttentionShape, KVCache, TokenBatch

BLOCK = 64
BLOCKS_PER_SPLIT = SPLIT // BLOCK


class _SplitStep(NamedTuple):
    """One split of keys for each of some tiles."""

    tiles_kv: Tensor | None  # [W·G] int64, tile · G + kv head; None: all, in order
    num_blocks: int  # read of each split: as many as the longest sequence here needs
    blocks: Tensor  # [W·G·num_blocks] int64, block · G + kv head
    stale: Tensor  # int64, places among [W·G·num_blocks·64] past the sequence: may hold anything
    hidden: Tensor | None  # [W, 1, rows · group, num_blocks·64] bool: keys not to be seen


class _Tiles(NamedTuple):
    """Query tiles of one size, and the splits that they read, in ascending order."""

    rows: int  # query rows of a tile
    height: int  # rows × heads of a group, padded: rows of a matmul
    tokens: Tensor  # [T·rows] int64, row of the step
    steps: list[_SplitStep]


class Work(NamedTuple):
    """One layer shape's tiles, and where each row of the step lies in their results."""

    tiles: list[_Tiles]
    inverse: Tensor  # [M] int64, row of the step → row of the concatenated tiles


@dataclass(frozen=True)
class TilePlan(AttentionPlan):
    """A step's attention work for each distinct layer shape."""

    work: dict[AttentionShape, Work] = field(default_factory=dict)


class _Tile(NamedTuple):
    first: int  # row of the step
    position: int  # of the first query
    table: Tensor  # [max blocks], the sequence's blocks


def plan_tiles(batch: TokenBatch, shape: AttentionShape, heights: Sequence[int]) -> Work:
    """Cut a step's rows into query tiles. heights: proved row counts of the matmuls."""
    least = heights[0]
    sizes = {}  # query rows of a tile → matmul height
    for height in sorted(heights, reverse=True):
        height = -(-max(height, shape.group) // least) * least
        sizes[height // shape.group] = height
    sizes[1] = height  # a lone row: the matmul is as high, but only its heads are softmaxed
    of_size: dict[int, list[_Tile]] = {size: [] for size in sizes}
    for tile, size in _cut(batch, list(sizes)):
        of_size[size].append(tile)
    classes = []
    inverse = torch.zeros(len(batch.token_ids), dtype=torch.int64)
    base = 0
    for size, tiles in of_size.items():
        for place, tile in zip(range(base, base + len(tiles) * size, size), tiles, strict=True):
            inverse[tile.first : tile.first + size] = torch.arange(place, place + size)
        base += len(tiles) * size
        if tiles:
            classes.append(_lay_out_tiles(tiles, size, sizes[size], shape))
    return Work(classes, inverse)


def _cut(batch: TokenBatch, sizes: Sequence[int]) -> Iterator[tuple[_Tile, int]]:
    """Cut each sequence's rows into full tiles, large ones first. sizes: descending, down to 1."""
    offsets, starts = batch.seq_offset.tolist(), batch.seq_start.tolist()
    for index, row in enumerate(batch.seq_row.tolist()):
        first, end = offsets[index], offsets[index + 1]
        shift = starts[index] - first
        while first < end:
            size = next(size for size in sizes if size <= end - first)
            yield _Tile(first, first + shift, batch.block_tables[row]), size
            first += size


def _lay_out_tiles(tiles: list[_Tile], rows: int, height: int, shape: AttentionShape) -> _Tiles:
    lanes = torch.arange(rows)
    tokens = torch.tensor([tile.first for tile in tiles])[:, None] + lanes
    positions = torch.tensor([tile.position for tile in tiles])[:, None] + lanes  # [T, rows]
    tables = torch.stack([tile.table for tile in tiles]).long()
    window = shape.window or 2**62
    begin = (positions[:, 0] - window + 1).clamp(min=0) // SPLIT
    end = positions[:, -1] // SPLIT + 1
    steps = []
    for step in range(int((end - begin).max())):
        alive = torch.nonzero(begin + step < end).flatten()
        part = _split_step(tables[alive], positions[alive], begin[alive] + step, shape)
        if len(alive) < len(tiles):
            part = part._replace(tiles_kv=_spread(alive, shape.num_kv_heads).flatten())
        steps.append(part)
    return _Tiles(rows, height, tokens.flatten(), steps)


def _split_step(
    tables: Tensor, positions: Tensor, split: Tensor, shape: AttentionShape
) -> _SplitStep:
    """One split of each tile: tables [W, max blocks], positions [W, rows], split [W]."""
    last = positions[:, -1]
    first = split * BLOCKS_PER_SPLIT
    count = min(int((last // BLOCK - first).max()) + 1, BLOCKS_PER_SPLIT)
    blocks, stale = _split_keys(tables, first, count, last, shape)
    return _SplitStep(None, count, blocks, stale, _hidden(positions, split * SPLIT, count, shape))


def _spread(index: Tensor, heads: int) -> Tensor:
    return index[..., None] * heads + torch.arange(heads)


def _split_keys(
    tables: Tensor, first: Tensor, count: int, last: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Cache rows of each (tile, kv head)'s blocks, and which of their keys are past `last` [W].

    first: [W], the split's first block. A block past the sequence is read as the first one, which
    holds finite values of the sequence itself; where that is the last one too, the places of its
    copies that lie past the sequence are stale like its own.
    """
    place = first[:, None] + torch.arange(count)
    place = torch.where(place <= last[:, None] // BLOCK, place, first[:, None])
    keys = place[..., None] * BLOCK + torch.arange(BLOCK)  # [W, count, 64]
    stale = (keys.flatten(1) > last[:, None]).nonzero()  # [n, 2]: tile, key of the split
    places = _spread(stale[:, 0], shape.num_kv_heads) * (count * BLOCK) + stale[:, 1:]
    blocks = _spread(tables.gather(1, place), shape.num_kv_heads)
    return blocks.transpose(1, 2).flatten(), places.flatten()


def _hidden(positions: Tensor, first: Tensor, count: int, shape: AttentionShape) -> Tensor | None:
    """Keys after a query or before its window: [W, 1, rows · group, count·64]; None: none is.

    first: [W], position of the split's first key.
    """
    keys = (first[:, None] + torch.arange(count * BLOCK))[:, None]  # [W, 1, count·64]
    query = positions[:, :, None]
    hidden = keys > query
    if shape.window is not None:
        hidden |= keys <= query - shape.window
    if not hidden.any():
        return None
    return hidden.repeat_interleave(shape.group, dim=1)[:, None]


def _gather_queries(q: Tensor, shape: AttentionShape, tiles: _Tiles) -> Tensor:
    """[M, H, D] → [T·G, height, D] float32; rows past rows × group are zero."""
    group = shape.group
    rows = q.index_select(0, tiles.tokens).float()
    rows = rows.view(-1, tiles.rows, shape.num_kv_heads, group, shape.head_dim)
    rows = rows.permute(0, 2, 1, 3, 4).reshape(-1, tiles.rows * group, shape.head_dim)
    spare = tiles.height - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, 0, 0, spare)) if spare else rows


def _attend_split(
    queries: Tensor, shape: AttentionShape, cache: KVCache, tiles: _Tiles, step: _SplitStep
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum, accumulator) of one split: [W·G, rows · group, 1 | 1 | D]."""
    dim, used, count = shape.head_dim, tiles.rows * shape.group, step.num_blocks
    q = queries if step.tiles_kv is None else queries.index_select(0, step.tiles_kv)
    keys = cache.k.view(-1, BLOCK, dim).index_select(0, step.blocks).float()
    values = cache.v.view(-1, BLOCK, dim).index_select(0, step.blocks).float()
    # NOTE: 0 · NaN is NaN: what a reused block holds past the sequence must not be multiplied.
    values.view(-1, dim).index_fill_(0, step.stale, 0.0)
    scores = q.bmm(keys.view(-1, count * BLOCK, dim).transpose(1, 2))[:, :used] * dim**-0.5
    if step.hidden is not None:
        scores.view(len(step.hidden), -1, *scores.shape[1:]).masked_fill_(step.hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp(min=-3e38)).exp_()  # a fully hidden row gives exp(-inf) = 0
    weights = weights.view(-1, used, count, BLOCK).transpose(1, 2)  # [W·G, count, used, 64]
    operand = weights.new_zeros(*weights.shape[:2], tiles.height, BLOCK)
    operand[:, :, :used] = weights
    parts = operand.flatten(0, 1).bmm(values).view(-1, count, tiles.height, dim)[:, :, :used]
    return top, _in_order(weights.sum(-1, keepdim=True)), _in_order(parts)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over dim 1 in ascending order, from +0: a part of zeros, of any sign, changes no bit."""
    total = parts[:, 0] + 0.0
    for index in range(1, parts.shape[1]):
        total += parts[:, index]
    return total


def _fold(
    state: tuple[Tensor, Tensor, Tensor],
    part: tuple[Tensor, Tensor, Tensor],
    index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold the next split into the running state; a fully hidden split changes no bit."""
    old = state if index is None else tuple(t.index_select(0, index) for t in state)
    top, total, acc = old
    new_top = torch.maximum(top, part[0])
    safe = new_top.clamp(min=-3e38)
    keep, add = (top - safe).exp(), (part[0] - safe).exp()
    nothing, first = part[0] == -torch.inf, top == -torch.inf
    mixed = (total * keep + part[1] * add, acc * keep + part[2] * add)
    merged = tuple(
        torch.where(nothing, before, torch.where(first, now, mix))
        for before, now, mix in zip((total, acc), part[1:], mixed, strict=True)
    )
    if index is None:
        return new_top, merged[0], merged[1]
    for whole, changed in zip(state, (new_top, *merged), strict=True):
        whole.index_copy_(0, index, changed)
    return state


def attend(q: Tensor, shape: AttentionShape, cache: KVCache, work: Work) -> Tensor:
    """Attention of all rows of a step: [M, H, D] → [M, H·D] float32."""
    outs = [_attend_tiles(q, shape, cache, tiles) for tiles in work.tiles]
    rows = outs[0] if len(outs) == 1 else torch.cat(outs)
    return rows.index_select(0, work.inverse)


def _attend_tiles(q: Tensor, shape: AttentionShape, cache: KVCache, tiles: _Tiles) -> Tensor:
    """Attention of query tiles of one size: [tiles · rows, H·D] float32."""
    queries = _gather_queries(q, shape, tiles)  # [T·G, height, D]
    state: tuple[Tensor, Tensor, Tensor] | None = None
    for step in tiles.steps:
        part = _attend_split(queries, shape, cache, tiles, step)
        state = part if state is None else _fold(state, part, step.tiles_kv)
    assert state is not None, "a tile has keys"
    _, total, acc = state
    out = (acc / total).view(-1, shape.num_kv_heads, tiles.rows, shape.group, shape.head_dim)
    return out.permute(0, 2, 1, 3, 4).reshape(-1, shape.num_heads * shape.head_dim)
