"""The proof at load: it passes here, and an op whose rows follow their neighbours is caught."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from truegraft.errors import ExactnessError
from truegraft.ops.interface import (
    AttentionPlan,
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    QKNorm,
    RowPlan,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.prove import Shapes, choose_tiles
from truegraft.ops.reference import ReferenceOps, Tiles

FP32, BF16 = torch.float32, torch.bfloat16
ONE_ULP = 1 + 2**-23

TINY = Shapes(
    linears=frozenset({(40, (16, 8)), (36, (40,))}),
    adapters=True,
    embedding=(30, 40),
    widths=frozenset({40}),
    inner=frozenset({36}),
    attention=frozenset({AttentionShape(4, 2, 16)}),
    qk_norm=True,
)


def prove(kind: type[ReferenceOps], shapes: Shapes = TINY, dtype: torch.dtype = FP32) -> Tiles:
    return choose_tiles(shapes, dtype, kind)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "shapes",
    [
        TINY,
        replace(TINY, adapters=False, qk_norm=False),
        replace(TINY, attention=frozenset({AttentionShape(7, 1, 32, window=50)})),
        replace(TINY, widths=frozenset({100, 257}), inner=frozenset({100, 257, 688})),
    ],
)
def test_the_proof_passes_on_this_machine(shapes: Shapes, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # row by row would be right, but something is wrong then
        tiles = prove(ReferenceOps, shapes, dtype)
    assert tiles.linear != (1,)


class LargeCallsDiffer(ReferenceOps):
    """Splits K when a matmul has more than 16 rows, as a library may."""

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        if max(self.tiles.linear) <= 16:
            return super()._matmul(x, weight)
        half = x.shape[1] // 2
        first = super()._matmul(x[:, :half].contiguous(), weight[:half])
        second = super()._matmul(x[:, half:].contiguous(), weight[half:])
        whole = super()._matmul(x, weight)
        return whole if x.shape[0] <= 16 else first + second


class SplitByRows(ReferenceOps):
    """Splits K by the number of rows of the call, whatever the tiles are."""

    def linear(
        self, x: Tensor, linear: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        y = super().linear(x, linear, rows, torch.float32)
        return (y * ONE_ULP if x.shape[0] > 100 else y).to(out or self.dtype)


class TiledLinearDiffers(ReferenceOps):
    """Exact row by row only: within a larger tile, a row's place counts."""

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        y = super()._matmul(x, weight)
        if self.tiles.linear != (1,):
            y[1::2] *= ONE_ULP
        return y


class AdaptersFollowPlace(ReferenceOps):
    """The first row of a call that has an adapter is rounded in another way."""

    def linear(
        self, x: Tensor, linear: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        y = super().linear(x, linear, rows, out)
        plain = replace(linear, parts=tuple(replace(p, pages=None) for p in linear.parts))
        adapted = (y != super().linear(x, plain, rows, out)).any(dim=1)
        y[adapted.nonzero()[:1, 0]] *= ONE_ULP
        return y


class EmbeddingFollowsCount(ReferenceOps):
    def embed(self, token_ids: Tensor, embedding: Embedding, rows: RowPlan) -> Tensor:
        y = super().embed(token_ids, embedding, rows)
        return y * ONE_ULP if len(token_ids) > 16 else y


class AttentionFollowsCount(ReferenceOps):
    """Splits the keys by how many queries there are, as a flash-decoding kernel may."""

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        y = super().attention(q, shape, cache, plan)
        return y * ONE_ULP if len(q) > 64 else y


class DecodeAttentionDiffers(ReferenceOps):
    """Another algorithm where each sequence has one row."""

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        y = super().attention(q, shape, cache, plan)
        return y * ONE_ULP if len(q) <= 16 else y


class NormOfFewRowsDiffers(ReferenceOps):
    """Another formula for small calls: the weight joins before the division."""

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        y, r = super().add_norm(x, residual, weight, eps, index)
        if len(x) > 16:
            return y, r
        r32 = r.float()
        return (r32 * weight * (r32.square().mean(-1, keepdim=True) + eps).rsqrt()).to(y.dtype), r


class SiluOfManyRowsDiffers(ReferenceOps):
    def silu_mul(self, x: Tensor) -> Tensor:
        y = super().silu_mul(x)
        return y * ONE_ULP if len(x) > 16 else y


class SiluOfALargeStepDiffers(ReferenceOps):
    """Right up to 400 rows; a step has up to 512 unless the user asks for more."""

    def silu_mul(self, x: Tensor) -> Tensor:
        y = super().silu_mul(x)
        return y * ONE_ULP if len(x) > 400 else y


class LogprobsFollowPlace(ReferenceOps):
    def logprobs(self, logits: Tensor) -> Tensor:
        y = super().logprobs(logits)
        y[-1] *= ONE_ULP
        return y


class NoiseFollowsPlace(ReferenceOps):
    """Noise keyed by the index in the batch: the classic mistake."""

    def sample(self, logits: Tensor, rows: list[SamplingRow | None]) -> Tensor:  # type: ignore[override]
        moved = [row and replace(row, seed=row.seed + i) for i, row in enumerate(rows)]
        return super().sample(logits, moved)


class AdjustFollowsCount(ReferenceOps):
    def adjust(self, logits: Tensor, rows: list[SamplingRow | None]) -> Tensor:  # type: ignore[override]
        y = super().adjust(logits, rows)
        return y.flip(-1) if len(rows) > 16 else y


class RopeFollowsCount(ReferenceOps):
    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        q = super().rope_write(qkv, shape, cos_sin, norm, cache, batch)
        if len(qkv) > 16:
            cache.v.mul_(ONE_ULP)  # the query is right; what the cache holds is not
        return q


def test_a_linear_whose_large_calls_differ_gets_the_next_tiles() -> None:
    assert prove(ReferenceOps).linear != (16,)
    assert prove(LargeCallsDiffer).linear == (16,)


def test_row_by_row_is_the_last_resort_and_warns_what_it_costs() -> None:
    with pytest.warns(UserWarning, match="linear runs one row at a time"):
        tiles = prove(TiledLinearDiffers)
    assert tiles.linear == (1,)


@pytest.mark.filterwarnings("ignore:.*one row at a time")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (SplitByRows, "linear 36→40"),
        (AdaptersFollowPlace, "linear with LoRA 36→40"),
        (EmbeddingFollowsCount, "embedding"),
        (AttentionFollowsCount, "attention AttentionShape"),
        (DecodeAttentionDiffers, "attention AttentionShape"),
        (NormOfFewRowsDiffers, "add_norm 40"),
        (SiluOfManyRowsDiffers, "silu_mul 36"),
        (SiluOfALargeStepDiffers, "silu_mul 36"),
        (LogprobsFollowPlace, "logprobs"),
        (NoiseFollowsPlace, "sample"),
        (AdjustFollowsCount, "sample"),
        (RopeFollowsCount, "rope_write AttentionShape"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_op_that_breaks_the_contract_is_refused_by_name(
    kind: type[ReferenceOps], named: str
) -> None:
    with pytest.raises(ExactnessError, match="does not start") as caught:
        prove(kind)
    assert named in str(caught.value)
    assert "OMP_NUM_THREADS" in str(caught.value), "the way out"


@pytest.mark.parametrize("width", [256, 257, 688])
def test_rounding_does_not_hide_a_difference_from_the_proof(width: int) -> None:
    """Sums that differ by an ulp of float32 round alike, nearly always: a proof that compares
    bfloat16 alone passes by luck."""
    linears = frozenset({(width, (60,)), (width, (30, 20, 10))})
    shapes = replace(TINY, linears=linears, embedding=(60, width))
    assert prove(ReferenceOps, shapes, BF16) == prove(ReferenceOps, shapes, FP32)


def test_the_proof_is_repeatable() -> None:
    assert len({prove(ReferenceOps) for _ in range(2)}) == 1
