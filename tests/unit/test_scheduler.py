"""The scheduler against a fake device: it may decide when a token is computed, never which.

The fake keeps its own rows, slots and paged cache. Its next token is a function of the tokens and
the adapter that it finds there, and it checks that every earlier position of the cache holds what
this request with this adapter would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truegraft.api import SamplingParams
from truegraft.core.blocks import BlockPool
from truegraft.core.plan import RowOpening, RowResult, RowWork, StepPlan, StepResult
from truegraft.core.request import Request, RequestState
from truegraft.core.scheduler import ADAPTER_PATIENCE, Scheduler
from truegraft.core.slots import SlotPool
from truegraft.speculation.verify import accept

SIZE = 4  # tokens of a block


def next_token(tokens: Sequence[int], adapter: str | None) -> int:
    return (3 * tokens[-1] + sum(tokens) + len(tokens) + len(adapter or "")) % 5


def answer(request: Request) -> list[int]:
    """What the request gives alone."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens, request.adapter))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


@dataclass
class FakeDevice:
    """Executes plans as a device would, and remembers them."""

    rows: dict[int, RowOpening] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)
    cache: dict[tuple[int, int], object] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for row in plan.closed:
            del self.rows[row]
        for slot in plan.unloads:
            del self.slots[slot]
        for load in plan.loads:
            assert load.slot not in self.slots, "a slot is cleared before it is loaded"
            self.slots[load.slot] = load.fingerprint
        for opening in plan.opened:
            assert opening.row not in self.rows, "a row is closed before it is opened"
            self.rows[opening.row] = opening
            self.tokens[opening.row] = list(opening.token_ids)
            self.tables[opening.row] = []
        assert len({work.row for work in plan.work}) == len(plan.work)
        return StepResult(tuple(self._run(work) for work in plan.work))

    def _run(self, work: RowWork) -> RowResult:
        assert work.num_tokens > 0
        self.tables[work.row] += work.new_blocks
        known = self.tokens[work.row]
        adapter = self.slots[work.slot] if work.slot >= 0 else None
        tokens = known + list(work.draft)
        end = work.start + work.num_tokens
        assert end <= len(tokens)
        for position in range(work.start, end):
            self.cache[self._place(work.row, position)] = (tuple(tokens[: position + 1]), adapter)
        for position in range(end):
            written = self.cache[self._place(work.row, position)]
            assert written == (tuple(tokens[: position + 1]), adapter), "another request's KV"
        if not work.samples:
            return RowResult()
        assert end == len(tokens), "sampling needs every known token computed"
        drawn = [next_token(known + list(work.draft[:i]), adapter) for i in range(work.num_logits)]
        drawn = drawn[: accept(work.draft, drawn) + 1]
        known += drawn
        return RowResult(tuple(drawn))

    def _place(self, row: int, position: int) -> tuple[int, int]:
        return self.tables[row][position // SIZE], position % SIZE


class Driver:
    """A scheduler on a fake device. drafter: proposes for a request that decodes."""

    def __init__(
        self,
        *,
        seqs: int = 4,
        budget: int = 16,
        blocks: int = 32,
        slots: int = 2,
        drafter: Callable[[Request], tuple[int, ...]] = lambda request: (),
    ) -> None:
        self.scheduler = Scheduler(seqs, budget, BlockPool(blocks, SIZE), SlotPool(slots, slots))
        self.device = FakeDevice()
        self.drafter = drafter
        self.requests: list[Request] = []

    def add(self, prompt: Sequence[int], max_tokens: int = 6, **fields: Any) -> Request:
        fields.setdefault("sampling", SamplingParams())
        if fields.get("adapter"):
            fields.setdefault("adapter_pages", (1,))
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            **fields,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        for request in self.scheduler.decoding():
            request.draft = self.drafter(request)
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.commit(plan, self.device.execute(plan))
        self.scheduler.check_integrity()
        return plan

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "a request never ends"
        for request in self.requests:
            if request.finish_reason != "abort":
                assert request.output_token_ids == answer(request), request.request_id


def test_a_request_alone_gives_its_answer() -> None:
    driver = Driver()
    request = driver.add([1, 2, 3])
    driver.run()
    assert request.finish_reason == "length" and request.num_chunks == 1
    assert len(driver.device.plans) == 6
    assert driver.scheduler.blocks.num_free == 32


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    driver = Driver(budget=4)
    request = driver.add(range(10), max_tokens=1)
    driver.run()
    assert [p.num_tokens for p in driver.device.plans] == [4, 4, 2]
    assert request.num_chunks == 3
    assert [w.samples for p in driver.device.plans for w in p.work] == [False, False, True]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    driver = Driver(budget=4)
    early = driver.add([1], max_tokens=8)
    driver.step()
    driver.add([2] * 20)
    for count in range(2, 6):
        driver.step()
        assert early.num_output_tokens == count
    driver.run()


def test_a_step_never_exceeds_its_budget_even_with_more_decoding_requests() -> None:
    driver = Driver(budget=2, seqs=4)
    for first in range(4):
        driver.add([first])
    driver.run()  # `step` asserts the budget


def test_requests_wait_for_a_row_in_order() -> None:
    driver = Driver(seqs=1)
    first, second = driver.add([1]), driver.add([2])
    driver.step()
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)
    driver.run()


@pytest.mark.parametrize("budget", [3, 16])
def test_a_stop_token_ends_a_request_and_is_kept(budget: int) -> None:
    driver = Driver(budget=budget, drafter=lambda request: (0, 1, 2))
    plain = driver.add([1, 2, 3], max_tokens=10)
    stop = answer(plain)[4]
    request = driver.add([1, 2, 3], max_tokens=10, stop_token_ids=frozenset({stop}))
    driver.run()
    assert request.finish_reason == "stop" and request.stop_token == stop
    assert request.output_token_ids[-1] == stop


# ------------------------------------------------------------------ blocks run out


def test_requests_preempt_later_ones_and_still_give_their_answers() -> None:
    driver = Driver(blocks=6)
    requests = [driver.add([n] * 4, max_tokens=16) for n in range(3)]
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    assert requests[0].num_preemptions == 0, "the earliest goes on"
    assert sum(r.num_preemptions for r in requests) == driver.scheduler.stats.num_preemptions


def test_a_preempted_request_starts_again_before_newer_ones() -> None:
    driver = Driver(blocks=5, seqs=3)
    driver.add([1] * 4, max_tokens=15)
    victim = driver.add([2] * 4, max_tokens=8)
    while not victim.num_preemptions:
        driver.step()
    newer = driver.add([3] * 4)
    while newer.state is RequestState.WAITING:
        assert victim.state is not RequestState.FINISHED or newer.num_output_tokens == 0
        driver.step()
    assert victim.state is not RequestState.WAITING
    driver.run()


def test_drafts_are_given_up_before_another_request_is_preempted() -> None:
    driver = Driver(blocks=4, drafter=lambda request: (0,) * 8)
    for first in (1, 2):
        driver.add([first] * 4, max_tokens=4)
    driver.run()
    assert driver.scheduler.stats.num_preemptions == 0


# ------------------------------------------------------------------ the prefix cache


def test_an_equal_prefix_is_read_and_counted() -> None:
    driver = Driver()
    first = driver.add(range(9))
    driver.run()
    second = driver.add(range(9))
    longer = driver.add([*range(8), 7, 7, 7])
    driver.run()
    assert [r.num_cached_tokens for r in (first, second, longer)] == [0, 8, 8]
    assert driver.scheduler.stats.num_cached_tokens == 16


def test_answers_are_cached_too() -> None:
    driver = Driver()
    first = driver.add(range(6), max_tokens=8)
    driver.run()
    turn = driver.add([*first.token_ids, 3])
    driver.run()
    assert turn.num_cached_tokens == 12


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": "a"},
        {"salt": "user"},
        {"sampling": SamplingParams(prompt_logprobs=0)},
    ],
)
def test_what_must_not_share_reads_nothing(fields: dict[str, Any]) -> None:
    driver = Driver()
    driver.add(range(9))
    driver.run()
    other = driver.add(range(9), **fields)
    driver.run()
    assert other.num_cached_tokens == 0


def test_a_request_that_reports_its_prompt_still_fills_the_cache() -> None:
    driver = Driver()
    driver.add(range(9), sampling=SamplingParams(prompt_logprobs=0))
    driver.run()
    assert all(w.prompt_logprobs == (w.start < 9) for p in driver.device.plans for w in p.work)
    reader = driver.add(range(9))
    driver.run()
    assert reader.num_cached_tokens == 8


def test_rejected_drafts_never_reach_the_cache() -> None:
    driver = Driver(drafter=lambda request: (7, 7, 7, 7, 7))
    first = driver.add(range(3), max_tokens=12)
    driver.run()
    assert first.num_accepted_tokens == 0 < first.num_draft_tokens
    driver.drafter = lambda request: ()
    driver.add(first.token_ids)
    driver.run()  # the device checks what the cache holds


# ------------------------------------------------------------------ drafts


def test_right_drafts_save_steps_and_are_counted() -> None:
    def oracle(request: Request) -> tuple[int, ...]:
        return tuple(answer(request)[request.num_output_tokens :][:3])

    driver = Driver(drafter=oracle)
    request = driver.add([1, 2], max_tokens=9)
    driver.run()
    assert len(driver.device.plans) == 3  # 1, then 4 and 4 tokens
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (6, 6)
    assert request.num_verify_steps == 2


def test_a_draft_never_goes_past_the_end_of_its_request() -> None:
    driver = Driver(drafter=lambda request: (0,) * 8)
    request = driver.add([1, 2], max_tokens=4)
    driver.run()
    ends = [w.start + w.num_tokens for p in driver.device.plans for w in p.work]
    assert max(ends) <= request.num_prompt_tokens + request.max_tokens


def test_a_prompt_is_not_drafted_for() -> None:
    driver = Driver(budget=4, drafter=lambda request: (0, 0))
    request = driver.add(range(10), max_tokens=1)
    request.draft = (1, 1)
    driver.run()
    assert all(not w.draft for p in driver.device.plans for w in p.work)


# ------------------------------------------------------------------ requests that leave early


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_leaves_nothing_behind(steps: int) -> None:
    driver = Driver(budget=4)
    request, other = driver.add(range(10), adapter="a"), driver.add([1, 2], adapter="a")
    for _ in range(steps):
        driver.step()
    driver.scheduler.finish(request, "abort")
    driver.scheduler.finish(request, "length")
    assert request.finish_reason == "abort"
    driver.scheduler.check_integrity()
    driver.run()
    assert other.finish_reason == "length"


def test_a_result_that_comes_after_the_abort_is_dropped() -> None:
    driver = Driver()
    request, other = driver.add([1]), driver.add([2])
    plan = driver.scheduler.plan()
    driver.scheduler.finish(request, "abort")
    updates = driver.scheduler.commit(plan, driver.device.execute(plan))
    assert [update.request for update in updates] == [other]
    assert request.num_output_tokens == 0
    driver.run()


def test_a_request_that_is_not_finite_ends_alone_and_leaves_no_cached_block() -> None:
    driver = Driver()
    bad, good = driver.add(range(9), adapter="a"), driver.add(range(9))
    plan = driver.scheduler.plan()
    result = driver.device.execute(plan)
    rows = [
        RowResult(finite=False) if work.slot >= 0 else row
        for work, row in zip(plan.work, result.rows, strict=True)
    ]
    driver.scheduler.commit(plan, StepResult(tuple(rows)))
    assert bad.finish_reason == "error" and bad.output_token_ids == []
    driver.scheduler.check_integrity()
    driver.requests.remove(bad)
    again = driver.add(range(9), adapter="a")
    driver.run()
    assert again.num_cached_tokens == 0 and good.finish_reason == "length"


# ------------------------------------------------------------------ adapters


def test_more_adapters_than_slots_queue_and_all_are_answered() -> None:
    driver = Driver(slots=2, seqs=8, budget=64)
    names = [None, "a", "bb", "ccc", None]
    requests = [driver.add([1, 2], adapter=name) for name in names]
    driver.step()
    waiting = [r.adapter for r in requests if r.state is RequestState.WAITING]
    assert waiting == ["ccc"], "base rows and loaded adapters are not held up"
    driver.run()
    assert driver.scheduler.slots.num_evictions == 1


def test_no_hot_adapter_starves_another() -> None:
    driver = Driver(slots=1, seqs=4, budget=64)
    driver.add([1], max_tokens=5, adapter="hot")
    driver.step()
    cold = driver.add([1], max_tokens=5, adapter="cold")
    steps = 0
    while not cold.finished:
        driver.add([steps % 5], max_tokens=5, adapter="hot")
        driver.step()
        steps += 1
        assert steps <= ADAPTER_PATIENCE + 12
    driver.run()


def test_a_request_that_gives_up_waiting_does_not_lock_others_out() -> None:
    driver = Driver(slots=1)
    running = driver.add([1], max_tokens=ADAPTER_PATIENCE + 4, adapter="a")
    driver.step()
    starving = driver.add([1], adapter="b")
    while running.num_output_tokens < ADAPTER_PATIENCE + 3:
        driver.step()
    driver.scheduler.finish(starving, "abort")
    later = driver.add([2], adapter="a")
    driver.run(limit=100)
    assert later.finish_reason == "length"


def test_base_requests_pass_one_that_waits_for_a_slot() -> None:
    driver = Driver(slots=1)
    driver.add([1], max_tokens=20, adapter="a")
    blocked = driver.add([1], adapter="b")
    base = driver.add([1], max_tokens=2)
    driver.step()
    driver.step()
    assert base.finished and blocked.state is RequestState.WAITING
    driver.run()


# ------------------------------------------------------------------ any schedule

ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 14),
        st.sampled_from([None, "a", "bb", "ccc"]),
        st.integers(0, 2),
    ),
    st.tuples(st.just("step"), st.integers(1, 4), st.none(), st.integers(0, 0)),
    st.tuples(st.just("abort"), st.integers(0, 20), st.none(), st.integers(0, 0)),
)


@given(
    st.lists(ACTIONS, max_size=25),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(8, 14),
    st.integers(0, 4),
)
def test_any_schedule_gives_every_request_its_own_answer(
    actions: list[tuple[str, int, str | None, int]], seqs: int, budget: int, blocks: int, k: int
) -> None:
    def drafter(request: Request) -> tuple[int, ...]:
        """Sometimes right, sometimes wrong after a few tokens."""
        truth = answer(request)[request.num_output_tokens :][:k]
        wrong = request.num_output_tokens % 3
        return tuple(t if i != wrong else 4 - t for i, t in enumerate(truth))

    driver = Driver(seqs=seqs, budget=budget, blocks=blocks, slots=2, drafter=drafter)
    for kind, number, adapter, first in actions:
        if kind == "add":
            driver.add([first] * number, max_tokens=number + 3, adapter=adapter)
        elif kind == "step":
            for _ in range(number):
                driver.step()
        elif driver.requests:
            driver.scheduler.finish(driver.requests[number % len(driver.requests)], "abort")
    driver.run(limit=2000)
    assert driver.scheduler.blocks.num_free == blocks
