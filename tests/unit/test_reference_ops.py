"""Each reference op against its equation in float64, and each row against itself in company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from truegraft.ops.interface import (
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    QKNorm,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.noise import exponential, philox
from truegraft.ops.prove import Shapes, choose_tiles
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.reference_sampling import perturb_row

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
WIDTHS = (100, 257, 688)  # not multiples of a vector: the scalar tails of elementwise loops
BLOCK = 64
TOLERANCE = {FP32: 2e-5, BF16: 2**-7}  # relative to the largest element


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = FP32) -> bool:
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE[dtype] * expected.double().abs().max())


def bits_equal(left: Tensor, right: Tensor) -> bool:
    assert left.dtype == right.dtype and left.shape == right.shape
    return left.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8))


def base_slots(count: int) -> Tensor:
    return torch.full((count,), -1, dtype=torch.int32)


# ------------------------------------------------------------------ linears and adapters


def adapters(
    ops: ReferenceOps, ranks: Sequence[int], k: int, n: int
) -> tuple[LoraPages, list[tuple[Tensor, Tensor, float]]]:
    """Pages in a scattered order, and (A [r, k], B [n, r], scale) of each slot; rank 0: none."""
    needed = [-(-rank // 16) for rank in ranks]
    pages = ops.new_pages((sum(needed) + 2, len(ranks), max(needed)), k, n)
    pages.a.fill_(math.nan)
    pages.b.fill_(math.nan)
    free = list(range(len(pages.a)))
    content = []
    for slot, rank in enumerate(ranks):
        a, b = randn(rank, k, seed=slot, dtype=ops.dtype), randn(n, rank, seed=9, dtype=ops.dtype)
        scale = 0.25 * (slot + 1)
        for ordinal in range(needed[slot]):
            page = free.pop(len(free) // 2)
            part = slice(16 * ordinal, 16 * ordinal + 16)
            pages.a[page], pages.b[page] = 0.0, 0.0
            pages.a[page, : len(a[part])] = a[part].float()
            pages.b[page, : len(a[part])] = b[:, part].t().float()
            pages.page_of[slot, ordinal] = page
        pages.scale[slot] = scale
        content.append((a, b, scale))
    return pages, content


def lora_delta(x: Tensor, content: tuple[Tensor, Tensor, float], dtype: torch.dtype) -> Tensor:
    a, b, scale = content
    s = (scale * (x.double() @ a.double().t())).to(dtype).double()
    return s @ b.double().t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(100, 257), (257, 100), (64, 5), (688, 33)])
def test_a_linear_with_bias_and_adapters_of_mixed_rank(dtype: torch.dtype, k: int, n: int) -> None:
    ops = ReferenceOps(dtype)
    x = randn(48, k, dtype=dtype)
    weight, bias = randn(n, k, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    pages, content = adapters(ops, [1, 16, 17, 0, 40], k, n)
    slots = torch.arange(48, dtype=torch.int32) % 6 - 1
    linear = Linear(ops.pack(weight), bias, (LinearPart(0, n, pages),))
    y = ops.linear(x, linear, ops.plan_rows(slots))
    expected = x.double() @ weight.double().t() + bias.double()
    for slot, lora in enumerate(content):
        expected[slots == slot] += lora_delta(x[slots == slot], lora, dtype)
    assert y.dtype == dtype
    assert close(y, expected, dtype)


def test_the_parts_of_a_fused_linear_have_their_own_adapters() -> None:
    ops = ReferenceOps(FP32)
    x, weight = randn(16, 33), randn(50, 33, seed=1)
    (q_pages, q), (v_pages, v) = adapters(ops, [3, 20], 33, 20), adapters(ops, [17, 0], 33, 12)
    parts = (LinearPart(0, 20, q_pages), LinearPart(20, 18), LinearPart(38, 12, v_pages))
    slots = torch.arange(16, dtype=torch.int32) % 3 - 1
    y = ops.linear(x, Linear(ops.pack(weight), None, parts), ops.plan_rows(slots))
    expected = x.double() @ weight.double().t()
    for slot in (0, 1):
        rows = slots == slot
        expected[rows, :20] += lora_delta(x[rows], q[slot], FP32)
        expected[rows, 38:] += lora_delta(x[rows], v[slot], FP32)
    assert close(y, expected)


def test_logits_are_float32_whatever_the_model_is() -> None:
    ops = ReferenceOps(BF16)
    x, weight = randn(16, 64, dtype=BF16), randn(9, 64, seed=1, dtype=BF16)
    linear = Linear(ops.pack(weight), None, (LinearPart(0, 9),))
    y = ops.linear(x, linear, ops.plan_rows(base_slots(16)), FP32)
    assert y.dtype == FP32
    assert close(y, x.double() @ weight.double().t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_with_adapters(dtype: torch.dtype) -> None:
    ops = ReferenceOps(dtype)
    weight, ids = randn(50, 33, dtype=dtype), torch.arange(16) * 3
    pages, content = adapters(ops, [1, 17], 50, 33)
    slots = torch.arange(16, dtype=torch.int32) % 3 - 1
    y = ops.embed(ids, Embedding(weight, pages), ops.plan_rows(slots))
    one_hot = torch.nn.functional.one_hot(ids, 50).double()
    expected = one_hot @ weight.double()
    for slot, lora in enumerate(content):
        expected[slots == slot] += lora_delta(one_hot[slots == slot], lora, dtype)
    assert close(y, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_rows_keep_their_bits_beside_adapters(dtype: torch.dtype) -> None:
    ops = ReferenceOps(dtype)
    mixed, none = torch.arange(32, dtype=torch.int32) % 3 - 1, base_slots(32)
    base = mixed == -1
    x, weight = randn(32, 100, dtype=dtype), randn(60, 100, seed=1, dtype=dtype)
    pages, _ = adapters(ops, [16, 3], 100, 60)
    with_pages = Linear(ops.pack(weight), None, (LinearPart(0, 60, pages),))
    without = replace(with_pages, parts=(LinearPart(0, 60),))
    beside = ops.linear(x, with_pages, ops.plan_rows(mixed))
    alone = ops.linear(x, without, ops.plan_rows(none))
    assert bits_equal(beside[base], alone[base])
    assert not bits_equal(beside[~base], alone[~base])


def test_a_negative_zero_of_a_base_row_stays_negative() -> None:
    ops = ReferenceOps(FP32)
    pages, _ = adapters(ops, [16], 8, 5)
    slots = base_slots(16)
    slots[1::2] = 0
    table = Embedding(torch.full((8, 5), -0.0), pages)
    y = ops.embed(torch.zeros(16, dtype=torch.int64), table, ops.plan_rows(slots))
    assert bits_equal(y[::2], torch.full((8, 5), -0.0))


# ------------------------------------------------------------------ row-wise


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm(dtype: torch.dtype, width: int) -> None:
    ops = ReferenceOps(dtype)
    x, residual = randn(16, width, dtype=dtype), randn(16, width, seed=1, dtype=dtype)
    weight = randn(width, seed=2, dtype=dtype)
    y, r = ops.add_norm(x, residual, weight, 1e-5)
    assert y.dtype == r.dtype == dtype
    assert bits_equal(r, (x.float() + residual.float()).to(dtype))
    assert close(y, rms_norm(r, weight, 1e-5), dtype)
    y, r = ops.add_norm(x, None, weight, 1e-5)
    assert bits_equal(r, x)
    assert close(y, rms_norm(x, weight, 1e-5), dtype)


def test_the_epsilon_counts() -> None:
    y, _ = ReferenceOps(FP32).add_norm(torch.full((1, 4), 1e-3), None, torch.ones(4), 1e-6)
    assert close(y, torch.full((1, 4), math.sqrt(0.5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    x = 4 * randn(16, 2 * width, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    y = ReferenceOps(dtype).silu_mul(x)
    assert y.dtype == dtype
    assert close(y, gate * torch.sigmoid(gate) * up, dtype)


def test_silu_of_large_values_stays_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, -0.0, 1.0, 1.0, 1.0]])
    assert ReferenceOps(FP32).silu_mul(x).tolist() == [[0.0, 200.0, 0.0]]


@pytest.mark.parametrize("vocabulary", WIDTHS)
def test_logprobs_are_a_log_softmax(vocabulary: int) -> None:
    logits = 10 * randn(16, vocabulary)
    assert close(ReferenceOps(FP32).logprobs(logits), logits.double().log_softmax(-1))
    large = logits + 3e4
    assert close(ReferenceOps(FP32).logprobs(large), large.double().log_softmax(-1))


def argmax(logits: Tensor) -> list[int]:
    """What greedy rows take."""
    taken: list[int] = ReferenceOps(FP32).sample(logits, [None] * len(logits)).tolist()
    return taken


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf] * 3, [0.0, -0.0, -1.0]])
    assert argmax(logits) == [1, 0, 0, 0]
    wide = torch.zeros(2, 1000)
    wide[0, [317, 901]] = wide[1, [0, 999]] = 5.0
    assert argmax(wide) == [317, 0]
    assert 0 <= argmax(torch.full((1, 7), math.nan))[0] < 7, "an id, whatever it says"


# ------------------------------------------------------------------ rope


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_of_chosen_rows_is_that_of_all_rows_chosen(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((9, 40), (9, 40), (40,)))
    index = torch.tensor([7, 0, 7, 3])
    ops = ReferenceOps(dtype)
    for beside in (residual, None):
        y, r = ops.add_norm(x, beside, weight, 1e-5)
        chosen_y, chosen_r = ops.add_norm(x, beside, weight, 1e-5, index)
        assert torch.equal(chosen_y, y[index]) and torch.equal(chosen_r, r[index])


def make_batch(parts: Sequence[tuple[int, int]], multiple: int = 16) -> TokenBatch:
    """Sequences of (start, count) over block tables that are scattered and do not overlap."""
    longest = max(start + count for start, count in parts)
    num_blocks = -(-longest // BLOCK)
    order = torch.randperm(len(parts) * num_blocks, generator=torch.Generator().manual_seed(5))
    tables = order.view(len(parts), num_blocks).int()
    positions = torch.cat([torch.arange(start, start + count) for start, count in parts])
    owner = torch.cat([torch.full((count,), row) for row, (_, count) in enumerate(parts)])
    padding = -len(positions) % multiple
    return TokenBatch(
        num_tokens=len(positions),
        token_ids=torch.zeros(len(positions) + padding, dtype=torch.int64),
        positions=torch.nn.functional.pad(positions, (0, padding)),
        slots=base_slots(len(positions) + padding),
        kv_block=tables[owner, positions // BLOCK].long(),
        kv_offset=positions % BLOCK,
        seq_row=torch.arange(len(parts)),
        seq_offset=torch.tensor([0, *(count for _, count in parts)]).cumsum(0),
        seq_start=torch.tensor([start for start, _ in parts]),
        block_tables=tables,
        max_query=max(count for _, count in parts),
        max_context=longest,
    )


def make_cache(
    batch: TokenBatch, shape: AttentionShape, dtype: torch.dtype, fill: float
) -> KVCache:
    size = (batch.block_tables.numel(), shape.num_kv_heads, BLOCK, shape.head_dim)
    return KVCache(torch.full(size, fill, dtype=dtype), torch.full(size, fill, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 80), (2, 2, 64)])
def test_rope_rotates_halves_and_writes_the_cache(
    dtype: torch.dtype, with_norm: bool, heads: int, kv_heads: int, dim: int
) -> None:
    ops, shape = ReferenceOps(dtype), AttentionShape(heads, kv_heads, dim)
    batch = make_batch([(60, 9), (0, 4)])
    cache = make_cache(batch, shape, dtype, 7.0)
    rows = len(batch.positions)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norm = QKNorm(randn(dim, seed=1, dtype=dtype), randn(dim, seed=2, dtype=dtype), 1e-6)
    angles = batch.positions[:, None].double() / 100 ** (torch.arange(dim // 2) / (dim // 2))
    cos_sin = (angles.cos().float(), angles.sin().float())
    q = ops.rope_write(qkv, shape, cos_sin, norm if with_norm else None, cache, batch)

    by_head = qkv.view(rows, -1, dim).double()
    want_q, want_k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
    want_v = by_head[:, heads + kv_heads :]
    if with_norm:
        want_q = rms_norm(want_q, norm.q, norm.eps).to(dtype).double()
        want_k = rms_norm(want_k, norm.k, norm.eps).to(dtype).double()
    rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
    want_q, want_k = (
        torch.cat((z.real, z.imag), dim=-1)
        for z in (torch.complex(*w.chunk(2, dim=-1)) * rotation for w in (want_q, want_k))
    )
    n = batch.num_tokens
    assert close(q, want_q, dtype)
    assert close(cache.k[batch.kv_block, :, batch.kv_offset], want_k[:n], dtype)
    assert bits_equal(cache.v[batch.kv_block, :, batch.kv_offset], want_v[:n].to(dtype))
    untouched = torch.ones(cache.k.shape[0], BLOCK, dtype=torch.bool)
    untouched[batch.kv_block, batch.kv_offset] = False
    for written in (cache.k, cache.v):
        assert bool((written.transpose(1, 2)[untouched] == 7.0).all()), "padding is written nowhere"


# ------------------------------------------------------------------ attention

MIXES = {
    "decode": [(0, 1), (62, 1), (63, 1), (64, 1), (255, 1), (256, 1), (300, 1)],
    "verify": [(254, 4), (10, 8), (0, 3)],
    "prefill": [(0, 37), (0, 300)],
    "chunk": [(37, 200), (256, 64), (63, 2)],
    "mixed": [(300, 1), (0, 70), (250, 8), (64, 33), (5, 1)],
}


def run_attention(
    ops: ReferenceOps, shape: AttentionShape, batch: TokenBatch, cache: KVCache, q: Tensor
) -> Tensor:
    plan = ops.plan_attention(batch, [shape])
    return ops.attention(q, shape, cache, plan)[: batch.num_tokens]


def softmax_attention(
    shape: AttentionShape, batch: TokenBatch, cache: KVCache, q: Tensor
) -> Tensor:
    """Row by row, in float64, over the keys of its own sequence."""
    group = shape.num_heads // shape.num_kv_heads
    out = torch.empty(batch.num_tokens, shape.num_heads, shape.head_dim, dtype=torch.float64)
    offsets = batch.seq_offset.tolist()
    for sequence, (first, end) in enumerate(pairwise(offsets)):
        table = batch.block_tables[sequence].long()
        k, v = (
            t[table].transpose(1, 2).flatten(0, 1).double().repeat_interleave(group, dim=1)
            for t in (cache.k, cache.v)
        )
        for row in range(first, end):
            at = int(batch.positions[row])
            seen = slice(max(0, at - (shape.window or at + 1) + 1), at + 1)
            scores = torch.einsum("hd,thd->ht", q[row].double(), k[seen]) / shape.head_dim**0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[seen])
    return out.flatten(1)


def filled(batch: TokenBatch, shape: AttentionShape, dtype: torch.dtype) -> KVCache:
    cache = make_cache(batch, shape, dtype, 0.0)
    cache.k.copy_(randn(*cache.k.shape, seed=3))
    cache.v.copy_(randn(*cache.v.shape, seed=4))
    return cache


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(2, 2, 32, None), (4, 2, 64, 70), (8, 2, 80, None), (7, 1, 128, None), (8, 1, 32, 5)],
)
def test_attention_is_a_softmax_over_the_keys_before(
    mix: str, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    shape = AttentionShape(heads, kv_heads, dim, window)
    batch = make_batch(MIXES[mix])
    cache = filled(batch, shape, FP32)
    q = randn(len(batch.positions), heads, dim, seed=6)
    out = run_attention(ReferenceOps(FP32), shape, batch, cache, q)
    assert close(out, softmax_attention(shape, batch, cache, q))


def test_attention_in_bfloat16_rounds_once() -> None:
    shape, batch = AttentionShape(4, 2, 64), make_batch(MIXES["mixed"])
    cache = filled(batch, shape, BF16)
    q = randn(len(batch.positions), 4, 64, seed=6, dtype=BF16)
    out = run_attention(ReferenceOps(BF16), shape, batch, cache, q)
    assert out.dtype == BF16
    assert close(out, softmax_attention(shape, batch, cache, q), BF16)


SMALL = AttentionShape(4, 2, 32)


def written(ops: ReferenceOps, batch: TokenBatch, cache: KVCache, qkv: Tensor) -> Tensor:
    """Write keys and values as a step does, unrotated; attention of the step's rows."""
    no_turn = (torch.ones(len(qkv), 16), torch.zeros(len(qkv), 16))
    q = ops.rope_write(qkv, SMALL, no_turn, None, cache, batch)
    return run_attention(ops, SMALL, batch, cache, q)


def make_qkv(batch: TokenBatch) -> Tensor:
    return randn(len(batch.positions), (4 + 2 * 2) * 32, seed=8)


def values_of(qkv: Tensor, row: int) -> Tensor:
    return qkv[row, (4 + 2) * 32 :]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_an_earlier_request_left_in_a_block_reaches_nobody(value: float) -> None:
    """Blocks are reused for shorter sequences: past their ends lies what was there before."""
    ops, results = ReferenceOps(FP32), []
    for before in (0.5, value):
        first = make_batch([(0, 320), (0, 320), (0, 320)])
        cache = make_cache(first, SMALL, FP32, 0.0)
        written(ops, first, cache, torch.full_like(make_qkv(first), before))
        batch = replace(make_batch([(0, 70), (0, 1), (0, 300)]), block_tables=first.block_tables)
        owner = torch.repeat_interleave(torch.arange(3), batch.seq_offset.diff())
        place = batch.positions[: batch.num_tokens] // BLOCK
        batch = replace(batch, kv_block=first.block_tables[owner, place].long())
        results.append(written(ops, batch, cache, make_qkv(batch)))
    assert bool(results[1].isfinite().all())
    assert bits_equal(*results)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_request_that_is_not_finite_leaves_the_others_their_bits(value: float) -> None:
    ops, batch, results = ReferenceOps(FP32), make_batch([(0, 70), (0, 5), (0, 300)]), []
    for of_row in (0.5, value):
        qkv = make_qkv(batch)
        values_of(qkv, 72)[3] = of_row  # the third token of the second sequence
        results.append(written(ops, batch, make_cache(batch, SMALL, FP32, 0.0), qkv))
    other = (torch.arange(batch.num_tokens) < 70) | (torch.arange(batch.num_tokens) >= 75)
    assert bits_equal(results[0][other], results[1][other])
    assert not bool(results[1][72:75].isfinite().all(-1).any())


@pytest.mark.parametrize("rows", [2, 4, 5, 8])
def test_a_draft_that_is_not_finite_leaves_the_rows_before_it_their_bits(rows: int) -> None:
    ops, batch, results = ReferenceOps(FP32), make_batch([(0, rows)]), []
    for of_row in (0.5, math.nan):
        qkv = make_qkv(batch)
        values_of(qkv, rows - 1)[3] = of_row
        results.append(written(ops, batch, make_cache(batch, SMALL, FP32, 0.0), qkv))
    assert bits_equal(results[0][:-1], results[1][:-1])
    assert not bool(results[1][-1].isfinite().all())


# ------------------------------------------------------------------ noise and sampling


def philox_of_ints(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], words: str) -> None:
    expected = [int(word, 16) for word in words.split()]
    assert philox_of_ints(counter, key) == expected
    lanes = torch.tensor([counter[0], 1, counter[0]])
    given = philox((lanes, counter[1], counter[2], counter[3]), (key[0], key[1]))
    assert [int(word[0]) for word in given] == [int(word[2]) for word in given] == expected


def test_philox_equals_itself_on_plain_integers() -> None:
    lanes = [0, 1, 2**31, 2**32 - 1, 123456789]
    given = torch.stack(philox((torch.tensor(lanes), 77, 3, 0), (2**32 - 5, 9)), dim=-1)
    assert given.tolist() == [philox_of_ints([c, 77, 3, 0], [2**32 - 5, 9]) for c in lanes]


def test_noise_is_the_exponential_of_its_own_counter() -> None:
    noise = exponential(10, seed=(7 << 32) + 5, sample_index=2, position=40)
    for token in range(10):
        word = philox_of_ints([token // 4, 40, 2, 0], [5, 7])[token % 4]
        expected = -math.log1p(-(word + 0.5) / 2**32)
        assert float(noise[token]) == pytest.approx(expected, rel=1e-6)
    assert bits_equal(noise, exponential(700, (7 << 32) + 5, 2, 40)[:10])
    changed = [((7 << 32) + 6, 2, 40), (5, 2, 40), ((7 << 32) + 5, 3, 40), ((7 << 32) + 5, 2, 41)]
    for other in changed:
        assert not bool((noise == exponential(10, *other)).any())


def sampling_row(**fields: Any) -> SamplingRow:
    empty = torch.empty(0, dtype=torch.int64)
    values: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "prompt": empty, "output": empty, "bias": (), "allowed": None, "banned": (),
        "seed": 0, "sample_index": 0, "position": 0,
    }  # fmt: skip
    return SamplingRow(**values | fields)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("varied", ["seed", "position", "sample_index"])
def test_draws_follow_the_softmax(temperature: float, varied: str) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 1.5, -0.5])
    rows = [sampling_row(temperature=temperature, **{varied: i}) for i in range(2000)]
    drawn = ReferenceOps(FP32).sample(logits.expand(len(rows), -1), rows)
    counts = torch.bincount(drawn, minlength=6).double()
    assert chi_square(counts, (logits.double() / temperature).softmax(-1)) < 25.7  # p = 1e-4
    assert chi_square(counts, (logits.double() / (temperature * 1.6)).softmax(-1)) > 25.7


def test_a_draw_depends_on_its_row_alone() -> None:
    ops, logits = ReferenceOps(FP32), randn(40, 100)
    rows: list[SamplingRow | None] = [
        sampling_row(temperature=0.9, seed=i % 5, position=i, top_k=30) if i % 4 else None
        for i in range(40)
    ]
    before = logits.clone()
    drawn = ops.sample(logits, rows)
    assert bits_equal(logits, before)
    for index in (0, 1, 17, 39):
        assert ops.sample(logits[index : index + 1], [rows[index]]) == drawn[index]
    assert drawn[::4].tolist() == logits[::4].argmax(-1).tolist(), "None takes the argmax"


def kept(logits: Tensor, row: SamplingRow) -> list[int]:
    z = logits.clone()
    perturb_row(z, row)
    return torch.nonzero(z > -math.inf).flatten().tolist()


def kept_by_search(logits: Tensor, row: SamplingRow) -> list[int]:
    """min-p and top-k by their definitions, then top-p over what is left, likeliest first."""
    probabilities = (logits.double() / row.temperature).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    best = [t for t in order if probabilities[t] >= row.min_p * probabilities[order[0]]]
    best = best[: row.top_k] if row.top_k else best
    total, taken = sum(probabilities[t] for t in best), 0.0
    for count, token in enumerate(best, start=1):
        taken += probabilities[token]
        if taken >= row.top_p * total:
            return sorted(best[:count])
    return sorted(best)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.5},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 2.0},
    ],
)
def test_the_kept_tokens_are_those_of_the_definition(fields: dict[str, Any]) -> None:
    for seed in range(20):
        logits, row = 3 * randn(257, seed=seed), sampling_row(**fields)
        assert kept(logits, row) == kept_by_search(logits, row)


def test_tokens_that_tie_at_the_threshold_stay_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(logits, sampling_row(top_k=2)) == [0, 1, 2, 3]
    assert kept(logits, sampling_row(top_p=0.5)) == [0, 1, 2, 3]


def adjusted_by_search(logits: Tensor, row: SamplingRow) -> list[float]:
    values = []
    output, history = row.output.tolist(), {*row.prompt.tolist(), *row.output.tolist()}
    for token, value in enumerate(logits.tolist()):
        if token in history:
            factor = row.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= row.frequency_penalty * output.count(token)
        value -= row.presence_penalty * (token in output)
        value += dict(row.bias).get(token, 0.0)
        masked = token in row.banned or (row.allowed is not None and token not in row.allowed)
        values.append(-math.inf if masked else value)
    return values


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.4},
        {"bias": ((3, 2.5), (9, -100.0))},
        {"allowed": (1, 2, 50)},
        {"banned": (1, 7)},
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "bias": ((2, 1.0),),
            "allowed": tuple(range(60)),
            "banned": (2,),
        },
    ],
)
def test_adjusted_logits_are_those_of_the_definition(fields: dict[str, Any]) -> None:
    history = {"prompt": torch.tensor([1, 2, 2, 80]), "output": torch.tensor([3, 3, 2, 3])}
    row, logits = sampling_row(**history, **fields), randn(2, 100)
    before = logits.clone()
    out = ReferenceOps(FP32).adjust(logits, [None, row])
    assert bits_equal(logits, before) and bits_equal(out[0], logits[0])
    assert out[1].tolist() == pytest.approx(adjusted_by_search(logits[1], row), abs=1e-5)


def test_logits_that_nobody_adjusts_are_given_back_as_they_are() -> None:
    logits = randn(2, 10)
    assert ReferenceOps(FP32).adjust(logits, [None, sampling_row()]) is logits


# ------------------------------------------------------------------ rows alone and in company


def proved(dtype: torch.dtype, width: int) -> ReferenceOps:
    """Ops with the tiles that this machine's proof gives for linears of this width."""
    linears = frozenset({(width, (60,))})
    shapes = Shapes(linears, True, (60, width), frozenset(), frozenset(), frozenset(), False)
    return ReferenceOps(dtype, choose_tiles(shapes, dtype, ReferenceOps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(dtype: torch.dtype, width: int) -> None:
    """Row `at` of 400 against the same row as the only one that a call is about."""
    ops = proved(dtype, width)
    x, wide = randn(400, width, dtype=dtype), randn(400, 2 * width, seed=1, dtype=dtype)
    weight = randn(width, seed=2, dtype=dtype)
    linear_weight = ops.pack(randn(60, width, seed=3, dtype=dtype))
    pages, _ = adapters(ops, [16, 5], width, 60)
    linear = Linear(linear_weight, None, (LinearPart(0, 60, pages),))
    slots = torch.arange(400, dtype=torch.int32) % 3 - 1

    def padded(rows: Tensor) -> Tensor:
        return torch.cat((rows, rows.new_zeros(-len(rows) % ops.row_multiple, *rows.shape[1:])))

    def run_linear(rows: Tensor, of: Tensor) -> Tensor:
        count = len(padded(rows))
        plan = ops.plan_rows(torch.cat((of, base_slots(count - len(of)))))
        return ops.linear(padded(rows), linear, plan, FP32)[: len(rows)]

    def norm(rows: Tensor) -> Tensor:
        return torch.cat(ops.add_norm(rows, rows.flip(1), weight, 1e-5), dim=1)

    whole = {
        "linear": run_linear(x, slots),
        "norm": norm(x),
        "silu": ops.silu_mul(wide),
        "logprobs": ops.logprobs(x.float()),
    }
    for at in (0, 1, 17, 211, 398, 399):
        one = slice(at, at + 1)
        assert bits_equal(run_linear(x[one], slots[one]), whole["linear"][one])
        assert bits_equal(norm(x[one]), whole["norm"][one])
        assert bits_equal(ops.silu_mul(wide[one]), whole["silu"][one])
        assert bits_equal(ops.logprobs(x[one].float()), whole["logprobs"][one])
    for start, end in ((0, 7), (3, 40), (100, 333)):
        some = slice(start, end)
        assert bits_equal(run_linear(x[some], slots[some]), whole["linear"][some])
        assert bits_equal(norm(x[some]), whole["norm"][some])
        assert bits_equal(ops.silu_mul(wide[some]), whole["silu"][some])
        assert bits_equal(ops.logprobs(x[some].float()), whole["logprobs"][some])
