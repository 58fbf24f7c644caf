"""`truegraft chat`: a conversation in the terminal, streamed, with adapters to switch between.

With stdin from a pipe there are no prompts and no greeting, and the first error ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from truegraft.api import LoRARequest, SamplingParams
from truegraft.cli.console import emit, note, show_error
from truegraft.cli.serving import (
    BASE,
    DtypeOption,
    LoraOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    Serving,
    SpeculateOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    given_params,
    speculation,
)
from truegraft.errors import ConfigError, TruegraftError

if TYPE_CHECKING:
    from truegraft.llm import LLM

COMMANDS = "/adapter NAME switches, /reset forgets what was said, /quit leaves"


def chat(
    model: ModelOption,
    lora: LoraOption = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Who answers at first. Default: the only --lora, else base."
        ),
    ] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    speculate: SpeculateOption = 0,
    dtype: DtypeOption = "auto",
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja text or a file, for a model that has none.")
    ] = None,
) -> None:
    """Talk to a model and its adapters.

    /adapter NAME switches, /reset forgets what was said, /quit or Ctrl-D leaves.
    """
    serving = Serving.parse(model, lora)
    given = given_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    config = speculation(speculate)
    [first] = serving.choose([adapter] if adapter else None)
    with serving.open(dtype=dtype, speculative_config=config, chat_template=chat_template) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        Conversation(serving, llm, params, first).run(interactive=sys.stdin.isatty())


@dataclass
class Conversation:
    """What has been said, and who answers next."""

    serving: Serving
    llm: LLM
    params: SamplingParams
    lora: LoRARequest | None
    messages: list[dict[str, str]] = field(default_factory=list)
    num_turns: int = 0

    def run(self, interactive: bool) -> None:
        """Read lines until /quit or their end. A person sees errors and goes on."""
        if interactive:
            note(f"adapters: {', '.join([*self.serving.loras, BASE])}; {COMMANDS}")
        for line in self._lines(interactive):
            if line.split(maxsplit=1)[0] in ("/quit", "/exit"):
                return
            try:
                self._take(line)
            except TruegraftError as error:
                if not interactive:
                    raise
                show_error(error)

    def _lines(self, interactive: bool) -> Iterator[str]:
        """Lines that hold something."""
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its line editing and history
        while True:
            try:
                line = input(f"{self._name}> " if interactive else "")
            except EOFError:
                return
            if line.strip():
                yield line

    @property
    def _name(self) -> str:
        return self.lora.lora_name if self.lora else BASE

    def _take(self, line: str) -> None:
        command, *arguments = line.split()
        if command == "/reset":
            self.messages.clear()
        elif command == "/adapter" and len(arguments) == 1:
            self.lora = self.serving.find(arguments[0])
        elif command.startswith("/"):
            names = ", ".join([*self.serving.loras, BASE])
            raise ConfigError(f"no command {line!r}; {COMMANDS}; adapters: {names}.")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """One turn. It is remembered only if it came to its end."""
        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = self.llm.get_tokenizer().encode_chat(messages)
        text = self._stream(prompt)
        self.messages = [*messages, {"role": "assistant", "content": text.strip()}]

    def _stream(self, prompt: list[int]) -> str:
        """Print the answer as it comes; returns it whole."""
        from truegraft.generation import PromptTokens
        from truegraft.llm import mix_seed

        engine, self.num_turns = self.llm.engine, self.num_turns + 1
        version = engine.load_adapter(self.lora).result() if self.lora else None
        tokens = PromptTokens(prompt, lora_request=self.lora)
        request_id, seed = f"turn-{self.num_turns}", mix_seed(0, self.num_turns)
        generation = engine.add(request_id, tokens, self.params, version, seed)
        output, shown = generation.samples[0].text, 0
        try:
            while not generation.finished:
                engine.step()
                text = output.text.lstrip()
                emit(text[shown:], end="")
                shown = len(text)
        finally:
            engine.abort(request_id)
            emit("")
        if generation.error is not None:
            raise generation.error
        return output.text
