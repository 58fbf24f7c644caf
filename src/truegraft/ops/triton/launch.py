"""How every kernel of this back end is launched: the only place that calls Triton's launcher.

Products and sums are never contracted behind our back (`enable_fp_fusion=False`; what is to be
fused says `tl.fma`), every kernel may start while the one before it drains (programmatic dependent
launch), and every kernel asks for the same shared-memory carve-out, because two kernels that want
different ones cannot share an SM. Knows nothing about what a kernel computes.

The order that a kernel must keep, since its predecessor may still be running:

1. `release_dependents()`: where the next kernel may be let in (it waits for us by itself);
2. read only what has settled: weights, adapter pages and tables, which no kernel of a step writes,
   and the lists of `settles` launches; past the L1 (`.cg`, or after an acquiring load), which may
   hold what was there before;
3. `wait_for_inputs()`, always and in every program, also where there is nothing to do: the kernel
   after the next one relies on the completions being transitive;
4. read and write everything else.

What a kernel wrote is sure to be seen only after `wait_for_inputs`, also by a kernel that starts
after it has ended. A launch that `settles` is followed by one without overlap, and then by kernels
that may read its results before they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def _nothing():
    """The interpreter runs one kernel at a time: nothing to wait for, nothing to release."""
    tl.static_assert(True)


if INTERPRETED:
    wait_for_inputs = release_dependents = _nothing
else:
    wait_for_inputs, release_dependents = gdc_wait, gdc_launch_dependents

__all__ = [
    "INTERPRETED",
    "capture_id",
    "check_not_captured",
    "launch",
    "observed",
    "release_dependents",
    "replaced",
    "serial",
    "wait_for_inputs",
]

Grid = tuple[int, ...]
Launcher = Callable[..., None]

CARVEOUT = 100  # percent of the L1 that is asked for as shared memory

_settling = False  # whether the last launch must have ended, and be seen, before the next begins
_observers: list[Callable[[str], None]] = []
_carved: set[int] = set()


def launch(
    kernel: Any,
    grid: Grid,
    *args: Any,
    num_warps: int,
    num_stages: int = 1,
    dependent: bool = True,
    settles: bool = False,
    **constants: Any,
) -> None:
    """Run `kernel[grid](*args, **constants)` on the current stream.

    dependent: let it start while its predecessor drains; it then must call `wait_for_inputs`.
    settles: kernels after it may read its results before they wait.
    """
    global _settling
    dependent, _settling = dependent and not _settling, settles
    for observer in _observers:
        observer(kernel.__name__)
    _launcher(kernel, grid, args, constants, num_warps, num_stages, dependent)


def _run(
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    dependent: bool,
) -> None:
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    compiled = kernel[grid](
        *args,
        **constants,
        num_warps=num_warps,
        num_stages=num_stages,
        launch_pdl=dependent,
        enable_fp_fusion=False,
    )
    if compiled.function not in _carved:
        _carve(compiled.function)


def _carve(function: int) -> None:
    """Set the carve-out of a loaded kernel; it holds from its next launch on."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (error,) = driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, CARVEOUT)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    _carved.add(function)


_launcher: Launcher = _run


@contextmanager
def observed(observer: Callable[[str], None]) -> Iterator[None]:
    """Call `observer` with the name of every kernel launched inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def replaced(launcher: Launcher) -> Iterator[None]:
    """Give every launch inside to `launcher` instead: to compile only, or to change how it runs.

    It receives (kernel, grid, args, constants, num_warps, num_stages, dependent).
    """
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


def serial(
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    dependent: bool,
) -> None:
    """A launcher for `replaced`: no kernel starts before the one before it has ended."""
    _run(kernel, grid, args, constants, num_warps, num_stages, False)


def capture_id(device: torch.device) -> int:
    """Which CUDA graph the current stream is being captured into; 0: none."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return int(number)


def check_not_captured(device: torch.device) -> None:
    """Assert that what comes from the host now is not put into a graph, which would keep it."""
    assert capture_id(device) == 0, "a graph must not hold one batch's content: give device tensors"
