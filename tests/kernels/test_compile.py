"""Every production kernel compiles for the H200, and fits: no spill, no stack, no excess memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from truegraft.ops.triton import production
from truegraft.ops.triton.compile import (
    MAX_SHARED_BYTES,
    Compiled,
    compile_in_workers,
    compile_launches,
)

WORKERS = 2
# Kernels by the beginning of their names, and how many specialisations there are at least.
FAMILIES = {
    "linear_base": 10,
    "linear_lora": 10,
    "lora_plan": 3,
    "lora_shrink": 3,
    "embed_base": 3,
    "embed_lora": 3,
    "add_norm": 8,
    "silu_mul": 3,
    "rope_write": 4,
    "plan_tiles": 1,
    "attend": 8,
    "fold": 4,
    "mark": 2,
    "count": 2,
    "penalise": 2,
    "adjust": 2,
    "edit": 2,
    "group": 2,
    "bound": 2,
    "gather": 2,
    "cut": 2,
    "draw": 4,
    "choose": 1,
    "exp_sum": 2,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_in_workers(tuple(production.MODELS), WORKERS)


def test_every_kernel_keeps_its_values_in_registers(compiled: list[Compiled]) -> None:
    spilled = [item for item in compiled if item.stack or item.spills]
    assert not spilled, "\n".join(map(str, spilled))


def test_every_kernel_can_run_on_the_chip(compiled: list[Compiled]) -> None:
    large = [item for item in compiled if not item.fits]
    assert not large, "\n".join(map(str, large))


def test_every_family_is_there(compiled: list[Compiled]) -> None:
    names = Counter(item.name for item in compiled)
    for family, least in FAMILIES.items():
        count = sum(count for name, count in names.items() if name.startswith(family))
        assert count >= least, f"{family}: {count} kernels of {dict(names)}"


def test_the_list_overlaps_kernels_as_a_step_does(compiled: list[Compiled]) -> None:
    # A plan is followed by an embed or by the norm of chosen rows, which therefore do not overlap.
    for name, ways in {
        "embed_base": {True, False},
        "embed_lora": {True, False},
        "add_norm_kernel": {True, False},
        "rope_write_kernel": {True},
        "attend_kernel": {True},
        "fold_kernel": {True},
        "linear_lora": {True},
    }.items():
        found = {"launch_pdl=True" in item.options for item in compiled if item.name == name}
        assert found == ways, name


def test_no_specialisation_is_compiled_twice(compiled: list[Compiled]) -> None:
    # Equal options and names may differ in alignments alone, but never many times.
    same = Counter((item.name, item.options) for item in compiled)
    assert max(same.values()) <= 16, same.most_common(3)


def test_a_kernel_that_spills_or_is_too_large_does_not_fit() -> None:
    fine = Compiled("k", "", 128, 0, 0, 1024, 4)
    assert fine.fits
    for name, stack, spills, shared, registers in (
        ("stack", 8, 0, 0, 128),
        ("spills", 0, 8, 0, 128),
        ("shared", 0, 0, MAX_SHARED_BYTES + 1, 128),
        ("registers", 0, 0, 0, 255),
    ):
        assert not Compiled(name, "", registers, stack, spills, shared, 16).fits, name


# Run in a process of its own: here every kernel is interpreted.
_KERNELS = """
import json, sys, torch, triton, triton.language as tl
from dataclasses import asdict
from truegraft.ops.triton.compile import compile_launches
from truegraft.ops.triton.launch import launch, wait_for_inputs

@triton.jit
def held(x, y, SIZE: tl.constexpr):
    wait_for_inputs()
    lane = tl.arange(0, SIZE)
    value = tl.load(x + lane)
    tl.store(y + lane, value / tl.sum(value, 0))

@triton.jit
def scaled(x, y, count):
    wait_for_inputs()
    lane = tl.arange(0, 16)
    tl.store(y + lane, tl.load(x + lane) * 2.0 + 1.0, mask=lane < count)

x = torch.empty(1 << 16, dtype=torch.float32, device="meta")
def run():
    for size in (64, 16384, 64):
        launch(held, (1,), x, x, SIZE=size, num_warps=1)
    for count in (1, 5, 16, 5):
        launch(scaled, (1,), x, x, count, num_warps=1)
    launch(scaled, (1,), x[1:], x, 5, num_warps=1)
    launch(scaled, (1,), x, x, 5, num_warps=1, dependent=False)
json.dump([asdict(item) for item in compile_launches(run)], sys.stdout)
"""


def test_a_spill_is_seen_and_each_specialisation_is_compiled_once(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"  # Triton reads a kernel's source from its file
    file.write_text(_KERNELS)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large, *scaled = (Compiled(**item) for item in json.loads(done.stdout))
    assert small.fits and not large.fits and large.stack + large.spills > 0
    # count 1, 5 and 16; a pointer that is not aligned; and not dependent
    assert len(scaled) == 5 and all(item.fits for item in scaled)


def test_an_interpreted_process_cannot_claim_to_have_compiled() -> None:
    with pytest.raises(AssertionError, match="TRITON_INTERPRET"):
        compile_launches(lambda: None)


def test_a_worker_that_fails_fails_the_run() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compile_in_workers(("no-such-model",), 1)
