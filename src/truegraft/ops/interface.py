"""The ops that a decoder needs, each an equation with shapes.

A *row* is one token position in a step. Every op keeps the numerics contract of
`docs/numerics.md`: one row, one reduction order, whatever the rows beside it are. Knows nothing
about ranks of a device group, requests or schedules.

Letters: M rows (a multiple of `row_multiple`), K in features, N out features, V vocabulary,
H query heads, G key/value heads, D head dim, L logits rows, P adapter pages, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, dtype

PAGE_RANK = 16
SPLIT = 256  # keys of one attention split, at absolute positions


@dataclass(frozen=True)
class LoraPages:
    """All adapters' pages for one target module.

    Adapter ranks 16·o … 16·o+15 are its page of ordinal o; ranks that it lacks are zero.
    """

    a: Tensor  # [P, 16, K]
    b: Tensor  # [P, 16, N]
    page_of: Tensor  # [slots, ordinals] int32, -1: none
    rank: Tensor  # [slots] int32; pages are zero past it
    scale: Tensor  # [slots] float32


@dataclass(frozen=True)
class LinearPart:
    """Output columns offset … offset+size-1 of a fused linear, and their adapters' pages."""

    offset: int
    size: int
    pages: LoraPages | None = None


@dataclass(frozen=True)
class Linear:
    """A linear (or several that share their input, fused) with its target modules."""

    weight: Tensor  # as `Ops.pack` made it from [N, K]
    bias: Tensor | None  # [N]
    parts: tuple[LinearPart, ...]


@dataclass(frozen=True)
class Embedding:
    """A token embedding and its adapters' pages (a: [P, 16, V])."""

    weight: Tensor  # [V, N]
    pages: LoraPages | None = None


@dataclass(frozen=True)
class KVCache:
    """One layer's paged cache."""

    k: Tensor  # [blocks, G, 64, D]
    v: Tensor  # [blocks, G, 64, D]


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer. window: keys visible to a query, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm over the head dim of queries and keys, before RoPE."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float


@dataclass(frozen=True)
class TokenBatch:
    """The rows of one step. Sequence s owns rows seq_offset[s] … seq_offset[s+1]-1.

    Rows from `num_tokens` on are padding: slot -1, and written nowhere.
    """

    num_tokens: int
    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int64
    slots: Tensor  # [M] int32, adapter slot, -1: base
    kv_block: Tensor  # [num_tokens] int64, block that receives the row's key and value
    kv_offset: Tensor  # [num_tokens] int64, place in it
    seq_row: Tensor  # [S] int64, persistent row
    seq_offset: Tensor  # [S + 1] int64
    seq_start: Tensor  # [S] int64, position of the sequence's first row
    block_tables: Tensor  # [rows, max blocks] int32
    max_query: int  # at least the rows of any sequence; known to the host
    max_context: int  # at least any position + 1; known to the host
    total_context: int = 0  # about the sum of sequences' contexts, if known; moves time, no bit


@dataclass(frozen=True)
class SamplingRow:
    """How one logits row is sampled: what the user asked, and the row's own history.

    prompt, output: ids that penalties count; the output includes the step's earlier drafts.
    position: of the token drawn. banned: ids masked out (stop tokens before min_tokens).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    prompt: Tensor  # [p] int64
    output: Tensor  # [o] int64
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None
    banned: tuple[int, ...]
    seed: int
    sample_index: int
    position: int

    @property
    def draws(self) -> bool:
        """Whether noise is drawn; greedy rows take the argmax."""
        return self.temperature > 0

    @property
    def adjusts(self) -> bool:
        """Whether raw logits are changed before the argmax."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalised or self.bias or self.allowed is not None or self.banned)


class RowPlan:
    """Opaque: what `Ops.plan_rows` worked out about the adapters of a list of rows."""


class AttentionPlan:
    """Opaque: what `Ops.plan_attention` worked out about a batch, shared by all layers."""


class Ops(Protocol):
    """One device's ops. Values are in the model dtype unless said; sums are fp32."""

    row_multiple: int  # M and L are multiples of this

    def pack(self, weight: Tensor) -> Tensor:
        """Turn a linear's weight [N, K] into the layout that `linear` reads fastest."""
        ...

    def new_pages(self, counts: tuple[int, int, int], in_features: int, out: int) -> LoraPages:
        """Empty pages; counts = (pages, slots, ordinals)."""
        ...

    def plan_rows(self, slots: Tensor, depth: Tensor | None = None, pages: int = 0) -> RowPlan:
        """Prepare the adapter work of rows with these slots [M]. Valid until a page changes.

        depth: [slots] int32, most pages that any module has of the slot's adapter; None: no
        adapters. pages: about how many the rows' adapters have in all; it may move time, no bit.
        """
        ...

    def plan_attention(self, batch: TokenBatch, shapes: Sequence[AttentionShape]) -> AttentionPlan:
        """Prepare a step's attention work for every distinct layer shape."""
        ...

    def embed(self, token_ids: Tensor, embedding: Embedding, rows: RowPlan) -> Tensor:
        """y[m] = round(W[t] + Σ_o s_o B_o), s_o = round(scale · A_o[:, t]): [M, N]."""
        ...

    def linear(self, x: Tensor, linear: Linear, rows: RowPlan, out: dtype | None = None) -> Tensor:
        """y = round(x Wᵀ + bias + Σ_o s_o B_o), s_o = round(scale · x A_oᵀ): [M, K] → [M, N].

        o: the row's page ordinals, ascending. out: dtype of y, the model's if None.
        """
        ...

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """r = round(x + residual); y = round(r / √(mean(r²) + eps) · weight): (y, r), [M, N].

        index: [L] int64, compute only these rows, in this order: (y, r), [L, N].
        """
        ...

    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to the cache (mutated): q [M, H, D].

        qkv: [M, (H + 2G)·D]; cos_sin: [M, D/2] each, float32. Rotates halves, as Llama does.
        """
        ...

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """Softmax(q kᵀ / √D) v over the keys at or before the row: [M, H, D] → [M, H·D].

        Splits of 256 keys at absolute positions, folded in ascending order.
        """
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """y = round(g / (1 + exp(-g)) · u), [g | u] = x: [M, 2N] → [M, N]."""
        ...

    def adjust(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        """Penalties, bias and masks on raw logits: [L, V] float32. None: row is left as it is."""
        ...

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> Tensor:
        """Draw one token a row from adjusted logits: [L] int64. None: argmax.

        z = logits / temperature, masked by top-k, top-p, min-p; argmax of z + Gumbel noise keyed
        by (seed, sample index, position, token id). Ties go to the lowest token id.
        """
        ...

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-softmax of raw logits [L, V] float32."""
        ...
