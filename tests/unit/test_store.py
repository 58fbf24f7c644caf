"""Versions in host memory: content is identity, files are read once, nothing in use leaves."""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from truegraft.adapters import store as store_module
from truegraft.adapters.peft_format import Adapter, read_adapter
from truegraft.adapters.store import AdapterStore, AdapterVersion
from truegraft.api import LoRARequest
from truegraft.errors import AdapterError, ConfigError, UnknownAdapterError
from truegraft.model.architecture import TargetShape

TARGETS = {
    "model.layers.0.self_attn.v_proj": TargetShape(8, 4, "linear"),
    "model.layers.0.self_attn.q_proj": TargetShape(8, 8, "linear"),
    "model.layers.0.mlp.up_proj": TargetShape(8, 12, "linear"),
}


def write_adapter(path: Path, *, seed: int = 0, v_rank: int = 17) -> Path:
    """An adapter of rank 1 on q_proj and of `v_rank` on v_proj."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for last, out, rank in (("q_proj", 8, 1), ("v_proj", 4, v_rank)):
        name = f"base_model.model.model.layers.0.self_attn.{last}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 8, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    config = {"r": v_rank, "rank_pattern": {"q_proj": 1}, "target_modules": ["q_proj", "v_proj"]}
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "new")
    os.replace(path / "new", path / "adapter_model.safetensors")
    return path


def make_store(max_cpu_loras: int = 4, base_fingerprint: str = "") -> AdapterStore:
    return AdapterStore(
        TARGETS,
        max_cpu_loras=max_cpu_loras,
        max_rank=256,
        dtype=torch.float32,
        base_fingerprint=base_fingerprint,
    )


@pytest.fixture
def store() -> Iterator[AdapterStore]:
    made = make_store()
    yield made
    made.check_integrity()


def load(store: AdapterStore, path: Path, name: str | None = None) -> AdapterVersion:
    return store.load(LoRARequest(name or path.name, lora_path=str(path)))


def test_a_version_says_what_it_is(store: AdapterStore, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    version = load(store, path)
    assert (version.name, version.path) == ("a", str(path))
    assert version.fingerprint == version.adapter.fingerprint
    assert version.num_pages == (2, 1, 0)  # v: rank 17, q: rank 1, up: none
    assert store.names() == {"a": version.fingerprint}
    assert store.get("a") == version
    assert store.by_fingerprint(version.fingerprint) == version
    assert store.num_bytes == 4 * (17 * (8 + 4) + 1 * (8 + 8))


def test_unchanged_files_are_read_once(store: AdapterStore, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    first = load(store, path)
    os.symlink(path, tmp_path / "link")
    again = load(store, path), load(store, tmp_path / "link"), load(store, path, "b")
    assert store.num_reads == 1
    assert all(version.adapter is first.adapter for version in again)
    assert again[2].name == "b" and set(store.names()) == {"a", "link", "b"}


def test_equal_content_elsewhere_shares_tensors(store: AdapterStore, tmp_path: Path) -> None:
    first = load(store, write_adapter(tmp_path / "a"))
    second = load(store, write_adapter(tmp_path / "b"))
    assert store.num_reads == 2
    assert second.adapter is first.adapter and second.fingerprint == first.fingerprint
    assert (second.name, second.path) == ("b", str(tmp_path / "b"))


def test_changed_files_are_a_new_version_and_users_keep_the_old(
    store: AdapterStore, tmp_path: Path
) -> None:
    old = load(store, write_adapter(tmp_path / "a", seed=1))
    store.acquire(old)
    before = old.adapter.modules["model.layers.0.self_attn.q_proj"].a.clone()
    new = load(store, write_adapter(tmp_path / "a", seed=2))
    assert new.fingerprint != old.fingerprint and store.get("a") == new
    assert store.by_fingerprint(old.fingerprint) == old
    assert torch.equal(old.adapter.modules["model.layers.0.self_attn.q_proj"].a, before)
    store.release(old)
    with pytest.raises(UnknownAdapterError):
        store.by_fingerprint(old.fingerprint)


def test_a_changed_config_alone_is_a_new_version(store: AdapterStore, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    old = load(store, path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 32}))
    new = load(store, path)
    assert new.fingerprint != old.fingerprint
    q = "model.layers.0.self_attn.q_proj"
    assert new.adapter.modules[q].scale == 4 * old.adapter.modules[q].scale


def test_the_base_is_part_of_the_identity(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    found = {load(make_store(base_fingerprint=base), path).fingerprint for base in "xyx"}
    assert len(found) == 2


def test_the_least_recently_used_leaves_and_comes_back(tmp_path: Path) -> None:
    store = make_store(max_cpu_loras=2)
    paths = [write_adapter(tmp_path / name, seed=i) for i, name in enumerate("abc")]
    a, b = load(store, paths[0]), load(store, paths[1])
    store.get("a")
    load(store, paths[2])
    assert store.by_fingerprint(a.fingerprint) == a
    with pytest.raises(UnknownAdapterError):
        store.by_fingerprint(b.fingerprint)
    assert set(store.names()) == {"a", "b", "c"}
    assert store.get("b").fingerprint == b.fingerprint and store.num_reads == 4
    store.check_integrity()


def test_versions_in_use_or_pinned_stay(tmp_path: Path) -> None:
    store = make_store(max_cpu_loras=1)
    paths = [write_adapter(tmp_path / name, seed=i) for i, name in enumerate("abcd")]
    used = load(store, paths[0])
    store.acquire(used)
    pinned = load(store, paths[1])
    store.pin("b")
    for path in paths[2:]:
        load(store, path)
    assert store.by_fingerprint(used.fingerprint) and store.by_fingerprint(pinned.fingerprint)
    store.check_integrity()
    store.release(used)
    with pytest.raises(UnknownAdapterError):
        store.by_fingerprint(used.fingerprint)
    store.remove("b")
    assert store.num_bytes == 0
    store.check_integrity()


def test_a_version_that_left_before_acquire_comes_back(tmp_path: Path) -> None:
    store = make_store(max_cpu_loras=1)
    first = load(store, write_adapter(tmp_path / "a", seed=1))
    load(store, write_adapter(tmp_path / "b", seed=2))
    store.acquire(first)
    assert store.by_fingerprint(first.fingerprint) == first and store.num_reads == 2
    store.release(first)
    store.check_integrity()


def test_remove_forgets_the_name_now_and_the_memory_after_the_last_user(
    store: AdapterStore, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a")
    version = load(store, path)
    tensor = weakref.ref(version.adapter.modules["model.layers.0.self_attn.q_proj"].a)
    store.acquire(version)
    store.acquire(version)
    store.remove("a")
    with pytest.raises(UnknownAdapterError, match="loaded: none"):
        store.get("a")
    with pytest.raises(UnknownAdapterError):
        store.remove("a")
    store.release(version)
    assert store.num_users(version) == 1 and store.num_bytes > 0
    store.release(version)
    assert store.num_users(version) == 0 and store.num_bytes == 0
    del version
    assert tensor() is None
    load(store, path)
    assert store.num_reads == 2


def test_remove_keeps_content_that_another_name_shares(store: AdapterStore, tmp_path: Path) -> None:
    version = load(store, write_adapter(tmp_path / "a"))
    load(store, tmp_path / "a", "b")
    store.remove("a")
    assert store.get("b").adapter is version.adapter and store.num_reads == 1


def test_a_bad_adapter_changes_nothing(store: AdapterStore, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    version = load(store, path)
    (path / "adapter_config.json").write_text("{")
    for _ in range(2):
        with pytest.raises(AdapterError, match="JSON"):
            load(store, path)
    assert store.get("a") == version
    with pytest.raises(AdapterError, match="does not exist"):
        load(store, tmp_path / "nowhere")
    with pytest.raises(AdapterError):
        load(store, Path("a\0b"), "zero")
    assert set(store.names()) == {"a"}


def test_files_that_change_while_they_are_read_are_read_again(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    seeds = iter([2])

    def read_and_change(path: Path, *args: object, **options: object) -> Adapter:
        adapter = read_adapter(path, *args, **options)  # type: ignore[arg-type]
        for seed in seeds:
            write_adapter(tmp_path / "a", seed=seed)
        return adapter

    monkeypatch.setattr(store_module, "read_adapter", read_and_change)
    version = load(store, path)
    assert store.num_reads == 2
    assert version.fingerprint == load(make_store(), path).fingerprint
    seeds = iter(range(3, 100))
    shutil.copytree(path, tmp_path / "b")
    monkeypatch.setattr(store_module, "read_adapter", read_and_touch)
    with pytest.raises(AdapterError, match="keep changing"):
        load(store, tmp_path / "b")


def read_slowly(path: str, *args: object, **options: object) -> Adapter:
    time.sleep(0.1)  # so that the other threads come meanwhile
    return read_adapter(path, *args, **options)  # type: ignore[arg-type]


def read_and_touch(path: str, *args: object, **options: object) -> Adapter:
    adapter = read_adapter(path, *args, **options)  # type: ignore[arg-type]
    file = Path(path) / "adapter_config.json"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    return adapter


def test_threads_that_load_the_same_adapter_read_it_once(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "a")
    monkeypatch.setattr(store_module, "read_adapter", read_slowly)
    barrier = Barrier(8)

    def run(index: int) -> AdapterVersion:
        barrier.wait()
        version = load(store, path, f"name {index}")
        store.acquire(version)
        return version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(run, range(8)))
    assert store.num_reads == 1
    assert len({id(version.adapter) for version in versions}) == 1
    assert store.num_users(versions[0]) == 8


def test_close_frees_and_refuses(tmp_path: Path) -> None:
    store = make_store()
    path = write_adapter(tmp_path / "a")
    version = load(store, path)
    store.acquire(version)
    store.pin("a")
    store.close()
    store.close()
    store.release(version)
    assert store.num_bytes == 0 and store.names() == {}
    with pytest.raises(ConfigError, match="closed"):
        load(store, path)
    store.check_integrity()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), seed=seed, v_rank=2) for seed in range(4)]


ACTIONS = st.tuples(
    st.sampled_from(["load", "get", "acquire", "release", "remove", "pin"]),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(actions=st.lists(ACTIONS, max_size=25), max_cpu_loras=st.integers(1, 3))
def test_any_order_of_calls_keeps_names_right_and_users_safe(
    folders: list[Path], actions: list[tuple[str, int, int]], max_cpu_loras: int
) -> None:
    store = make_store(max_cpu_loras)
    names: dict[str, str] = {}  # what each name must stand for
    held: list[AdapterVersion] = []
    for action, i, j in actions:
        name = f"n{i}"
        if action == "load":
            names[name] = load(store, folders[j], name).fingerprint
        elif action == "release":
            if held:
                store.release(held.pop(j % len(held)))
        elif name not in names:
            with pytest.raises(UnknownAdapterError):
                store.get(name)
        elif action == "remove":
            store.remove(name)
            del names[name]
        elif action == "pin":
            store.pin(name)
        else:
            version = store.get(name)
            assert (version.name, version.fingerprint) == (name, names[name])
            if action == "acquire":
                store.acquire(version)
                held.append(version)
        assert store.names() == names
        assert all(store.by_fingerprint(version.fingerprint) for version in held)
        store.check_integrity()
