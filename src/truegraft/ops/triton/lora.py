"""Adapter work of a step: which rows, slots and pages meet, and the shrink S = round(scale · x Aᵀ).

The work list is made on the device from the rows' slots, once for all linears of a step, so that
nothing which a batch decides is known to the host. Its unit is a 16-rank page: an adapter of rank
128 is eight of them, one of rank 8 is one. Knows nothing about base weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from truegraft.errors import ConfigError
from truegraft.ops.interface import PAGE_RANK, LinearPart, RowPlan
from truegraft.ops.triton import memory, tiles
from truegraft.ops.triton.launch import (
    INTERPRETED,
    capture_id,
    launch,
    release_dependents,
    wait_for_inputs,
)

MAX_PARTS = 3  # linears that share an input: q, k and v
ITEM = 4  # fields of an item
MAX_LINEARS = 1 << 14  # that one engine can have
_ASSEMBLY = tl.constexpr(not INTERPRETED)
MAX_PARTIALS = 1 << 24  # float32 values: 64 MB
ARRIVALS = 1 << 16  # units of a step whose K chunks may be computed apart


class Signals:
    """Words on the device that let a product start when x is ready, before its S is.

    Every row plan has an epoch, counted on the device. A shrink writes its plan's epoch into the
    word of its linear once x may be read; the product beside it waits for that. A word holds one
    epoch once: a linear that is used again under the same plan, or in a graph that does not count
    the epoch itself, gets no word, and its product waits for the shrink to start instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.zeros(MAX_LINEARS, dtype=torch.int32, device=device)
        self._of_linear: dict[int, int] = {}

    def claim(self, weight: Tensor, rows: AdapterRows) -> Tensor | None:
        """The word of a linear [1], or None where it has none left under this plan."""
        word = self._of_linear.setdefault(weight.data_ptr(), len(self._of_linear))
        assert word < MAX_LINEARS, "more linears than words"
        if word in rows.claimed or rows.capture != capture_id(weight.device):
            return None
        rows.claimed.add(word)
        return self._words[word : word + 1]


@dataclass(frozen=True)
class AdapterRows(RowPlan):
    """The slots of some rows, and the adapter work that follows from them.

    An item is up to `block` rows of one slot, times one page ordinal: (slot, ordinal, first place
    in `order`, rows). An entry is a page that a tile of `tiles.row_height` rows needs, as the index
    slot · ordinals + ordinal of `LoraPages.page_of`; ascending, which is the order of the sum.
    Without adapters (`ordinals` 0) there are neither.
    """

    slots: Tensor  # [M] int32, -1: base, -2: does not exist
    epoch: Tensor  # [1] int32
    ordinals: int
    block: int
    capture: int  # graph that the plan is part of
    load: tiles.Load  # how many pages there may be: a hint, which moves no bit
    order: Tensor | None = None  # [M] int32, rows by slot
    items: Tensor | None = None  # [most items, 4] int32
    num_items: Tensor | None = None  # [1] int32
    entries: Tensor | None = None  # [tiles, most entries] int32
    counts: Tensor | None = None  # [tiles] int32, entries of each tile
    claimed: set[int] = field(default_factory=set)  # words of `Signals`


def check_slots(slots: Tensor, num_slots: int) -> None:
    """Raise ConfigError for the first slot of a host tensor that does not exist."""
    for row, slot in enumerate(slots.tolist()):
        if not -1 <= slot < num_slots:
            raise ConfigError(
                f"row {row} has adapter slot {slot}, but slots are -1 (the base model) to "
                f"{num_slots - 1}; raise max_loras or give the row a slot that exists."
            )


def plan_rows(
    slots: Tensor, depth: Tensor | None, ordinals: int, signals: Signals, pages: int = 0
) -> AdapterRows:
    """Lay out the adapter work of rows with these slots.

    slots: [M] int32; depth: [slots] int32, most pages of any module of the slot's adapter, or None
    without adapters; ordinals: pages that a slot can have, a power of two. All on the device.
    """
    rows, device, capture = len(slots), slots.device, capture_id(slots.device)
    num_slots = 0 if depth is None else len(depth)

    def ints(*shape: int) -> Tensor:
        return memory.empty(*shape, dtype=torch.int32, device=device)

    checked, epoch = ints(rows), ints(1)
    block, height = tiles.shrink_rows(rows), tiles.row_height(rows)
    num_tiles = -(-rows // height) if num_slots else 0
    width = max(min(num_slots, height) * ordinals, 1)
    most_items = (min(num_slots, rows) + rows // block) * ordinals
    order, items, num_items = ints(rows), ints(max(most_items, 1), ITEM), ints(1)
    entries, counts = ints(max(num_tiles, 1), width), ints(max(num_tiles, 1))
    # NOTE: not `dependent`: an epoch begins when everything before has ended.
    launch(
        lora_plan,
        (num_slots + num_tiles + 1,),
        *(slots, checked, signals.epoch, epoch, depth if depth is not None else slots),
        *(order, items, num_items, entries, counts, rows, num_slots, width),
        SLOTS=max(triton.next_power_of_2(num_slots), 16),
        ORDINALS=max(ordinals, 1),
        BLOCK=block,
        HEIGHT=height,
        num_warps=4,
        dependent=False,
        settles=True,
    )
    if depth is None:
        return AdapterRows(checked, epoch, 0, block, capture, "none")
    work = (order, items, num_items, entries, counts)
    load: tiles.Load = "many" if pages > tiles.MANY else "few"
    return AdapterRows(checked, epoch, ordinals, block, capture, load, *work)


@triton.jit(do_not_specialize=["rows", "num_slots", "width"])
def lora_plan(
    slots,
    checked,
    counter,
    epoch,
    depth,
    order,
    items,
    num_items,
    entries,
    counts,
    rows,
    num_slots,
    width,
    SLOTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """A program lists one slot's items, one tile's entries, or (the last) checks all slots."""
    wait_for_inputs()
    program = tl.program_id(0)
    if program < num_slots:
        _list_items(
            program, slots, depth, order, items, num_items, rows, num_slots, SLOTS, ORDINALS, BLOCK
        )
    elif program == tl.num_programs(0) - 1:
        now = tl.load(counter) + 1
        tl.store(counter, now)
        tl.store(epoch, now)
        lane = tl.arange(0, 256)
        for start in range(0, rows, 256):
            here = start + lane
            slot = tl.load(slots + here, mask=here < rows, other=-1)
            slot = tl.where((slot < -1) | (slot >= num_slots), -2, slot)
            tl.store(checked + here, slot, mask=here < rows)
    else:
        tile = program - num_slots
        _list_entries(
            tile, slots, depth, entries, counts, rows, num_slots, width, SLOTS, ORDINALS, HEIGHT
        )


@triton.jit
def _list_items(
    mine,
    slots,
    depth,
    order,
    items,
    num_items,
    rows,
    num_slots,
    SLOTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of slot `mine`, in order, after those of lower slots; and its items likewise."""
    STEP: tl.constexpr = 64
    lane = tl.arange(0, STEP)
    every = tl.arange(0, SLOTS)
    counts = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, rows, STEP):
        here = start + lane
        slot = tl.load(slots + here, mask=here < rows, other=-1)
        counts += tl.sum((slot[:, None] == every[None, :]).to(tl.int32), 0)
    pages = tl.load(depth + every, mask=every < num_slots, other=0)
    counts = tl.where(every < num_slots, counts, 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    first_row = tl.sum(tl.where(every < mine, counts, 0), 0)
    first_item = tl.sum(tl.where(every < mine, blocks * pages, 0), 0)
    count = tl.sum(tl.where(every == mine, counts, 0), 0)
    pages_here = tl.sum(tl.where(every == mine, pages, 0), 0)
    if mine == 0:
        tl.store(num_items, tl.sum(blocks * pages, 0))

    place = first_row
    for start in range(0, rows, STEP):
        here = start + lane
        slot = tl.load(slots + here, mask=here < rows, other=-1)
        found = (slot == mine).to(tl.int32)
        tl.store(order + place + tl.cumsum(found, 0) - 1, here, mask=found == 1)
        place += tl.sum(found, 0)

    own_items = (count + BLOCK - 1) // BLOCK * pages_here
    for start in range(0, own_items, STEP):
        number = start + lane
        block = number // tl.maximum(pages_here, 1)
        item = items + (first_item + number) * 4
        mask = number < own_items
        tl.store(item, tl.zeros_like(number) + mine, mask=mask)
        tl.store(item + 1, number - block * pages_here, mask=mask)
        tl.store(item + 2, first_row + block * BLOCK, mask=mask)
        tl.store(item + 3, tl.minimum(count - block * BLOCK, BLOCK), mask=mask)


@triton.jit
def _list_entries(
    tile,
    slots,
    depth,
    entries,
    counts,
    rows,
    num_slots,
    width,
    SLOTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """The slots of one tile's rows, ascending, each with all its page ordinals, ascending."""
    STEP: tl.constexpr = 64 if HEIGHT > 64 else HEIGHT
    every = tl.arange(0, SLOTS)
    present = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, HEIGHT, STEP):
        here = tile * HEIGHT + start + tl.arange(0, STEP)
        slot = tl.load(slots + here, mask=here < rows, other=-1)
        present = tl.maximum(present, tl.max((slot[:, None] == every[None, :]).to(tl.int32), 0))
    pages = tl.load(depth + every, mask=every < num_slots, other=0)
    pages = tl.where(every < num_slots, pages * present, 0)
    first = tl.cumsum(pages, 0) - pages
    for ordinal in range(0, ORDINALS):
        place = entries + tile * width + first + ordinal
        tl.store(place, every * ORDINALS + ordinal, mask=ordinal < pages)
    tl.store(counts + tile, tl.sum(pages, 0))


# ---------------------------------------------------------------------------------------- shrink


def shrink(
    x: Tensor,
    parts: Sequence[LinearPart],
    rows: AdapterRows,
    arrivals: Tensor,
    ready: Tensor | None,
    programs: int = 264,
) -> Tensor:
    """S[m, part, o·16 + r] = round(scale · Σ chunks of x[m] A_o[r]ᵀ), o: pages of row m's slot.

    x: [M, K]; arrivals: [ARRIVALS] int32, zero before and after; ready: [1] int32, set to the
    epoch of `rows` as soon as x may be read, or None: then dependents start no earlier than that.
    S is written only where a row has the page: [M, parts · ordinals · 16].
    """
    assert rows.items is not None and rows.order is not None and rows.num_items is not None
    m, k = x.shape
    chunk = tiles.shrink_chunk(k)
    splits = -(-k // chunk)
    most = len(rows.items) * len(parts)
    size = most * splits * PAGE_RANK * rows.block
    apart = most <= ARRIVALS and size <= MAX_PARTIALS
    s = memory.empty(m, len(parts) * rows.ordinals * PAGE_RANK, dtype=x.dtype, device=x.device)
    partials = memory.empty(size if apart else 1, dtype=torch.float32, device=x.device)
    units = most * (splits if apart else 1)
    launch(
        lora_shrink,
        (min(units, programs),),
        *(x, s, partials, arrivals, ready, rows.epoch, rows.items, rows.num_items, rows.order),
        *_part_tensors(parts),
        k,
        PARTS=len(parts),
        ORDINALS=rows.ordinals,
        BLOCK=rows.block,
        CHUNK=chunk,
        SPLITS=splits,
        APART=apart,
        STEP=min(128, chunk) if x.dtype != torch.float32 else min(64, chunk),
        EVEN=k % chunk == 0,
        STAGES=3,
        num_warps=4,
        num_stages=3,
    )
    return s


def _part_tensors(parts: Sequence[LinearPart]) -> list[Tensor | None]:
    """A pages, page tables and scales of three parts; None where there are fewer."""
    pages = [part.pages for part in parts] + [None] * (MAX_PARTS - len(parts))
    return [
        *(p.a if p else None for p in pages),
        *(p.page_of if p else None for p in pages),
        *(p.scale if p else None for p in pages),
    ]


@triton.jit
def prefetch(place, COUNT: tl.constexpr):
    """Ask for COUNT elements at each pointer to be brought into L2. Changes nothing else."""
    if _ASSEMBLY:
        size: tl.constexpr = COUNT * (place.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [place, tl.full(place.shape, size, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def pick(part, first, second, third, PARTS: tl.constexpr):
    """The part's pointer (or number) of up to three."""
    chosen = first
    if PARTS > 1:
        if part == 1:
            chosen = second
    if PARTS > 2:
        if part == 2:
            chosen = third
    return chosen


@triton.jit
def _prefetch(
    items,
    page_of_0,
    page_of_1,
    page_of_2,
    a_0,
    a_1,
    a_2,
    K,
    PARTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Pull the A chunk of this program's first unit into L2 while the kernel before drains."""
    task = tl.program_id(0) // SPLITS
    part = task % PARTS
    item = items + task // PARTS * 4
    slot = tl.load(item, cache_modifier=".cg")
    entry = slot * ORDINALS + tl.load(item + 1, cache_modifier=".cg")
    page_of = pick(part, page_of_0, page_of_1, page_of_2, PARTS)
    page = tl.load(page_of + entry, cache_modifier=".cg")
    if page >= 0:
        # 128 pieces, one a thread: 8 of each of the 16 rows
        piece = tl.arange(0, 128)
        a = pick(part, a_0, a_1, a_2, PARTS) + page.to(tl.int64) * 16 * K
        place = a + piece // 8 * K + tl.program_id(0) % SPLITS * CHUNK + piece % 8 * (CHUNK // 8)
        prefetch(place, CHUNK // 8)


@triton.jit(do_not_specialize_on_alignment=["ready"])
def lora_shrink(
    x,
    s,
    partials,
    arrivals,
    ready,
    epoch,
    items,
    num_items,
    order,
    a_0,
    a_1,
    a_2,
    page_of_0,
    page_of_1,
    page_of_2,
    scale_0,
    scale_1,
    scale_2,
    K,
    PARTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Units of (item, part, K chunk), or of (item, part) with all chunks in turn."""
    if ready is not None:
        release_dependents()
        now = tl.load(epoch, cache_modifier=".cg")
    units = tl.load(num_items, cache_modifier=".cg") * PARTS
    if APART:
        units *= SPLITS
        if EVEN:
            if tl.program_id(0) < units:
                _prefetch(
                    items,
                    page_of_0,
                    page_of_1,
                    page_of_2,
                    a_0,
                    a_1,
                    a_2,
                    K,
                    PARTS,
                    ORDINALS,
                    CHUNK,
                    SPLITS,
                )
    wait_for_inputs()
    if ready is None:
        release_dependents()  # they may read x at once: what wrote it has ended
    else:
        if tl.program_id(0) == 0:
            # NOTE: relaxed. What wrote x has ended and x is in the L2, where the product reads it.
            tl.atomic_xchg(ready, now, sem="relaxed", scope="gpu")
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), num_stages=1):
        if APART:
            split = unit % SPLITS
            task = unit // SPLITS
        else:
            split = 0
            task = unit
        part = task % PARTS
        item = items + task // PARTS * 4
        slot = tl.load(item)
        ordinal = tl.load(item + 1)
        first = tl.load(item + 2)
        count = tl.load(item + 3)
        page = tl.load(
            pick(part, page_of_0, page_of_1, page_of_2, PARTS) + slot * ORDINALS + ordinal
        )
        if page >= 0:
            rank = tl.arange(0, 16)
            row = tl.arange(0, BLOCK)
            scale = tl.load(pick(part, scale_0, scale_1, scale_2, PARTS) + slot)
            rows = tl.load(order + first + row, mask=row < count, other=0)
            a = pick(part, a_0, a_1, a_2, PARTS) + page.to(tl.int64) * 16 * K
            xs = x + rows.to(tl.int64) * K
            target = s + rows.to(tl.int64)[None, :] * (PARTS * ORDINALS * 16)
            target += part * (ORDINALS * 16) + ordinal * 16 + rank[:, None]
            mask = (row < count)[None, :] & (rank < 16)[:, None]
            if APART:
                total = _chunk(a, xs, row < count, split, K, BLOCK, CHUNK, STEP, EVEN, STAGES)
                place = partials + task * (SPLITS * 16 * BLOCK)
                place += rank[:, None] * BLOCK + row[None, :]
                tl.store(place + split * (16 * BLOCK), total)
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + task, 1, sem="acq_rel", scope="gpu")
                if arrived == SPLITS - 1:
                    total = tl.load(place, cache_modifier=".cg")
                    for other in tl.static_range(1, SPLITS):
                        total += tl.load(place + other * (16 * BLOCK), cache_modifier=".cg")
                    tl.store(target, (total * scale).to(s.dtype.element_ty), mask=mask)
                    tl.store(arrivals + task, 0)
            else:
                total = _chunk(a, xs, row < count, 0, K, BLOCK, CHUNK, STEP, EVEN, STAGES)
                for other in range(1, SPLITS):
                    total += _chunk(a, xs, row < count, other, K, BLOCK, CHUNK, STEP, EVEN, STAGES)
                tl.store(target, (total * scale).to(s.dtype.element_ty), mask=mask)


@triton.jit
def _chunk(
    a,
    xs,
    has_row,
    split,
    K,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A xᵀ over one K chunk: [16, BLOCK] float32. xs: [BLOCK] pointers to rows."""
    rank = tl.arange(0, 16)
    lane = tl.arange(0, STEP)
    total = tl.zeros((16, BLOCK), tl.float32)
    for k in tl.range(split * CHUNK, split * CHUNK + CHUNK, STEP, num_stages=STAGES):
        at = k + lane
        if EVEN:
            left = tl.load(a + rank[:, None] * K + at[None, :])
            right = tl.load(xs[:, None] + at[None, :], mask=has_row[:, None], other=0.0)
        else:
            inside = (at < K)[None, :]
            left = tl.load(a + rank[:, None] * K + at[None, :], mask=inside, other=0.0)
            right = tl.load(xs[:, None] + at[None, :], mask=has_row[:, None] & inside, other=0.0)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    return total
