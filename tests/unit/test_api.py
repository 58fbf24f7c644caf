"""What a user may pass: every field of vLLM's, typed errors that name field, value and way out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from truegraft.api import (
    LLM_OPTIONS,
    SAMPLING_OPTIONS,
    LoRARequest,
    Option,
    SamplingParams,
    SpeculationStats,
)
from truegraft.config import EngineConfig, SpeculativeConfig, parse_dtype
from truegraft.errors import (
    AdapterError,
    ConfigError,
    NonFiniteError,
    RequestError,
    TruegraftError,
    UnknownAdapterError,
    UnknownOptionError,
)
from truegraft.llm import LLM, _engine_config

split = str.split

# The keywords of vLLM's LLM, and those of its engine arguments that its documentation shows.
VLLM_LLM = split("""
    model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
    allowed_local_media_path allowed_media_domains tensor_parallel_size dtype quantization revision
    tokenizer_revision chat_template seed gpu_memory_utilization swap_space cpu_offload_gb
    enforce_eager enable_return_routed_experts disable_custom_all_reduce hf_token hf_overrides
    mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config
    kv_cache_memory_bytes compilation_config logits_processors
    task override_pooler_config disable_async_output_proc max_seq_len_to_capture
    served_model_name load_format download_dir max_model_len max_num_seqs max_num_batched_tokens
    block_size enable_prefix_caching enable_chunked_prefill enable_lora max_loras max_cpu_loras
    max_lora_rank fully_sharded_loras lora_dtype default_mm_loras speculative_config max_logprobs
    logprobs_mode generation_config override_generation_config kv_cache_dtype rope_scaling
    pipeline_parallel_size data_parallel_size distributed_executor_backend num_gpu_blocks_override
    disable_log_stats scheduling_policy async_scheduling code_revision limit_mm_per_prompt
    disable_sliding_window kv_transfer_config ignore_patterns model_loader_extra_config
""")

# Its SamplingParams, without the fields that are set after construction.
VLLM_SAMPLING = split("""
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    stream_interval skip_clone structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection
    routed_experts_prompt_start trace_decode_token_ids
    best_of logits_processors truncate_prompt_tokens guided_decoding
""")


LOOSE_PARAMS: Any = SamplingParams  # the same, for keywords that a type checker refuses too
LOOSE_LORA: Any = LoRARequest


def named(table: dict[str, Option], status: str) -> list[str]:
    return [name for name, option in table.items() if option.status == status]


def engine_config(**given: Any) -> EngineConfig:
    """The settings that LLM("model", **given) would build its engine with."""
    parameters = inspect.signature(LLM.__init__).parameters.values()
    values = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    options = {name: value for name, value in given.items() if name not in values}
    return _engine_config(Path("model"), values | given | {"options": options})


def parameters_of_llm() -> set[str]:
    return set(inspect.signature(LLM.__init__).parameters) - {"self", "options"}


# ------------------------------------------------------------------ the tables


def test_every_keyword_of_vllm_has_its_place_in_the_table() -> None:
    assert [name for name in VLLM_LLM if name not in LLM_OPTIONS] == []
    assert [name for name in VLLM_SAMPLING if name not in SAMPLING_OPTIONS] == []


def test_every_keyword_of_ours_is_in_the_table_as_one_that_works() -> None:
    assert parameters_of_llm() <= set(LLM_OPTIONS)
    assert all(LLM_OPTIONS[name].status != "refused" for name in parameters_of_llm())
    assert named(SAMPLING_OPTIONS, "supported") == [f.name for f in fields(SamplingParams)]


@pytest.mark.parametrize("name", named(LLM_OPTIONS, "supported"))
def test_a_supported_keyword_is_a_parameter(name: str) -> None:
    assert name in parameters_of_llm() | {"kv_cache_memory_bytes"}


@pytest.mark.parametrize(
    ("given", "read", "value"),
    [
        ({"tokenizer": "t"}, lambda c: c.model.tokenizer, Path("t")),
        ({}, lambda c: c.model.tokenizer, Path("model")),
        ({"dtype": "half"}, lambda c: c.model.dtype, "float16"),
        ({"max_model_len": 77}, lambda c: c.model.max_model_len, 77),
        ({"load_format": "dummy"}, lambda c: c.model.load_format, "dummy"),
        ({"chat_template": "{x}"}, lambda c: c.model.chat_template, "{x}"),
        ({"seed": 5}, lambda c: c.model.seed, 5),
        ({"max_logprobs": 3}, lambda c: c.model.max_logprobs, 3),
        ({"kv_cache_memory": 99}, lambda c: c.cache.memory, 99),
        ({"kv_cache_memory_bytes": 98}, lambda c: c.cache.memory, 98),
        ({"enable_prefix_caching": False}, lambda c: c.cache.enable_prefix_caching, False),
        ({"block_size": 64}, lambda c: c.cache.block_size, 64),
        ({"max_num_seqs": 3}, lambda c: c.scheduler.max_num_seqs, 3),
        ({"max_num_batched_tokens": 9}, lambda c: c.scheduler.max_num_batched_tokens, 9),
        ({"max_loras": 3}, lambda c: c.lora, None),
        ({"enable_lora": True, "max_loras": 3}, lambda c: c.lora.max_loras, 3),
        ({"enable_lora": True, "max_cpu_loras": 9}, lambda c: c.lora.max_cpu_loras, 9),
        ({"enable_lora": True, "max_lora_rank": 9}, lambda c: c.lora.max_lora_rank, 9),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            lambda c: c.speculative,
            SpeculativeConfig("ngram", 3, 2, 4),
        ),
    ],
)
def test_a_supported_keyword_reaches_the_engine(
    given: dict[str, Any], read: Callable[[EngineConfig], Any], value: Any
) -> None:
    assert read(engine_config(**given)) == value


@pytest.mark.parametrize(
    "name",
    [n for n in named(LLM_OPTIONS, "accepted") if n not in ("max_lora_rank", "max_logprobs")],
)
def test_an_accepted_keyword_changes_nothing_and_says_so(name: str) -> None:
    assert engine_config(**{name: 1}) == engine_config()
    assert LLM_OPTIONS[name].meaning


@pytest.mark.parametrize("name", named(SAMPLING_OPTIONS, "accepted"))
def test_an_accepted_sampling_keyword_changes_nothing(name: str) -> None:
    assert LOOSE_PARAMS(**{name: True}) == SamplingParams()


@pytest.mark.parametrize("name", named(LLM_OPTIONS, "refused"))
def test_a_refused_keyword_names_itself_its_value_and_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(**{name: "another"})
    assert not isinstance(caught.value, UnknownOptionError)
    assert f"{name}='another'" in str(caught.value)
    assert LLM_OPTIONS[name].meaning in str(caught.value)


@pytest.mark.parametrize("name", named(SAMPLING_OPTIONS, "refused"))
def test_a_refused_sampling_keyword_names_itself_its_value_and_the_way_out(name: str) -> None:
    with pytest.raises(TruegraftError) as caught:
        LOOSE_PARAMS(**{name: "another"})
    assert not isinstance(caught.value, UnknownOptionError)
    assert f"{name}='another'" in str(caught.value)
    assert SAMPLING_OPTIONS[name].meaning in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in named(LLM_OPTIONS, "refused") for v in LLM_OPTIONS[n].neutral],
)
def test_a_refused_keyword_may_ask_for_nothing(name: str, value: Any) -> None:
    assert engine_config(**{name: value}) == engine_config()


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in named(SAMPLING_OPTIONS, "refused") for v in SAMPLING_OPTIONS[n].neutral],
)
def test_a_refused_sampling_keyword_may_ask_for_nothing(name: str, value: Any) -> None:
    assert SamplingParams(**{name: value}) == SamplingParams()


def test_one_is_not_taken_for_true() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code=1"):
        engine_config(trust_remote_code=1)
    with pytest.raises(ConfigError, match="tensor_parallel_size=True"):
        engine_config(tensor_parallel_size=True)


# ------------------------------------------------------------------ unknown keywords


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [
        (lambda: LOOSE_PARAMS(temprature=0), "temprature", "temperature"),
        (lambda: LOOSE_PARAMS(max_token=3), "max_token", "max_tokens"),
        (lambda: LOOSE_LORA("a", lora_paht="p"), "lora_paht", "lora_path"),
        (lambda: engine_config(max_model_length=5), "max_model_length", "max_model_len"),
        (
            lambda: engine_config(tensor_paralel_size=1),
            "tensor_paralel_size",
            "tensor_parallel_size",
        ),
        (
            lambda: engine_config(
                speculative_config={"method": "ngram", "num_speculative_token": 1}
            ),
            "num_speculative_token",
            "num_speculative_tokens",
        ),
    ],
)
def test_an_unknown_keyword_names_the_nearest(
    make: Callable[[], object], name: str, nearest: str
) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        make()
    assert caught.value.nearest == nearest
    assert repr(name) in str(caught.value) and repr(nearest) in str(caught.value)
    assert isinstance(caught.value, (ConfigError, TypeError))


def test_a_keyword_unlike_any_other_has_no_nearest() -> None:
    with pytest.raises(UnknownOptionError, match=r"no option 'zzzzzzzz'\.$") as caught:
        LOOSE_PARAMS(zzzzzzzz=1)
    assert caught.value.nearest is None


@pytest.mark.parametrize("name", ["dtype", "gpu_memory_utilization", "quantization"])
def test_an_adapter_takes_no_keyword_of_the_engine(name: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"LoRARequest has no option '{name}'"):
        LOOSE_LORA("a", lora_path="p", **{name: None})


# ------------------------------------------------------------------ SamplingParams


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n", [0, -1, 257, 1.0, True, "1", None]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "0", None]),
        ("frequency_penalty", [-2.1, 2.1, math.inf, True]),
        ("repetition_penalty", [0, -1, math.nan, None]),
        ("temperature", [-0.1, math.nan, math.inf, "0", None, True]),
        ("top_p", [0, -0.1, 1.1, math.nan, None]),
        ("top_k", [-2, 1.5, None, True]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [2**64, -(2**63) - 1, 1.0, "1", True]),
        ("max_tokens", [0, -1, 1.5, True, "9"]),
        ("min_tokens", [-1, 1.5, None]),
        ("logprobs", [-1, 1025, 2.0, True]),
        ("prompt_logprobs", [-1, 1025, 2.0, True]),
        ("stop", ["", [""], [1], ["a"] * 65, 5]),
        ("stop_token_ids", [[-1], ["1"], [1.5], [True], 5]),
        ("allowed_token_ids", [[], [-1], ["1"], 5]),
        ("logit_bias", [{-1: 1.0}, {"x": 1.0}, {1: 101}, {1: math.nan}, {1: "1"}, {1: None}, [1]]),
    ],
)
def test_an_impossible_parameter_names_its_field_and_value(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert name in str(caught.value)
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        shown = [value, *parts] if isinstance(value, (list, dict)) else [value]
        assert any(repr(part) in str(caught.value) for part in shown), str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9", "max_tokens=8"]),
        ({"stop": "x", "detokenize": False}, ["stop", "detokenize=True", "stop_token_ids"]),
    ],
)
def test_parameters_that_contradict_each_other(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert all(word in str(caught.value) for word in words)


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.detokenize and params.skip_special_tokens
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert not params.greedy and SamplingParams(temperature=0).greedy


def test_what_may_be_written_in_several_ways_is_stored_in_one() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == () == SamplingParams().stop_ids
    assert SamplingParams(stop_token_ids=[1, 2]).stop_ids == (1, 2)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"7": 1.0}).logit_bias == {7: 1.0}  # type: ignore[dict-item]
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_parameters_are_frozen_and_copies_are_checked() -> None:
    params = SamplingParams(temperature=0)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert replace(params, n=2) == SamplingParams(temperature=0, n=2)
    with pytest.raises(RequestError, match="n=0"):
        replace(params, n=0)


def test_a_list_changed_after_the_call_changes_no_parameter() -> None:
    ids, bias = [1], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(2)
    bias[2] = 1.0
    assert params.stop_ids == (1,) and params.logit_bias == {1: 1.0}


# ------------------------------------------------------------------ the engine's settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "int8"}, ["dtype='int8'", "float32"]),
        ({"device": "tpu"}, ["device='tpu'", "cpu"]),
        ({"load_format": "gguf"}, ["load_format='gguf'", "safetensors"]),
        ({"block_size": 16}, ["block_size=16", "64"]),
        ({"max_model_len": 1}, ["max_model_len=1", "2"]),
        ({"max_model_len": "8k"}, ["max_model_len='8k'", "integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "1"]),
        ({"max_num_batched_tokens": 1.5}, ["max_num_batched_tokens=1.5"]),
        ({"kv_cache_memory": -1}, ["kv_cache_memory=-1"]),
        ({"kv_cache_memory": True}, ["kv_cache_memory=True"]),
        ({"seed": -1}, ["seed=-1", "0"]),
        ({"seed": None}, ["seed=None"]),
        ({"max_logprobs": -2}, ["max_logprobs=-2"]),
        ({"enable_lora": True, "max_loras": 0}, ["max_loras=0"]),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, ["max_cpu_loras=3", "4"]),
        ({"enable_lora": True, "max_lora_rank": 257}, ["max_lora_rank=257", "256"]),
        ({"speculative_config": {"method": "magic"}}, ["method='magic'", "ngram"]),
        ({"speculative_config": {"method": "ngram"}}, ["num_speculative_tokens"]),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}},
            ["num_speculative_tokens=0", "1"],
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_min": 5,
                    "prompt_lookup_max": 4,
                }
            },
            ["prompt_lookup_max=4", "5"],
        ),
    ],
)
def test_an_impossible_setting_names_field_value_and_range(
    given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(**given)
    for word in words:
        assert word in str(caught.value)


def test_the_lookup_of_ngrams_has_the_defaults_that_leave_room() -> None:
    def lookup(**given: int) -> tuple[int, int]:
        config = SpeculativeConfig.from_dict(
            {"method": "ngram", "num_speculative_tokens": 1, **given}
        )
        return config.prompt_lookup_min, config.prompt_lookup_max

    assert lookup() == (2, 4)
    assert lookup(prompt_lookup_max=1) == (1, 1)
    assert lookup(prompt_lookup_min=6) == (6, 6)
    assert lookup(prompt_lookup_min=3, prompt_lookup_max=5) == (3, 5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("auto", "auto"),
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("float", "float32"),
        ("fp16", "float16"),
    ],
)
def test_a_dtype_may_be_written_as_users_do(written: str, meant: str) -> None:
    assert parse_dtype(written) == meant


# ------------------------------------------------------------------ what users build and receive


def test_an_adapter_needs_a_name_and_a_path_but_no_number() -> None:
    assert LoRARequest("a", 1, "p") == LoRARequest("a", lora_int_id=1, lora_path="p")
    assert LoRARequest("a", "p") == LoRARequest("a", lora_path="p")  # type: ignore[arg-type]
    assert LoRARequest("a", lora_path=Path("p")).path == "p"  # type: ignore[arg-type]
    assert LoRARequest("a", lora_path="p").name == "a"
    with pytest.raises(ConfigError, match="lora_name=''"):
        LoRARequest("", lora_path="p")
    with pytest.raises(ConfigError, match="lora_path of adapter 'a' is empty"):
        LoRARequest("a")


def test_acceptance_is_a_share_and_zero_without_drafts() -> None:
    assert SpeculationStats(4, 3, 2).acceptance == 0.75
    assert SpeculationStats().acceptance == 0.0


def test_errors_are_what_python_programmers_catch() -> None:
    assert issubclass(RequestError, ValueError) and issubclass(ConfigError, ValueError)
    assert issubclass(UnknownAdapterError, AdapterError)
    assert NonFiniteError("x", [1]).outputs == [1]
    assert str(UnknownAdapterError("x", ["b", "a"])).endswith("loaded: a, b")
    assert "a: wrong\n  - b" in str(AdapterError("dir", ["a: wrong", "b"]))
