"""Persistent rows: what the device remembers of a running request between steps.

Tokens and block tables stay in place for as long as a request runs; a step's own tensors are made
from them in `inputs`. Knows nothing about a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from truegraft.core.plan import RowOpening


class Rows:
    """`max_num_seqs` rows of up to `max_len` tokens."""

    def __init__(self, max_num_seqs: int, max_len: int, block_size: int) -> None:
        max_blocks = -(-max_len // block_size)
        self.token_ids = torch.zeros(max_num_seqs, max_len, dtype=torch.int64)  # [rows, max_len]
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.openings: list[RowOpening | None] = [None] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs

    def open(self, opening: RowOpening) -> None:
        """Give a row to a request, with the tokens it has so far."""
        row = opening.row
        self.openings[row] = opening
        self._num_blocks[row] = 0
        self.write(row, 0, opening.token_ids)

    def close(self, row: int) -> None:
        """Take a row back."""
        self.openings[row] = None

    def opening(self, row: int) -> RowOpening:
        """Who holds the row."""
        opening = self.openings[row]
        assert opening is not None, f"row {row} is not open"
        return opening

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Set tokens from position `start` on; drafts are written where they would stand."""
        self.token_ids[row, start : start + len(token_ids)] = torch.tensor(token_ids)

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """Extend the row's block table."""
        start = self._num_blocks[row]
        self.block_tables[row, start : start + len(blocks)] = torch.tensor(
            blocks, dtype=torch.int32
        )
        self._num_blocks[row] = start + len(blocks)
