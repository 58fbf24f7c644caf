"""Random schedules through the scheduler and its pools: no token depends on one, no pool breaks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from exact.fake_device import NUM_TOKENS, FakeDevice, expected_tokens
from hypothesis import event, given, settings
from hypothesis import strategies as st

from truegraft import SamplingParams
from truegraft.core.blocks import BlockPool
from truegraft.core.request import Request
from truegraft.core.scheduler import ADAPTER_PATIENCE, Scheduler
from truegraft.core.slots import SlotPool

BLOCK = 4  # tokens of a block here: many blocks in short requests
MAX_PROMPT, MAX_OUTPUT = 18, 12
PAGES = {"a": (1, 0), "b": (2, 1), "c": (1, 2), "d": (2, 2)}  # adapter -> pages of two modules


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule. abort: steps after its arrival, None if it may end."""

    step: int
    prompt: tuple[int, ...]
    num_output: int
    adapter: str | None
    salt: str | None
    abort: int | None
    poisoned: bool


@dataclass(frozen=True)
class Setting:
    """One engine's limits."""

    max_num_seqs: int
    budget: int
    num_blocks: int
    num_slots: int
    caching: bool
    seed: int  # of the drafts


# Prompts are cut from two texts, so that many share prefixes.
TEXTS = [tuple(random.Random(s).randrange(NUM_TOKENS) for _ in range(MAX_PROMPT)) for s in (0, 1)]
arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.builds(
            lambda text, length: TEXTS[text][:length],
            st.integers(0, 1),
            st.integers(1, MAX_PROMPT),
        ),
        num_output=st.integers(1, MAX_OUTPUT),
        adapter=st.sampled_from([None, *PAGES]),
        salt=st.sampled_from([None, "other"]),
        abort=st.one_of(st.none(), st.integers(0, 10)),
        poisoned=st.sampled_from([False] * 7 + [True]),
    ),
    min_size=1,
    max_size=9,
)
enough = -(-(MAX_PROMPT + MAX_OUTPUT) // BLOCK)  # blocks that one request may need
engines = st.builds(
    Setting,
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 24),
    num_blocks=st.integers(enough, enough + 8),
    num_slots=st.integers(1, 3),
    caching=st.booleans(),
    seed=st.integers(0, 99),
)


@dataclass
class Bench:
    """Scheduler, pools and a fake device, stepped by hand."""

    setting: Setting
    finished_at: dict[Request, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting = self.setting
        self.scheduler = Scheduler(
            setting.max_num_seqs,
            setting.budget,
            BlockPool(setting.num_blocks, BLOCK, setting.caching),
            SlotPool(setting.num_slots, 2),
        )
        self.device = FakeDevice(BLOCK)
        self._drafts = random.Random(setting.seed)

    def add(self, arrival: Arrival, seed: int) -> Request:
        """Queue an arrival's request."""
        request = Request(
            request_id=str(seed),
            prompt_token_ids=arrival.prompt,
            sampling=SamplingParams(temperature=0),
            max_tokens=arrival.num_output,
            adapter=arrival.adapter,
            adapter_pages=PAGES.get(arrival.adapter or "", ()),
            salt=arrival.salt,
            seed=seed,
        )
        if arrival.poisoned:
            self.device.poisoned.add(seed)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """One step of the engine, with random drafts, checked before and after its commit."""
        for request in list(self.scheduler.decoding()):
            request.draft = self._draft(request)
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.setting.budget
        self.scheduler.check_integrity()
        self.device.salts = {r.row: r.salt for r in self.scheduler.running}
        result = self.device.execute(plan)
        for update in self.scheduler.commit(plan, result):
            if update.request.finished:
                self.finished_at[update.request] = plan.step
        self.scheduler.check_integrity()

    def _draft(self, request: Request) -> tuple[int, ...]:
        """Up to three tokens, each right three times out of four."""
        known = len(request.output_token_ids)
        right = expected_tokens(request.prompt_token_ids, known + 3, request.adapter, request.salt)[
            known:
        ]
        wrong = (self._drafts.randrange(NUM_TOKENS) for _ in right)
        mixed = [
            r if self._drafts.random() < 0.75 else w for r, w in zip(right, wrong, strict=True)
        ]
        return tuple(mixed[: self._drafts.randrange(4)])


def most_steps(schedule: list[Arrival]) -> int:
    """More steps than any fair schedule takes: work one token at a time, all recomputed once per
    request that may push it out, and the patience that adapters wait with.
    """
    work = sum(len(a.prompt) + a.num_output for a in schedule)
    return 12 + (work + ADAPTER_PATIENCE) * (1 + len(schedule))


@settings(max_examples=400)
@given(engines, arrivals)
def test_any_schedule_gives_each_request_its_own_tokens(
    setting: Setting, schedule: list[Arrival]
) -> None:
    bench = Bench(setting)
    requests: dict[int, Request] = {}
    for step in range(most_steps(schedule)):
        for index, arrival in enumerate(schedule):
            if arrival.step == step:
                requests[index] = bench.add(arrival, index)
            if arrival.abort is not None and arrival.step + arrival.abort == step:
                bench.scheduler.finish(requests[index], "abort")
                bench.scheduler.check_integrity()
        bench.step()
        if len(requests) == len(schedule) and not bench.scheduler.has_work:
            break
    for index, arrival in enumerate(schedule):
        check_request(requests[index], arrival)
    check_empty(bench)
    for happened in seen(bench, requests):
        event(happened)


def check_request(request: Request, arrival: Arrival) -> None:
    """It ended, for the right reason, and all that it said is right."""
    assert request.finished, "starved"
    right = expected_tokens(arrival.prompt, arrival.num_output, arrival.adapter, arrival.salt)
    output = request.output_token_ids
    assert output == right[: len(output)]
    if request.finish_reason == "length":
        assert output == right and not arrival.poisoned
    else:
        assert request.finish_reason == ("error" if arrival.poisoned else "abort") or (
            request.finish_reason == "abort" and arrival.abort is not None
        )


def check_empty(bench: Bench) -> None:
    """Nothing is held any more."""
    scheduler = bench.scheduler
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.blocks.num_free == bench.setting.num_blocks
    scheduler.check_integrity()
    bench.step()  # rows that were closed reach the device
    assert not bench.device.rows


def seen(bench: Bench, requests: dict[int, Request]) -> Iterator[str]:
    """What a schedule had in it, for hypothesis's statistics and the test below."""
    stats = bench.scheduler.stats
    for name, count in (
        ("preempted", stats.num_preemptions),
        ("cache hit", stats.num_cached_tokens),
        ("draft accepted", stats.num_accepted_tokens),
        ("draft rejected", stats.num_draft_tokens - stats.num_accepted_tokens),
        ("slot evicted", bench.scheduler.slots.num_evictions),
        ("block evicted", bench.scheduler.blocks.num_evictions),
        ("chunked", sum(r.num_chunks > 1 for r in requests.values())),
        ("aborted", sum(r.finish_reason == "abort" for r in requests.values())),
        ("failed", sum(r.finish_reason == "error" for r in requests.values())),
    ):
        if count > 0:
            yield name


def test_schedules_hold_all_that_can_happen() -> None:
    """The property would be empty if its schedules never met a preemption or an eviction."""
    found: set[str] = set()

    @settings(max_examples=120, database=None)
    @given(engines, arrivals)
    def look(setting: Setting, schedule: list[Arrival]) -> None:
        bench, requests = Bench(setting), {}
        for index, arrival in enumerate(schedule):
            requests[index] = bench.add(arrival, index)
        bench.step()
        for index, arrival in enumerate(schedule):
            if arrival.abort == 1:
                bench.scheduler.finish(requests[index], "abort")
        while bench.scheduler.has_work:
            bench.step()
        found.update(seen(bench, requests))

    look()
    assert len(found) == 9, found


@settings(max_examples=60)
@given(
    num_slots=st.integers(1, 2),
    lengths=st.lists(st.integers(MAX_OUTPUT // 2, MAX_OUTPUT), min_size=4, max_size=8),
    newcomer=st.sampled_from(["c", "d"]),
)
def test_a_hot_adapter_starves_no_other(num_slots: int, lengths: list[int], newcomer: str) -> None:
    """Requests of `a` (and `b`) come without end; one of another adapter gets its turn."""
    bench = Bench(Setting(4, 24, 4 * enough, num_slots, True, 0))
    hot = ("a", "b")[:num_slots]
    text = TEXTS[0]

    def arrive(index: int, adapter: str | None, output: int) -> Request:
        return bench.add(Arrival(0, text[:6], output, adapter, None, None, False), index)

    def crowd(steps: range) -> Iterator[int]:
        """Two hot requests a step, more than can be answered."""
        for step in steps:
            for index in (2 * step, 2 * step + 1):
                arrive(index, hot[index % num_slots], lengths[index % len(lengths)])
            bench.step()
            yield step

    list(crowd(range(6)))
    late, base = arrive(1000, newcomer, 3), arrive(1001, None, 3)
    for _ in crowd(range(6, 6 + 3 * ADAPTER_PATIENCE)):
        if late.finished and base.finished:
            break
    assert late.finished and base.finished
    wait = bench.finished_at[late] - 6
    assert wait <= ADAPTER_PATIENCE + 2 * MAX_OUTPUT + 3
    assert len(bench.scheduler.waiting) > 4, "the hot adapters paused"
