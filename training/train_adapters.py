"""Train the LoRA adapter of one demo task on the exported base, with peft.

Only the answer and its end token count for the loss. Examples come from the train split of
truegraft.demo.tasks, drawn from a seed. The saved weights are bfloat16, in PEFT layout.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from truegraft.demo.tasks import EOS, TASKS, examples

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Ranks, alphas and scaling rules differ on purpose: an engine must get each scale right.
SETTINGS: dict[str, dict[str, Any]] = {
    "roman": {"r": 4, "lora_alpha": 16},
    "iso_date": {"r": 8, "lora_alpha": 16},
    "json": {"r": 8, "lora_alpha": 8, "use_rslora": True},
    "sql": {"r": 16, "lora_alpha": 32},
}
BASE_NAME = "truegraft-demo"
IGNORED = -100
LOG_EVERY = 100


def batches(task: str, tokenizer: Tokenizer, size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Endless (ids, labels, attention mask), each [size, longest rounded up to 8] int64."""
    source = examples(task, "train", random.Random(seed))
    while True:
        rows = []
        for _ in range(size):
            prompt, answer = next(source)
            num_prompt = len(tokenizer.encode(prompt).ids)
            rows.append((tokenizer.encode(f"{prompt} {answer}{EOS}").ids, num_prompt))
        width = -(-max(len(ids) for ids, _ in rows) // 8) * 8
        ids_cpu = torch.zeros(size, width, dtype=torch.long)
        labels_cpu = torch.full((size, width), IGNORED)
        mask_cpu = torch.zeros(size, width, dtype=torch.long)
        for row, (ids, num_prompt) in enumerate(rows):
            ids_cpu[row, : len(ids)] = torch.tensor(ids)
            labels_cpu[row, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
            mask_cpu[row, : len(ids)] = 1
        yield ids_cpu, labels_cpu, mask_cpu


def learning_rate(step: int, steps: int, warmup: int = 100) -> float:
    """Factor of the peak rate: linear warm-up, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def save(model: Any, folder: Path) -> None:
    """Write adapter_config.json and bfloat16 adapter_model.safetensors, and nothing else."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
            if not torch.isfinite(parameter).all():
                raise SystemExit("an adapter weight is not finite")
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": BASE_NAME}
    config["target_modules"] = sorted(config["target_modules"])  # peft keeps them in a set
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(args: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """Train and save one adapter; returns the logged losses."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32).to(device)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, **SETTINGS[args.task])
    model = get_peft_model(base, lora)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    source = batches(args.task, tokenizer, args.batch, args.seed)
    log = []
    for step in range(args.steps):
        ids, labels, mask = (tensor.to(device) for tensor in next(source))
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == args.steps:
            log.append({"step": step + 1, "train_loss": loss.item()})
            print(args.task, log[-1], flush=True)
    save(model, args.out / args.task)
    return log


def main() -> None:
    """Train, save, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--out", type=Path, required=True, help="folder of all adapters")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256, help="examples a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log = train(args, device)
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    record = {"settings": settings | SETTINGS[args.task], "log": log}
    (args.out / f"{args.task}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
