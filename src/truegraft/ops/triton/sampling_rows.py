"""Sampling parameters of a batch of logits rows as tensors on the device, packed by one copy.

A row is named by its place in the batch; what it needs besides scalars (history, bias, masks) is
found through offsets, so that a captured graph may refill the same tensors. Knows nothing about
logits or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truegraft.ops.interface import SamplingRow
from truegraft.ops.triton.launch import check_not_captured

ALIGNMENT = 16  # bytes; Triton specialises kernels on it

Array = NDArray[Any]


@dataclass(frozen=True)
class SamplingBatch:
    """How L logits rows are adjusted and drawn. The neutral value of a field asks for nothing.

    Flags and `max_history` are known to the host: a launch is skipped only where no row has use
    for it. A graph that is to hold any batch is captured with all flags set.
    """

    temperature: Tensor  # [L] float32, 0: argmax
    top_k: Tensor  # [L] int32, 0: all
    top_p: Tensor  # [L] float64, 1: all
    log_min_p: Tensor  # [L] float32, -inf: all
    repetition: Tensor  # [L] float32, 1: none
    frequency: Tensor  # [L] float32, 0: none
    presence: Tensor  # [L] float32, 0: none
    seed: Tensor  # [2, L] int32, low and high words
    sample_index: Tensor  # [L] int32
    position: Tensor  # [L] int32
    tokens: Tensor  # [T] int64, all histories, prompt before output
    history_start: (
        Tensor  # [L] int64, place in tokens (row r of a [rows, max_len] buffer: r·max_len)
    )
    num_prompt: Tensor  # [L] int32
    num_history: Tensor  # [L] int32, prompt and output
    bias_indptr: Tensor  # [L + 1] int32
    bias_ids: Tensor  # [B] int32, distinct within a row
    bias_values: Tensor  # [B] float32
    banned_indptr: Tensor  # [L + 1] int32
    banned_ids: Tensor  # [N] int32
    mask_row: Tensor  # [L] int32, row of masks, -1: every token is allowed
    masks: Tensor  # [masks, ceil(V / 32)] int32, bit t % 32 of word t // 32: token t is allowed
    max_history: int  # at least any num_history
    has_penalties: bool
    has_edits: bool  # bias or banned
    has_masks: bool
    has_draws: bool
    has_filters: bool  # top-k, top-p or min-p

    @property
    def adjusts(self) -> bool:
        """Whether any row's logits are changed before the draw."""
        return self.has_penalties or self.has_edits or self.has_masks


def pack(
    rows: Sequence[SamplingRow | None], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """One batch of these rows; None: plain argmax. Histories are read on the host.

    Seeds, positions and sample indices count modulo 2⁶⁴, 2³² and 2³², as `ops.noise` reads them.
    """
    check_not_captured(device)
    penalised = [row if row is not None and _is_penalised(row) else None for row in rows]
    masked = [row for row in rows if row is not None and row.allowed is not None]
    fields = {
        **_scalars(rows, vocab_size),
        **_histories(penalised),
        **_edits(rows, vocab_size),
        **_masks(rows, vocab_size),
    }
    return SamplingBatch(
        **_on_device(fields, device),
        max_history=int(fields["num_history"].max(initial=0)),
        has_penalties=any(row is not None for row in penalised),
        has_edits=len(fields["bias_ids"]) + len(fields["banned_ids"]) > 0,
        has_masks=bool(masked),
        has_draws=bool((fields["temperature"] > 0).any()),
        has_filters=any(row is not None and _filters(row, vocab_size) for row in rows),
    )


def _is_penalised(row: SamplingRow) -> bool:
    return bool(row.presence_penalty or row.frequency_penalty or row.repetition_penalty != 1)


def _filters(row: SamplingRow, vocab_size: int) -> bool:
    return row.draws and (0 < row.top_k < vocab_size or row.top_p < 1 or row.min_p > 0)


def _scalars(rows: Sequence[SamplingRow | None], vocab_size: int) -> dict[str, Array]:
    def each(value: Callable[[SamplingRow], float], neutral: float, dtype: type) -> Array:
        values = [neutral if row is None else value(row) for row in rows]
        return np.array(values, dtype=dtype)

    def words(value: Callable[[SamplingRow], int]) -> Array:
        values = [0 if row is None else value(row) & 0xFFFFFFFF for row in rows]
        return np.array(values, dtype=np.uint32).view(np.int32)

    def top_k(row: SamplingRow) -> int:
        return row.top_k if 0 < row.top_k < vocab_size else 0

    min_p = each(lambda row: row.min_p, 0, np.float32)
    return {
        "temperature": each(lambda row: row.temperature, 0, np.float32),
        "top_k": each(top_k, 0, np.int32),
        "top_p": each(lambda row: row.top_p, 1, np.float64),
        "log_min_p": torch.from_numpy(min_p).log().numpy(),  # as the reference rounds it
        "repetition": each(lambda row: row.repetition_penalty, 1, np.float32),
        "frequency": each(lambda row: row.frequency_penalty, 0, np.float32),
        "presence": each(lambda row: row.presence_penalty, 0, np.float32),
        "seed": np.stack([words(lambda row: row.seed), words(lambda row: row.seed >> 32)]),
        "sample_index": words(lambda row: row.sample_index),
        "position": words(lambda row: row.position),
    }


def _histories(rows: Sequence[SamplingRow | None]) -> dict[str, Array]:
    """Histories of the rows whose penalties count them."""
    pieces = [piece for row in rows if row is not None for piece in (row.prompt, row.output)]
    num_prompt = [0 if row is None else len(row.prompt) for row in rows]
    num_history = [0 if row is None else len(row.prompt) + len(row.output) for row in rows]
    assert all(piece.dtype == torch.int64 and piece.device.type == "cpu" for piece in pieces)
    return {
        "tokens": torch.cat(pieces).numpy() if pieces else np.zeros(0, dtype=np.int64),
        "history_start": _indptr(num_history)[:-1].astype(np.int64),
        "num_prompt": np.array(num_prompt, dtype=np.int32),
        "num_history": np.array(num_history, dtype=np.int32),
    }


def _edits(rows: Sequence[SamplingRow | None], vocab_size: int) -> dict[str, Array]:
    bias = [() if row is None else row.bias for row in rows]
    banned = [() if row is None else row.banned for row in rows]
    assert all(len({token for token, _ in pairs}) == len(pairs) for pairs in bias)
    bias_ids = _ids((token for pairs in bias for token, _ in pairs), vocab_size)
    return {
        "bias_indptr": _indptr(map(len, bias)),
        "bias_ids": bias_ids,
        "bias_values": np.array([v for pairs in bias for _, v in pairs], dtype=np.float32),
        "banned_indptr": _indptr(map(len, banned)),
        "banned_ids": _ids((token for ids in banned for token in ids), vocab_size),
    }


def _masks(rows: Sequence[SamplingRow | None], vocab_size: int) -> dict[str, Array]:
    words = -(-vocab_size // 32)
    mask_row = np.full(len(rows), -1, dtype=np.int32)
    masks: list[Array] = []
    for index, row in enumerate(rows):
        if row is not None and row.allowed is not None:
            allowed = np.zeros(words * 32, dtype=bool)
            allowed[_ids(row.allowed, vocab_size)] = True
            mask_row[index] = len(masks)
            masks.append(np.packbits(allowed, bitorder="little").view(np.int32))
    return {"mask_row": mask_row, "masks": np.array(masks, dtype=np.int32).reshape(-1, words)}


def _ids(tokens: Iterable[int], vocab_size: int) -> Array:
    ids = np.fromiter(tokens, dtype=np.int32)
    assert not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size)
    return ids


def _indptr(counts: Iterable[int]) -> Array:
    return np.cumsum([0, *counts]).astype(np.int32)


def _on_device(fields: dict[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays as aligned pieces of one buffer that is copied once."""
    starts, end = {}, 0
    for name, array in fields.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    held = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in fields.items():
        raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        held[starts[name] : starts[name] + array.nbytes] = raw
    moved = held.to(device, non_blocking=True)
    return {
        name: moved[starts[name] : starts[name] + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for name, array in fields.items()
    }
