"""The sampling kernels, interpreted on the CPU, draw what the reference draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from guard import poisoned
from kernel_cases import bits, error, rounding_floor, same_bits
from sampling_cases import PLAIN
from torch import Tensor

from truegraft.ops import noise
from truegraft.ops.interface import SamplingRow
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.reference_sampling import perturb_row
from truegraft.ops.triton import launch, memory, sampling
from truegraft.ops.triton.sampling_rows import pack

# The interpreter computes with NumPy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

CPU = torch.device("cpu")
REFERENCE = ReferenceOps(torch.float32)
WIDTHS = pytest.mark.parametrize("width", [97, 1000, 4099])
NAN, INF = math.nan, math.inf
DRAWN = replace(PLAIN, temperature=0.7)
Rows = Sequence[SamplingRow | None]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs and workspaces hold NaN, or far numbers, before they are written."""
    with memory.allocator(poisoned):
        yield


def randn(*shape: int, seed: int = 0, std: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def ids(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(width, (count,), generator=torch.Generator().manual_seed(seed))


def adjust(logits: Tensor, rows: Rows) -> Tensor:
    return sampling.adjust(logits, pack(rows, logits.shape[1], CPU))


def sample(logits: Tensor, rows: Rows) -> Tensor:
    return sampling.sample(logits, pack(rows, logits.shape[1], CPU))


# ------------------------------------------------------------------ adjust


def adjusting_rows(width: int) -> dict[str, SamplingRow]:
    prompt, output = ids(30, width // 2, 1), ids(40, width // 2, 2)
    seen = replace(PLAIN, prompt=prompt, output=output)
    bias = tuple((token, 0.37 * token - 9) for token in {*output[:9].tolist(), 3, width - 1})
    allowed = (*range(0, width, 3), width - 1, 5, 5)
    every = replace(
        seen,
        repetition_penalty=1.3,
        frequency_penalty=0.37,
        presence_penalty=-0.11,
        bias=bias,
        allowed=allowed,
        banned=(bias[0][0], 3, 3),
    )
    return {
        "repetition": replace(seen, repetition_penalty=1.37),
        "repetition below 1": replace(seen, repetition_penalty=0.7),
        "frequency": replace(seen, frequency_penalty=0.29),
        "negative frequency": replace(seen, frequency_penalty=-0.31),
        "presence": replace(seen, presence_penalty=0.77),
        "negative presence": replace(seen, presence_penalty=-1.3),
        "prompt alone": replace(every, output=ids(0, 1)),
        "output alone": replace(every, prompt=ids(0, 1)),
        "long history": replace(every, prompt=ids(400, width, 3), output=ids(1700, width, 4)),
        "one token often": replace(every, output=torch.full((1111,), 7)),
        "no history": replace(every, prompt=ids(0, 1), output=ids(0, 1)),
        "bias": replace(seen, bias=bias),
        "allowed": replace(seen, allowed=allowed),
        "allowed one": replace(seen, allowed=(width - 1,)),
        "banned": replace(seen, banned=(0, width - 1, 31, 32)),
        "everything": every,
    }


def special(width: int) -> Tensor:
    """Logits with zeros of both signs, infinities and a NaN among them."""
    z = randn(1, width)
    z[0, ids(40, width // 2, 2)[:6]] = torch.tensor([0.0, -0.0, INF, -INF, NAN, -0.0])
    z[0, width // 2 :: 7] = -0.0
    return z


@WIDTHS
@pytest.mark.parametrize("name", adjusting_rows(97))
def test_adjusted_logits_are_the_reference_s_bits(width: int, name: str) -> None:
    row = adjusting_rows(width)[name]
    for z in (randn(1, width), special(width)):
        before = z.clone()
        got, want = adjust(z, [row]), REFERENCE.adjust(z, [row])
        assert same_bits(z, before), "the input stays"
        finite = ~want.isnan()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(
            bits(got)[finite], bits(want)[finite]
        )


@WIDTHS
def test_adjusted_rows_in_one_batch_are_their_own(width: int) -> None:
    rows = [None, *adjusting_rows(width).values(), None]
    z = randn(len(rows), width)
    whole = adjust(z, rows)
    assert same_bits(whole, REFERENCE.adjust(z, rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assert same_bits(adjust(z[order], [rows[i] for i in order]), whole[order])
    for index, row in [*enumerate(rows)][::3]:
        assert same_bits(adjust(z[index : index + 1], [row])[0], whole[index])


def test_nothing_is_launched_for_what_no_row_asks() -> None:
    z = randn(2, 97)

    def launched(row: SamplingRow | None) -> set[str]:
        names: list[str] = []
        with launch.observed(names.append):
            rows = [None, row]
            sample(adjust(z, rows), rows)
        return {*names}

    draw = {"draw_kernel", "choose_kernel"}
    filters = {"group_kernel", "bound_kernel", "gather_kernel", "cut_kernel"}
    penalties = {"adjust_kernel", "mark_kernel", "count_kernel", "penalise_kernel"}
    assert launched(None) == draw and launched(DRAWN) == draw
    assert launched(replace(DRAWN, top_k=97)) == draw
    assert launched(replace(DRAWN, top_p=0.5)) == draw | filters
    assert launched(replace(PLAIN, top_p=0.5)) == draw
    assert launched(replace(PLAIN, banned=(1,))) == draw | {"adjust_kernel", "edit_kernel"}
    asked = replace(PLAIN, presence_penalty=1.0, output=ids(3, 97))
    assert launched(asked) == draw | penalties


def test_a_batch_may_hold_more_than_its_rows_use() -> None:
    """A captured graph launches everything; flags that are set too often change no bit."""
    rows = [*adjusting_rows(97).values(), None, DRAWN, replace(DRAWN, top_k=3)]
    for some in (rows, [None, DRAWN], [PLAIN, None]):
        z, batch = randn(len(some), 97), pack(some, 97, CPU)
        flags = ("has_penalties", "has_edits", "has_masks", "has_draws", "has_filters")
        full = replace(batch, max_history=4000, **dict.fromkeys(flags, True))  # type: ignore[arg-type]
        adjusted = sampling.adjust(z, full)
        assert same_bits(adjusted, sampling.adjust(z, batch))
        assert same_bits(sampling.sample(adjusted, full), sampling.sample(adjusted, batch))


def test_ids_outside_the_vocabulary_count_for_nothing() -> None:
    row = replace(PLAIN, repetition_penalty=1.5, prompt=ids(5, 97), output=ids(5, 97, 1))
    z = randn(2, 97)
    stray = torch.tensor([97, -1, 2**40, -(2**62)])
    strange = replace(row, prompt=torch.cat((row.prompt, stray)))
    assert same_bits(adjust(z, [strange, None]), REFERENCE.adjust(z, [row, None]))


# ------------------------------------------------------------------ argmax, logprobs


@WIDTHS
def test_argmax_takes_the_first_of_the_largest(width: int) -> None:
    z = randn(6, width)
    z[1, [width - 1, width // 2, width // 3]] = 99.0
    z[2] = -INF
    z[3] = 0.0
    z[3, : width // 2] = -0.0  # equal to 0.0: the first is token 0
    z[4] = -7.5
    z[5, width - 1] = INF
    assert sampling.argmax(z).tolist() == [int(z[0].argmax()), width // 3, 0, 0, 0, width - 1]
    assert same_bits(sample(z, [None, PLAIN] * 3), sampling.argmax(z))


@pytest.mark.parametrize("sign", [0, 1])
def test_a_nan_shows_and_stays_in_its_row(sign: int) -> None:
    z = randn(3, 2300)
    clean = sampling.argmax(z), sampling.logprobs(z)
    pattern = torch.tensor([0x7FC00000 - sign * 2**31], dtype=torch.int32).view(torch.float32)
    z[1, 2100] = pattern[0]
    rows = [DRAWN, replace(DRAWN, top_k=5, top_p=0.9, min_p=0.01), DRAWN]
    assert sampling.argmax(z).tolist() == [int(clean[0][0]), 2100, int(clean[0][2])]
    assert 0 <= int(sample(z, rows)[1]) < 2300
    logprobs = sampling.logprobs(z)
    assert logprobs[1].isnan().all() and same_bits(logprobs[[0, 2]], clean[1][[0, 2]])


@pytest.mark.parametrize("width", [2, 97, 4099, 9000])
@pytest.mark.parametrize("std", [0.1, 3.0, 30.0])
def test_logprobs(width: int, std: float) -> None:
    z = randn(4, width, std=std) + 20
    z[1, : width // 2] = -INF
    z[2] = 1.5
    got, exact = sampling.logprobs(z), z.double().log_softmax(-1)
    assert torch.equal(got.isinf(), exact.isinf())
    kept = ~exact.isinf()
    # Three roundings: of z - max, of the logarithm and of their difference.
    floor = rounding_floor(exact[kept], torch.float32) + torch.finfo(torch.float32).eps / 8
    assert error(got[kept], exact[kept]) <= 3 * floor
    for row in range(4):
        assert same_bits(sampling.logprobs(z[row : row + 1]), got[row : row + 1])


def test_logprobs_of_a_single_token() -> None:
    assert torch.equal(sampling.logprobs(randn(3, 1)), torch.zeros(3, 1))
    assert sampling.logprobs(torch.full((1, 97), -INF)).isnan().all()


# ------------------------------------------------------------------ noise


@triton.jit  # type: ignore[untyped-decorator]
def words_kernel(out: Any, parameters: Any, COUNT: tl.constexpr) -> None:
    quad = tl.arange(0, COUNT)
    w0, w1, w2, w3 = sampling.philox(
        quad,
        tl.load(parameters),
        tl.load(parameters + 1),
        tl.load(parameters + 2),
        tl.load(parameters + 3),
    )
    tl.store(out + quad * 4, w0.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 1, w1.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 2, w2.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 3, w3.to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def exponential_kernel(out: Any, words: Any, COUNT: tl.constexpr) -> None:
    place = tl.arange(0, COUNT)
    word = tl.load(words + place).to(tl.uint32, bitcast=True)
    tl.store(out + place, sampling.exponential(word))


@triton.jit  # type: ignore[untyped-decorator]
def log_kernel(out: Any, x: Any, COUNT: tl.constexpr) -> None:
    place = tl.arange(0, COUNT)
    tl.store(out + place, sampling._log(tl.load(x + place)))


def as_int32(words: Sequence[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345678901, 2**64 - 1, -(2**63), -5])
@pytest.mark.parametrize(("position", "index"), [(0, 0), (1, 2), (131071, 4097), (2**31 + 7, 1)])
def test_philox_words(seed: int, position: int, index: int) -> None:
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    out = torch.zeros(256, 4, dtype=torch.int32)
    words_kernel[(1,)](out, as_int32([position, index, low, high]), COUNT=256)
    counter = (torch.arange(256), position, index, 0)
    want = torch.stack(noise.philox(counter, (low, high)), dim=-1)
    assert torch.equal(out.long() & 0xFFFFFFFF, want)


def units(got: Tensor, exact: Tensor) -> float:
    """The largest error in units in the last place of the float32 result."""
    _, power = torch.frexp(exact.float())
    return float(((got.double() - exact).abs() / torch.exp2(power.double() - 24)).max())


def test_exponential_is_accurate_for_every_kind_of_word() -> None:
    ends = [*range(300), *(2**32 - 1 - i for i in range(300))]
    middle = [1257966796 + i for i in range(-20, 20)] + [2**31 + i for i in range(-20, 20)]
    powers = [min(max(2**e + i, 0), 2**32 - 1) for e in range(33) for i in (-1, 0, 1)]
    some = torch.randint(2**32, (6500,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [*ends, *middle, *powers, *some]
    words += [0] * (8192 - len(words))
    out = torch.full((8192,), NAN)
    exponential_kernel[(1,)](out, as_int32(words), COUNT=8192)
    u = (torch.tensor(words, dtype=torch.float64) + 0.5) * 2.0**-32
    assert (out > 0).all() and units(out, -torch.log1p(-u)) <= 2.5


def test_log_is_accurate() -> None:
    x = torch.cat((torch.logspace(-10, 6, 4093), torch.tensor([1.0, INF, NAN])))
    out = torch.zeros(4096)
    log_kernel[(1,)](out, x, COUNT=4096)
    assert float(out[4093]) == 0.0 and float(out[4094]) == INF and out[4095].isnan()
    assert units(out[:4093], x[:4093].double().log()) <= 2


# ------------------------------------------------------------------ filters


FILTERS: dict[str, dict[str, Any]] = {
    "top_k 1": {"top_k": 1},
    "top_k 40": {"top_k": 40},
    "top_k, all but one": {"top_k": -1},
    "top_p tiny": {"top_p": 1e-6},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.99999": {"top_p": 0.99999},
    "min_p 1": {"min_p": 1.0},
    "top_k, top_p": {"top_k": 20, "top_p": 0.8},
    "top_p, min_p": {"top_p": 0.7, "min_p": 0.02},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
}


def filtering_rows(width: int) -> list[SamplingRow]:
    rows = []
    for number, asked in enumerate(FILTERS.values()):
        if asked.get("top_k") == -1:
            asked = {"top_k": width - 1}
        rows.append(replace(DRAWN, seed=number, **asked))
    return [*rows, replace(rows[-1], temperature=3.3), replace(rows[4], temperature=0.05)]


def kinds(width: int) -> dict[str, Tensor]:
    """Rows of logits [V] with all that makes a threshold hard to find."""
    coarse = (randn(width, std=2.0) * 2).round() / 2
    few = torch.full((width,), -INF)
    few[ids(9, width)] = randn(9)
    spread = randn(width) * torch.logspace(-30, 2, width)
    return {
        "usual": randn(width),
        "flat": randn(width, std=1e-3),
        "peaked": randn(width, std=20.0),
        "ties": coarse,
        "equal": torch.full((width,), 1.25),
        "zeros of both signs": torch.where(ids(width, 2) > 0, 0.0, -0.0),
        "few": few,
        "one": torch.full((width,), -INF).scatter_(0, torch.tensor([width // 2]), 3.0),
        "all sizes": spread,
        "huge": randn(width, std=1e36),
        "sorted": randn(width).sort().values,
        "negative": randn(width) - 1000,
    }


def assert_kept_as_in_reference(z: Tensor, rows: Sequence[SamplingRow]) -> None:
    """z: [V], filtered as each row says."""
    logits = z.expand(len(rows), -1).contiguous()
    batch = pack(rows, len(z), CPU)
    cuts = sampling.thresholds(logits, batch)
    for index, row in enumerate(rows):
        want = z.clone()
        perturb_row(want, row)
        scaled = z / row.temperature
        kept = ~(scaled < cuts[index]) & (scaled > -INF)
        assert torch.equal(kept, want > -INF), f"{int(kept.sum())} of {row}"


@pytest.mark.parametrize(("number", "kind"), [*enumerate(kinds(97))])
def test_filters_keep_what_the_reference_keeps(number: int, kind: str) -> None:
    width = (97, 1000, 4099)[number % 3]
    assert_kept_as_in_reference(kinds(width)[kind], filtering_rows(width)[number % 2 :: 2])


@pytest.mark.parametrize("capacity", [1, 64])
def test_too_many_candidates_mean_a_search_of_the_row(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", capacity)
    for kind in ("usual", "ties"):
        assert_kept_as_in_reference(kinds(1000)[kind], filtering_rows(1000)[1:8:2])


def test_every_top_k_of_values_that_cuts_hit() -> None:
    rows = [replace(DRAWN, temperature=1.0, top_k=k) for k in range(1, 36, 3)]
    assert_kept_as_in_reference((torch.arange(36) % 9).float(), rows)


def test_top_p_is_reached_not_nearly_reached() -> None:
    """Weights 2³⁰ and 2: half a unit more than the first token holds takes both."""
    z = torch.tensor([-20.0, 0.0])
    weights = (2.0**30, 2.0**30 + 0.5, 2.0**30 + 1.5)
    tops = [weight / (2**30 + 2) for weight in weights]
    rows = [replace(DRAWN, temperature=1.0, top_p=p) for p in tops]
    assert_kept_as_in_reference(z, rows)


def test_a_row_longer_than_one_block_of_the_search() -> None:
    rows = [replace(DRAWN, top_k=6000), replace(DRAWN, top_p=0.999), replace(DRAWN, top_k=50)]
    assert_kept_as_in_reference(randn(11003, std=0.5), rows)


# ------------------------------------------------------------------ sample


@WIDTHS
def test_drawn_ids_are_the_reference_s(width: int) -> None:
    """Noise may differ in its last bit; none of these draws is so close a race."""
    z = randn(6, width)
    every: list[dict[str, Any]] = [{}, {"min_p": 0.02, "top_k": 50, "top_p": 0.95}]
    for asked in every:
        rows = [
            replace(DRAWN, seed=seed * 2**33 + seed, position=seed * 9, sample_index=seed % 3)
            for seed in range(6)
        ]
        rows = [replace(row, **asked) for row in rows]
        drawn = sample(z, rows)
        assert torch.equal(drawn, REFERENCE.sample(z, rows))
        assert len(set(drawn.tolist())) > 2


def test_every_part_of_the_key_matters() -> None:
    z = torch.zeros(1, 1000)
    keys = [{}, {"seed": 2}, {"seed": 1 + 2**32}, {"sample_index": 1}, {"position": 6}]
    rows = [replace(DRAWN, **key) for key in keys]  # type: ignore[arg-type]
    drawn = [int(sample(z, [row])) for row in rows]
    assert drawn == [int(REFERENCE.sample(z, [row])) for row in rows]
    assert len(set(drawn)) == len(keys)


def test_drawn_rows_in_one_batch_are_their_own() -> None:
    width = 2100
    some = filtering_rows(width)[::3]
    rows: list[SamplingRow | None] = [None, PLAIN, DRAWN, *some, None]
    z = randn(len(rows), width, std=1.5)
    whole = sample(z, rows)
    assert torch.equal(whole, REFERENCE.sample(z, rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(sample(z[order].contiguous(), [rows[i] for i in order]), whole[order])
    for index, row in enumerate(rows):
        assert torch.equal(sample(z[index : index + 1], [row]), whole[index : index + 1])


def test_frequencies_follow_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 64)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -INF])
    rows = [replace(DRAWN, temperature=1.0, position=place) for place in range(120)]
    drawn = sample(logits.expand(120, -1).contiguous(), rows)
    expected = logits.softmax(-1) * 120
    counts = drawn.bincount(minlength=6)
    assert int(counts[5]) == 0
    chi_square = float(((counts - expected).square() / expected)[:5].sum())
    assert chi_square < 18.5, "4 degrees of freedom, one in a thousand"
