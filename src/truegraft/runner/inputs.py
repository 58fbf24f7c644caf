"""A step's tensors, made from its plan and the persistent rows.

One array of slots: a token row's slot is its work's, a logits row's slot is its token row's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truegraft.core.plan import RowWork
from truegraft.ops.interface import TokenBatch
from truegraft.runner.rows import Rows


def build_batch(work: Sequence[RowWork], rows: Rows, multiple: int, block_size: int) -> TokenBatch:
    """The token rows of a step, in the order of its work, padded to a multiple of `multiple`."""
    counts = torch.tensor([w.num_tokens for w in work])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    num_tokens = int(offsets[-1])
    starts = torch.tensor([w.start for w in work])
    seq_row = torch.tensor([w.row for w in work])
    seq_of = torch.repeat_interleave(torch.arange(len(work)), counts)
    positions = torch.arange(num_tokens) - offsets[seq_of] + starts[seq_of]
    row_of = seq_row[seq_of]
    slots = torch.tensor([w.slot for w in work], dtype=torch.int32)[seq_of]
    padding = -num_tokens % multiple
    return TokenBatch(
        num_tokens=num_tokens,
        token_ids=_pad(rows.token_ids[row_of, positions], padding, 0),
        positions=_pad(positions, padding, 0),
        slots=_pad(slots, padding, -1),
        kv_block=rows.block_tables[row_of, positions // block_size].long(),
        kv_offset=positions % block_size,
        seq_row=seq_row,
        seq_offset=offsets,
        seq_start=starts,
        block_tables=rows.block_tables,
        max_query=max(w.num_tokens for w in work),
        max_context=max(w.start + w.num_tokens for w in work),
        total_context=sum(w.start + w.num_tokens for w in work),
    )


def pad_index(index: Sequence[int], multiple: int) -> Tensor:
    """Row indices padded with the last one to a multiple: int64 [L]."""
    padded = [*index, *([index[-1]] * (-len(index) % multiple))]
    return torch.tensor(padded)


def _pad(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, count), value=fill) if count else values
