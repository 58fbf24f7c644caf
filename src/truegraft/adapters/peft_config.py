"""adapter_config.json: what each field means here, and PEFT's rules of matching module names.

Every field that PEFT writes is in `CONFIG_FIELDS`: handled, harmless, or refused with its way out;
any other is refused by name. Knows nothing about tensors; `peft_format` binds those.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

NUM_LISTED = 8  # faults of one kind that are spelled out; the rest are counted

_T = TypeVar("_T")


class Faults:
    """All that is wrong, by kind; of a long kind the first few are told and the rest counted."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, reason: str) -> None:
        """One more thing that is wrong."""
        self._by_kind.setdefault(kind, []).append(reason)

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def reasons(self) -> tuple[str, ...]:
        """What AdapterError is to list."""
        return tuple(line for kind in self._by_kind for line in self._lines(kind))

    def _lines(self, kind: str) -> Iterator[str]:
        found = self._by_kind[kind]
        yield from found[:NUM_LISTED]
        if len(found) > NUM_LISTED:
            yield f"and {len(found) - NUM_LISTED} more of this kind: {kind}"


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NUM_LISTED
    return ", ".join(names[:NUM_LISTED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class ConfigField:
    """What is done with one field of adapter_config.json.

    handled: `valid` decides, `what` says what it should be. harmless: ignored, it has no meaning
    for inference. refused: unless it is one of the values that ask for nothing; `what` is the
    way out.
    """

    role: Literal["handled", "harmless", "refused"]
    what: str = ""
    valid: Callable[[Any], bool] = lambda value: value in (None, False, [], {})


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_alpha(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 1e-30 < abs(value) < 1e30  # type: ignore[arg-type]  # also false for NaN


def _is_pattern(of: Callable[[object], bool]) -> Callable[[object], bool]:
    def valid(value: object) -> bool:
        if not isinstance(value, dict):
            return value is None
        return all(_compiles(f"({key})$") and of(item) for key, item in value.items())

    return valid


def _is_names(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return value is None or (isinstance(value, str) and _compiles(value))


def _is_regexes(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(i, str) and _compiles(f"(?:{i})") for i in items)


def _is_layers(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(i, int) and not isinstance(i, bool) for i in items)


def _is_plain_init(value: object) -> bool:
    plain = ("gaussian", "orthogonal", "eva", "mica")
    return value.lower() in plain if isinstance(value, str) else value in (None, True, False)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _handled(valid: Callable[[Any], bool], what: str) -> ConfigField:
    return ConfigField("handled", f"must be {what}.", valid)


def _refused(way_out: str) -> ConfigField:
    return ConfigField("refused", f"is not supported: {way_out}")


MERGE = "merge it into the base with PEFT's merge_and_unload and serve that."
_RETRAIN = "train a plain LoRA adapter instead."
_NAMES = "a list of module names, a regex that compiles, or null"

_HARMLESS = (
    # Only read when an adapter is initialised; init_lora_weights says whether that matters.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_config", "megatron_core", "merge_weights"),
    "runtime_config",
)

CONFIG_FIELDS: dict[str, ConfigField] = {
    "peft_type": _handled(lambda v: v in (None, "LORA"), f"LORA; for other kinds {MERGE[:-1]}"),
    "r": _handled(_is_rank, "a rank, an integer of at least 1"),
    "lora_alpha": _handled(_is_alpha, "a finite number other than 0"),
    "use_rslora": _handled(lambda v: v is None or isinstance(v, bool), "true or false"),
    "rank_pattern": _handled(_is_pattern(_is_rank), "an object of regex -> rank of at least 1"),
    "alpha_pattern": _handled(_is_pattern(_is_alpha), "an object of regex -> number other than 0"),
    "target_modules": _handled(_is_names, _NAMES),
    "exclude_modules": _handled(_is_names, _NAMES),
    "layers_to_transform": _handled(_is_layers, "a layer index, a list of them, or null"),
    "layers_pattern": _handled(_is_regexes, "a regex, a list of them, or null"),
    "init_lora_weights": _handled(
        _is_plain_init,
        "true, false, gaussian, orthogonal, eva or mica; others change the base weights, so convert"
        " the adapter to a plain one: save_pretrained(path_initial_model_for_weight_conversion=…)",
    ),
    "bias": _handled(lambda v: v in (None, "none"), f"'none'; biases are not loaded: {MERGE[:-1]}"),
    "use_dora": _refused(f"DoRA rescales the base weights; {MERGE}"),
    "lora_bias": _refused(f"biases are not loaded; {MERGE}"),
    "modules_to_save": _refused(f"full weights are not loaded; {MERGE}"),
    "fan_in_fan_out": _refused("it is for Conv1D layers; set it to false for linear layers."),
    "layer_replication": _refused(f"layers are not repeated; {MERGE}"),
    "trainable_token_indices": _refused(f"token rows are not replaced; {MERGE}"),
    "target_parameters": _refused("name modules in target_modules instead."),
    "ensure_weight_tying": _refused(
        "PEFT saves both modules whole; list lm_head in target_modules and set this to false."
    ),
    "alora_invocation_tokens": _refused(f"an adapter acts on every token; {_RETRAIN}"),
    "use_qalora": _refused(_RETRAIN),
    "use_bdlora": _refused(f"save the full matrices, or {_RETRAIN}"),
    "arrow_config": _refused(f"adapters are not routed by token; {_RETRAIN}"),
    "kasa_config": _refused(f"it changes the base weights; {_RETRAIN}"),
    "velora_config": _refused(_RETRAIN),
    "monteclora_config": _refused(f"it draws random weights; {_RETRAIN}"),
    "enable_lora": _refused(f"it is for merged layers; {_RETRAIN}"),
    **dict.fromkeys(_HARMLESS, ConfigField("harmless")),
}


_UNKNOWN = ConfigField(
    "refused", "is an unknown field; remove it if it means nothing for inference.", lambda _: False
)


@dataclass(frozen=True)
class Settings:
    """The handled fields of a config, with PEFT's defaults; matching is PEFT's too."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | Sequence[str] | None = None
    exclude_modules: str | Sequence[str] = ()
    layers_to_transform: int | Sequence[int] = ()
    layers_pattern: str | Sequence[str] = ()

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """The first pattern that fits the end of the module's path wins."""
        rank = _by_pattern(self.rank_pattern, module, self.r)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str, kind: str) -> bool:
        """Whether the config asks for LoRA on `module`."""
        if _matches(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return kind == "linear" and module.rpartition(".")[2] != "lm_head"
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return _matches(self.target_modules, module)
        return _matches(self.target_modules, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        wanted = self.layers_to_transform
        layers = (wanted,) if isinstance(wanted, int) else wanted
        if not layers:
            return True
        names = self.layers_pattern
        patterns = (names,) if names and isinstance(names, str) else names
        before = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
        regexes = (rf"{path}\.(?P<layer>\d+)\." for path in before)
        found = next((m for regex in regexes if (m := re.match(regex, module))), None)
        return found is not None and int(found["layer"]) in layers


def _by_pattern(patterns: Mapping[str, _T], module: str, default: _T) -> _T:
    fits = (v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, default)


def _matches(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def check_config(config: Mapping[str, Any], faults: Faults) -> Settings:
    """The settings; every field that is wrong is a fault and takes its default."""
    good: dict[str, Any] = {}
    for name, value in config.items():
        known = CONFIG_FIELDS.get(name, _UNKNOWN)
        if known.role != "harmless" and not known.valid(value):
            faults.add("config", f"{name}={_shown(value)} {known.what}")
        elif name in Settings.__dataclass_fields__ and value is not None:
            good[name] = value
    settings = Settings(**good)
    layer_fields = [name for name in ("layers_to_transform", "layers_pattern") if name in good]
    if isinstance(settings.target_modules, str) and layer_fields:
        faults.add("config", f"{layer_fields[0]} needs a list as target_modules; list the modules.")
    if settings.layers_pattern and "layers_to_transform" not in good:
        faults.add("config", "layers_pattern is set without layers_to_transform; set both.")
    return settings


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
