"""Rotary position embedding: the frequencies of each kind, and the table of cosines and sines.

Angles follow transformers to the last bit of float32, since checkpoints were trained with those
roundings. Knows nothing about config files or about how a table is applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeSpec:
    """All that the rotation depends on, besides head_dim and the position.

    factor: how far positions are stretched; low_freq_factor, high_freq_factor: llama3's band;
    beta_fast, beta_slow: yarn's band, in rotations over original_max_position_embeddings;
    attention_factor: multiplies cosines and sines (yarn), None for the value that mscale and
    mscale_all_dim give, or factor alone; truncate: whether yarn's band ends on whole dimensions.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied by: 1 except for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


def cos_sin_table(spec: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, times the attention scaling.

    Both float32 [num_positions, head_dim / 2] on the CPU.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, head_dim)).double()
    scaling = spec.attention_scaling
    return (angles.cos() * scaling).float(), (angles.sin() * scaling).float()


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = spec.theta**exponents
    if spec.kind == "linear":
        return (1.0 / wavelengths) / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / wavelengths)
    if spec.kind == "yarn":
        return _yarn(spec, wavelengths)
    return 1.0 / wavelengths


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Slow rotations are stretched, fast ones kept, a band between is blended."""
    context = spec.original_max_position_embeddings
    low, high = spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / spec.factor + blend * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / spec.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def _yarn(spec: RopeSpec, wavelengths: Tensor) -> Tensor:
    """Dimensions that turn often within the original context are kept, the others stretched."""
    low, high = _yarn_band(spec, 2 * len(wavelengths))
    ramp = ((torch.arange(len(wavelengths), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (spec.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _yarn_band(spec: RopeSpec, head_dim: int) -> tuple[float, float]:
    """First and last dimension of the ramp from kept to stretched."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
