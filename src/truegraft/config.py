"""Engine settings: small frozen values, composed, never mutated.

`EngineConfig.from_options` turns keywords into one; "auto" values are resolved by the engine
into a new object. Knows nothing about torch: dtypes and devices are names here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from truegraft.api import MAX_LOGPROBS
from truegraft.errors import ConfigError, UnknownOptionError

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
BLOCK_SIZE = 64  # tokens of a KV block; attention tiles are cut at its multiples
LORA_PAGE_RANK = 16  # ranks of an adapter page, the unit of LoRA work
MAX_LORA_RANK = 256

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"}


def check_int(name: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    """`value` as an int from low to high. Raises ConfigError naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}.")
    return value


@dataclass(frozen=True)
class ModelConfig:
    """Which base model, and how it is read.

    dtype: name, or "auto" for the checkpoint's. max_model_len: tokens, None for the model's own.
    """

    path: Path
    tokenizer: Path
    dtype: DType | Literal["auto"] = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    chat_template: str | None = None
    max_logprobs: int = MAX_LOGPROBS
    seed: int = 0


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. memory: bytes, None for what the scheduler's limits can use."""

    block_size: int = BLOCK_SIZE
    memory: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step: requests, and token rows."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512


@dataclass(frozen=True)
class LoRAConfig:
    """Room for adapters: versions on the device, versions in host memory, highest rank taken."""

    max_loras: int = 8
    max_cpu_loras: int = 64
    max_lora_rank: int = MAX_LORA_RANK

    @property
    def num_pages(self) -> int:
        """16-rank pages per target module: room for max_loras of rank 64, or one of the highest."""
        return max(4 * self.max_loras, -(-self.max_lora_rank // LORA_PAGE_RANK))


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting by prompt lookup: repeat what followed the last n-gram's earlier occurrence.

    num_speculative_tokens: drafts a step; prompt_lookup_min/max: n-gram lengths tried.
    """

    method: Literal["ngram"]
    num_speculative_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """From vLLM's `speculative_config`. Raises ConfigError, UnknownOptionError."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise UnknownOptionError("speculative_config", name, cls.__dataclass_fields__)
        if options.get("method") != "ngram":
            raise ConfigError(
                f"speculative_config method={options.get('method')!r}: only 'ngram' is supported."
            )
        if "num_speculative_tokens" not in options:
            raise ConfigError("speculative_config needs num_speculative_tokens, 1 to 16.")
        given = dict(options)
        longest = given.get("prompt_lookup_max")
        shortest = given.get("prompt_lookup_min")
        given["prompt_lookup_max"] = longest if longest is not None else max(4, shortest or 0)
        given["prompt_lookup_min"] = shortest if shortest is not None else min(2, longest or 2)
        return cls(**given)

    def __post_init__(self) -> None:
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, 16)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 64)


@dataclass(frozen=True)
class DeviceConfig:
    """Where to run. memory_utilization: share of a GPU's memory; no meaning on the CPU."""

    device: Literal["auto", "cpu"] = "auto"
    memory_utilization: float = 0.9
    enforce_eager: bool = False


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. lora is None when adapters are off."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig | None = None
    speculative: SpeculativeConfig | None = None
    device: DeviceConfig = field(default_factory=DeviceConfig)


def parse_dtype(value: str) -> DType | Literal["auto"]:
    """A dtype name from what users write. Raises ConfigError."""
    name = str(value).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name == "auto":
        return "auto"
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ConfigError(f"dtype={value!r} is not supported; use auto, bfloat16, float16 or float32.")
