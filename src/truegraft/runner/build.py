"""From settings to a runner: read the model, prove its ops, plan memory.

Everything that can refuse a model or a machine does so here, before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from truegraft.adapters.store import AdapterStore
from truegraft.adapters.table import AdapterTable
from truegraft.config import BLOCK_SIZE, DType, EngineConfig
from truegraft.errors import ConfigError, OutOfMemoryError
from truegraft.model.architecture import Architecture
from truegraft.model.checkpoint import fingerprint, load_weights
from truegraft.model.decoder import Decoder
from truegraft.ops.cpu import cpu_ops
from truegraft.ops.interface import AttentionShape, KVCache
from truegraft.ops.prove import Shapes, choose_tiles
from truegraft.runner.rows import Rows
from truegraft.runner.runner import Runner

CPU_CACHE_SHARE = 0.25  # of available memory, for a KV cache whose size nobody gave
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Built:
    """An engine's parts below the scheduler. dtype: resolved; store is None without adapters."""

    dtype: DType
    max_model_len: int
    num_blocks: int
    runner: Runner
    store: AdapterStore | None


def build(config: EngineConfig, arch: Architecture) -> Built:
    """Load the model of this architecture and make its runner.

    Raises ModelError, ConfigError, OutOfMemoryError, ExactnessError.
    """
    name = arch.dtype if config.model.dtype == "auto" else config.model.dtype
    dtype = DTYPES[name]
    max_len, num_blocks = plan_cache(config, arch, dtype)
    _check_weights_fit(arch, dtype)
    model = config.model
    weights = load_weights(model.path, arch, dtype, load_format=model.load_format, seed=model.seed)
    shapes = op_shapes(arch, config.lora is not None)
    make_ops = cpu_ops(dtype, shapes.attention)
    ops = make_ops(dtype, choose_tiles(shapes, dtype, make_ops))
    store = table = None
    if config.lora is not None:
        table = AdapterTable(arch.target_modules(), ops, config.lora)
        store = _store(config, arch, weights, dtype)
    decoder = Decoder(arch, weights, ops, table.pages if table else {}, max_len)
    rows = Rows(config.scheduler.max_num_seqs, max_len, BLOCK_SIZE)
    caches = [_cache(arch, num_blocks, dtype) for _ in range(arch.num_layers)]
    runner = Runner(decoder, ops, caches, rows, table, store)
    return Built(name, max_len, num_blocks, runner, store)


def op_shapes(arch: Architecture, adapters: bool) -> Shapes:
    """Every shape that this model gives the ops."""
    hidden, inner, dim = arch.hidden_size, arch.intermediate_size, arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
    return Shapes(
        linears=frozenset(
            {
                (hidden, (queries, keys, keys)),
                (queries, (hidden,)),
                (hidden, (inner, inner)),
                (inner, (hidden,)),
                (hidden, (arch.vocab_size,)),
            }
        ),
        adapters=adapters,
        embedding=(arch.vocab_size, hidden),
        widths=frozenset({hidden}),
        inner=frozenset({inner}),
        attention=frozenset(
            AttentionShape(arch.num_heads, arch.num_kv_heads, dim, window)
            for window in arch.sliding_windows
        ),
        qk_norm=arch.qk_norm,
    )


def plan_cache(config: EngineConfig, arch: Architecture, dtype: torch.dtype) -> tuple[int, int]:
    """(max_model_len, number of KV blocks).

    Raises ConfigError for a context that the model or the cache cannot hold.
    """
    asked = config.model.max_model_len
    if asked is not None and asked > arch.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={asked} exceeds the model's {arch.max_position_embeddings} positions; "
            "lower it."
        )
    max_len = asked or arch.max_position_embeddings
    per_block = block_bytes(arch, dtype)
    wanted = config.scheduler.max_num_seqs * -(-max_len // BLOCK_SIZE)
    memory = config.cache.memory
    if memory is None:
        memory = min(wanted * per_block, int(available_memory() * CPU_CACHE_SHARE))
    elif memory > available_memory():
        raise OutOfMemoryError(
            f"kv_cache_memory={memory} exceeds the {available_memory()} bytes available; lower it."
        )
    num_blocks = min(memory // per_block, wanted)
    fitting = num_blocks * BLOCK_SIZE
    if fitting < max_len and (asked is not None or fitting == 0):
        raise OutOfMemoryError(
            f"the KV cache ({memory} bytes) holds {fitting} tokens, fewer than "
            f"max_model_len={max_len}; raise kv_cache_memory to "
            f"{-(-max_len // BLOCK_SIZE) * per_block} or lower max_model_len."
        )
    return min(max_len, fitting), num_blocks


def block_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * BLOCK_SIZE * arch.head_dim * dtype.itemsize


def available_memory() -> int:
    """Bytes of memory that this machine could give now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63 - 1


def _check_weights_fit(arch: Architecture, dtype: torch.dtype) -> None:
    """The checkpoint's tensors and their float32 copy must fit into memory."""
    count = sum(torch.Size(shape).numel() for shape in arch.parameter_shapes().values())
    needed = count * (dtype.itemsize + 4)
    if needed > available_memory():
        raise OutOfMemoryError(
            f"the weights need {needed} bytes, {available_memory()} are available; "
            "use a smaller model or a larger machine."
        )


def _cache(arch: Architecture, num_blocks: int, dtype: torch.dtype) -> KVCache:
    size = (num_blocks, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
    return KVCache(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))


def _store(
    config: EngineConfig, arch: Architecture, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> AdapterStore:
    assert config.lora is not None
    dummy = config.model.load_format == "dummy"

    def base_weight(module: str) -> Tensor:
        tied = arch.tie_word_embeddings and module == "lm_head"
        return weights["model.embed_tokens.weight" if tied else f"{module}.weight"]

    return AdapterStore(
        arch.target_modules(),
        max_cpu_loras=config.lora.max_cpu_loras,
        max_rank=config.lora.max_lora_rank,
        dtype=dtype,
        base_fingerprint="" if dummy else fingerprint(config.model.path),
        base_weight=base_weight,
    )
