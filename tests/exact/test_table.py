"""Each request under each perturbation is the same request alone: token ids and logprob bits."""

from __future__ import annotations

import pytest
from exact.cases import PERTURBATIONS, REQUESTS, Perturbation, check_cell
from exact.lab import Case, Lab, Run

CELLS = [(p, case) for p in PERTURBATIONS for case in REQUESTS if p.applies(case)]

LABS = ("float32", "bfloat16", "bfloat16-reference")

Runs = dict[tuple[str, str], Run]


@pytest.mark.parametrize("lab", LABS, indirect=True, scope="session")
@pytest.mark.parametrize(
    ("perturbation", "case"), [pytest.param(p, c, id=f"{c.name} x {p.name}") for p, c in CELLS]
)
def test_exact(lab: Lab, runs: Runs, perturbation: Perturbation, case: Case) -> None:
    key = (lab.name, perturbation.name)
    if key not in runs:
        runs[key] = perturbation.run(lab)
    run = runs[key]
    check_cell(lab, perturbation, run, case)
    perturbation.witness(run, case)
    run.check_integrity()


def test_each_adapter_answers_in_its_own_way(lab: Lab) -> None:
    """Otherwise the table compares nothing: on one prompt, no two adapters give one answer."""
    prompt = REQUESTS[0].prompt
    answers = {
        lab.alone(Case("", adapter, prompt, REQUESTS[0].params)).token_ids
        for adapter in (None, *lab.adapters)
    }
    assert len(answers) == 1 + len(lab.adapters)


def test_seeded_answers_differ_from_greedy_ones(lab: Lab) -> None:
    half = len(REQUESTS) // 2
    for greedy, seeded in zip(REQUESTS[:half], REQUESTS[half:], strict=True):
        same_prompt = Case("", seeded.adapter, greedy.prompt, seeded.params)
        equal = lab.alone(same_prompt).token_ids == lab.alone(greedy).token_ids
        assert equal == (greedy.adapter == "signature")
