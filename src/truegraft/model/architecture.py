"""What a base model is, read from config.json and generation_config.json.

Llama, Mistral, Qwen2 and Qwen3 (dense), in the spelling of transformers 4 and 5. A field that would
change the numbers and is not implemented is refused by name; a field that cannot is ignored.
Knows nothing about weights; `checkpoint` reads those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from truegraft.config import DTYPES, DType
from truegraft.errors import ModelError
from truegraft.model.rope import RopeSpec


@dataclass(frozen=True)
class TargetShape:
    """A module that may carry LoRA. An embedding has in_features = vocabulary."""

    in_features: int
    out_features: int
    kind: Literal["linear", "embedding"]


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape and arithmetic.

    sliding_windows: per layer, how many positions a token sees, itself included; None for all.
    max_position_embeddings: tokens of context; for yarn at least original length times factor.
    dtype: the checkpoint's. sampling_defaults: what generation_config.json asks for.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: DType
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict, hash=False)

    @classmethod
    def from_directory(cls, path: Path) -> Architecture:
        """Read `path`/config.json and, if there, generation_config.json.

        Raises ModelError for a directory that is missing, broken or not supported.
        """
        path = Path(path)
        _check_directory(path)
        config = _Fields(path / "config.json", _read_json(path / "config.json"))
        generation_file = path / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        return _build(config, _Fields(generation_file, generation))

    def target_modules(self) -> dict[str, TargetShape]:
        """Every module that may carry LoRA, by its Hugging Face path, in the order of execution."""
        hidden, vocabulary = self.hidden_size, self.vocab_size
        modules = {"model.embed_tokens": TargetShape(vocabulary, hidden, "embedding")}
        for layer in range(self.num_layers):
            for name, (n, k) in self._linears().items():
                modules[f"model.layers.{layer}.{name}"] = TargetShape(k, n, "linear")
        modules["lm_head"] = TargetShape(hidden, vocabulary, "linear")
        return modules

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint with its shape; a tied lm_head.weight is not one."""
        hidden, vocabulary = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for layer in range(self.num_layers):
            for name, shape in self._layer_parameters():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocabulary, hidden)
        return shapes

    def _linears(self) -> dict[str, tuple[int, int]]:
        """The linears of one layer: name -> (out_features, in_features)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def _has_bias(self, linear: str) -> bool:
        if linear.startswith("mlp."):
            return self.mlp_bias
        return self.output_bias if linear.endswith("o_proj") else self.qkv_bias

    def _layer_parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "input_layernorm.weight", (self.hidden_size,)
        for name, (n, k) in self._linears().items():
            yield f"{name}.weight", (n, k)
            if self._has_bias(name):
                yield f"{name}.bias", (n,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "post_attention_layernorm.weight", (self.hidden_size,)


class _Family(NamedTuple):
    """What transformers takes for fields that a config.json leaves out, and what is fixed."""

    architecture: str
    num_kv_heads: int | None = None  # None: as many as num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    eos: int | None = None
    bos: int | None = None


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", eos=2, bos=1),
    "mistral": _Family("MistralForCausalLM", num_kv_heads=8, eos=2, bos=1),
    "qwen2": _Family("Qwen2ForCausalLM", num_kv_heads=32),
    "qwen3": _Family("Qwen3ForCausalLM", num_kv_heads=32, head_dim=128),
}

# Fields that change the numbers and are not implemented: the values that ask for nothing.
_OFF = (None, False)
_ONE = (None, 1)
_NONE = (None, 0)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "pretraining_tp": _ONE,
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "is_causal": (None, True),
    "use_bidirectional_attention": _OFF,
    "vision_config": _OFF,
    "audio_config": _OFF,
    "text_config": _OFF,
    "num_experts": _NONE,
    "num_local_experts": _NONE,
    "n_routed_experts": _NONE,
    "logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "attn_logit_softcapping": _OFF,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "attention_multiplier": _OFF,
    "query_pre_attn_scalar": _OFF,
    "partial_rotary_factor": _ONE,
    "rotary_pct": _ONE,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": _NONE,
    "alibi": _OFF,
    "clip_qkv": _OFF,
    "attention_chunk_size": _NONE,
    "attn_temperature_tuning": _NONE,
    "dual_chunk_attention_config": _OFF,
    "bias": _OFF,
    "lm_head_bias": _OFF,
}

_ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
_ROPE_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "truncate"),
    *_ROPE_OPTIONS,
}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
_REQUIRED = object()


class _Fields:
    """Typed access to one JSON object; every complaint names file, field and value."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self.prefix = file, values, prefix

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ModelError about one field."""
        shown = json.dumps(self.values.get(name), default=str)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        raise ModelError(f"{self.file}: {self.prefix}{name}={shown} {why}")

    def get(self, name: str, default: object = None) -> Any:
        """The raw value; a missing one is refused where the default is _REQUIRED."""
        if name not in self.values and default is _REQUIRED:
            raise ModelError(f"{self.file} has no {self.prefix}{name}; the model cannot be read.")
        return self.values.get(name, default)

    def integer(self, name: str, default: object = _REQUIRED) -> int:
        """An integer ≥ 1."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, "must be an integer ≥ 1.")
        return value

    def number(self, name: str, default: object = _REQUIRED) -> float:
        """A number > 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.refuse(name, "must be a finite number > 0.")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false; null counts as the default."""
        value = self.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false.")
        return value


def _check_directory(path: Path) -> None:
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(
                f"{path} has no config.json; it is not a Hugging Face model directory."
            )
        return
    if path.exists():
        raise ModelError(f"{path} is a file; give the Hugging Face directory that holds the model.")
    hub_id = not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in (".", "..")
    hint = (
        f" It looks like a hub id; download it first (hf download {path} --local-dir DIR) and give"
        " the directory."
        if hub_id
        else " Give a local Hugging Face directory."
    )
    raise ModelError(f"model path {str(path)!r} does not exist.{hint}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(values).__name__}.")
    return values


def _build(config: _Fields, generation: _Fields) -> Architecture:
    model_type = _model_type(config)
    _check_supported(config, model_type)
    family = _FAMILIES[model_type]
    num_heads, num_kv_heads, head_dim = _heads(config, family)
    attention_bias = config.boolean("attention_bias")
    rope = _rope(config)
    vocab_size = config.integer("vocab_size")
    return Architecture(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_context(config, rope),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=model_type != "qwen2" and attention_bias,
        mlp_bias=config.boolean("mlp_bias"),
        qk_norm=model_type == "qwen3",
        sliding_windows=_sliding_windows(config, model_type),
        dtype=_dtype(config),
        eos_token_ids=_eos(config, generation, vocab_size, family.eos),
        bos_token_id=_bos(config, generation, family.bos),
        sampling_defaults=_sampling_defaults(generation),
    )


def _model_type(config: _Fields) -> str:
    by_name = {family.architecture: name for name, family in _FAMILIES.items()}
    supported = ", ".join(by_name)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) > 1:
        config.refuse("architectures", f"must name one class; supported: {supported}.")
    model_type = config.get("model_type")
    if not architectures:
        if model_type not in _FAMILIES:
            config.refuse("model_type", f"is not supported; supported: {', '.join(_FAMILIES)}.")
        return str(model_type)
    if architectures[0] not in by_name:
        config.refuse("architectures", f"is not supported; supported: {supported}.")
    name = by_name[architectures[0]]
    if model_type not in (None, name):
        config.refuse("model_type", f"contradicts architectures={architectures}.")
    return name


def _check_supported(config: _Fields, model_type: str) -> None:
    """Refuse what would change the numbers and is not implemented."""
    for name in ("quantization_config", "compression_config"):
        if settings := config.get(name):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            raise ModelError(
                f"{config.file}: {name} says the weights are quantised ({method or 'unnamed'}); "
                "use a bfloat16, float16 or float32 checkpoint."
            )
    neutral = dict(_NEUTRAL)
    if model_type == "mistral":
        neutral["attention_bias"] = _OFF
    if model_type != "llama":
        neutral["mlp_bias"] = _OFF
    if model_type != "qwen3":
        neutral |= {"use_qk_norm": _OFF, "qk_layernorm": _OFF}
    for name, values in neutral.items():
        if config.get(name) not in values:
            only = json.dumps(values[-1] if values[0] is None else values[0])
            config.refuse(name, f"is not implemented for {model_type}; only {only} is.")


def _heads(config: _Fields, family: _Family) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; a null means what a missing one does in Llama."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = num_heads
    if config.get("num_key_value_heads", family.num_kv_heads) is not None:
        num_kv_heads = config.integer("num_key_value_heads", family.num_kv_heads)
    if num_heads % num_kv_heads:
        config.refuse("num_attention_heads", f"is no multiple of {num_kv_heads} key-value heads.")
    if config.get("head_dim", family.head_dim) is not None:
        head_dim = config.integer("head_dim", family.head_dim)
    else:
        head_dim, rest = divmod(config.integer("hidden_size"), num_heads)
        if rest:
            config.refuse("hidden_size", f"is no multiple of {num_heads} heads; set head_dim.")
    if head_dim % 2:
        raise ModelError(f"{config.file}: head_dim={head_dim} is odd; RoPE turns pairs.")
    return num_heads, num_kv_heads, head_dim


def _rope(config: _Fields) -> RopeSpec:
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(source) or {}
    if not isinstance(given, dict):
        config.refuse(source, "must be an object.")
    rope = _Fields(config.file, {k: v for k, v in given.items() if v is not None}, source + ".")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        name = "rope_type" if "rope_type" in rope.values else "type"
        rope.refuse(name, f"is not supported; supported: {', '.join(_ROPE_KINDS)}.")
    for name in sorted(rope.values.keys() - _ROPE_KEYS):
        rope.refuse(name, "is not implemented.")
    if rope.get("partial_rotary_factor", 1) != 1:
        rope.refuse("partial_rotary_factor", "is not implemented; only 1 is.")
    holder = rope if "rope_theta" in rope.values else config
    theta = holder.number("rope_theta", 10000.0)
    if theta <= 1:
        holder.refuse("rope_theta", "must exceed 1.")
    return RopeSpec(kind=kind, theta=theta, **_rope_band(config, rope, kind))


def _rope_band(config: _Fields, rope: _Fields, kind: str) -> dict[str, Any]:
    """The fields of RopeSpec that stretch the context."""
    if kind == "default":
        return {}
    band: dict[str, Any] = {name: rope.number(name) for name in _ROPE_KINDS[kind]}
    if kind == "linear":
        return band
    original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    # NOTE: a value outside rope_parameters wins over one inside, as in transformers.
    outer = config.get("original_max_position_embeddings")
    band["original_max_position_embeddings"] = original = outer or original
    if not isinstance(original, int) or original < 1:
        rope.refuse("original_max_position_embeddings", "must be an integer ≥ 1.")
    if kind == "llama3":
        if band["high_freq_factor"] <= band["low_freq_factor"]:
            rope.refuse("high_freq_factor", "must exceed low_freq_factor.")
        return band
    band["factor"] = rope.number("factor", config.integer("max_position_embeddings") / original)
    band["truncate"] = rope.boolean("truncate", True)
    return band | {name: rope.number(name) for name in _ROPE_OPTIONS if name in rope.values}


def _context(config: _Fields, rope: RopeSpec) -> int:
    written = config.integer("max_position_embeddings")
    if rope.kind != "yarn":
        return written
    return max(written, int(rope.original_max_position_embeddings * rope.factor))


def _sliding_windows(config: _Fields, model_type: str) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    if model_type == "llama":
        if config.get("sliding_window") is not None:
            config.refuse("sliding_window", "has no meaning for Llama; set it to null.")
        return _no_layer_types(config, (None,) * num_layers)
    window = config.get("sliding_window", 4096)
    if model_type != "mistral" and not config.boolean("use_sliding_window"):
        window = None
    if window is not None:
        window = config.integer("sliding_window", 4096)
    if model_type == "mistral":
        return _no_layer_types(config, (window,) * num_layers)
    return _windows_by_layer(config, window, num_layers)


def _no_layer_types(config: _Fields, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """`windows`, unless layer_types asks for something else."""
    wanted = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if config.get("layer_types") not in (None, wanted):
        config.refuse("layer_types", "is not implemented for this architecture; leave it out.")
    return windows


def _windows_by_layer(
    config: _Fields, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """Qwen's rule: layer_types, or else the layers from max_window_layers on."""
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            config.refuse("max_window_layers", "must be an integer.")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        config.refuse("layer_types", f"must give each of {num_layers} layers one of {known}.")
    if window is None and "sliding_attention" in kinds:
        config.refuse("layer_types", "has sliding_attention, but there is no sliding_window.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(config: _Fields) -> DType:
    """The checkpoint's dtype; float32 where none is written, as in transformers."""
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(name) or "float32"
    for dtype in DTYPES:
        if str(value).removeprefix("torch.") == dtype:
            return dtype
    config.refuse(name, f"is not supported; supported: {', '.join(DTYPES)}.")


def _eos(
    config: _Fields, generation: _Fields, vocab_size: int, default: int | None
) -> tuple[int, ...]:
    """generation_config.json's ids, or else config.json's, as far as the vocabulary has them."""
    source = generation if generation.get("eos_token_id") is not None else config
    value = source.get("eos_token_id", default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        source.refuse("eos_token_id", "must be a token id or a list of them.")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _bos(config: _Fields, generation: _Fields, default: int | None) -> int | None:
    source = generation if generation.get("bos_token_id") is not None else config
    value = source.get("bos_token_id", default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        source.refuse("bos_token_id", "must be a token id or null.")
    return value


def _sampling_defaults(generation: _Fields) -> Mapping[str, float | int]:
    """What a request takes where it says nothing.

    temperature, top_p, top_k and min_p count only with do_sample=true: without it they are unused
    left-overs. repetition_penalty changes greedy decoding too, so it always counts.
    """
    names = ["repetition_penalty"]
    if generation.boolean("do_sample"):
        names += _SAMPLING_FIELDS
    given = {name: generation.get(name) for name in names}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            generation.refuse(name, "must be a number.")
    return {name: value for name, value in given.items() if value is not None}
