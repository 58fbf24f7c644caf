"""Prompt lookup: propose what followed the latest earlier occurrence of the last n tokens.

Source of the method: Saxena, "Prompt Lookup Decoding" (2023). Kept per request as an index that
grows with its tokens, so a proposal costs the same at any length. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from truegraft.config import SpeculativeConfig
from truegraft.core.request import Request


class NgramIndex:
    """Where each n-gram of one token sequence last ended, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._end_of: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end before this position are in

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens after the longest match of the tail, or none.

        Past the sequence's end the draft continues from itself, as a repetition would.
        """
        self._extend(tokens)
        for size in self._sizes:
            end = self._end_of.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if end is not None:
                period = len(tokens) - end
                return tuple(tokens[end + i % period] for i in range(count))
        return ()

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that ends before the tail's own last token."""
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._end_of[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))


class NgramProposer:
    """One index per request."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """See `Proposer.propose`."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> tuple[int, ...]:
        config = self._config
        index = self._indices.get(id(request))
        if index is None:
            index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
            self._indices[id(request)] = index
        return index.propose(request.token_ids, config.num_speculative_tokens)

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
        self._indices.pop(id(request), None)
