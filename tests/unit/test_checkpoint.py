from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor

from truegraft.errors import ModelError
from truegraft.model.architecture import Architecture
from truegraft.model.checkpoint import fingerprint, load_weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    return load_weights(path, Architecture.from_directory(path), dtype, **options)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        load(path)
    return str(error.value)


def change(path: Path, updates: dict[str, Tensor | None]) -> None:
    """Replace or, with None, remove tensors of the single weights file."""
    tensors: dict[str, Tensor | None] = {**load_file(path / "model.safetensors"), **updates}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def shard(path: Path) -> tuple[Path, Path]:
    """Split the single weights file into two, with an index."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard_name, members in shards.items():
        save_file({name: tensors[name] for name in members}, path / shard_name)
    weight_map = {name: shard_name for shard_name, members in shards.items() for name in members}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    file.unlink()
    return path / "a.safetensors", path / "b.safetensors"


def flip(file: Path, offset: int) -> None:
    """Change one bit, and the time of change by more than the coarsest clock of a file system."""
    content, changed_ns = bytearray(file.read_bytes()), file.stat().st_mtime_ns
    content[offset] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(changed_ns, changed_ns + 10**10))


def test_single_file_gives_every_tensor_with_the_bits_of_the_file(model: Path) -> None:
    weights = load(model)
    stored = load_file(model / "model.safetensors")
    assert list(weights) == list(Architecture.from_directory(model).parameter_shapes())
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_shards_give_what_the_single_file_gives(model: Path) -> None:
    single = load(model)
    shard(model)
    sharded = load(model)
    assert list(sharded) == list(single)
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def test_values_are_cast_once(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    weights = load(model, torch.bfloat16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[name], stored[name].bfloat16()) for name in stored)


def test_values_outlive_the_file(model: Path) -> None:
    weights = load(model)
    before = weights[Q_PROJ].clone()
    size = (model / "model.safetensors").stat().st_size
    with (model / "model.safetensors").open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"\xff" * (size - size // 2))
    assert torch.equal(weights[Q_PROJ], before)


def test_one_error_lists_all_that_is_wrong(model: Path) -> None:
    shapes = {
        HEAD: None,
        Q_PROJ: torch.zeros(64, 60),
        EMBEDDING: torch.zeros(256, 64, dtype=torch.int8),
        "model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64),
    }
    change(model, shapes)
    message = refusal(model)
    assert f"{HEAD} is missing, expected [256, 64]" in message
    assert f"{Q_PROJ} has shape [64, 60], expected [64, 64]" in message
    assert f"{EMBEDDING} has dtype I8" in message
    assert "model.layers.2.mlp.up_proj.weight is unexpected, found [96, 64]" in message
    assert message.count("\n  - ") == 4


def test_a_bias_that_the_architecture_has_not_is_unexpected(model: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change(model, {name: torch.zeros(64)})
    assert f"{name} is unexpected, found [64]" in refusal(model)


def test_old_rotary_buffers_are_ignored(model: Path) -> None:
    change(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert not any("rotary" in name for name in load(model))


def test_a_tied_head_may_be_stored_twice_if_equal(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tied", tie=True)
    embedding = load(model)[EMBEDDING]
    change(model, {HEAD: embedding.clone()})
    assert HEAD not in load(model)
    change(model, {HEAD: embedding + 1})
    assert f"{HEAD} differs from {EMBEDDING}" in refusal(model)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(model: Path, kept: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors is truncated or broken" in refusal(model)


def test_a_missing_shard_is_named_with_its_tensors(model: Path) -> None:
    first, _ = shard(model)
    lost = list(load_file(first))
    first.unlink()
    message = refusal(model)
    assert "a.safetensors is in the index but not in the directory" in message
    assert all(f"{name} is missing" in message for name in lost)


def test_a_tensor_in_two_shards_is_refused(model: Path) -> None:
    first, second = shard(model)
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    assert f"{name} is stored twice" in refusal(model)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "3"]
)
def test_a_broken_index_is_named(model: Path, text: str) -> None:
    shard(model)
    (model / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is no index" in refusal(model)


def test_pickles_are_refused_with_the_way_out(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(model)
    assert "pytorch_model.bin" in message
    assert "convert" in message


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(model)


def test_a_long_list_of_problems_is_cut(model: Path) -> None:
    save_file({f"x.{i}": torch.zeros(1) for i in range(100)}, model / "model.safetensors")
    missing = len(Architecture.from_directory(model).parameter_shapes())
    assert f"… and {missing + 100 - 50} more" in refusal(model)


def test_numbers_too_large_for_float16_are_refused(model: Path) -> None:
    change(model, {"model.norm.weight": torch.full((64,), 7e4)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*too large for torch\.float16"):
        load(model, torch.float16)
    assert load(model, torch.bfloat16)["model.norm.weight"].isfinite().all()


def test_dummy_weights_follow_the_seed_and_need_no_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    first, again = (load(model, load_format="dummy", seed=3) for _ in range(2))
    other = load(model, load_format="dummy", seed=4)
    shapes = Architecture.from_directory(model).parameter_shapes()
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == shapes
    assert all(torch.equal(first[name], again[name]) for name in shapes)
    assert not torch.equal(first[Q_PROJ], other[Q_PROJ])
    assert torch.equal(first["model.norm.weight"], torch.ones(64))
    assert (torch.randn(64, 64) @ first[Q_PROJ].T).std().item() == pytest.approx(1, abs=0.2)


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one, same = make_model(tmp_path / "one"), make_model(tmp_path / "same")
    other = make_model(tmp_path / "other", seed=1)
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)


def test_fingerprint_follows_one_changed_byte(model: Path) -> None:
    before = fingerprint(model)
    flip(model / "model.safetensors", -1)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("rope_theta", 5e5, False),
        ("rms_norm_eps", 1e-5, False),
        ("eos_token_id", 7, True),
        ("use_cache", False, True),
    ],
)
def test_fingerprint_follows_config_fields_that_numbers_follow(
    model: Path, name: str, value: object, same: bool
) -> None:
    before = fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {name: value}))
    assert (fingerprint(model) == before) is same


def test_fingerprint_reads_all_chunks_of_all_shards(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truegraft.model.checkpoint._CHUNK_BYTES", 1000)
    for file in shard(model):
        seen = {fingerprint(model)}
        for offset in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip(file, offset)
            seen.add(fingerprint(model))
        assert len(seen) == 4


def test_fingerprint_of_a_directory_without_weights(model: Path) -> None:
    before = fingerprint(model)
    (model / "model.safetensors").unlink()
    assert fingerprint(model) not in ("", before)


def test_fingerprint_names_a_missing_shard(model: Path) -> None:
    shard(model)[1].unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors cannot be read"):
        fingerprint(model)
