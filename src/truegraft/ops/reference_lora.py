"""Adapter work of the reference back end: rows grouped by slot into units of a few proved sizes.

A unit is some rows of one slot times one page of a linear, always of the same shape, so its bits
cannot follow the batch. The parts of a fused linear share a unit: their A pages are stacked, their
B pages lie on the diagonal of a block matrix, whose zeros add exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from truegraft.ops.interface import PAGE_RANK, Linear, LinearPart, LoraPages, RowPlan

MAX_KEPT_UNITS = 32  # decode steps with the same slots share their gathered pages; prefills do not


@dataclass(frozen=True)
class Units:
    """The rows that have one page ordinal of a module, in units of one size.

    R is 16 for each part of a fused linear that has pages, and for an embedding.
    """

    rows: Tensor  # [U·size] int64, row index; a unit's unused places repeat its first row
    inverse: Tensor  # [M] int64, place in `rows`, or U·size for rows without this page
    scale: Tensor  # [U, 1, R] float32
    b: Tensor  # [U, R, N]


@dataclass(frozen=True)
class LinearUnits(Units):
    """With the A pages of a linear."""

    a: Tensor  # [U, R, K]


@dataclass(frozen=True)
class EmbeddingUnits(Units):
    """With the number of each unit's page: an embedding's A is looked up by token."""

    pages: Tensor  # [U] int64


class _Unit(NamedTuple):
    """Up to `size` rows of one slot, always computed as `size`."""

    slot: int
    size: int
    rows: list[int]


class UnitPlan(RowPlan):
    """The units of a list of rows, and each module's pages for them on demand."""

    def __init__(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        self._num_rows = len(slots)
        self._units: list[_Unit] = []
        self._kept: dict[int, tuple[Linear, list[LinearUnits]]] = {}
        self._embedding: list[EmbeddingUnits] | None = None
        of_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot >= 0:
                of_slot.setdefault(slot, []).append(row)
        for slot, rows in sorted(of_slot.items()):
            while rows:
                size = max((s for s in sizes if s <= len(rows)), default=min(sizes))
                self._units.append(_Unit(slot, size, rows[:size]))
                rows = rows[size:]

    def of_linear(self, linear: Linear) -> Sequence[LinearUnits]:
        """A linear's units by page ordinal, ascending, and size."""
        if not self._units:
            return ()
        kept = self._kept.get(id(linear))
        if kept is not None:
            return kept[1]
        parts = [(part, part.pages) for part in linear.parts if part.pages is not None]
        width = sum(part.size for part in linear.parts)
        units = [
            _linear_units(self._index(chosen), chosen, ordinal, parts, width)
            for ordinal, chosen in self._chosen([pages for _, pages in parts])
        ]
        if len(self._units) <= MAX_KEPT_UNITS:
            self._kept[id(linear)] = (linear, units)
        return units

    def of_embedding(self, pages: LoraPages) -> Sequence[EmbeddingUnits]:
        """An embedding's units by page ordinal, ascending, and size."""
        if self._embedding is None:
            self._embedding = list(self._lay_out_embedding(pages))
        return self._embedding

    def _lay_out_embedding(self, pages: LoraPages) -> Iterator[EmbeddingUnits]:
        for ordinal, chosen in self._chosen([pages]):
            slots = torch.tensor([unit.slot for unit in chosen])
            ids = pages.page_of[slots, ordinal].long()
            scale = pages.scale[slots].view(-1, 1, 1)
            yield EmbeddingUnits(*self._index(chosen), scale, pages.b[ids].float(), ids)

    def _chosen(self, modules: Sequence[LoraPages]) -> Iterator[tuple[int, list[_Unit]]]:
        """For each page ordinal and unit size: the units with such a page in any module."""
        if not self._units or not modules:
            return
        tables = [pages.page_of.tolist() for pages in modules]
        sizes = sorted({unit.size for unit in self._units})
        for ordinal, size in product(range(modules[0].page_of.shape[1]), sizes):
            chosen = [
                unit
                for unit in self._units
                if unit.size == size and any(table[unit.slot][ordinal] >= 0 for table in tables)
            ]
            if chosen:
                yield ordinal, chosen

    def _index(self, chosen: Sequence[_Unit]) -> tuple[Tensor, Tensor]:
        """`Units.rows` and `Units.inverse`."""
        size = chosen[0].size
        rows = torch.tensor([(unit.rows + unit.rows[:1] * size)[:size] for unit in chosen])
        inverse = [rows.numel()] * self._num_rows
        for number, unit in enumerate(chosen):
            for place, row in enumerate(unit.rows, start=number * size):
                inverse[row] = place
        return rows.flatten(), torch.tensor(inverse)


def _linear_units(
    index: tuple[Tensor, Tensor],
    chosen: Sequence[_Unit],
    ordinal: int,
    parts: Sequence[tuple[LinearPart, LoraPages]],
    width: int,
) -> LinearUnits:
    """Stack the A pages of all parts and put the B pages on a diagonal. A missing page is zero."""
    ranks, features = PAGE_RANK * len(parts), parts[0][1].a.shape[2]
    a = torch.zeros(len(chosen), ranks, features)
    b = torch.zeros(len(chosen), ranks, width)
    scale = torch.zeros(len(chosen), 1, ranks)
    slots = torch.tensor([unit.slot for unit in chosen])
    for number, (part, pages) in enumerate(parts):
        ids = pages.page_of[slots, ordinal].long()
        has = (ids >= 0).nonzero().flatten()
        span = slice(number * PAGE_RANK, (number + 1) * PAGE_RANK)
        a[has, span] = pages.a[ids[has]]
        b[has, span, part.offset : part.offset + part.size] = pages.b[ids[has]]
        scale[has, 0, span] = pages.scale[slots[has], None]
    return LinearUnits(*index, scale, b, a)
