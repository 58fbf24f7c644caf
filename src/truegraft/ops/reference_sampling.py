"""One logits row of the reference back end: penalties, masks, filters, noise, argmax.

Each row is treated alone, so nothing here can depend on a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truegraft.ops.interface import SamplingRow
from truegraft.ops.noise import exponential


def adjust_row(z: Tensor, row: SamplingRow) -> None:
    """In place on one row [V]: repetition, frequency, presence, bias, then masks."""
    if row.repetition_penalty != 1.0:
        seen = torch.cat((row.prompt, row.output))
        value = z[seen]
        factor = row.repetition_penalty
        z[seen] = torch.where(value > 0, value / factor, value * factor)
    if row.frequency_penalty or row.presence_penalty:
        counts = torch.bincount(row.output, minlength=len(z))
        z -= row.frequency_penalty * counts.float()
        z -= row.presence_penalty * (counts > 0).float()
    for token, bias in row.bias:
        z[token] += bias
    if row.allowed is not None:
        masked = torch.ones(len(z), dtype=torch.bool)
        masked[list(row.allowed)] = False
        z.masked_fill_(masked, -torch.inf)
    if row.banned:
        z[list(row.banned)] = -torch.inf


def perturb_row(z: Tensor, row: SamplingRow) -> None:
    """In place on one row [V]: temperature, min-p, top-k, top-p, then Gumbel noise.

    The kept set is a threshold on values, so ties at the threshold stay together. top-p sums
    integer weights: exact in any order, on any device.
    """
    z /= row.temperature
    top = z.amax()
    if row.min_p > 0:
        z.masked_fill_(z < top + torch.tensor(row.min_p).log(), -torch.inf)
    if 0 < row.top_k < len(z):
        z.masked_fill_(z < z.topk(row.top_k).values[-1], -torch.inf)
    if row.top_p < 1:
        z.masked_fill_(z < _top_p_threshold(z, top, row.top_p), -torch.inf)
    z -= exponential(len(z), row.seed, row.sample_index, row.position).log()


def _top_p_threshold(z: Tensor, top: Tensor, top_p: float) -> Tensor:
    """The largest value v such that tokens with z ≥ v hold at least top_p of the weight."""
    values = z.sort(descending=True).values
    weights = ((values - top).exp() * 2.0**30).to(torch.int64)
    reached = weights.cumsum(0) >= (weights.sum().double() * top_p).ceil().to(torch.int64)
    return values[(~reached).sum()]
