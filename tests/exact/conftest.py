"""Labs and runs that the whole lane shares: a run is made once and judged cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from exact.lab import Lab, Run
from exact.zoo import make_lab

from truegraft.ops import prove
from truegraft.ops.prove import Shapes
from truegraft.ops.reference import ReferenceOps, Tiles

MakeOps = Callable[[torch.dtype, Tiles], ReferenceOps]


@pytest.fixture(scope="session", autouse=True)
def _prove_once() -> Iterator[None]:
    """Prove the ops of one model and dtype once, not in each of a hundred engines.

    It also lets the mutations of ops get past the proof at load, which would refuse them.
    """
    proved: dict[object, Tiles] = {}

    def choose_tiles(shapes: Shapes, dtype: torch.dtype, make: MakeOps) -> Tiles:
        key = (shapes, dtype, type(make(dtype, Tiles())))
        if key not in proved:
            proved[key] = prove.choose_tiles(shapes, dtype, make)
        return proved[key]

    with mock.patch("truegraft.runner.build.choose_tiles", choose_tiles):
        yield


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The synthetic lab, in both dtypes; "…-reference" is that of plain PyTorch."""
    dtype, _, back_end = request.param.partition("-")
    return make_lab(tmp_path_factory.mktemp(request.param), dtype, back_end or "kernels")


@pytest.fixture(scope="session")
def runs() -> dict[tuple[str, str], Run]:
    """Runs of the intact engine by lab and name, made by the first cell that needs them."""
    return {}
