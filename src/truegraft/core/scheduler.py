"""Decides what each step computes: continuous batching, chunked prefill, preemption, adapters.

`plan()` turns the requests into a StepPlan; `commit()` turns its StepResult back into tokens.
Neither can change a token, only when it is computed. Knows nothing about text, devices or how
drafts are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from truegraft.api import FinishReason
from truegraft.core.blocks import ROOT, BlockKey, BlockPool, CachedBlock
from truegraft.core.plan import RowOpening, RowResult, RowWork, StepPlan, StepResult, TokenLogprobs
from truegraft.core.request import Request, RequestState
from truegraft.core.slots import SlotPool

ADAPTER_PATIENCE = 32  # steps that a request waits for a slot before it claims one


@dataclass(slots=True)
class SchedulerStats:
    """Counted since the engine started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What one step brought one request."""

    request: Request
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_start: int = 0  # position of the first prompt_logprobs entry's token
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class _Draft:
    """A plan while it is made."""

    budget: int
    opened: list[RowOpening] = field(default_factory=list)
    work: list[RowWork] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def add(self, request: Request, work: RowWork) -> None:
        self.budget -= work.num_tokens
        self.work.append(work)
        self.requests.append(request)


class Scheduler:
    """Requests that wait and run, the KV blocks and the adapter slots that they hold."""

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, blocks: BlockPool, slots: SlotPool
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks = blocks
        self.slots = slots
        self.stats = SchedulerStats()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._closed_rows: list[int] = []
        self._in_flight: dict[int, list[Request]] = {}  # step -> the request of each RowWork

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. It must fit: prompt + max_tokens within the KV pool."""
        request.state = RequestState.WAITING
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free all that it holds. Ending it twice does nothing."""
        if request.finished:
            return
        if request.state is RequestState.RUNNING:
            self._leave(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self.stats.num_finished += 1

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def decoding(self) -> Iterator[Request]:
        """Running requests whose next step samples a token: those that drafts can help."""
        return (r for r in self.running if r.num_pending == 1)

    # ------------------------------------------------------------------ plan

    def plan(self) -> StepPlan:
        """What the next step computes: decodes, then running prefills, then new requests."""
        draft = _Draft(self.max_num_batched_tokens)
        for request in sorted(self.running, key=lambda r: r.num_pending > 1):
            self._continue(request, draft)
        self._admit(draft)
        self.stats.num_steps += 1
        self._in_flight[self.stats.num_steps] = draft.requests
        unloads, loads = self.slots.take_changes()
        closed = tuple(self._closed_rows)
        self._closed_rows.clear()
        return StepPlan(
            self.stats.num_steps, closed, unloads, loads, tuple(draft.opened), tuple(draft.work)
        )

    def _continue(self, request: Request, draft: _Draft) -> None:
        """Plan a running request's next tokens, preempting later ones if blocks run out."""
        if request.state is not RequestState.RUNNING or draft.budget == 0:
            return
        tokens = self._useful_draft(request, draft.budget)
        if tokens and self._room(request, 1 + len(tokens)) > self.blocks.num_free:
            tokens = ()  # drafts are not worth a preemption
        count = min(request.num_pending + len(tokens), draft.budget)
        while self._room(request, count) > self.blocks.num_free:
            victim = next((r for r in reversed(self.running) if r not in draft.requests), request)
            self._preempt(victim)
            if victim is request:
                return
        draft.add(request, self._work(request, count, tokens, self._grow(request, count)))

    def _useful_draft(self, request: Request, budget: int) -> tuple[int, ...]:
        """The draft, cut to what the token budget and the request's end can use."""
        if request.num_pending != 1:
            return ()
        left = request.max_tokens - request.num_output_tokens
        return request.draft[: max(0, min(budget, left) - 1)]

    def _room(self, request: Request, count: int) -> int:
        """Blocks to add before `count` more positions can be computed."""
        needed = -(-(request.num_computed + count) // self.blocks.block_size)
        return max(0, needed - len(request.blocks))

    def _grow(self, request: Request, count: int) -> tuple[int, ...]:
        new = self.blocks.allocate(self._room(request, count))
        assert new is not None, "room was checked"
        request.blocks += new
        return tuple(new)

    def _work(
        self, request: Request, count: int, tokens: tuple[int, ...], new_blocks: tuple[int, ...]
    ) -> RowWork:
        reaches_end = count - len(tokens) == request.num_pending
        in_prompt = request.num_computed < request.num_prompt_tokens
        request.num_chunks += in_prompt
        return RowWork(
            row=request.row,
            start=request.num_computed,
            num_tokens=count,
            slot=request.slot,
            new_blocks=new_blocks,
            draft=tokens,
            samples=reaches_end,
            prompt_logprobs=request.sampling.prompt_logprobs is not None and in_prompt,
        )

    def _admit(self, draft: _Draft) -> None:
        """Start waiting requests in order; one without an adapter slot does not hold up others."""
        starving = False
        self.slots.reopen()
        for request in list(self.waiting):
            if not draft.budget or not self._free_rows:
                return
            newcomer = request.adapter is not None and request.adapter not in self.slots.residents
            if newcomer and starving:
                continue
            if not self._take_slot(request):
                starving |= self._starves(request)
            elif not self._start(request, draft):
                return

    def _take_slot(self, request: Request) -> bool:
        if request.adapter is None:
            return True
        slot = self.slots.acquire(request.adapter, request.adapter_pages)
        if slot is None:
            return False
        request.slot = slot
        return True

    def _starves(self, request: Request) -> bool:
        """Note that no slot was free; after ADAPTER_PATIENCE steps, claim one."""
        assert request.adapter is not None
        if request.blocked_since is None:
            request.blocked_since = self.stats.num_steps
        if self.stats.num_steps - request.blocked_since < ADAPTER_PATIENCE:
            return False
        if request.adapter not in self.slots.residents:
            self.slots.claim(request.adapter, request.adapter_pages)
        return True

    def _start(self, request: Request, draft: _Draft) -> bool:
        """Admit a request that has its slot. False, and the slot given back, if blocks are short.

        Room for the whole prompt must be free, though blocks are taken chunk by chunk: a request
        that starts is not preempted by its own next chunk.
        """
        reads_cache = request.sampling.prompt_logprobs is None
        hits = self._match(request) if reads_cache else []
        taken = self.blocks.take(hits)
        cached = len(hits) * self.blocks.block_size
        needed = -(-len(request.token_ids) // self.blocks.block_size) - len(hits)
        if needed > self.blocks.num_free:
            self.blocks.release(taken)
            self._give_back_slot(request)
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        request.blocked_since = None
        request.blocks = taken
        request.chain = [hit.node for hit in hits]
        request.num_computed = cached
        self._count_start(request, cached)
        request.row = self._free_rows.pop()
        draft.opened.append(_opening(request))
        count = min(request.num_pending, draft.budget)
        new_blocks = (*taken, *self._grow(request, count))
        draft.add(request, self._work(request, count, (), new_blocks))
        return True

    def _match(self, request: Request) -> list[CachedBlock]:
        if not self.blocks.enable_caching:
            return []
        return self.blocks.match(request.token_ids, request.adapter, request.salt)

    def _count_start(self, request: Request, cached: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
            self.stats.num_cached_tokens += cached
            self.stats.num_prompt_tokens += request.num_prompt_tokens

    # ------------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Take in a step's tokens: advance, publish full blocks, end what has ended."""
        updates: list[Update] = []
        requests = self._in_flight.pop(plan.step)
        for request, work, row in zip(requests, plan.work, result.rows, strict=True):
            if request.state is RequestState.RUNNING and request.row == work.row:
                updates.append(self._advance(request, work, row))
        return updates

    def _advance(self, request: Request, work: RowWork, row: RowResult) -> Update:
        request.draft = ()
        if not row.finite:
            self.blocks.discard(request.blocks)
            self.finish(request, "error")
            return Update(request)
        accepted = max(0, len(row.token_ids) - 1)
        request.num_computed = work.start + work.num_tokens - len(work.draft) + accepted
        self._count_drafts(request, len(work.draft), accepted)
        kept, reason = self._append(request, row.token_ids)
        self._publish(request)
        if reason is not None:
            self.finish(request, reason)
        return Update(
            request, row.token_ids[:kept], row.logprobs[:kept], work.start + 1, row.prompt_logprobs
        )

    def _count_drafts(self, request: Request, proposed: int, accepted: int) -> None:
        if proposed:
            request.num_draft_tokens += proposed
            request.num_accepted_tokens += accepted
            request.num_verify_steps += 1
            self.stats.num_draft_tokens += proposed
            self.stats.num_accepted_tokens += accepted

    def _append(
        self, request: Request, token_ids: tuple[int, ...]
    ) -> tuple[int, FinishReason | None]:
        """Append tokens up to the first that ends the request: how many were kept, why it ended."""
        for kept, token in enumerate(token_ids, start=1):
            request.token_ids.append(token)
            self.stats.num_output_tokens += 1
            if token in request.stop_token_ids:
                request.stop_token = token
                return kept, "stop"
            if request.num_output_tokens >= request.max_tokens:
                return kept, "length"
        return len(token_ids), None

    def _publish(self, request: Request) -> None:
        """Put blocks that became full into the prefix cache."""
        if not self.blocks.enable_caching:
            return
        size = self.blocks.block_size
        full = min(request.num_computed, len(request.token_ids)) // size
        for index in range(len(request.chain), full):
            parent = request.chain[-1] if request.chain else ROOT
            span = tuple(request.token_ids[index * size : (index + 1) * size])
            key = BlockKey(parent, span, request.adapter, request.salt)
            request.chain.append(self.blocks.register(request.blocks[index], key))

    # ------------------------------------------------------------------ leaving the device

    def _preempt(self, request: Request) -> None:
        """Take a request off the device; it starts again from its tokens, at the queue's head."""
        self._leave(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request.blocks)
        self._give_back_slot(request)
        self._free_rows.append(request.row)
        self._closed_rows.append(request.row)
        request.row = -1
        request.blocks, request.chain, request.num_computed = [], [], 0
        request.draft = ()

    def _give_back_slot(self, request: Request) -> None:
        if request.adapter is not None:
            self.slots.release(request.adapter)
        request.slot = -1

    def abandon(self, plan: StepPlan) -> None:
        """A step failed: what the device holds is unknown, so requests start again from tokens."""
        self._in_flight.pop(plan.step)
        for request in reversed(self.running.copy()):
            self._preempt(request)
        self.slots.reset()

    # ------------------------------------------------------------------ invariants

    def check_integrity(self) -> None:
        """Assert that rows, blocks and slots are held by running requests and no one else."""
        rows = [r.row for r in self.running]
        assert len(set(rows)) == len(rows) and not set(rows) & set(self._free_rows)
        assert all(r.state is RequestState.RUNNING for r in self.running)
        assert all(r.state is RequestState.WAITING and not r.blocks for r in self.waiting)
        self.blocks.check_integrity([b for r in self.running for b in r.blocks])
        users: dict[str, int] = {}
        for request in self.running:
            if request.adapter is not None:
                users[request.adapter] = users.get(request.adapter, 0) + 1
                assert self.slots.residents[request.adapter] == request.slot
        self.slots.check_integrity(users)


def _opening(request: Request) -> RowOpening:
    return RowOpening(
        row=request.row,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        seed=request.seed,
        sample_index=request.sample_index,
    )
