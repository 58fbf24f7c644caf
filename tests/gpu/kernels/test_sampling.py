"""Sampling on the GPU: a row's draw is its own, and the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from guard import poisoned
from kernel_cases import error, rounding_floor, same_bits
from sampling_cases import PLAIN
from torch import Tensor

from truegraft.ops.interface import SamplingRow
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.reference_sampling import perturb_row
from truegraft.ops.triton import memory, sampling
from truegraft.ops.triton.sampling_rows import pack

DEVICE = torch.device("cuda")
REFERENCE = ReferenceOps(torch.float32)
WIDTHS = (32000, 128256, 151936, 50257, 262144)  # one of them odd
ROWS = 40
NAN = math.nan
DRAWN = replace(PLAIN, temperature=0.9)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 200, "top_p": 0.95},
    {"top_p": 0.99999},
    {"top_k": 20000},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
)
Rows = Sequence[SamplingRow | None]
with_widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs and workspaces hold NaN, or far numbers, before they are written."""
    with memory.allocator(poisoned):
        yield


def randn(rows: int, width: int, seed: int = 0, std: float = 3.0) -> Tensor:
    """[rows, width] on the host, the even rows with many ties (steps of 1/8)."""
    z = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * std
    z[::2] = (z[::2] * 8).round() / 8
    return z


def mixed_rows(width: int) -> list[SamplingRow | None]:
    """Plain, drawn, filtered, penalised and masked rows in turn."""
    random = torch.Generator().manual_seed(width)
    rows: list[SamplingRow | None] = [None]
    for number in range(1, ROWS):
        row = replace(DRAWN if number % 5 else PLAIN, seed=number << 30, position=number * 1000)
        row = replace(row, **ASKED[number % len(ASKED)])
        if number % 3 == 0:
            history = torch.randint(width, (150 * number,), generator=random)
            history[::7] = number
            row = replace(
                row,
                prompt=history[:77],
                output=history[77:],
                repetition_penalty=1.2,
                frequency_penalty=0.3,
                presence_penalty=-0.1,
                bias=((number, 1.5), (width - 1, -2.0)),
                banned=(0, 31, width - 2),
            )
        if number % 4 == 0:
            row = replace(row, allowed=tuple(range(number, width, 17)))
        rows.append(row)
    return rows


def run(z: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Adjusted logits and drawn ids. z: on the host or the device."""
    z = z.to(DEVICE)
    batch = pack(rows, z.shape[1], DEVICE)
    adjusted = sampling.adjust(z, batch)
    return adjusted, sampling.sample(adjusted, batch)


def order(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


@with_widths
def test_rows_are_their_own(width: int) -> None:
    z, rows = randn(ROWS, width).to(DEVICE), mixed_rows(width)
    whole = run(z, rows)
    some = [[0], [1], [7], [12], [ROWS - 1]]
    some += [order(ROWS, size)[:size] for size in (2, 3, 8, 17, ROWS)]
    for index in some:
        for got, want in zip(run(z[index], [rows[i] for i in index]), whole, strict=True):
            assert same_bits(got, want[index]), f"{len(index)} rows"
    for _ in range(20):
        assert all(map(same_bits, run(z, rows), whole))


@with_widths
def test_adjusted_logits_are_the_reference_s_bits(width: int) -> None:
    z, rows = randn(ROWS, width), mixed_rows(width)
    z[3, :9] = -0.0
    assert same_bits(run(z, rows)[0].cpu(), REFERENCE.adjust(z, rows))


@with_widths
def test_thresholds_keep_what_the_reference_keeps(width: int) -> None:
    """Equal sets: integer weights differ by exp's last units, which decide none of these."""
    for std in (0.01, 3.0, 12.0):
        z = randn(len(ASKED), width, std=std)
        rows = [replace(DRAWN, **asked) for asked in ASKED]
        cuts = sampling.thresholds(z.to(DEVICE), pack(rows, width, DEVICE)).cpu()
        for index, row in enumerate(rows):
            want = z[index].clone()
            perturb_row(want, row)
            kept, of_reference = ~(z[index] / row.temperature < cuts[index]), want > -math.inf
            differ = kept != of_reference
            if differ.any():  # only top-p at a boundary: weights sum to the same within 1e-6
                assert row.top_p < 1, row
                weights = (z[index] / row.temperature).double().softmax(-1)
                assert (
                    float(weights[differ].sum()) < 1e-5 or len(set(z[index][differ].tolist())) == 1
                )
                assert float(weights[kept].sum()) >= row.top_p * (1 - 1e-5)


def gap(z: Tensor, row: SamplingRow, left: int, right: int) -> float:
    """By how much the reference's perturbed logits of two ids differ."""
    z = z.clone()
    perturb_row(z, row)
    return abs(float(z[left] - z[right]))


@pytest.mark.parametrize("width", [1003, 32000])
def test_drawn_ids_are_the_reference_s(width: int) -> None:
    """Of thousands of draws all but one in a thousand, and those are nearly ties."""
    count = 4096 if width < 2000 else 512
    z = randn(count, width, std=1.5)
    rows = []
    for number in range(count):
        row = replace(DRAWN, seed=number * 2**29 + 7, position=number, sample_index=number % 5)
        asked = ASKED[number % len(ASKED)]
        rows.append(replace(row, **asked))
    drawn, want = run(z, rows)[1].tolist(), REFERENCE.sample(z, rows).tolist()
    wrong = [i for i in range(count) if drawn[i] != want[i]]
    assert len(wrong) <= count // 1000, f"{len(wrong)} of {count}"
    for index in wrong:
        assert gap(z[index], rows[index], drawn[index], want[index]) < 1e-5


def test_argmax_is_the_first_of_the_largest() -> None:
    for width in WIDTHS:
        z = randn(ROWS, width)
        z[1] = -math.inf
        z[2] = 1.0
        z[4, width - 1] = math.inf
        drawn = sampling.argmax(z.to(DEVICE)).cpu()
        want = z.amax(-1, keepdim=True).eq(z).int().argmax(-1)
        assert torch.equal(drawn, want) and torch.equal(run(z, [None] * ROWS)[1].cpu(), want)


@with_widths
def test_a_nan_shows_and_stays_in_its_row(width: int) -> None:
    z, rows = randn(ROWS, width).to(DEVICE), mixed_rows(width)
    clean = (*run(z, rows), sampling.argmax(z), sampling.logprobs(z))
    victims = [3, 10, 13]
    for victim in victims:
        z[victim, width // 2 + victim] = NAN
    z[13, 5] = math.inf
    others = [i for i in range(ROWS) if i not in victims]
    spoiled = (*run(z, rows), sampling.argmax(z), sampling.logprobs(z))
    for got, want in zip(spoiled, clean, strict=True):
        assert same_bits(got[others], want[others])
    for ids in spoiled[1:3]:
        assert ((ids >= 0) & (ids < width)).all()
    assert spoiled[3][victims].isnan().all()


@with_widths
def test_logprobs(width: int) -> None:
    z = randn(ROWS, width).to(DEVICE)
    z[5, ::2] = -math.inf
    z[6] = 2.5
    whole, exact = sampling.logprobs(z), z.double().log_softmax(-1)
    kept = ~exact.isinf()
    assert torch.equal(whole.isinf(), exact.isinf())
    # Three roundings: of z - max, of the logarithm and of their difference.
    assert error(whole[kept], exact[kept]) <= 3 * rounding_floor(exact[kept], torch.float32)
    for index in ([0], [5], [ROWS - 1], order(ROWS, 3)[:9], order(ROWS, 4)):
        assert same_bits(sampling.logprobs(z[index]), whole[index])
    for row in range(1, 4):  # a view of one row may not be aligned
        assert same_bits(sampling.logprobs(z[row : row + 1]), whole[row : row + 1])
    assert all(same_bits(sampling.logprobs(z), whole) for _ in range(20))


@pytest.mark.parametrize("asked", [{}, {"top_k": 60}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_frequencies_follow_the_softmax(asked: dict[str, Any]) -> None:
    width, count = 300, 20000
    logits = torch.randn(width, generator=torch.Generator().manual_seed(5))
    row = replace(DRAWN, temperature=1.0, seed=99, **asked)
    masked = logits.clone()
    perturb_row(masked, row)
    masked = logits.masked_fill(masked == -math.inf, -math.inf)
    rows = [replace(row, position=place) for place in range(count)]
    drawn = run(logits.expand(count, -1).contiguous(), rows)[1]
    expected, counts = masked.softmax(-1) * count, drawn.cpu().bincount(minlength=width)
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0 and int(counts.sum()) == count
    chi_square = float(((counts - expected).square() / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), f"{chi_square} of {freedom}"


def test_a_captured_step_draws_what_the_eager_one_does() -> None:
    """One graph with every feature, replayed on other rows' parameters and logits."""
    width = 32000
    rows, z = mixed_rows(width), randn(ROWS, width).to(DEVICE)
    batch, logits = pack(rows, width, DEVICE), z.clone()
    expected = run(z, rows)
    run(z, rows)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adjusted = sampling.adjust(logits, batch)
        drawn = sampling.sample(adjusted, batch)
    for index in (order(ROWS, 1), order(ROWS, 2), list(range(ROWS))):
        logits.copy_(z[index])
        fresh = pack([rows[i] for i in index], width, DEVICE)
        for field in fields(fresh):
            value = getattr(fresh, field.name)
            if isinstance(value, Tensor):
                getattr(batch, field.name).copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(adjusted, expected[0][index]) and same_bits(drawn, expected[1][index])
