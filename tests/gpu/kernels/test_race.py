"""Whole steps in captured graphs, where each kernel starts before its predecessor has ended.

Every buffer of the graph is poisoned before each replay, inputs change between replays, and the
outcome is compared with the same step launched one kernel at a time. A kernel that reads before
its inputs are written, or writes before its readers have read, shows as another bit or a NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import same_bits
from torch import Tensor

from truegraft.model.architecture import Architecture
from truegraft.model.decoder import Decoder
from truegraft.ops.interface import PAGE_RANK, KVCache, LoraPages, TokenBatch
from truegraft.ops.triton import launch, memory
from truegraft.ops.triton.ops import TritonOps

GPU = torch.device("cuda")
BF16 = torch.bfloat16
MAX_LEN, BLOCK, LAYERS = 2048, 64, 4
RANKS = (16, 8, 64, 16, 128, 1, 16, 32)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def randn(*shape: int, std: float) -> Tensor:
    return (torch.randn(shape, device=GPU) * std).to(BF16)


class Model:
    """A random decoder with an adapter in each slot, and its cache."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        (path / "config.json").write_text(json.dumps(CONFIG))
        arch = Architecture.from_directory(path)
        self.ops = TritonOps(BF16, GPU)
        weights = {
            name: randn(*shape, std=shape[-1] ** -0.5)
            if len(shape) > 1
            else 1 + randn(*shape, std=0.1)
            for name, shape in arch.parameter_shapes().items()
        }
        self.pages = {
            name: self._pages(shape.in_features, shape.out_features)
            for name, shape in arch.target_modules().items()
        }
        self.depth = torch.tensor(
            [-(-rank // PAGE_RANK) for rank in RANKS], dtype=torch.int32, device=GPU
        )
        self.decoder = Decoder(arch, weights, self.ops, self.pages, MAX_LEN)
        size = (80 * MAX_LEN // BLOCK, arch.num_kv_heads, BLOCK, arch.head_dim)
        self.filled = [KVCache(randn(*size, std=1.0), randn(*size, std=1.0)) for _ in range(LAYERS)]
        self.caches = [KVCache(c.k.clone(), c.v.clone()) for c in self.filled]

    def _pages(self, k: int, n: int) -> LoraPages:
        counts = [-(-rank // PAGE_RANK) for rank in RANKS]
        pages = self.ops.new_pages((sum(counts), len(RANKS), max(counts)), k, n)
        pages.a.copy_(randn(*pages.a.shape, std=k**-0.5 if k < 32000 else 1.0))
        pages.b.copy_(randn(*pages.b.shape, std=0.1))
        number = 0
        for slot, rank in enumerate(RANKS):
            for ordinal in range(counts[slot]):
                pages.page_of[slot, ordinal] = number
                rest = max(rank - ordinal * PAGE_RANK, 0)
                pages.a[number, rest:], pages.b[number, rest:] = 0.0, 0.0
                number += 1
            pages.rank[slot], pages.scale[slot] = rank, 1.0 + slot / 8
        return pages

    def restore(self) -> None:
        for cache, filled in zip(self.caches, self.filled, strict=True):
            cache.k.copy_(filled.k)
            cache.v.copy_(filled.v)

    def step(self, batch: TokenBatch, index: Tensor) -> tuple[Tensor, Tensor]:
        """(last hidden rows, logits of the rows `index`); the cache is written."""
        rows = self.ops.plan_rows(batch.slots, self.depth)
        x, residual = self.decoder.hidden(batch, rows, self.caches)
        head = self.ops.plan_rows(batch.slots[index], self.depth)
        return residual, self.decoder.logits(x, residual, index, head)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with torch.inference_mode():
        yield Model(tmp_path_factory.mktemp("race"))


@dataclass(frozen=True)
class Layout:
    """How many rows each sequence of a step has; the rest may change between replays."""

    counts: tuple[int, ...]
    adapters: int  # slots in use; 0: base rows alone


LAYOUTS = {
    "decode 1": Layout((1,), 8),
    "decode 8": Layout((1,) * 8, 8),
    "decode 64": Layout((1,) * 64, 8),
    "decode 64, base": Layout((1,) * 64, 0),
    "decode 64, one adapter": Layout((1,) * 64, 1),
    "verify 8x5": Layout((5,) * 8, 8),
    "mixed": Layout((1, 300, 5, 1, 1, 64, 1), 8),
    "prefill": Layout((700, 1, 400), 3),
}


def make_batch(layout: Layout, seed: int) -> TokenBatch:
    """Random tokens, lengths, slots and block tables."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor(layout.counts)
    total, num = int(counts.sum()), len(counts)
    starts = torch.tensor(
        [
            int(torch.randint(0, MAX_LEN - count, (1,), generator=random)) if seed else 0
            for count in layout.counts
        ]
    )
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    owner = torch.repeat_interleave(torch.arange(num), counts)
    positions = torch.arange(total) - offsets[owner] + starts[owner]
    tables = torch.randperm(num * MAX_LEN // BLOCK, generator=random).view(num, -1).int()
    slots = torch.randint(-1, max(layout.adapters, 1), (num,), generator=random)
    slots = slots if layout.adapters else torch.full_like(slots, -1)
    return TokenBatch(
        num_tokens=total,
        token_ids=torch.randint(0, 32000, (total,), generator=random).to(GPU),
        positions=positions.to(GPU),
        slots=slots[owner].int().to(GPU),
        kv_block=tables[owner, positions // BLOCK].long().to(GPU),
        kv_offset=(positions % BLOCK).to(GPU),
        seq_row=torch.arange(num).to(GPU),
        seq_offset=offsets.to(GPU),
        seq_start=starts.to(GPU),
        block_tables=tables.to(GPU),
        max_query=max(layout.counts),
        max_context=MAX_LEN,
    )


def one_at_a_time(*launched: Any) -> None:
    """The launcher without overlap: the device has ended before the next begins."""
    launch.serial(*launched)
    torch.cuda.synchronize()


def capture(model: Model, batch: TokenBatch, index: Tensor) -> tuple[Any, Any, list[Tensor]]:
    """The step as a graph, its outputs, and every buffer that its kernels write."""
    model.step(batch, index)  # compiled and loaded before the capture
    torch.cuda.synchronize()
    buffers: list[Tensor] = []

    def keep(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffers.append(torch.empty(shape, dtype=dtype, device=device))
        return buffers[-1]

    graph = torch.cuda.CUDAGraph()
    with memory.allocator(keep), torch.cuda.graph(graph):
        outputs = model.step(batch, index)
    return graph, outputs, buffers


def poison(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        buffer.fill_(float("nan") if buffer.dtype.is_floating_point else 0x3FFFFFF)


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_graph_gives_the_bits_of_kernels_one_at_a_time(model: Model, name: str) -> None:
    layout = LAYOUTS[name]
    held = make_batch(layout, 1)
    ends = held.seq_offset[1:] - 1
    graph, outputs, buffers = capture(model, held, ends)
    for seed in range(12):
        batch = make_batch(layout, seed)
        model.restore()
        with launch.replaced(one_at_a_time):
            expected = model.step(batch, ends)
        cached = [(cache.k.clone(), cache.v.clone()) for cache in model.caches]
        for field in fields(TokenBatch):
            value = getattr(held, field.name)
            if isinstance(value, Tensor):
                value.copy_(getattr(batch, field.name))
        for repeats in (1, 3):
            model.restore()
            poison(buffers)
            for _ in range(repeats):  # also back to back
                graph.replay()
            torch.cuda.synchronize()
            assert expected[1].isfinite().all()
            assert same_bits(outputs[0], expected[0]), (seed, repeats)
            assert same_bits(outputs[1], expected[1]), (seed, repeats)
            for cache, (k, v) in zip(model.caches, cached, strict=True):
                assert same_bits(cache.k, k) and same_bits(cache.v, v)


@torch.inference_mode()
def test_rows_of_a_step_are_those_of_smaller_steps(model: Model) -> None:
    """The whole decoder: each sequence of a mixed step alone, and cut into other pieces."""
    layout = LAYOUTS["mixed"]
    batch = make_batch(layout, 5)
    everything = torch.arange(batch.num_tokens, device=GPU)
    model.restore()
    whole, logits = model.step(batch, everything)
    for sequence, count in enumerate(layout.counts):
        first = sum(layout.counts[:sequence])
        for piece in sorted({1, 5, 64, count}):
            model.restore()
            for start in range(0, count, piece):
                size = min(piece, count - start)
                if piece == 1 and start > 20:
                    break
                part = one_sequence(batch, sequence, first + start, size)
                rows = slice(first + start, first + start + size)
                x, own = model.step(part, torch.arange(size, device=GPU))
                assert same_bits(x, whole[rows]), (sequence, piece, start)
                assert same_bits(own, logits[rows]), (sequence, piece, start)


def one_sequence(batch: TokenBatch, sequence: int, first: int, count: int) -> TokenBatch:
    rows = slice(first, first + count)
    return replace(
        batch,
        num_tokens=count,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        kv_block=batch.kv_block[rows],
        kv_offset=batch.kv_offset[rows],
        seq_row=batch.seq_row[sequence : sequence + 1],
        seq_offset=torch.tensor([0, count], device=GPU),
        seq_start=batch.positions[first : first + 1],
        max_query=count,
    )
