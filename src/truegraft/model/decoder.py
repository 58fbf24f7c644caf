"""The decoder: Llama, Mistral, Qwen2 and Qwen3, as one sequence of ops.

Adapters are not a mode of it: each target module has its pages from the start, and each row its
slot. Knows nothing about requests, drafts or where the pages come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truegraft.model.architecture import Architecture
from truegraft.model.rope import cos_sin_table
from truegraft.ops.interface import (
    AttentionShape,
    Embedding,
    KVCache,
    Linear,
    LinearPart,
    LoraPages,
    Ops,
    QKNorm,
    RowPlan,
    TokenBatch,
)

Weights = Mapping[str, Tensor]
Pages = Mapping[str, LoraPages]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; norms are [hidden]."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    shape: AttentionShape
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Token rows in, hidden rows out; hidden rows in, logits out."""

    def __init__(
        self, arch: Architecture, weights: Weights, ops: Ops, pages: Pages, max_len: int
    ) -> None:
        """Fuse and pack `weights` (Hugging Face names). pages: module path → its pages."""
        self._ops = ops
        self._eps = arch.rms_norm_eps
        build = _Builder(arch, weights, ops, pages)
        self.embedding = Embedding(
            weights["model.embed_tokens.weight"], pages.get("model.embed_tokens")
        )
        self.layers = [build.layer(index) for index in range(arch.num_layers)]
        self._final_norm = weights["model.norm.weight"]
        self.lm_head = build.lm_head()
        device = self._final_norm.device
        cos, sin = cos_sin_table(arch.rope, arch.head_dim, max_len)
        self._cos, self._sin = cos.to(device), sin.to(device)

    @property
    def shapes(self) -> list[AttentionShape]:
        """Attention shape of each layer."""
        return [layer.shape for layer in self.layers]

    def hidden(
        self, batch: TokenBatch, rows: RowPlan, caches: Sequence[KVCache]
    ) -> tuple[Tensor, Tensor]:
        """Run all layers and fill the caches: last output and residual, [M, hidden] each."""
        ops = self._ops
        plan = ops.plan_attention(batch, self.shapes)
        cos_sin = (self._cos[batch.positions], self._sin[batch.positions])
        x = ops.embed(batch.token_ids, self.embedding, rows)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = ops.add_norm(x, residual, layer.attention_norm, self._eps)
            qkv = ops.linear(x, layer.qkv, rows)
            q = ops.rope_write(qkv, layer.shape, cos_sin, layer.qk_norm, cache, batch)
            x = ops.linear(ops.attention(q, layer.shape, cache, plan), layer.output, rows)
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, self._eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up, rows)), layer.down, rows)
        assert residual is not None, "a model has layers"
        return x, residual

    def logits(self, x: Tensor, residual: Tensor, index: Tensor, rows: RowPlan) -> Tensor:
        """Final norm and lm_head of the hidden rows `index` [L]: [M, hidden] each → [L, V] float32.

        rows: the adapter work of the chosen rows.
        """
        normed, _ = self._ops.add_norm(x, residual, self._final_norm, self._eps, index)
        return self._ops.linear(normed, self.lm_head, rows, torch.float32)


class _Builder:
    """Turns named tensors into layers, fusing linears that share their input."""

    def __init__(self, arch: Architecture, weights: Weights, ops: Ops, pages: Pages) -> None:
        self._arch = arch
        self._weights = weights
        self._ops = ops
        self._pages = pages

    def layer(self, index: int) -> Layer:
        arch, name = self._arch, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return Layer(
            attention_norm=self._weights[f"{name}.input_layernorm.weight"],
            qkv=self._fuse(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            qk_norm=self._qk_norm(attention),
            shape=AttentionShape(
                arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.sliding_windows[index]
            ),
            output=self._fuse(f"{attention}.o_proj"),
            mlp_norm=self._weights[f"{name}.post_attention_layernorm.weight"],
            gate_up=self._fuse(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._fuse(f"{mlp}.down_proj"),
        )

    def lm_head(self) -> Linear:
        tied = self._arch.tie_word_embeddings
        weight = self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        part = LinearPart(0, weight.shape[0], self._pages.get("lm_head"))
        return Linear(self._ops.pack(weight), None, (part,))

    def _fuse(self, *modules: str) -> Linear:
        weights = [self._weights[f"{module}.weight"] for module in modules]
        parts, offset = [], 0
        for module, weight in zip(modules, weights, strict=True):
            parts.append(LinearPart(offset, weight.shape[0], self._pages.get(module)))
            offset += weight.shape[0]
        return Linear(self._ops.pack(torch.cat(weights)), self._bias(modules, weights), (*parts,))

    def _bias(self, modules: Sequence[str], weights: Sequence[Tensor]) -> Tensor | None:
        names = [f"{module}.bias" for module in modules]
        if not any(name in self._weights for name in names):
            return None
        zeros = (w.new_zeros(w.shape[0]) for w in weights)
        return torch.cat([self._weights.get(n, zero) for n, zero in zip(names, zeros, strict=True)])

    def _qk_norm(self, attention: str) -> QKNorm | None:
        if not self._arch.qk_norm:
            return None
        q, k = (self._weights[f"{attention}.{name}_norm.weight"] for name in "qk")
        return QKNorm(q, k, self._arch.rms_norm_eps)
