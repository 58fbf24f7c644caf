"""Adapters on the device: pools of 16-rank pages, one pool per target module.

A slot holds one adapter version. Its pages are found through a table that is on the device too,
so that no host state of one batch decides what is computed. Knows nothing about files or requests;
`core.slots` decides who gets a slot, and has counted the pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from truegraft.adapters.peft_format import Adapter, LoRAWeights
from truegraft.config import LORA_PAGE_RANK, LoRAConfig
from truegraft.model.architecture import TargetShape
from truegraft.ops.interface import LoraPages, Ops


class AdapterTable:
    """`max_loras` slots over the pools of all target modules."""

    def __init__(self, targets: Mapping[str, TargetShape], ops: Ops, config: LoRAConfig) -> None:
        ordinals = -(-config.max_lora_rank // LORA_PAGE_RANK)
        counts = (config.num_pages, config.max_loras, ordinals)
        self.pages: dict[str, LoraPages] = {
            module: ops.new_pages(counts, shape.in_features, shape.out_features)
            for module, shape in targets.items()
        }
        self._free = {module: list(range(config.num_pages - 1, -1, -1)) for module in targets}
        device = next(iter(self.pages.values())).page_of.device
        self.depth = torch.zeros(config.max_loras, dtype=torch.int32, device=device)  # `num_pages`
        self._slots: list[Adapter | None] = [None] * config.max_loras

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into an empty slot. The pages it needs must be free."""
        assert self._slots[slot] is None, f"slot {slot} is taken"
        self._slots[slot] = adapter
        for module, weights in adapter.modules.items():
            self._write(module, slot, weights)
        self.depth[slot] = self.num_pages(slot)

    def num_pages(self, slot: int) -> int:
        """Most pages that any module has of the slot's adapter, as the host knows it."""
        adapter = self._slots[slot]
        ranks = [weights.rank for weights in adapter.modules.values()] if adapter else []
        return -(-max(ranks, default=0) // LORA_PAGE_RANK)

    def clear(self, slot: int) -> None:
        """Empty a slot: no module keeps a page or a scale of it."""
        adapter, self._slots[slot] = self._slots[slot], None
        self.depth[slot] = 0
        for module in adapter.modules if adapter else ():
            table = self.pages[module]
            self._free[module] += [page for page in table.page_of[slot].tolist() if page >= 0]
            table.page_of[slot] = -1
            table.rank[slot] = 0
            table.scale[slot] = 0.0

    def _write(self, module: str, slot: int, weights: LoRAWeights) -> None:
        table = self.pages[module]
        for ordinal, start in enumerate(range(0, weights.rank, LORA_PAGE_RANK)):
            page = self._free[module].pop()
            _fill(table.a[page], weights.a[start : start + LORA_PAGE_RANK])
            _fill(table.b[page], weights.b[:, start : start + LORA_PAGE_RANK].t())
            table.page_of[slot, ordinal] = page
        table.rank[slot] = weights.rank
        table.scale[slot] = weights.scale

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that hold ranks now."""
        used = 0
        for module, table in self.pages.items():
            a, b = table.a[0], table.b[0]
            size = a.numel() * a.element_size() + b.numel() * b.element_size()
            used += size * (len(table.a) - len(self._free[module]))
        return used

    def check_integrity(self) -> None:
        """Assert that each page is free or held by exactly one slot that has an adapter."""
        for module, table in self.pages.items():
            held = table.page_of[table.page_of >= 0].tolist()
            assert sorted(held + self._free[module]) == list(range(len(table.a))), module
            for slot, adapter in enumerate(self._slots):
                empty = adapter is None or module not in adapter.modules
                assert not empty or bool((table.page_of[slot] < 0).all()), (module, slot)


def _fill(page: Tensor, ranks: Tensor) -> None:
    """Copy ranks into a page and zero the rest: a reused page keeps no trace of its last user."""
    page[: len(ranks)] = ranks.to(page.dtype)
    page[len(ranks) :] = 0.0
    assert torch.isfinite(page).all(), "the loader lets no such value through"
