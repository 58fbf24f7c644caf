"""What goes wrong is said in one typed error that names field, value and way out, and disturbs
no other request."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.helpers import alone, facts, greedy, ids, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter

from truegraft import LLM, LoRARequest, SamplingParams
from truegraft.errors import (
    AdapterError,
    ConfigError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    RequestError,
    TokenizerError,
    TruegraftError,
)
from truegraft.generation import PromptTokens

GOOD = ids(1, 40)


# ------------------------------------------------------------------ the model


def write_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], type[TruegraftError], list[str]]] = {
    "no such path": (shutil.rmtree, ModelError, ["does not exist"]),
    "not a model": (lambda p: (p / "config.json").unlink(), ModelError, ["config.json"]),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), ModelError, ["safetensors"]),
    "truncated": (truncate, ModelError, ["model.safetensors"]),
    "a tensor is missing": (drop_tensor, ModelError, ["model.layers.1.mlp.up_proj.weight"]),
    "another shape": (
        lambda p: write_json(p / "config.json", intermediate_size=128),
        ModelError,
        ["96", "128"],
    ),
    "more layers": (
        lambda p: write_json(p / "config.json", num_hidden_layers=3),
        ModelError,
        ["model.layers.2."],
    ),
    "unknown architecture": (
        lambda p: write_json(p / "config.json", architectures=["GPT9"], model_type="gpt9"),
        ModelError,
        ["GPT9"],
    ),
    "quantised": (
        lambda p: write_json(p / "config.json", quantization_config={"quant_method": "awq"}),
        ModelError,
        ["awq"],
    ),
    "config is not JSON": (
        lambda p: (p / "config.json").write_text("{"),
        ModelError,
        ["config.json"],
    ),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), TokenizerError, ["tokenizer.json"]),
    "tokenizer is not one": (
        lambda p: (p / "tokenizer.json").write_text("{}"),
        TokenizerError,
        ["tokenizer.json"],
    ),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_a_model_that_cannot_be_served_is_refused_by_name(
    llama: Path, tmp_path: Path, case: str
) -> None:
    damage, error, words = BROKEN_MODELS[case]
    path = shutil.copytree(llama, tmp_path / "model")
    damage(path)
    with pytest.raises(error) as caught:
        LLM(path, max_model_len=128, max_num_seqs=2)
    for word in [*words, str(path)] if case == "no such path" else words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_len": 4096}, ConfigError, ["max_model_len=4096", "2048"]),
        ({"kv_cache_memory": 2**50}, OutOfMemoryError, [f"kv_cache_memory={2**50}", "lower"]),
        ({"kv_cache_memory": 100}, OutOfMemoryError, ["100", "kv_cache_memory", "raise"]),
        (
            {"kv_cache_memory": 2**19, "max_model_len": 2048},
            OutOfMemoryError,
            ["max_model_len=2048", "kv_cache_memory"],
        ),
        ({"chat_template": "/no/such/file"}, TokenizerError, ["chat_template", "/no/such/file"]),
        ({"tokenizer": "/no/such/folder"}, TokenizerError, ["/no/such/folder"]),
    ],
)
def test_a_setting_that_this_model_or_machine_cannot_have(
    llama: Path, options: dict[str, Any], error: type[TruegraftError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        LLM(llama, **options)
    for word in words:
        assert word in str(caught.value)


def test_the_memory_that_is_named_as_enough_is_enough(llama: Path) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(llama, kv_cache_memory=1000, max_model_len=256)
    named = max(int(word) for word in str(caught.value).split() if word.isdecimal())
    with LLM(llama, kv_cache_memory=named, max_model_len=256) as llm:
        assert len(tokens(llm.generate(ids(1, 250), greedy(6))[0])) == 6


# ------------------------------------------------------------------ prompts and parameters

BAD_PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "empty list": ([[]], ["empty", "at least one"]),
    "empty text": ("", ["empty", "at least one"]),
    "empty ids": ({"prompt_token_ids": []}, ["empty", "at least one"]),
    "too long": ([ids(1, 512)], ["512", "max_model_len=512", "Shorten"]),
    "far too long": ("x" * 5000, ["5000", "max_model_len=512", "Shorten"]),
    "negative id": ([[1, -1]], ["prompt_token_ids", "-1", "255"]),
    "id out of range": ({"prompt_token_ids": [256]}, ["prompt_token_ids", "256", "255"]),
    "not an integer": ([[1, 2.5]], ["prompt_token_ids", "2.5", "integers"]),
    "true": ([[1, True]], ["prompt_token_ids", "True", "integers"]),
    "text among ids": ([[1, "a"]], ["prompt_token_ids", "'a'", "integers"]),
    "other keys": ({"text": "a"}, ["{'text': 'a'}", "prompt_token_ids"]),
    "nothing": ([None], ["None", "prompt_token_ids"]),
    "a number": (5, ["5", "prompt"]),
    "both forms empty": ({"prompt": None}, ["prompt_token_ids"]),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, case: str) -> None:
    prompt, words = BAD_PROMPTS[case]
    steps = llm.engine.scheduler.stats.num_steps
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, greedy())
    for word in words:
        assert word in str(caught.value)
    assert llm.engine.scheduler.stats.num_steps == steps


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_prompt_in_a_call_leaves_nothing_behind(llm: LLM, place: int) -> None:
    prompts = [GOOD, GOOD]
    prompts.insert(place, [999])
    with pytest.raises(RequestError, match="999"):
        llm.generate(prompts, greedy())
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (greedy(stop_token_ids=[256]), ["stop_token_ids", "256", "255"]),
        (greedy(allowed_token_ids=[1, 999]), ["allowed_token_ids", "999", "255"]),
        (greedy(logit_bias={300: 1.0}), ["logit_bias", "300", "255"]),
    ],
)
def test_ids_that_this_model_does_not_have(
    llm: LLM, params: SamplingParams, words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(GOOD, params)
    for word in words:
        assert word in str(caught.value)


def test_parameters_of_another_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(TruegraftError, match="SamplingParams"):
        llm.generate(GOOD, {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(TruegraftError, match="LoRARequest"):
        llm.generate(GOOD, greedy(), "my-adapter")  # type: ignore[arg-type]


def test_stop_tokens_that_are_all_that_is_allowed_cannot_be_held_off(llm: LLM) -> None:
    """Every token would be masked; whatever came out would be one that was not allowed."""
    params = greedy(8, allowed_token_ids=[65], stop_token_ids=[65], min_tokens=4)
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.generate(GOOD, params)


def test_the_limit_on_logprobs_is_the_engines(llama: Path) -> None:
    with LLM(llama, max_logprobs=3, max_model_len=128, max_num_seqs=2) as llm:
        assert llm.generate(GOOD, greedy(2, logprobs=3, prompt_logprobs=3))
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(RequestError, match=f"{name}=4 exceeds max_logprobs=3"):
                llm.generate(GOOD, greedy(2, **{name: 4}))


BAD_CHATS: list[tuple[Any, list[str]]] = [
    ([], ["messages"]),
    ([{"content": "a"}], ["messages[0]", "role"]),
    ([{"role": "user", "content": 5}], ["messages[0]", "5"]),
    ([{"role": "user", "content": [{"type": "image_url"}]}], ["image_url", "text"]),
    ([[{"role": "user", "content": "a"}], "b"], ["messages"]),
]


@pytest.mark.parametrize(("messages", "words"), BAD_CHATS)
def test_messages_that_are_none(llm: LLM, messages: Any, words: list[str]) -> None:
    if not messages:
        assert llm.chat(messages, greedy()) == [], "no conversations, no results"
        return
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, greedy())
    for word in words:
        assert word in str(caught.value)


def test_a_request_that_is_refused_disturbs_none_that_runs(llm: LLM) -> None:
    expected = alone(llm, [GOOD], greedy(20), [None])[0]
    engine = llm.engine
    running = engine.add("runs", PromptTokens(GOOD), greedy(20))
    for prompt, params in (
        ([], greedy()),
        ([999], greedy()),
        (ids(1, 600), greedy()),
        (GOOD, greedy(stop_token_ids=[999])),
    ):
        engine.step()
        with pytest.raises(RequestError):
            engine.add("refused", PromptTokens(prompt), params)
        engine.check_integrity()
    while engine.has_work:
        engine.step()
    assert facts(running.output()) == expected


# ------------------------------------------------------------------ values that are not finite


def overflowing(path: Path, llama: Path, size: float, target: str = "v_proj") -> LoRARequest:
    """An adapter whose values are finite, and whose products are not."""
    make_adapter(path, llama, rank=2, targets=[target], seed=9)
    tensors = load_file(path / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        tensor.mul_(size)
        tensor.clamp_(-3e38, 3e38)
        assert bool(torch.isfinite(tensor).all()), name
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest("overflows", lora_path=str(path))


@pytest.mark.parametrize("target", ["v_proj", "k_proj", "down_proj", "lm_head", "embed_tokens"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_that_overflows_fails_alone(
    llm: LLM, llama: Path, adapters: dict[str, LoRARequest], tmp_path: Path, target: str, place: int
) -> None:
    bad = overflowing(tmp_path / "bad", llama, 1e36, target)
    prompts = [ids(n, 100) for n in range(3)]
    loras: list[LoRARequest | None] = [None, adapters["r17-all"]]
    loras.insert(place, bad)
    good = [n for n in range(3) if n != place]
    expected = alone(llm, [prompts[n] for n in good], greedy(), [loras[n] for n in good])
    llm.engine.scheduler.blocks.clear_cache()
    with pytest.raises(NonFiniteError) as caught:
        llm.generate(prompts, greedy(), loras)
    outputs = caught.value.outputs
    assert len(outputs) == 3 and "1 of 3 requests failed" in str(caught.value)
    assert outputs[place].outputs[0].finish_reason == "error"
    assert tokens(outputs[place]) == []
    assert [facts(outputs[n]) for n in good] == expected
    assert all(math.isfinite(v) for n in good for v in facts(outputs[n])[0][1])


def test_the_next_requests_on_its_blocks_are_right(llama: Path, tmp_path: Path) -> None:
    """A cache of four blocks: whoever comes next gets the ones that held NaN."""
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 256, "enable_lora": True}
    bad = overflowing(tmp_path / "bad", llama, 1e36)
    prompts = [ids(n, 70 + 50 * n) for n in range(4)]
    with LLM(llama, **options) as fresh:
        expected = alone(fresh, prompts, greedy(), [None] * 4)
    with LLM(llama, **options) as llm:
        assert llm.engine.scheduler.blocks.num_blocks == 4
        for prompt, right in zip(prompts, expected, strict=True):
            with pytest.raises(NonFiniteError):
                llm.generate(ids(9, 240), greedy(), bad)
            assert llm.engine.scheduler.blocks.num_cached <= 4
            output = llm.generate(prompt, greedy())[0]
            assert (facts(output), output.num_cached_tokens) == (right, 0)
        llm.engine.check_integrity()


def test_all_samples_of_a_failed_prompt_say_so(llm: LLM, llama: Path, tmp_path: Path) -> None:
    bad = overflowing(tmp_path / "bad", llama, 1e36)
    with pytest.raises(NonFiniteError, match="overflow") as caught:
        llm.generate(GOOD, replace(greedy(), n=3), bad)
    samples = caught.value.outputs[0].outputs
    assert [sample.finish_reason for sample in samples] == ["error"] * 3


def test_an_adapter_that_float16_cannot_hold_is_refused_or_fails_alone(
    llama: Path, tmp_path: Path
) -> None:
    bad = overflowing(tmp_path / "bad", llama, 1e3)
    with LLM(llama, dtype="float16", enable_lora=True, max_model_len=128, max_num_seqs=4) as llm:
        right = alone(llm, [GOOD], greedy(), [None])[0]
        with pytest.raises((AdapterError, NonFiniteError)) as caught:
            llm.generate([GOOD, GOOD], greedy(), [None, bad])
        if isinstance(caught.value, NonFiniteError):
            assert facts(caught.value.outputs[0]) == right
        assert facts(llm.generate(GOOD, greedy())[0]) == right
