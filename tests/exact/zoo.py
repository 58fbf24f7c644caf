"""The suite's model and adapters, each made so that a fault is loud.

The base stutters: it prefers an alphabet of a few tokens, so that what ngram lookup drafts is
sometimes right and sometimes wrong. Two equal rows of lm_head let the tie adapter leave its token
to rounding; a signature adapter says its own token whatever it reads.
"""

from __future__ import annotations

from pathlib import Path

from exact.lab import Lab
from safetensors.torch import load_file, save_file
from tiny_models import (
    SEVEN,
    make_adapter,
    make_model,
    make_signature_adapter,
    make_tie_adapter,
)

TIE = (5, 9)
SIGNATURE = 77
ALPHABET = tuple(range(100, 112))

RANDOM: dict[str, tuple[int, tuple[str, ...]]] = {  # name -> rank, target modules
    "random-1": (1, SEVEN),
    "random-3": (3, ("q_proj", "v_proj", "down_proj")),
    "random-8": (8, SEVEN),
    "random-17": (17, (*SEVEN, "lm_head", "embed_tokens")),
    "random-64": (64, (*SEVEN, "lm_head")),
}


def make_base(path: Path) -> Path:
    """A tiny Llama that stutters, with lm_head rows 5 and 9 equal."""
    model = make_model(path, equal_rows=TIE)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][list(ALPHABET)] *= 3.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def make_lab(folder: Path, dtype: str, back_end: str) -> Lab:
    """The base with every synthetic adapter. back_end: "kernels" or "reference"."""
    model = make_base(folder / "base")
    adapters = {
        "signature": make_signature_adapter(folder / "signature", model, SIGNATURE),
        "tie": make_tie_adapter(folder / "tie", model, TIE),
    }
    for seed, (name, (rank, targets)) in enumerate(RANDOM.items()):
        options = {"rank": rank, "targets": targets, "seed": seed}
        adapters[name] = make_adapter(folder / name, model, **options)  # type: ignore[arg-type]
    return Lab(model, adapters, dtype, back_end)
