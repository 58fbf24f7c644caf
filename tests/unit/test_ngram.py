"""Prompt lookup: what followed the latest earlier occurrence of the longest matching tail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truegraft.api import SamplingParams
from truegraft.config import SpeculativeConfig
from truegraft.core.request import Request
from truegraft.speculation.ngram import NgramIndex, NgramProposer


def by_search(tokens: Sequence[int], shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """The definition, by looking everywhere."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                known = list(tokens)
                for _ in range(count):
                    known.append(known[end + len(known) - len(tokens)])
                return tuple(known[len(tokens) :])
    return ()


def propose(tokens: Sequence[int], shortest: int = 2, longest: int = 4) -> tuple[int, ...]:
    return NgramIndex(shortest, longest).propose(tokens, 3)


def make_request(tokens: Sequence[int]) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        max_tokens=100,
    )


def test_the_tokens_after_the_earlier_occurrence_are_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2]) == (3, 4, 5)


def test_the_latest_occurrence_wins() -> None:
    assert propose([1, 2, 3, 0, 1, 2, 4, 5, 6, 1, 2]) == (4, 5, 6)


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert propose([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]) == (3, 8, 1)


def test_a_draft_continues_a_repetition_past_the_end() -> None:
    assert propose([5, 6, 5, 6]) == (5, 6, 5)
    assert propose([4, 4, 4]) == (4, 4, 4)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 1]])
def test_without_an_earlier_occurrence_there_is_no_draft(tokens: list[int]) -> None:
    assert propose(tokens) == ()


def test_a_single_token_matches_where_it_may() -> None:
    assert propose([1, 2, 3, 1], shortest=1) == (2, 3, 1)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
)
def test_it_equals_the_search_however_the_tokens_come(
    tokens: list[int], shortest: int, more: int, data: st.DataObject
) -> None:
    index = NgramIndex(shortest, shortest + more)
    length = 0
    while length < len(tokens):
        length = min(len(tokens), length + data.draw(st.integers(1, 5)))
        expected = by_search(tokens[:length], shortest, shortest + more, 4)
        assert index.propose(tokens[:length], 4) == expected


def test_requests_do_not_see_each_other() -> None:
    proposer = NgramProposer(SpeculativeConfig("ngram", 2))
    repeats, other = make_request([1, 2, 3, 1, 2]), make_request([5, 1, 2])
    assert proposer.propose([repeats, other]) == [(3, 1), ()]
    repeats.token_ids += [9]
    assert proposer.propose([repeats]) == [()]


def test_a_forgotten_request_starts_again() -> None:
    proposer = NgramProposer(SpeculativeConfig("ngram", 2))
    request = make_request([1, 2, 3, 1, 2])
    assert proposer.propose([request]) == [(3, 1)]
    proposer.forget(request)
    proposer.forget(request)
    assert proposer.propose([request]) == [(3, 1)]
