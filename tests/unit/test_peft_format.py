"""Reading PEFT directories: PEFT itself says what is right, and every fault is refused by name."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_adapters import BROKEN_REASONS, CONFIG, WEIGHTS, edit_config, edit_tensors, make_broken
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from truegraft.adapters.check import check_adapter
from truegraft.adapters.peft_config import CONFIG_FIELDS, Faults, check_config
from truegraft.adapters.peft_format import Adapter, describe_adapter, read_adapter
from truegraft.errors import AdapterError
from truegraft.model.architecture import TargetShape

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Q0 = "model.layers.0.self_attn.q_proj"
Q0_FILE = f"base_model.model.{Q0}"


def base_model(tie: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=tie,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def target_shapes(model: nn.Module) -> dict[str, TargetShape]:
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = TargetShape(module.in_features, module.out_features, "linear")
        elif isinstance(module, nn.Embedding):
            shapes[name] = TargetShape(module.num_embeddings, module.embedding_dim, "embedding")
    return shapes


TARGETS = target_shapes(base_model())
DEFAULTS: dict[str, Any] = {"max_rank": 256, "dtype": torch.float32}


def save_with_peft(
    path: Path, *, tie: bool = False, save_embeddings: bool = False, **fields: Any
) -> dict[str, Tensor]:
    """Save a random adapter as PEFT does; what it adds to each module's weight."""
    fields = {"r": 8, "lora_alpha": 16, "target_modules": SEVEN} | fields
    model = base_model(tie)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks on tied and on saved embeddings
        tuned = get_peft_model(model, LoraConfig(init_lora_weights=False, **fields))
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:  # PEFT's own initial values are too alike: some are ones
                nn.init.normal_(parameter, std=0.1)
        tuned.save_pretrained(path, save_embedding_layers="auto" if save_embeddings else False)
    return {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach()
        for name, layer in tuned.named_modules()
        if isinstance(layer, LoraLayer)
    }


def read(path: Path, **options: Any) -> Adapter:
    return read_adapter(path, TARGETS, **(DEFAULTS | options))


def reasons(path: Path, **options: Any) -> tuple[str, ...]:
    """Why `path` is refused; a dry run must say the same."""
    with pytest.raises(AdapterError) as caught:
        read(path, **options)
    report = check_adapter(path, TARGETS, **(DEFAULTS | options))
    assert not report.accepted and report.fingerprint is None
    assert report.reasons == caught.value.reasons
    return report.reasons


def refused_with(path: Path, *words: str, **options: Any) -> None:
    """`path` is refused, and each of `words` is in one of the reasons."""
    found = reasons(path, **options)
    for word in words:
        assert any(word in reason for reason in found), (word, found)


def assert_equals(adapter: Adapter, oracle: dict[str, Tensor]) -> None:
    assert adapter.modules.keys() == oracle.keys()
    for module, delta in oracle.items():
        weights = adapter.modules[module]
        assert weights.a.shape == (weights.rank, TARGETS[module].in_features)
        assert weights.b.shape == (TARGETS[module].out_features, weights.rank)
        ours = weights.scale * (weights.b @ weights.a)
        ours = ours.T if TARGETS[module].kind == "embedding" else ours
        torch.testing.assert_close(ours, delta, rtol=1e-5, atol=1e-6)
        assert delta.abs().max() > 0.01


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_with_peft(path)
    return path


@pytest.fixture
def good(saved: Path, tmp_path: Path) -> Path:
    """A plain adapter of rank 8 on all seven linears, the test's own copy."""
    return Path(shutil.copytree(saved, tmp_path / "good"))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 3, r"^model\.layers\.1\.mlp\.up_proj": 17, "0.mlp.*": 1},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 5, "down_proj|k_proj": 40},
    },
    "rslora and patterns": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, "k_proj": 17},
        "alpha_pattern": {"q_proj": 7},
    },
    "rank 1": {"r": 1},
    "rank 3": {"r": 3},
    "rank 17": {"r": 17, "lora_alpha": 5},
    "k and v": {"target_modules": ["k_proj", "v_proj"]},
    "up": {"target_modules": ["up_proj"]},
    "full path": {"target_modules": [Q0]},
    "regex": {"target_modules": r".*\.1\.(self_attn\.[qo]_proj|mlp\.down_proj)"},
    "all-linear": {"target_modules": "all-linear"},
    "one layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["k_proj", "layers.0.mlp.up_proj"]},
    "excluded by regex": {"exclude_modules": r".*layers\.0.*"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "r": 5},
    "head": {"target_modules": ["lm_head"]},
    "both, tied": {"target_modules": ["embed_tokens", "lm_head"], "tie": True},
    "head, tied": {"target_modules": ["lm_head", "v_proj"], "tie": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_adapter_of_peft_is_what_peft_adds(tmp_path: Path, config: dict[str, Any]) -> None:
    oracle = save_with_peft(tmp_path, **config)
    assert_equals(read(tmp_path), oracle)


def test_missing_rank_and_alpha_are_peft_s_defaults(good: Path) -> None:
    config = json.loads((good / CONFIG).read_text())
    del config["r"], config["lora_alpha"]
    (good / CONFIG).write_text(json.dumps(config))
    assert {weights.scale for weights in read(good).modules.values()} == {1.0}


def test_target_modules_as_all_linear_or_null_let_the_tensors_decide(good: Path) -> None:
    listed = read(good)
    for value in ("all-linear", "All-Linear", None):
        edit_config(good, target_modules=value)
        assert read(good).fingerprint == listed.fingerprint


@pytest.mark.parametrize("base", ["x", "no/such-model", "http://example.invalid", None, 5])
def test_the_base_s_name_is_irrelevant(good: Path, base: object) -> None:
    edit_config(good, base_model_name_or_path=base)
    assert len(read(good).modules) == 14


@given(
    targets=st.one_of(
        st.none().map(lambda _: r".*(q_proj|layers\.1.*)"),
        st.lists(
            st.sampled_from([*SEVEN, Q0, "0.mlp.up_proj", "proj", "embed_tokens"]), max_size=4
        ),
    ),
    exclude=st.sampled_from([None, [], ["k_proj", Q0], r".*layers\.0.*", "k_proj"]),
    layers=st.sampled_from([None, [], 0, 1, [1], [0, 1], [7]]),
    pattern=st.sampled_from([None, "", "layers", ["h", "layers"], "mlp"]),
    key=st.sampled_from(["q_proj", "proj", r"layers\.0\..*", f"^{Q0}", Q0, "0.mlp.up_proj", ""]),
)
def test_matching_is_peft_s(
    targets: str | list[str], exclude: Any, layers: Any, pattern: Any, key: str
) -> None:
    if isinstance(targets, str):
        layers = pattern = None
    fields = {
        "target_modules": targets,
        "exclude_modules": exclude,
        "layers_to_transform": layers,
        "layers_pattern": pattern,
    }
    settings = check_config(fields | {"rank_pattern": {key: 3, "up_proj": 5}}, Faults())
    oracle = SimpleNamespace(**fields)
    for module, shape in TARGETS.items():
        found = check_target_module_exists(oracle, module)
        expected = bool(found) and not isinstance(found, _ExcludedModule)
        assert settings.targets(module, shape.kind) == expected, (module, fields)
        rank = {key: 3, "up_proj": 5}.get(get_pattern_key([key, "up_proj"], module), 8)
        assert settings.rank_and_scale(module)[0] == rank


RENAMES: dict[str, Callable[[str], str]] = {
    "no prefix": lambda n: n.removeprefix("base_model.model."),
    "adapter name": lambda n: n.replace(".weight", ".default.weight"),
    "wrapper outside": lambda n: n.replace("base_model.model.", "base_model.model.language_model."),
    "wrapper inside": lambda n: n.replace("model.layers", "model.language_model.layers"),
    "wrapper around": lambda n: n.replace("base_model.", "base_model.model.model.language_", 1),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_spellings_of_names_do_not_matter(good: Path, rename: Callable[[str], str]) -> None:
    plain = read(good)
    edit_tensors(good, lambda tensors: {rename(n): t for n, t in tensors.items()})
    assert Q0_FILE + ".lora_A.weight" not in load_file(good / WEIGHTS)
    assert read(good).fingerprint == plain.fingerprint


def test_patterns_match_the_names_of_the_file_in_a_wrapper(good: Path) -> None:
    edit_tensors(good, lambda ts: {RENAMES["wrapper inside"](n): t for n, t in ts.items()})
    edit_config(good, alpha_pattern={"^model.language_model.layers.0.self_attn.q_proj": 4})
    scales = {module: weights.scale for module, weights in read(good).modules.items()}
    assert scales.pop(Q0) == 0.5 and set(scales.values()) == {2.0}


def fuse(tensors: dict[str, Tensor], fused: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """As if one adapter had been trained on the fused linear: A shared, B stacked."""
    fused_tensors = dict(tensors)
    for name in tensors:
        if f".{parts[0]}.lora_A" in name:
            names = [name.replace(parts[0], part).replace("lora_A", "lora_B") for part in parts]
            b = torch.cat([fused_tensors.pop(n) for n in names])
            fused_tensors[name.replace(parts[0], fused).replace("lora_A", "lora_B")] = b
            fused_tensors[name.replace(parts[0], fused)] = fused_tensors.pop(name)
            for part in parts[1:]:
                del fused_tensors[name.replace(parts[0], part)]
    return fused_tensors


@pytest.mark.parametrize(
    ("fused", "parts"),
    [("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))],
)
@pytest.mark.parametrize("config_is_fused", [True, False])
def test_a_fused_tensor_is_split(
    good: Path, fused: str, parts: tuple[str, ...], config_is_fused: bool
) -> None:
    original = load_file(good / WEIGHTS)
    edit_tensors(good, lambda tensors: fuse(tensors, fused, parts))
    if config_is_fused:
        edit_config(good, target_modules=[fused, *(m for m in SEVEN if m not in parts)])
    modules = read(good).modules
    assert len(modules) == 14
    for module, weights in modules.items():
        last = module.rpartition(".")[2]
        source = module.removesuffix(last) + (parts[0] if last in parts else last)
        assert torch.equal(weights.a, original[f"base_model.model.{source}.lora_A.weight"])
        assert torch.equal(weights.b, original[f"base_model.model.{module}.lora_B.weight"])


def test_fused_and_split_forms_of_one_adapter_are_the_same_version(good: Path) -> None:
    def share_a(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: tensors[re.sub("[kv]_proj.lora_A", "q_proj.lora_A", n)] for n in tensors}

    edit_tensors(good, share_a)
    split = read(good).fingerprint
    edit_tensors(good, lambda ts: fuse(ts, "qkv_proj", ("q_proj", "k_proj", "v_proj")))
    assert read(good).fingerprint == split


def test_a_fused_tensor_beside_one_of_its_parts_is_refused(good: Path) -> None:
    original = load_file(good / WEIGHTS)
    kept = {n: t for n, t in original.items() if n.startswith(Q0_FILE)}
    edit_tensors(good, lambda ts: fuse(ts, "qkv_proj", ("q_proj", "k_proj", "v_proj")) | kept)
    refused_with(good, f"{Q0} has its own tensors and fused ones")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype_is_cast_once(
    good: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    edit_tensors(good, lambda tensors: {n: t.to(stored) for n, t in tensors.items()})
    tensors = load_file(good / WEIGHTS)
    weights = read(good, dtype=dtype).modules[Q0]
    assert weights.a.dtype == weights.b.dtype == dtype
    assert torch.equal(weights.a, tensors[f"{Q0_FILE}.lora_A.weight"].to(dtype))
    assert torch.equal(weights.b, tensors[f"{Q0_FILE}.lora_B.weight"].to(dtype))


def test_a_zero_b_is_fine(good: Path) -> None:
    edit_tensors(good, lambda ts: {n: t * 0 if "lora_B" in n else t for n, t in ts.items()})
    assert not read(good).modules[Q0].b.any()


# ------------------------------------------------------------------------------ fingerprints


def test_the_fingerprint_follows_content_and_meaning_only(tmp_path: Path, good: Path) -> None:
    first = read(good).fingerprint
    assert len(first) == 64
    edit_config(good, lora_dropout=0.5, task_type="X", revision="r", r=8, inference_mode=False)
    assert read(good.rename(tmp_path / "other")).fingerprint == first
    assert read(tmp_path / "other", base_fingerprint="b").fingerprint != first


@pytest.mark.parametrize("fields", [{"lora_alpha": 17}, {"use_rslora": True}])
def test_the_fingerprint_changes_with_the_scale(good: Path, fields: dict[str, Any]) -> None:
    first = read(good).fingerprint
    edit_config(good, **fields)
    assert read(good).fingerprint != first


def test_the_fingerprint_changes_with_one_bit(good: Path) -> None:
    def flip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{Q0_FILE}.lora_A.weight"].view(torch.int32)[0, 0] ^= 1
        return tensors

    first = read(good).fingerprint
    edit_tensors(good, flip)
    assert read(good).fingerprint != first


def test_the_fingerprint_changes_when_two_modules_swap(good: Path) -> None:
    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        marked = {
            n.replace("k_proj", "@").replace("v_proj", "k_proj"): t for n, t in tensors.items()
        }
        return {n.replace("@", "v_proj"): t for n, t in marked.items()}

    first = read(good).fingerprint
    edit_tensors(good, swap)
    assert read(good).fingerprint != first


# ----------------------------------------------------------------------------- refused whole


def test_every_broken_adapter_is_refused_with_its_own_reason(good: Path, tmp_path: Path) -> None:
    for name, path in make_broken(good, tmp_path / "broken").items():
        found = "\n".join(reasons(path))
        assert BROKEN_REASONS[name] in found, (name, found)
        matching = {other for other, word in BROKEN_REASONS.items() if word in found}
        assert matching <= {name, "missing_tensor", "wrong_shape"}, (name, found)
        assert all(len(reason) < 1500 for reason in reasons(path))


def test_a_wrong_prefix_lists_some_names_and_counts_the_rest(good: Path) -> None:
    edit_tensors(good, lambda tensors: {f"x.{n}": t for n, t in tensors.items()})
    (reason,) = reasons(good)
    assert "x.base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in reason
    assert "and 20 more" in reason


def test_one_error_lists_all_that_is_wrong(good: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors[f"{Q0_FILE}.lora_B.weight"]
        k, v = (f"{Q0_FILE.replace('q_proj', p)}.lora_A.weight" for p in ("k_proj", "v_proj"))
        tensors[k] = torch.ones(16, 64)
        tensors[v][0, 0] = math.inf
        tensors["base_model.model.model.layers.99.mlp.up_proj.lora_A.weight"] = torch.ones(8, 64)
        return tensors

    edit_tensors(good, change)
    edit_config(good, use_qalora=True)
    refused_with(
        good,
        "use_qalora=true",
        f"{Q0}: lora_B [64, 8] is missing",
        "k_proj: lora_A has shape [16, 64], expected [8, 64]",
        "v_proj.lora_A.weight holds 1 NaN or infinite values",
        "not in the base model: model.layers.99.mlp.up_proj",
        "layer 99 does not exist; the base has 2",
    )
    assert len(reasons(good)) == 6


def test_ranks_of_config_and_tensors_must_agree(good: Path) -> None:
    edit_config(good, r=4)
    refused_with(good, "lora_A has shape [8, 64], expected [4, 64]", "20 more of this kind: shape")


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(good: Path, side: str, value: float) -> None:
    name = f"{Q0_FILE}.lora_{side}.weight"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][1, 1] = value
        return tensors

    edit_tensors(good, change)
    refused_with(good, f"{name} holds 1 NaN or infinite values of 512")


def test_a_value_that_overflows_the_model_s_dtype_is_refused(good: Path) -> None:
    edit_tensors(good, lambda tensors: {n: t + 1e5 for n, t in tensors.items()})
    read(good)
    refused_with(good, "values overflow torch.float16", dtype=torch.float16)


def test_a_rank_above_the_limit_is_refused(good: Path) -> None:
    read(good, max_rank=8)
    refused_with(good, f"{Q0}: rank 8 exceeds the limit of 7", max_rank=7)


REFUSED = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2], [1, 2]],
    "trainable_token_indices": [1],
    "target_parameters": ["x"],
    "ensure_weight_tying": True,
    "alora_invocation_tokens": [1, 2],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"a": 1},
    "velora_config": {"scale": 1.0},
    "monteclora_config": {"num_samples": 8},
    "enable_lora": [True],
    "peft_type": "IA3",
    "a_field_of_next_year": 0,
    "r": 0,
    "lora_alpha": 0,
    "use_rslora": "yes",
    "rank_pattern": {"q_proj": 0},
    "alpha_pattern": {"(": 3},
    "target_modules": "(",
    "exclude_modules": 7,
    "layers_to_transform": "0",
    "layers_pattern": ["("],
    "init_lora_weights": "pissa",
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_a_refused_field_is_named_with_its_value(good: Path, field: str, value: object) -> None:
    edit_config(good, **{field: value})
    refused_with(good, f"{field}={json.dumps(value)} ")


def test_every_field_but_the_harmless_ones_can_be_refused() -> None:
    named = {name for name, known in CONFIG_FIELDS.items() if known.role != "harmless"}
    assert named == REFUSED.keys() - {"a_field_of_next_year"}


def test_every_field_of_peft_is_known() -> None:
    assert LoraConfig.__dataclass_fields__.keys() <= CONFIG_FIELDS.keys()


@pytest.mark.parametrize(
    "value", [7.5, True, None, -1, "8", 10**400, math.nan, math.inf], ids=lambda v: str(v)[:8]
)
def test_odd_numbers_are_refused_or_meant(good: Path, value: object) -> None:
    edit_config(good, r=value)
    refused_with(good, "r=")
    edit_config(good, r=8, lora_alpha=value)
    if value in (7.5, -1):
        assert read(good).modules[Q0].scale == value / 8
    else:
        refused_with(good, "lora_alpha=")


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new"])
def test_an_initialisation_that_changes_the_base_is_refused(good: Path, init: str) -> None:
    edit_config(good, init_lora_weights=init)
    refused_with(good, f'init_lora_weights="{init}"', "path_initial_model_for_weight_conversion")


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_an_initialisation_of_the_adapter_alone_is_fine(good: Path, init: object) -> None:
    edit_config(good, init_lora_weights=init)
    assert len(read(good).modules) == 14


def test_layer_fields_need_a_list_and_each_other(good: Path) -> None:
    edit_config(good, target_modules=".*proj", layers_to_transform=[0, 1])
    refused_with(good, "layers_to_transform needs a list as target_modules")
    edit_config(good, target_modules=SEVEN, layers_to_transform=None, layers_pattern="layers")
    refused_with(good, "layers_pattern is set without layers_to_transform")


def test_config_and_tensors_must_name_the_same_modules(good: Path) -> None:
    edit_config(good, target_modules=[*SEVEN[1:], "lm_head"])
    refused_with(
        good,
        f"{Q0} has tensors, but the config does not target it",
        "the config targets these modules, but they have no tensors: lm_head",
    )
    edit_config(good, target_modules=SEVEN, layers_to_transform=[0])
    refused_with(good, "model.layers.1.mlp.up_proj has tensors, but the config does not target it")


def test_a_declared_module_without_tensors_is_refused(good: Path) -> None:
    edit_tensors(good, lambda ts: {n: t for n, t in ts.items() if not n.startswith(Q0_FILE)})
    refused_with(good, f"have no tensors: {Q0}")


def test_the_same_tensor_under_two_names_is_refused(good: Path) -> None:
    edit_tensors(good, lambda ts: ts | {f"{Q0}.lora_A.weight": ts[f"{Q0_FILE}.lora_A.weight"] + 1})
    refused_with(good, "are the same tensor")


def test_tensors_of_the_other_kind_are_refused(good: Path) -> None:
    edit_tensors(
        good, lambda ts: {n.replace("lora_A.weight", "lora_embedding_A"): ts[n] for n in ts}
    )
    refused_with(good, f"{Q0} takes lora_A and lora_B, found lora_embedding_A")


def test_bias_and_integer_tensors_are_refused(good: Path) -> None:
    name = f"{Q0_FILE}.lora_B.bias"
    edit_tensors(good, lambda tensors: tensors | {name: torch.zeros(64)})
    refused_with(good, f"{name} is no LoRA tensor")
    name = f"{Q0_FILE}.lora_B.weight"
    edit_tensors(good, lambda tensors: tensors | {name: tensors[name].to(torch.int8)})
    refused_with(good, f"{name} is I8; save it as F32, F16 or BF16")


def test_a_file_without_lora_tensors_is_refused(good: Path) -> None:
    edit_tensors(good, lambda _: {"x": torch.ones(1)})
    refused_with(good, "holds no LoRA tensors", "x is no LoRA tensor")


def test_paths_that_hold_no_adapter_are_refused(tmp_path: Path, good: Path) -> None:
    refused_with(tmp_path / "no" / "where", "does not exist", "nothing is downloaded")
    refused_with(good / WEIGHTS, "is a file")
    refused_with(tmp_path, "adapter_config.json is missing", "adapter_model.safetensors is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(good: Path, text: str) -> None:
    (good / CONFIG).write_bytes(text.encode(errors="surrogateescape"))
    refused_with(good, "adapter_config.json ")


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_a_weights_file_cut_anywhere_is_refused(good: Path, size: int) -> None:
    (good / WEIGHTS).write_bytes((good / WEIGHTS).read_bytes()[:size])
    refused_with(good, "truncated")


# ------------------------------------------------------------------- copies of base weights


@pytest.mark.parametrize("tie", [False, True])
def test_a_copy_of_the_base_s_weight_must_be_equal(tmp_path: Path, tie: bool) -> None:
    targets = ["embed_tokens", "lm_head"]
    oracle = save_with_peft(tmp_path, target_modules=targets, tie=tie, save_embeddings=True)
    base = base_model(tie)

    def base_weight(module: str) -> Tensor:
        return base.get_parameter(f"{module}.weight").detach()

    assert_equals(read(tmp_path, base_weight=base_weight), oracle)
    half = read(tmp_path, base_weight=lambda m: base_weight(m).half(), dtype=torch.float16)
    assert half.modules.keys() == oracle.keys()
    edit_tensors(tmp_path, lambda ts: {n: t.bfloat16() for n, t in ts.items()})
    assert read(tmp_path, base_weight=base_weight).modules.keys() == oracle.keys()
    refused_with(tmp_path, "cannot be compared", "save_embedding_layers=False")
    refused_with(
        tmp_path, "differs from the base's weight", base_weight=lambda m: base_weight(m) + 1
    )


# ------------------------------------------------------------------------------------ tables


def test_the_table_agrees_with_what_is_read(good: Path) -> None:
    edit_config(good, alpha_pattern={"k_proj": 4})
    adapter = read(good, dtype=torch.bfloat16)
    report = check_adapter(good, TARGETS, max_rank=256, dtype=torch.bfloat16)
    assert report.accepted and report.fingerprint == adapter.fingerprint
    assert describe_adapter(good, TARGETS, max_rank=256).rows == report.rows
    assert [row.module for row in report.rows] == list(adapter.modules) == sorted(adapter.modules)
    for row in report.rows:
        weights = adapter.modules[row.module]
        assert (row.rank, row.scale) == (weights.rank, weights.scale)
        assert (row.a_shape, row.b_shape) == (tuple(weights.a.shape), tuple(weights.b.shape))
        assert report.row_bytes(row) == weights.num_bytes
    shown = json.loads(json.dumps(report.to_dict()))
    assert shown["accepted"] and shown["num_bytes"] == adapter.num_bytes == 29_696
    assert shown["max_rank"] == 8 and len(shown["modules"]) == 14
