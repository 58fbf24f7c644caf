"""The suite can fail: each break is noticed, by the same cells, as a difference of tokens or bits.

Nothing but a Mismatch counts; any other exception fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from exact.cases import PERTURBATIONS, REQUESTS, Perturbation, check_cell
from exact.features import FEATURES, check_feature, feature_case, run_features
from exact.lab import Lab, Mismatch, Run
from exact.mutations.breaks import BREAKS, Break, reverse_the_ranks
from exact.samples import check_samples, run_samples

MODES = ("greedy", "seeded")
DRAFTS = 7
Checks = list[Callable[[], None]]
Runs = dict[tuple[str, str], Run]


def run_cells(lab: Lab, name: str) -> Run:
    """Run a perturbation, or the features, or the samples."""
    if name.startswith("features"):
        return run_features(lab, DRAFTS)
    if name == "samples":
        return run_samples(lab, {})
    return _perturbation(name).run(lab)


def checks_of(lab: Lab, name: str, run: Run) -> Checks:
    """The cells of a run: each raises Mismatch if its answer is not the one alone."""
    if name.startswith("features"):
        cases = [feature_case(lab, feature, mode) for feature in FEATURES for mode in MODES]
        return [partial(check_feature, lab, run, case) for case in cases]
    if name == "samples":
        return [partial(check_samples, lab, run)]
    row = _perturbation(name)
    return [partial(check_cell, lab, row, run, case) for case in REQUESTS if row.applies(case)]


def _perturbation(name: str) -> Perturbation:
    [found] = [row for row in PERTURBATIONS if row.name == name]
    return found


def mismatches(checks: Checks) -> int:
    """How many cells differ."""
    count = 0
    for check in checks:
        try:
            check()
        except Mismatch:
            count += 1
    return count


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.name)
@pytest.mark.parametrize("lab", ["float32"], indirect=True, scope="session")
def test_noticed(lab: Lab, runs: Runs, monkeypatch: pytest.MonkeyPatch, broken: Break) -> None:
    key = (lab.name, broken.cells)
    if key not in runs:
        runs[key] = run_cells(lab, broken.cells)
    assert mismatches(checks_of(lab, broken.cells, runs[key])) == 0, "they fail without the break"
    with monkeypatch.context() as patch:
        broken.apply(patch)
        run = run_cells(lab, broken.cells)
    checks = checks_of(lab, broken.cells, run)
    assert mismatches(checks) > 0, "not noticed"


@pytest.mark.parametrize("lab", ["float32"], indirect=True, scope="session")
def test_another_order_of_ranks_flips_the_tie(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in bits of a logprob alone: in tokens, as a user would see it."""
    with monkeypatch.context() as patch:
        reverse_the_ranks(patch)
        run = run_cells(lab, "batch-7")
    [tie] = [case for case in REQUESTS if case.name == "tie/greedy"]
    assert tuple(run.outputs[tie.name].outputs[0].token_ids) != lab.alone(tie).token_ids
