"""Where outputs and workspaces of kernels come from: one place, so that tests can fence it.

No wrapper relies on what fresh memory holds, and none writes outside what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Allocator = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


def _plain(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_allocate: Allocator = _plain


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for an output or a workspace."""
    return _allocate(shape, dtype, device)


@contextmanager
def allocator(allocate: Allocator) -> Iterator[None]:
    """Take all memory inside from `allocate`."""
    global _allocate
    before, _allocate = _allocate, allocate
    try:
        yield
    finally:
        _allocate = before
