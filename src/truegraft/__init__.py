"""Truegraft: many LoRA adapters over one base model, with bit-exact answers.

The public names, loaded when first used: importing the package loads neither torch nor the
server, and configures no logging.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truegraft.api import (
        CompletionOutput,
        Logprob,
        LoRARequest,
        RequestOutput,
        SamplingParams,
        SpeculationStats,
    )
    from truegraft.errors import (
        AdapterError,
        ConfigError,
        ExactnessError,
        ModelError,
        NonFiniteError,
        OutOfMemoryError,
        RequestError,
        TokenizerError,
        TruegraftError,
        UnknownAdapterError,
        UnknownOptionError,
    )
    from truegraft.llm import LLM

__version__ = "0.1.0"

# Before torch is imported: OpenMP threads that spin for long while they wait stall every op of a
# machine that has other work (30 times slower was seen); a short spin costs nothing elsewhere.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__all__ = [
    "LLM",
    "AdapterError",
    "CompletionOutput",
    "ConfigError",
    "ExactnessError",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "NonFiniteError",
    "OutOfMemoryError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "TokenizerError",
    "TruegraftError",
    "UnknownAdapterError",
    "UnknownOptionError",
    "__version__",
]

_API = {
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "llm" if name == "LLM" else "api" if name in _API else "errors"
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
