"""One sample of one prompt on its way through the engine.

`n` samples of a prompt are `n` requests that differ in `sample_index` alone. Knows nothing about
text: stop strings are the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from truegraft.api import FinishReason, SamplingParams


class RequestState(Enum):
    """LOADING (its adapter is on the way) → WAITING ⇄ RUNNING → FINISHED."""

    LOADING = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Fields say who fills them. Token counts and positions are in tokens."""

    # Set by the engine, once.
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int  # resolved: prompt + max_tokens fits the context
    stop_token_ids: frozenset[int] = frozenset()  # EOS (unless ignored) and the user's
    seed: int = 0
    sample_index: int = 0
    adapter: str | None = None  # fingerprint of the adapter version; None is the base
    adapter_pages: tuple[int, ...] = ()  # 16-rank pages needed per target module
    salt: str | None = None  # separates prefix-cache entries of users who must not share

    # Set by the scheduler.
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended it
    row: int = -1  # persistent row on the device while running
    slot: int = -1  # adapter slot while running; -1 is the base
    token_ids: list[int] = field(default_factory=list)  # prompt and output
    num_computed: int = 0  # positions whose KV is written
    blocks: list[int] = field(default_factory=list)  # KV blocks, in order of position
    chain: list[int] = field(default_factory=list)  # prefix-cache nodes of the full blocks
    blocked_since: int | None = None  # step at which no adapter slot was free for it

    # Set by the engine before each plan, from a proposer.
    draft: tuple[int, ...] = ()

    # Counted by the scheduler, reported to the user.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_chunks: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verify_steps: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far, in order."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not written yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.state is RequestState.FINISHED
