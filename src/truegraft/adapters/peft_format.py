"""PEFT LoRA directories, read strictly: an adapter is taken whole or refused with every reason.

The tensors decide which modules carry LoRA and the config must agree with them. Every config field
is in `CONFIG_FIELDS`; a field that is not there is refused by name. Uses no network and no pickle.
Knows nothing about devices, slots or adapter names; `store` keeps what is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from truegraft.adapters.peft_config import MERGE, Faults, Settings, check_config, listed
from truegraft.errors import AdapterError
from truegraft.model.architecture import TargetShape

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."

_T = TypeVar("_T")

BaseWeight = Callable[[str], Tensor]
"""Target module -> the base model's weight of it: [out, in], or [vocabulary, hidden]."""


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """One module's update: weight += scale · b @ a (an embedding's weight: its transpose)."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        """Rows of a, columns of b."""
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of a and b."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, eq=False)
class Adapter:
    """A whole adapter. modules: target module -> weights in the model's dtype, sorted by name.

    fingerprint: hex hash of the stored tensors, ranks and scales, and the base's fingerprint. It
    does not depend on names, paths or fields without meaning.
    """

    modules: Mapping[str, LoRAWeights]
    fingerprint: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all modules."""
        return sum(weights.num_bytes for weights in self.modules.values())

    @property
    def ranks(self) -> dict[str, int]:
        """Target module -> rank."""
        return {module: weights.rank for module, weights in self.modules.items()}


@dataclass(frozen=True)
class ModuleRow:
    """One line of an adapter's table. Shapes are the module's own, also where the file fuses."""

    module: str
    rank: int
    scale: float
    a_shape: tuple[int, int]  # [rank, in_features]
    b_shape: tuple[int, int]  # [out_features, rank]
    a_name: str  # tensor names in the file
    b_name: str
    b_start: int = 0  # the module's first row in a fused b

    @property
    def num_parameters(self) -> int:
        """Elements of a and b."""
        return math.prod(self.a_shape) + math.prod(self.b_shape)


@dataclass(frozen=True)
class Description:
    """What config and tensor headers say: the modules that bind, and all that is wrong."""

    rows: tuple[ModuleRow, ...]
    reasons: tuple[str, ...]


def describe_adapter(
    path: str | Path, targets: Mapping[str, TargetShape], *, max_rank: int
) -> Description:
    """The table of the adapter at `path` from its headers; no values are read. Never raises."""
    faults = Faults()
    config = _read_config(Path(path), faults)
    headers = _read_headers(Path(path), faults)
    if config is None or headers is None:
        return Description((), faults.reasons())
    binder = _Binder(check_config(config, faults), headers, targets, max_rank, faults)
    return Description(binder.rows, faults.reasons())


def read_adapter(
    path: str | Path,
    targets: Mapping[str, TargetShape],
    *,
    max_rank: int,
    dtype: torch.dtype,
    base_fingerprint: str = "",
    base_weight: BaseWeight | None = None,
) -> Adapter:
    """The adapter in directory `path`, cast once to `dtype`.

    base_weight: PEFT stores a copy of the base's weight beside an embed_tokens or lm_head adapter.
    It must equal `base_weight(module)` (for a tied lm_head: the embedding); without base_weight
    nothing can tell whether it was retrained, and the adapter is refused.
    Raises AdapterError listing all that is wrong; nothing is half read.
    """
    faults = Faults()
    config = _read_config(Path(path), faults)
    contents = _read_contents(Path(path), faults)
    if config is None or contents is None:
        raise AdapterError(path, faults.reasons())
    headers = {name: stored.header for name, stored in contents.items()}
    binder = _Binder(check_config(config, faults), headers, targets, max_rank, faults)
    cast = {n: _cast(n, contents[n].tensor, dtype, faults) for n in binder.readable_tensors()}
    for name, module in binder.base_copies.items():
        _check_base_copy(name, contents[name], base_weight and base_weight(module), faults)
    if faults:
        raise AdapterError(path, faults.reasons())
    modules = {row.module: _slice(row, cast[row.a_name], cast[row.b_name]) for row in binder.rows}
    return Adapter(modules, _fingerprint(binder.rows, contents, base_fingerprint))


# ------------------------------------------------------------------------------------- files


class _Header(NamedTuple):
    dtype: str  # in safetensors' spelling
    shape: tuple[int, ...]


class _Stored(NamedTuple):
    header: _Header
    data: bytearray

    @property
    def tensor(self) -> Tensor:
        dtype = _DTYPES[self.header.dtype]
        flat = torch.frombuffer(self.data, dtype=dtype) if self.data else torch.empty(0)
        return flat.reshape(self.header.shape)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read_config(folder: Path, faults: Faults) -> dict[str, Any] | None:
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        faults.add("path", f"{folder} {found}; give a local directory (nothing is downloaded).")
        return None
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults.add("file", f"{CONFIG_FILE} is missing; save the adapter with save_pretrained.")
    except (OSError, ValueError, RecursionError) as error:
        faults.add("file", f"{CONFIG_FILE} cannot be read as JSON: {error}")
    else:
        if isinstance(config, dict):
            return config
        faults.add("file", f"{CONFIG_FILE} must hold an object, not {type(config).__name__}.")
    return None


def _weights_file(folder: Path, faults: Faults) -> Path | None:
    file = folder / WEIGHTS_FILE
    if file.is_file() or not folder.is_dir():
        return file if file.is_file() else None
    if (folder / PICKLE_FILE).exists():
        why = (
            f"{PICKLE_FILE} is a pickle, which can run code; convert it: load it with PEFT where "
            "you trust it and call save_pretrained(safe_serialization=True)."
        )
    else:
        why = f"{WEIGHTS_FILE} is missing; save the adapter with save_pretrained."
    faults.add("file", why)
    return None


def _read_contents(folder: Path, faults: Faults) -> dict[str, _Stored] | None:
    """All tensors. The file is read, not mapped: a file that is replaced in use cannot tear."""

    def read(file: Path) -> dict[str, _Stored]:
        tensors = dict(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
        return {
            name: _Stored(_Header(str(t["dtype"]), tuple(t["shape"])), t["data"])
            for name, t in tensors.items()
        }

    return _guarded(read, folder, faults)


def _read_headers(folder: Path, faults: Faults) -> dict[str, _Header] | None:
    def read(file: Path) -> dict[str, _Header]:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: _Header(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}

    return _guarded(read, folder, faults)


def _guarded(read: Callable[[Path], _T], folder: Path, faults: Faults) -> _T | None:
    file = _weights_file(folder, faults)
    try:
        return read(file) if file else None
    except (OSError, SafetensorError) as error:
        why = "it is truncated or no safetensors file; copy it again."
        faults.add("file", f"{WEIGHTS_FILE} cannot be read ({error}): {why}")
        return None


# ----------------------------------------------------------------------------------- tensors

_LORA_TENSOR = re.compile(
    r"(?P<module>.+)\.(?:(?P<linear>lora_[AB])(?:\.default)?\.weight"
    r"|(?P<embedding>lora_embedding_[AB])(?:\.default)?)"
)
_FULL_WEIGHT = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_LAYER = re.compile(r".*\.layers\.(\d+)\..*")
_PARTS = {
    "linear": ("lora_A", "lora_B"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# Where a multimodal model keeps its language model: target module -> its path in there.
_LAYOUTS: tuple[Callable[[str], str], ...] = (
    lambda module: module,
    lambda module: f"language_model.{module}",
    lambda module: re.sub(r"^model\.", "model.language_model.", module),
    lambda module: f"model.language_model.{module}",
)


def _with_fused(targets: Mapping[str, TargetShape]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every module path that tensors may name, with the target modules it stands for."""
    for module in targets:
        yield module, (module,)
        parent, _, last = module.rpartition(".")
        for fused, parts in _FUSED.items():
            whole = tuple(f"{parent}.{part}" for part in parts)
            if last == parts[0] and all(part in targets for part in whole):
                yield f"{parent}.{fused}", whole


class _Binder:
    """Binds each tensor to one target module; what does not bind is a fault.

    A source is a module's path as the file spells it, without PEFT's prefix: the path that the
    config's patterns were written for.
    """

    def __init__(
        self,
        settings: Settings,
        headers: Mapping[str, _Header],
        targets: Mapping[str, TargetShape],
        max_rank: int,
        faults: Faults,
    ) -> None:
        self._settings, self._headers, self._targets = settings, headers, targets
        self._max_rank, self._faults = max_rank, faults
        self._pairs: dict[str, dict[str, str]] = {}  # source -> lora_A, … -> tensor name
        self.base_copies: dict[str, str] = {}  # tensor name -> target module
        others = [name for name in sorted(headers) if not self._bind(name)]
        self._paths = self._choose_layout()
        for name in others:
            self._check_other(name)
        self._check_strangers()
        self.rows = tuple(sorted(self._rows(), key=lambda row: row.module))
        self._check_declared()

    def readable_tensors(self) -> Iterator[str]:
        """Names of the LoRA tensors whose values can be checked."""
        for pair in self._pairs.values():
            yield from (n for n in pair.values() if self._headers[n].dtype in _DTYPES)

    def _bind(self, name: str) -> bool:
        found = _LORA_TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            return False
        pair = self._pairs.setdefault(found["module"], {})
        part = found["linear"] or found["embedding"]
        if part in pair:
            self._faults.add("name", f"{name} and {pair[part]} are the same tensor; keep one.")
        pair[part] = name
        if self._headers[name].dtype not in _DTYPES:
            dtype = self._headers[name].dtype
            self._faults.add("dtype", f"{name} is {dtype}; save it as F32, F16 or BF16.")
        return True

    def _choose_layout(self) -> dict[str, tuple[str, ...]]:
        """Source -> target modules, in the layout that most sources fit."""
        known = list(_with_fused(self._targets))
        layouts = [{place(path): parts for path, parts in known} for place in _LAYOUTS]
        return max(layouts, key=lambda paths: sum(source in paths for source in self._pairs))

    def _check_other(self, name: str) -> None:
        full = _FULL_WEIGHT.fullmatch(name.removeprefix(PREFIX))
        if "lora_magnitude_vector" in name:
            self._faults.add("DoRA", f"{name} is a DoRA magnitude vector; {MERGE}")
        elif "lora_" in name or full is None or full["module"] not in self._paths:
            self._faults.add("tensor", f"{name} is no LoRA tensor of a module; {MERGE}")
        else:
            self.base_copies[name] = self._paths[full["module"]][0]

    def _check_strangers(self) -> None:
        strangers = [source for source in sorted(self._pairs) if source not in self._paths]
        if not self._pairs:
            self._faults.add("module", f"{WEIGHTS_FILE} holds no LoRA tensors.")
        elif len(strangers) == len(self._pairs):
            example = f"{PREFIX}{next(iter(self._paths))}.lora_…"
            self._faults.add(
                "module",
                "no tensor name fits the base model, the prefix may be wrong; "
                f"expected names like {example}, found {listed(sorted(self._headers))}",
            )
        elif strangers:
            self._faults.add("module", f"not in the base model: {listed(strangers)}")
        num_layers = len({m[1] for path in self._targets if (m := _LAYER.fullmatch(path))})
        layers = {int(m[1]) for source in strangers if (m := _LAYER.fullmatch(source))}
        for layer in sorted(layer for layer in layers if layer >= num_layers):
            self._faults.add("layer", f"layer {layer} does not exist; the base has {num_layers}.")

    def _rows(self) -> Iterator[ModuleRow]:
        for source, pair in self._pairs.items():
            if source in self._paths:
                yield from self._module_rows(source, pair)

    def _module_rows(self, source: str, pair: Mapping[str, str]) -> Iterator[ModuleRow]:
        """The rows of one source: one, or one for each module that a fused tensor stands for."""
        parts = self._paths[source]
        shapes = [self._targets[part] for part in parts]
        rank, scale = self._rank_and_scale(source)
        if rank > self._max_rank:
            self._faults.add(
                "rank",
                f"{source}: rank {rank} exceeds the limit of {self._max_rank}; "
                "raise max_lora_rank (256 at most) or reduce the rank.",
            )
        a_part, b_part = _PARTS[shapes[0].kind]
        wanted = {
            a_part: (rank, shapes[0].in_features),
            b_part: (sum(shape.out_features for shape in shapes), rank),
        }
        if not self._check_pair(source, pair, wanted):
            return
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            b_shape = (shape.out_features, rank)
            yield ModuleRow(
                part, rank, scale, wanted[a_part], b_shape, pair[a_part], pair[b_part], start
            )
            start += shape.out_features

    def _check_pair(
        self, source: str, pair: Mapping[str, str], wanted: Mapping[str, tuple[int, int]]
    ) -> bool:
        before = len(self._faults)
        for part in sorted(pair.keys() - wanted.keys()):
            self._faults.add("name", f"{source} takes {' and '.join(wanted)}, found {part}.")
        for part, shape in wanted.items():
            if part not in pair:
                self._faults.add("missing", f"{source}: {part} {list(shape)} is missing.")
            elif (found := self._headers[pair[part]].shape) != shape:
                self._faults.add(
                    "shape", f"{source}: {part} has shape {list(found)}, expected {list(shape)}."
                )
        return len(self._faults) == before

    def _rank_and_scale(self, source: str) -> tuple[int, float]:
        """From the config's patterns, under the names by which the config targets `source`."""
        names = self._targeted_names(source)
        if not names:
            self._faults.add("target", f"{source} has tensors, but the config does not target it.")
        found = {self._settings.rank_and_scale(name) for name in names or (source,)}
        if len(found) > 1:
            self._faults.add(
                "target", f"{source} is fused, but the config's patterns differ in it."
            )
        return min(found)

    def _targeted_names(self, source: str) -> tuple[str, ...]:
        parts = self._paths[source]
        kind = self._targets[parts[0]].kind
        if self._settings.targets(source, kind):
            return (source,)
        parent = source.rpartition(".")[0]
        names = tuple(f"{parent}.{part.rpartition('.')[2]}" for part in parts)
        whole = len(parts) > 1 and all(self._settings.targets(name, kind) for name in names)
        return names if whole else ()

    def _check_declared(self) -> None:
        """Every module that the config targets has tensors, and none has them twice."""
        sources = [source for source in self._pairs if source in self._paths]
        bound = Counter(part for source in sources for part in self._paths[source])
        for module in (module for module, count in bound.items() if count > 1):
            self._faults.add("name", f"{module} has its own tensors and fused ones; keep one.")
        if self._settings.target_modules is None or not bound:
            return
        lasts = {source.rpartition(".")[2] for source in sources}
        declared = {
            part
            for path, parts in self._paths.items()
            if (len(parts) == 1 or path.rpartition(".")[2] in lasts)
            and self._settings.targets(path, self._targets[parts[0]].kind)
            for part in parts
        }
        lacking = [module for module in self._targets if module in declared - bound.keys()]
        if lacking:
            self._faults.add(
                "target",
                "missing: the config targets these modules, but they have no "
                f"tensors: {listed(lacking)}",
            )


# ------------------------------------------------------------------------------------ values


def _cast(name: str, stored: Tensor, dtype: torch.dtype, faults: Faults) -> Tensor:
    """`stored` in `dtype`; a value that is or becomes NaN or infinite is a fault."""
    num_bad = int((~torch.isfinite(stored)).sum())
    if num_bad:
        faults.add("value", f"{name} holds {num_bad} NaN or infinite values of {stored.numel()}.")
        return stored
    value = stored.to(dtype)
    num_bad = 0 if value is stored else int((~torch.isfinite(value)).sum())
    if num_bad:
        faults.add(
            "value",
            f"{name}: {num_bad} values overflow {dtype}, up to "
            f"{float(stored.abs().max()):.4g}; serve with dtype bfloat16 or float32.",
        )
    return value


def _check_base_copy(name: str, stored: _Stored, base: Tensor | None, faults: Faults) -> None:
    """A stored full weight must be the base's own, up to the rounding of either dtype."""
    way_out = "save the adapter with save_embedding_layers=False."
    if base is None or stored.header.dtype not in _DTYPES:
        faults.add(
            "base", f"{name} is a full weight that cannot be compared with the base's; {way_out}"
        )
        return
    copy = stored.tensor
    same = copy.shape == base.shape and (
        torch.equal(copy.to(base.dtype), base) or torch.equal(copy, base.to(copy.dtype))
    )
    if not same:
        faults.add(
            "base",
            f"{name} {list(copy.shape)} differs from the base's weight "
            f"{list(base.shape)}: retrained weights are not loaded; {MERGE}",
        )


def _slice(row: ModuleRow, a: Tensor, b: Tensor) -> LoRAWeights:
    return LoRAWeights(a, b[row.b_start : row.b_start + row.b_shape[0]], row.scale)


def _fingerprint(
    rows: Sequence[ModuleRow], contents: Mapping[str, _Stored], base_fingerprint: str
) -> str:
    digest = hashlib.sha256(json.dumps(base_fingerprint).encode())
    for row in rows:
        a, b = contents[row.a_name], contents[row.b_name]
        dtypes = (a.header.dtype, b.header.dtype)
        head = (row.module, row.rank, row.scale.hex(), *dtypes, row.a_shape, row.b_shape)
        digest.update(json.dumps(head).encode())
        digest.update(a.data)
        row_bytes = len(b.data) // b.header.shape[0]
        start = row.b_start * row_bytes
        digest.update(memoryview(b.data)[start : start + row.b_shape[0] * row_bytes])
    return digest.hexdigest()
