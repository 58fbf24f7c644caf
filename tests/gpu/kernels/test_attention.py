"""Paged attention on the GPU: a row has one value, however the step around it looks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from attention_cases import Rows, World, make_world
from guard import poisoned
from kernel_cases import bits, error, rounding_floor, same_bits
from torch import Tensor

from truegraft.ops.interface import AttentionShape, KVCache, TokenBatch
from truegraft.ops.triton import attention, attention_plan, memory

GPU = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (2500, 1, 63, 256, 257, 1031, 4100, 777)
VERIFY = 5

MODELS = [
    (AttentionShape(32, 8, 128), BF16),
    (AttentionShape(28, 4, 128, window=1000), BF16),
    (AttentionShape(16, 2, 96), BF16),
    (AttentionShape(10, 2, 80, window=300), BF16),
    (AttentionShape(4, 4, 64), FP16),
    (AttentionShape(8, 1, 256), BF16),
    (AttentionShape(4, 2, 64), FP32),
]
with_worlds = pytest.mark.parametrize(
    "held",
    MODELS,
    indirect=True,
    ids=[f"{s.num_heads}-{s.num_kv_heads}x{s.head_dim}-{s.window}-{t}" for s, t in MODELS],
)


class Held:
    """A world and its full prefill, which is the value of every row."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.base = world.attend(world.everything())
        rng = random.Random(4)
        self.positions = [(s, rng.randrange(n)) for s, n in enumerate(LENGTHS) for _ in range(7)]
        self.positions += [(s, n - 1) for s, n in enumerate(LENGTHS)]

    def rows(self, count: int) -> Rows:
        """Random rows, `count` of each sequence that has as many before."""
        return [(s, p + 1 - count, count) for s, p in self.positions if p + 1 >= count]

    def expect(self, rows: Rows) -> Tensor:
        return self.base[self.world.where(rows)]


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest) -> Held:
    shape, dtype = request.param
    return Held(make_world(shape, LENGTHS, dtype, GPU))


def assert_same(out: Tensor, want: Tensor) -> None:
    wrong = (bits(out) != bits(want)).any(1)
    assert not wrong.any(), f"{int(wrong.sum())} of {len(wrong)} rows differ"


# ------------------------------------------------------------------ values


@with_worlds
def test_values(held: Held) -> None:
    dtype = held.base.dtype
    assert held.base.isfinite().all()
    # In float32 the weights are summed in units of 2⁻²³, and the row's largest weight is one.
    least = 2e-6 if dtype == FP32 else 0.0
    for count in (1, 64):
        rows = held.rows(count)
        exact = held.world.exact(rows)
        assert error(held.expect(rows), exact) <= max(2 * rounding_floor(exact, dtype), least)


# ------------------------------------------------------------------ what may not matter


@with_worlds
def test_a_row_is_the_same_in_every_step(held: Held) -> None:
    decode = held.rows(1)
    assert_same(held.world.attend(decode), held.expect(decode))
    for number in range(0, len(decode), 3):
        assert_same(held.world.attend([decode[number]]), held.expect([decode[number]]))
    for count in (2, VERIFY, 8, 13, 300):
        rows = held.rows(count)
        assert_same(held.world.attend(rows), held.expect(rows))
        assert_same(held.world.attend(rows[-1:]), held.expect(rows[-1:]))
    for rows in (
        [(0, 2200, 300), (5, 1026, 5), (6, 1899, 1), (7, 0, 777), (3, 255, 1)],
        [(1, 0, 1), (2, 62, 1), (4, 250, 7), (6, 4000, 33), (0, 0, 65)],
    ):
        assert_same(held.world.attend(rows), held.expect(rows))


@with_worlds
def test_neighbours_order_and_padding_do_not_matter(held: Held) -> None:
    rng = random.Random(5)
    for size in (2, 3, 8, 17, 64, 70):
        rows = [rng.choice(held.rows(rng.choice((1, 1, VERIFY)))) for _ in range(size)]
        assert_same(held.world.attend(rows), held.expect(rows))
        rng.shuffle(rows)
        assert_same(held.world.attend(rows, padding=(size, 3)), held.expect(rows))


@with_worlds
def test_repeats_are_equal(held: Held) -> None:
    for rows in (held.rows(1), held.rows(VERIFY), [(6, 3900, 200), *held.rows(1)[:9]]):
        for _ in range(20):
            assert_same(held.world.attend(rows), held.expect(rows))


@with_worlds
@pytest.mark.parametrize("item", [1, 2, 5, 1000])
def test_the_cut_of_the_work_moves_no_bit(
    held: Held, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "MIN_ITEM", item)
    monkeypatch.setattr(attention_plan, "MAX_ITEM", item)
    monkeypatch.setattr(attention_plan, "BUSY", 1 << 20)
    for rows in (held.rows(1), held.rows(VERIFY), [(6, 3000, 100), (0, 2400, 40), (3, 200, 1)]):
        for bound in (None, 30_000):
            assert_same(held.world.attend(rows, max_context=bound), held.expect(rows))
        monkeypatch.setattr(attention_plan, "PROGRAMS", 50)


@with_worlds
def test_the_kind_of_step_moves_no_bit(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    group = held.world.shape.group
    for count in (1, 3):
        rows = held.rows(count)
        for max_query in {max(height // group, count) for height in (16, 32, 64)} | {1000}:
            assert_same(held.world.attend(rows, max_query=max_query), held.expect(rows))
        with monkeypatch.context() as patch:
            patch.setattr(attention_plan, "SMALL", 0)
            assert_same(held.world.attend(rows, max_query=1000), held.expect(rows))


@with_worlds
def test_a_broken_key_reaches_the_rows_that_see_it_alone(held: Held) -> None:
    place, world = 700, held.world.with_key(0, 700, torch.nan)
    window = held.world.shape.window or 10_000
    chunk: Rows = [(0, 600, 300), *held.rows(1), (0, 701, 2), (0, 695, 5)]
    for rows in (held.rows(1), held.rows(VERIFY), chunk):
        out, want = world.attend(rows), held.expect(rows)
        sees = torch.tensor(
            [
                s == 0 and place <= start + i < place + window
                for s, start, count in rows
                for i in range(count)
            ],
            device=GPU,
        )
        assert torch.equal(out.isnan().all(1), sees)
        assert_same(out[~sees], want[~sees])


# ------------------------------------------------------------------ graphs


def _static(batch: TokenBatch) -> TokenBatch:
    """The batch with tensors of its own."""
    held: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(batch)}
    held |= {n: t.clone() for n, t in held.items() if isinstance(t, Tensor)}
    return TokenBatch(**held)


def _step(world: World, q: Tensor, batch: TokenBatch) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with memory.allocator(poisoned):
            plan = attention.plan_attention(batch, [world.shape])
            return attention.attention(q, world.shape, world.cache, plan)

    return step


@with_worlds
@pytest.mark.parametrize(("count", "size"), [(1, 56), (VERIFY, 8)])
def test_a_graph_is_replayed_with_other_lengths(held: Held, count: int, size: int) -> None:
    world, rng = held.world, random.Random(6)

    def chosen() -> tuple[Rows, Tensor, TokenBatch]:
        live = rng.randint(1, size)
        rows = [rng.choice(held.rows(rng.randint(1, count))) for _ in range(live)]
        spare = size * count - sum(n for _, _, n in rows)
        padding = (spare, size - live)
        batch = world.batch(rows, max_query=count, max_context=8192, padding=padding)
        return rows, world.q(rows, spare), batch

    _, q, first = chosen()
    batch = _static(first)
    step = _step(world, q, batch)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(12):
        rows, new_q, new = chosen()
        q.copy_(new_q)
        for name in ("seq_row", "seq_offset", "seq_start"):
            getattr(batch, name).copy_(getattr(new, name))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(out[: sum(n for _, _, n in rows)], held.expect(rows))


def test_layers_follow_each_other_without_a_race() -> None:
    """Each layer's queries are the last one's output; programs of the next start early."""
    shape, layers = AttentionShape(32, 8, 128), 12
    world = make_world(shape, LENGTHS, BF16, GPU, loud=1.0)
    caches = [KVCache(world.cache.k.roll(n, 1), world.cache.v.roll(n, 1)) for n in range(layers)]
    for rows in ([(s, n - 1, 1) for s, n in enumerate(LENGTHS)], [(6, 3000, 80), (5, 1026, 5)]):
        batch, q = world.batch(rows), world.q(rows)

        def chain(*, apart: bool, batch: TokenBatch = batch, q: Tensor = q) -> Tensor:
            with memory.allocator(poisoned):
                plan = attention.plan_attention(batch, [shape])
                x = q
                for cache in caches:
                    x = attention.attention(x, shape, cache, plan).view_as(q)
                    if apart:
                        torch.cuda.synchronize()
            return x

        want = chain(apart=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(apart=False)
        for _ in range(20):
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            assert want.isfinite().all() and same_bits(out, want)
