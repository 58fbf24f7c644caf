"""The bench of the exactness suite: requests, answers down to the bit, and runs that are watched.

An `Answer` is all that a request may not change in. `Lab.alone` is what it must be: the request
run alone, plain, on a fresh engine. `Lab.run` serves requests some other way and notes what really
happened, so that no cell can pass because its perturbation did not take place.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from truegraft import LLM, LoRARequest, RequestOutput, SamplingParams
from truegraft.api import Logprob
from truegraft.core.plan import StepPlan, StepResult
from truegraft.core.scheduler import SchedulerStats
from truegraft.engine import Engine
from truegraft.generation import Generation, PromptTokens
from truegraft.runner.build import DTYPES, block_bytes

BLOCK = 64

Reports = tuple[tuple[tuple[int, str, int], ...] | None, ...]


class Mismatch(AssertionError):
    """An answer differs from the same request's answer alone. Only `compare` raises it."""


@dataclass(frozen=True)
class Case:
    """One request. adapter: a name of the lab's adapters, None for the base."""

    name: str
    adapter: str | None
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)


class Answer(NamedTuple):
    """One sample's result. Logprobs as (token, bits in hex, rank), likeliest included."""

    token_ids: tuple[int, ...]
    logprobs: Reports
    prompt_logprobs: Reports
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def answer(output: RequestOutput, sample: int = 0) -> Answer:
    """What `output` says of one of its samples."""
    found = output.outputs[sample]
    return Answer(
        tuple(found.token_ids),
        _bits(found.logprobs),
        _bits(output.prompt_logprobs),
        found.text,
        found.finish_reason,
        found.stop_reason,
    )


def _bits(reports: Sequence[Mapping[int, Logprob] | None] | None) -> Reports:
    return tuple(
        None if at is None else tuple((t, p.logprob.hex(), p.rank) for t, p in at.items())
        for at in reports or ()
    )


def compare(what: str, found: Answer, alone: Answer) -> None:
    """Raise Mismatch, naming the first difference, unless two answers are equal bit for bit."""
    for name, ours, theirs in zip(Answer._fields, found, alone, strict=True):
        if ours != theirs:
            raise Mismatch(f"{what}: {name} differ {_first_difference(ours, theirs)}")


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        for place, pair in enumerate(itertools.zip_longest(ours, theirs)):
            if pair[0] != pair[1]:
                return f"at {place}: {pair[0]!r}, alone {pair[1]!r}"
    return f": {ours!r}, alone {theirs!r}"


@dataclass
class Watch:
    """Notes who shared a step with whom, and which adapters were loaded how often."""

    engine: Engine
    company: dict[str, int] = field(default_factory=dict)  # most requests in one step with it
    mixture: dict[str, int] = field(default_factory=dict)  # most slots (base too) in such a step
    loads: Counter[str] = field(default_factory=Counter)  # by fingerprint

    def __post_init__(self) -> None:
        self._execute = self.engine.runner.execute

    def execute(self, plan: StepPlan) -> StepResult:
        """The runner's `execute`, watched."""
        names = {r.row: r.request_id.rpartition("-")[0] for r in self.engine.scheduler.running}
        slots = {work.slot for work in plan.work}
        for work in plan.work:
            name = names[work.row]
            self.company[name] = max(self.company.get(name, 0), len(plan.work))
            self.mixture[name] = max(self.mixture.get(name, 0), len(slots))
        self.loads.update(load.fingerprint for load in plan.loads)
        return self._execute(plan)


class Desk:
    """An engine to which cases are handed in."""

    def __init__(self, engine: Engine, adapters: Mapping[str, Path]) -> None:
        self.engine = engine
        self.adapters = adapters
        self._round = itertools.count()

    def hand_in(self, case: Case, name: str | None = None) -> Generation:
        """Add a case to the engine's queue."""
        lora = version = None
        if case.adapter is not None:
            lora = LoRARequest(case.adapter, lora_path=str(self.adapters[case.adapter]))
            version = self.engine.load_adapter(lora).result()
        prompt = PromptTokens(case.prompt, None, lora)
        return self.engine.add(name or case.name, prompt, case.params, version)

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            self.engine.step()

    def together(self, cases: Sequence[Case]) -> list[Generation]:
        """Hand in all at once, in order; return when all have ended."""
        generations = [self.hand_in(case) for case in cases]
        self.finish()
        return generations


Play = Callable[[Desk, Sequence[Case]], list[Generation]]
"""A way to hand in cases; the generations to judge, whose ids are the cases' names."""


@dataclass(frozen=True)
class Run:
    """Outputs by case name, and what happened on the way.

    asked: names in the order of the table. broken: a pool's complaint at the end.
    """

    asked: tuple[str, ...]
    outputs: dict[str, RequestOutput]
    stats: SchedulerStats
    watch: Watch
    num_evictions: int
    broken: AssertionError | None

    def check_integrity(self) -> None:
        """Raise what the engine's own check raised after the run."""
        if self.broken is not None:
            raise self.broken

    def loads(self, case: str) -> int:
        """How often the case's adapter went to the device."""
        return self.watch.loads[self.outputs[case].adapter_fingerprint or ""]


class Lab:
    """One model in one dtype on one CPU back end, its adapters, and the answers known so far."""

    def __init__(
        self, model: Path, adapters: Mapping[str, Path], dtype: str, back_end: str = "kernels"
    ) -> None:
        self.model = model
        self.adapters = dict(adapters)
        self.dtype = dtype
        self.back_end = back_end
        self._alone: dict[str, Answer] = {}

    @contextmanager
    def open(self, **options: Any) -> Iterator[Desk]:
        """A fresh engine: defaults, and `options`."""
        options = {"enable_lora": True} | options
        with mock.patch.dict(os.environ, TRUEGRAFT_CPU_OPS=self.back_end):
            llm = LLM(self.model, dtype=self.dtype, **options)
        with llm:
            yield Desk(llm.engine, self.adapters)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        with self.open() as desk:
            return block_bytes(desk.engine.arch, DTYPES[desk.engine.dtype])

    @property
    def name(self) -> str:
        """Dtype and back end."""
        return f"{self.dtype}-{self.back_end}"

    def alone(self, case: Case) -> Answer:
        """The truth: this request alone on a fresh engine, no speculation, no cache."""
        key = repr((case.adapter, case.prompt, case.params))  # a name is not part of a request
        if key not in self._alone:
            with self.open(enable_prefix_caching=False) as desk:
                [generation] = desk.together([case])
                desk.engine.check_integrity()
                self._alone[key] = answer(generation.output())
        return self._alone[key]

    def run(self, options: Mapping[str, Any], play: Play, cases: Sequence[Case]) -> Run:
        """Serve `cases` as `play` does, on a fresh engine with `options`, watched."""
        with self.open(**options) as desk:
            watch = Watch(desk.engine)
            with mock.patch.object(desk.engine.runner, "execute", watch.execute):
                generations = play(desk, cases)
            scheduler = desk.engine.scheduler
            return Run(
                tuple(case.name for case in cases),
                {g.request_id: g.output() for g in generations},
                scheduler.stats,
                watch,
                scheduler.slots.num_evictions,
                _complaint(desk.engine),
            )


def _complaint(engine: Engine) -> AssertionError | None:
    try:
        engine.check_integrity()
    except AssertionError as broken:
        return broken
    return None
