"""The C kernels say what the reference says, and no row of theirs follows its neighbours."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from truegraft.errors import ConfigError
from truegraft.ops.cpu import CpuOps, compile, cpu_ops, supports
from truegraft.ops.interface import (
    AttentionShape,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    QKNorm,
    TokenBatch,
)
from truegraft.ops.reference import ReferenceOps

BLOCK = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How far two right answers may be apart, relative to the largest value: rounding of the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = compile.load_library()
    assert found is not None, "the tests need a C compiler"
    return found


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def pair(request: pytest.FixtureRequest, library: ctypes.CDLL) -> tuple[CpuOps, ReferenceOps]:
    return CpuOps(library, request.param), ReferenceOps(request.param)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, reference: Tensor) -> bool:
    assert ours.dtype == reference.dtype and ours.shape == reference.shape
    scale = float(reference.float().abs().max())
    error = float((ours.float() - reference.float()).abs().max())
    return error <= TOLERANCE[ours.dtype] * scale


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def pages(ops: ReferenceOps, k: int, n: int) -> LoraPages:
    """Slot 0: rank 5. Slot 1: rank 40 on three pages. Slot 2: nothing."""
    made = ops.new_pages((4, 3, 3), k, n)
    made.a.copy_(randn(*made.a.shape, seed=1) / k**0.5)
    made.b.copy_(randn(*made.b.shape, seed=2))
    made.a[0, 5:] = made.b[0, 5:] = 0.0
    made.a[3, 8:] = made.b[3, 8:] = 0.0
    made.page_of.copy_(torch.tensor([[0, -1, -1], [1, 2, 3], [-1, -1, -1]]))
    made.rank.copy_(torch.tensor([5, 40, 0]))
    made.scale.copy_(torch.tensor([2.0, 0.25, 0.0]))
    return made


@pytest.mark.parametrize(("k", "sizes"), [(64, (48, 16, 16)), (100, (257,)), (688, (100, 100))])
def test_linear_with_adapters(
    pair: tuple[CpuOps, ReferenceOps], k: int, sizes: tuple[int, ...]
) -> None:
    slots = torch.tensor([-1, 0, 1, 2, 1, -1, 0, 1, 1, -1], dtype=torch.int32)
    outs = []
    for ops in pair:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            LinearPart(start, n, pages(ops, k, n)) for start, n in zip(starts, sizes, strict=True)
        ]
        linear = Linear(ops.pack(randn(sum(sizes), k) / k**0.5), randn(sum(sizes)), (*parts,))
        outs.append(ops.linear(randn(10, k, seed=3).to(ops.dtype), linear, ops.plan_rows(slots)))
    assert close(*outs)
    base = torch.full_like(slots, -1)
    plain = pair[0].linear(randn(10, k, seed=3).to(pair[0].dtype), linear, pair[0].plan_rows(base))
    without = (slots < 0) | (slots == 2)
    assert torch.equal(bits(outs[0][without]), bits(plain[without])), "base rows keep their bits"
    assert not torch.equal(outs[0][~without], plain[~without])


@pytest.mark.parametrize("width", [16, 100, 257, 688])
def test_row_wise_ops(pair: tuple[CpuOps, ReferenceOps], width: int) -> None:
    kernels, reference = pair
    x, residual = (randn(37, width, seed=s).to(kernels.dtype) for s in (1, 2))
    weight = randn(width, seed=3).to(kernels.dtype)
    for ours, theirs in zip(
        kernels.add_norm(x, residual, weight, 1e-5),
        reference.add_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert close(ours, theirs)
    assert close(
        kernels.add_norm(x, None, weight, 1e-5)[0], reference.add_norm(x, None, weight, 1e-5)[0]
    )
    both = torch.cat((10 * x, residual), dim=1)
    assert close(kernels.silu_mul(both), reference.silu_mul(both))
    alone = kernels.silu_mul(both[11:13])
    assert torch.equal(bits(alone), bits(kernels.silu_mul(both)[11:13]))
    normed = kernels.add_norm(x, residual, weight, 1e-5)[0]
    alone = kernels.add_norm(x[36:], residual[36:], weight, 1e-5)[0]
    assert torch.equal(bits(alone), bits(normed[36:]))
    index = torch.tensor([36, 0, 36])
    chosen = kernels.add_norm(x, residual, weight, 1e-5, index)[0]
    assert torch.equal(bits(chosen), bits(normed[index]))


def batch(parts: Sequence[tuple[int, int, int]], tables: Tensor, padding: int = 0) -> TokenBatch:
    positions = torch.cat([torch.arange(start, start + n) for _, start, n in parts])
    owner = torch.cat([torch.full((n,), row) for row, _, n in parts])
    padded = torch.nn.functional.pad(positions, (0, padding))
    return TokenBatch(
        num_tokens=len(positions),
        token_ids=torch.zeros_like(padded),
        positions=padded,
        slots=torch.full_like(padded, -1).int(),
        kv_block=tables[owner, positions // BLOCK].long(),
        kv_offset=positions % BLOCK,
        seq_row=torch.tensor([row for row, *_ in parts]),
        seq_offset=torch.tensor([0, *(n for *_, n in parts)]).cumsum(0),
        seq_start=torch.tensor([start for _, start, _ in parts]),
        block_tables=tables.int(),
        max_query=max(n for *_, n in parts),
        max_context=max(start + n for _, start, n in parts),
    )


SHAPES = [
    AttentionShape(4, 2, 64),
    AttentionShape(4, 4, 32),
    AttentionShape(8, 1, 80),
    AttentionShape(14, 2, 16),
    AttentionShape(2, 2, 128),
    AttentionShape(2, 1, 256),
    AttentionShape(4, 2, 64, window=70),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(pair: tuple[CpuOps, ReferenceOps], shape: AttentionShape) -> None:
    """Against the reference, and row by row against itself, past NaN in what blocks held before."""
    kernels, reference = pair
    length = 330
    size = (12, shape.num_kv_heads, BLOCK, shape.head_dim)
    k, v = (randn(*size, seed=s).to(kernels.dtype) for s in (1, 2))
    tables = torch.tensor([[5, 0, 7, 2, 9, 1], [3, 4, 6, 8, 10, 11]])
    v[1, :, length % BLOCK :] = torch.nan
    cache = KVCache(k, v)
    q = randn(length + 2, shape.num_heads, shape.head_dim, seed=3).to(kernels.dtype)

    def run(ops: ReferenceOps, part: tuple[int, int, int], rows: Tensor, pad: int) -> Tensor:
        plan = ops.plan_attention(batch([part], tables, pad), [shape])
        return ops.attention(rows, shape, cache, plan)

    whole = run(kernels, (0, 0, length), q, 2)
    assert close(whole[:length], run(reference, (0, 0, length), q, 2)[:length])
    for at in (0, 63, 64, 255, 256, length - 1):
        alone = run(kernels, (0, at, 1), q[at : at + 1], 0)
        assert torch.equal(bits(alone[0]), bits(whole[at]))


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write(pair: tuple[CpuOps, ReferenceOps], with_norm: bool) -> None:
    shape = AttentionShape(4, 2, 32)
    cos, sin = randn(9, 16, seed=1), randn(9, 16, seed=2)
    results = []
    for ops in pair:
        qkv = randn(9, (4 + 2 * 2) * 32, seed=3).to(ops.dtype)
        norm = QKNorm(randn(32, seed=4).to(ops.dtype), randn(32, seed=5).to(ops.dtype), 1e-6)
        cache = KVCache(*(torch.zeros(3, 2, BLOCK, 32, dtype=ops.dtype) for _ in range(2)))
        where = batch([(0, 60, 8)], torch.tensor([[2, 1]]), padding=1)
        q = ops.rope_write(qkv, shape, (cos, sin), norm if with_norm else None, cache, where)
        results.append((q, cache))
    (q, ours), (expected, theirs) = results
    assert close(q[:8], expected[:8]) and close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    assert int((ours.v != 0).any(-1).sum()) == 8 * 2, "padding is written nowhere"


def test_exponentials_at_the_ends(library: ctypes.CDLL) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, torch.inf, torch.nan]])
    y = CpuOps(library, torch.float32).silu_mul(torch.cat((gate, torch.ones(1, 8)), dim=1))
    expected = torch.nn.functional.silu(gate)
    assert torch.allclose(y, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_plain_pytorch_serves_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = [AttentionShape(4, 2, 64)]
    assert cpu_ops(torch.float32, shapes) is not ReferenceOps
    monkeypatch.setenv("TRUEGRAFT_CPU_OPS", "reference")
    assert cpu_ops(torch.float32, shapes) is ReferenceOps
    monkeypatch.setenv("TRUEGRAFT_CPU_OPS", "fast")
    with pytest.raises(ConfigError, match="TRUEGRAFT_CPU_OPS='fast'"):
        cpu_ops(torch.float32, shapes)
    monkeypatch.setenv("TRUEGRAFT_CPU_OPS", "kernels")
    monkeypatch.setenv("TRUEGRAFT_CACHE", str(tmp_path))
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="no-such-flag"):
        patch.setattr(compile, "FLAGS", ("--no-such-flag",))
        assert cpu_ops(torch.float32, shapes) is ReferenceOps
    assert cpu_ops(torch.float32, shapes) is not ReferenceOps
    (library,) = tmp_path.glob("*.so")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / library.name).write_bytes(b"not a library")
    monkeypatch.setenv("TRUEGRAFT_CACHE", str(broken))
    with pytest.warns(UserWarning, match="exact but slower"):
        assert cpu_ops(torch.float32, shapes) is ReferenceOps
    monkeypatch.setenv("TRUEGRAFT_CACHE", str(library))  # a file is no folder
    with pytest.warns(UserWarning, match="exact but slower"):
        assert cpu_ops(torch.float32, shapes) is ReferenceOps
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="no C compiler"):
        assert cpu_ops(torch.float32, shapes) is ReferenceOps


def test_shapes_that_the_kernels_cannot_hold_are_left_to_the_reference(
    library: ctypes.CDLL,
) -> None:
    assert supports(library, torch.bfloat16, [AttentionShape(64, 1, 256)])
    assert not supports(library, torch.bfloat16, [AttentionShape(65, 1, 64)])
    assert not supports(library, torch.bfloat16, [AttentionShape(4, 2, 257)])
    assert not supports(library, torch.float64, [AttentionShape(4, 2, 64)])
