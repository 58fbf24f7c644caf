"""Linears with their adapters inside: y = round(x Wᵀ + bias + Σ_o s_o B_o).

Two launches: the shrink (`lora.py`) and this product, which runs beside it. The product reads W
while the shrink reads A, waits for S only when its own sum is done, adds S Bᵀ to the same float32
accumulator and rounds once. K ascends in every tile, there is no split, and the pages of other
rows add exact zeros, so neither tiles nor neighbours can move a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from truegraft.ops.interface import PAGE_RANK, Linear, LinearPart
from truegraft.ops.triton import memory, tiles
from truegraft.ops.triton.launch import INTERPRETED, launch, release_dependents, wait_for_inputs
from truegraft.ops.triton.lora import MAX_PARTS, AdapterRows, Signals, pick, prefetch, shrink

ALIGNMENT = 16  # bytes: rows of W that the tensor memory accelerator can read

_ASSEMBLY = tl.constexpr(not INTERPRETED)


def pack(weight: Tensor) -> Tensor:
    """W [N, K], contiguous, with zero columns up to a row of a multiple of 16 bytes."""
    spare = -weight.shape[1] % (ALIGNMENT // weight.itemsize)
    return (
        torch.nn.functional.pad(weight, (0, spare)).contiguous() if spare else weight.contiguous()
    )


def linear(
    x: Tensor, layer: Linear, rows: AdapterRows, signals: Signals, out: torch.dtype | None = None
) -> Tensor:
    """y = round(x Wᵀ + bias + Σ_o s_o B_o): [M, K] → [M, N]. See `Ops.linear`."""
    weight, (m, k) = layer.weight, x.shape
    n = sum(part.size for part in layer.parts)
    assert x.is_contiguous() and x.dtype == weight.dtype and len(rows.slots) == m
    assert weight.shape[0] == n and 0 <= weight.shape[1] - k < ALIGNMENT
    tile = tiles.linear_tile(n, k, x.dtype, m, rows.load)
    y = memory.empty(m, n, dtype=out or x.dtype, device=x.device)
    parts = [part for part in layer.parts if part.pages is not None] if rows.ordinals else []
    if not parts:
        _product(x, layer, y, rows, tile)
        return y
    assert len(parts) == len(layer.parts) <= MAX_PARTS, "all parts of a linear have pages, or none"
    ready = signals.claim(weight, rows) if tile.spin else None
    s = shrink(x, parts, rows, signals.arrivals, ready, tile.programs)
    _product(x, layer, y, rows, tile, s, ready)
    return y


def _product(
    x: Tensor,
    layer: Linear,
    y: Tensor,
    rows: AdapterRows,
    tile: tiles.LinearTile,
    s: Tensor | None = None,
    ready: Tensor | None = None,
) -> None:
    """Launch the product into y; without `s` it is the base model's alone."""
    (m, k), n = x.shape, y.shape[1]
    entries, counts = (rows.entries, rows.counts) if s is not None else (None, None)
    assert tile.rows == tiles.row_height(m)
    weight = layer.weight
    descriptor = TensorDescriptor(
        weight, [n, weight.shape[1]], [weight.stride(0), 1], [tile.columns, tile.k]
    )
    ends = _ends(layer.parts)
    aligned = all(part.offset % tile.columns == 0 for part in layer.parts)
    launch(
        linear_kernel,
        (-(-n // tile.columns) * -(-m // tile.rows),),
        *(descriptor, x, layer.bias, y, rows.slots, s, ready, rows.epoch),
        *(entries, counts, 0 if entries is None else entries.shape[1]),
        *_part_tensors(layer.parts, s is not None),
        *(m, n, k, *ends),
        PARTS=len(layer.parts),
        ORDINALS=rows.ordinals if s is not None else 0,
        SWAP=tile.swap,
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        STEP=tile.k,
        EVEN=k % tile.k == 0,
        EARLY=tile.early,
        GROUP=tile.group if s is not None else 0,
        AHEAD=tile.ahead and s is not None,
        ALIGNED=aligned,
        DEPTH=tile.depth if s is not None else 0,
        FETCH=tile.fetch and aligned and n % tile.columns == 0 and s is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _ends(parts: tuple[LinearPart, ...]) -> tuple[int, int]:
    """Where the first and the second of up to three parts end."""
    ends = [part.offset + part.size for part in parts]
    return (ends[0], ends[min(1, len(ends) - 1)])


def _part_tensors(parts: tuple[LinearPart, ...], adapters: bool) -> list[Tensor | None]:
    """B pages ([P, N, 16] in memory) and page tables of three parts; None where there are fewer."""
    pages = [part.pages if adapters else None for part in parts]
    pages += [None] * (MAX_PARTS - len(parts))
    for held in pages:
        assert held is None or held.b.stride()[1:] == (1, PAGE_RANK), "b must come from new_pages"
    return [*(p.b if p else None for p in pages), *(p.page_of if p else None for p in pages)]


def _name(spec: tl.constexpr) -> str:
    """Distinct names with and without adapters, for the audit of graphs."""
    return "linear_lora" if spec.constants["ORDINALS"] else "linear_base"


@triton.jit
def _await(word, epoch):
    """Spin until the running shrink has set the word to this epoch: x is ready."""
    while _seen(word) - epoch < 0:
        pass
    tl.debug_barrier()


@triton.jit
def _seen(word):
    """Read a word that another running kernel sets, and nothing older than it afterwards."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];",
            "=r,l",
            [word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(word)


@triton.jit
def _group_entries(entries, count, first, page_of, ORDINALS: tl.constexpr, GROUP: tl.constexpr):
    """Page and entry of each of GROUP·16 rank columns; page -1: past the list, or no such page."""
    number = first + tl.arange(0, GROUP * 16) // 16
    entry = tl.load(entries + number, mask=number < count, other=-1, cache_modifier=".cg")
    entry = tl.max_constancy(entry, 16)
    page = tl.load(page_of + entry, mask=entry >= 0, other=-1, cache_modifier=".cg")
    return tl.max_constancy(page, 16), entry


@triton.jit
def _group_b(b, page, columns, has_column, size, GROUP: tl.constexpr):
    """B of a group: [COLUMNS, GROUP·16]; zero where there is no page."""
    rank = tl.arange(0, GROUP * 16) % 16
    place = page.to(tl.int64)[None, :] * size * 16 + columns[:, None] * 16 + rank[None, :]
    mask = (page >= 0)[None, :] & has_column[:, None]
    return tl.load(b + place, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _group_s(s_rows, page, entry, slots, ORDINALS: tl.constexpr, GROUP: tl.constexpr):
    """S of a group, a row's own pages alone: [ROWS, GROUP·16]. s_rows: [ROWS] pointers."""
    rank = tl.arange(0, GROUP * 16) % 16
    slot = entry // ORDINALS
    place = s_rows[:, None] + ((entry - slot * ORDINALS) * 16 + rank)[None, :]
    own = (slot[None, :] == slots[:, None]) & (page >= 0)[None, :]
    return tl.load(place, mask=own, other=0.0, cache_modifier=".cg")


@triton.jit
def _expand(acc, b, s, SWAP: tl.constexpr):
    """acc += S Bᵀ."""
    if SWAP:
        return tl.dot(b, s.T, acc, input_precision="ieee")
    else:
        return tl.dot(s, b.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "width"], do_not_specialize_on_alignment=["ready"], repr=_name)
def linear_kernel(
    weight,
    x,
    bias,
    y,
    row_slots,
    s,
    ready,
    epoch,
    entries,
    counts,
    width,
    b_0,
    b_1,
    b_2,
    page_of_0,
    page_of_1,
    page_of_2,
    M,
    N,
    K,
    end_0,
    end_1,
    PARTS: tl.constexpr,
    ORDINALS: tl.constexpr,
    SWAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEPTH: tl.constexpr,
    FETCH: tl.constexpr,
):
    """One tile of y: ROWS rows × COLUMNS columns."""
    LORA: tl.constexpr = ORDINALS > 0
    row_tiles = tl.cdiv(M, ROWS)
    column_tile = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) - column_tile * row_tiles
    column = column_tile * COLUMNS
    columns = column + tl.arange(0, COLUMNS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    has_row = rows < M

    if LORA:
        # NOTE: what is read here has settled, but the L1 may hold what was there before: `.cg`.
        count = tl.load(counts + row_tile, cache_modifier=".cg")
        entries += row_tile * width
        first_part = 0
        last_part = 0
        if PARTS > 1:
            last = tl.minimum(column + COLUMNS, N) - 1
            first_part += (column >= end_0).to(tl.int32)
            last_part += (last >= end_0).to(tl.int32)
            if PARTS > 2:
                first_part += (column >= end_1).to(tl.int32)
                last_part += (last >= end_1).to(tl.int32)
        begin = pick(first_part, 0, end_0, end_1, PARTS)
        end = pick(first_part, end_0, end_1, N, PARTS)
        page_of = pick(first_part, page_of_0, page_of_1, page_of_2, PARTS)
        b = pick(first_part, b_0, b_1, b_2, PARTS)
        if AHEAD:
            page, entry = _group_entries(entries, count, 0, page_of, ORDINALS, GROUP)
            first_b = _group_b(b, page, columns - begin, columns < end, end - begin, GROUP)
        if FETCH:
            later = tl.arange(0, 256) // 4  # pages after the first group, in four pieces each
            skipped: tl.constexpr = GROUP if AHEAD else 0
            listed = skipped + later < count
            fetched = tl.load(
                entries + skipped + later, mask=listed, other=-1, cache_modifier=".cg"
            )
            fetched = tl.load(page_of + fetched, mask=fetched >= 0, other=-1, cache_modifier=".cg")
            piece = COLUMNS * 4 * (tl.arange(0, 256) % 4)
            place = fetched.to(tl.int64) * (end - begin) * 16 + (column - begin) * 16 + piece
            if count > skipped:
                prefetch(b + tl.where(fetched >= 0, place, 0), COLUMNS * 4)
        if ready is not None:
            _await(ready, tl.load(epoch, cache_modifier=".cg"))
        # Without `ready` this program starts when the shrink has seen that x is complete.
    else:
        wait_for_inputs()
    if EARLY:
        release_dependents()
    if not LORA or ready is not None:
        slots = tl.load(row_slots + rows, mask=has_row, other=-1)

    if SWAP:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    lane = tl.arange(0, STEP)
    xs = x + rows.to(tl.int64)[:, None] * K + lane[None, :]
    for k in range(0, K, STEP):
        w = weight.load([column, k])
        if EVEN:
            values = tl.load(xs, mask=has_row[:, None], other=0.0)
        else:
            values = tl.load(xs, mask=has_row[:, None] & (k + lane < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w, values.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(values, w.T, acc, input_precision="ieee")
        xs += STEP
    if not EARLY:
        release_dependents()

    if LORA:
        wait_for_inputs()
        if ready is None:
            slots = tl.load(row_slots + rows, mask=has_row, other=-1)
        if count > 0:
            s_rows = s + rows.to(tl.int64) * (PARTS * ORDINALS * 16)
            start = 0
            if AHEAD:
                own_s = s_rows + first_part * (ORDINALS * 16)
                values = _group_s(own_s, page, entry, slots, ORDINALS, GROUP)
                acc = _expand(acc, first_b, values, SWAP)
                start = GROUP
            for group in tl.range(start, count, GROUP, num_stages=DEPTH):
                page, entry = _group_entries(entries, count, group, page_of, ORDINALS, GROUP)
                values_b = _group_b(b, page, columns - begin, columns < end, end - begin, GROUP)
                own_s = s_rows + first_part * (ORDINALS * 16)
                values = _group_s(own_s, page, entry, slots, ORDINALS, GROUP)
                acc = _expand(acc, values_b, values, SWAP)
            if not ALIGNED:  # the tile's other parts: their columns are not those added so far
                for part in range(first_part + 1, last_part + 1):
                    begin = pick(part, 0, end_0, end_1, PARTS)
                    end = pick(part, end_0, end_1, N, PARTS)
                    page_of = pick(part, page_of_0, page_of_1, page_of_2, PARTS)
                    b = pick(part, b_0, b_1, b_2, PARTS)
                    own = (columns >= begin) & (columns < end)
                    own_s = s_rows + part * (ORDINALS * 16)
                    for group in range(0, count, GROUP):
                        page, entry = _group_entries(
                            entries, count, group, page_of, ORDINALS, GROUP
                        )
                        values_b = _group_b(b, page, columns - begin, own, end - begin, GROUP)
                        values = _group_s(own_s, page, entry, slots, ORDINALS, GROUP)
                        acc = _expand(acc, values_b, values, SWAP)

    if bias is not None:
        added = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
        if SWAP:
            acc += added[:, None]
        else:
            acc += added[None, :]
    acc += 0.0  # a sum of -0.0 is the same as one to which zeros of other rows were added
    if SWAP:
        acc = tl.where((slots < -1)[None, :], float("nan"), acc)
        place = y + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(place, acc.to(y.dtype.element_ty), mask=has_row[None, :] & (columns < N)[:, None])
    else:
        acc = tl.where((slots < -1)[:, None], float("nan"), acc)
        place = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(place, acc.to(y.dtype.element_ty), mask=has_row[:, None] & (columns < N)[None, :])
