"""The tile table: how each linear is cut, by weight shape, dtype and number of rows.

Rows, columns, warps, stages and triggers may follow the number of rows: they move no bit. What
does is a function of K alone and is not a tile: `shrink_chunk`. Times are in `docs/log.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch


@dataclass(frozen=True)
class LinearTile:
    """One way to cut a linear.

    swap: weights on the wide side of the tensor core (acc[columns, rows]). early: let the next
    kernel in before the main loop; else after it, so that its programs do not pile up on the SMs
    that this one leaves idle. group: adapter pages of one expand product; ahead: whether the
    first group's B is fetched before the main loop; depth: buffered groups of the others.
    fetch: bring the B of the other groups into L2 before the main loop. spin: the main loop starts
    when x is ready, while the shrink still runs. programs: of the shrink, at most.
    """

    swap: bool
    columns: int
    rows: int
    k: int
    warps: int
    stages: int
    early: bool = False
    group: int = 8
    ahead: bool = True
    depth: int = 1
    fetch: bool = False
    spin: bool = True
    programs: int = 264  # two an SM


def shrink_chunk(k: int) -> int:
    """K columns that the shrink sums at once. Part of the numerics: a function of K alone."""
    return 512 if k <= 8192 else 1024


def shrink_rows(rows: int) -> int:
    """Rows of one slot that a shrink unit takes together."""
    return 16 if rows <= 256 else 64


def row_height(rows: int) -> int:
    """Rows of a tile, the same for all linears over this many rows."""
    return next((height for height in (16, 32, 64) if rows <= height), 128)


_SWAP = LinearTile(True, 64, 16, 128, 4, 6, early=True)
_NORMAL = LinearTile(False, 32, 16, 256, 4, 6, early=True)
_FETCH = LinearTile(False, 32, 64, 128, 4, 5, ahead=False, depth=3, fetch=True, programs=132)

# Which adapters a launch is for: none (an engine without), few or many pages.
Load = Literal["none", "few", "many"]
_LOADS: dict[Load, tuple[Load, ...]] = {
    "none": ("none",),
    "few": ("few", "none"),
    "many": ("many", "few", "none"),
}
MANY = 8  # pages, above which a load is "many"

# (N, K) → (rows up to, load) → tile, for two-byte dtypes on the H200. A load that is not there is
# served by the one before it.
_TUNED: dict[tuple[int, int], dict[tuple[int, Load], LinearTile]] = {
    (6144, 4096): {
        (1, "none"): replace(_SWAP, stages=5, group=1),
        (16, "none"): replace(_SWAP, early=False),
        (64, "none"): LinearTile(True, 64, 64, 128, 4, 5),
        (64, "many"): LinearTile(True, 64, 64, 128, 4, 4, depth=3, programs=528),
    },
    (4096, 4096): {
        (1, "none"): replace(_SWAP, group=1),
        (16, "none"): replace(_NORMAL, stages=5),
        (64, "none"): LinearTile(False, 32, 64, 256, 4, 4, early=True),
        (64, "few"): LinearTile(False, 32, 64, 256, 4, 4, early=True, group=4, programs=132),
        (64, "many"): replace(_FETCH, early=True, programs=528),
    },
    (28672, 4096): {
        (1, "none"): replace(_SWAP, stages=5, group=1),
        (16, "none"): LinearTile(True, 128, 16, 128, 4, 4),
        (64, "none"): LinearTile(True, 128, 64, 128, 8, 4, fetch=True, programs=132),
        (64, "many"): LinearTile(True, 128, 64, 128, 8, 4, depth=3),
    },
    (4096, 14336): {
        (1, "none"): replace(_NORMAL, group=1, early=False),
        (16, "none"): replace(_NORMAL, programs=132),
        (64, "none"): LinearTile(False, 32, 64, 256, 4, 4, group=2, programs=132),
        (64, "many"): _FETCH,
    },
    (128256, 4096): {
        (1, "none"): replace(_SWAP, stages=5, early=False, group=1),
        (16, "none"): replace(_SWAP, stages=5, early=False),
        (64, "none"): LinearTile(True, 128, 64, 128, 8, 4),
    },
}
# Prefill: 256 columns where that fills the chip, else 128 with one stage more.
_WIDE = LinearTile(False, 256, 128, 64, 8, 3, group=2, ahead=False, spin=False)
_SQUARE = LinearTile(False, 128, 128, 64, 8, 4, group=2, ahead=False, spin=False)
_NARROW = LinearTile(False, 64, 128, 128, 8, 4, group=2, ahead=False, spin=False)


def linear_tile(n: int, k: int, dtype: torch.dtype, rows: int, load: Load = "none") -> LinearTile:
    """The tile of a linear [n, k] over this many rows."""
    height = row_height(rows)
    if dtype.itemsize == 4:
        return LinearTile(False, 32, height, 32, 4, 3, group=1, ahead=False, spin=False)
    if rows > 64:
        return _prefill_tile(n, rows)
    return _tuned_tile(n, k, rows, load) or _decode_tile(n, k, height)


def _tuned_tile(n: int, k: int, rows: int, load: Load) -> LinearTile | None:
    """What the table has for the smallest bucket of their height that holds the rows."""
    table = _TUNED.get((n, k), {})
    bucket = min((upto for upto, _ in table if rows <= upto), default=0)
    found = [table[bucket, other] for other in _LOADS[load] if (bucket, other) in table]
    return found[0] if found and found[0].rows == row_height(rows) else None


def _decode_tile(n: int, k: int, height: int) -> LinearTile:
    """Enough programs to keep the memory busy, in tiles as large as that allows."""
    few = n // 64 < 96
    tile = _NORMAL if few else _SWAP
    if k < 1024:
        tile = replace(tile, k=64 if k < 512 else 128, stages=4)
    if height > 16:
        tile = replace(tile, stages=min(tile.stages, 4), early=False, group=4)
    return replace(tile, rows=height)


def _prefill_tile(n: int, rows: int) -> LinearTile:
    """The widest tile that leaves no SM without a program."""
    row_tiles = -(-rows // 128)
    for tile in (_WIDE, _SQUARE):
        programs = -(-n // tile.columns) * row_tiles
        if programs >= 112 and not 132 < programs < 224:  # a second wave should be a full one
            return tile
    return _NARROW
