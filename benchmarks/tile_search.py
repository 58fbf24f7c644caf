"""How the tile table came to be: each linear's tiles, tried in the chain of a whole layer.

A tile that is best alone can be worse in the chain, where the next kernel starts early beside it,
so the search changes one linear at a time and times all of them. Bits do not enter: no tile moves
one (`tests/gpu/kernels/test_linear.py`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _gpu import graph_time
from torch import Tensor

from truegraft.ops.interface import Linear, LinearPart, LoraPages
from truegraft.ops.triton import compile, launch, lora, tiles
from truegraft.ops.triton.linear import linear
from truegraft.ops.triton.tiles import LinearTile

LAYERS, SLOTS = 8, 32
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}
Choice = dict[str, LinearTile]
_TABLE = tiles.linear_tile


def swap(columns: int, rows: int, k: int, warps: int, stages: int, **more: Any) -> LinearTile:
    return LinearTile(True, columns, rows, k, warps, stages, **more)


def normal(columns: int, rows: int, k: int, warps: int, stages: int, **more: Any) -> LinearTile:
    return LinearTile(False, columns, rows, k, warps, stages, **more)


def shapes(name: str, height: int) -> list[LinearTile]:
    """Tiles worth trying for decode."""
    h = height
    if h == 16:
        return {
            "qkv": [swap(64, h, 128, 4, 6), swap(64, h, 128, 4, 5)],
            "o": [swap(64, h, 128, 4, 6), normal(32, h, 256, 4, 6), normal(32, h, 256, 4, 5)],
            "gate_up": [swap(64, h, 128, 4, 5), swap(128, h, 128, 4, 4)],
            "down": [normal(32, h, 256, 4, 6), normal(32, h, 512, 4, 3)],
        }[name]
    return {
        "qkv": [swap(64, h, 128, 4, 5), swap(64, h, 128, 4, 4), swap(64, h, 128, 8, 4)],
        "o": [normal(32, h, 256, 4, 4), normal(32, h, 128, 4, 5), normal(32, h, 128, 4, 6)],
        "gate_up": [swap(128, h, 128, 8, 4), swap(128, h, 64, 8, 5), swap(128, h, 128, 8, 3)],
        "down": [normal(32, h, 256, 4, 4), normal(32, h, 128, 4, 5), normal(32, h, 128, 4, 6)],
    }[name]


JOINS: list[dict[str, Any]] = [
    dict(group=group, ahead=ahead, depth=depth, fetch=fetch)
    for group, ahead, depth, fetch in (
        (1, True, 1, False),
        (2, True, 1, False),
        (4, True, 1, False),
        (8, True, 1, False),
        (8, True, 1, True),
        (8, True, 3, False),
        (4, True, 3, True),
        (8, False, 3, True),
        (4, False, 3, True),
        (8, False, 1, True),
    )
]


PREFILL_ROWS = (128, 256, 1024, 4096)


def prefill_shapes(count: int) -> list[LinearTile]:
    more: dict[str, Any] = dict(group=2, ahead=False, spin=False)
    return [
        normal(128, 128, 64, 8, 3, **more),
        normal(128, 128, 64, 8, 4, **more),
        normal(128, 128, 128, 8, 3, **more),
        swap(128, 128, 64, 8, 4, **more),
        swap(64, 128, 128, 4, 4, **more),
        normal(64, 128, 128, 8, 4, **more),
        normal(256, 128, 64, 8, 3, **more),
        normal(256, 128, 64, 8, 4, **more),
    ]


class Chain:
    """Layers of linears with their own weights and adapters, on any device."""

    def __init__(self, device: torch.device, layers: int = LAYERS) -> None:
        self.device = device
        self.signals = lora.Signals(device)
        self.depth = torch.ones(SLOTS, dtype=torch.int32, device=device)
        self.layers = [{name: self._linear(*SIZES[name]) for name in SIZES} for _ in range(layers)]

    def _linear(self, sizes: tuple[int, ...], k: int) -> Linear:
        parts, offset = [], 0
        for size in sizes:
            a, b = self._randn(SLOTS, 16, k), self._randn(SLOTS, size, 16)
            table = torch.arange(SLOTS, dtype=torch.int32, device=self.device)[:, None].contiguous()
            scale = torch.ones(SLOTS, device=self.device)
            held = torch.full((SLOTS,), 16, dtype=torch.int32, device=self.device)
            parts.append(
                LinearPart(offset, size, LoraPages(a, b.transpose(1, 2), table, held, scale))
            )
            offset += size
        return Linear(self._randn(offset, k), None, tuple(parts))

    def _randn(self, *shape: int) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return (torch.randn(shape, device=self.device) * 0.02).bfloat16()

    def slots(self, count: int, adapters: int) -> Tensor:
        """Rows spread over some adapters; 0: all base."""
        slots = [-1] * count
        if adapters:
            ids = random.Random(0).sample(range(SLOTS), adapters)
            slots = [ids[row % adapters] for row in range(count)]
        return torch.tensor(slots, dtype=torch.int32).to(self.device)

    def plan(self, slots: Tensor, adapters: int | None) -> lora.AdapterRows:
        depth = None if adapters is None else self.depth
        ordinals = 0 if adapters is None else 1
        return lora.plan_rows(slots, depth, ordinals, self.signals, adapters or 0)

    def run(self, xs: Mapping[str, Tensor], slots: Tensor, adapters: int | None) -> None:
        rows = self.plan(slots, adapters)
        for layer in self.layers:
            for name, held in layer.items():
                linear(xs[name], held, rows, self.signals)

    def inputs(self, count: int) -> dict[str, Tensor]:
        return {name: self._randn(count, k) for name, (_, k) in SIZES.items()}


def use(choice: Choice) -> None:
    """Make `tiles.linear_tile` answer with these."""
    by_shape = {(sum(sizes), k): choice[name] for name, (sizes, k) in SIZES.items()}
    setattr(tiles, "linear_tile", lambda n, k, *_: by_shape[n, k])  # noqa: B010


def layer_time(run: Callable[[], None], repeats: int = 9) -> float:
    """Median µs a layer."""
    return graph_time(run, LAYERS, repeats)


# (rows, adapters of each timing, rank pages an adapter)
CASES: list[tuple[int, tuple[int, ...]]] = [(1, (1,)), (8, (1, 8)), (64, (0, 1, 8)), (64, (32,))]


def starts(count: int, load: tiles.Load) -> Choice:
    return {
        name: _TABLE(sum(sizes), k, torch.bfloat16, count, load)
        for name, (sizes, k) in SIZES.items()
    }


def options(name: str, tile: LinearTile) -> list[LinearTile]:
    """Changes of one tile: its shape, its trigger, how adapters join, how many shrink programs."""
    joined: dict[str, Any] = dict(
        group=tile.group, ahead=tile.ahead, depth=tile.depth, fetch=tile.fetch
    )
    of_shape = [
        replace(shape, early=early, programs=tile.programs, **joined)
        for shape in shapes(name, tile.rows)
        for early in (True, False)
    ]
    return [
        *of_shape,
        *(replace(tile, **join) for join in JOINS),
        *(replace(tile, programs=programs) for programs in (132, 264, 528)),
    ]


def every_choice() -> list[tuple[int, Choice]]:
    """All tiles that the search may time."""
    found = []
    for count in (8, 64):
        start = starts(count, "few")
        for name in SIZES:
            for shape in shapes(name, start[name].rows):
                for early, join in product((True, False), JOINS):
                    found.append((count, {**start, name: replace(shape, early=early, **join)}))
    return found


def warm(number: int, of: int) -> None:
    """Compile this worker's share of the kernels; those that cannot be are left out."""
    chain = Chain(torch.device("meta"), layers=1)
    seen: set[str] = set()

    def launcher(
        kernel: Any,
        grid: launch.Grid,
        args: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
        dependent: bool,
    ) -> None:
        for dependence in {dependent, constants.get("ORDINALS", 1) > 0 and dependent}:
            options = dict(num_warps=num_warps, num_stages=num_stages, launch_pdl=dependence)
            key = compile._key(kernel, args, {**constants, **options})
            if key in seen:
                continue
            seen.add(key)
            if zlib.crc32(key.encode()) % of == number:
                try:
                    kernel.warmup(*args, **constants, **options, enable_fp_fusion=False, grid=grid)
                except Exception as error:
                    print("cannot compile", key[-200:], str(error)[:100], flush=True)

    with compile._offline(compile.SM_90), launch.replaced(launcher):
        for count, choice in every_choice():
            use(choice)
            for adapters in (None, 1):
                chain.run(chain.inputs(count), chain.slots(count, adapters or 0), adapters)
        for count in PREFILL_ROWS:
            for tile, adapters in product(prefill_shapes(count), (None, 8)):
                use({other: tile for other in SIZES})
                chain.run(chain.inputs(count), chain.slots(count, adapters or 0), adapters)


def search(chain: Chain, log: Any, deadline: float) -> None:
    for count, adapter_counts in CASES:
        load: tiles.Load = "many" if max(adapter_counts) > tiles.MANY else "few"
        xs = chain.inputs(count)
        slots = {adapters: chain.slots(count, adapters) for adapters in (0, *adapter_counts)}
        start = starts(count, load)

        def time_of(
            choice: Choice, adapters: int | None, xs: Any = xs, slots: Any = slots
        ) -> float:
            use(choice)
            return layer_time(lambda: chain.run(xs, slots[adapters or 0], adapters), 7)

        with launch.replaced(launch.serial):
            plain = min(time_of(start, None) for _ in range(3))
        print(f"{count} rows: base {plain:.1f}, dependent {time_of(start, None):.1f}", flush=True)

        def cost(choice: Choice, of: Any = time_of, wanted: Any = adapter_counts) -> list[float]:
            return [of(choice, adapters) for adapters in wanted]

        best, value = start, sum(cost(start))
        for _, name in product(range(2), ("gate_up", "down", "qkv", "o")):
            for option in options(name, best[name]):
                if option == best[name] or time.time() > deadline:
                    continue
                choice = {**best, name: option}
                try:
                    times = cost(choice)
                except Exception as error:
                    print("no", name, option, str(error)[:80], file=log, flush=True)
                    continue
                record = [count, adapter_counts, name, asdict(option), times]
                print(json.dumps(record), file=log, flush=True)
                if sum(times) < value - 0.15 * len(times):
                    value, best = sum(times), choice
        for name, tile in best.items():
            print("   ", name, tile, flush=True)
        for label, choice in (("table", start), ("best", best)):
            times = [
                sorted(cost(choice)[i] for _ in range(3))[1] for i in range(len(adapter_counts))
            ]
            shown = {
                adapters: f"{value:.1f} {100 * (value / plain - 1):+.1f}%"
                for adapters, value in zip(adapter_counts, times, strict=True)
            }
            print(count, label, shown, flush=True)


def search_prefill(chain: Chain, deadline: float) -> None:
    """Each linear alone, over its own weights in every layer; cuBLAS beside it."""
    for count, name in product(PREFILL_ROWS, SIZES):
        sizes, k = SIZES[name]
        n, x = sum(sizes), chain.inputs(count)[name]
        held = [layer[name] for layer in chain.layers]
        slots = {None: chain.slots(count, 0), 8: chain.slots(count, 8).sort().values}

        def blas(x: Tensor = x, held: Any = held) -> None:
            for one in held:
                torch.nn.functional.linear(x, one.weight)

        def ours(adapters: int | None, x: Tensor = x, held: Any = held, slots: Any = slots) -> None:
            rows = chain.plan(slots[adapters], adapters)
            for one in held:
                linear(x, one, rows, chain.signals)

        found: list[tuple[float, float, LinearTile]] = []
        for tile in prefill_shapes(count):
            if time.time() > deadline:
                return
            use({other: tile for other in SIZES})
            try:
                base, adapted = (layer_time(partial(ours, a), 5) for a in (None, 8))
            except Exception as error:
                print("no", name, tile, str(error)[:80])
                continue
            found.append((base, adapted, tile))
        reference, scale = layer_time(blas, 5), 2 * count * n * k / 1e6
        print(f"{name} {count} rows: cuBLAS {reference:.1f} us {scale / reference:.0f} TFLOP/s")
        for base, adapted, tile in sorted(found, key=lambda item: item[0])[:4]:
            print(
                f"    {base:.1f} us {reference / base:.3f}x,"
                f" LoRA {100 * (adapted / base - 1):+.1f}% {'swap' if tile.swap else 'normal'}",
                f"{tile.columns}x{tile.rows}x{tile.k} {tile.warps}w s{tile.stages}",
                flush=True,
            )


def main() -> None:
    if sys.argv[1:2] == ["warm"]:
        warm(int(sys.argv[2]), int(sys.argv[3]))
        return
    out = Path(os.environ.get("OUT", "benchmarks/results"))
    begun, workers = time.time(), os.cpu_count() or 1
    jobs = [
        subprocess.Popen([sys.executable, __file__, "warm", str(i), str(workers)])
        for i in range(workers)
    ]
    chain = Chain(torch.device("cuda"))
    for job in jobs:
        job.wait()
    print("compiled", round(time.time() - begun), "s", flush=True)
    with (out / "tile_search.jsonl").open("w") as log:
        deadline = begun + float(os.environ.get("SECONDS_LEFT", "400"))
        if "prefill" in sys.argv:
            search_prefill(chain, deadline)
        if "decode" in sys.argv:
            search(chain, log, deadline)


if __name__ == "__main__":
    main()
