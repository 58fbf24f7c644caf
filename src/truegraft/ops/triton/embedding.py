"""Token embedding with its adapters: y = round(W[t] + Σ_o s_o B_o).

Each element of y is one chain of fused multiply-adds, ordinals and ranks ascending, so no block or
warp can move a bit; a row without an adapter is W[t] itself, the sign of a zero included. Ids and
slots that do not exist give rows of NaN, never a fault and never the base model's answer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from truegraft.ops.interface import PAGE_RANK, Embedding, LoraPages
from truegraft.ops.triton import memory
from truegraft.ops.triton.launch import launch, release_dependents, wait_for_inputs

BASE_BLOCK = 1024  # columns of a program that copies
LORA_BLOCK = 256  # of one that adds 16 ranks a page to each of them


class Slotted(Protocol):
    """All that an embedding needs to know of a `RowPlan`."""

    @property
    def slots(self) -> Tensor:
        """[M] int32, -1: base, below: does not exist."""
        ...


def embed(token_ids: Tensor, embedding: Embedding, rows: Slotted) -> Tensor:
    """y[m] = round(W[t] + Σ_o s_o B_o), s_o = round(scale · A_o[:, t]): [M] int64 → [M, N].

    A row whose token or slot does not exist is NaN.
    """
    weight, pages = embedding.weight, embedding.pages
    (vocabulary, width), (m,) = weight.shape, token_ids.shape
    assert token_ids.dtype == torch.int64 and token_ids.is_contiguous()
    assert rows.slots.shape == (m,) and rows.slots.dtype == torch.int32
    assert weight.is_contiguous() and rows.slots.is_contiguous()
    if pages is not None:
        _check_pages(pages, embedding)
    y = memory.empty(m, width, dtype=weight.dtype, device=weight.device)
    block = BASE_BLOCK if pages is None else LORA_BLOCK
    launch(
        embed_kernel,
        (m * -(-width // block),),
        *(token_ids, rows.slots, weight, y),
        *((pages.a, pages.b, pages.page_of, pages.scale) if pages else (None,) * 4),
        len(pages.page_of) if pages else 0,
        VOCABULARY=vocabulary,
        WIDTH=width,
        ORDINALS=pages.page_of.shape[1] if pages else 0,
        BLOCK=block,
        num_warps=block // 128 if pages else 4,
    )
    return y


def _check_pages(pages: LoraPages, embedding: Embedding) -> None:
    """Assert the layout of an embedding's pages."""
    vocabulary, width = embedding.weight.shape
    assert pages.a.is_contiguous() and pages.a.shape[1:] == (PAGE_RANK, vocabulary)
    assert pages.b.shape[1:] == (PAGE_RANK, width)
    assert pages.b.stride() == (PAGE_RANK * width, 1, PAGE_RANK), "b must come from new_pages"
    assert pages.a.dtype == pages.b.dtype == embedding.weight.dtype
    assert pages.page_of.is_contiguous() and pages.page_of.dtype == torch.int32
    assert pages.scale.shape == pages.page_of.shape[:1] and pages.scale.dtype == torch.float32


def _name(spec: tl.constexpr) -> str:
    """Distinct names with and without adapters, for the audit of graphs."""
    return "embed_lora" if spec.constants["ORDINALS"] else "embed_base"


@triton.jit(do_not_specialize=["num_slots"], repr=_name)
def embed_kernel(
    token_ids,
    slots,
    weight,
    y,
    a,
    b,
    page_of,
    scale,
    num_slots,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    ORDINALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one row."""
    release_dependents()
    wait_for_inputs()
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ids + row)
    slot = tl.load(slots + row)
    exists = (token >= 0) & (token < VOCABULARY) & (slot >= -1)
    if ORDINALS > 0:
        exists = exists & (slot < num_slots)
    word = tl.load(weight + token * WIDTH + column, mask=inside & exists, other=float("nan"))
    total = word.to(tl.float32)
    if ORDINALS > 0:
        if exists & (slot >= 0):
            factor = tl.load(scale + slot)
            for ordinal in range(ORDINALS):
                page = tl.load(page_of + slot * ORDINALS + ordinal).to(tl.int64)
                if page >= 0:
                    own_a = a + page * (16 * VOCABULARY) + token
                    own_b = b + page * (16 * WIDTH) + column[:, None] * 16
                    for rank in tl.static_range(0, 16, 4):
                        total = _add_four_ranks(
                            total, own_a, own_b, inside, factor, rank, VOCABULARY, BLOCK
                        )
    tl.store(y + row * WIDTH + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_four_ranks(
    total,
    own_a,
    own_b,
    inside,
    factor,
    RANK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total += Σ s[rank] B[rank] over four ranks, one after another."""
    place = own_b + RANK + tl.arange(0, 4)[None, :]
    four = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(four, (BLOCK, 2, 2)))
    b_0, b_2 = tl.split(even)
    b_1, b_3 = tl.split(odd)
    total = tl.fma(_factor(own_a + RANK * STRIDE, factor), b_0, total)
    total = tl.fma(_factor(own_a + (RANK + 1) * STRIDE, factor), b_1, total)
    total = tl.fma(_factor(own_a + (RANK + 2) * STRIDE, factor), b_2, total)
    return tl.fma(_factor(own_a + (RANK + 3) * STRIDE, factor), b_3, total)


@triton.jit
def _factor(place, factor):
    """s = round(scale · A)."""
    return (factor * tl.load(place).to(tl.float32)).to(place.dtype.element_ty).to(tl.float32)
