from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Family, make_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from truegraft.errors import ModelError
from truegraft.model.architecture import Architecture, TargetShape
from truegraft.model.rope import cos_sin_table

ROPE_SETTINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 5e5},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 40.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.25,
        }
    },
]


# What well-known models ship, without the fields that every config has.
PUBLISHED: dict[str, tuple[Family, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "use_cache": True,
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.1": (
        "mistral",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
}


def write(path: Path, family: Family = "llama", **fields: Any) -> Path:
    """A directory with nothing but the config of a tiny model, changed by `fields`."""
    make_model(path, family)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").unlink()
    (path / "generation_config.json").unlink()
    return path


def read(path: Path, family: Family = "llama", **fields: Any) -> Architecture:
    return Architecture.from_directory(write(path, family, **fields))


def drop(path: Path, *names: str) -> Architecture:
    """The architecture of `path` once its config lacks `names`."""
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in names}
    (path / "config.json").write_text(json.dumps(kept))
    return Architecture.from_directory(path)


def oracle_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model that transformers builds from the same config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(tmp_path: Path, family: Family, biased: bool) -> None:
    fields: dict[str, Any] = {"head_dim": 24, "num_hidden_layers": 3}
    if biased and family in ("llama", "qwen3"):
        fields["attention_bias"] = True
    if biased and family == "llama":
        fields["mlp_bias"] = True
    arch = read(tmp_path / "model", family, **fields)
    assert arch.parameter_shapes() == oracle_shapes(tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_models_have_no_head_of_their_own(tmp_path: Path, family: Family) -> None:
    arch = read(tmp_path / "model", family, tie_word_embeddings=True)
    shapes = oracle_shapes(tmp_path / "model")
    del shapes["lm_head.weight"]
    assert arch.parameter_shapes() == shapes
    assert arch.target_modules()["lm_head"] == TargetShape(64, 256, "linear")


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_linears_and_embeddings_of_transformers(
    tmp_path: Path, family: Family
) -> None:
    targets = read(tmp_path / "model", family).target_modules()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    expected: dict[str, TargetShape] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            expected[name] = TargetShape(module.in_features, module.out_features, "linear")
        if isinstance(module, torch.nn.Embedding):
            size = (module.num_embeddings, module.embedding_dim)
            expected[name] = TargetShape(*size, "embedding")
    assert list(targets.items()) == list(expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_written_by_transformers_reads_the_same(tmp_path: Path, family: Family) -> None:
    arch = read(tmp_path / "classic", family, rope_theta=5e5, torch_dtype="bfloat16")
    config = AutoConfig.from_pretrained(tmp_path / "classic")
    config.save_pretrained(tmp_path / "modern")
    modern = json.loads((tmp_path / "modern" / "config.json").read_text())
    assert "rope_parameters" in modern
    assert "rope_theta" not in modern
    assert "torch_dtype" not in modern
    assert Architecture.from_directory(tmp_path / "modern") == arch


@pytest.mark.parametrize("family", FAMILIES)
def test_left_out_fields_take_the_value_of_transformers(tmp_path: Path, family: Family) -> None:
    path = write(tmp_path / "model", family, num_attention_heads=32, hidden_size=256)
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    arch = drop(path, *optional, "eos_token_id", "bos_token_id", "rope_theta", "hidden_act")
    config = AutoConfig.from_pretrained(path)
    default_head_dim = config.hidden_size // config.num_attention_heads
    eos = () if config.eos_token_id is None else (config.eos_token_id,)
    assert arch.num_kv_heads == config.num_key_value_heads
    assert arch.head_dim == getattr(config, "head_dim", default_head_dim)
    assert arch.rms_norm_eps == config.rms_norm_eps
    assert arch.tie_word_embeddings == config.tie_word_embeddings
    assert arch.rope.theta == config.rope_parameters["rope_theta"]
    assert (arch.eos_token_ids, arch.bos_token_id) == (eos, config.bos_token_id)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(tmp_path: Path, name: str) -> None:
    family, fields = PUBLISHED[name]
    path = write(tmp_path / "tiny", family)
    config = json.loads((path / "config.json").read_text())
    if "head_dim" not in fields:
        del config["head_dim"]
    (path / "config.json").write_text(json.dumps(config | fields))
    arch = Architecture.from_directory(path)
    shapes = oracle_shapes(path)
    if arch.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert arch.parameter_shapes() == shapes
    assert arch.max_position_embeddings == fields["max_position_embeddings"]
    assert set(arch.sliding_windows) == {4096 if family == "mistral" else None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_may_be_known_by_model_type_alone(tmp_path: Path, family: Family) -> None:
    path = write(tmp_path / "model", family)
    arch = Architecture.from_directory(path)
    assert drop(path, "architectures") == arch
    assert arch.model_type == family


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("settings", ROPE_SETTINGS)
def test_rope_table_is_that_of_transformers(
    tmp_path: Path, settings: dict[str, Any], head_dim: int
) -> None:
    path = write(tmp_path / "model", head_dim=head_dim)
    drop(path, "rope_theta")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    positions = 2048
    arch = Architecture.from_directory(path)
    cos, sin = cos_sin_table(arch.rope, arch.head_dim, positions)
    oracle = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    oracle_cos, oracle_sin = oracle(torch.zeros(1), torch.arange(positions)[None])
    half = head_dim // 2
    assert cos.shape == sin.shape == (positions, half)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, oracle_cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, oracle_sin[0, :, :half], rtol=0, atol=1e-6)


def test_rope_kinds_differ(tmp_path: Path) -> None:
    specs = [read(tmp_path / str(i), **s).rope for i, s in enumerate(ROPE_SETTINGS)]
    assert len(set(specs)) == len(ROPE_SETTINGS)
    tables = [cos_sin_table(spec, 64, 64)[0] for spec in specs]
    for i, table in enumerate(tables):
        assert not any(torch.equal(table, other) for other in tables[:i])


def test_rope_table_rows_do_not_depend_on_their_number(tmp_path: Path) -> None:
    spec = read(tmp_path / "model").rope
    long = cos_sin_table(spec, 64, 1000)
    short = cos_sin_table(spec, 64, 37)
    assert torch.equal(short[0], long[0][:37])
    assert torch.equal(short[1], long[1][:37])


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read(tmp_path / "yarn", rope_scaling=yarn).max_position_embeddings == 8192
    linear = {"type": "linear", "factor": 4.0}
    assert read(tmp_path / "linear", rope_scaling=linear).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 32}, (32, 32, 32)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 32}, (None, None, None)),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}, (None, None, None)),
        (
            "qwen2",
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1},
            (None, 32, 32),
        ),
        ("qwen3", {"sliding_window": 32, "use_sliding_window": True}, (None, None, None)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096)),
        (
            "qwen3",
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (32, None, 32),
        ),
    ],
)
def test_sliding_windows(
    tmp_path: Path, family: Family, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    arch = read(tmp_path / "model", family, num_hidden_layers=3, **fields)
    assert arch.sliding_windows == windows
    if family.startswith("qwen"):
        config = AutoConfig.from_pretrained(tmp_path / "model")
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        assert arch.sliding_windows == tuple(config.sliding_window if s else None for s in sliding)


def test_mistral_without_the_field_slides_as_in_transformers(tmp_path: Path) -> None:
    arch = drop(write(tmp_path / "model", "mistral"), "sliding_window")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert arch.sliding_windows == (config.sliding_window, config.sliding_window)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_dtype(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    assert read(tmp_path / "model", **fields).dtype == expected


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, {}, (7,)),
        ([7, 8, 7], {}, (7, 8)),
        (None, {}, ()),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (-1, {}, ()),
        (7, {"eos_token_id": 256}, ()),
    ],
)
def test_end_tokens(
    tmp_path: Path, in_config: object, in_generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    path = write(tmp_path / "model", eos_token_id=in_config)
    (path / "generation_config.json").write_text(json.dumps(in_generation))
    assert Architecture.from_directory(path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6, "max_new_tokens": 5}, {}),
    ],
)
def test_sampling_defaults(
    tmp_path: Path, generation: dict[str, Any], expected: dict[str, float]
) -> None:
    path = write(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps(generation))
    assert Architecture.from_directory(path).sampling_defaults == expected


def test_harmless_fields_are_ignored(tmp_path: Path) -> None:
    plain = read(tmp_path / "plain")
    fields: dict[str, Any] = {"use_cache": True, "attention_dropout": 0.1, "my_note": "x"}
    fields |= {"pretraining_tp": 1, "quantization_config": None, "partial_rotary_factor": 1.0}
    assert read(tmp_path / "noted", **fields, rope_scaling=None) == plain


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "Classification"),
        ("llama", {"architectures": ["LlamaForCausalLM", "X"]}, "must name one class"),
        ("llama", {"architectures": None, "model_type": "gemma"}, "gemma.*llama, mistral"),
        ("llama", {"model_type": "qwen2"}, "contradicts"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act="gelu".*only "silu"'),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=true"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"vision_config": {"depth": 2}}, "vision_config"),
        ("llama", {"audio_config": {"depth": 2}}, "audio_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm=true"),
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ("llama", {"quantization_config": {"load_in_4bit": True}}, r"quantised \(unnamed\)"),
        ("mistral", {"attention_bias": True}, "attention_bias=true"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=true"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "each of 2 layers"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("qwen3", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
        ("llama", {"num_attention_heads": 5, "head_dim": None}, "no multiple of 2 key"),
        ("llama", {"hidden_size": 66, "head_dim": None}, "hidden_size=66"),
        ("llama", {"head_dim": 15}, "head_dim=15 is odd"),
        ("llama", {"hidden_size": "64"}, 'hidden_size="64" must be an integer'),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=true"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ("llama", {"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes"'),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("llama", {"rope_theta": -1}, "json: rope_theta=-1"),
        ("llama", {"rope_theta": 1.0}, "rope_theta=1.0 must exceed 1"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta=0"),
        ("llama", {"rope_scaling": "linear"}, 'rope_scaling="linear" must be an object'),
        ("llama", {"rope_scaling": {"type": "linear"}}, "no rope_scaling.factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(
    tmp_path: Path, family: Family, fields: dict[str, Any], match: str
) -> None:
    write(tmp_path / "model", family, **fields)
    with pytest.raises(ModelError, match=match):
        Architecture.from_directory(tmp_path / "model")


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 'rope_type="dynamic".*linear, llama3, yarn'),
        ({"type": "longrope", "short_factor": [1.0]}, 'type="longrope"'),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "default", "mrope_section": [8, 8, 8]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "must exceed low_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, 'beta_fast="x"'),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}, "attention_factor=0"),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_unknown_ropes_are_refused(
    tmp_path: Path, field: str, rope: dict[str, Any], match: str
) -> None:
    fields: dict[str, Any] = {field: rope}
    write(tmp_path / "model", **fields)
    with pytest.raises(ModelError, match=match):
        Architecture.from_directory(tmp_path / "model")


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_required_fields_are_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model")
    with pytest.raises(ModelError, match=f"has no {name}"):
        drop(path, name)


def test_paths_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    cases = {
        "Qwen/Qwen3-8B": "looks like a hub id; download it first",
        "./nowhere/to/go": "does not exist. Give a local",
        "/nowhere/model": "does not exist. Give a local",
        "file": "is a file",
        "empty": "has no config.json",
    }
    for path, message in cases.items():
        with pytest.raises(ModelError) as error:
            Architecture.from_directory(Path(path))
        assert message in str(error.value)
        assert ("hub id" in str(error.value)) == (path == "Qwen/Qwen3-8B")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    write(tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content)
    with pytest.raises(ModelError, match=file):
        Architecture.from_directory(tmp_path / "model")
