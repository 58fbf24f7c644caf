"""Which adapter version holds which device slot, and when a slot may be given away.

A slot in use is never evicted. Pages are counted per target module, as the device's pools have
them. Knows nothing about requests: it counts users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truegraft.core.plan import SlotLoad


@dataclass(slots=True)
class Resident:
    """One adapter version on the device."""

    slot: int
    pages: tuple[int, ...]  # per target module
    loaded_at: int
    last_used: int
    num_users: int = 0
    pinned: bool = False
    closing: bool = False  # claimed for a starving adapter: takes no new users


class SlotPool:
    """`num_slots` slots over pools of `num_pages` pages for each target module."""

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.num_loads = 0
        self.num_evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._residents: dict[str, Resident] = {}
        self._clock = 0
        self._loads: list[SlotLoad] = []
        self._unloads: list[int] = []

    @property
    def residents(self) -> dict[str, int]:
        """Fingerprint → slot of every adapter version on the device."""
        return {name: resident.slot for name, resident in self._residents.items()}

    def acquire(self, adapter: str, pages: tuple[int, ...]) -> int | None:
        """A slot that holds `adapter`, with one user more; None if none can be had now.

        Evicts unused versions, least recently used first, as far as needed.
        """
        resident = self._residents.get(adapter)
        if resident is None:
            resident = self._load(adapter, pages)
        if resident is None or resident.closing:
            return None
        self._clock += 1
        resident.last_used = self._clock
        resident.num_users += 1
        return resident.slot

    def release(self, adapter: str) -> None:
        """One user less."""
        resident = self._residents[adapter]
        assert resident.num_users > 0, f"slot {resident.slot} released too often"
        resident.num_users -= 1

    def claim(self, adapter: str, pages: tuple[int, ...]) -> None:
        """Close enough adapters to new users that `adapter` fits once they are idle.

        Those that have been on the device longest are closed first, until `reopen`: whoever starves
        claims anew in each step, so a request that gives up locks nobody out, and none waits longer
        than the running requests of others take to end.
        """
        leaving = [r for r in self._residents.values() if r.closing]
        candidates = sorted(
            (r for r in self._residents.values() if not r.closing and not r.pinned),
            key=lambda r: r.loaded_at,
        )
        while candidates and not self._fits(pages, leaving):
            candidates[0].closing = True
            leaving.append(candidates.pop(0))

    def reopen(self) -> None:
        """Forget all claims."""
        for resident in self._residents.values():
            resident.closing = False

    def reset(self) -> None:
        """Forget what the device holds, after a step that failed; pinned versions load again."""
        self._residents = {n: r for n, r in self._residents.items() if r.pinned}
        taken = self.residents.values()
        self._free = [slot for slot in range(self.num_slots) if slot not in taken]
        self._unloads = list(range(self.num_slots))
        self._loads = [SlotLoad(slot, name) for name, slot in self.residents.items()]

    def pin(self, adapter: str, pages: tuple[int, ...]) -> bool:
        """Keep `adapter` on the device for good. False if there is no room for it now."""
        if self.acquire(adapter, pages) is None:
            return False
        self.release(adapter)
        self._residents[adapter].pinned = True
        return True

    def drop(self, adapter: str) -> bool:
        """Take an unused version off the device. False if it is in use or not there."""
        resident = self._residents.get(adapter)
        if resident is None:
            return False
        resident.pinned = False
        if resident.num_users:
            return False
        self._evict(adapter)
        return True

    def take_changes(self) -> tuple[tuple[int, ...], tuple[SlotLoad, ...]]:
        """Slots to clear and adapters to load before the next step, in that order."""
        unloads, loads = tuple(self._unloads), tuple(self._loads)
        self._unloads.clear()
        self._loads.clear()
        return unloads, loads

    def can_ever_fit(self, pages: Sequence[int]) -> bool:
        """Whether a device that holds the pinned versions only could hold so many pages more."""
        return self._fits(pages, [r for r in self._residents.values() if not r.pinned])

    def _load(self, adapter: str, pages: tuple[int, ...]) -> Resident | None:
        idle = sorted(
            (name for name, r in self._residents.items() if not r.num_users and not r.pinned),
            key=lambda name: self._residents[name].last_used,
        )
        victims: list[str] = []
        while not self._fits(pages, [self._residents[name] for name in victims]):
            if not idle:
                return None
            victims.append(idle.pop(0))
        for name in victims:
            self._evict(name)
            self.num_evictions += 1
        return self._place(adapter, pages)

    def _place(self, adapter: str, pages: tuple[int, ...]) -> Resident:
        self._clock += 1
        self.num_loads += 1
        resident = Resident(self._free.pop(), pages, self._clock, self._clock)
        self._residents[adapter] = resident
        self._loads.append(SlotLoad(resident.slot, adapter))
        return resident

    def _evict(self, adapter: str) -> None:
        resident = self._residents.pop(adapter)
        self._free.append(resident.slot)
        pending = SlotLoad(resident.slot, adapter)
        if pending in self._loads:  # it never reached the device
            self._loads.remove(pending)
        else:
            self._unloads.append(resident.slot)

    def _fits(self, pages: Sequence[int], leaving: Sequence[Resident]) -> bool:
        if not self._free and not leaving:
            return False
        staying = [r for r in self._residents.values() if not any(r is out for out in leaving)]
        used = [sum(counts) for counts in zip(*(r.pages for r in staying), strict=True)]
        used = used or [0] * len(pages)
        return all(u + p <= self.num_pages for u, p in zip(used, pages, strict=True))

    def check_integrity(self, users: dict[str, int]) -> None:
        """Assert the pool's invariants, and that `users` counts each adapter's users."""
        slots = [r.slot for r in self._residents.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots))
        for name, resident in self._residents.items():
            assert resident.num_users == users.get(name, 0), f"users of {name} differ"
        assert all(name in self._residents for name in users)
        totals = zip(*(r.pages for r in self._residents.values()), strict=True)
        assert all(sum(counts) <= self.num_pages for counts in totals)
