"""Paged attention, interpreted on the CPU, says what the reference and float64 say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from attention_cases import Rows, World, make_world
from guard import SENTINEL, poisoned
from kernel_cases import error, rounding_floor, same_bits
from torch import Tensor

from truegraft.ops.interface import SPLIT, AttentionShape, TokenBatch
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.triton import attention_plan, memory

# The interpreter computes with NumPy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

CPU = torch.device("cpu")
FP16, FP32 = torch.float16, torch.float32
LENGTHS = (1, 63, 65, 257, 600)
PLAIN = AttentionShape(4, 2, 64)
DECODE: Rows = [(s, length - 1, 1) for s, length in enumerate(LENGTHS)]
VERIFY: Rows = [(4, 595, 5), (3, 250, 5), (0, 0, 1), (1, 60, 3)]
MIXED: Rows = [(4, 584, 16), (2, 64, 1), (3, 255, 2), (1, 20, 43)]
STEPS = {"decode": DECODE, "verify": VERIFY, "mixed": MIXED}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(PLAIN, LENGTHS, FP16, CPU)


def check(out: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    # In float32 the weights are summed in units of 2⁻²³, and the row's largest weight is one.
    least = 1e-6 if dtype == FP32 else 0.0
    assert out.dtype == dtype and out.shape == exact.shape
    assert error(out, exact) <= max(2 * rounding_floor(exact, dtype), least)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", STEPS)
def test_attention(world: World, name: str) -> None:
    rows = STEPS[name]
    out = world.attend(rows)
    check(out, world.exact(rows), FP16)
    ops = ReferenceOps(FP16)
    plan = ops.plan_attention(world.batch(rows), [PLAIN])
    want = ops.attention(world.q(rows), PLAIN, world.cache, plan)
    assert error(out, want.double()) <= 4 * rounding_floor(world.exact(rows), FP16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (AttentionShape(7, 1, 80), FP16),
        (AttentionShape(3, 3, 96), FP16),
        (AttentionShape(5, 1, 128, window=100), FP16),
        (AttentionShape(2, 1, 256, window=1), FP16),
        (AttentionShape(20, 1, 64, window=256), FP16),
        (AttentionShape(2, 1, 80), FP32),
    ],
    ids=str,
)
def test_attention_of_any_heads(shape: AttentionShape, dtype: torch.dtype) -> None:
    world = make_world(shape, LENGTHS[1:], dtype, CPU)
    crossing = (shape.window or 0) + 60  # the window of its third row ends a tile of keys
    for rows in ([(3, 599, 1), (2, 256, 1), (0, 7, 1)], [(3, crossing, 6), (1, 61, 4)]):
        check(world.attend(rows), world.exact(rows), dtype)
    if shape.num_heads == 7:
        rows = [(3, 500, 12), (1, 64, 1)]
        check(world.attend(rows, max_query=70), world.exact(rows), dtype)


def test_rows_of_one_weight() -> None:
    """A first row is its value, and equal keys give the mean, exactly."""
    world = make_world(PLAIN, (1, 512), FP16, CPU, loud=0.0)
    first, last = world.attend([(0, 0, 1), (1, 511, 1)])
    value = world.values[0][:, 0].repeat_interleave(2, dim=0)
    assert torch.equal(first, value.flatten())
    mean = world.values[1].double().mean(1).repeat_interleave(2, dim=0).flatten()
    assert error(last, mean) <= 2 * rounding_floor(mean, FP16)


# ------------------------------------------------------------------ what may not matter


@pytest.mark.parametrize(
    ("rows", "item"), [(DECODE, 1), (DECODE, 100), (VERIFY[:2], 2)], ids=["1", "100", "verify 2"]
)
def test_the_cut_of_the_work_moves_no_bit(
    world: World, rows: Rows, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = world.attend(rows)
    monkeypatch.setattr(attention_plan, "MIN_ITEM", item)
    monkeypatch.setattr(attention_plan, "MAX_ITEM", item)
    assert same_bits(world.attend(rows), want)
    assert same_bits(world.attend(rows, max_context=5000), want), "folds in rounds of 32"
    monkeypatch.setattr(attention_plan, "PROGRAMS", 3)
    assert same_bits(world.attend(rows), want)
    monkeypatch.setattr(attention_plan, "WORKSPACE", 3000)
    assert same_bits(world.attend(rows), want), "no room: nothing is cut"


def test_the_kind_of_step_does_not_matter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, exact = VERIFY[:2], world.exact(VERIFY[:2])
    want = world.attend(rows)
    for max_query, small in ((13, 32), (100, 32), (100, 2)):
        monkeypatch.setattr(attention_plan, "SMALL", small)
        out = world.attend(rows, max_query=max_query)
        check(out, exact, FP16)
        assert float((out != want).double().mean()) < 0.02, "but for the sums of NumPy"


def test_neighbours_and_padding_do_not_matter(world: World) -> None:
    together = world.attend(DECODE, padding=(3, 4))
    assert same_bits(together, world.attend(DECODE[::-1]).flip(0))
    for number, row in enumerate(DECODE):
        assert same_bits(world.attend([row]), together[number : number + 1])


@pytest.mark.parametrize("window", [None, 100])
def test_a_broken_key_reaches_the_rows_that_see_it_alone(window: int | None) -> None:
    world = make_world(AttentionShape(4, 2, 64, window), LENGTHS, FP16, CPU)
    rows: Rows = [(4, 296, 8), (3, 256, 1), (4, 420, 1), (4, 295, 1)]
    want, out = world.attend(rows), world.with_key(4, 300, torch.nan).attend(rows)
    sees = torch.tensor([False] * 4 + [True] * 4 + [False, window is None, False])
    assert torch.equal(out.isnan().all(1), sees)
    assert same_bits(out[~sees], want[~sees]) and not want.isnan().any()


# ------------------------------------------------------------------ the work list


class Work(NamedTuple):
    """What a list says."""

    items: list[tuple[int, ...]]
    folds: list[tuple[int, ...]]


def twin(batch: TokenBatch, shape: AttentionShape, kind: attention_plan._Kind, slots: int) -> Work:
    """`plan_tiles_kernel` in plain Python."""
    tiles = []  # first row, tokens, table row, position, first split, splits
    offsets, starts = batch.seq_offset.tolist(), batch.seq_start.tolist()
    for number, table_row in enumerate(batch.seq_row.tolist()):
        rows = offsets[number + 1] - offsets[number]
        if kind.above < rows <= kind.upto:
            for token in reversed(range(0, rows, kind.tokens)):
                size, position = min(kind.tokens, rows - token), starts[number] + token
                begin = max(position - (shape.window or 2**40) + 1, 0) // SPLIT
                splits = (position + size - 1) // SPLIT + 1 - begin
                tiles.append((offsets[number] + token, size, table_row, position, begin, splits))
    counts = [tile[-1] for tile in tiles]
    total, most, kv_heads = sum(counts), max(counts, default=0), shape.num_kv_heads
    most_item = attention_plan.MAX_ITEM
    item = min(max(-(-total * kv_heads // 396), attention_plan.MIN_ITEM), most_item)
    alike = not kind.even or most * len(tiles) <= 1.5 * total
    if len(tiles) * kv_heads >= attention_plan.BUSY and alike:
        item = max(item, most)
    if sum(count for count in counts if count > item) > slots:
        item = most
    work, slot = Work([], []), 0
    for first, size, table_row, position, begin, splits in tiles:
        pieces = -(-splits // item)
        for piece in range(pieces):
            low, high = (begin + splits * (piece + i) // pieces for i in (0, 1))
            place = (first, size, table_row, position, low, high)
            work.items.append((*place, slot - begin, int(pieces == 1)))
        if pieces > 1:
            work.folds.extend((first + token, token, slot, splits) for token in range(size))
            slot += splits
    return work


def random_batch(lengths: Sequence[tuple[int, int]], max_query: int | None = None) -> TokenBatch:
    """Sequences of (position of the first row, rows)."""
    counts = [count for _, count in lengths]
    rows = torch.zeros(sum(counts), dtype=torch.int64)
    return TokenBatch(
        *(len(rows), rows, rows, rows.int(), rows, rows),
        seq_row=torch.arange(len(counts)).flip(0),
        seq_offset=torch.tensor([0, *counts]).cumsum(0),
        seq_start=torch.tensor([start for start, _ in lengths]),
        block_tables=torch.zeros(len(counts), 1, dtype=torch.int32),
        max_query=max_query or max(counts),
        max_context=max(start + count for start, count in lengths),
    )


def cases() -> Iterator[tuple[list[tuple[int, int]], int | None, int | None]]:
    """(start, rows) of sequences, longest query, window."""
    rng = random.Random(1)
    edges = [0, 62, 63, 64, 254, 255, 256, 599]
    for window in (None, 64, 256):
        yield [(start, 1) for start in edges], None, window
        yield [(start, rng.randint(1, 5)) for start in edges], 5, window
        yield [(start, rng.choice([1, 7, 8, 9, 40])) for start in edges], None, window
    yield [(900 + rng.randrange(100), 1) for _ in range(66)], None, None
    yield [(20_000, 1)], None, None
    yield [(3, 0), (8000, 1), (0, 0), (700, 1), (9, 0)], 1, None
    yield [(8000, 1100)], None, None
    yield [(8000, 40), (100, 1)], None, None


@pytest.mark.parametrize(
    ("number", "item"), [*((n, None) for n in range(len(list(cases())))), (0, 3), (2, 2)]
)
def test_the_work_list(number: int, item: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, longest, window = list(cases())[number]
    shape = AttentionShape(32, 8, 64, window)
    batch = random_batch(sequences, longest)
    if item is not None:
        monkeypatch.setattr(attention_plan, "MIN_ITEM", item)
        monkeypatch.setattr(attention_plan, "MAX_ITEM", item)
    with memory.allocator(poisoned):
        plan = attention_plan.plan_attention(batch, [shape])
    check_lists(batch, shape, plan)


def test_a_work_list_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(32, 8, 64)
    batch = random_batch([(1000, 1), (300, 1), (20, 1)])
    for slots, items in ((6, 7), (5, 3)):  # four splits, two, and one
        monkeypatch.setattr(attention_plan, "WORKSPACE", slots * 32 * 66 * 4 + 100)
        with memory.allocator(poisoned):
            plan = attention_plan.plan_attention(batch, [shape])
        check_lists(batch, shape, plan)
        assert int(plan.lists[shape][0].counts[0]) == items


def check_lists(
    batch: TokenBatch, shape: AttentionShape, plan: attention_plan.TritonAttentionPlan
) -> None:
    kinds = attention_plan._kinds(batch, shape)
    taken = []
    for kind, tiles in zip(kinds, plan.lists[shape], strict=True):
        slots = 0 if tiles.sums is None else len(tiles.sums) // (8 * tiles.held)
        want = twin(batch, shape, kind, slots)
        num_items, num_folds = tiles.counts.tolist()
        assert num_items <= len(tiles.items) and num_folds <= len(tiles.folds)
        assert [tuple(row) for row in tiles.items[:num_items].tolist()] == want.items
        assert [tuple(row) for row in tiles.folds[:num_folds].tolist()] == want.folds
        assert bool((tiles.items[num_items:] == SENTINEL).all())
        assert all(count <= tiles.held // 4 for _, count, *_ in want.items)
        taken += [r for first, n, *_, begin, _, _, _ in want.items for r in range(first, first + n)]
    assert set(taken) == set(range(batch.num_tokens)), "every row has its items"


def test_which_work_is_cut() -> None:
    def items(sequences: list[tuple[int, int]]) -> list[int]:
        plan = attention_plan.plan_attention(random_batch(sequences), [AttentionShape(32, 8, 64)])
        (tiles,) = next(iter(plan.lists.values()))
        return [to - low for *_, low, to, _, _ in tiles.items[: int(tiles.counts[0])].tolist()]

    assert items([(1000, 1)] * 16) == [4] * 16, "the chip is full"
    assert items([(1000, 1)] * 8) == [1] * 32, "the chip is not"
    assert max(items([(30_000, 1)] + [(100, 1)] * 63)) <= 8, "one is longer than the others"
