"""The engine: requests in, tokens out, one step at a time.

    plan   = scheduler.plan()          what to compute          core/scheduler.py
    result = runner.execute(plan)      compute it               runner/runner.py
    scheduler.commit(plan, result)     tokens, blocks, ends     core/scheduler.py
    generation.take(update)            text, logprobs           this page, text.py

Knows nothing about HTTP or about calls that wait for an answer; `llm` and `serve` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from truegraft.adapters.store import AdapterStore, AdapterVersion
from truegraft.api import FinishReason, LoRARequest, SamplingParams
from truegraft.config import BLOCK_SIZE, LORA_PAGE_RANK, EngineConfig
from truegraft.core.blocks import BlockPool
from truegraft.core.request import Request, RequestState
from truegraft.core.scheduler import Scheduler
from truegraft.core.slots import SlotPool
from truegraft.errors import AdapterError, ConfigError, RequestError, TruegraftError
from truegraft.generation import Generation, PromptTokens, Sample
from truegraft.model.architecture import Architecture
from truegraft.runner.build import build
from truegraft.speculation.ngram import NgramProposer
from truegraft.speculation.proposer import Proposer
from truegraft.text import OutputText, Tokenizer


class Engine:
    """One base model, its adapters, and the requests on it.

    Raises what `runner.build` raises: a wrong setting, model or machine is refused here.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.arch = Architecture.from_directory(config.model.path)
        self.tokenizer = Tokenizer.from_directory(
            config.model.tokenizer, config.model.chat_template
        )
        built = build(config, self.arch)
        self.dtype = built.dtype
        self.max_model_len = built.max_model_len
        self.adapters = built.store
        self.runner = built.runner
        lora = config.lora
        self.scheduler = Scheduler(
            config.scheduler.max_num_seqs,
            config.scheduler.max_num_batched_tokens,
            BlockPool(built.num_blocks, BLOCK_SIZE, config.cache.enable_prefix_caching),
            SlotPool(lora.max_loras if lora else 0, lora.num_pages if lora else 0),
        )
        self.proposer: Proposer | None = (
            NgramProposer(config.speculative) if config.speculative else None
        )
        self._generation_of: dict[Request, Generation] = {}
        self._generations: dict[str, Generation] = {}
        self._loading: list[tuple[Generation, Future[AdapterVersion]]] = []
        self._loader = ThreadPoolExecutor(1, "truegraft-adapters")

    # ------------------------------------------------------------------ one step

    def step(self) -> list[Generation]:
        """Advance every request by one step; return the generations that changed."""
        changed = self._end_loading()
        self._propose()
        plan = self.scheduler.plan()
        try:
            result = self.runner.execute(plan)
        except BaseException:
            self.scheduler.abandon(plan)
            raise
        for update in self.scheduler.commit(plan, result):
            generation = self._generation_of[update.request]
            if generation.take(update):
                self.scheduler.finish(update.request, "stop")
            if update.request.finished:
                self._retire(update.request)
            changed.setdefault(generation)
        return list(changed)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._generations)

    def _propose(self) -> None:
        if self.proposer is None:
            return
        requests = list(self.scheduler.decoding())
        for request, draft in zip(requests, self.proposer.propose(requests), strict=True):
            request.draft = draft

    def _retire(self, request: Request) -> None:
        """Forget a finished request, and its generation with the last of its samples."""
        generation = self._generation_of.pop(request)
        if self.proposer is not None:
            self.proposer.forget(request)
        # NOTE: the last samples may end in one step, and each of them comes by here.
        if not generation.finished or generation.request_id not in self._generations:
            return
        del self._generations[generation.request_id]
        if generation.adapter is not None:
            self._adapter_store().release(generation.adapter)

    # ------------------------------------------------------------------ requests

    def add(
        self,
        request_id: str,
        prompt: PromptTokens,
        params: SamplingParams,
        adapter: AdapterVersion | Future[AdapterVersion] | None = None,
        seed: int = 0,
    ) -> Generation:
        """Queue a prompt, params.n samples of it.

        adapter: a version of `self.adapters`, or one still being loaded; seed: used where
        params.seed is None. Raises RequestError before anything is queued.
        """
        if request_id in self._generations:
            raise RequestError(f"request_id={request_id!r} is already in use; choose another.")
        self._check_prompt(prompt.token_ids)
        self._check_params(params)
        if isinstance(adapter, AdapterVersion):
            self._check_adapter(adapter)
        generation = Generation(request_id, prompt, params, self.tokenizer)
        for index in range(params.n):
            generation.samples.append(self._sample(generation, index, seed))
        self._generations[request_id] = generation
        if isinstance(adapter, Future):
            self._loading.append((generation, adapter))
        else:
            self._start(generation, adapter)
        return generation

    def _sample(self, generation: Generation, index: int, seed: int) -> Sample:
        params, tokens = generation.params, tuple(generation.prompt.token_ids)
        room = self.max_model_len - len(tokens)
        request = Request(
            request_id=f"{generation.request_id}-{index}",
            prompt_token_ids=tokens,
            sampling=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset(params.stop_ids) | frozenset(self._eos(params)),
            seed=(seed if params.seed is None else params.seed) % 2**64,
            sample_index=index,
            salt=generation.prompt.salt,
        )
        request.state = RequestState.LOADING
        self._generation_of[request] = generation
        return Sample(request, OutputText(self.tokenizer, tokens, params))

    def _eos(self, params: SamplingParams) -> Sequence[int]:
        if params.ignore_eos:
            return ()
        if self.arch.eos_token_ids:
            return self.arch.eos_token_ids
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def _start(self, generation: Generation, adapter: AdapterVersion | None) -> None:
        """Hand a generation whose adapter is there to the scheduler."""
        if adapter is not None:
            self._check_adapter(adapter)
            self._adapter_store().acquire(adapter)
            generation.adapter = adapter
        for sample in generation.samples:
            if adapter is not None:
                sample.request.adapter = adapter.fingerprint
                sample.request.adapter_pages = adapter.num_pages
            self.scheduler.add(sample.request)

    def abort(self, request_id: str) -> None:
        """End a generation now and free what it holds. An unknown id does nothing."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._end(generation, "abort")

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        for sample in generation.samples:
            if not sample.request.finished:
                self.scheduler.finish(sample.request, reason)
                sample.text.finish()
                self._retire(sample.request)

    # ------------------------------------------------------------------ adapters

    def load_adapter(self, request: LoRARequest) -> Future[AdapterVersion]:
        """Load an adapter beside the running steps. The future raises AdapterError."""
        return self._loader.submit(self._adapter_store().load, request)

    def _end_loading(self) -> dict[Generation, None]:
        """Start generations whose adapter has come; a bad adapter ends its own ones alone."""
        changed: dict[Generation, None] = {}
        waiting, self._loading = self._loading, []
        for generation, future in waiting:
            if generation.finished:
                continue
            if not future.done():
                self._loading.append((generation, future))
                continue
            try:
                self._start(generation, future.result())
            except TruegraftError as error:
                generation.error = error
                self._end(generation, "error")
                changed[generation] = None
        return changed

    def remove_adapter(self, name: str) -> None:
        """Unload: the name is gone at once, memory goes with the last user."""
        store = self._adapter_store()
        version = store.get(name)
        store.remove(name)
        if version.fingerprint not in store.names().values():
            self.scheduler.slots.drop(version.fingerprint)

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter in a device slot. Raises ConfigError if none can be had now."""
        store = self._adapter_store()
        store.pin(name)
        version = store.get(name)
        if not self.scheduler.slots.pin(version.fingerprint, version.num_pages):
            raise ConfigError(
                f"adapter {name!r} cannot be pinned: every slot is in use; raise max_loras."
            )

    def _adapter_store(self) -> AdapterStore:
        if self.adapters is None:
            raise ConfigError("adapters are off in this engine; pass enable_lora=True.")
        return self.adapters

    # ------------------------------------------------------------------ checks

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.max_model_len} "
                "leaves no room for an answer. Shorten it."
            )
        self._check_ids("prompt_token_ids", token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        limit = self.config.model.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > limit:
                raise RequestError(f"{name}={value} exceeds max_logprobs={limit}; lower it.")
        self._check_ids("stop_token_ids", params.stop_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", (params.logit_bias or {}).keys())
        allowed, ends = params.allowed_token_ids, {*params.stop_ids, *self._eos(params)}
        if allowed is not None and params.min_tokens and ends.issuperset(allowed):
            raise RequestError(
                f"allowed_token_ids={list(allowed)} all end the answer, which min_tokens="
                f"{params.min_tokens} forbids; allow another token or lower min_tokens."
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{name} holds {token!r}; token ids are integers.")
            if not 0 <= token < self.arch.vocab_size:
                raise RequestError(
                    f"{name} holds {token}; this model's ids go from 0 to "
                    f"{self.arch.vocab_size - 1}."
                )

    def _check_adapter(self, adapter: AdapterVersion) -> None:
        if not self.scheduler.slots.can_ever_fit(adapter.num_pages):
            ranks = self.scheduler.slots.num_pages * LORA_PAGE_RANK
            raise AdapterError(
                adapter.name,
                f"needs a slot and more ranks than are left of {ranks} beside pinned adapters; "
                "raise max_loras or remove a pinned one",
            )

    # ------------------------------------------------------------------ the end

    def check_integrity(self) -> None:
        """Assert every pool's invariants; cheap enough to call after each test."""
        self.scheduler.check_integrity()
        if self.runner.table is not None:
            self.runner.table.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()

    def close(self) -> None:
        """Abort what runs; memory goes with the last reference. Closing twice does nothing."""
        for generation in list(self._generations.values()):
            self._end(generation, "abort")
        self._loader.shutdown(cancel_futures=True)
        if self.adapters is not None:
            self.adapters.close()
