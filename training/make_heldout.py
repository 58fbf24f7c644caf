"""Write the held-out prompts of every task, 300 each with distinct keys: {task}.jsonl."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from truegraft.demo.tasks import TASKS, Example, examples


def draw(task: str, count: int, seed: int) -> list[Example]:
    """`count` held-out examples with distinct answers."""
    drawn: dict[str, Example] = {}
    source = examples(task, "heldout", random.Random(f"{task} {seed}"))
    while len(drawn) < count:
        example = next(source)
        drawn.setdefault(example.answer, example)
    return list(drawn.values())


def main() -> None:
    """Write one file a task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        rows = [json.dumps(e._asdict()) for e in draw(task, args.count, args.seed)]
        (args.out / f"{task}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
