"""Which kernels a model needs: every op of a step, in every way that shapes can ask for it.

`drive` walks the ops as the engine does, over row buckets, adapters, attention classes and sampling
features. On `meta` tensors it computes nothing: it is the list that the offline compiler compiles
and that start-up warms. Knows nothing about tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
    SamplingRow,
    TokenBatch,
)
from truegraft.ops.prove import Shapes
from truegraft.ops.triton.tiles import MANY

ROWS = (1, 8, 16, 17, 32, 64, 65, 128, 256, 1024, 4096)
LOGITS_ROWS = (1, 8, 64, 256)
CONTEXTS = (256, 4096, 32768)  # one split of attention, some, many
VERIFY_ROWS = 5  # of a sequence whose drafts are verified
MAX_SEQUENCES = 512
NUM_SLOTS = 32
BLOCK = 64  # tokens of a KV block

_PLAIN = SamplingRow(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    prompt=torch.arange(3),
    output=torch.arange(2),
    bias=(),
    allowed=None,
    banned=(),
    seed=1,
    sample_index=0,
    position=5,
)
SAMPLING: tuple[SamplingRow, ...] = (  # every feature alone, and then all of them
    replace(_PLAIN, presence_penalty=0.5),
    replace(_PLAIN, frequency_penalty=0.5),
    replace(_PLAIN, repetition_penalty=1.2),
    replace(_PLAIN, bias=((1, 2.0),)),
    replace(_PLAIN, allowed=(0, 1, 2)),
    replace(_PLAIN, banned=(1,)),
    replace(_PLAIN, temperature=0.8),
    replace(_PLAIN, temperature=0.8, top_k=40),
    replace(_PLAIN, temperature=0.8, top_p=0.9),
    replace(_PLAIN, temperature=0.8, min_p=0.05),
    replace(
        _PLAIN,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        bias=((1, 2.0),),
        allowed=(0, 1, 2),
        banned=(1,),
    ),
)


@dataclass(frozen=True)
class Model:
    """What decides a model's kernels. ordinals: pages of 16 ranks that an adapter may have."""

    shapes: Shapes
    dtype: torch.dtype = torch.bfloat16
    qkv_bias: bool = False
    ordinals: tuple[int, ...] = (1,)


def _shapes(
    hidden: int,
    inner: int,
    vocabulary: int,
    attention: AttentionShape,
    qk_norm: bool = False,
) -> Shapes:
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    return Shapes(
        linears=frozenset(
            {
                (hidden, (queries, keys, keys)),
                (queries, (hidden,)),
                (hidden, (inner, inner)),
                (inner, (hidden,)),
                (hidden, (vocabulary,)),
            }
        ),
        adapters=True,
        embedding=(vocabulary, hidden),
        widths=frozenset({hidden}),
        inner=frozenset({inner}),
        attention=frozenset({attention}),
        qk_norm=qk_norm,
    )


_DEMO = _shapes(256, 704, 4096, AttentionShape(4, 2, 64))
MODELS: dict[str, Model] = {
    "llama-8b": Model(_shapes(4096, 14336, 128256, AttentionShape(32, 8, 128)), ordinals=(1, 4)),
    "qwen3-0.6b": Model(_shapes(1024, 3072, 151936, AttentionShape(16, 8, 128), qk_norm=True)),
    "qwen2-7b": Model(_shapes(3584, 18944, 152064, AttentionShape(28, 4, 128)), qkv_bias=True),
    "mistral-7b": Model(_shapes(4096, 14336, 32000, AttentionShape(32, 8, 128, window=4096))),
    "danube-1.8b": Model(_shapes(2560, 6912, 32000, AttentionShape(32, 8, 80, window=4096))),
    "phi3-mini": Model(_shapes(3072, 8192, 32064, AttentionShape(32, 32, 96))),
    "heads-of-256": Model(_shapes(2048, 16384, 256000, AttentionShape(8, 1, 256))),
    "demo": Model(_DEMO),
    "demo-fp16": Model(_DEMO, torch.float16),
    "demo-fp32": Model(_DEMO, torch.float32),
}


def drive(
    ops: Ops,
    model: Model,
    device: torch.device,
    rows: Sequence[int] = ROWS,
    logits_rows: Sequence[int] = LOGITS_ROWS,
) -> None:
    """Call every op as a step of this model would, for each number of rows.

    `ops` must be new, or have pages of `model.ordinals[0]`. With several ordinals call it once
    for each (an engine has one).
    """
    _Step(ops, model, device).run(rows, logits_rows)


def each_ordinals(model: Model) -> Iterator[Model]:
    """The model once for each number of pages that an adapter may have."""
    for ordinals in model.ordinals:
        yield replace(model, ordinals=(ordinals,))


class _Step:
    """One model's tensors, without values."""

    def __init__(self, ops: Ops, model: Model, device: torch.device) -> None:
        (self._ordinals,) = model.ordinals
        self._ops, self._model, self._device = ops, model, device
        self._adapters = model.shapes.adapters

    def _values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self._model.dtype, device=self._device)

    def _ints(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def run(self, rows: Sequence[int], logits_rows: Sequence[int]) -> None:
        shapes, ops = self._model.shapes, self._ops
        vocabulary = shapes.embedding[0]
        bodies = [(k, sizes) for k, sizes in sorted(shapes.linears) if sizes != (vocabulary,)]
        linears = [layer for k, sizes in bodies for layer in self._linears(k, sizes)]
        heads = self._linears(shapes.embedding[1], (vocabulary,))
        embeddings = self._embeddings()
        for count in rows:
            self._embed(count, embeddings)
            for layer, k in linears:
                for plan in self._plans(count):
                    ops.linear(self._values(count, k), layer, plan)
            self._rowwise(count)
            self._attention(count)
        for count in logits_rows:
            for layer, k in heads:
                for plan in self._plans(count):
                    ops.linear(self._values(count, k), layer, plan, torch.float32)
            self._sampling(count, vocabulary)

    def _plans(self, count: int) -> list[RowPlan]:
        """Fresh plans, without and with adapters, few and many.

        NOTE: fresh for each linear. Without values all weights have one address, so under one plan
        they would look like one linear that is used again, which is launched otherwise.
        """
        slots = self._ints(count, dtype=torch.int32) - 1
        plans = [self._ops.plan_rows(slots)]
        if self._adapters:
            depth = self._ints(NUM_SLOTS, dtype=torch.int32)
            plans += [self._ops.plan_rows(slots, depth, pages) for pages in (1, MANY + 1)]
        self._after_a_plan()
        return plans

    def _after_a_plan(self) -> None:
        """The next kernel does not overlap; in a step it is an embed or a norm, others overlap."""
        self._ops.silu_mul(self._values(1, 64))

    def _pages(self, k: int, n: int) -> LoraPages:
        return self._ops.new_pages((NUM_SLOTS, NUM_SLOTS, self._ordinals), k, n)

    def _linears(self, k: int, sizes: tuple[int, ...]) -> list[tuple[Linear, int]]:
        """A linear with and without pages, and its K."""
        weight = self._ops.pack(self._values(sum(sizes), k))
        bias = self._values(sum(sizes)) if self._model.qkv_bias and len(sizes) == 3 else None
        made = []
        for with_pages in {False, self._adapters}:
            parts, offset = [], 0
            for size in sizes:
                pages = self._pages(k, size) if with_pages else None
                parts.append(LinearPart(offset, size, pages))
                offset += size
            made.append((Linear(weight, bias, tuple(parts)), k))
        return made

    def _embeddings(self) -> list[Embedding]:
        vocabulary, hidden = self._model.shapes.embedding
        weight = self._values(vocabulary, hidden)
        made = [Embedding(weight)]
        if self._adapters:
            made.append(Embedding(weight, self._pages(vocabulary, hidden)))
        return made

    def _embed(self, count: int, embeddings: Sequence[Embedding]) -> None:
        """Right after a plan of attention, as in a step, and later."""
        ids, batch = self._ints(count), next(self._batches(count))
        for plan in self._plans(count):
            for embedding in embeddings:
                self._ops.plan_attention(batch, list(self._model.shapes.attention))
                for _ in range(2):
                    self._ops.embed(ids, embedding, plan)

    def _rowwise(self, count: int) -> None:
        ops, shapes = self._ops, self._model.shapes
        for width in sorted(shapes.widths):
            x, weight, index = self._values(count, width), self._values(width), self._ints(count)
            for residual in (None, x):
                for chosen in (None, index):
                    ops.add_norm(x, residual, weight, 1e-5, chosen)
            if self._adapters:  # the last norm, right after the plan of the chosen rows
                slots, depth = (self._ints(size, dtype=torch.int32) for size in (count, NUM_SLOTS))
                ops.plan_rows(slots - 1, depth, 1)
                ops.add_norm(x, x, weight, 1e-5, index)
        for inner in sorted(shapes.inner):
            ops.silu_mul(self._values(count, 2 * inner))

    def _attention(self, count: int) -> None:
        """Rows as decode (one a sequence), as verify, and as a few or one long sequence."""
        for shape in sorted(self._model.shapes.attention, key=repr):
            size = (8, shape.num_kv_heads, BLOCK, shape.head_dim)
            cache = KVCache(self._values(*size), self._values(*size))
            width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            table = self._values(count, shape.head_dim // 2, dtype=torch.float32)
            gain = self._values(shape.head_dim)
            norm = QKNorm(gain, gain, 1e-6) if self._model.shapes.qk_norm else None
            for batch in self._batches(count):
                plan = self._ops.plan_attention(batch, [shape])
                self._after_a_plan()
                qkv = self._values(count, width)
                q = self._ops.rope_write(qkv, shape, (table, table), norm, cache, batch)
                self._ops.attention(q, shape, cache, plan)

    def _batches(self, count: int) -> Iterator[TokenBatch]:
        for longest in (1, VERIFY_ROWS, count // 4, count):
            sequences = -(-count // max(longest, 1))
            for context in CONTEXTS:
                if 0 < longest <= min(count, context) and sequences <= MAX_SEQUENCES:
                    yield self._batch(count, sequences, longest, context)

    def _batch(self, count: int, sequences: int, longest: int, context: int) -> TokenBatch:
        return TokenBatch(
            num_tokens=count,
            token_ids=self._ints(count),
            positions=self._ints(count),
            slots=self._ints(count, dtype=torch.int32),
            kv_block=self._ints(count),
            kv_offset=self._ints(count),
            seq_row=self._ints(sequences),
            seq_offset=self._ints(sequences + 1),
            seq_start=self._ints(sequences),
            block_tables=self._ints(sequences, -(-context // BLOCK), dtype=torch.int32),
            max_query=longest,
            max_context=context,
        )

    def _sampling(self, count: int, vocabulary: int) -> None:
        logits = self._values(count, vocabulary, dtype=torch.float32)
        none: list[SamplingRow | None] = [None] * count
        self._ops.sample(logits, none)
        self._ops.logprobs(logits)
        for row in SAMPLING:
            rows = [row, *none[1:]]
            self._ops.sample(self._ops.adjust(logits, rows), rows)
