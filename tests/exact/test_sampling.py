"""Every sampling feature under speculation is what it is without: ids, bits, text, stop reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.cases import ngram
from exact.features import FEATURES, NOISE_ONLY, check_feature, feature_case, run_features
from exact.lab import Case, Lab, Run, compare
from exact.samples import CASES, HOT, check_samples, run_samples, samples_alone

DRAFTS = (1, 3, 7)


@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda k: f"ngram-{k}")
@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("feature", FEATURES)
def test_speculation_changes_nothing(
    lab: Lab, runs: dict[tuple[str, str], Run], feature: str, mode: str, drafts: int
) -> None:
    key = (lab.name, f"features-{drafts}")
    if key not in runs:
        runs[key] = run_features(lab, drafts)
    case = feature_case(lab, feature, mode)
    check_feature(lab, runs[key], case)
    stats = runs[key].outputs[case.name].outputs[0].speculation
    assert stats.num_draft_tokens > stats.num_accepted_tokens, "no draft was wrong"
    everyone = [run.outputs[0].speculation for run in runs[key].outputs.values()]
    assert sum(s.num_accepted_tokens > 0 for s in everyone) > len(everyone) / 2


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_matters(lab: Lab, feature: str, mode: str) -> None:
    plain, changed = feature_case(lab, "none", mode), feature_case(lab, feature, mode)
    found, without = lab.alone(changed), lab.alone(replace(plain, adapter=changed.adapter))
    nothing = feature == "none" or (mode == "greedy" and feature in NOISE_ONLY)
    assert (found == without) == nothing
    if feature.startswith("stop"):
        assert found.finish_reason == "stop" and found.stop_reason is not None
    if feature == "min_tokens":
        assert len(found.token_ids) >= changed.params.min_tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_samples_differ_and_the_first_is_the_request_itself(lab: Lab, case: Case) -> None:
    alone = samples_alone(lab, case)
    assert len({sample.token_ids for sample in alone}) == 4
    compare("n=1", alone[0], lab.alone(replace(case, params=HOT)))


@pytest.mark.parametrize("drafts", (0, *DRAFTS))
def test_sample_i_of_four_is_sample_i_alone(lab: Lab, drafts: int) -> None:
    run = run_samples(lab, ngram(drafts) if drafts else {})
    check_samples(lab, run)
    assert all(run.watch.company[case.name] >= 4 for case in CASES)
