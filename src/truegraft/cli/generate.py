"""`truegraft generate`: answer prompts in one batch and print the texts.

A single prompt's text is all that goes to stdout; several get a heading each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from truegraft.api import RequestOutput
from truegraft.cli.console import emit, emit_json, note, stdout
from truegraft.cli.serving import (
    BASE,
    DtypeOption,
    JsonOption,
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
from truegraft.errors import NonFiniteError, RequestError


def generate(
    model: ModelOption,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Repeatable. '-' reads stdin, a prompt a line.",
        ),
    ],
    lora: LoraOption = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Who answers: once for all prompts or once for each; 'base' for no adapter. "
            "Default: the only --lora, else base.",
        ),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    speculate: SpeculateOption = 0,
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Answer prompts, each by its adapter, in one batch."""
    serving = Serving.parse(model, lora)
    given = given_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    config = speculation(speculate)
    prompts = read_prompts(prompt)
    loras = serving.choose(adapter, len(prompts))
    with serving.open(dtype=dtype, speculative_config=config) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        start = time.perf_counter()
        try:
            outputs = llm.generate(prompts, params, loras)
        except NonFiniteError as error:  # the others have their answers all the same
            _show(error.outputs, time.perf_counter() - start, json)
            raise
        _show(outputs, time.perf_counter() - start, json)


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts; "-" stands for the lines of stdin, empty ones left out. Raises RequestError."""
    prompts: list[str] = []
    for prompt in given:
        prompts += filter(str.strip, sys.stdin.read().splitlines()) if prompt == "-" else [prompt]
    if not prompts:
        raise RequestError("stdin holds no prompt; give one a line.")
    return prompts


def _show(outputs: Sequence[RequestOutput], seconds: float, json: bool) -> None:
    if json:
        emit_json(_document(outputs, seconds))
        return
    for number, output in enumerate(outputs, start=1):
        if len(outputs) > 1:
            stdout().print(f"── {number} · {_adapter(output)} ──", style="bold cyan", markup=False)
        emit(output.outputs[0].text)
    note(_summary(outputs, seconds))


def _adapter(output: RequestOutput) -> str:
    return output.lora_request.lora_name if output.lora_request else BASE


def _summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    stats = [output.outputs[0].speculation for output in outputs]
    drafts = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted_tokens for s in stats)
    text = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s"
    return f"{text}, {accepted} of {drafts} drafts accepted" if drafts else text


def _document(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    return {"results": [_result(output) for output in outputs], "seconds": round(seconds, 4)}


def _result(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": output.prompt,
        "adapter": _adapter(output),
        "adapter_fingerprint": output.adapter_fingerprint,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_draft_tokens": completion.speculation.num_draft_tokens,
        "num_accepted_tokens": completion.speculation.num_accepted_tokens,
    }
