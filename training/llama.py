"""The demo base as a plain PyTorch module whose parameter names are those of a Llama checkpoint.

Made for fast training only: no cache, no padding, no generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    linear,
    scaled_dot_product_attention,
    silu,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64


def rope_tables(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, each [length, HEAD_DIM] float32, halves repeated."""
    exponents = torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM
    frequencies = CONFIG["rope_theta"] ** -exponents
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, HEAD_DIM]; dimension i pairs with i + half."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, length, HIDDEN] to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = rotate(k, cos, sin).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        mixed = scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(CONFIG["intermediate_size"], HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, HIDDEN] to the same shape."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, length, HIDDEN] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, length] int64 to hidden states [batch, length, HIDDEN]."""
        cos, sin = rope_tables(ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """Next-token loss of the demo base, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Layer outputs start small, so that depth does not scale the residual stream.
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * CONFIG["num_hidden_layers"]) ** -0.5 if is_output else 1.0
                nn.init.normal_(parameter, std=CONFIG["initializer_range"] * scale)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [batch, length + 1] int64. Returns the mean cross-entropy in nats, a scalar."""
        hidden = self.model(rows[:, :-1])
        logits = linear(hidden, self.model.embed_tokens.weight).float()
        return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
