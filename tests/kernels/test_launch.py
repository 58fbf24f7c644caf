"""How kernels are launched and given memory, and that the guards of both can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from guard import Guard, unwritten
from torch import Tensor

from truegraft.ops.triton import launch, memory
from truegraft.ops.triton.ops import TritonOps

CPU = torch.device("cpu")


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x, y, count, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    launch.release_dependents()
    launch.wait_for_inputs()
    lane = tl.arange(0, BLOCK)
    tl.store(y + lane + shift, tl.load(x + lane, mask=lane < count), mask=lane < count)


def _copied(x: Tensor, shift: int = 0) -> Tensor:
    y = memory.empty(len(x), dtype=x.dtype, device=x.device)
    launch.launch(_copy, (1,), x, y, len(x), shift, BLOCK=16, num_warps=1)
    return y


def test_this_lane_is_interpreted() -> None:
    assert launch.INTERPRETED and os.environ["TRITON_INTERPRET"] == "1"


def test_a_process_that_imported_triton_before_is_refused() -> None:
    here = Path(__file__).parent
    code = f"import triton.language, runpy; runpy.run_path({str(here / 'conftest.py')!r})"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "Triton was imported before" in done.stderr


def test_a_launch_runs_the_kernel() -> None:
    x = torch.arange(13.0)
    assert torch.equal(_copied(x), x)


def test_observers_see_names_only_while_they_watch() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with launch.observed(outer.append):
        _copied(torch.ones(3))
        with launch.observed(inner.append):
            _copied(torch.ones(3))
    _copied(torch.ones(3))
    assert outer == ["_copy", "_copy"] and inner == ["_copy"]


def test_a_replaced_launcher_gets_everything_and_runs_nothing() -> None:
    seen: list[Any] = []
    with launch.replaced(lambda *args: seen.append(args)):
        y = _copied(torch.ones(3))
    ((kernel, grid, args, constants, num_warps, num_stages, dependent),) = seen
    assert kernel is _copy and grid == (1,) and args[1] is y and args[2:] == (3, 0)
    assert (constants, num_warps, num_stages, dependent) == ({"BLOCK": 16}, 1, 1, True)
    assert torch.equal(_copied(torch.ones(3)), torch.ones(3))


def test_the_launch_after_one_that_settles_does_not_overlap() -> None:
    overlaps: list[bool] = []

    def note(*args: Any) -> None:
        overlaps.append(args[-1])

    x = torch.zeros(4)
    with launch.replaced(note):
        for settles in (False, True, False, False):
            launch.launch(_copy, (1,), x, x, 4, 0, BLOCK=16, num_warps=1, settles=settles)
    assert overlaps == [True, True, False, True]


def test_what_comes_from_the_host_is_not_put_into_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph would keep one batch's slots, or one batch's sampling, for every replay."""
    ops = TritonOps(torch.float32, CPU)
    slots, logits = torch.full((2,), -1, dtype=torch.int32), torch.zeros(2, 8)
    ops.plan_rows(slots)
    ops.sample(logits, [None, None])
    monkeypatch.setattr(launch, "capture_id", lambda device: 7)
    with pytest.raises(AssertionError, match="must not hold one batch's content"):
        ops.plan_rows(slots)
    with pytest.raises(AssertionError, match="must not hold one batch's content"):
        ops.sample(logits, [None, None])


def test_a_launcher_is_put_back_after_an_error() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError), launch.replaced(refuse):
        _copied(torch.ones(3))
    assert torch.equal(_copied(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_a_guard_lets_right_kernels_pass(dtype: torch.dtype) -> None:
    guard = Guard()
    x = guard.place(torch.arange(13).to(dtype))
    with memory.allocator(guard):
        y = _copied(x)
    guard.check()
    assert torch.equal(x, y) and not unwritten(y) and y.data_ptr() % 512 == 0


@pytest.mark.parametrize(("shift", "side"), [(1, "after"), (-1, "before")])
@pytest.mark.parametrize("value", [1.0, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_write_one_element_too_far_is_caught(
    shift: int, side: str, value: float, dtype: torch.dtype
) -> None:
    guard = Guard()
    with memory.allocator(guard):
        _copied(torch.full((13,), value, dtype=dtype), shift)
    with pytest.raises(AssertionError, match=f"bytes {side} a tensor {dtype}"):
        guard.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_read_one_element_too_far_meets_a_nan(dtype: torch.dtype) -> None:
    x = Guard().place(torch.ones(13, dtype=dtype))
    assert _copied(x.as_strided((14,), (1,)))[13].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.int64])
def test_what_nobody_wrote_shows(dtype: torch.dtype) -> None:
    fresh = Guard()((4, 5), dtype, CPU)
    fresh[:3] = 1
    assert unwritten(fresh) and not unwritten(fresh[:3])


def test_a_guard_that_guarded_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="guarded nothing"):
        Guard().check()


def test_placed_tensors_keep_values_and_strides() -> None:
    x = torch.randn(3, 4, 5).transpose(1, 2)
    placed = Guard().place(x)
    assert torch.equal(placed, x) and placed.stride() == x.stride()
