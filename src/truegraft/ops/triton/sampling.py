"""From logits to tokens: adjusting, filters, noise, argmax and log-softmax, each row by itself.

A row is cut into chunks that follow the vocabulary alone. Everything that crosses a chunk is an
integer (counts, weights, ordered images of floats), so no order of programs can show; only the sum
of a log-softmax is a float, and its parts are added in one fixed tree. Knows nothing about
requests: `sampling_rows` says what a row asks for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from truegraft.ops.triton import memory
from truegraft.ops.triton.launch import launch, release_dependents, wait_for_inputs
from truegraft.ops.triton.sampling_rows import ALIGNMENT, SamplingBatch

CHUNK = 2048  # tokens of one program
GROUP = 64  # tokens whose maximum bounds the filters' thresholds
CANDIDATES = 8192  # tokens that the filters look at, where these are enough
SEARCH_BLOCK = 4096  # values in a thread block's registers at once
HISTORY_BLOCK = 1024

Sizes = dict[str, Any]  # of a launch

_NEVER = tl.constexpr(-(2**63))  # below the image of any token
_LAST_ID = tl.constexpr(2**31 - 1)
_LN_2_HIGH = tl.constexpr(0.693359375)  # few bits: its product with an exponent is exact
_LN_2_LOW = tl.constexpr(-2.12194440e-4)
_LOG2_E = tl.constexpr(1.4426950216293335)  # float32(log2(e))
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)  # log2(e) less that
_LN_2 = tl.constexpr(0.6931471805599453)


def _check(logits: Tensor, batch: SamplingBatch | None = None) -> None:
    assert logits.dim() == 2 and logits.dtype == torch.float32 and logits.is_contiguous()
    assert 0 < logits.shape[1] < 2**24
    assert batch is None or len(batch.temperature) == len(logits)


def _chunks(logits: Tensor) -> int:
    return -(-logits.shape[1] // CHUNK)


# ------------------------------------------------------------------ adjust


def adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Penalties, bias and masks on raw logits: [L, V] float32; `logits` itself if none asks.

    In this order: repetition, frequency, presence, bias, allowed mask, banned ids. Ids of a history
    that are outside the vocabulary count for nothing.
    """
    _check(logits, batch)
    if not batch.adjusts:
        return logits
    rows, width = logits.shape
    out = memory.empty(rows, width, dtype=torch.float32, device=logits.device)
    asked = (batch.repetition, batch.frequency, batch.presence, batch.mask_row, batch.masks)
    launch(
        adjust_kernel,
        (rows * _chunks(logits),),
        *(logits, out, *asked),
        WIDTH=width,
        BLOCK=CHUNK,
        num_warps=8,
    )
    if batch.has_penalties and batch.max_history > 0:
        _penalise(logits, out, batch)
    if batch.has_edits:
        bias = (batch.bias_indptr, batch.bias_ids, batch.bias_values)
        edits = (*bias, batch.banned_indptr, batch.banned_ids)
        launch(edit_kernel, (rows,), out, *edits, WIDTH=width, BLOCK=256, num_warps=4)
    return out


def _penalise(logits: Tensor, out: Tensor, batch: SamplingBatch) -> None:
    """Write the penalised logits of every id in a row's history.

    One place of the history leads for each id in it (the last to say so; no other need know which)
    and holds the id's count. So nothing as wide as the vocabulary is cleared.
    """
    rows, width = logits.shape
    size = batch.max_history
    leader = memory.empty(rows, width, dtype=torch.int32, device=logits.device)
    counts = memory.empty(rows, size, dtype=torch.int32, device=logits.device)
    asked = (batch.repetition, batch.frequency, batch.presence)
    history = (batch.tokens, batch.history_start, batch.num_prompt, batch.num_history)
    grid = (rows, -(-size // HISTORY_BLOCK))
    sizes: Sizes = {"WIDTH": width, "BLOCK": HISTORY_BLOCK, "num_warps": 8}
    launch(mark_kernel, grid, *asked, *history, leader, counts, size, **sizes)
    launch(count_kernel, grid, *asked, *history, leader, counts, size, **sizes)
    masks = (batch.mask_row, batch.masks)
    launch(
        penalise_kernel, grid, logits, out, *masks, *asked, *history, leader, counts, size, **sizes
    )


@triton.jit
def adjust_kernel(
    logits,
    out,
    repetition,
    frequency,
    presence,
    mask_row,
    masks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a row: the mask, and what penalties do to an id that was never seen."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    token = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    inside = token < WIDTH
    z = tl.load(logits + row * WIDTH + token, mask=inside, other=0.0)
    z = _penalised(z, 0, 1.0, tl.load(frequency + row), tl.load(presence + row))
    z = _masked(z, token, inside, mask_row, masks, row, WIDTH)
    tl.store(out + row * WIDTH + token, z, mask=inside)


@triton.jit
def _penalised(z, count, repetition, frequency, presence):
    """z as the reference penalises it; the id stands `count` times in the output."""
    if repetition != 1.0:
        z = tl.where(z > 0, tl.div_rn(z, repetition), z * repetition)
    if (frequency != 0.0) | (presence != 0.0):
        # Also where count is 0: -0.0 less -0.0 is 0.0.
        z = z - frequency * (count * 1.0)
        z = z - presence * tl.where(count > 0, 1.0, 0.0)
    return z


@triton.jit
def _masked(z, token, inside, mask_row, masks, row, WIDTH: tl.constexpr):
    WORDS: tl.constexpr = (WIDTH + 31) // 32
    which = tl.load(mask_row + row).to(tl.int64)
    if which >= 0:
        word = tl.load(masks + which * WORDS + token // 32, mask=inside, other=0)
        z = tl.where(((word >> (token % 32)) & 1) == 1, z, float("-inf"))
    return z


@triton.jit
def _history(
    repetition,
    frequency,
    presence,
    tokens,
    history_start,
    num_history,
    row,
    place,
    WIDTH: tl.constexpr,
):
    """Ids at these places of a row's history, and which of them count for anything."""
    asked = tl.load(repetition + row) != 1.0
    asked = asked | (tl.load(frequency + row) != 0.0) | (tl.load(presence + row) != 0.0)
    held = place < tl.where(asked, tl.load(num_history + row), 0)
    token = tl.load(tokens + tl.load(history_start + row) + place, mask=held, other=-1)
    return token, held & (token >= 0) & (token < WIDTH)


@triton.jit(do_not_specialize=["size"])
def mark_kernel(
    repetition,
    frequency,
    presence,
    tokens,
    history_start,
    num_prompt,
    num_history,
    leader,
    counts,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a row's history: each place claims its id; no place has counted yet."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, held = _history(
        repetition, frequency, presence, tokens, history_start, num_history, row, place, WIDTH
    )
    tl.store(leader + row * WIDTH + token, place, mask=held)
    tl.store(counts + row * size + place, 0, mask=held)


@triton.jit(do_not_specialize=["size"])
def count_kernel(
    repetition,
    frequency,
    presence,
    tokens,
    history_start,
    num_prompt,
    num_history,
    leader,
    counts,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a row's history: each place of the output adds one to its leader's count."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, held = _history(
        repetition, frequency, presence, tokens, history_start, num_history, row, place, WIDTH
    )
    output = held & (place >= tl.load(num_prompt + row))
    first = tl.load(leader + row * WIDTH + token, mask=output, other=0)
    tl.atomic_add(counts + row * size + first, 1, mask=output, sem="relaxed")


@triton.jit(do_not_specialize=["size"])
def penalise_kernel(
    logits,
    out,
    mask_row,
    masks,
    repetition,
    frequency,
    presence,
    tokens,
    history_start,
    num_prompt,
    num_history,
    leader,
    counts,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a row's history: each leader writes its id's logit."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, held = _history(
        repetition, frequency, presence, tokens, history_start, num_history, row, place, WIDTH
    )
    leads = held & (tl.load(leader + row * WIDTH + token, mask=held, other=-1) == place)
    count = tl.load(counts + row * size + place, mask=leads, other=0)
    z = tl.load(logits + row * WIDTH + token, mask=leads, other=0.0)
    penalties = (tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row))
    z = _penalised(z, count, penalties[0], penalties[1], penalties[2])
    z = _masked(z, token, leads, mask_row, masks, row, WIDTH)
    tl.store(out + row * WIDTH + token, z, mask=leads)


@triton.jit
def edit_kernel(
    out,
    bias_indptr,
    bias_ids,
    bias_values,
    banned_indptr,
    banned_ids,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: add the biases, then ban. (A masked -inf stays one, as if the bias came before.)"""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    end = tl.load(bias_indptr + row + 1)
    for start in range(tl.load(bias_indptr + row), end, BLOCK):
        held = start + lane < end
        token = tl.load(bias_ids + start + lane, mask=held, other=0)
        bias = tl.load(bias_values + start + lane, mask=held, other=0.0)
        place = out + row * WIDTH + token
        tl.store(place, tl.load(place, mask=held, other=0.0) + bias, mask=held)
    tl.debug_barrier()  # an id may be biased by one thread and banned by another
    end = tl.load(banned_indptr + row + 1)
    for start in range(tl.load(banned_indptr + row), end, BLOCK):
        held = start + lane < end
        token = tl.load(banned_ids + start + lane, mask=held, other=0)
        tl.store(out + row * WIDTH + token, float("-inf"), mask=held)


# ------------------------------------------------------------------ argmax and sample


def argmax(logits: Tensor) -> Tensor:
    """The largest logit's id: [L, V] float32 → [L] int64. Ties: the lowest; a NaN is largest."""
    _check(logits)
    return _best(logits, None, None)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token a row from adjusted logits: [L, V] float32 → [L] int64.

    z = logits / temperature, masked by min-p, top-k and top-p; argmax of z + Gumbel noise.
    """
    _check(logits, batch)
    if not batch.has_draws:
        return _best(logits, None, None)
    return _best(logits, batch, thresholds(logits, batch) if batch.has_filters else None)


def _best(logits: Tensor, batch: SamplingBatch | None, cuts: Tensor | None) -> Tensor:
    """Argmax of each row's perturbed logits; without a batch, of the logits themselves."""
    rows, width = logits.shape
    chunks = _chunks(logits)
    best = memory.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    ids = memory.empty(rows, dtype=torch.int64, device=logits.device)
    noise: tuple[Tensor | None, ...] = (None,) * 4
    if batch is not None:
        noise = (batch.temperature, batch.seed, batch.sample_index, batch.position)
    launch(
        draw_kernel,
        (rows * chunks,),
        *(logits, best, *noise, cuts, rows),
        WIDTH=width,
        BLOCK=CHUNK,
        num_warps=4,
    )
    block = triton.next_power_of_2(chunks)
    launch(choose_kernel, (rows,), best, ids, CHUNKS=chunks, BLOCK=block, num_warps=1)
    return ids


@triton.jit(do_not_specialize=["rows"])
def draw_kernel(
    logits,
    best,
    temperature,
    seed,
    sample_index,
    position,
    cuts,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a row: its largest perturbed logit and that one's id, as one integer."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=float("-inf"))
    if temperature is not None:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            z = tl.div_rn(z, heat)
            if cuts is not None:
                z = tl.where(z < tl.load(cuts + row), float("-inf"), z)
            # Filters leave most chunks empty: those need no noise.
            if tl.max((z != float("-inf")).to(tl.int32), 0) > 0:
                quad = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
                z += gumbel(
                    quad,
                    tl.load(position + row),
                    tl.load(sample_index + row),
                    tl.load(seed + row),
                    tl.load(seed + rows + row),
                )
    # Equal values: the lowest id is the largest integer. Lanes past the row lose every tie.
    image = (_image(z) << 32) | (token ^ _LAST_ID).to(tl.int64)
    tl.store(best + tl.program_id(0), tl.max(image, 0))


@triton.jit
def choose_kernel(best, ids, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """One row's id, from its chunks."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    image = tl.load(best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=_NEVER)
    tl.store(ids + row, (tl.max(image, 0) & _LAST_ID) ^ _LAST_ID)


@triton.jit
def _image(z):
    """An int64 that orders as z does: -0.0 equals 0.0, NaN is largest."""
    z = z + 0.0
    bits = z.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(z == z, bits, 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(image):
    """The float32 whose image this is."""
    bits = image.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


# ------------------------------------------------------------------ noise


@triton.jit
def philox(quad, c1, c2, k0, k1):
    """Philox4x32-10 of the counters (quad, c1, c2, 0): four blocks of uint32.

    quad: a block of int32; c1, c2 and the key (k0, k1): int32 of the same bits.
    """
    c0 = quad.to(tl.uint32, bitcast=True)
    c1 = tl.zeros_like(c0) + c1.to(tl.uint32, bitcast=True)
    c2 = tl.zeros_like(c0) + c2.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0)
    k0, k1 = k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        wide_0 = c0.to(tl.uint64) * 0xD2511F53
        wide_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (wide_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (wide_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = wide_1.to(tl.uint32), wide_0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel(quad, position, sample_index, seed_low, seed_high):
    """-log(e) of four tokens a counter, e = `ops.noise.exponential` to 1 or 2 units."""
    w0, w1, w2, w3 = philox(quad, position, sample_index, seed_low, seed_high)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return -_log(exponential(words))


@triton.jit
def exponential(word):
    """-log1p(-u), u = (word + ½) / 2³², in float32.

    Near u = 0 the logarithm follows u itself, elsewhere 1 - u = (complement of word + ½) / 2³².
    """
    u = (word.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    rest, power = _reduced((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5)
    near = word < 1257966796  # 1 - u > √½
    return -_log_of(tl.where(near, -u, rest), tl.where(near, 0.0, power - 32.0))


@triton.jit
def _log(x):
    """log(x) to about a unit, of a normal float32 or infinity or NaN; none is below zero."""
    rest, power = _reduced(x)
    return tl.where(x < float("inf"), _log_of(rest, power), x)


@triton.jit
def _reduced(x):
    """(f, k): x = (1 + f) · 2ᵏ, √½ ≤ 1 + f < √2, exactly."""
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # of √½
    power = (bits >> 23).to(tl.float32)
    rest = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return rest - 1.0, power


@triton.jit
def _log_of(f, k):
    """log(1 + f) + k log(2). With s = f / (2 + f): log(1 + f) = f - s (f - R), R = 2 s²/3 + …."""
    s = tl.div_rn(f, 2.0 + f)
    w = s * s
    series = w * tl.fma(w, tl.fma(w, tl.fma(w, 2.0 / 9.0, 2.0 / 7.0), 2.0 / 5.0), 2.0 / 3.0)
    half = 0.5 * f * f
    small = tl.fma(k, _LN_2_LOW, s * (half + series)) - half
    return tl.fma(k, _LN_2_HIGH, small + f)


# ------------------------------------------------------------------ filters


def thresholds(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The least z that min-p, top-k and top-p keep: [L] float32 (nothing for unfiltered rows).

    Half of all groups of 64 tokens have their maximum above the median of these maxima. So few
    tokens, and no fewer than that, are above: they are gathered, and mostly hold the answer;
    where they do not, the whole row is searched. Both ways find the same value.
    """
    rows, width = logits.shape
    chunks, device = _chunks(logits), logits.device
    groups = chunks * (CHUNK // GROUP)
    maxima = memory.empty(rows, groups, dtype=torch.float32, device=device)
    bounds = memory.empty(3, rows, dtype=torch.float32, device=device)  # top, min-p's cut, base
    gathered = memory.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    count = memory.empty(rows, dtype=torch.int32, device=device)
    total = memory.empty(rows, dtype=torch.int64, device=device)
    cuts = memory.empty(rows, dtype=torch.float32, device=device)
    asked = (batch.temperature, batch.top_k, batch.top_p, batch.log_min_p)
    grid = (rows * chunks,)
    sizes: Sizes = {"WIDTH": width, "BLOCK": CHUNK, "num_warps": 4}
    launch(group_kernel, grid, logits, *asked, maxima, GROUP=GROUP, **sizes)
    launch(
        bound_kernel,
        (rows,),
        *(*asked, maxima, bounds, count, total, rows),
        GROUPS=groups,
        ABOVE=max(min(groups, -(-width // GROUP)) // 2, 1),
        BLOCK=triton.next_power_of_2(groups),
        num_warps=8,
    )
    found = (bounds, gathered, count, total, rows)
    launch(gather_kernel, grid, logits, *asked, *found, CAPACITY=CANDIDATES, **sizes)
    search: Sizes = {"WIDTH": width, "CAPACITY": CANDIDATES, "BLOCK": SEARCH_BLOCK, "num_warps": 16}
    launch(cut_kernel, (rows,), logits, *asked, *found, cuts, **search)
    return cuts


@triton.jit
def _filters(temperature, top_k, top_p, log_min_p, row):
    """Whether the row is filtered at all."""
    asked = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0)
    asked = asked | (tl.load(log_min_p + row) > float("-inf"))
    return asked & (tl.load(temperature + row) > 0.0)


@triton.jit
def group_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    maxima,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a row: the largest raw logit of each group of tokens."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    if _filters(temperature, top_k, top_p, log_min_p, row):
        token = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=float("-inf"))
        largest = tl.max(tl.reshape(z, (GROUPS, GROUP)), 1)
        tl.store(maxima + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), largest)


@triton.jit(do_not_specialize=["rows"])
def bound_kernel(
    temperature,
    top_k,
    top_p,
    log_min_p,
    maxima,
    bounds,
    count,
    total,
    rows,
    GROUPS: tl.constexpr,
    ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its top, the cut of min-p, and the base above which candidates are gathered."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    if _filters(temperature, top_k, top_p, log_min_p, row):
        heat = tl.load(temperature + row)
        group = tl.arange(0, BLOCK)
        place = maxima + row * GROUPS
        largest = tl.load(place + group, mask=group < GROUPS, other=float("-inf"))
        top = tl.div_rn(tl.max(largest, 0), heat)
        cut = tl.load(log_min_p + row)
        cut = tl.where(cut > float("-inf"), top + cut, cut)  # also where top is infinite
        low = tl.full((), float("-inf"), tl.float32)
        base = _search(place, GROUPS, heat, low, top, ABOVE, False, BLOCK)
        tl.store(bounds + row, top)
        tl.store(bounds + rows + row, cut)
        tl.store(bounds + 2 * rows + row, tl.maximum(base, cut))
        tl.store(count + row, 0)
        tl.store(total + row, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["rows"])
def gather_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    bounds,
    gathered,
    count,
    total,
    rows,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a row: gather raw logits from the base up, in no order; add up all weights."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    if _filters(temperature, top_k, top_p, log_min_p, row):
        heat = tl.load(temperature + row)
        token = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        inside = token < WIDTH
        raw = tl.load(logits + row * WIDTH + token, mask=inside, other=float("-inf"))
        z = tl.div_rn(raw, heat)
        # A masked token would be no answer but for -inf, which is where a search begins.
        found = (z > float("-inf")) & (z >= tl.load(bounds + 2 * rows + row))
        number = tl.cumsum(found.to(tl.int32), 0)
        some = tl.max(number, 0)
        if some > 0:
            place = tl.atomic_add(count + row, some, sem="relaxed") + number - 1
            tl.store(gathered + row * CAPACITY + place, raw, mask=found & (place < CAPACITY))
        if (tl.load(top_p + row) < 1.0) & (tl.load(top_k + row) == 0):
            kept = inside & (z >= tl.load(bounds + rows + row))
            weight = tl.where(kept, _weight(z, tl.load(bounds + row)), 0)
            tl.atomic_add(total + row, tl.sum(weight, 0), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def cut_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    bounds,
    gathered,
    count,
    total,
    rows,
    cuts,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the least z that is kept."""
    release_dependents()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    cut = tl.full((), float("-inf"), tl.float32)
    if _filters(temperature, top_k, top_p, log_min_p, row):
        heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
        top, base = tl.load(bounds + row), tl.load(bounds + 2 * rows + row)
        cut = tl.load(bounds + rows + row)
        held = tl.load(count + row)
        candidates = gathered + row * CAPACITY
        values, size = logits + row * WIDTH, WIDTH + tl.zeros((), tl.int32)
        fits = held <= CAPACITY
        if k > 0:
            if fits & ((held >= k) | (base <= cut)):  # enough, or all that min-p keeps
                values, size = candidates, held
            cut = _search(values, size, heat, cut, top, k, False, BLOCK)
        if p < 1.0:
            whole = tl.load(total + row)
            if k > 0:
                whole = _mass(values, size, heat, cut, top, BLOCK)
            need = tl.ceil(whole.to(tl.float64) * p).to(tl.int64)
            if (k == 0) & fits:
                if _mass(candidates, held, heat, cut, top, BLOCK) >= need:
                    values, size = candidates, held
            # Tokens over 22 below the top have no weight: exp(-22) < 2⁻³⁰.
            cut = _search(values, size, heat, tl.maximum(cut, top - 22.0), top, need, True, BLOCK)
    tl.store(cuts + row, cut)


@triton.jit
def _search(values, size, heat, low, top, need, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest v from low to top such that z ≥ v hold `need` or more; low if there is none.

    z = values / heat. They hold their number or, WEIGHTED, their weight. Each pass measures at
    three cuts and then also goes by the values that it met, so that it ends as soon as one value
    is left. Where the cuts are can change the number of passes, not the answer.
    """
    lane = tl.arange(0, BLOCK)
    first, last = _image(low), _image(top)
    passes = 0
    while first < last:
        cut_1 = _between(first, last, 1, passes)
        cut_2 = _between(first, last, 2, passes)
        cut_3 = _between(first, last, 3, passes)
        mass_1 = tl.zeros((BLOCK // 4,), tl.int64)
        mass_2 = tl.zeros((BLOCK // 4,), tl.int64)
        mass_3 = tl.zeros((BLOCK // 4,), tl.int64)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            inside = start + lane < size
            z = tl.load(values + start + lane, mask=inside, other=float("-inf"))
            z = tl.div_rn(z, heat) + 0.0
            mass = inside.to(tl.int64)
            if WEIGHTED:
                mass = tl.where(inside, _weight(z, top), 0)
            mass_1 += _by_four(tl.where(z >= _value(cut_1), mass, 0), BLOCK)
            mass_2 += _by_four(tl.where(z >= _value(cut_2), mass, 0), BLOCK)
            mass_3 += _by_four(tl.where(z >= _value(cut_3), mass, 0), BLOCK)
            met = inside & (z >= _value(first)) & (z <= _value(last))
            least = tl.minimum(least, tl.where(met, z, float("inf")))
            most = tl.maximum(most, tl.where(met, z, float("-inf")))
        met_first, met_last = _image(tl.min(least, 0)), _image(tl.max(most, 0))
        reach_1 = tl.sum(mass_1, 0) >= need
        reach_2 = tl.sum(mass_2, 0) >= need
        reach_3 = tl.sum(mass_3, 0) >= need
        above = tl.where(reach_3, last, tl.where(reach_2, cut_3, tl.where(reach_1, cut_2, cut_1)))
        last = tl.minimum(tl.where(reach_3, last, above - 1), met_last)
        below = tl.where(reach_2, cut_2, tl.where(reach_1, cut_1, first))
        first = tl.maximum(tl.where(reach_3, cut_3, below), met_first)
        passes += 1
    return tl.maximum(low, _value(tl.minimum(first, last)))


@triton.jit
def _by_four(x, BLOCK: tl.constexpr):
    """Sums of four neighbours, which one thread holds: fewer registers to add into."""
    return tl.sum(tl.reshape(x, (BLOCK // 4, 4)), 1)


@triton.jit
def _between(first, last, quarter, passes):
    """The image of a cut above first, at a quarter of the way to last.

    By value at first, which suits logits; then by image, which halves any interval in the end.
    """
    low, high = _value(first), _value(last)
    image = first + (last - first) * quarter // 4
    if (passes < 12) & (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf")):
        image = _image(low + (high - low) * (quarter * 0.25))
    return tl.minimum(tl.maximum(image, first + 1), last)


@triton.jit
def _mass(values, size, heat, cut, top, BLOCK: tl.constexpr):
    """The weight of z ≥ cut."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        z = tl.load(values + start + lane, mask=inside, other=float("-inf"))
        z = tl.div_rn(z, heat)
        mass += tl.where(inside & (z >= cut), _weight(z, top), 0)
    return tl.sum(mass, 0)


@triton.jit
def _weight(z, top):
    """exp(z - top) in units of 2⁻³⁰, rounded down: int64."""
    return (_exp(z - top) * 1073741824.0).to(tl.int64)


@triton.jit
def _exp(x):
    """exp(x) to about 2 units in the last place, of x ≤ 0 or NaN.

    exp2 of the rounded product x · log2(e) alone would be |x| / 2 units off: the rest of the
    product is put back. Not where exp vanishes: there the rest need not be a number.
    """
    power = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E_REST, tl.fma(x, _LOG2_E, -power)) * _LN_2
    raised = tl.exp2(power)
    return tl.where(x > -87.0, tl.fma(raised, rest, raised), raised)


# ------------------------------------------------------------------ log-softmax


def logprobs(logits: Tensor) -> Tensor:
    """Log-softmax of raw logits: [L, V] float32. A row with a NaN or +inf is all NaN."""
    rows, width = logits.shape
    if logits.data_ptr() % ALIGNMENT:
        logits = logits.clone()  # Triton lays threads, and so sums, out by alignment
    _check(logits)
    chunks, device = _chunks(logits), logits.device
    parts = memory.empty(2, rows, chunks, dtype=torch.float32, device=device)
    out = memory.empty(rows, width, dtype=torch.float32, device=device)
    grid = (rows * chunks,)
    sizes: Sizes = {"WIDTH": width, "BLOCK": CHUNK, "num_warps": 4}
    launch(exp_sum_kernel, grid, logits, parts, rows, **sizes)
    launch(logprobs_kernel, grid, logits, parts, out, rows, **sizes)
    return out


@triton.jit(do_not_specialize=["rows"])
def exp_sum_kernel(logits, parts, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk of a row: its largest logit m, and the sum of exp(z - m)."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    token = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=float("-inf"))
    top = tl.max(z, 0)
    # A chunk of -inf alone sums to 0; its largest, less itself, would be a NaN.
    total = tl.sum(_exp(z - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(parts + tl.program_id(0), top)
    tl.store(parts + rows * CHUNKS + tl.program_id(0), total)


@triton.jit(do_not_specialize=["rows"])
def logprobs_kernel(logits, parts, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk of a row: (z - max) - log(Σ exp(z - max)), the parts added in one fixed tree."""
    release_dependents()
    wait_for_inputs()
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    FOLD: tl.constexpr = triton.next_power_of_2(CHUNKS)
    part = tl.arange(0, FOLD)
    place = parts + row * CHUNKS + part
    tops = tl.load(place, mask=part < CHUNKS, other=float("-inf"))
    sums = tl.load(place + rows * CHUNKS, mask=part < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    log_sum = _log(tl.sum(sums * _exp(tops - top), 0))
    token = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + token, (z - top) - log_sum, mask=token < WIDTH)
