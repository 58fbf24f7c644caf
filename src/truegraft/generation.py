"""A prompt's samples on their way to the user: tokens become text, logprobs and results.

Whatever number of tokens a step brings, the result is the same. Knows nothing about scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truegraft.adapters.store import AdapterVersion
from truegraft.api import (
    CompletionOutput,
    Logprob,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
)
from truegraft.core.plan import TokenLogprobs
from truegraft.core.request import Request
from truegraft.core.scheduler import Update
from truegraft.errors import NonFiniteError, TruegraftError
from truegraft.text import OutputText, Tokenizer


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as the engine takes it. salt: requests of another salt share no cached prefix."""

    token_ids: Sequence[int]
    text: str | None = None
    lora_request: LoRARequest | None = None
    salt: str | None = None


@dataclass(eq=False)
class Sample:
    """One sample: its request, and what the user has of it so far."""

    request: Request
    text: OutputText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None

    def take(self, update: Update) -> bool:
        """Append a step's tokens. True if a stop string ended the sample; the rest is dropped."""
        request, params = self.request, self.request.sampling
        self.logprobs += update.logprobs
        for token in update.token_ids:
            self.token_ids.append(token)
            is_stop = token == request.stop_token
            stop = self.text.append(token, is_stop_token=is_stop)
            if stop is not None:
                self.stop_reason = stop
                self.logprobs = self.logprobs[: len(self.token_ids)]
                request.finish_reason = "stop"
                return True
            if is_stop and token in params.stop_ids:
                self.stop_reason = token
        return False


@dataclass(eq=False)
class Generation:
    """All samples of one prompt. error: why it failed, if it did."""

    request_id: str
    prompt: PromptTokens
    params: SamplingParams
    tokenizer: Tokenizer
    samples: list[Sample] = field(default_factory=list)
    adapter: AdapterVersion | None = None
    error: TruegraftError | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt.token_ids)

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.request.finished for sample in self.samples)

    def take(self, update: Update) -> bool:
        """Take in what a step brought one sample. True if a stop string ended that sample."""
        sample = self.samples[update.request.sample_index]
        for position, report in enumerate(update.prompt_logprobs, start=update.prompt_start):
            self.prompt_logprobs[position] = report
        stopped = sample.take(update)
        if stopped or update.request.finished:
            sample.text.finish()
        if update.request.finish_reason == "error":
            self.error = NonFiniteError(
                f"request {self.request_id!r} produced NaN or infinity and was ended; "
                "its model or adapter holds values that overflow."
            )
        return stopped

    def output(self) -> RequestOutput:
        """What there is so far, as the user gets it."""
        first = self.samples[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[self._completion(sample) for sample in self.samples],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs(),
            lora_request=self.prompt.lora_request,
            adapter_fingerprint=self.adapter.fingerprint if self.adapter else None,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=first.num_preemptions,
            num_chunks=first.num_chunks,
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        request = sample.request
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=request.sample_index,
            text=sample.text.text,
            token_ids=list(sample.token_ids),
            cumulative_logprob=sum(t.logprob for t in sample.logprobs) if wanted else None,
            logprobs=[self._logprobs(t) for t in sample.logprobs] if wanted else None,
            finish_reason=request.finish_reason,
            stop_reason=sample.stop_reason,
            lora_request=self.prompt.lora_request,
            seed=None if self.params.greedy else request.seed,
            speculation=SpeculationStats(
                request.num_draft_tokens, request.num_accepted_tokens, request.num_verify_steps
            ),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None if t is None else self._logprobs(t) for t in self.prompt_logprobs]

    def _logprobs(self, report: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest, as vLLM orders them."""
        result = {report.token_id: self._logprob(report.token_id, report.logprob, report.rank)}
        top = zip(report.top_ids, report.top_logprobs, strict=True)
        for rank, (token, value) in enumerate(top, start=1):
            result.setdefault(token, self._logprob(token, value, rank))
        return result

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        decoded = self.tokenizer.token(token) if self.params.detokenize else None
        return Logprob(value, rank, decoded)
