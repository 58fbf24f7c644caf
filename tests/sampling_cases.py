"""A row that asks for nothing, from which the sampling tests make theirs."""

from __future__ import annotations

import torch

from truegraft.ops.interface import SamplingRow

PLAIN = SamplingRow(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    prompt=torch.tensor([], dtype=torch.int64),
    output=torch.tensor([], dtype=torch.int64),
    bias=(),
    allowed=None,
    banned=(),
    seed=1,
    sample_index=0,
    position=5,
)
