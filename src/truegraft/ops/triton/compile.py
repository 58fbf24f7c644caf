"""Compile kernels without running them: which ones a model needs, and what each costs on the chip.

The ops themselves say what they launch: they run on `meta` tensors, with a launcher that notes
each specialisation. So the list can neither miss one nor hold one that nobody uses. Needs no GPU.

    python -m truegraft.ops.triton.compile --workers 2 --json footprints.json
    python -m truegraft.ops.triton.compile --workers 14 --warm      (fills Triton's cache only)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
    run: Callable[[], None],
    target: GPUTarget = SM_90,
    chosen: Callable[[str], bool] | None = None,
    measure: bool = True,
) -> list[Compiled]:
    """Compile whatever `run` would launch, each specialisation once; nothing is executed.

    chosen: which of them (by their key, a string), so that several processes can share the work.
    measure: read each one's footprint; without it the answer is empty, and Triton's cache is full.
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
        options = _options(num_warps, num_stages, dependent)
        key = _key(kernel, args, {**constants, **options})
        if key in found:
            return
        found[key] = None
        if chosen is None or chosen(key):
            try:
                compiled = kernel.warmup(*args, **constants, **options, grid=grid)
            except Exception as error:
                error.add_note(f"while compiling {key}")
                raise
            if measure:
                found[key] = _footprint({**constants, **options}, compiled)

    assert not launch.INTERPRETED, "TRITON_INTERPRET is set: there is nothing to compile"
    with _offline(target), launch.replaced(launcher):
        run()
    return [compiled for compiled in found.values() if compiled is not None]


def _options(num_warps: int, num_stages: int, dependent: bool) -> dict[str, Any]:
    """The options of `launch`: they are part of the key under which Triton caches a kernel."""
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "launch_pdl": dependent,
        "enable_fp_fusion": False,
    }


def _key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """What Triton specialises on: types, alignments, ones, constants and options, by its own word.

    The device number only names a table of this process: the offline driver has one device.
    """
    bind = kernel.device_caches[0][-1]
    _, specialization, options = bind(*args, **constants, debug=False)
    return f"{kernel.__module__}.{kernel.__name__} {specialization} {options}"


def _footprint(options: dict[str, Any], compiled: Any) -> Compiled:
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
    metadata = compiled.metadata  # its name tells kernels of one function apart: `repr=`
    return Compiled(
        metadata.name, shown, registers, stack, local, metadata.shared, metadata.num_warps
    )


# ------------------------------------------------------------------ production, in parallel


def compile_models(
    names: Iterable[str], share: tuple[int, int] = (0, 1), measure: bool = True
) -> list[Compiled]:
    """Compile share (number, of) of the kernels that these models of `production.MODELS` need."""
    from truegraft.ops.triton import production
    from truegraft.ops.triton.ops import TritonOps

    number, of = share
    meta = torch.device("meta")

    def run() -> None:
        for name in names:
            for model in production.each_ordinals(production.MODELS[name]):
                production.drive(TritonOps(model.dtype, meta), model, meta)

    return compile_launches(
        run, chosen=lambda key: zlib.crc32(key.encode()) % of == number, measure=measure
    )


def compile_in_workers(names: Sequence[str], workers: int, measure: bool = True) -> list[Compiled]:
    """`compile_models` by several processes. Raises CalledProcessError where one fails."""
    module = [sys.executable, "-m", "truegraft.ops.triton.compile", "--models", ",".join(names)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(workers)]
        commands = [
            [*module, "--share", f"{number}/{workers}", "--json", str(file)]
            + ([] if measure else ["--warm"])
            for number, file in enumerate(files)
        ]
        jobs = [subprocess.Popen(command, env=env) for command in commands]
        for job, command in zip(jobs, commands, strict=True):
            if job.wait():
                for other in jobs:
                    other.kill()
                raise subprocess.CalledProcessError(job.returncode, command)
        return [Compiled(**item) for file in files for item in json.loads(file.read_text())]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line above; prints how many kernels there are, and each that does not fit."""
    from truegraft.ops.triton import production

    parser = argparse.ArgumentParser(prog="python -m truegraft.ops.triton.compile")
    parser.add_argument("--models", default=",".join(production.MODELS), help="a,b,…; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--share", help="number/of: compile this share, in this process")
    parser.add_argument("--warm", action="store_true", help="fill Triton's cache, measure nothing")
    parser.add_argument("--json", type=Path, help="write footprints here")
    args = parser.parse_args(argv)
    names = args.models.split(",")
    if unknown := set(names) - set(production.MODELS):
        parser.error(f"no model {sorted(unknown)}; there are: {', '.join(production.MODELS)}")
    if args.share:
        number, of = map(int, args.share.split("/"))
        found = compile_models(names, (number, of), not args.warm)
    else:
        found = compile_in_workers(names, args.workers, not args.warm)
    if args.json:
        args.json.write_text(json.dumps([asdict(item) for item in found]))
    if not args.share:
        lines = [f"{len(found)} kernels" if found else "the kernel cache is warm"]
        lines += [f"does not fit: {item}" for item in found if not item.fits]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
