"""Twelve ways in which an adapter directory is broken, made from any good one.

`BROKEN_REASONS` holds for each a text that one of the reasons of the refusal must contain.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

BROKEN_REASONS = {
    "wrong_prefix": "prefix",
    "missing_tensor": "is missing",
    "extra_module": "made_up_proj",
    "wrong_shape": "has shape",
    "nan": "NaN",
    "truncated_file": "truncated",
    "missing_config": "adapter_config.json is missing",
    "unknown_field": "made_up_field",
    "dora": "DoRA",
    "pickle": "pickle",
    "rank_zero": "r=0",
    "other_base": "does not exist",
}


def make_broken(good: Path, out: Path) -> dict[str, Path]:
    """Write one broken copy of `good` per name of BROKEN_REASONS under `out`; name -> directory."""
    made = {}
    for name in BROKEN_REASONS:
        made[name] = out / name
        shutil.copytree(good, made[name])
        _MAKERS[name](made[name])
    return made


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of an adapter's config."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace an adapter's tensors by `change` of them."""
    tensors = change(load_file(folder / WEIGHTS))
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / WEIGHTS,
    )


def _wrong_prefix(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: {f"transformer.{n}": t for n, t in tensors.items()})


def _missing_tensor(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: {n: t for n, t in tensors.items() if n != _last_b(tensors)}
    )


def _extra_module(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        module = "base_model.model.model.layers.0.mlp.made_up_proj"
        return tensors | {
            f"{module}.lora_A.weight": torch.ones(8, 4),
            f"{module}.lora_B.weight": torch.ones(4, 8),
        }

    edit_tensors(folder, change)


def _wrong_shape(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = _last_b(tensors)
        return tensors | {name: tensors[name][:-1]}

    edit_tensors(folder, change)


def _nan(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[_last_b(tensors)][0, 0] = float("nan")
        return tensors

    edit_tensors(folder, change)


def _truncated_file(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) * 3 // 4])


def _missing_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def _unknown_field(folder: Path) -> None:
    edit_config(folder, made_up_field=3)


def _dora(folder: Path) -> None:
    def magnitudes(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if ".lora_B" in name:
                yield name.replace(".lora_B.", ".lora_magnitude_vector."), torch.ones(len(tensor))

    edit_config(folder, use_dora=True)
    edit_tensors(folder, lambda tensors: tensors | dict(magnitudes(tensors)))


def _pickle(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(tensors))
    (folder / WEIGHTS).unlink()


def _rank_zero(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t[:0] if ".lora_A" in n else t[:, :0] for n, t in tensors.items()}

    edit_config(folder, r=0)
    edit_tensors(folder, change)


def _other_base(folder: Path) -> None:
    """A wider and deeper model's: inputs are twice as long, and layer 0 is layer 99."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wider = {n: torch.cat([t, t], 1) if ".lora_A" in n else t for n, t in tensors.items()}
        return {n.replace(".layers.0.", ".layers.99."): t for n, t in wider.items()}

    edit_tensors(folder, change)


def _last_b(tensors: dict[str, Tensor]) -> str:
    return max(name for name in tensors if ".lora_B" in name)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "wrong_prefix": _wrong_prefix,
    "missing_tensor": _missing_tensor,
    "extra_module": _extra_module,
    "wrong_shape": _wrong_shape,
    "nan": _nan,
    "truncated_file": _truncated_file,
    "missing_config": _missing_config,
    "unknown_field": _unknown_field,
    "dora": _dora,
    "pickle": _pickle,
    "rank_zero": _rank_zero,
    "other_base": _other_base,
}
