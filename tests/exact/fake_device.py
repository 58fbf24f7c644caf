"""A device that computes no model, and tells on any schedule that would give a wrong token.

What a position writes to the KV cache is a digest of the prefix and of the adapter that computed
it; it is read back through the block table. So a block shared with the wrong request, published
too early, overwritten too late or computed by another adapter gives another token.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from truegraft.core.plan import RowOpening, RowResult, RowWork, StepPlan, StepResult
from truegraft.speculation.verify import accept

NUM_TOKENS = 5  # few, so that random drafts are right at times


def digest(before: int, token: int, adapter: str | None, salt: str | None) -> int:
    """What the position of `token` writes, after a position that wrote `before`."""
    return zlib.crc32(repr((before, token, adapter, salt)).encode())


def expected_tokens(
    prompt: tuple[int, ...], count: int, adapter: str | None, salt: str | None
) -> list[int]:
    """`count` tokens after `prompt`, as the request alone gives them."""
    state, output = 0, list[int]()
    for token in prompt:
        state = digest(state, token, adapter, salt)
    while len(output) < count:
        output.append(state % NUM_TOKENS)
        state = digest(state, output[-1], adapter, salt)
    return output


@dataclass
class _Row:
    """One open row. salt: the opening does not carry it, the test does."""

    opening: RowOpening
    salt: str | None
    tokens: dict[int, int]
    blocks: list[int] = field(default_factory=list)


@dataclass
class FakeDevice:
    """Executes plans. salts: of the rows about to open, set by the test."""

    block_size: int
    salts: dict[int, str | None] = field(default_factory=dict)
    poisoned: set[int] = field(default_factory=set)  # seeds of requests whose logits are NaN
    slots: dict[int, str] = field(default_factory=dict)
    rows: dict[int, _Row] = field(default_factory=dict)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        """As `Runner.execute`, in the order of the plan's fields."""
        for row in plan.closed:
            del self.rows[row]
        for slot in plan.unloads:
            del self.slots[slot]
        for load in plan.loads:
            assert load.slot not in self.slots, f"slot {load.slot} is taken"
            assert load.fingerprint not in self.slots.values(), "loaded twice"
            self.slots[load.slot] = load.fingerprint
        for opening in plan.opened:
            assert opening.row not in self.rows, f"row {opening.row} is open"
            tokens = dict(enumerate(opening.token_ids))
            self.rows[opening.row] = _Row(opening, self.salts.get(opening.row), tokens)
        assert len({work.row for work in plan.work}) == len(plan.work)
        return StepResult(tuple(self._work(work) for work in plan.work))

    def _work(self, work: RowWork) -> RowResult:
        row = self.rows[work.row]
        row.blocks += work.new_blocks
        adapter = self.slots[work.slot] if work.slot >= 0 else None
        end = work.start + work.num_tokens
        row.tokens |= dict(enumerate(work.draft, start=end - len(work.draft)))
        states = [self._compute(row, position, adapter) for position in range(work.start, end)]
        if not work.samples:
            return RowResult()
        if row.opening.seed in self.poisoned:
            return RowResult(finite=False)
        drawn = [state % NUM_TOKENS for state in states[-work.num_logits :]]
        emitted = drawn[: accept(work.draft, drawn) + 1]
        row.tokens |= dict(enumerate(emitted, start=end - len(work.draft)))
        return RowResult(tuple(emitted))

    def _compute(self, row: _Row, position: int, adapter: str | None) -> int:
        before = self.cache[self._place(row, position - 1)] if position else 0
        state = digest(before, row.tokens[position], adapter, row.salt)
        self.cache[self._place(row, position)] = state
        return state

    def _place(self, row: _Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size
