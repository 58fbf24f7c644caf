"""Score base and adapters on every task's held-out prompts, and the base on held-out text.

Greedy decoding with bfloat16 weights and float32 compute, through transformers and peft. Writes
scores.json: for each adapter (and none) x task the share of exact answers that also end with the
end token, and the share that the task's checker accepts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from training.pretrain import load_tokens, windows
from truegraft.demo.tasks import EOS, TASKS, Example, check

EOS_ID = 0
EVAL_ROWS, EVAL_LENGTH = 64, 2048
OPENINGS = (
    "She was very glad",
    "The function returns a",
    "def read_lines(path):\n",
    "import os\nimport sys\n\n\ndef main():\n",
)
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "max_new_tokens": 100}


def read_examples(path: Path, limit: int) -> list[Example]:
    """The first `limit` held-out examples of a file."""
    return [Example(**json.loads(line)) for line in path.read_text().splitlines()[:limit]]


def load(assets: Path, adapter: str) -> Any:
    """The base in float32, with an adapter unless that is "none"."""
    model = AutoModelForCausalLM.from_pretrained(assets / "base", dtype=torch.float32)
    if adapter != "none":
        model = PeftModel.from_pretrained(model, str(assets / "adapters" / adapter))
    return model.float().eval()


@torch.no_grad()
def complete(model: Any, tokenizer: Tokenizer, prompts: list[str], num_tokens: int) -> list[str]:
    """Greedy completions of a left-padded batch, up to and with the end token."""
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[EOS_ID] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=EOS_ID,
        eos_token_id=EOS_ID,
    )
    texts = []
    for row in out[:, width:].tolist():
        end = row.index(EOS_ID) + 1 if EOS_ID in row else len(row)
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=False))
    return texts


def score(model: Any, tokenizer: Tokenizer, task: str, rows: list[Example]) -> dict[str, Any]:
    """Exact and accepted shares of one adapter on one task, with its first wrong answers."""
    num_tokens = max(len(tokenizer.encode(example.answer).ids) for example in rows) + 8
    completions = complete(model, tokenizer, [example.prompt for example in rows], num_tokens)
    pairs = list(zip(rows, completions, strict=True))
    exact = [text == f" {example.answer}{EOS}" for example, text in pairs]
    accepted = sum(check(task, example.prompt, text) for example, text in pairs)
    wrong = [pair for pair, good in zip(pairs, exact, strict=True) if not good]
    return {
        "exact": sum(exact) / len(rows),
        "accepted": accepted / len(rows),
        "ended": sum(text.endswith(EOS) for text in completions) / len(rows),
        "wrong": [[example.prompt, example.answer, text] for example, text in wrong[:3]],
    }


@torch.no_grad()
def heldout_loss(model: Any, folder: Path) -> dict[str, float]:
    """Nats per token of the exported base on each group's held-out text."""
    losses = {}
    for path in sorted(folder.glob("*.heldout.u16.xz")):
        tokens = load_tokens(path, model.device)
        starts = torch.linspace(0, tokens.numel() - EVAL_LENGTH - 1, EVAL_ROWS).long()
        parts = torch.split(windows(tokens, starts, EVAL_LENGTH), 8)
        total = 0.0
        for rows in parts:
            logits = model(input_ids=rows[:, :-1]).logits
            total += cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        losses[path.name.split(".")[0]] = total / len(parts)
    return losses


@torch.no_grad()
def sample(model: Any, tokenizer: Tokenizer, opening: str) -> str:
    """The opening and what the base makes of it with seed 0."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(opening).ids], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        pad_token_id=EOS_ID,
        **SAMPLING,
    )
    return str(tokenizer.decode(out[0].tolist()))


def main() -> None:
    """Score every pair and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True, help="with base/ and adapters/")
    parser.add_argument("--heldout", type=Path, required=True, help="folder of {task}.jsonl")
    parser.add_argument("--tokens", type=Path, required=True, help="folder that pack.py filled")
    parser.add_argument("--out", type=Path, required=True, help="scores.json to write")
    parser.add_argument("--limit", type=int, default=300, help="prompts of each task")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    tokenizer = Tokenizer.from_file(str(args.assets / "base/tokenizer.json"))
    base = load(args.assets, "none").to(device)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "prompts": args.limit,
        "heldout_loss": heldout_loss(base, args.tokens),
        "sampling": SAMPLING,
        "samples": [sample(base, tokenizer, opening) for opening in OPENINGS],
        "scores": {},
    }
    for adapter in ("none", *TASKS):
        model = base if adapter == "none" else load(args.assets, adapter).to(device)
        results = {}
        for task in TASKS:
            rows = read_examples(args.heldout / f"{task}.jsonl", args.limit)
            results[task] = score(model, tokenizer, task, rows)
            shown = {key: results[task][key] for key in ("exact", "accepted", "ended")}
            print(adapter, task, shown, flush=True)
        record["scores"][adapter] = results
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
