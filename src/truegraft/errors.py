"""Every error that Truegraft raises on purpose.

    TruegraftError
    ├── ConfigError            a setting of the engine is wrong or refused
    │   ├── UnknownOptionError     a keyword that does not exist; names the nearest that does
    │   └── OutOfMemoryError       more memory asked for than there is
    ├── ModelError             a base model cannot be served
    ├── TokenizerError         a tokenizer or chat template cannot be used
    ├── AdapterError           a LoRA adapter is refused; lists every reason
    │   └── UnknownAdapterError    a request names an adapter that was never loaded
    ├── RequestError           one request is wrong; no other is disturbed
    │   └── NonFiniteError         a request produced NaN or infinity; it alone fails
    └── ExactnessError         a proof failed at load: the engine refuses to start

Each message names the field, the value and the way out. Knows nothing about HTTP: the server
maps these classes to status codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class TruegraftError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(TruegraftError, ValueError):
    """An engine setting is wrong, impossible or refused."""


class UnknownOptionError(ConfigError, TypeError):
    """A keyword that does not exist.

    `owner` is the callable it was given to, `name` the keyword, `valid` the keywords there are.
    """

    def __init__(self, owner: str, name: str, valid: Iterable[str]) -> None:
        self.owner = owner
        self.name = name
        self.nearest = next(iter(get_close_matches(name, list(valid), n=1, cutoff=0.5)), None)
        hint = f" Did you mean {self.nearest!r}?" if self.nearest else ""
        super().__init__(f"{owner} has no option {name!r}.{hint}")


class OutOfMemoryError(ConfigError):
    """More memory is asked for than the device has or than the setting allows."""


class ModelError(TruegraftError, ValueError):
    """A base model directory cannot be served; the message says which file or field and why."""


class TokenizerError(TruegraftError, ValueError):
    """A tokenizer or chat template is missing, broken or not supported."""


class AdapterError(TruegraftError, ValueError):
    """An adapter is refused whole. `reasons` lists all that is wrong with it."""

    def __init__(self, source: object, reasons: str | Sequence[str]) -> None:
        self.source = str(source)
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"adapter {self.source!r} is refused:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.reasons)


class UnknownAdapterError(AdapterError):
    """A request names an adapter that nobody loaded. It is never answered by the base model."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        names = sorted(known)
        listed = ", ".join(names) if names else "none"
        super().__init__(name, f"no adapter of this name is loaded; loaded: {listed}")
        self.name = name
        self.known = tuple(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.known)


class RequestError(TruegraftError, ValueError):
    """One request is wrong: a bad parameter, an empty or too long prompt, an unknown token id."""


class NonFiniteError(RequestError):
    """A request produced NaN or infinity. It fails alone; its neighbours are not touched.

    `outputs`: the results of all requests of the call, where a call had several.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class ExactnessError(TruegraftError, RuntimeError):
    """A proof failed: some op gives a row other bits when its neighbours change."""
