"""A base model's weights: read from safetensors, checked whole, or drawn from a seed.

Every tensor that the architecture needs must be there in its shape, and nothing else may be.
No pickle is ever opened. Knows nothing about devices or layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from truegraft.errors import ModelError
from truegraft.model.architecture import Architecture

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F32", "BF16", "F16", "F64")
_NOT_NUMERIC = ("sampling_defaults", "eos_token_ids", "bos_token_id")
_SHOWN_PROBLEMS = 50
_CHUNK_BYTES = 16 << 20


def load_weights(
    path: Path,
    arch: Architecture,
    dtype: torch.dtype,
    *,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
) -> dict[str, Tensor]:
    """The tensors of `arch.parameter_shapes()` on the CPU, each cast once to `dtype`.

    They share no memory with the files. "dummy" draws them from `seed` and reads no file.
    Raises one ModelError that lists all that is missing, unexpected, of another shape or broken.
    """
    if load_format == "dummy":
        return _random_weights(arch, dtype, seed)
    problems: list[str] = []
    stored = _open(weight_files(path), problems)
    problems += _differences(stored, arch.parameter_shapes(), arch.tie_word_embeddings)
    if not problems and arch.tie_word_embeddings:
        problems += _untied(stored)
    if problems:
        raise _refusal(path, problems)
    return {name: _read(stored[name], name, dtype) for name in arch.parameter_shapes()}


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory. Raises ModelError where there are none."""
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    if not (path / _INDEX).exists():
        raise ModelError(_no_weights(path))
    try:
        shards = set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return [path / name for name in sorted(shards)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path / _INDEX} is no index of safetensors files ({error!r}); download it again."
        ) from error


def fingerprint(path: Path) -> str:
    """Content hash of a base: the bytes of its weights and every config field that numbers follow.

    A directory without weights, as load_format "dummy" takes, is hashed by its config alone.
    """
    numeric = asdict(Architecture.from_directory(path))
    for name in _NOT_NUMERIC:
        del numeric[name]
    total = hashlib.sha256(json.dumps(numeric, sort_keys=True).encode())
    stored = (path / _SINGLE).exists() or (path / _INDEX).exists()
    for file in weight_files(path) if stored else []:
        total.update(_file_digest(file))
    return total.hexdigest()


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pth", ".pt"))
    if pickles:
        return (
            f"{path} has only pickled weights ({', '.join(pickles[:3])}), which can run code and"
            " are never opened; convert them with transformers' save_pretrained to safetensors."
        )
    return f"{path} has no {_SINGLE} or {_INDEX}; download the weights or use load_format='dummy'."


def _open(files: Sequence[Path], problems: list[str]) -> dict[str, Any]:
    """Each tensor's name -> the open file that holds it. What cannot be opened is a problem."""
    stored: dict[str, Any] = {}
    for file in files:
        try:
            shard: Any = safe_open(file, framework="pt")
        except FileNotFoundError:
            problems.append(f"{file.name} is in the index but not in the directory")
            continue
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} is truncated or broken, download it again: {error}")
            continue
        names = list(shard.keys())
        problems += [f"{name} is stored twice" for name in names if name in stored]
        stored |= dict.fromkeys(names, shard)
    return stored


def _differences(
    stored: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> Iterator[str]:
    """What keeps `stored` from being a checkpoint of `shapes`."""
    for name, shape in shapes.items():
        if name not in stored:
            yield f"{name} is missing, expected {list(shape)}"
            continue
        found = stored[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            yield f"{name} has shape {list(found.get_shape())}, expected {list(shape)}"
        if found.get_dtype() not in _FLOATS:
            yield f"{name} has dtype {found.get_dtype()}, expected one of {', '.join(_FLOATS)}"
    for name in stored.keys() - shapes.keys():
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == _HEAD):
            yield f"{name} is unexpected, found {stored[name].get_slice(name).get_shape()}"


def _untied(stored: Mapping[str, Any]) -> Iterator[str]:
    """A tied head may be stored once more, but not with other numbers."""
    if _HEAD in stored:
        head, embedding = (stored[name].get_tensor(name) for name in (_HEAD, _EMBEDDING))
        if not torch.equal(head, embedding):
            yield (
                f"{_HEAD} differs from {_EMBEDDING} though config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )


def _refusal(path: Path, problems: Sequence[str]) -> ModelError:
    lines = [f"\n  - {problem}" for problem in sorted(problems)]
    if len(lines) > _SHOWN_PROBLEMS:
        lines[_SHOWN_PROBLEMS:] = [f"\n  - … and {len(lines) - _SHOWN_PROBLEMS} more"]
    return ModelError(
        f"the weights of {path} do not fit its config.json; make both of one model:"
        + "".join(lines)
    )


def _read(shard: Any, name: str, dtype: torch.dtype) -> Tensor:
    tensor: Tensor = shard.get_tensor(name)
    # NOTE: get_tensor maps the file; a copy survives the file's deletion or change.
    cast = tensor.to(dtype, copy=True)
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ModelError(f"{name} holds numbers too large for {dtype}; use a wider dtype.")
    return cast


def _random_weights(arch: Architecture, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Norms are 1, biases 0, and the rest keeps rows of unit variance at unit variance."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random_weight(name, shape, generator).to(dtype)
        for name, shape in arch.parameter_shapes().items()
    }


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    deviation = 1.0 if name == _EMBEDDING else 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def _file_digest(file: Path) -> bytes:
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}; download it again.") from error
    return _cached_digest(file.resolve(), status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _cached_digest(file: Path, size: int, mtime_ns: int, inode: int) -> bytes:
    """Hash of the hashes of a file's chunks, which are read in parallel."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        chunks = pool.map(partial(_chunk_digest, file), range(0, size, _CHUNK_BYTES))
        return hashlib.sha256(b"".join(chunks)).digest()


def _chunk_digest(file: Path, offset: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return hashlib.sha256(stream.read(_CHUNK_BYTES)).digest()
