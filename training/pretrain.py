"""Pre-train the demo base on the packed tokens and export it in Hugging Face layout.

Muon for the matrices of the layers, AdamW for embedding and norms; the learning rate warms up,
stays, and falls linearly to zero. Writes config.json, generation_config.json, model.safetensors
(bfloat16) and, beside the model folder, pretrain.json with the measured losses.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from training.llama import CONFIG, Llama

SHARES = {"prose": 0.06, "docs": 0.44, "python": 0.46, "drills": 0.04}  # of every batch
LOG_EVERY, EVAL_EVERY = 50, 500
EVAL_ROWS = 64  # of each group


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """One packed file as int32 on the device: [num_tokens]."""
    ids = np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(np.int32)
    return torch.from_numpy(ids).to(device)


def windows(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Rows of `length` + 1 tokens from each start: [num_starts, length + 1] int64."""
    offsets = torch.arange(length + 1, device=tokens.device)
    return tokens[starts.to(tokens.device)[:, None] + offsets].long()


def rows_per_group(batch: int) -> dict[str, int]:
    """Split a batch by SHARES; every group gets a row, the last but one takes the rest."""
    rows = {group: max(1, round(share * batch)) for group, share in SHARES.items()}
    rows["python"] = batch - sum(count for group, count in rows.items() if group != "python")
    return rows


def sample_batch(data: dict[str, Tensor], rows: dict[str, int], length: int) -> Tensor:
    """Random windows of every group, from the global CPU generator."""
    parts = []
    for group, count in rows.items():
        starts = torch.randint(data[group].numel() - length, (count,))
        parts.append(windows(data[group], starts, length))
    return torch.cat(parts)


def learning_rate(step: int, steps: int, warmup: int, decay: float) -> float:
    """Factor of the peak rate: linear warm-up, a plateau, a linear fall over the last `decay`."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (decay * steps))


@torch.no_grad()
def heldout_loss(model: Llama, data: dict[str, Tensor], length: int) -> dict[str, float]:
    """Mean loss in nats per token on evenly spaced windows of each group's held-out text."""
    losses = {}
    for group, tokens in data.items():
        starts = torch.linspace(0, tokens.numel() - length - 1, EVAL_ROWS).long()
        parts = torch.split(windows(tokens, starts, length), 16)
        losses[group] = sum(model(part).item() for part in parts) / len(parts)
    return losses


def export(model: Llama, folder: Path) -> None:
    """Write the model in bfloat16 with its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in model.named_parameters()}
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise SystemExit("a weight is not finite")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def make_optimizers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def update(loss: Tensor, model: Llama, optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """One optimizer step at rate `lr`, with the gradient's norm held to 1."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def load(args: argparse.Namespace, split: str, device: torch.device) -> dict[str, Tensor]:
    """The tokens of every group that has this split."""
    paths = {group: args.tokens / f"{group}.{split}.u16.xz" for group in SHARES}
    return {group: load_tokens(path, device) for group, path in paths.items() if path.exists()}


def train(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Run all steps, exporting on the way; returns the log."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    data, heldout = load(args, "train", device), load(args, "heldout", device)
    model = Llama().to(device)
    loss_of = torch.compile(model) if args.compile else model
    optimizers, rows = make_optimizers(model, args.lr), rows_per_group(args.batch)
    log: list[dict[str, Any]] = []
    losses: list[Tensor] = []
    started = time.monotonic()
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(sample_batch(data, rows, args.length))
        rate = args.lr * learning_rate(step, args.steps, args.warmup, args.decay)
        update(loss, model, optimizers, rate)
        losses.append(loss.detach())
        is_last = step + 1 == args.steps
        if (step + 1) % LOG_EVERY == 0 or is_last:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            if not math.isfinite(mean):
                raise SystemExit(f"loss is {mean} at step {step + 1}")
            seconds = round(time.monotonic() - started, 1)
            log.append({"step": step + 1, "train_loss": mean, "seconds": seconds})
            if (step + 1) % EVAL_EVERY == 0 or is_last:
                with torch.autocast(device.type, torch.bfloat16):
                    log[-1]["heldout_loss"] = heldout_loss(model, heldout, args.length)
                export(model, args.out)
            print(log[-1], flush=True)
    return log


def main() -> None:
    """Train, export, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True, help="folder that pack.py filled")
    parser.add_argument("--out", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--batch", type=int, default=128, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps that fall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    record: dict[str, Any] = {"device": name, "torch": torch.__version__, "settings": settings}
    record["tokens"] = args.steps * args.batch * args.length
    record["log"] = train(args, device)
    (args.out.parent / "pretrain.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
