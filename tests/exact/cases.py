"""The table: REQUESTS × PERTURBATIONS.

A perturbation is how an engine is set up (`options`), how requests reach it (`play`), for which
requests that can matter (`applies`), and the proof that it did (`witness`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from exact.lab import BLOCK, Case, Desk, Lab, Play, Run, answer, compare
from exact.zoo import ALPHABET, SIGNATURE, TIE

from truegraft import SamplingParams
from truegraft.generation import Generation

OUTPUT = 32  # tokens of each answer: those of 255 and 256 decode across a split of attention
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=3)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=1234)

# (adapter, prompt length if greedy, if seeded): lengths straddle blocks of 64 and splits of 256.
LENGTHS: tuple[tuple[str | None, int, int], ...] = (
    (None, 257, 600),
    ("signature", 64, 63),
    ("tie", 65, 256),
    ("random-1", 1, 65),
    ("random-3", 63, 257),
    ("random-8", 255, 1),
    ("random-17", 256, 64),
    ("random-64", 600, 255),
)
WITH_PROMPT_LOGPROBS = ("base/seeded", "random-8/greedy", "random-17/greedy", "tie/seeded")


@cache
def stream(seed: int, length: int) -> tuple[int, ...]:
    """Prompt tokens that repeat themselves now and then. Prefixes of one stream are equal."""
    choose = random.Random(seed)
    return tuple(choose.choice((*ALPHABET, *TIE, SIGNATURE)) for _ in range(length))


def _request(adapter: str | None, mode: str, length: int) -> Case:
    name = f"{adapter or 'base'}/{mode}"
    params = GREEDY if mode == "greedy" else SEEDED
    if name in WITH_PROMPT_LOGPROBS:
        params = replace(params, prompt_logprobs=2)
    # One stream per mode: adapters share prompts, so a cache that mixed them up would show.
    return Case(name, adapter, stream(ord(mode[0]), 600)[:length], params)


REQUESTS: tuple[Case, ...] = (
    *(_request(adapter, "greedy", length) for adapter, length, _ in LENGTHS),
    *(_request(adapter, "seeded", length) for adapter, _, length in LENGTHS),
)

# ---------------------------------------------------------------------- ways to hand in cases


def together(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """All at once."""
    return desk.together(cases)


def in_company(desk: Desk, cases: Sequence[Case], size: int) -> list[Generation]:
    """All at once, and then neighbours, so that the last ones are not alone either."""
    neighbours = [_neighbour(index, case) for index, case in enumerate(cases[: size - 1])]
    return desk.together([*cases, *neighbours])[: len(cases)]


def _neighbour(index: int, case: Case) -> Case:
    """Company for others: a short prompt of its own, an answer that outlasts everyone's."""
    params = replace(SEEDED, max_tokens=2 * OUTPUT, seed=index, logprobs=None)
    return Case(f"neighbour-{index}", case.adapter, stream(index, 20 + index), params)


def twice(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """All at once, and again when they have ended: the second answers count."""
    desk.together(cases)
    return desk.together(cases)


def one_by_one(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """Each after the one before has ended."""
    return [desk.together([case])[0] for case in cases]


def shuffled(desk: Desk, cases: Sequence[Case], seed: int) -> list[Generation]:
    """In random order, at random moments while others run."""
    choose, queue, generations = random.Random(seed), list(cases), []
    choose.shuffle(queue)
    while queue:
        generations.append(desk.hand_in(queue.pop()))
        for _ in range(choose.randrange(4)):
            desk.engine.step()
    desk.finish()
    return generations


def after_relatives(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """After requests of the same adapter that share all but the prompt's last 32 tokens."""
    for case in cases:
        relative = case.prompt[:-32] + stream(99, 32)
        desk.hand_in(replace(case, name=f"relative-{case.name}", prompt=relative))
    desk.finish()
    return desk.together(cases)


def as_four_samples(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """Each with n=4: its first sample is the request itself."""
    return desk.together([replace(c, params=replace(c.params, n=4)) for c in cases])


CROWDED_BLOCKS = 11


def crowded(desk: Desk, cases: Sequence[Case]) -> list[Generation]:
    """Each beside an older request that leaves it room for its prompt, then takes that too."""
    generations = []
    for case in cases:
        length = (CROWDED_BLOCKS - -(-case.num_tokens // BLOCK)) * BLOCK - 12
        params = replace(GREEDY, max_tokens=16, logprobs=None)
        other = next(iter(desk.adapters)) if case.adapter is None else None
        hog = desk.hand_in(Case(f"hog-{case.name}", other, stream(7, length), params))
        while not hog.samples[0].token_ids:
            desk.engine.step()
        generations.append(desk.hand_in(case))
        desk.finish()
    return generations


# ---------------------------------------------------------------------- what must have happened


def has_company(run: Run, case: Case, size: int) -> None:
    assert run.watch.company[case.name] == size
    assert size == 1 or run.watch.mixture[case.name] >= 2, "all neighbours have its adapter"


def has_drafts(run: Run, case: Case) -> None:
    """Its own drafts went both ways."""
    own = run.outputs[case.name].outputs[0].speculation
    assert own.num_accepted_tokens > 0, "no draft was right"
    assert own.num_accepted_tokens < own.num_draft_tokens, "no draft was wrong"


def has_chunks(run: Run, case: Case) -> None:
    assert run.outputs[case.name].num_chunks >= 2


def has_hit(run: Run, case: Case) -> None:
    assert run.outputs[case.name].num_cached_tokens >= BLOCK


def has_no_hit(run: Run, case: Case) -> None:
    assert run.outputs[case.name].num_cached_tokens == 0


def was_preempted(run: Run, case: Case) -> None:
    assert run.outputs[case.name].num_preemptions > 0


def was_reloaded(run: Run, case: Case) -> None:
    assert run.num_evictions > 0
    assert case.adapter is None or run.loads(case.name) >= 2


def came_in_flight(run: Run, case: Case) -> None:
    assert tuple(run.outputs) != run.asked, "handed in in the table's order"
    assert run.watch.company[case.name] >= 2


def has_four_samples(run: Run, case: Case) -> None:
    assert len(run.outputs[case.name].outputs) == 4


def has_everything(run: Run, case: Case) -> None:
    stats = run.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_preemptions > 0 and stats.num_cached_tokens >= BLOCK
    assert run.num_evictions > 0
    assert any(output.num_chunks >= 2 for output in run.outputs.values())
    assert max(run.watch.mixture.values()) >= 3


# ---------------------------------------------------------------------- the table


def always(case: Case) -> bool:
    return True


def reads_cache(case: Case) -> bool:
    return case.num_tokens > BLOCK and case.params.prompt_logprobs is None


@dataclass(frozen=True)
class Perturbation:
    """One row of the table. blocks: size of the KV cache, if it matters."""

    name: str
    play: Play
    witness: Callable[[Run, Case], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    applies: Callable[[Case], bool] = always
    blocks: int | None = None

    def run(self, lab: Lab, cases: Sequence[Case] = REQUESTS) -> Run:
        """Serve the cases that it applies to, once, on a fresh engine."""
        options = dict(self.options)
        if self.blocks is not None:
            options |= {"kv_cache_memory": self.blocks * lab.block_bytes}
        return lab.run(options, self.play, [case for case in cases if self.applies(case)])


def ngram(tokens: int) -> dict[str, Any]:
    """LLM's keyword for ngram speculation; single tokens are looked up, so drafts are many."""
    config = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_min": 1}
    return {"speculative_config": config}


def _batch(size: int) -> Perturbation:
    witness = partial(has_company, size=size)
    play = partial(in_company, size=size)
    return Perturbation(f"batch-{size}", play, witness, {"max_num_seqs": size})


def _chunks(size: int) -> Perturbation:
    options = {"max_num_batched_tokens": size}
    return Perturbation(
        f"chunk-{size}", together, has_chunks, options, lambda case: case.num_tokens > size
    )


PERTURBATIONS: tuple[Perturbation, ...] = (
    *(_batch(size) for size in (1, 2, 7, 32)),
    *(Perturbation(f"ngram-{k}", together, has_drafts, ngram(k)) for k in (1, 3, 7)),
    *(_chunks(size) for size in (16, 64, 100, 512)),
    Perturbation("cache-cold", one_by_one, has_no_hit),
    Perturbation("cache-warm", twice, has_hit, applies=reads_cache),
    Perturbation(
        "cache-shared",
        after_relatives,
        has_hit,
        applies=lambda case: reads_cache(case) and case.num_tokens >= BLOCK + 32,
    ),
    Perturbation(
        "preempted",
        crowded,
        was_preempted,
        {"max_model_len": CROWDED_BLOCKS * BLOCK},
        blocks=CROWDED_BLOCKS,
    ),
    Perturbation("evicted", twice, was_reloaded, {"max_loras": 2}),
    *(
        Perturbation(f"shuffled-{seed}", partial(shuffled, seed=seed), came_in_flight)
        for seed in (1, 2)
    ),
    Perturbation("samples-4", as_four_samples, has_four_samples),
    Perturbation(
        "everything",
        lambda desk, cases: (desk.together(cases), shuffled(desk, cases, seed=3))[1],
        has_everything,
        ngram(3)
        | {"max_num_seqs": 7, "max_num_batched_tokens": 100, "max_loras": 2, "max_model_len": 704},
        blocks=14,
    ),
)


def check_cell(lab: Lab, perturbation: Perturbation, run: Run, case: Case) -> None:
    """One cell: the answer under the perturbation is the answer alone, bit for bit.

    Raises Mismatch. `Perturbation.witness` says whether the run was what it claims to be.
    """
    what = f"{case.name} x {perturbation.name}"
    compare(what, answer(run.outputs[case.name]), lab.alone(case))
