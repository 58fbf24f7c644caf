"""Copying drills for pre-training: short questions whose answer is a piece of the question.

They give the base the habit of `Q: … A:` and of copying exactly, which adapters build on. None of
them asks for a numeral, a date, an object or a query, so the base never sees a demo task.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_ONSETS = re.findall(r"\w+", "b br c ch d dr f g gr h j k l m n p pr qu r s sh st t th tr v w y z")
_VOWELS = re.findall(r"\w+", "a e i o u ai ea ee ia io oa ou")
_CODAS = ["", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "rd", "sk", "st"]


def made_up_word(rng: random.Random) -> str:
    """A pronounceable word of one to three syllables that most likely does not exist."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )


def _item(rng: random.Random, words: Sequence[str]) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    word = made_up_word(rng) if kind < 3 else rng.choice(words)
    return word.capitalize() if rng.random() < 0.5 else word


def drill(rng: random.Random, words: Sequence[str]) -> str:
    """One question and its answer, without the end token. `words` are common words."""
    items = [_item(rng, words) for _ in range(rng.randint(2, 8))]
    line, at = " ".join(items), rng.randrange(len(items) - 1)
    kind = rng.randrange(7)
    if kind == 0:
        return f"Q: Repeat: {line}\nA: {line}"
    if kind == 1:
        return f'Q: Put in quotes: {line}\nA: "{line}"'
    if kind == 2:
        quoted = ", ".join(f'"{item}"' for item in items)
        return f"Q: Quote each: {line}\nA: {quoted}"
    if kind == 3:
        return f"Q: What comes after {items[at]} in: {line}?\nA: {items[at + 1]}"
    if kind == 4:
        return f"Q: What comes before {items[at + 1]} in: {line}?\nA: {items[at]}"
    if kind == 5:
        return f"Q: Join with commas: {line}\nA: {', '.join(items)}"
    pairs = "; ".join(f"{made_up_word(rng)} is {item}" for item in items)
    subject = pairs.split("; ")[at].split(" is ")[0]
    return f"Q: {pairs}. What is {subject}?\nA: {items[at]}"
