"""Adapter slots: nothing in use leaves, pages are counted, nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truegraft.core.plan import SlotLoad
from truegraft.core.slots import SlotPool

ONE = (1, 1)


def test_a_new_adapter_is_loaded_once_and_shared() -> None:
    pool = SlotPool(2, 4)
    slot = pool.acquire("a", ONE)
    assert slot is not None and pool.acquire("a", ONE) == slot
    assert pool.take_changes() == ((), (SlotLoad(slot, "a"),))
    assert pool.take_changes() == ((), ())
    assert pool.num_loads == 1
    pool.check_integrity({"a": 2})


def test_nothing_in_use_is_evicted() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("a", ONE)
    assert pool.acquire("b", ONE) is None
    pool.release("a")
    assert pool.acquire("b", ONE) == 0
    assert pool.num_evictions == 1
    pool.check_integrity({"b": 1})


def test_the_least_recently_used_leaves_first() -> None:
    pool = SlotPool(2, 8)
    for name in ("a", "b", "a"):
        pool.acquire(name, ONE)
        pool.release(name)
    pool.acquire("c", ONE)
    assert sorted(pool.residents) == ["a", "c"]


def test_an_evicted_slot_is_cleared_before_it_is_loaded_again() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("a", ONE)
    pool.take_changes()
    pool.release("a")
    pool.acquire("b", ONE)
    assert pool.take_changes() == ((0,), (SlotLoad(0, "b"),))


def test_a_load_that_never_reached_the_device_is_not_cleared_there() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("a", ONE)
    pool.release("a")
    pool.acquire("b", ONE)
    assert pool.take_changes() == ((), (SlotLoad(0, "b"),))


def test_pages_are_counted_per_target_module() -> None:
    pool = SlotPool(4, 4)
    assert pool.acquire("q", (3, 0)) is not None
    assert pool.acquire("v", (0, 4)) is not None
    assert pool.acquire("both", (1, 1)) is None
    assert pool.acquire("q again", (1, 0)) is not None
    pool.check_integrity({"q": 1, "v": 1, "q again": 1})


def test_as_many_leave_as_the_newcomer_needs() -> None:
    pool = SlotPool(3, 4)
    for name in ("a", "b", "c"):
        pool.acquire(name, ONE)
        pool.release(name)
    pool.acquire("big", (3, 3))
    assert sorted(pool.residents) == ["big", "c"]


def test_what_can_never_fit_is_known_before_it_waits() -> None:
    pool = SlotPool(1, 4)
    assert pool.can_ever_fit((4, 0))
    assert not pool.can_ever_fit((0, 5))
    assert pool.can_ever_fit(())


def test_a_claimed_slot_takes_no_new_users_and_goes_to_who_claimed_it() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("hot", ONE)
    pool.claim("waiting", ONE)
    assert pool.acquire("hot", ONE) is None
    pool.release("hot")
    assert pool.acquire("waiting", ONE) == 0
    pool.release("waiting")
    assert pool.acquire("hot", ONE) == 0


def test_a_claim_closes_no_more_than_it_needs_and_the_oldest_first() -> None:
    pool = SlotPool(2, 8)
    pool.acquire("old", ONE)
    pool.acquire("new", ONE)
    pool.claim("waiting", ONE)
    assert pool.acquire("new", ONE) is not None
    assert pool.acquire("old", ONE) is None


def test_a_pinned_adapter_stays() -> None:
    pool = SlotPool(2, 8)
    assert pool.pin("a", ONE)
    pool.acquire("b", ONE)
    pool.release("b")
    pool.acquire("c", ONE)
    assert sorted(pool.residents) == ["a", "c"]
    assert not pool.pin("d", ONE)
    pool.check_integrity({"c": 1})


def test_a_dropped_adapter_leaves_its_slot_unless_it_is_in_use() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("a", ONE)
    assert not pool.drop("a")
    pool.release("a")
    assert pool.drop("a")
    assert not pool.drop("a")
    pool.check_integrity({})


def test_a_pinned_adapter_dropped_while_in_use_frees_its_slot_later() -> None:
    pool = SlotPool(1, 4)
    pool.pin("a", ONE)
    pool.acquire("a", ONE)
    pool.drop("a")
    pool.release("a")
    assert pool.acquire("b", ONE) == 0


def test_a_slot_released_too_often_is_our_own_mistake() -> None:
    pool = SlotPool(1, 4)
    pool.acquire("a", ONE)
    pool.release("a")
    with pytest.raises(AssertionError, match="released too often"):
        pool.release("a")


PAGES = {"a": (1, 0), "b": (2, 2), "c": (0, 3), "d": (4, 4), "e": (1, 1)}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "release", "claim", "drop"]), st.sampled_from("abcde")
        ),
        max_size=80,
    )
)
def test_the_device_follows_the_pool(steps: list[tuple[str, str]]) -> None:
    """A model of the device applies the changes: it must hold what the pool says, and no more."""
    pool = SlotPool(3, 4)
    device: dict[int, str] = {}
    users: dict[str, int] = {}
    for action, name in steps:
        if action == "acquire":
            if pool.acquire(name, PAGES[name]) is not None:
                users[name] = users.get(name, 0) + 1
        elif action == "release":
            if users.get(name):
                pool.release(name)
                users[name] -= 1
        elif action == "claim":
            if name not in pool.residents:
                pool.claim(name, PAGES[name])
        else:
            pool.drop(name)
        pool.check_integrity({n: c for n, c in users.items() if c})
        if name in "ace":  # the other steps pile up changes
            unloads, loads = pool.take_changes()
            for slot in unloads:
                del device[slot]
            for load in loads:
                assert load.slot not in device, "a slot is cleared before it is loaded"
                device[load.slot] = load.fingerprint
            assert {n: s for s, n in device.items()} == pool.residents
