"""What a drafter is: the protocol that n-gram lookup and, later, draft models follow.

Exactness does not rest on any drafter: whatever it proposes, `verify` keeps only what the target
would have emitted. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from truegraft.core.request import Request


class Proposer(Protocol):
    """Proposes tokens for requests that are about to decode."""

    def propose(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """A draft for each request, possibly empty, of at most num_speculative_tokens."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept about a request that has ended."""
        ...
