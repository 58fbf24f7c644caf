"""Memory in which a kernel's mistakes show: red zones around each tensor, and poison in it.

A write outside a tensor changes a zone, which `check` finds. A read outside meets a NaN (or, as
an integer, a number far from any index), and an output that nobody wrote is a NaN or a sentinel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ZONE = 1024  # bytes on each side, at least
ALIGNMENT = 512  # bytes, as CUDA's allocator gives
SENTINEL = -77  # of integers
# A NaN as bfloat16, float16 and float32, but not the one that hardware makes: a kernel which
# writes a NaN too far changes it.
_PATTERN = (0xA5, 0xFF)


@dataclass(frozen=True)
class _Held:
    raw: Tensor  # [bytes] uint8, zones and all
    start: int
    end: int
    what: str


class Guard:
    """An allocator for `memory.allocator`; also holds copies of inputs."""

    def __init__(self, zone: int = ZONE) -> None:
        self._zone = zone
        self._held: list[_Held] = []

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Poisoned memory between red zones."""
        size = prod(shape) * dtype.itemsize
        raw = torch.empty(size + 2 * self._zone + ALIGNMENT, dtype=torch.uint8, device=device)
        raw[::2], raw[1::2] = _PATTERN
        start = self._zone + -(raw.data_ptr() + self._zone) % ALIGNMENT
        self._held.append(_Held(raw, start, start + size, f"{dtype} {list(shape)}"))
        inside = raw[start : start + size].view(dtype).view(shape)
        return inside.fill_(_poison(dtype))

    def place(self, tensor: Tensor) -> Tensor:
        """A copy with the same values and strides, between red zones."""
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        dense = tensor.permute(order)
        assert dense.is_contiguous(), "only permuted dense tensors are placed"
        copy = self(tuple(dense.shape), tensor.dtype, tensor.device).copy_(dense)
        return copy.permute([order.index(axis) for axis in range(tensor.dim())])

    def check(self) -> None:
        """Assert that nobody wrote into a zone since the memory was given."""
        assert self._held, "nothing was allocated here: the guard guarded nothing"
        for held in self._held:
            for side, zone, first in (
                ("before", held.raw[: held.start], 0),
                ("after", held.raw[held.end :], held.end),
            ):
                expected = torch.tensor(_PATTERN, dtype=torch.uint8, device=zone.device)
                expected = expected.roll(-(first % 2)).repeat(len(zone) // 2 + 1)[: len(zone)]
                wrong = (zone != expected).nonzero().flatten()
                assert not len(wrong), (
                    f"{len(wrong)} bytes {side} a tensor {held.what} were written, the first at "
                    f"{int(wrong[0]) + first - (held.start if side == 'before' else held.end)}"
                )


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An allocator for `memory.allocator` that only poisons."""
    return torch.full(shape, _poison(dtype), dtype=dtype, device=device)


def unwritten(tensor: Tensor) -> bool:
    """Whether any element still is the poison (floats: any NaN)."""
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().any())
    return bool((tensor == _poison(tensor.dtype)).any())


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return torch.nan
    return SENTINEL % 256 if dtype == torch.uint8 else SENTINEL
