"""The GPU back end: Triton kernels whose bits never follow the batch.

Same ops and semantics as `ReferenceOps`. Every kernel computes a row by one order of operations,
a function of the layer's shape; tiles, warps and launches may follow the batch and move no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from truegraft.ops.triton import attention, embedding, linear, lora, rowwise, sampling
from truegraft.ops.triton.launch import check_not_captured
from truegraft.ops.triton.sampling_rows import pack


class TritonOps:
    """The ops of `interface.Ops` on one GPU (or, interpreted, on the CPU)."""

    row_multiple = 1

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._signals = lora.Signals(device)
        self._ordinals = 0  # pages that a slot can have of a module; 0: no adapters

    # ------------------------------------------------------------------ linears and adapters

    def pack(self, weight: Tensor) -> Tensor:
        return linear.pack(weight.to(self.device, self.dtype))

    def new_pages(self, counts: tuple[int, int, int], in_features: int, out: int) -> LoraPages:
        pages, slots, ordinals = counts
        ordinals = 1 << (ordinals - 1).bit_length()
        assert self._ordinals in (0, ordinals), "modules of one table have equal ordinals"
        self._ordinals = ordinals

        def numbers(*shape: int, fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=self.device)

        # NOTE: b is [P, N, 16] in memory: a tile of columns is then one piece.
        b = torch.empty(pages, out, PAGE_RANK, dtype=self.dtype, device=self.device)
        return LoraPages(
            torch.empty(pages, PAGE_RANK, in_features, dtype=self.dtype, device=self.device),
            b.transpose(1, 2),
            numbers(slots, ordinals, fill=-1, dtype=torch.int32),
            numbers(slots, fill=0, dtype=torch.int32),
            numbers(slots, fill=0.0, dtype=torch.float32),
        )

    def plan_rows(self, slots: Tensor, depth: Tensor | None = None, pages: int = 0) -> RowPlan:
        assert depth is None or depth.device.type == self.device.type, "a copy would be a moment's"
        if slots.device.type == "cpu":
            check_not_captured(self.device)
            lora.check_slots(slots, 0 if depth is None else len(depth))
            slots = slots.to(self.device)
        depth = depth if self._ordinals else None
        ordinals = self._ordinals if depth is not None else 0
        return lora.plan_rows(slots, depth, ordinals, self._signals, pages)

    def embed(self, token_ids: Tensor, embedding_: Embedding, rows: RowPlan) -> Tensor:
        assert isinstance(rows, lora.AdapterRows)
        return embedding.embed(token_ids, embedding_, rows)

    def linear(
        self, x: Tensor, layer: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        assert isinstance(rows, lora.AdapterRows)
        return linear.linear(x, layer, rows, self._signals, out)

    # ------------------------------------------------------------------ row-wise

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return rowwise.add_norm(x, residual, weight, eps, index)

    def silu_mul(self, x: Tensor) -> Tensor:
        return rowwise.silu_mul(x)

    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        return rowwise.rope_write(qkv, shape, cos_sin, norm, cache, batch)

    # ------------------------------------------------------------------ attention

    def plan_attention(self, batch: TokenBatch, shapes: Sequence[AttentionShape]) -> AttentionPlan:
        return attention.plan_attention(batch, shapes)

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, attention.TritonAttentionPlan)
        return attention.attention(q, shape, cache, plan)

    # ------------------------------------------------------------------ sampling

    def adjust(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        return sampling.adjust(logits, pack(rows, logits.shape[1], self.device))

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        return sampling.sample(logits, pack(rows, logits.shape[1], self.device))

    def logprobs(self, logits: Tensor) -> Tensor:
        return sampling.logprobs(logits)
