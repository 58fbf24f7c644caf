"""Plain PyTorch: the living definition of every op, and the CPU back end.

Sums are fp32 (weights are upcast once, by `pack`), results are rounded once, at the end of an op.
Exactness comes from shapes: each matmul runs in row tiles of a few fixed sizes, and `prove.py`
shows at load that those sizes agree bit for bit on this machine. Transcendentals are `exp`, `log`
and `log1p` alone, whose vector and scalar paths agree; others (silu, sigmoid, exp2) do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from truegraft.ops.interface import (
    PAGE_RANK,
    SPLIT,
    AttentionPlan,
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
from truegraft.ops.noise import exponential

BLOCK = 64
BLOCKS_PER_SPLIT = SPLIT // BLOCK


@dataclass(frozen=True)
class Tiles:
    """Row counts of matmul calls. Each tuple's members give equal bits, as proved at load.

    linear: rows of a linear. attention: query rows × heads of a group. lora: rows of a unit.
    """

    linear: tuple[int, ...] = (16, 32, 64, 128, 256)
    attention: tuple[int, ...] = (8, 64)
    lora: int = 8


class ReferenceOps:
    """The ops of `interface.Ops` on any torch device, in the given model dtype."""

    def __init__(self, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
        self.dtype = dtype
        self.tiles = tiles or Tiles()
        self.row_multiple = self.tiles.linear[0]

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    # ------------------------------------------------------------------ linears and adapters

    def pack(self, weight: Tensor) -> Tensor:
        return weight.float().t().contiguous()

    def new_pages(self, counts: tuple[int, int, int], in_features: int, out: int) -> LoraPages:
        pages, slots, ordinals = counts
        return LoraPages(
            torch.empty(pages, PAGE_RANK, in_features),
            torch.empty(pages, PAGE_RANK, out),
            torch.full((slots, ordinals), -1, dtype=torch.int32),
            torch.zeros(slots),
        )

    def plan_rows(self, slots: Tensor) -> RowPlan:
        return UnitPlan(slots.tolist(), self.tiles.lora)

    def embed(self, token_ids: Tensor, embedding: Embedding, rows: RowPlan) -> Tensor:
        assert isinstance(rows, UnitPlan)
        y = embedding.weight.index_select(0, token_ids).float()
        pages = embedding.pages
        if pages is not None:
            for units in rows.units(pages):
                ids = token_ids.index_select(0, units.rows).view(-1, rows.tile)
                s = pages.a[units.pages[:, None], :, ids]  # [U, tile, 16]
                self._expand(y, s * units.scale, pages, units)
        return self._round(y)

    def linear(
        self, x: Tensor, linear: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        assert isinstance(rows, UnitPlan)
        x = x.float()
        y = self._matmul(x, linear.weight)
        if linear.bias is not None:
            y += linear.bias.float()
        for part in linear.parts:
            if part.pages is not None:
                self._add_adapters(x, y, part, rows)
        return y.to(out or self.dtype)

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K] times the packed weight [K, N], in row tiles of proved sizes."""
        if x.shape[0] in self.tiles.linear:
            return x @ weight
        y = torch.empty(x.shape[0], weight.shape[1])
        start = 0
        while start < x.shape[0]:
            size = max(t for t in self.tiles.linear if t <= x.shape[0] - start)
            torch.mm(x[start : start + size], weight, out=y[start : start + size])
            start += size
        return y

    def _add_adapters(self, x: Tensor, y: Tensor, part: LinearPart, rows: UnitPlan) -> None:
        assert part.pages is not None
        columns = y[:, part.offset : part.offset + part.size]
        for units in rows.units(part.pages):
            xs = x.index_select(0, units.rows).view(-1, rows.tile, x.shape[1])
            a = part.pages.a.index_select(0, units.pages)
            self._expand(columns, xs.bmm(a.transpose(1, 2)).mul_(units.scale), part.pages, units)

    def _expand(self, y: Tensor, s: Tensor, pages: LoraPages, units: _Units) -> None:
        """y += round(s) B, in place; a row without this page gets -0.0, which changes no bit."""
        b = pages.b.index_select(0, units.pages)
        delta = torch.empty(s.shape[0] * s.shape[1] + 1, b.shape[2])
        torch.bmm(self._round(s).float(), b, out=delta[:-1].view(*s.shape[:2], -1))
        delta[-1] = -0.0
        y += delta.index_select(0, units.inverse)

    # ------------------------------------------------------------------ row-wise

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        r = x.float() if residual is None else self._round(x.float() + residual.float()).float()
        return self._round(_rms_norm(r, weight.float(), eps)), self._round(r)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        # NOTE: exp runs on a contiguous copy: its vector path must not depend on row strides.
        return self._round(gate / gate.neg().exp_().add_(1.0) * up)

    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        num_q, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, dim)
        qk = heads[:, : num_q + num_kv].float()
        if norm is not None:
            q = self._round(_rms_norm(qk[:, :num_q], norm.q.float(), norm.eps))
            k = self._round(_rms_norm(qk[:, num_q:], norm.k.float(), norm.eps))
            qk = torch.cat((q, k), dim=1).float()
        cos, sin = (t.unsqueeze(1) for t in cos_sin)
        first, second = qk[..., : dim // 2], qk[..., dim // 2 :]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated = self._round(rotated)
        n = batch.num_tokens
        cache.k[batch.kv_block, :, batch.kv_offset] = rotated[:n, num_q:]
        cache.v[batch.kv_block, :, batch.kv_offset] = heads[:n, num_q + num_kv :]
        return rotated[:, :num_q]

    # ------------------------------------------------------------------ attention

    def plan_attention(self, batch: TokenBatch, shapes: Sequence[AttentionShape]) -> AttentionPlan:
        return TilePlan({s: _plan_tiles(batch, s, self.tiles.attention) for s in set(shapes)})

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, TilePlan)
        work = plan.work[shape]
        outs = [self._attend(q, shape, cache, tiles) for tiles in work.tiles]
        rows = outs[0] if len(outs) == 1 else torch.cat(outs)
        return self._round(rows.index_select(0, work.inverse))

    def _attend(self, q: Tensor, shape: AttentionShape, cache: KVCache, tiles: _Tiles) -> Tensor:
        """Attention of query tiles of one size: [tiles · rows, H·D] float32."""
        group = shape.num_heads // shape.num_kv_heads
        queries = _gather_queries(q, shape, tiles)  # [T·G, height, D]
        state: tuple[Tensor, Tensor, Tensor] | None = None
        for step in tiles.steps:
            part = _attend_split(queries, shape, cache, step)
            state = part if state is None else _fold(state, part, step.tiles_kv)
        assert state is not None
        _, total, acc = state
        out = acc[:, : tiles.rows * group] / total[:, : tiles.rows * group]
        out = out.view(-1, shape.num_kv_heads, tiles.rows, group, shape.head_dim)
        return out.permute(0, 2, 1, 3, 4).reshape(-1, shape.num_heads * shape.head_dim)

    # ------------------------------------------------------------------ sampling

    def adjust(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        out = logits
        for index, row in enumerate(rows):
            if row is not None and row.adjusts:
                out = out.clone() if out is logits else out
                _adjust_row(out[index], row)
        return out

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        drawn = [i for i, row in enumerate(rows) if row is not None and row.draws]
        if drawn:
            logits = logits.clone()
        for index in drawn:
            row = rows[index]
            assert row is not None
            _perturb_row(logits[index], row)
        return argmax(logits)

    def logprobs(self, logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted - shifted.exp().sum(-1, keepdim=True).log()


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest value of each row: [L, V] → [L] int64. NaN rows give V - 1."""
    ids = torch.arange(logits.shape[-1])
    best = logits.amax(-1, keepdim=True)
    lowest = torch.where(logits == best, ids, logits.shape[-1]).amin(-1)
    return lowest.clamp_(max=logits.shape[-1] - 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = (x * x).sum(-1, keepdim=True).div_(x.shape[-1])
    return x / (mean + eps).sqrt_() * weight


# ---------------------------------------------------------------------- adapter units


class _Units(NamedTuple):
    """The rows that have one page ordinal of a target module, in units of `tile` rows."""

    rows: Tensor  # [U·tile] int64, row index; a unit's unused places repeat its first row
    pages: Tensor  # [U] int64
    scale: Tensor  # [U, 1, 1] float32
    inverse: Tensor  # [M] int64, place in `rows`, or U·tile for rows without this page


class UnitPlan(RowPlan):
    """Rows grouped by slot into units of `tile` rows; pages per target module on demand.

    A unit is the smallest work of an adapter: `tile` rows × one page, always of that shape.
    """

    def __init__(self, slots: Sequence[int], tile: int) -> None:
        self.tile = tile
        self._num_rows = len(slots)
        self._units: list[tuple[int, list[int]]] = []  # (slot, its rows, at most `tile`)
        self._by_pages: dict[int, tuple[LoraPages, list[_Units]]] = {}
        of_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot >= 0:
                of_slot.setdefault(slot, []).append(row)
        for slot, rows in sorted(of_slot.items()):
            self._units += [(slot, rows[i : i + tile]) for i in range(0, len(rows), tile)]

    def units(self, pages: LoraPages) -> list[_Units]:
        """This module's units, one entry per page ordinal, ascending."""
        if not self._units:
            return []
        known = self._by_pages.get(id(pages))
        if known is None:
            known = (pages, self._lay_out(pages))
            self._by_pages[id(pages)] = known
        return known[1]

    def _lay_out(self, pages: LoraPages) -> list[_Units]:
        table, scale = pages.page_of.tolist(), pages.scale.tolist()
        layout = []
        for ordinal in range(pages.page_of.shape[1]):
            chosen = [u for u in self._units if table[u[0]][ordinal] >= 0]
            if chosen:
                ids = [table[slot][ordinal] for slot, _ in chosen]
                layout.append(self._tensors(chosen, ids, [scale[slot] for slot, _ in chosen]))
        return layout

    def _tensors(
        self, chosen: list[tuple[int, list[int]]], pages: list[int], scale: list[float]
    ) -> _Units:
        rows = torch.tensor([(r + r[:1] * self.tile)[: self.tile] for _, r in chosen]).flatten()
        inverse = [len(chosen) * self.tile] * self._num_rows
        for unit, (_, members) in enumerate(chosen):
            for place, row in enumerate(members):
                inverse[row] = unit * self.tile + place
        return _Units(
            rows, torch.tensor(pages), torch.tensor(scale).view(-1, 1, 1), torch.tensor(inverse)
        )


# ---------------------------------------------------------------------- attention tiles


class _SplitStep(NamedTuple):
    """One split of keys for each of some tiles."""

    tiles_kv: Tensor | None  # [W·G] int64, tile · G + kv head; None: all, in order
    blocks: Tensor  # [W·G·4] int64, block · G + kv head of the split's keys
    hidden: Tensor  # [W, 1, height, 256] bool, keys that a query must not see
    unused: Tensor  # [W, 1, 256, 1] bool, keys past the sequence: their memory may hold anything


class _Tiles(NamedTuple):
    """Query tiles of one size, and the splits that they read, in ascending order."""

    rows: int  # query rows of a tile
    height: int  # rows × heads of a group, padded: rows of a matmul
    tokens: Tensor  # [T·rows] int64, row of the step
    steps: list[_SplitStep]


class _Work(NamedTuple):
    tiles: list[_Tiles]
    inverse: Tensor  # [M] int64, row of the step → row of the concatenated tiles


@dataclass(frozen=True)
class TilePlan(AttentionPlan):
    """A step's attention work for each distinct layer shape."""

    work: dict[AttentionShape, _Work] = field(default_factory=dict)


class _Tile(NamedTuple):
    first: int  # row of the step
    used: int  # query rows in use
    position: int  # of the first query
    table: Tensor  # [max blocks], the sequence's blocks


def _plan_tiles(batch: TokenBatch, shape: AttentionShape, heights: Sequence[int]) -> _Work:
    group = shape.num_heads // shape.num_kv_heads
    least = heights[0]
    sizes = {}  # query rows of a tile -> matmul height
    for height in sorted(heights, reverse=True):
        height = -(-max(height, group) // least) * least
        sizes[height // group] = height
    of_size: dict[int, list[_Tile]] = {size: [] for size in sizes}
    for tile, size in _cut(batch, list(sizes)):
        of_size[size].append(tile)
    classes = []
    inverse = torch.zeros(len(batch.token_ids), dtype=torch.int64)
    base = 0
    for size, tiles in of_size.items():
        for place, tile in zip(range(base, base + len(tiles) * size, size), tiles, strict=True):
            inverse[tile.first : tile.first + tile.used] = torch.arange(place, place + tile.used)
        base += len(tiles) * size
        if tiles:
            classes.append(_lay_out_tiles(tiles, size, shape, sizes[size]))
    return _Work(classes, inverse)


def _cut(batch: TokenBatch, sizes: Sequence[int]) -> list[tuple[_Tile, int]]:
    """Cut each sequence's rows into tiles, large ones first; the last may be partly used."""
    tiles = []
    offsets, starts = batch.seq_offset.tolist(), batch.seq_start.tolist()
    for index, row in enumerate(batch.seq_row.tolist()):
        first, end = offsets[index], offsets[index + 1]
        shift = starts[index] - first
        while first < end:
            size = next((s for s in sizes if s <= end - first), sizes[-1])
            count = min(size, end - first)
            tiles.append((_Tile(first, count, first + shift, batch.block_tables[row]), size))
            first += count
    return tiles


def _lay_out_tiles(tiles: list[_Tile], rows: int, shape: AttentionShape, height: int) -> _Tiles:
    lanes = torch.arange(rows)
    first = torch.tensor([t.first for t in tiles])
    count = torch.tensor([t.used for t in tiles])
    lane = torch.minimum(lanes, count[:, None] - 1)  # unused lanes repeat the last one
    positions = torch.tensor([t.position for t in tiles])[:, None] + lane  # [T, rows]
    tables = torch.stack([t.table for t in tiles]).long()
    steps = []
    window = shape.window or 2**62
    begin = (positions[:, 0] - window + 1).clamp(min=0) // SPLIT
    end = positions[:, -1] // SPLIT + 1
    for step in range(int((end - begin).max())):
        alive = torch.nonzero(begin + step < end).flatten()
        everyone = len(alive) == len(tiles)
        split = begin[alive] + step
        steps.append(
            _SplitStep(
                None if everyone else _spread(alive, shape.num_kv_heads).flatten(),
                _split_blocks(tables[alive], split, shape.num_kv_heads),
                *_masks(positions[alive], split, shape, height),
            )
        )
    return _Tiles(rows, height, (first[:, None] + lane).flatten(), steps)


def _spread(index: Tensor, heads: int) -> Tensor:
    return index[..., None] * heads + torch.arange(heads)


def _split_blocks(tables: Tensor, split: Tensor, heads: int) -> Tensor:
    """Cache rows of the keys of each (tile, kv head): [W·G·4]. Places past the table read 0."""
    place = split[:, None] * BLOCKS_PER_SPLIT + torch.arange(BLOCKS_PER_SPLIT)
    inside = place < tables.shape[1]
    blocks = torch.where(inside, tables.gather(1, place.clamp(max=tables.shape[1] - 1)), 0)
    return _spread(blocks, heads).transpose(1, 2).flatten()


def _masks(
    positions: Tensor, split: Tensor, shape: AttentionShape, height: int
) -> tuple[Tensor, Tensor]:
    group = shape.num_heads // shape.num_kv_heads
    keys = split[:, None] * SPLIT + torch.arange(SPLIT)  # [W, 256]
    query = positions[:, :, None]
    hidden = keys[:, None] > query  # [W, rows, 256]
    if shape.window is not None:
        hidden |= keys[:, None] <= query - shape.window
    hidden = hidden.repeat_interleave(group, dim=1)
    padding = torch.zeros(len(split), height - hidden.shape[1], SPLIT, dtype=torch.bool)
    unused = keys > positions[:, -1:]
    return torch.cat((hidden, padding), dim=1)[:, None], unused[:, None, :, None]


def _gather_queries(q: Tensor, shape: AttentionShape, tiles: _Tiles) -> Tensor:
    """[M, H, D] → [T·G, height, D] float32; rows past rows × group are zero."""
    group = shape.num_heads // shape.num_kv_heads
    rows = q.index_select(0, tiles.tokens).float()
    rows = rows.view(-1, tiles.rows, shape.num_kv_heads, group, shape.head_dim)
    rows = rows.permute(0, 2, 1, 3, 4).reshape(-1, tiles.rows * group, shape.head_dim)
    spare = tiles.height - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, 0, 0, spare)) if spare else rows


def _attend_split(
    queries: Tensor, shape: AttentionShape, cache: KVCache, step: _SplitStep
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum, accumulator) of one split: [W·G, height, 1], the same, [W·G, height, D]."""
    dim = shape.head_dim
    q = queries if step.tiles_kv is None else queries.index_select(0, step.tiles_kv)
    keys = cache.k.view(-1, BLOCK, dim).index_select(0, step.blocks).float().view(-1, SPLIT, dim)
    values = cache.v.view(-1, BLOCK, dim).index_select(0, step.blocks).float()
    values = values.view(len(step.unused), -1, SPLIT, dim)
    # NOTE: 0 · NaN is NaN: what a reused block holds past the sequence must not be multiplied.
    values = values.masked_fill_(step.unused, 0.0).view(-1, SPLIT, dim)
    scores = q.bmm(keys.transpose(1, 2)).mul_(dim**-0.5)
    scores.view(len(step.hidden), -1, *scores.shape[1:]).masked_fill_(step.hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp(min=-3e38)).exp_()  # a fully hidden row gives exp(-inf) = 0
    return top, weights.sum(-1, keepdim=True), weights.bmm(values)


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


# ---------------------------------------------------------------------- one row's sampling


def _adjust_row(z: Tensor, row: SamplingRow) -> None:
    """In place on one row [V]: repetition, frequency, presence, bias, then masks."""
    if row.repetition_penalty != 1.0:
        seen = torch.cat((row.prompt, row.output))
        value = z[seen]
        factor = row.repetition_penalty
        z[seen] = torch.where(value > 0, value / factor, value * factor)
    if row.frequency_penalty or row.presence_penalty:
        counts = torch.bincount(row.output, minlength=len(z))
        z -= row.frequency_penalty * counts.float()
        z -= row.presence_penalty * (counts > 0).float()
    for token, bias in row.bias:
        z[token] += bias
    if row.allowed is not None:
        masked = torch.ones(len(z), dtype=torch.bool)
        masked[list(row.allowed)] = False
        z.masked_fill_(masked, -torch.inf)
    if row.banned:
        z[list(row.banned)] = -torch.inf


def _perturb_row(z: Tensor, row: SamplingRow) -> None:
    """In place on one row [V]: temperature, min-p, top-k, top-p, then Gumbel noise.

    The kept set is a threshold on values, so ties at the threshold stay together. top-p sums
    integer weights: exact in any order, on any device.
    """
    z /= row.temperature
    top = z.amax()
    if row.min_p > 0:
        z.masked_fill_(z < top + torch.tensor(row.min_p).log(), -torch.inf)
    if 0 < row.top_k < len(z):
        z.masked_fill_(z < z.topk(row.top_k).values[-1], -torch.inf)
    if row.top_p < 1:
        z.masked_fill_(z < _top_p_threshold(z, top, row.top_p), -torch.inf)
    z -= exponential(len(z), row.seed, row.sample_index, row.position).log()


def _top_p_threshold(z: Tensor, top: Tensor, top_p: float) -> Tensor:
    """The largest value v such that tokens with z ≥ v hold at least top_p of the weight."""
    values = z.sort(descending=True).values
    weights = ((values - top).exp() * 2.0**30).to(torch.int64)
    reached = weights.cumsum(0) >= (weights.sum().double() * top_p).ceil().to(torch.int64)
    return values[(~reached).sum()]
