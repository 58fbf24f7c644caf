"""Four samples of a prompt, and each of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exact.cases import SEEDED, stream, together
from exact.lab import Answer, Case, Lab, Run, answer, compare

HOT = replace(SEEDED, temperature=5.0)  # hot enough that four samples differ


def four_samples(adapter: str | None) -> Case:
    """A prompt of which four samples are wanted."""
    return Case(f"four of {adapter}", adapter, stream(11, 70), replace(HOT, n=4))


CASES = (four_samples(None), four_samples("random-8"))


def run_samples(lab: Lab, options: Mapping[str, Any]) -> Run:
    """All samples side by side."""
    return lab.run(options, together, CASES)


def samples_alone(lab: Lab, case: Case) -> list[Answer]:
    """Each sample in steps of its own: an engine that runs one request at a time."""
    run = lab.run({"max_num_seqs": 1, "enable_prefix_caching": False}, together, [case])
    assert run.watch.company == {case.name: 1}, "samples ran side by side"
    return [answer(run.outputs[case.name], index) for index in range(4)]


def check_samples(lab: Lab, run: Run) -> None:
    """Sample i of four is sample i alone. Raises Mismatch."""
    for case in CASES:
        for index, alone in enumerate(samples_alone(lab, case)):
            compare(f"{case.name}, sample {index}", answer(run.outputs[case.name], index), alone)
