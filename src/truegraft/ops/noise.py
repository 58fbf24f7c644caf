"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers", SC 2011).

A number depends on (seed, sample index, position, token id) and nothing else: there is no
generator state, so batching, speculation and preemption cannot shift it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words in [0, 2³²) as int64 for each counter (c0 is a tensor [n] of such words)."""
    c0 = counter[0]
    c1, c2, c3 = (torch.full_like(c0, word & _MASK) for word in counter[1:])
    k0, k1 = key
    for _ in range(10):
        # NOTE: the 64-bit product wraps to a negative int64; its bits are still right.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def exponential(num_tokens: int, seed: int, sample_index: int, position: int) -> Tensor:
    """-log(1 - u) for every token id: [num_tokens] float32, u uniform in (0, 1) with 32 bits.

    One counter serves four neighbouring ids.
    """
    lanes = torch.arange(-(-num_tokens // 4), dtype=torch.int64)
    words = philox((lanes, position, sample_index, 0), (seed & _MASK, (seed >> 32) & _MASK))
    flat = torch.stack(words, dim=-1).flatten()[:num_tokens]
    u = (flat.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log1p(-u).to(torch.float32)
