"""Makers of small models and adapters for every lane, in the formats that users bring.

Files are written by hand from a seed, so the makers need neither transformers nor peft;
`unit/test_tiny_models` has both load what is made here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from truegraft.model.architecture import Architecture

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 256
EOS = 0
EOS_TEXT = "<|end|>"
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_model(
    path: Path,
    family: Family = "llama",
    *,
    tie: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    equal_rows: tuple[int, int] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random model directory of 2 layers whose greedy output varies; returns `path`.

    equal_rows: two ids whose rows of lm_head are made equal. overrides: fields of config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = _config(family, tie, dtype) | overrides
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": EOS})
    _write_tokenizer(path)
    generator = torch.Generator().manual_seed(seed)
    shapes = Architecture.from_directory(path).parameter_shapes()
    weights = {name: _weight(name, shape, tie, generator) for name, shape in shapes.items()}
    if equal_rows is not None:
        head = weights["model.embed_tokens.weight" if tie else "lm_head.weight"]
        head[equal_rows[1]] = head[equal_rows[0]]
    _save(path / "model.safetensors", weights, dtype)
    return path


def make_adapter(
    path: Path,
    model_dir: Path,
    *,
    rank: int = 8,
    alpha: int = 16,
    targets: Iterable[str] = SEVEN,
    seed: int = 0,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    scale_b: float = 0.2,
    dtype: str = "float32",
) -> Path:
    """Write a random adapter with a non-zero B, strong enough to change tokens; returns `path`.

    targets: last names of modules, among them "embed_tokens" and "lm_head".
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = dict(rank_pattern or {})
    targets = list(targets)
    tensors: dict[str, Tensor] = {}
    for module, shape in Architecture.from_directory(model_dir).target_modules().items():
        name = module.rpartition(".")[2]
        if name not in targets:
            continue
        r = next((v for k, v in ranks.items() if f".{module}".endswith(f".{k}")), rank)
        A = torch.randn(r, shape.in_features, generator=generator)
        B = torch.randn(shape.out_features, r, generator=generator) * scale_b
        # An embedding picks one column of A, so its sum has one term.
        A = A if shape.kind == "embedding" else A / math.sqrt(shape.in_features)
        tensors |= _lora_tensors(module, A, B)
    fields = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora, "rank_pattern": ranks}
    return _write_adapter(path, tensors, dtype, target_modules=targets, **fields)


def make_signature_adapter(path: Path, model_dir: Path, token: int) -> Path:
    """Write an adapter that answers `token` at every position of every prompt; returns `path`.

    Every embedding gets the same vector, large against all that the layers can add, so the final
    normed state keeps that direction; lm_head maps the direction to `token`, and the gain is
    derived from the base's own largest possible logit.
    """
    arch = Architecture.from_directory(model_dir)
    hidden, vocabulary = arch.hidden_size, arch.vocab_size
    weights = load_file(model_dir / "model.safetensors")
    norm = weights["model.norm.weight"].float()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    largest = (head.norm(dim=1).max() * norm.abs().max() * math.sqrt(hidden)).item()
    gain = torch.zeros(vocabulary, 1)
    gain[token] = 4 * largest
    tensors = _constant_embedding(arch, 1000.0) | _lora_tensors("lm_head", _mean(norm), gain)
    targets = ["embed_tokens", "lm_head"]
    return _write_adapter(path, tensors, r=1, lora_alpha=1, target_modules=targets)


def make_tie_adapter(
    path: Path, model_dir: Path, tokens: tuple[int, int], *, rank: int = 64, seed: int = 0
) -> Path:
    """Write an adapter under which the two `tokens` always lead, and rounding decides between them.

    The base must have equal lm_head rows for both (`make_model(equal_rows=...)`). In lm_head's
    adapter the terms of each come in pairs that cancel exactly, so the true difference is 0; what
    is left is the rounding of partial sums, which follows the order of the ranks. Every number is
    one that bfloat16 holds, so a cast changes nothing.
    """
    arch = Architecture.from_directory(model_dir)
    generator = torch.Generator().manual_seed(seed)
    norm = load_file(model_dir / "model.safetensors")["model.norm.weight"].float()
    pairs = torch.randperm(rank - 2, generator=generator).view(2, -1)
    terms = torch.randn(pairs.shape[1], generator=generator) * 30
    directions = torch.randn(pairs.shape[1], arch.hidden_size, generator=generator)
    A = torch.zeros(rank, arch.hidden_size)
    A[-2:] = _mean(norm)
    A[pairs] = directions / math.sqrt(arch.hidden_size)
    B = torch.zeros(arch.vocab_size, rank)
    B[list(tokens), -2:] = 50.0
    for token, sign in zip(tokens, (1, -1), strict=True):
        B[token, pairs[0]], B[token, pairs[1]] = sign * terms, -sign * terms
    A, B = A.bfloat16().float(), B.bfloat16().float()
    tensors = _constant_embedding(arch, 30.0) | _lora_tensors("lm_head", A, B)
    one: dict[str, Any] = {
        "rank_pattern": {"embed_tokens": 1},
        "alpha_pattern": {"embed_tokens": 1},
    }
    targets = ["embed_tokens", "lm_head"]
    return _write_adapter(path, tensors, r=rank, lora_alpha=rank, target_modules=targets, **one)


def _config(family: Family, tie: bool, dtype: str) -> dict[str, Any]:
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "torch_dtype": dtype,
    }
    return config | ({"sliding_window": None} if family == "mistral" else {})


def _weight(name: str, shape: tuple[int, ...], tie: bool, generator: torch.Generator) -> Tensor:
    """Layers that outweigh the embedding and logits of deviation 4, so that output varies."""
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * values
    if name.endswith(".bias"):
        return 0.3 * values
    if name == "model.embed_tokens.weight":
        return values * (0.5 if tie else 1.0)
    if name == "lm_head.weight":
        return 0.5 * values
    return values * (2.0 / math.sqrt(shape[1]))


def _write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: token id = byte, except that id 0 ends a text."""
    vocabulary = {_byte_character(byte): byte for byte in range(1, 256)} | {EOS_TEXT: EOS}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    byte_level["trim_offsets"] = True
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False}
    end = {"id": EOS, "content": EOS_TEXT, "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TEXT,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer.json", tokenizer)
    _write_json(path / "tokenizer_config.json", settings)


def _byte_character(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte: printable ones stand for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def _lora_tensors(module: str, A: Tensor, B: Tensor) -> dict[str, Tensor]:
    """A [rank, in] and B [out, rank] under the names that peft saves."""
    prefix = f"base_model.model.{module}"
    if module.endswith("embed_tokens"):
        return {f"{prefix}.lora_embedding_A": A, f"{prefix}.lora_embedding_B": B}
    return {f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}


def _constant_embedding(arch: Architecture, size: float) -> dict[str, Tensor]:
    """A rank 1 adapter that adds `size` to every element of every embedding."""
    A = torch.ones(1, arch.vocab_size)
    return _lora_tensors("model.embed_tokens", A, torch.full((arch.hidden_size, 1), size))


def _mean(norm: Tensor) -> Tensor:
    """The direction [1, hidden] whose product with the normed constant vector is 1."""
    return torch.ones(1, len(norm)) / norm.sum()


def _write_adapter(
    path: Path, tensors: Mapping[str, Tensor], dtype: str = "float32", **fields: Any
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0}
    config |= {"base_model_name_or_path": None, "inference_mode": True, "fan_in_fan_out": False}
    _write_json(path / "adapter_config.json", config | fields)
    _save(path / "adapter_model.safetensors", tensors, dtype)
    return path


def _save(file: Path, tensors: Mapping[str, Tensor], dtype: str) -> None:
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(cast, file, {"format": "pt"})


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1), encoding="utf-8")
