"""No op writes outside its memory, each writes all of its outputs, and bad slots harm only rows.

Red zones see writes; compute-sanitizer, where the machine lets it run, sees reads as well.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import guarded_ops
import pytest
import torch
from guarded_ops import NUM_SLOTS, Lab
from kernel_cases import same_bits
from torch import Tensor

from truegraft.errors import ConfigError
from truegraft.ops.interface import Embedding, Linear, LinearPart, RowPlan

GPU = torch.device("cuda")
CASES = guarded_ops.cases(tiny=False)
TINY = guarded_ops.cases(tiny=True)
SANITIZED = "TRUEGRAFT_UNDER_SANITIZER"


@pytest.mark.parametrize("name", CASES)
def test_an_op_stays_inside_its_memory(name: str) -> None:
    guarded_ops.run(CASES[name], torch.bfloat16, GPU)


@pytest.mark.parametrize("name", TINY)
def test_a_float32_op_stays_inside_its_memory(name: str) -> None:
    guarded_ops.run(TINY[name], torch.float32, GPU)


def test_a_slot_on_the_host_that_does_not_exist_is_refused_by_name() -> None:
    ops = Lab(torch.bfloat16, GPU).ops
    depth = torch.ones(NUM_SLOTS, dtype=torch.int32, device=GPU)
    for slot in (NUM_SLOTS, -2):
        slots = torch.tensor([0, -1, slot], dtype=torch.int32)
        with pytest.raises(ConfigError, match=rf"row 2 .*slot {slot}\b.*\b{NUM_SLOTS - 1}\b"):
            ops.plan_rows(slots, depth)


@pytest.mark.parametrize("bad", [NUM_SLOTS, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("kind", ["linear", "embed"])
def test_a_slot_on_the_device_that_does_not_exist_spoils_its_row_alone(kind: str, bad: int) -> None:
    lab = Lab(torch.bfloat16, GPU)
    compute = _linear(lab) if kind == "linear" else _embed(lab)
    depth = lab.given((2, 1, 0), torch.int32)
    slots = lab.slots(20)
    right = compute(lab.ops.plan_rows(slots, depth))
    wrong = slots.clone()
    wrong[7] = bad
    result = compute(lab.ops.plan_rows(wrong, depth))
    torch.cuda.synchronize()
    lab.guard.check()
    assert result[7].isnan().all()
    others = torch.arange(20, device=GPU) != 7
    assert same_bits(result[others], right[others]) and not right.isnan().any()


def _linear(lab: Lab) -> Callable[[RowPlan], Tensor]:
    weight = lab.ops.pack(lab.randn(96, 64))
    layer = Linear(weight, None, (LinearPart(0, 96, lab.pages(64, 96)),))
    x = lab.randn(20, 64)
    return lambda plan: lab.ops.linear(x, layer, plan)


def _embed(lab: Lab) -> Callable[[RowPlan], Tensor]:
    embedding = Embedding(lab.randn(50, 64), lab.pages(50, 64))
    ids = lab.given(torch.arange(20))
    return lambda plan: lab.ops.embed(ids, embedding, plan)


@pytest.mark.skipif(SANITIZED in os.environ, reason="this is the sanitized run itself")
def test_no_op_reads_outside_its_memory(record_property: Callable[[str, object], None]) -> None:
    """The bfloat16 cases above under memcheck, in a process of their own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    record_property("kernel", platform.release())
    if not Path(tool).exists():
        pytest.skip(f"no compute-sanitizer on this machine ({_runtime()}): red zones alone")
    options = ["--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    check = [tool, *options]
    probe = "import torch; print(float(torch.ones(8, device='cuda').sum()))"
    tried = _output([*check, sys.executable, "-c", probe])
    if "ERROR SUMMARY: 0 errors" not in tried or "8.0" not in tried:
        last = tried.strip().splitlines()[-1:]
        pytest.skip(f"compute-sanitizer does not work here ({_runtime()}): {last}: red zones alone")
    off = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    tests = [__file__, "-q", "-k", "an_op_stays_inside", *off]
    output = _output([*check, sys.executable, "-m", "pytest", *tests])
    assert "ERROR SUMMARY: 0 errors" in output and " passed" in output, output[-4000:]


def _output(command: list[str]) -> str:
    # Without the caching allocator every tensor is an allocation with an end that memcheck knows.
    env = {**os.environ, SANITIZED: "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as error:
        return f"took over {error.timeout} s"
    return done.stdout + done.stderr


def _runtime() -> str:
    version = Path("/proc/version")
    text = version.read_text() if version.exists() else platform.platform()
    return "gVisor" if "gvisor" in text.lower() or "4.4.0" in text else text.split("(")[0].strip()
