"""The proof at load covers what the loaded model then asks of its ops: nothing runs unproved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine.helpers import greedy, ids
from torch import Tensor

from truegraft import LLM, LoRARequest
from truegraft.model.architecture import Architecture
from truegraft.ops.cpu import CpuOps, cpu_ops
from truegraft.ops.interface import Linear, RowPlan
from truegraft.ops.prove import choose_tiles
from truegraft.ops.reference import ReferenceOps
from truegraft.runner.build import op_shapes

LinearOp = Callable[..., Tensor]
Layout = tuple[int, tuple[tuple[int, bool], ...]]
"""In features, and of each fused part its out features and whether it carries adapters."""


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Layout]]:
    """The layouts of all linears that run in the block."""
    seen: set[Layout] = set()

    def recording(linear_op: LinearOp) -> LinearOp:
        def record(
            self: ReferenceOps,
            x: Tensor,
            linear: Linear,
            rows: RowPlan,
            out: torch.dtype | None = None,
        ) -> Tensor:
            parts = tuple((part.size, part.pages is not None) for part in linear.parts)
            seen.add((x.shape[1], parts))
            return linear_op(self, x, linear, rows, out)

        return record

    with monkeypatch.context() as patch:
        for back_end in (ReferenceOps, CpuOps):
            patch.setattr(back_end, "linear", recording(back_end.linear))
        yield seen


def test_every_linear_with_adapters_is_proved_in_the_form_in_which_it_runs(
    llm: LLM, llama: Path, adapters: dict[str, LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused parts share one adapter product, so a part on its own proves another shape."""
    with recorded(monkeypatch) as run:
        llm.generate(ids(1, 9), greedy(2), adapters["r17-all"])
    with recorded(monkeypatch) as proved:
        shapes = op_shapes(Architecture.from_directory(llama), adapters=True)
        choose_tiles(shapes, torch.float32, cpu_ops(torch.float32, shapes.attention))
    assert len(run) == 5, "qkv, output, gate and up, down, lm_head"
    assert run - proved == set()
