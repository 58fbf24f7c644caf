"""What a user builds or receives: SamplingParams, LoRARequest, RequestOutput.

Names and meanings follow vLLM's offline API. Two tables at the end, `LLM_OPTIONS` and
`SAMPLING_OPTIONS`, go through every field that vLLM has and say what Truegraft does with it.
Knows nothing about models, devices or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from truegraft.errors import ConfigError, RequestError, UnknownOptionError

MAX_LOGPROBS = 1024
MAX_SAMPLES = 256
MAX_STOP_STRINGS = 64

_T = TypeVar("_T")


def strict_keywords(cls: type[_T]) -> type[_T]:
    """Make a dataclass refuse unknown keywords by name, with the nearest valid one."""
    valid = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    build: Callable[..., None] = cls.__init__

    @wraps(build)
    def __init__(self: _T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in valid:
                refuse_option(cls.__name__, name, kwargs[name], valid)
        build(self, *args, **{k: v for k, v in kwargs.items() if k in valid})

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Frozen: `dataclasses.replace` makes a changed copy.

    n: samples per prompt, each with its own noise; sample i equals sample i run alone.
    temperature: 0 is greedy (argmax, ties to the lowest token id).
    top_k: keep tokens whose logit is at least the k-th largest; 0 or -1 keeps all.
    top_p: keep the likeliest tokens whose probability sums to top_p (after top_k).
    min_p: keep tokens at least min_p times as likely as the likeliest.
    presence_penalty, frequency_penalty: over output tokens; repetition_penalty: over the prompt
        and the output. Draft tokens count as output for the draft rows after them.
    seed: None takes one from the engine's seed and the request's index in its call; the result
        carries it, so that any answer can be replayed.
    stop: strings that end a request; stop_token_ids: tokens that do; ignore_eos: go on past EOS.
    max_tokens: None means up to the context length.
    logprobs: k likeliest tokens of the raw fp32 distribution (before penalties and temperature)
        with each output token; prompt_logprobs: the same for prompt tokens.
    logit_bias: token id -> value added to its logit, in [-100, 100].
    allowed_token_ids: every other token is masked.

    Raises RequestError, naming field, value and way out.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._set("stop", stop)
        self._set("stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", {_token_id(k): v for k, v in self.logit_bias.items()})
        if self.top_k == -1:
            self._set("top_k", 0)
        self._check()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_kinds(self) -> None:
        for name, kind in _CONTAINERS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise RequestError(f"{name}={value!r} must be a list or a mapping, as documented.")

    def _check(self) -> None:
        self._check_range("n", 1, MAX_SAMPLES)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("repetition_penalty", 1e-3, 1e3)
        self._check_range("temperature", 0.0, 1e4)
        self._check_range("top_p", 1e-6, 1.0)
        self._check_range("top_k", 0, 2**31 - 1)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("max_tokens", 1, 2**31 - 1)
        self._check_range("min_tokens", 0, 2**31 - 1)
        self._check_range("logprobs", 0, MAX_LOGPROBS)
        self._check_range("prompt_logprobs", 0, MAX_LOGPROBS)
        self._check_range("seed", -(2**63), 2**64 - 1)
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it."
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead.")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None and name in _NULLABLE:
            return
        kind = int if name in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            what = "an integer" if name in _INTEGERS else "a number"
            raise RequestError(f"{name}={value!r} must be {what} from {low} to {high}.")

    def _check_lists(self) -> None:
        stop = self.stop_strings
        if len(stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop={self.stop!r} must be up to 64 strings, none of them empty.")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise RequestError(f"{name} holds {token!r}; token ids are integers ≥ 0.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids=[] allows no token; name some, or pass None.")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, (int, float)) or not math.isfinite(bias) or abs(bias) > 100:
                raise RequestError(f"logit_bias[{token}]={bias!r} must be from -100 to 100.")

    @property
    def greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple that it was turned into."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as the tuple that it was turned into."""
        return tuple(self.stop_token_ids or ())


_INTEGERS = {"n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed"}
_CONTAINERS: dict[str, tuple[type, ...]] = {
    "stop": (str, list, tuple),
    "stop_token_ids": (list, tuple),
    "allowed_token_ids": (list, tuple),
    "logit_bias": (Mapping,),
}
_NULLABLE = {"max_tokens", "logprobs", "prompt_logprobs", "seed"}


def _token_id(key: object) -> int:
    """An id from a logit_bias key; JSON clients send them as strings."""
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key
    raise RequestError(f"logit_bias key {key!r} is not a token id (an integer ≥ 0).")


@strict_keywords
@dataclass(frozen=True)
class LoRARequest:
    """Which adapter answers a request.

    lora_name: the name that results carry. lora_int_id: accepted for vLLM's callers and kept, but
    not needed: an adapter's identity is its content. lora_path: a local PEFT directory.
    load_inplace: accepted; changed files are a new version in any case.

    Raises ConfigError for an empty name or path.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_int_id, int) and not self.lora_path:
            object.__setattr__(self, "lora_path", str(self.lora_int_id))
            object.__setattr__(self, "lora_int_id", 0)
        object.__setattr__(self, "lora_path", str(self.lora_path))
        if not self.lora_name or not isinstance(self.lora_name, str):
            raise ConfigError(f"lora_name={self.lora_name!r} must be a name; give one.")
        if not self.lora_path:
            raise ConfigError(f"lora_path of adapter {self.lora_name!r} is empty; give its folder.")

    @property
    def name(self) -> str:
        """vLLM's alias of `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """vLLM's alias of `lora_path`."""
        return self.lora_path


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt | list[int]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability. rank counts from 1 among all tokens of its position."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How drafts fared in one request: proposed and accepted tokens, verify steps."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verify_steps: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted over proposed, 0 where none was proposed."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of one prompt.

    token_ids include the stop token, text does not (unless include_stop_str_in_output).
    logprobs: one dict per token, token id -> Logprob; cumulative_logprob sums the chosen ones.
    seed: replays this sample together with `index`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    seed: int | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt.

    adapter_fingerprint: content hash of the adapter version that answered, None for the base.
    num_cached_tokens: prompt tokens read from the prefix cache by the first sample.
    num_preemptions, num_chunks: how often it was recomputed, in how many prefill chunks it ran.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: LoRARequest | None = None
    adapter_fingerprint: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_chunks: int = 0


class Option(NamedTuple):
    """What Truegraft does with one field of vLLM's.

    status: "supported" (works as there), "accepted" (taken, with the meaning stated) or "refused".
    neutral: values that a refused field may have, since they ask for nothing.
    """

    status: Literal["supported", "accepted", "refused"]
    meaning: str
    neutral: tuple[Any, ...] = (None, False)


def refuse_option(owner: str, name: str, value: object, valid: Iterable[str]) -> None:
    """Raise for a keyword that `owner` does not take, unless its value asks for nothing.

    Raises UnknownOptionError (nearest valid name) or ConfigError (refused, with the way out).
    """
    table = {"SamplingParams": SAMPLING_OPTIONS, "LLM": LLM_OPTIONS}.get(owner, {})
    known = table.get(name)
    if known is None:
        raise UnknownOptionError(owner, name, {*valid, *table})
    if known.status == "refused" and not any(_same(value, n) for n in known.neutral):
        raise ConfigError(f"{owner}({name}={value!r}) is refused: {known.meaning}")


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


_EXACT = "the exact path is the only one"
_LATER = "not in this version"

LLM_OPTIONS: dict[str, Option] = {
    "model": Option("supported", "a local Hugging Face directory"),
    "tokenizer": Option("supported", "a directory with tokenizer.json; default: the model's"),
    "dtype": Option("supported", "auto, bfloat16, float16, float32"),
    "device": Option("supported", "auto, cpu"),
    "max_model_len": Option("supported", "context length in tokens, prompt and output together"),
    "max_num_seqs": Option("supported", "requests that run in one step"),
    "max_num_batched_tokens": Option("supported", "token rows of one step"),
    "block_size": Option("supported", "tokens of a KV block; 64, since attention tiles are fixed"),
    "kv_cache_memory": Option("supported", "bytes of KV cache"),
    "kv_cache_memory_bytes": Option("supported", "vLLM's name for kv_cache_memory"),
    "enable_prefix_caching": Option("supported", "share KV blocks of equal prefixes"),
    "enable_lora": Option("supported", "make room for adapters"),
    "max_loras": Option("supported", "adapter versions on the device at once"),
    "max_cpu_loras": Option("supported", "adapter versions held in host memory"),
    "max_lora_rank": Option("accepted", "a limit: adapters of a higher rank are refused"),
    "speculative_config": Option("supported", '{"method": "ngram", "num_speculative_tokens": k}'),
    "load_format": Option("supported", "auto or safetensors: read; dummy: random weights"),
    "seed": Option("supported", "seeds requests that bring none"),
    "chat_template": Option("supported", "jinja2 text or file; default: the model's"),
    "gpu_memory_utilization": Option("accepted", "share of GPU memory; no meaning on the CPU"),
    "enforce_eager": Option("accepted", "run without CUDA graphs; the tokens are the same"),
    "max_logprobs": Option("accepted", "a limit on logprobs and prompt_logprobs"),
    "disable_log_stats": Option("accepted", "no statistics are logged"),
    "enable_chunked_prefill": Option("accepted", "always on; changes no token"),
    "async_scheduling": Option("accepted", "chosen by the device; changes no token"),
    "swap_space": Option("accepted", "ignored: preemption recomputes, nothing is swapped"),
    "max_seq_len_to_capture": Option("accepted", "ignored: graphs do not depend on length"),
    "disable_custom_all_reduce": Option("accepted", "ignored: no reduction crosses a device"),
    "disable_cascade_attn": Option("accepted", "ignored: there is one attention"),
    "specialize_active_lora": Option("accepted", "ignored: no graph depends on the adapters"),
    "served_model_name": Option("accepted", "the server's name for the base model"),
    "tokenizer_mode": Option(
        "refused", "only tokenizer.json is read; leave it at 'auto'.", ("auto", "hf", None)
    ),
    "skip_tokenizer_init": Option(
        "refused", "pass token ids and SamplingParams(detokenize=False) instead."
    ),
    "trust_remote_code": Option(
        "refused", "no code from a model directory is ever run; use a supported architecture."
    ),
    "tensor_parallel_size": Option(
        "refused", "one device for now; leave it at 1 and run one engine per GPU.", (1, None)
    ),
    "pipeline_parallel_size": Option("refused", "one device for now; leave it at 1.", (1, None)),
    "data_parallel_size": Option("refused", "run one engine per device.", (1, None)),
    "enable_expert_parallel": Option("refused", "mixture-of-experts models are not supported."),
    "distributed_executor_backend": Option("refused", "one process; leave it out."),
    "quantization": Option("refused", "weights are bfloat16, float16 or float32; dequantise first"),
    "kv_cache_dtype": Option(
        "refused", "the KV cache has the model's dtype; leave it at 'auto'.", ("auto", None)
    ),
    "calculate_kv_scales": Option("refused", "the KV cache is not quantised."),
    "revision": Option("refused", "models are local directories; download the revision first."),
    "code_revision": Option("refused", "no code from a model directory is ever run."),
    "tokenizer_revision": Option("refused", "tokenizers are local; download the revision first."),
    "download_dir": Option("refused", "models are local directories; pass the path as model."),
    "hf_token": Option("refused", "no network is used; download the model first."),
    "hf_overrides": Option("refused", "edit config.json, so that what runs is what is written."),
    "rope_scaling": Option("refused", "edit config.json, so that what runs is what is written."),
    "rope_theta": Option("refused", "edit config.json, so that what runs is what is written."),
    "config_format": Option("refused", "config.json is read.", ("auto", "hf", None)),
    "generation_config": Option(
        "refused", "generation_config.json of the model is read.", ("auto", None)
    ),
    "override_generation_config": Option("refused", "pass SamplingParams instead."),
    "cpu_offload_gb": Option("refused", "weights stay on one device; leave it at 0.", (0, 0.0)),
    "num_gpu_blocks_override": Option("refused", "set kv_cache_memory in bytes."),
    "lora_dtype": Option(
        "refused", "adapters take the model's dtype; leave it at 'auto'.", ("auto", None)
    ),
    "fully_sharded_loras": Option("refused", "one device for now."),
    "lora_extra_vocab_size": Option("refused", "added tokens are not supported.", (0, None)),
    "default_mm_loras": Option("refused", "text models only."),
    "logits_processors": Option("refused", "use logit_bias or allowed_token_ids.", (None,)),
    "logits_processor_pattern": Option("refused", "use logit_bias or allowed_token_ids."),
    "logprobs_mode": Option(
        "refused", "logprobs are of the raw distribution.", ("raw_logprobs", None)
    ),
    "scheduling_policy": Option("refused", "requests are served in order.", ("fcfs", None)),
    "scheduler_cls": Option("refused", "there is one scheduler."),
    "compilation_config": Option("refused", f"torch.compile chooses by shape; {_EXACT}.", (None,)),
    "attention_config": Option("refused", f"there is one attention; {_EXACT}."),
    "attention_backend": Option("refused", f"there is one attention; {_EXACT}."),
    "structured_outputs_config": Option("refused", f"structured output is {_LATER}."),
    "profiler_config": Option("refused", "use an external profiler."),
    "runner": Option("refused", "text generation only.", ("auto", "generate", None)),
    "convert": Option("refused", "text generation only.", ("auto", "none", None)),
    "task": Option("refused", "text generation only.", ("auto", "generate", None)),
    "pooler_config": Option("refused", "text generation only."),
    "override_pooler_config": Option("refused", "text generation only."),
    "disable_async_output_proc": Option("accepted", "ignored: changes no token"),
    "mm_processor_kwargs": Option("refused", "text models only."),
    "limit_mm_per_prompt": Option("refused", "text models only."),
    "allowed_local_media_path": Option("refused", "text models only.", ("", None)),
    "allowed_media_domains": Option("refused", "text models only."),
    "disable_sliding_window": Option("refused", "the model's own attention window is used."),
    "enable_return_routed_experts": Option("refused", "text models without experts only."),
    "kv_transfer_config": Option("refused", "the KV cache stays in one engine."),
    "model_loader_extra_config": Option("refused", "safetensors need no extra settings."),
    "ignore_patterns": Option("refused", "only *.safetensors are read; leave it out."),
    "prefix_caching_hash_algo": Option("refused", "cache keys are exact tuples, not hashes."),
}

SAMPLING_OPTIONS: dict[str, Option] = {
    **{f.name: Option("supported", "as in vLLM") for f in fields(SamplingParams)},
    "best_of": Option("refused", "ask for n samples and choose among them.", (None, 1)),
    "use_beam_search": Option("refused", "beam search is not supported; use n samples."),
    "length_penalty": Option("refused", "beam search is not supported.", (1.0, None)),
    "early_stopping": Option("refused", "beam search is not supported."),
    "bad_words": Option("refused", "use logit_bias of -100 on single tokens.", (None, [])),
    "flat_logprobs": Option("refused", "logprobs come as one dict per token."),
    "truncate_prompt_tokens": Option("refused", "cut the prompt's token ids before the call."),
    "spaces_between_special_tokens": Option("refused", "no spaces are added.", (True, False)),
    "output_kind": Option("refused", "results are cumulative.", (None, 0)),
    "structured_outputs": Option("refused", f"structured output is {_LATER}."),
    "guided_decoding": Option("refused", f"structured output is {_LATER}."),
    "logits_processors": Option("refused", "use logit_bias or allowed_token_ids.", (None, [])),
    "extra_args": Option("refused", "there are no extra arguments.", (None, {})),
    "skip_clone": Option("accepted", "parameters are frozen, so nothing is cloned"),
    "skip_reading_prefix_cache": Option("refused", "a hit never changes a token."),
    "logprob_token_ids": Option("refused", "ask for logprobs=k and read the ids you need."),
    "prompt_logprob_token_ids": Option("refused", "ask for prompt_logprobs=k and read the ids."),
    "prompt_logprob_start": Option("refused", "all prompt logprobs are given.", (None, 0)),
    "stream_interval": Option("refused", "every step is reported.", (None, 1)),
    "routed_experts_prompt_start": Option("refused", "there are no experts.", (0, None)),
    "trace_decode_token_ids": Option("refused", "score given tokens with prompt_logprobs."),
    "thinking_token_budget": Option("refused", f"reasoning budgets are {_LATER}."),
    "repetition_detection": Option("refused", f"repetition detection is {_LATER}."),
}
