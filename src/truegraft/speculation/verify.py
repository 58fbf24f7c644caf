"""Exact-match verification: a draft is accepted while it is what the target emits anyway.

The target's token at each position is the one that plain decoding would draw there, with that
position's own noise. So the output cannot depend on the drafter. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(draft: Sequence[int], target: Sequence[int]) -> int:
    """How many draft tokens equal the target's, before the first that does not.

    target has one token more than draft. target[: accepted + 1] is emitted: the accepted drafts
    and the token after them.
    """
    assert len(target) == len(draft) + 1
    for index, token in enumerate(draft):
        if token != target[index]:
            return index
    return len(draft)
