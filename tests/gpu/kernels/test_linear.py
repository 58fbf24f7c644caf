"""Linears with adapters: a row's bits are its own, and right, whatever tile and batch it is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from guard import poisoned
from kernel_cases import (
    LinearCase,
    error,
    expected_linear,
    make_linear,
    rounding_floor,
    same_bits,
)
from torch import Tensor

from truegraft.ops.triton import launch, memory, tiles
from truegraft.ops.triton.linear import linear
from truegraft.ops.triton.lora import Signals, plan_rows
from truegraft.ops.triton.tiles import LinearTile

GPU = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RANKS = (16, 1, 8, 17, 64, 256, 16, 128, 16, 16, 5, 32)
ROWS = 2048
SUM_ERROR = 2e-6  # of float32 sums over up to a few thousand products, far above their rounding

SHAPES: dict[str, tuple[tuple[int, ...], int, torch.dtype, bool]] = {
    "qkv 8B": ((4096, 1024, 1024), 4096, BF16, False),
    "o 8B": ((4096,), 4096, BF16, False),
    "gate_up 8B": ((14336, 14336), 4096, BF16, False),
    "down 8B": ((4096,), 14336, BF16, False),
    "qkv of 7 groups, bias, fp16": ((896, 128, 128), 896, FP16, True),
    "odd parts": ((100, 36, 36), 200, BF16, True),
    "odd all over": ((130, 66), 333, FP16, False),
    "small fp32": ((192, 64, 64), 192, FP32, True),
}


class Bench:
    """One linear, many rows, and their values in one large batch."""

    def __init__(self, name: str) -> None:
        sizes, k, dtype, bias = SHAPES[name]
        self.case = make_linear(sizes, k, RANKS, dtype, GPU, bias=bias)
        self.signals = Signals(GPU)
        random = torch.Generator(device=GPU).manual_seed(1)
        self.x = torch.randn(ROWS, k, generator=random, device=GPU).to(dtype)
        host = torch.Generator().manual_seed(2)
        self.slots = torch.randint(-1, len(RANKS), (ROWS,), generator=host, dtype=torch.int32)
        self.whole = self.run(torch.arange(ROWS))

    def run(self, index: Tensor, slots: Tensor | None = None) -> Tensor:
        """The rows `index` as one batch."""
        x = self.x[index.to(GPU)]
        return self.given(x, self.slots[index] if slots is None else slots)

    def given(self, x: Tensor, slots: Tensor, case: LinearCase | None = None) -> Tensor:
        case = case or self.case
        with memory.allocator(poisoned):
            depth = case.depth if case.ordinals else None
            rows = plan_rows(slots.to(GPU), depth, case.ordinals, self.signals)
            return linear(x.contiguous(), case.layer, rows, self.signals)


@pytest.fixture(scope="module", params=SHAPES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield Bench(request.param)
    torch.cuda.empty_cache()


def chosen(count: int, seed: int) -> Tensor:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count]


def test_accuracy_is_within_twice_the_rounding_floor(bench: Bench) -> None:
    index = chosen(300, 0)
    exact = expected_linear(bench.x[index.to(GPU)], bench.case, bench.slots[index])
    got = bench.whole[index.to(GPU)]
    assert got.isfinite().all()
    floor = rounding_floor(exact, got.dtype)
    assert error(got, exact) <= (2 * floor if got.dtype != FP32 else SUM_ERROR)


@pytest.mark.parametrize(
    "count", [1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 256, 300, 1025]
)
def test_a_row_is_the_same_in_any_batch(bench: Bench, count: int) -> None:
    for seed in range(1 if count > 64 else 8):
        index = chosen(count, 100 * count + seed)
        assert same_bits(bench.run(index), bench.whole[index.to(GPU)])


def test_every_adapter_alone(bench: Bench) -> None:
    for slot in range(-1, len(RANKS)):
        index = (bench.slots == slot).nonzero()[0]
        assert same_bits(bench.run(index), bench.whole[index.to(GPU)]), slot


def test_rows_of_the_base_are_those_without_adapters(bench: Bench) -> None:
    for count in (5, 40, 100, 700):
        index = chosen(count, count)
        base = index[bench.slots[index] < 0]
        bare = bench.given(bench.x[base.to(GPU)], torch.full((len(base),), -1).int(), none(bench))
        mixed = bench.run(index)[(bench.slots[index] < 0).to(GPU)]
        assert same_bits(mixed, bare)


def none(bench: Bench) -> LinearCase:
    """The same linear in an engine without adapters."""
    parts = tuple(replace(part, pages=None) for part in bench.case.layer.parts)
    return replace(bench.case, layer=replace(bench.case.layer, parts=parts), ordinals=0)


def test_twenty_repeats_are_equal(bench: Bench) -> None:
    for count in (8, 64, 200):
        index = chosen(count, count)
        first = bench.run(index)
        assert all(same_bits(bench.run(index), first) for _ in range(20))


def test_other_rows_may_change(bench: Bench) -> None:
    """Their slots, and their values: NaN and infinity stay where they are."""
    for count in (16, 64, 200):
        index = chosen(count, 7 * count)
        kept = torch.arange(0, count, 3)
        others = torch.ones(count, dtype=torch.bool)
        others[kept] = False
        slots = bench.slots[index].clone()
        slots[others] = slots[others].flip(0)
        x = bench.x[index.to(GPU)].clone()
        x[others.to(GPU)] = (
            torch.tensor([torch.nan, torch.inf], device=GPU)
            .repeat(x.shape[1])[: x.shape[1]]
            .to(x.dtype)
        )
        y = bench.given(x, slots)
        assert same_bits(y[kept.to(GPU)], bench.whole[index[kept].to(GPU)])
        assert not y[others.to(GPU)].isfinite().any()


def every_tile(rows: int, dtype: torch.dtype) -> list[LinearTile]:
    """Both orientations, widths, depths, groups and launches, in the table or not."""
    height, small = tiles.row_height(rows), dtype.itemsize == 2
    plain = LinearTile(False, 32, height, 128 if small else 32, 4, 3, group=1, ahead=False)
    found = [
        plain,
        replace(plain, spin=False),
        replace(plain, columns=64, group=2, depth=2),
        replace(plain, k=64 if small else 16, early=True, ahead=True, group=2),
    ]
    if not small:
        return found
    wide = replace(plain, swap=True, columns=64, k=64, warps=8 if height > 64 else 4)
    found += [
        wide,
        replace(wide, spin=False, early=True),
        replace(wide, columns=128, warps=8),
        replace(wide, group=4, depth=1),
        replace(wide, group=4, depth=3, fetch=True),
    ]
    if height <= 64:
        found += [
            replace(wide, group=8, ahead=True, fetch=True),
            replace(wide, group=8, ahead=True, spin=False, early=True),
            replace(plain, k=256, group=8, ahead=True, depth=3),
        ]
    tuned = [tile for by in tiles._TUNED.values() for tile in by.values()]
    prefill = [tiles._WIDE, tiles._SQUARE, tiles._NARROW]
    found += [tile for tile in [*tuned, *prefill] if tile.rows == height]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("count", [1, 30, 64, 128, 300])
def test_no_tile_moves_a_bit(bench: Bench, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index = chosen(count, count + 1)
    expected = bench.whole[index.to(GPU)]
    for tile in every_tile(count, bench.x.dtype):
        monkeypatch.setattr(tiles, "linear_tile", lambda *_, tile=tile: tile)
        assert same_bits(bench.run(index), expected), tile


def test_no_launch_moves_a_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without overlap, with another number of shrink programs or another shrink block."""
    for count in (5, 64, 300):
        index = chosen(count, count + 2)
        expected = bench.whole[index.to(GPU)]
        with launch.replaced(one_at_a_time):
            assert same_bits(bench.run(index), expected)
        tile = tiles.linear_tile(bench.whole.shape[1], bench.x.shape[1], bench.x.dtype, count)
        for programs in (7, 528):
            other = replace(tile, programs=programs)
            monkeypatch.setattr(tiles, "linear_tile", lambda *_, other=other: other)
            assert same_bits(bench.run(index), expected)
        for block in (16, 32, 64):
            monkeypatch.setattr(tiles, "shrink_rows", lambda rows, block=block: block)
            assert same_bits(bench.run(index), expected)
            with monkeypatch.context() as patch:  # chunks summed by one program, not apart
                patch.setattr("truegraft.ops.triton.lora.MAX_PARTIALS", 0)
                assert same_bits(bench.run(index), expected)
        monkeypatch.undo()


def one_at_a_time(*launched: Any) -> None:
    torch.cuda.synchronize()
    launch.serial(*launched)
    torch.cuda.synchronize()


def test_a_slot_that_does_not_exist_gives_nan(bench: Bench) -> None:
    index = chosen(40, 9)
    slots = bench.slots[index].clone()
    slots[3], slots[17] = len(RANKS), 2**30
    y = bench.run(index, slots)
    assert y[3].isnan().all() and y[17].isnan().all()
    kept = [row for row in range(40) if row not in (3, 17)]
    assert same_bits(y[kept], bench.whole[index[kept].to(GPU)])


def test_arrivals_are_counted_down_again(bench: Bench) -> None:
    for count in (1, 64, 300):
        bench.run(chosen(count, 3))
    assert not bench.signals.arrivals.any()


def test_the_vocabulary_in_float32() -> None:
    case = make_linear((32064,), 1024, RANKS, BF16, GPU)
    signals = Signals(GPU)
    x = torch.randn(70, 1024, device=GPU, generator=torch.Generator(device=GPU).manual_seed(3))
    x, slots = x.to(BF16), (torch.arange(70) % (len(RANKS) + 1) - 1).int()

    def logits(index: Tensor) -> Tensor:
        rows = plan_rows(slots[index].to(GPU), case.depth, case.ordinals, signals)
        return linear(x[index.to(GPU)], case.layer, rows, signals, FP32)

    whole = logits(torch.arange(70))
    exact = expected_linear(x, case, slots)
    assert whole.dtype == FP32
    base = slots < 0
    assert error(whole[base.to(GPU)], exact[base.to(GPU)]) < SUM_ERROR
    assert error(whole, exact) < 2e-4  # where S lies between two bfloat16, it may round otherwise
    for row in range(0, 70, 7):
        assert same_bits(logits(torch.tensor([row])), whole[row : row + 1])


def test_a_linear_that_is_used_again_waits_for_what_it_reads() -> None:
    """Three times under one plan, in a graph that does not contain the plan, outputs poisoned."""
    case = make_linear((2048,), 2048, RANKS, BF16, GPU)
    signals = Signals(GPU)
    x = torch.randn(48, 2048, device=GPU, generator=torch.Generator(device=GPU).manual_seed(4))
    x, slots = x.to(BF16), (torch.arange(48) % (len(RANKS) + 1) - 1).int().to(GPU)

    def chain(fresh: bool) -> Tensor:
        rows, y = plan_rows(slots, case.depth, case.ordinals, signals), x
        for _ in range(3):
            if fresh:
                torch.cuda.synchronize()
                rows = plan_rows(slots, case.depth, case.ordinals, signals)
            y = linear(y, case.layer, rows, signals)
        return y

    expected = chain(fresh=True)
    assert all(same_bits(chain(fresh=False), expected) for _ in range(5))
    rows = plan_rows(slots, case.depth, case.ordinals, signals)
    kept: list[Tensor] = []

    def keep(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        kept.append(torch.empty(shape, dtype=dtype, device=device))
        return kept[-1]

    graph = torch.cuda.CUDAGraph()
    with memory.allocator(keep), torch.cuda.graph(graph):
        y = x
        for _ in range(3):
            y = linear(y, case.layer, rows, signals)
    for _ in range(10):
        for buffer in kept:
            buffer.fill_(torch.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(y, expected)
