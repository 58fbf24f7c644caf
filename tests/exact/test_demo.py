"""The table again, on the demo model and its trained adapters, in the dtype that they ship in."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from exact.cases import GREEDY, PERTURBATIONS, SEEDED, Perturbation, check_cell
from exact.lab import Case, Lab, Run

from truegraft import demo
from truegraft.text import Tokenizer

HELD_OUT = Path(__file__).parents[1] / "data" / "demo"
TASKS = sorted(file.stem for file in HELD_OUT.glob("*.jsonl"))
CHOSEN = (
    "batch-7",
    *("ngram-1", "ngram-3", "ngram-7"),
    *("chunk-64", "cache-warm", "preempted", "evicted", "shuffled-1"),
)


def some_drafts(run: Run, case: Case) -> None:
    """Of all drafts some were wrong: a trained answer may be one that ngrams foresee."""
    assert run.outputs[case.name].outputs[0].speculation.num_accepted_tokens > 0
    assert run.stats.num_accepted_tokens < run.stats.num_draft_tokens


ROWS = [
    replace(row, witness=some_drafts) if row.name.startswith("ngram") else row
    for row in PERTURBATIONS
    if row.name in CHOSEN
]
NAMES = [f"{task or 'base'}/{mode}" for task in (None, *TASKS) for mode in ("greedy", "seeded")]


@cache
def demo_lab() -> Lab:
    return Lab(demo.model_path(), demo.adapters(), "bfloat16")


@cache
def demo_case(name: str) -> Case:
    """Four examples with their answers (more than a block), and a question."""
    task, _, mode = name.partition("/")
    file = HELD_OUT / f"{TASKS[0] if task == 'base' else task}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    # Modes share no prefix, so that no case finds another's in the cache.
    examples = [json.loads(line) for line in lines[:: 1 if mode == "greedy" else -1][:5]]
    text = "\n".join(f"{e['prompt']} {e['answer']}" for e in examples[:4])
    tokens = Tokenizer.from_directory(demo.model_path()).encode(f"{text}\n{examples[4]['prompt']}")
    params = replace(GREEDY if mode == "greedy" else SEEDED, max_tokens=48)
    return Case(name, None if task == "base" else task, tuple(tokens), params)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("name", NAMES)
def test_exact(runs: dict[tuple[str, str], Run], name: str, row: Perturbation) -> None:
    lab, key = demo_lab(), ("demo", row.name)
    if key not in runs:
        runs[key] = row.run(lab, [demo_case(n) for n in NAMES])
    case = demo_case(name)
    assert row.applies(case), "the prompt is too short for this row"
    check_cell(lab, row, runs[key], case)
    row.witness(runs[key], case)
    runs[key].check_integrity()
