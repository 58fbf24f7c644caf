"""What every benchmark shares: rounds that take turns, and a record of what was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def take_turns(runs: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per second of each run: the median of `rounds`, after one round of warm-up.

    A run returns how many tokens it made. Runs take turns, so that a machine which is slower for
    a while is slower for all of them.
    """
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = run()
            if number:
                rates[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def device() -> str:
    """The processor and the number of threads in use."""
    import torch

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def commit() -> str:
    """The commit that was measured, with a + if the tree differs from it.

    COMMIT names it where the tree was copied without its history.
    """
    if given := os.environ.get("COMMIT"):
        return given
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "src"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def report(name: str, record: dict[str, Any]) -> None:
    """Keep the record under results/ and print it as the last line."""
    record = {
        "benchmark": name,
        "commit": commit(),
        "device": device(),
        "command": " ".join(["scripts/bench", name, *sys.argv[1:]]),
        **record,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
