"""Exact-match verification: the target decides each token, the draft only how many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truegraft.speculation.verify import accept


@pytest.mark.parametrize(
    ("draft", "target", "accepted"),
    [
        ([], [7], 0),
        ([1], [1, 2], 1),
        ([1], [2, 2], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [0, 2, 3, 4], 0),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(
    draft: list[int], target: list[int], accepted: int
) -> None:
    assert accept(draft, target) == accepted


def test_the_target_has_one_token_more() -> None:
    with pytest.raises(AssertionError):
        accept([1, 2], [1, 2])


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 5), st.integers(0, 4))
def test_any_drafter_gives_the_tokens_of_plain_decoding(
    drafts: list[int], start: int, size: int
) -> None:
    """The target is a function of the tokens before it; drafts come from anywhere."""

    def target_of(tokens: list[int]) -> int:
        return (sum(tokens) * 7 + len(tokens)) % 4

    plain = [start]
    while len(plain) < 20:
        plain.append(target_of(plain))
    tokens = [start]
    while len(tokens) < 20:
        draft, drafts = drafts[:size], drafts[size:]
        rows = [target_of(tokens + draft[:i]) for i in range(len(draft) + 1)]
        tokens += rows[: accept(draft, rows) + 1]
    assert tokens[:20] == plain
