"""The embedding kernel, interpreted on the CPU, says what the definition says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from kernel_cases import same_bits
from torch import Tensor

from truegraft.ops.interface import PAGE_RANK, Embedding, LoraPages
from truegraft.ops.reference import ReferenceOps
from truegraft.ops.triton import embedding, memory

FP16, FP32 = torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
NAN = math.nan
VOCABULARY, SLOTS = 37, 4


@dataclass(frozen=True)
class Rows:
    slots: Tensor


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, 12345.0, dtype=dtype, device=device)

    with memory.allocator(poisoned):
        yield


def make(width: int, dtype: torch.dtype) -> Embedding:
    """Slots: rank 5; rank 56, on pages that do not ascend; nothing; rank 16."""
    a, b = randn(7, PAGE_RANK, VOCABULARY, dtype=dtype, seed=1), randn(7, width, PAGE_RANK, seed=2)
    b = b.to(dtype)
    a[2, 5:], b[2, :, 5:], a[1, 8:], b[1, :, 8:] = 0, 0, 0, 0
    a[4], b[4] = NAN, NAN  # a free page
    page_of = torch.tensor(
        [[2, -1, -1, -1], [6, 3, 5, 1], [-1, -1, -1, -1], [0, -1, -1, -1]], dtype=torch.int32
    )
    pages = LoraPages(
        a, b.transpose(1, 2), page_of, torch.tensor([5, 56, 0, 16]), torch.tensor([2, 0.3, 9, 0.5])
    )
    return Embedding(randn(VOCABULARY, width, dtype=dtype), pages)


def embed(tokens: list[int], slots: list[int], table: Embedding) -> Tensor:
    rows = Rows(torch.tensor(slots, dtype=torch.int32))
    return embedding.embed(torch.tensor(tokens), table, rows)


def chain(token: int, slot: int, table: Embedding) -> Tensor:
    """One row, a multiply and an add at a time: fused alike where products are exact (fp16)."""
    assert table.pages is not None
    total = table.weight[token].float()
    for page in table.pages.page_of[slot].tolist() if slot >= 0 else []:
        if page >= 0:
            s = (table.pages.a[page, :, token].float() * table.pages.scale[slot]).to(total.dtype)
            for rank in range(PAGE_RANK):
                factor = s[rank].to(table.weight.dtype).float()
                total = total + factor * table.pages.b[page, rank].float()
    return total.to(table.weight.dtype)


@DTYPES
@pytest.mark.parametrize("width", [1, 64, 100, 257])
def test_pages_are_added_in_order(dtype: torch.dtype, width: int) -> None:
    table = make(width, dtype)
    tokens, slots = [0, 36, 5, 5, 5, 7, 1], [-1, 0, 1, 2, 3, 1, -1]
    y = embed(tokens, slots, table)
    want = torch.stack([chain(t, s, table) for t, s in zip(tokens, slots, strict=True)])
    assert y.shape == (7, width) and same_bits(y, want)


@DTYPES
def test_it_is_the_reference(dtype: torch.dtype) -> None:
    table = make(96, dtype)
    tokens, slots = [3, 36, 5, 9, 0], [1, 0, 3, -1, 2]
    ops = ReferenceOps(dtype)
    upcast = table.pages
    assert upcast is not None
    pages = LoraPages(upcast.a.float(), upcast.b.float(), upcast.page_of, upcast.rank, upcast.scale)
    rows = ops.plan_rows(torch.tensor(slots, dtype=torch.int32))
    want = ops.embed(torch.tensor(tokens), Embedding(table.weight, pages), rows)
    tolerance = 2 * torch.finfo(dtype).eps * float(want.abs().max())
    torch.testing.assert_close(embed(tokens, slots, table), want, rtol=0, atol=tolerance)


@DTYPES
def test_base_rows_are_the_table(dtype: torch.dtype) -> None:
    table = make(40, dtype)
    table.weight[3, ::2] = -0.0
    table.weight[4, 0] = NAN
    tokens, slots = [3, 4, 3, 8, 0], [-1, -1, 2, 1, -1]
    y = embed(tokens, slots, table)
    for row in (0, 1, 2, 4):
        assert same_bits(y[row], table.weight[tokens[row]])
    assert not same_bits(y[3], table.weight[8]) and y[3].isfinite().all()
    assert same_bits(embed(tokens, [-1] * 5, Embedding(table.weight)), table.weight[tokens])


@DTYPES
def test_what_does_not_exist_is_nan(dtype: torch.dtype) -> None:
    table = make(300, dtype)
    tokens = [-1, VOCABULARY, 2**40, -(2**40), 5, 5, 5, 5, VOCABULARY - 1]
    slots = [-1, 0, 1, -1, -2, -100, SLOTS, 2**31 - 1, 1]
    y = embed(tokens, slots, table)
    assert y.isnan().all(1).tolist() == [True] * 8 + [False]
    assert same_bits(y[8], chain(VOCABULARY - 1, 1, table))
    base = embed(tokens, slots, Embedding(table.weight))
    assert base.isnan().all(1).tolist() == [True] * 6 + [False] * 3, "no adapters: no last slot"


def test_layouts_that_the_kernel_does_not_read_are_refused() -> None:
    table = make(32, FP16)
    assert table.pages is not None
    b = table.pages.b.contiguous()
    pages = LoraPages(table.pages.a, b, table.pages.page_of, table.pages.rank, table.pages.scale)
    with pytest.raises(AssertionError, match="new_pages"):
        embed([0], [0], Embedding(table.weight, pages))
    with pytest.raises(AssertionError):
        embed([0, 1], [0], table)
