"""Adapters that make a leak loud: signatures, ties, reused slots, reloaded names, base rows."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact.cases import GREEDY, REQUESTS, ngram, one_by_one, stream, together
from exact.lab import BLOCK, Case, Lab, answer, compare
from exact.zoo import TIE
from tiny_models import make_signature_adapter

SHORT = replace(GREEDY, max_tokens=12)
SIGNATURES = tuple(range(20, 28))  # the token that each of eight adapters says


@pytest.fixture(scope="session")
def signatures(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The lab's base under eight signature adapters."""
    folder = tmp_path_factory.mktemp("signatures")
    paths = {f"says-{t}": make_signature_adapter(folder / f"{t}", lab.model, t) for t in SIGNATURES}
    return Lab(lab.model, paths, lab.dtype, lab.back_end)


def signature_case(index: int, token: int | None) -> Case:
    adapter = None if token is None else f"says-{token}"
    return Case(f"{index}/{adapter}", adapter, stream(index, 5 + 9 * index), SHORT)


@pytest.mark.parametrize("options", [{}, ngram(3)], ids=["plain", "ngram-3"])
def test_eight_signatures_and_the_base_in_one_batch_over_three_slots(
    signatures: Lab, options: Mapping[str, Any]
) -> None:
    """A wrong slot, a late load or a stale page shows as another adapter's token."""
    cases = [signature_case(i, t) for i, t in enumerate((None, *SIGNATURES, None))]
    choose = random.Random(0)
    for size in (3, len(SIGNATURES)):
        with signatures.open(max_loras=size, **options) as desk:
            for _ in range(5):
                choose.shuffle(cases)
                for case, generation in zip(cases, desk.together(cases), strict=True):
                    found = answer(generation.output())
                    if case.adapter is None:
                        compare(case.name, found, signatures.alone(case))
                    else:
                        assert set(found.token_ids) == {int(case.adapter.removeprefix("says-"))}
                desk.engine.check_integrity()
            slots = desk.engine.scheduler.slots
            assert slots.num_evictions >= 20 if size == 3 else slots.num_evictions == 0


def test_a_tie_is_one_answer_in_fifty_batches(lab: Lab) -> None:
    """Two equal logits but for rounding: any other order of summation shows as another token."""
    tie = Case("tie", "tie", stream(5, 40), SHORT)
    assert set(lab.alone(tie).token_ids) == set(TIE), "both must win somewhere"
    others = [None, *lab.adapters]
    choose = random.Random(0)
    with lab.open(max_num_seqs=32, enable_prefix_caching=False) as desk:
        for turn in range(50):
            neighbours = [
                Case(f"{turn}-{i}", choose.choice(others), stream(i, 3 + i), SHORT)
                for i in range((2, 3, 5, 7, 16, 32)[turn % 6] - 1)
            ]
            batch = [tie, *neighbours]
            choose.shuffle(batch)
            generation = desk.together(batch)[batch.index(tie)]
            compare(f"turn {turn}", answer(generation.output()), lab.alone(tie))


def test_base_rows_are_those_of_an_engine_without_adapters(lab: Lab) -> None:
    bases = [replace(case, adapter=None) for case in REQUESTS[::2]]
    with lab.open(enable_lora=False, enable_prefix_caching=False) as desk:
        plain = {g.request_id: answer(g.output()) for g in one_by_one(desk, bases)}
    for options in ({}, ngram(3)):
        mixed = [c for base in bases for c in (base, replace(base, name=f"+{base.name}"))]
        mixed = [replace(c, adapter="random-17") if c.name[0] == "+" else c for c in mixed]
        run = lab.run(options, together, mixed)
        for case in bases:
            compare(
                f"{case.name} beside adapters", answer(run.outputs[case.name]), plain[case.name]
            )
            assert run.watch.mixture[case.name] == 2


def test_a_smaller_adapter_shows_no_trace_of_the_slots_last_user(lab: Lab) -> None:
    """Rank 17 on every module, then rank 3 on three of them, in the only slot that there is."""
    large, small = (Case(name, name, stream(6, 80), SHORT) for name in ("random-17", "random-3"))
    run = lab.run({"max_loras": 1}, one_by_one, [large, small, replace(large, name="again")])
    assert run.num_evictions == 2
    compare("small after large", answer(run.outputs["random-3"]), lab.alone(small))
    compare("large after small", answer(run.outputs["again"]), lab.alone(large))


def test_a_reloaded_name_is_a_new_version_and_a_running_request_keeps_its_own(
    lab: Lab, tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    moving = Lab(lab.model, {"changing": folder}, lab.dtype, lab.back_end)
    case = Case("changing", "changing", stream(8, 3 * BLOCK), GREEDY)

    def put(adapter: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(lab.adapters[adapter], folder)

    def right(adapter: str) -> Case:
        return replace(case, adapter=adapter)

    put("random-8")
    with moving.open() as desk:
        desk.together([case])
        [warm] = desk.together([case])
        assert warm.output().num_cached_tokens >= BLOCK
        compare("warm", answer(warm.output()), lab.alone(right("random-8")))
        running = desk.hand_in(case, "running")
        desk.engine.step()
        desk.engine.step()
        put("random-64")
        fresh = desk.hand_in(case, "fresh")
        desk.finish()
        assert fresh.output().num_cached_tokens == 0, "a cached prefix of the old version"
        compare("fresh", answer(fresh.output()), lab.alone(right("random-64")))
        compare("running", answer(running.output()), lab.alone(right("random-8")))
        desk.engine.check_integrity()
