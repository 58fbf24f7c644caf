"""StepPlan and StepResult: the one contract between scheduler and runner.

Frozen, and built of integers (and the user's frozen SamplingParams). A plan says what to compute,
never how; a result says what came out, never what to do with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from truegraft.api import SamplingParams


@dataclass(frozen=True, slots=True)
class RowOpening:
    """A request takes a persistent row: its tokens so far and how it is sampled.

    stop_token_ids: masked until min_tokens are out.
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    seed: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step: positions start … start + num_tokens - 1, drafts last.

    slot: adapter slot, -1 for the base: the one place where it is said.
    new_blocks: appended to the row's block table before the step.
    samples: whether the last known token's logits (and one more row per draft) are sampled.
    prompt_logprobs: whether every prompt position of this chunk reports the next token's logprob.
    """

    row: int
    start: int
    num_tokens: int
    slot: int
    new_blocks: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    samples: bool = False
    prompt_logprobs: bool = False

    @property
    def num_logits(self) -> int:
        """Logits rows that are sampled: 0, or 1 and one per draft."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Adapter version `fingerprint` goes into device slot `slot` before the step."""

    slot: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, executed in field order: rows close, slots clear, adapters load, rows open."""

    step: int
    closed: tuple[int, ...]
    unloads: tuple[int, ...]
    loads: tuple[SlotLoad, ...]
    opened: tuple[RowOpening, ...]
    work: tuple[RowWork, ...]

    @property
    def num_tokens(self) -> int:
        """Token rows of the step."""
        return sum(w.num_tokens for w in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: of one token, and of the k likeliest, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one RowWork gave.

    token_ids: accepted drafts and one token more; empty if nothing was sampled.
    logprobs: one per token id, if the request asked. prompt_logprobs: one per prompt position of
    the chunk that has a successor in the prompt, if asked.
    finite: False if an emitted token's logits held NaN or infinity.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """One RowResult for each RowWork of the plan, in its order."""

    rows: tuple[RowResult, ...]
