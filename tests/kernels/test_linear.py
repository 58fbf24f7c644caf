"""Linears with adapters, interpreted: values, masks and indices at small and odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from guard import poisoned
from kernel_cases import LinearCase, error, expected_linear, make_linear, rounding_floor, same_bits
from torch import Tensor

from truegraft.errors import ConfigError
from truegraft.ops.triton import memory, tiles
from truegraft.ops.triton.linear import linear
from truegraft.ops.triton.lora import AdapterRows, Signals, check_slots, plan_rows
from truegraft.ops.triton.tiles import LinearTile

CPU = torch.device("cpu")
FP16, FP32 = torch.float16, torch.float32
RANKS = (8, 16, 33, 1, 64)
CASES: dict[str, tuple[tuple[int, ...], int, torch.dtype]] = {
    "one part": ((64,), 64, FP16),
    "three parts, odd": ((100, 36, 36), 200, FP16),
    "two parts": ((96, 96), 640, FP16),
    "K not a multiple of 8": ((40, 24, 8), 133, FP16),
    "float32": ((40, 24, 8), 136, FP32),
}


def plan(case: LinearCase, slots: Tensor, signals: Signals) -> AdapterRows:
    return plan_rows(slots, case.depth, case.ordinals, signals)


def run(case: LinearCase, x: Tensor, slots: Tensor) -> Tensor:
    signals = Signals(CPU)
    with memory.allocator(poisoned):
        y = linear(x, case.layer, plan(case, slots, signals), signals)
    assert not signals.arrivals.any()
    return y


def rows_of(case: LinearCase, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, case.weight.shape[1], generator=random).to(case.weight.dtype)
    slots = torch.randint(-1, len(RANKS), (count,), generator=random, dtype=torch.int32)
    return x, slots


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> LinearCase:
    sizes, k, dtype = CASES[request.param]
    return make_linear(sizes, k, RANKS, dtype, CPU, bias=True)


@pytest.fixture(scope="module")
def odd() -> LinearCase:
    sizes, k, dtype = CASES["three parts, odd"]
    return make_linear(sizes, k, RANKS, dtype, CPU, bias=True)


def test_values_of_many_rows(odd: LinearCase) -> None:
    x, slots = rows_of(odd, 130)
    exact = expected_linear(x, odd, slots)
    assert error(run(odd, x, slots), exact) <= 2 * rounding_floor(exact, x.dtype)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_values(case: LinearCase, count: int) -> None:
    x, slots = rows_of(case, count)
    exact = expected_linear(x, case, slots)
    allowed = 2 * rounding_floor(exact, x.dtype) if x.dtype == FP16 else 1e-6
    assert error(run(case, x, slots), exact) <= allowed


def test_values_of_chunks_summed_in_one_program(
    case: LinearCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truegraft.ops.triton.lora.MAX_PARTIALS", 0)
    monkeypatch.setattr(tiles, "shrink_chunk", lambda k: 64)
    x, slots = rows_of(case, 20)
    exact = expected_linear(x, case, slots)
    allowed = 2 * rounding_floor(exact, x.dtype) if x.dtype == FP16 else 1e-6
    assert error(run(case, x, slots), exact) <= allowed


@pytest.mark.parametrize(
    "tile",
    [
        LinearTile(True, 64, 16, 64, 4, 3, group=1, ahead=True),
        LinearTile(True, 32, 16, 32, 4, 3, group=4, ahead=True, fetch=True),
        LinearTile(True, 64, 16, 64, 4, 3, group=2, ahead=False, depth=2),
        LinearTile(False, 32, 16, 64, 4, 3, group=8, ahead=True),
        LinearTile(False, 64, 16, 16, 4, 3, group=1, ahead=False, spin=False),
        LinearTile(False, 16, 16, 64, 4, 3, group=2, ahead=False),
    ],
    ids=str,
)
def test_tiles(odd: LinearCase, tile: LinearTile, monkeypatch: pytest.MonkeyPatch) -> None:
    x, slots = rows_of(odd, 13)
    expected = run(odd, x, slots)
    monkeypatch.setattr(tiles, "linear_tile", lambda *_: tile)
    assert torch.allclose(run(odd, x, slots).double(), expected.double(), rtol=2e-3, atol=2e-3)


def test_base_rows_are_those_without_adapters(odd: LinearCase) -> None:
    x, slots = rows_of(odd, 20)
    bare = replace(odd.layer, parts=tuple(replace(part, pages=None) for part in odd.layer.parts))
    signals = Signals(CPU)
    off = linear(x, bare, plan_rows(torch.full_like(slots, -1), None, 0, signals), signals)
    base = slots < 0
    assert base.any()
    assert same_bits(run(odd, x, slots)[base], off[base])


def test_what_is_not_finite_stays_in_its_row(odd: LinearCase) -> None:
    x, slots = rows_of(odd, 20)
    expected = run(odd, x, slots)
    x[3], x[11] = torch.nan, torch.inf
    y = run(odd, x, slots)
    kept = [row for row in range(20) if row not in (3, 11)]
    assert same_bits(y[kept], expected[kept])
    assert not y[[3, 11]].isfinite().any()


def test_a_slot_that_does_not_exist_is_never_the_base(odd: LinearCase) -> None:
    x, slots = rows_of(odd, 20)
    expected = run(odd, x, slots)
    slots[5], slots[7] = len(RANKS), -5
    y = run(odd, x, slots)
    assert y[[5, 7]].isnan().all()
    kept = [row for row in range(20) if row not in (5, 7)]
    assert same_bits(y[kept], expected[kept])


def test_the_host_refuses_a_slot_that_does_not_exist() -> None:
    check_slots(torch.tensor([-1, 0, 3]), 4)
    with pytest.raises(ConfigError, match=r"row 1 has adapter slot 4.*-1 .* to 3"):
        check_slots(torch.tensor([0, 4]), 4)
    with pytest.raises(ConfigError, match="row 0 has adapter slot -2"):
        check_slots(torch.tensor([-2]), 4)


def test_a_page_that_changes_changes_its_rows_alone(odd: LinearCase) -> None:
    x, slots = rows_of(odd, 30)
    expected = run(odd, x, slots)
    pages = odd.layer.parts[0].pages
    assert pages is not None
    page = int(pages.page_of[1, 0])
    kept = pages.b[page].clone()
    pages.b[page] += 1.0
    changed = (run(odd, x, slots) != expected).any(1)
    pages.b[page] = kept
    assert torch.equal(changed, slots == 1)


# ------------------------------------------------------------------------------- the work list


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 65, 300])
def test_the_list_is_what_python_would_make(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    num_slots, ordinals = 7, 4
    depth = torch.tensor([1, 4, 0, 2, 1, 3, 1], dtype=torch.int32)
    slots = torch.randint(-1, num_slots, (count,), generator=random, dtype=torch.int32)
    with memory.allocator(poisoned):
        rows = plan_rows(slots, depth, ordinals, Signals(CPU))
    assert torch.equal(rows.slots, slots)
    assert rows.items is not None and rows.num_items is not None
    assert rows.order is not None and rows.entries is not None and rows.counts is not None

    order: list[int] = []
    items = []
    for slot in range(num_slots):
        own = [row for row, of in enumerate(slots.tolist()) if of == slot]
        for first in range(0, len(own), rows.block):
            for ordinal in range(int(depth[slot])):
                size = min(rows.block, len(own) - first)
                items.append([slot, ordinal, len(order) + first, size])
        order += own
    assert rows.order[: len(order)].tolist() == order
    assert int(rows.num_items) == len(items)
    assert rows.items[: len(items)].tolist() == items

    height = tiles.row_height(count)
    for tile, listed in enumerate(rows.counts.tolist()):
        here = sorted({s for s in slots[tile * height : (tile + 1) * height].tolist() if s >= 0})
        entries = [slot * ordinals + o for slot in here for o in range(int(depth[slot]))]
        assert rows.entries[tile, :listed].tolist() == entries


def test_without_adapters_there_is_no_list() -> None:
    rows = plan_rows(torch.tensor([-1, -1, 0], dtype=torch.int32), None, 0, Signals(CPU))
    assert rows.items is None
    assert rows.slots.tolist() == [-1, -1, -2]


# --------------------------------------------------------------------------------- the signals


def test_a_word_is_given_once_under_a_plan() -> None:
    case = make_linear((64,), 64, RANKS, FP16, CPU)
    signals = Signals(CPU)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    first = plan(case, slots, signals)
    word = signals.claim(case.layer.weight, first)
    assert word is not None
    assert signals.claim(case.layer.weight, first) is None
    again = signals.claim(case.layer.weight, plan(case, slots, signals))
    assert again is not None and again.data_ptr() == word.data_ptr()


def test_a_plan_of_another_graph_gets_no_word() -> None:
    case = make_linear((64,), 64, RANKS, FP16, CPU)
    signals = Signals(CPU)
    rows = replace(plan(case, torch.tensor([0], dtype=torch.int32), signals), capture=7)
    assert signals.claim(case.layer.weight, rows) is None


def test_every_plan_has_its_own_epoch() -> None:
    case = make_linear((64,), 64, RANKS, FP16, CPU)
    signals = Signals(CPU)
    slots = torch.tensor([0], dtype=torch.int32)
    assert [int(plan(case, slots, signals).epoch) for _ in range(3)] == [1, 2, 3]


# ---------------------------------------------------------------------------------- the table


def test_the_table_has_a_tile_for_everything() -> None:
    for n, k in [*tiles._TUNED, (192, 192), (50, 64), (151936, 896)]:
        for dtype in (torch.bfloat16, FP16, FP32):
            for rows in (1, 2, 16, 17, 33, 64, 65, 129, 5000):
                loads: tuple[tiles.Load, ...] = ("none", "few", "many")
                for load in loads:
                    tile = tiles.linear_tile(n, k, dtype, rows, load)
                    assert tile.rows == tiles.row_height(rows)
