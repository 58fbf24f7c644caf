"""From --model, --lora and --adapter to an open LLM and the adapter of each prompt.

Everything that can be wrong about names is found here, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truegraft.api import LoRARequest, SamplingParams
from truegraft.cli.console import working
from truegraft.errors import ConfigError, ModelError, RequestError, UnknownAdapterError

if TYPE_CHECKING:
    from truegraft.llm import LLM

BASE = "base"  # the name of no adapter
DEMO = "demo"  # the name of the model that comes with the package
MAX_DEVICE_LORAS = 8

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR",
        help="A Hugging Face directory, or 'demo' for the model that comes with Truegraft.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=DIR",
        help="An adapter in PEFT layout and a name for it; repeatable. The demo model's four "
        "(iso_date, json, roman, sql) are there already.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens of this probability together.")
]
TopKOption = Annotated[int | None, typer.Option(help="Keep this many likeliest tokens.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
SpeculateOption = Annotated[
    int, typer.Option(metavar="K", help="Draft K tokens a step by prompt lookup; 0 drafts none.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True)
class Serving:
    """A model's directory, its adapters by name, and the one that answers unless told otherwise.

    default: "base", a name, or None where several adapters were given and none was chosen.
    """

    path: Path
    loras: Mapping[str, LoRARequest]
    default: str | None

    @classmethod
    def parse(cls, model: str, loras: Sequence[str] | None) -> Serving:
        """From what --model and --lora say. Raises ConfigError, ModelError."""
        given: dict[str, LoRARequest] = {}
        for item in loras or ():
            name, _, path = item.partition("=")
            if not name or not path:
                raise ConfigError(f"--lora {item!r} must be NAME=DIR.")
            if name == BASE:
                raise ConfigError("--lora base=… is refused: 'base' means no adapter; rename it.")
            if name in given:
                raise ConfigError(f"--lora gives two adapters the name {name!r}; rename one.")
            given[name] = LoRARequest(name, lora_path=path)
        default = BASE if not given else next(iter(given)) if len(given) == 1 else None
        return cls(model_path(model), {**_built_in(model), **given}, default)

    def choose(self, names: Sequence[str] | None, count: int = 1) -> list[LoRARequest | None]:
        """The adapter of each of `count` prompts; None is the base.

        Raises UnknownAdapterError, which lists the known, or RequestError.
        """
        if not names and self.default is None:
            known = ", ".join(self.loras)
            raise RequestError(f"several adapters are given; choose one with --adapter: {known}.")
        chosen = list(names or ()) or [self.default or BASE]
        if len(chosen) not in (1, count):
            raise RequestError(
                f"{len(chosen)} --adapter for {count} prompts; give one for all, or one each."
            )
        found = [self.find(name) for name in chosen]
        return found * count if len(found) == 1 else found

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name, None for "base". Raises UnknownAdapterError."""
        if name == BASE:
            return None
        if name not in self.loras:
            raise UnknownAdapterError(name, [*self.loras, BASE])
        return self.loras[name]

    @contextmanager
    def open(self, **options: Any) -> Iterator[LLM]:
        """An LLM with every adapter loaded. Raises as `LLM` and AdapterError."""
        with working("loading torch"):
            from truegraft.llm import LLM
        if self.loras:
            options |= {"enable_lora": True, "max_loras": min(len(self.loras), MAX_DEVICE_LORAS)}
        with working(f"loading {self.path}"):
            llm = LLM(self.path, **options)
        with llm:
            for lora in self.loras.values():
                with working(f"loading adapter {lora.lora_name}"):
                    llm.add_lora(lora)
            yield llm


def model_path(model: str) -> Path:
    """The directory that --model means; './demo' is a folder, 'demo' is not. Raises ModelError."""
    from truegraft import demo

    path = demo.model_path() if model == DEMO else Path(model)
    if not path.is_dir():
        raise ModelError(
            f"--model {model!r} is no directory; give a local one, or 'demo' "
            "(nothing is downloaded)."
        )
    return path


def _built_in(model: str) -> dict[str, LoRARequest]:
    from truegraft import demo

    found = demo.adapters() if model == DEMO else {}
    return {name: LoRARequest(name, lora_path=str(path)) for name, path in found.items()}


def given_params(**values: Any) -> dict[str, Any]:
    """The sampling options that were given, checked before anything is loaded.

    Raises RequestError.
    """
    given = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**given)
    return given


def speculation(num_draft_tokens: int) -> dict[str, Any] | None:
    """--speculate as `speculative_config`. Raises ConfigError."""
    from truegraft.config import SpeculativeConfig

    if num_draft_tokens == 0:
        return None
    config = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
    SpeculativeConfig.from_dict(config)
    return config
