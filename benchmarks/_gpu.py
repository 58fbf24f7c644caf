"""What GPU benchmarks share: graph replays, floors, errors, and a record that grows by sections."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, commit
from torch import Tensor

GPU = torch.device("cuda")
BANDWIDTH = 4.3e12  # bytes a second that an H200 reaches
FLOPS = 750e12  # bfloat16, likewise
ROTATED = 400e6  # bytes that a timed graph reads at least, so that its L2 (50 MB) cannot help
REPEATS = 11

Row = dict[str, Any]


def graph_time(run: Callable[[], Any], calls: int, repeats: int = REPEATS) -> float:
    """µs a call, the median of replays of one graph in which `run` makes `calls` calls."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = (_event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    del kept
    return statistics.median(times[2:]) / calls * 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copies(size: int, least: int = 4, most: int = 64) -> int:
    """How many sets of `size` bytes a graph rotates over."""
    return max(least, min(most, int(-(-ROTATED // size))))


def floor(size: float, flops: float = 0.0) -> float:
    """µs that moving `size` bytes or doing `flops` takes at least."""
    return max(size / BANDWIDTH, flops / FLOPS) * 1e6


def error(y: Tensor, exact: Tensor) -> float:
    """‖y - exact‖ / ‖exact‖."""
    return float((y.double() - exact.double()).norm() / exact.double().norm())


def check(what: str, y: Tensor, exact: Tensor, bound: float) -> float:
    """The error of y; stops the benchmark where it is above the bound, or NaN."""
    found = error(y, exact)
    if not found <= bound:
        raise SystemExit(f"{what}: error {found:.2e}, above {bound:.1e}: what is timed is wrong")
    return found


def table(title: str, rows: Sequence[Row]) -> None:
    """Print rows of equal keys as a table."""
    print(f"\n{title}", flush=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in (names, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    sys.stdout.flush()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
    return str(value)


def record(name: str, section: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Merge one section into the record under $OUT, or else under results/."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-h200.json"
    committed = RESULTS / file.name
    source = file if file.exists() else committed
    held: dict[str, Any] = {"benchmark": name}
    if source.exists():
        held = json.loads(source.read_text())
    held.setdefault("sections", {})[section] = {
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(["scripts/bench", name, *sys.argv[1:]]),
        "rows": list(rows),
    }
    file.write_text(json.dumps(held, indent=1) + "\n")
    return held
