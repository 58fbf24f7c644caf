"""One request for each sampling feature, in the same prompt, to be run with and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from exact.cases import GREEDY, SEEDED, ngram, stream, together
from exact.lab import Answer, Case, Lab, Run, answer, compare
from exact.zoo import ALPHABET

# A feature's parameters may depend on the answer without it: a stop string must occur.
FEATURES: dict[str, Callable[[Answer], dict[str, Any]]] = {
    "none": lambda plain: {},
    "presence_penalty": lambda plain: {"presence_penalty": 2.0},
    "frequency_penalty": lambda plain: {"frequency_penalty": 2.0},
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.2},
    "min_p": lambda plain: {"min_p": 0.1, "temperature": 9.0},
    "top_k": lambda plain: {"top_k": 3, "temperature": 9.0},
    "logit_bias": lambda plain: {"logit_bias": {plain.token_ids[2]: -90.0, ALPHABET[0]: 4.0}},
    "allowed_token_ids": lambda plain: {"allowed_token_ids": [1, 2, 3, *ALPHABET[:3]]},
    # Few tokens: drafts are often right, and what a right draft adds to the counts decides.
    "penalties of few": lambda plain: {
        "allowed_token_ids": list(ALPHABET[:4]),
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.3,
    },
    "min_tokens": lambda plain: {"stop_token_ids": plain.token_ids[3:5], "min_tokens": 9},
    "stop_token_ids": lambda plain: {"stop_token_ids": plain.token_ids[8:9]},
    "stop": lambda plain: {"stop": [plain.text[9:12]]},
    "stop and keep": lambda plain: {
        "stop": [plain.text[9:12]],
        "include_stop_str_in_output": True,
    },
    "all of them": lambda plain: {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_p": 0.01,
        "top_k": 20,
        "logit_bias": {ALPHABET[1]: 2.0},
        "min_tokens": 20,
        "stop_token_ids": plain.token_ids[4:5],
    },
}
NOISE_ONLY = ("min_p", "top_k")  # features that cannot matter at temperature 0
ADAPTERS = (None, "random-8", "random-17")


def feature_case(lab: Lab, feature: str, mode: str) -> Case:
    """The feature's request. Adapters take turns."""
    index = list(FEATURES).index(feature)
    params = GREEDY if mode == "greedy" else SEEDED
    plain = Case("", ADAPTERS[index % 3], stream(12, 90), params)
    options = FEATURES[feature](lab.alone(plain))
    if mode == "greedy":
        options.pop("temperature", None)
    return replace(plain, name=f"{feature}/{mode}", params=replace(params, **options))


def run_features(lab: Lab, drafts: int) -> Run:
    """All features at once, under ngram speculation."""
    cases = [feature_case(lab, f, mode) for f in FEATURES for mode in ("greedy", "seeded")]
    return lab.run(ngram(drafts), together, cases)


def check_feature(lab: Lab, run: Run, case: Case) -> None:
    """One cell: the answer with drafts is the answer without. Raises Mismatch."""
    compare(case.name, answer(run.outputs[case.name]), lab.alone(case))
