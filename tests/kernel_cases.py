"""Random linears with adapters of mixed ranks, on any device, and what they should compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truegraft.ops.interface import PAGE_RANK, Linear, LinearPart, LoraPages
from truegraft.ops.triton.linear import pack


def bits(x: Tensor) -> Tensor:
    """The bytes of x as integers, so that equality means equal bits (NaN and -0.0 included)."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def error(y: Tensor, exact: Tensor) -> float:
    """Norm-relative error; exact is float64."""
    return float((y.double() - exact).norm() / exact.norm())


def rounding_floor(exact: Tensor, dtype: torch.dtype) -> float:
    """The error of rounding alone."""
    return error(exact.to(dtype), exact)


@dataclass(frozen=True)
class LinearCase:
    """A linear of fused `sizes` over k features, with one adapter a slot (its rank: `ranks`)."""

    layer: Linear  # packed
    weight: Tensor  # [N, K]
    depth: Tensor  # [slots] int32
    ordinals: int

    @property
    def num_slots(self) -> int:
        return len(self.depth)


def make_linear(
    sizes: Sequence[int],
    k: int,
    ranks: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    seed: int = 0,
) -> LinearCase:
    """Part p has no adapter in slots where (slot + p) % 5 == 4: none need have every module."""
    random = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=random, device=device) * std).to(dtype)

    ordinals = 1 << (-(-max(ranks) // PAGE_RANK) - 1).bit_length()
    parts, offset = [], 0
    for number, size in enumerate(sizes):
        own = [0 if (slot + number) % 5 == 4 else rank for slot, rank in enumerate(ranks)]
        pages = _pages(own, ordinals, k, size, randn, device)
        parts.append(LinearPart(offset, size, pages))
        offset += size
    weight = randn(offset, k, std=k**-0.5)
    added = randn(offset, std=1.0) if bias else None
    held = torch.stack([p.pages.rank for p in parts if p.pages is not None]).amax(0)
    depth = ((held + PAGE_RANK - 1) // PAGE_RANK).int()
    return LinearCase(Linear(pack(weight), added, tuple(parts)), weight, depth, ordinals)


def _pages(
    ranks: Sequence[int],
    ordinals: int,
    k: int,
    n: int,
    randn: Callable[..., Tensor],
    device: torch.device,
) -> LoraPages:
    counts = [-(-rank // PAGE_RANK) for rank in ranks]
    total = sum(counts) + 2
    a, b = randn(total, PAGE_RANK, k, std=k**-0.5), randn(total, n, PAGE_RANK, std=0.2)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
    page_of = torch.full((len(ranks), ordinals), -1, dtype=torch.int32)
    for slot, rank in enumerate(ranks):
        for ordinal in range(counts[slot]):
            page = order.pop()
            page_of[slot, ordinal] = page
            a[page, max(rank - ordinal * PAGE_RANK, 0) :] = 0.0
            b[page, :, max(rank - ordinal * PAGE_RANK, 0) :] = 0.0
    for page in order:  # free pages may hold anything
        a[page], b[page] = torch.nan, torch.nan
    scale = 0.5 + torch.arange(len(ranks), device=device) * 0.125
    held = torch.tensor(ranks, dtype=torch.int32, device=device)
    return LoraPages(a, b.transpose(1, 2), page_of.to(device), held, scale)


def expected_linear(x: Tensor, case: LinearCase, slots: Tensor) -> Tensor:
    """float64, S rounded to the model dtype as the definition says: [M, N]."""
    y = x.double() @ case.weight.double().T
    if case.layer.bias is not None:
        y += case.layer.bias.double()
    for part in case.layer.parts:
        pages = part.pages
        assert pages is not None
        table, columns = pages.page_of.tolist(), slice(part.offset, part.offset + part.size)
        for slot in sorted(set(slots.tolist()) - {-1}):
            rows = (slots == slot).nonzero().flatten()
            for page in table[slot]:
                if page >= 0:
                    s = x[rows].double() @ pages.a[page].double().T * pages.scale[slot].double()
                    y[rows, columns] += s.to(x.dtype).double() @ pages.b[page].double()
    return y
