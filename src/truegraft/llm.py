"""LLM: the offline facade. Same names, parameters and results as vLLM's.

It has an Engine and waits for it; what each keyword does is in `api.LLM_OPTIONS`.
"""

from __future__ import annotations

import inspect
import itertools
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from truegraft.adapters.store import AdapterVersion
from truegraft.api import (
    MAX_LOGPROBS,
    LoRARequest,
    Prompt,
    RequestOutput,
    SamplingParams,
    refuse_option,
)
from truegraft.config import (
    BLOCK_SIZE,
    MAX_LORA_RANK,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    check_int,
    parse_dtype,
)
from truegraft.engine import Engine
from truegraft.errors import ConfigError, NonFiniteError, RequestError
from truegraft.generation import Generation, PromptTokens
from truegraft.text import Messages, Tokenizer


class LLM:
    """A base model and its adapters, ready to generate.

    model: a local Hugging Face directory. dtype: "auto" is the checkpoint's. max_model_len: tokens
    of prompt and answer together. kv_cache_memory: bytes. max_loras: adapter versions on the
    device, max_cpu_loras: in host memory. speculative_config: see `config.SpeculativeConfig`.
    seed: gives requests without a seed theirs. Use it as a context manager, or call `close`.

    Raises ConfigError (UnknownOptionError with the nearest name, OutOfMemoryError), ModelError,
    TokenizerError, ExactnessError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = BLOCK_SIZE,
        kv_cache_memory: int | None = None,
        enable_prefix_caching: bool = True,
        enable_lora: bool = False,
        max_loras: int = 8,
        max_cpu_loras: int | None = None,
        max_lora_rank: int = MAX_LORA_RANK,
        speculative_config: Mapping[str, Any] | None = None,
        load_format: str = "auto",
        chat_template: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        values = {name: value for name, value in locals().items() if name not in ("self", "model")}
        self._engine: Engine | None = None
        self._engine = Engine(_engine_config(Path(model), values))
        self._counter = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine. Raises ConfigError after `close`."""
        if self._engine is None:
            raise ConfigError("this LLM is closed; make a new one.")
        return self._engine

    # ------------------------------------------------------------------ generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt; one result per prompt, in order.

        prompts: texts, {"prompt": …}, {"prompt_token_ids": […]} or lists of ids, one or many.
        sampling_params, lora_request: one for all, or one for each. use_tqdm: show progress on a
        terminal. Everything is checked before anything runs.

        Raises RequestError, AdapterError; NonFiniteError with `outputs`, after all others ended.
        """
        prompt_list = _as_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params, len(prompt_list))
        loras = _per_prompt("lora_request", lora_request, len(prompt_list))
        _check_kinds("sampling_params", SamplingParams, params)
        _check_kinds("lora_request", LoRARequest, loras)
        tokens = [self._tokens(p, lora) for p, lora in zip(prompt_list, loras, strict=True)]
        default = self.get_default_sampling_params()
        return self._run(tokens, [p or default for p in params], use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template.

        Raises as `generate`, and TokenizerError where the model has no template.
        """
        conversations: list[Any] = [messages] if _is_conversation(messages) else [*messages]
        encode = self.get_tokenizer().encode_chat
        prompts: list[Prompt] = [
            encode(conversation, add_generation_prompt=add_generation_prompt, tools=tools)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, lora_request, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json asks for, over vLLM's defaults."""
        defaults: dict[str, Any] = dict(self.engine.arch.sampling_defaults)
        return SamplingParams(**defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def _tokens(self, prompt: Prompt, lora: LoRARequest | None) -> PromptTokens:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(given, str):
            return PromptTokens(self.get_tokenizer().encode(given), given, lora)
        if isinstance(given, (list, tuple)):
            return PromptTokens(list(given), None, lora)
        raise RequestError(
            f"prompt {prompt!r} is not text, token ids, "
            '{"prompt": text} or {"prompt_token_ids": ids}.'
        )

    def _run(
        self, prompts: Sequence[PromptTokens], params: Sequence[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        """Add every request, step until all have ended; whatever happens, leave none behind."""
        engine = self.engine
        adapters = [self._adapter(p.lora_request) for p in prompts]
        generations: list[Generation] = []
        try:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                seed = mix_seed(engine.config.model.seed, index)
                request_id = str(next(self._counter))
                generations.append(engine.add(request_id, prompt, param, adapters[index], seed))
            with _progress(len(prompts), progress) as advance:
                while engine.has_work:
                    with _uninterrupted():
                        changed = engine.step()
                    advance(sum(g.finished for g in changed))
        finally:
            for generation in generations:
                engine.abort(generation.request_id)
        outputs = [generation.output() for generation in generations]
        _raise_failures(generations, outputs)
        return outputs

    def _adapter(self, request: LoRARequest | None) -> AdapterVersion | None:
        return None if request is None else self.engine.load_adapter(request).result()

    # ------------------------------------------------------------------ adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into host memory. Raises AdapterError with every reason."""
        self.engine.load_adapter(lora_request).result()
        return True

    def remove_lora(self, lora_name: str) -> bool:
        """Unload an adapter by name. Raises UnknownAdapterError."""
        self.engine.remove_adapter(lora_name)
        return True

    def list_loras(self) -> dict[str, str]:
        """Name → content fingerprint of every loaded adapter."""
        return {} if self.engine.adapters is None else self.engine.adapters.names()

    def pin_lora(self, lora_name: str) -> bool:
        """Keep an adapter on the device for good. Raises UnknownAdapterError, ConfigError."""
        self.engine.pin_adapter(lora_name)
        return True

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Free everything. Closing twice does nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def mix_seed(seed: int, index: int) -> int:
    """The seed of request `index` of a call: 64 bits, splitmix64 (Steele et al., 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def _engine_config(model: Path, values: Mapping[str, Any]) -> EngineConfig:
    """Check keywords one by one and compose them. Raises ConfigError naming the field."""
    options = dict(values["options"])
    memory = values["kv_cache_memory"]
    if "kv_cache_memory_bytes" in options:
        memory = options.pop("kv_cache_memory_bytes")
    max_logprobs = options.pop("max_logprobs", MAX_LOGPROBS)
    known = inspect.signature(LLM.__init__).parameters.keys() - {"self", "options"}
    for name, value in options.items():
        refuse_option("LLM", name, value, known)
    if values["block_size"] != BLOCK_SIZE:
        raise ConfigError(f"block_size={values['block_size']!r} must be 64; leave it out.")
    if values["load_format"] not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"load_format={values['load_format']!r} must be auto, safetensors or dummy."
        )
    if values["device"] not in ("auto", "cpu"):
        raise ConfigError(f"device={values['device']!r} is not supported yet; use 'cpu'.")
    max_len = values["max_model_len"]
    return EngineConfig(
        model=ModelConfig(
            path=model,
            tokenizer=Path(values["tokenizer"] or model),
            dtype=parse_dtype(values["dtype"]),
            max_model_len=None if max_len is None else check_int("max_model_len", max_len, 2),
            load_format=values["load_format"],
            chat_template=values["chat_template"],
            max_logprobs=check_int("max_logprobs", max_logprobs, 0, MAX_LOGPROBS),
            seed=check_int("seed", values["seed"], 0, 2**64 - 1),
        ),
        cache=CacheConfig(
            memory=None if memory is None else check_int("kv_cache_memory", memory, 1, 2**62),
            enable_prefix_caching=bool(values["enable_prefix_caching"]),
        ),
        scheduler=SchedulerConfig(
            check_int("max_num_seqs", values["max_num_seqs"], 1, 4096),
            check_int("max_num_batched_tokens", values["max_num_batched_tokens"], 1, 2**20),
        ),
        lora=_lora_config(values) if values["enable_lora"] else None,
        speculative=SpeculativeConfig.from_dict(values["speculative_config"])
        if values["speculative_config"]
        else None,
        device=DeviceConfig(),
    )


def _lora_config(values: Mapping[str, Any]) -> LoRAConfig:
    max_loras = check_int("max_loras", values["max_loras"], 1, 1024)
    host = values["max_cpu_loras"]
    return LoRAConfig(
        max_loras=max_loras,
        max_cpu_loras=check_int("max_cpu_loras", host, max_loras, 2**20)
        if host is not None
        else max(64, max_loras),
        max_lora_rank=check_int("max_lora_rank", values["max_lora_rank"], 1, MAX_LORA_RANK),
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many → many. A list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts={prompts!r} is neither a prompt nor a list of them.")
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _is_conversation(messages: Any) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt. Raises RequestError where a list has another length."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts; give one each.")
    return list(value)


def _check_kinds(name: str, kind: type, values: Sequence[Any]) -> None:
    for value in values:
        if value is not None and not isinstance(value, kind):
            raise RequestError(f"{name}={value!r} must be a {kind.__name__}; build one.")


def _raise_failures(generations: Sequence[Generation], outputs: list[RequestOutput]) -> None:
    failed = [generation for generation in generations if generation.error is not None]
    if failed:
        ids = ", ".join(generation.request_id for generation in failed)
        raise NonFiniteError(
            f"{len(failed)} of {len(generations)} requests failed ({ids}): {failed[0].error} "
            "The others are in this error's `outputs`.",
            outputs,
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the block ends: a step is done whole or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Any]:
    """A progress bar on a terminal; yields a function that advances it."""
    if not wanted or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda count: bar.advance(task, count)
