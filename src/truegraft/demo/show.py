"""The demo: adapters, another's and none, side by side in one batch, then each request by itself.

Every prompt of a task goes to its own adapter, to that of the next task and to the base, all in one
batch with speculation and the prefix cache. Then a plain engine answers one request at a time, and
tokens and logprob bits must be the same. Knows nothing about printing; the command line does that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truegraft.api import CompletionOutput, LoRARequest, RequestOutput, SamplingParams
from truegraft.config import check_int
from truegraft.demo import adapters, model_path
from truegraft.demo.tasks import TASKS, answer, check, examples
from truegraft.errors import ConfigError
from truegraft.llm import LLM

SEED = 2024
MAX_PROMPTS = 100  # of each task
MAX_MODEL_LEN = 256
TASK_PARAMS = SamplingParams(temperature=0.0, max_tokens=80, stop="\n", logprobs=0)
FREE_PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=SEED, max_tokens=48, logprobs=0)
FREE_PROMPTS = ("She was very glad", "def read_lines(path):\n")

OnProgress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""


@dataclass(frozen=True)
class Ask:
    """One request. adapter: None is the base; task: None is free text, which nobody can check."""

    prompt: str
    adapter: str | None = None
    task: str | None = None

    @property
    def own(self) -> bool:
        """Whether the adapter is the one that was trained for this prompt."""
        return self.task is not None and self.adapter == self.task

    @property
    def params(self) -> SamplingParams:
        """Greedy for a task, sampled for free text."""
        return TASK_PARAMS if self.task else FREE_PARAMS


@dataclass(frozen=True)
class Answer:
    """What came of an Ask. right: None for free text; identical: to the same request alone."""

    ask: Ask
    text: str
    right: bool | None
    identical: bool
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON. expected: the right answer, null for free text."""
        ask = self.ask
        return {
            "adapter": ask.adapter or "base",
            "task": ask.task,
            "prompt": ask.prompt,
            "answer": self.text,
            "expected": answer(ask.task, ask.prompt) if ask.task else None,
            "own_adapter": ask.own,
            "right": self.right,
            "identical": self.identical,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


@dataclass(frozen=True)
class Report:
    """All answers of one demo, and the seconds of the mixed batch and of one request at a time."""

    answers: tuple[Answer, ...]
    mixed_seconds: float
    alone_seconds: float

    @property
    def num_identical(self) -> int:
        """Requests whose tokens and logprob bits are those of the same request alone."""
        return sum(a.identical for a in self.answers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(a.num_tokens for a in self.answers)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts proposed in the mixed batch."""
        return sum(a.num_draft_tokens for a in self.answers)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted in the mixed batch."""
        return sum(a.num_accepted_tokens for a in self.answers)

    @property
    def passed(self) -> bool:
        """All requests identical, and own adapters right as often as the model card promises.

        That is 95%; of fewer than 40 prompts one may be wrong, but no adapter on all of its own.
        """
        own = [a for a in self.answers if a.ask.own]
        wrong = sum(not a.right for a in own)
        able = {a.ask.task for a in own} == {a.ask.task for a in own if a.right}
        exact = self.num_identical == len(self.answers)
        return exact and able and wrong <= max(1, len(own) // 20)

    def scores(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Task -> adapter ("base" for none) -> (right answers, answers)."""
        table: dict[str, dict[str, tuple[int, int]]] = {}
        for found in self.answers:
            if found.ask.task:
                row = table.setdefault(found.ask.task, {})
                right, total = row.get(found.ask.adapter or "base", (0, 0))
                row[found.ask.adapter or "base"] = right + bool(found.right), total + 1
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every answer, scores, exactness, drafts and speed."""
        return {
            "passed": self.passed,
            "exact": {"identical": self.num_identical, "total": len(self.answers)},
            "scores": {
                task: {who: {"right": r, "total": n} for who, (r, n) in row.items()}
                for task, row in self.scores().items()
            },
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_second": {
                "mixed": round(self.num_tokens / self.mixed_seconds, 1),
                "alone": round(self.num_tokens / self.alone_seconds, 1),
            },
            "answers": [a.to_dict() for a in self.answers],
        }


def make_asks(num_prompts: int) -> list[Ask]:
    """`num_prompts` different held-out prompts of each task × three adapters, and free prompts.

    Always the same ones. Raises ConfigError.
    """
    check_int("prompts", num_prompts, 1, MAX_PROMPTS)
    asks = []
    for index, task in enumerate(TASKS):
        other = TASKS[(index + 1) % len(TASKS)]
        for prompt in _heldout(task, num_prompts):
            asks += [Ask(prompt, adapter, task) for adapter in (task, other, None)]
    return asks + [Ask(prompt) for prompt in FREE_PROMPTS]


def _heldout(task: str, count: int) -> list[str]:
    prompts: dict[str, None] = {}
    source = examples(task, "heldout", random.Random(f"{SEED}-{task}"))
    while len(prompts) < count:
        prompts.setdefault(next(source).prompt)
    return list(prompts)


def run(
    num_prompts: int = 3, num_draft_tokens: int = 4, on_progress: OnProgress = lambda *_: None
) -> Report:
    """The whole demo. Raises ConfigError where the demo's files are not there."""
    loras = {name: LoRARequest(name, lora_path=str(path)) for name, path in adapters().items()}
    if loras.keys() != set(TASKS):
        raise ConfigError(f"the demo's adapters are not in {model_path().parent}; install again.")
    asks = make_asks(num_prompts)
    mixed, mixed_seconds = _mixed(asks, loras, num_draft_tokens, on_progress)
    alone, alone_seconds = _alone(asks, loras, on_progress)
    answers = map(_judge, asks, mixed, alone)
    return Report(tuple(answers), mixed_seconds, alone_seconds)


def _mixed(
    asks: Sequence[Ask],
    loras: Mapping[str, LoRARequest],
    num_draft_tokens: int,
    on_progress: OnProgress,
) -> tuple[list[RequestOutput], float]:
    """All in one batch, with speculation and the prefix cache."""
    on_progress("loading the model and four adapters", 0, len(asks))
    config = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
    with _open(loras, max_num_seqs=len(asks), speculative_config=config) as llm:
        on_progress(f"answering {len(asks)} requests in one mixed batch", 0, len(asks))
        start = time.perf_counter()
        outputs = llm.generate(
            [ask.prompt for ask in asks],
            [ask.params for ask in asks],
            [loras[ask.adapter] if ask.adapter else None for ask in asks],
            use_tqdm=False,
        )
        return outputs, time.perf_counter() - start


def _alone(
    asks: Sequence[Ask], loras: Mapping[str, LoRARequest], on_progress: OnProgress
) -> tuple[list[RequestOutput], float]:
    """One after the other, with neither speculation nor the prefix cache."""
    on_progress("loading them again, without speculation", 0, len(asks))
    outputs: list[RequestOutput] = []
    with _open(loras, max_num_seqs=1, enable_prefix_caching=False) as llm:
        start = time.perf_counter()
        for ask in asks:
            on_progress("answering each request alone", len(outputs), len(asks))
            lora = loras[ask.adapter] if ask.adapter else None
            outputs += llm.generate(ask.prompt, ask.params, lora, use_tqdm=False)
        return outputs, time.perf_counter() - start


def _open(loras: Mapping[str, LoRARequest], **options: Any) -> LLM:
    llm = LLM(
        model_path(),
        max_model_len=MAX_MODEL_LEN,
        enable_lora=True,
        max_loras=len(loras),
        **options,
    )
    for lora in loras.values():
        llm.add_lora(lora)
    return llm


def _judge(ask: Ask, mixed: RequestOutput, alone: RequestOutput) -> Answer:
    completion = mixed.outputs[0]
    return Answer(
        ask=ask,
        text=completion.text.strip(),
        right=check(ask.task, ask.prompt, completion.text) if ask.task else None,
        identical=_bits(completion) == _bits(alone.outputs[0]),
        num_tokens=len(completion.token_ids),
        num_draft_tokens=completion.speculation.num_draft_tokens,
        num_accepted_tokens=completion.speculation.num_accepted_tokens,
    )


def _bits(completion: CompletionOutput) -> tuple[list[int], list[str]]:
    """Token ids, and the logprob of each, written so that equal means equal bits."""
    reports = completion.logprobs or []
    pairs = zip(completion.token_ids, reports, strict=True)
    return completion.token_ids, [report[token].logprob.hex() for token, report in pairs]
