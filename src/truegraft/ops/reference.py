"""Plain PyTorch: the living definition of every op, and the CPU back end.

Sums are fp32 (weights are upcast once, by `pack`), results are rounded once, at the end of an op.
Exactness comes from shapes: each matmul runs in row tiles of a few fixed sizes, and `prove.py`
shows at load that those sizes agree bit for bit on this machine. Transcendentals are `exp`, `log`
and `log1p` alone, whose vector and scalar paths agree; others (silu, sigmoid, exp2) do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from truegraft.ops.interface import (
    PAGE_RANK,
    AttentionPlan,
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LoraPages,
    QKNorm,
    RowPlan,
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.reference_attention import TilePlan, attend, plan_tiles
from truegraft.ops.reference_lora import UnitPlan, Units
from truegraft.ops.reference_sampling import adjust_row, perturb_row


@dataclass(frozen=True)
class Tiles:
    """Row counts of matmul calls. Each tuple's members give equal bits, as proved at load.

    linear: rows of a linear. attention: query rows × heads of a group. lora: rows of a unit.
    """

    linear: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    attention: tuple[int, ...] = (4, 64)
    lora: tuple[int, ...] = (4, 32)


class ReferenceOps:
    """The ops of `interface.Ops` on any torch device, in the given model dtype."""

    def __init__(self, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
        self.dtype = dtype
        self.tiles = tiles or Tiles()
        self.row_multiple = self.tiles.linear[0]

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    # ------------------------------------------------------------------ linears and adapters

    def pack(self, weight: Tensor) -> Tensor:
        return weight.float().t().contiguous()

    def new_pages(self, counts: tuple[int, int, int], in_features: int, out: int) -> LoraPages:
        pages, slots, ordinals = counts
        return LoraPages(
            torch.empty(pages, PAGE_RANK, in_features),
            torch.empty(pages, PAGE_RANK, out),
            torch.full((slots, ordinals), -1, dtype=torch.int32),
            torch.full((slots,), ordinals * PAGE_RANK, dtype=torch.int32),
            torch.zeros(slots),
        )

    def plan_rows(self, slots: Tensor, depth: Tensor | None = None, pages: int = 0) -> RowPlan:
        return UnitPlan(slots.tolist(), self.tiles.lora)

    def embed(self, token_ids: Tensor, embedding: Embedding, rows: RowPlan) -> Tensor:
        assert isinstance(rows, UnitPlan)
        y = embedding.weight.index_select(0, token_ids).float()
        if embedding.pages is not None:
            for units in rows.of_embedding(embedding.pages):
                ids = token_ids.index_select(0, units.rows).view(len(units.pages), -1)
                s = embedding.pages.a[units.pages[:, None], :, ids].float()  # [U, size, 16]
                self._expand(y, s, units)
        return self._round(y)

    def linear(
        self, x: Tensor, linear: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        assert isinstance(rows, UnitPlan)
        x = x.float()
        y = self._matmul(x, linear.weight)
        if linear.bias is not None:
            y += linear.bias.float()
        for units in rows.of_linear(linear):
            xs = x.index_select(0, units.rows).view(len(units.a), -1, x.shape[1])
            self._expand(y, xs.bmm(units.a.transpose(1, 2)), units)
        return y.to(out or self.dtype)

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K] times the packed weight [K, N], in row tiles of proved sizes."""
        if x.shape[0] in self.tiles.linear:
            return x @ weight
        y = torch.empty(x.shape[0], weight.shape[1])
        start = 0
        while start < x.shape[0]:
            size = max(t for t in self.tiles.linear if t <= x.shape[0] - start)
            torch.mm(x[start : start + size], weight, out=y[start : start + size])
            start += size
        return y

    def _expand(self, y: Tensor, s: Tensor, units: Units) -> None:
        """y += round(scale · s) B, in place; a row without a page gets -0.0: no bit changes."""
        s = self._round(s * units.scale).float()
        delta = torch.empty(s.shape[0] * s.shape[1] + 1, y.shape[1])
        torch.bmm(s, units.b, out=delta[:-1].view(*s.shape[:2], -1))
        delta[-1] = -0.0
        y += delta.index_select(0, units.inverse)

    # ------------------------------------------------------------------ row-wise

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = chosen_rows(x, index), chosen_rows(residual, index)
        r = x if residual is None else self._round(x.float() + residual.float())
        return self._round(_rms_norm(r.float(), weight.float(), eps)), r

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        # NOTE: exp runs on a contiguous copy: its vector path must not depend on row strides.
        return self._round(gate / gate.neg().exp_().add_(1.0) * up)

    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        num_q, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, dim)
        qk = heads[:, : num_q + num_kv].float()
        if norm is not None:
            q = self._round(_rms_norm(qk[:, :num_q], norm.q.float(), norm.eps))
            k = self._round(_rms_norm(qk[:, num_q:], norm.k.float(), norm.eps))
            qk = torch.cat((q, k), dim=1).float()
        cos, sin = (t.unsqueeze(1) for t in cos_sin)
        first, second = qk[..., : dim // 2], qk[..., dim // 2 :]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated = self._round(rotated)
        n = batch.num_tokens
        k, v = rotated[:n, num_q:], heads[:n, num_q + num_kv :]
        # NOTE: 0 · NaN is NaN, so a value that is not finite would pass through a mask. It is
        # written as a key that is not: masks hide keys, and who may see it fails all the same.
        broken = ~v.isfinite().all(-1, keepdim=True)
        cache.k[batch.kv_block, :, batch.kv_offset] = k.masked_fill(broken, torch.nan)
        cache.v[batch.kv_block, :, batch.kv_offset] = v.masked_fill(broken, 0.0)
        return rotated[:, :num_q]

    # ------------------------------------------------------------------ attention

    def plan_attention(self, batch: TokenBatch, shapes: Sequence[AttentionShape]) -> AttentionPlan:
        return TilePlan({s: plan_tiles(batch, s, self.tiles.attention) for s in set(shapes)})

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, TilePlan)
        return self._round(attend(q, shape, cache, plan.work[shape]))

    # ------------------------------------------------------------------ sampling

    def adjust(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        out = logits
        for index, row in enumerate(rows):
            if row is not None and row.adjusts:
                out = out.clone() if out is logits else out
                adjust_row(out[index], row)
        return out

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        drawn = [i for i, row in enumerate(rows) if row is not None and row.draws]
        if drawn:
            logits = logits.clone()
        for index in drawn:
            row = rows[index]
            assert row is not None
            perturb_row(logits[index], row)
        return logits.max(-1).indices  # of equal values the first, as PyTorch documents

    def logprobs(self, logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted - shifted.exp().sum(-1, keepdim=True).log()


@overload
def chosen_rows(rows: Tensor, index: Tensor | None) -> Tensor: ...
@overload
def chosen_rows(rows: Tensor | None, index: Tensor | None) -> Tensor | None: ...
def chosen_rows(rows: Tensor | None, index: Tensor | None) -> Tensor | None:
    """The rows `index`, or all where it is None."""
    return rows if rows is None or index is None else rows.index_select(0, index)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = (x * x).sum(-1, keepdim=True).div_(x.shape[-1])
    return x / (mean + eps).sqrt_() * weight
