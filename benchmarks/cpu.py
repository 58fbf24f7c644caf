"""How fast is the CPU engine beside Hugging Face transformers + PEFT, on the demo model?

Greedy, a fixed number of new tokens, batch 1 and 16, base and four adapters mixed (in PEFT through
`adapter_names`), plain and with n-gram speculation. Every engine answers the same prompts in the
same run; transformers is timed in float32 and bfloat16, and the faster of the two counts. The
outputs are checked: ours against the same requests alone, and against transformers'.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _harness import report, take_turns
from rich.console import Console
from rich.table import Table

from truegraft import LLM, LoRARequest, SamplingParams
from truegraft.demo import adapters, model_path

HELD_OUT = Path(__file__).parents[1] / "tests" / "data" / "demo"
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


class Work:
    """`batch` prompts of the demo tasks; with `mixed`, each for its own adapter."""

    def __init__(self, batch: int, mixed: bool, new_tokens: int) -> None:
        names = list(adapters())
        self.batch, self.mixed, self.new_tokens = batch, mixed, new_tokens
        self.names = [names[i % len(names)] for i in range(batch)]
        self.prompts = [_prompt(name, i) for i, name in enumerate(self.names)]

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True)

    def loras(self) -> list[LoRARequest | None]:
        paths = adapters()
        return [LoRARequest(n, 0, str(paths[n])) if self.mixed else None for n in self.names]


def _prompt(task: str, index: int) -> str:
    lines = (HELD_OUT / f"{task}.jsonl").read_text().splitlines()
    return str(json.loads(lines[index])["prompt"])


def ours(llm: LLM, work: Work) -> list[list[int]]:
    """Token ids of each answer."""
    outputs = llm.generate(work.prompts, work.params(), work.loras(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


class Peer:
    """transformers + PEFT in one dtype, with all demo adapters loaded."""

    def __init__(self, dtype: str) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        base = AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype)
        (first, path), *rest = adapters().items()
        self.model: Any = PeftModel.from_pretrained(base, str(path), adapter_name=first)
        for name, folder in rest:
            self.model.load_adapter(str(folder), adapter_name=name)
        self.model.eval()
        self.model.generation_config.eos_token_id = None  # as our ignore_eos

    def generate(self, work: Work) -> list[list[int]]:
        """Token ids of each answer."""
        import torch

        inputs = self.tokenizer(work.prompts, return_tensors="pt", padding=True)
        options: dict[str, Any] = {
            "max_new_tokens": work.new_tokens,
            "do_sample": False,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        with torch.inference_mode():
            if work.mixed:
                out = self.model.generate(**inputs, adapter_names=work.names, **options)
            else:
                with self.model.disable_adapter():
                    out = self.model.generate(**inputs, **options)
        return [row[-work.new_tokens :] for row in out.tolist()]


def check_exact(plain: LLM, engines: Sequence[LLM], work: Work) -> None:
    """Every engine's batch must equal each request alone, without speculation."""
    alone = []
    for prompt, lora in zip(work.prompts, work.loras(), strict=True):
        (output,) = plain.generate(prompt, work.params(), lora, use_tqdm=False)
        alone.append(output.outputs[0].token_ids)
    for llm in engines:
        assert ours(llm, work) == alone, "a batch differs from its requests alone"


def agreement(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Share of answers that agree in their first eight tokens."""
    return sum(a[:8] == b[:8] for a, b in zip(left, right, strict=True)) / len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    # The prefix cache is off: in a second round it would answer for the work itself.
    common: dict[str, Any] = {"enable_lora": True, "enable_prefix_caching": False}
    plain = LLM(model_path(), **common)
    ngram = LLM(model_path(), speculative_config=SPECULATION, **common)
    peers = {dtype: Peer(dtype) for dtype in ("float32", "bfloat16")}
    rows, agreed = [], []
    for batch in (1, 16):
        for mixed in (False, True):
            work = Work(batch, mixed, args.new_tokens)
            check_exact(plain, (plain, ngram), work)
            agreed.append(agreement(ours(plain, work), peers["float32"].generate(work)))
            rates = take_turns(_runs(work, plain, ngram, peers), args.rounds)
            best = max(rates[dtype] for dtype in peers)
            rows.append({"batch": batch, "mixed": mixed, **rates, "ratio": rates["plain"] / best})
    _print(rows)
    by_case = {(row["batch"], row["mixed"]): row for row in rows}
    report(
        "cpu",
        {
            "new_tokens": args.new_tokens,
            "rows": rows,
            "ratio_batch_1": by_case[1, True]["ratio"],
            "ratio_batch_16_mixed": by_case[16, True]["ratio"],
            "mixed_keeps_of_base": by_case[16, True]["plain"] / by_case[16, False]["plain"],
            "answers_agreeing_with_transformers": min(agreed),
        },
    )


def _runs(
    work: Work, plain: LLM, ngram: LLM, peers: dict[str, Peer]
) -> dict[str, Callable[[], int]]:
    def count(answers: list[list[int]]) -> int:
        return sum(map(len, answers))

    return {
        "plain": lambda: count(ours(plain, work)),
        "ngram": lambda: count(ours(ngram, work)),
        **{
            dtype: lambda peer=peer: count(peer.generate(work))  # type: ignore[misc]
            for dtype, peer in peers.items()
        },
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title="tokens/s, prefill included, median (bfloat16 demo model)")
    for column in ("batch", "adapters", "truegraft", "+ ngram", "HF+PEFT fp32", "bf16", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        rates = (f"{row[name]:.0f}" for name in ("plain", "ngram", "float32", "bfloat16"))
        kind = ("1" if row["batch"] == 1 else "4 mixed") if row["mixed"] else "–"
        table.add_row(str(row["batch"]), kind, *rates, f"{row['ratio']:.2f}×")
    Console().print(table)


if __name__ == "__main__":
    main()
