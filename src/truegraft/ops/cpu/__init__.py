"""The CPU back end: kernels in C where rows are small, PyTorch's matmul where they are not.

Same ops and semantics as `ReferenceOps`, which it extends and which serves where there is no C
compiler. Its own kernels compute each row by one sequence of operations, whatever the batch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from truegraft.errors import ConfigError
from truegraft.ops.cpu.compile import load_library
from truegraft.ops.interface import (
    AttentionPlan,
    AttentionShape,
    KVCache,
    Linear,
    LoraPages,
    QKNorm,
    RowPlan,
    TokenBatch,
)
from truegraft.ops.reference import ReferenceOps, Tiles, chosen_rows
from truegraft.ops.reference_lora import UnitPlan

LANES, MAX_DIM, MAX_GROUP = 16, 256, 64  # as in kernels.c
ROWS_PER_TASK = 16  # fewer rows than two tasks' are not worth a second thread

Kernel = Callable[..., None]


@dataclass(frozen=True)
class RowAttention(AttentionPlan):
    """Where each row's keys are."""

    positions: Tensor  # [M] int64
    table_row: Tensor  # [num_tokens] int64, row of tables
    tables: Tensor  # [rows, max blocks] int32
    num_tokens: int


class SlotPlan(UnitPlan):
    """The rows' slots as they are; units only for what the reference computes (embeddings)."""

    def __init__(self, slots: Tensor, sizes: Sequence[int]) -> None:
        listed = slots.tolist()
        super().__init__(listed, sizes)
        self.slots = slots.contiguous()
        self.highest = max(listed, default=-1)


class CpuOps(ReferenceOps):
    """C kernels for attention, adapters and row-wise ops; the rest is the reference."""

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, tiles: Tiles | None = None
    ) -> None:
        super().__init__(dtype, tiles)
        self._library = library
        self._kernels: dict[str, Kernel] = {}
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), "truegraft-cpu")

    # ------------------------------------------------------------------ ops

    def plan_rows(self, slots: Tensor, depth: Tensor | None = None, pages: int = 0) -> RowPlan:
        return SlotPlan(slots, self.tiles.lora)

    def linear(
        self, x: Tensor, linear: Linear, rows: RowPlan, out: torch.dtype | None = None
    ) -> Tensor:
        assert isinstance(rows, SlotPlan)
        x = x.contiguous()
        y = self._matmul(x.float(), linear.weight)
        if linear.bias is not None:
            y += linear.bias.float()
        for part in linear.parts if rows.highest >= 0 else ():
            if part.pages is not None:
                self._add_adapters(x, y, part.offset, part.pages, rows)
        return y.to(out or self.dtype)

    def _add_adapters(
        self, x: Tensor, y: Tensor, offset: int, pages: LoraPages, rows: SlotPlan
    ) -> None:
        assert rows.highest < len(pages.page_of), "a slot that the device does not have"
        a, b = pages.a, pages.b
        table = (pages.page_of, pages.rank, pages.scale, rows.slots)
        sizes = (pages.page_of.shape[1], a.shape[2], b.shape[2], offset, y.shape[1])
        self._run("lora", len(x), x, y, a, b, *table, *sizes)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = chosen_rows(x, index), chosen_rows(residual, index)
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        y, r = torch.empty_like(x), torch.empty_like(x)
        self._run("add_norm", len(x), x, residual, weight, y, r, x.shape[1], eps)
        return y, r

    def silu_mul(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), x.shape[1] // 2)
        self._run("silu_mul", len(x), x.contiguous(), y, y.shape[1])
        return y

    def rope_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        cos_sin: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: KVCache,
        batch: TokenBatch,
    ) -> Tensor:
        q = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
        norms = (norm.q, norm.k, norm.eps) if norm else (None, None, 0.0)
        place = (batch.kv_block, batch.kv_offset, batch.num_tokens)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        inputs = (qkv.contiguous(), cos_sin[0].contiguous(), cos_sin[1].contiguous())
        self._run("rope_write", len(qkv), *inputs, *norms, q, cache.k, cache.v, *place, *heads)
        return q

    def plan_attention(self, batch: TokenBatch, shapes: Sequence[AttentionShape]) -> AttentionPlan:
        counts = batch.seq_offset.diff()
        table_row = torch.repeat_interleave(batch.seq_row, counts)
        tables = batch.block_tables.int().contiguous()
        return RowAttention(batch.positions, table_row, tables, batch.num_tokens)

    def attention(
        self, q: Tensor, shape: AttentionShape, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, RowAttention)
        heads, dim = shape.num_heads, shape.head_dim
        out = q.new_empty(len(q), heads * dim)
        where = (plan.positions, plan.table_row, plan.tables, plan.tables.shape[1])
        limits = (plan.num_tokens, shape.window or 2**62, dim**-0.5)
        sizes = (heads, shape.num_kv_heads, dim)
        self._run(
            "attention", len(q), q.contiguous(), cache.k, cache.v, *where, *limits, out, *sizes
        )
        return out

    # ------------------------------------------------------------------ calling C

    def _run(self, name: str, rows: int, *args: Tensor | int | float | None) -> None:
        """Run a kernel over rows 0 … rows-1, divided among threads where that pays."""
        kernel = self._kernels.get(name) or self._find(name, args)
        values = [_value(arg) for arg in args]
        tasks = min(self._threads, rows // ROWS_PER_TASK)
        if tasks < 2:
            kernel(0, rows, *values)
            return
        edges = [rows * task // tasks for task in range(tasks + 1)]
        others = [
            self._pool.submit(kernel, begin, end, *values) for begin, end in pairwise(edges[1:])
        ]
        try:
            kernel(0, edges[1], *values)
        finally:  # an interrupt must not free tensors that a thread still writes
            wait(others)

    def _find(self, name: str, args: Sequence[Tensor | int | float | None]) -> Kernel:
        """The kernel for this dtype. Tensors go as addresses, ints as int64, floats as float."""
        kernel: Any = getattr(self._library, f"{name}_{str(self.dtype).removeprefix('torch.')}")
        kernel.restype = None
        kernel.argtypes = [ctypes.c_int64, ctypes.c_int64, *map(_c_type, args)]
        self._kernels[name] = kernel
        return self._kernels[name]


def _value(arg: Tensor | int | float | None) -> int | float | None:
    if not isinstance(arg, Tensor):
        return arg
    assert arg.is_contiguous(), "kernels read dense tensors"
    return arg.data_ptr()


def _c_type(arg: Tensor | int | float | None) -> Any:
    if isinstance(arg, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(arg, float) else ctypes.c_void_p


def supports(library: ctypes.CDLL, dtype: torch.dtype, shapes: Iterable[AttentionShape]) -> bool:
    """Whether the kernels were compiled for this dtype and are large enough for these heads."""
    compiled = hasattr(library, f"attention_{str(dtype).removeprefix('torch.')}")
    fitting = all(
        s.head_dim % LANES == 0 and s.head_dim <= MAX_DIM and s.group <= MAX_GROUP for s in shapes
    )
    return compiled and fitting


def cpu_ops(
    dtype: torch.dtype, shapes: Iterable[AttentionShape]
) -> Callable[[torch.dtype, Tiles], ReferenceOps]:
    """This machine's back end for a model, as a constructor: its tiles are yet to be proved.

    TRUEGRAFT_CPU_OPS=reference chooses plain PyTorch where kernels could be compiled.
    """
    wanted = os.environ.get("TRUEGRAFT_CPU_OPS", "kernels")
    if wanted not in ("kernels", "reference"):
        raise ConfigError(f"TRUEGRAFT_CPU_OPS={wanted!r} must be 'kernels' or 'reference'.")
    library = load_library() if wanted == "kernels" else None
    if library is None or not supports(library, dtype, shapes):
        return ReferenceOps
    return partial(CpuOps, library)
