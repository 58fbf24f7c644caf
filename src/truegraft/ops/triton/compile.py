"""Compile kernels without running them: which ones a model needs, and what each costs on the chip.

The ops themselves say what they launch: they run on `meta` tensors, with a launcher that notes
each specialisation. So the list can neither miss one nor hold one that nobody uses. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from truegraft.ops.triton import launch

SM_90 = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 232_448  # of one program on compute capability 9.0
MAX_REGISTERS = 65_536  # of one SM


@dataclass(frozen=True)
class Compiled:
    """One specialisation's footprint. shared: bytes a program; registers: each thread."""

    name: str
    options: str
    registers: int
    stack: int
    spills: int
    shared: int
    num_warps: int

    @property
    def fits(self) -> bool:
        """Whether it runs, and keeps every value in registers."""
        threads = self.num_warps * 32
        return (
            self.stack == self.spills == 0
            and self.shared <= MAX_SHARED_BYTES
            and self.registers * threads <= MAX_REGISTERS
        )


class _OfflineDriver:
    """Enough of a Triton driver to specialise and compile for a chip that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextmanager
def _offline(target: GPUTarget) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(_OfflineDriver(target))
    try:
        yield
    finally:
        config._active = before


def compile_launches(
    run: Callable[[], None], target: GPUTarget = SM_90, chosen: Callable[[str], bool] | None = None
) -> list[Compiled]:
    """Compile whatever `run` would launch, each specialisation once; nothing is executed.

    chosen: which of them (by their key, a string), so that several processes can share the work.
    """
    found: dict[str, Compiled | None] = {}

    def launcher(
        kernel: Any,
        grid: launch.Grid,
        args: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
        dependent: bool,
    ) -> None:
        options = dict(num_warps=num_warps, num_stages=num_stages, launch_pdl=dependent)
        key = _key(kernel, args, {**constants, **options})
        if key in found:
            return
        found[key] = None
        if chosen is None or chosen(key):
            kernel_args = (*args,)
            compiled = kernel.warmup(
                *kernel_args, **constants, **options, enable_fp_fusion=False, grid=grid
            )
            found[key] = _footprint(kernel.__name__, {**constants, **options}, compiled)

    with _offline(target), launch.replaced(launcher):
        run()
    return [compiled for compiled in found.values() if compiled is not None]


def _key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """What Triton specialises on, roughly: types, divisibility by 16, ones and constants."""

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"*{value.dtype}"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"i{value == 1:d}{value % 16 == 0:d}{value >= 2**31:d}"
        if hasattr(value, "block_shape"):
            return f"desc{value.base.dtype}{value.block_shape}"
        return "None" if value is None else type(value).__name__

    return " ".join([kernel.__name__, *map(describe, args), str(sorted(constants.items(), key=str))])


def _footprint(name: str, options: dict[str, Any], compiled: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    shown = " ".join(f"{key}={value}" for key, value in options.items())
    return Compiled(
        name, shown, registers, stack, local, compiled.metadata.shared, compiled.metadata.num_warps
    )
