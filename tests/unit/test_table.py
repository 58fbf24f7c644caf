"""The device's adapter table: pages, and how many of them a slot has."""

from __future__ import annotations

import torch

from truegraft.adapters.peft_format import Adapter, LoRAWeights
from truegraft.adapters.table import AdapterTable
from truegraft.config import LoRAConfig
from truegraft.model.architecture import TargetShape
from truegraft.ops.reference import ReferenceOps

TARGETS = {name: TargetShape(24, 40, "linear") for name in ("q", "k")}


def make_adapter(**ranks: int) -> Adapter:
    modules = {
        name: LoRAWeights(torch.ones(rank, 24), torch.ones(40, rank), 1.0)
        for name, rank in ranks.items()
    }
    return Adapter(modules, "f")


def make_table() -> AdapterTable:
    return AdapterTable(TARGETS, ReferenceOps(torch.float32), LoRAConfig(max_loras=3))


def test_depth_is_the_most_pages_of_any_module() -> None:
    table = make_table()
    table.load(0, make_adapter(q=16))
    table.load(1, make_adapter(q=1, k=33))
    assert table.depth.tolist() == [1, 3, 0]
    assert [table.num_pages(slot) for slot in range(3)] == [1, 3, 0]
    table.clear(1)
    assert table.depth.tolist() == [1, 0, 0]
    table.load(1, make_adapter())
    assert table.depth.tolist() == [1, 0, 0]
    table.check_integrity()


def test_pages_are_counted_in_bytes_while_they_are_held() -> None:
    table = make_table()
    table.load(2, make_adapter(q=17))
    assert table.num_bytes == 2 * 16 * (24 + 40) * 4
    table.clear(2)
    assert table.num_bytes == 0
