"""Adapters in the engine: many more than slots, renamed, reloaded, removed in use, loaded beside
running streams. Whatever happens, a request equals itself run alone, and none is answered by the
base in silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest
from broken_adapters import BROKEN_REASONS, edit_config, make_broken
from engine.helpers import alone, facts, greedy, ids, seeded, tokens
from tiny_models import SEVEN, make_adapter, make_signature_adapter

from truegraft import LLM, LoRARequest
from truegraft.adapters.store import AdapterVersion
from truegraft.errors import AdapterError, ConfigError, UnknownAdapterError
from truegraft.generation import PromptTokens

OPTIONS = {
    "enable_lora": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}


@pytest.fixture
def one_slot(llama: Path) -> Iterator[LLM]:
    with LLM(llama, max_loras=1, **OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm
        llm.engine.check_integrity()


def request(name: str, path: Path) -> LoRARequest:
    return LoRARequest(name, lora_path=str(path))


# ------------------------------------------------------------------ many adapters in a batch


@pytest.mark.parametrize("params", [greedy(10), seeded(10)], ids=["greedy", "seeded"])
def test_more_adapters_than_slots_and_the_base_in_one_call(
    llm: LLM, adapters: dict[str, LoRARequest], params: object
) -> None:
    """Two slots, four adapters, base rows between them, prompts longer than a step."""
    loras = [None, *adapters.values(), None, *adapters.values()]
    prompts = [ids(1, 100 + n) for n in range(len(loras))]
    evictions = llm.engine.scheduler.slots.num_evictions
    outputs = llm.generate(prompts, params, loras)  # type: ignore[arg-type]
    assert llm.engine.scheduler.slots.num_evictions > evictions
    assert max(output.num_chunks for output in outputs) > 1
    llm.engine.scheduler.blocks.clear_cache()
    assert [facts(o) for o in outputs] == alone(llm, prompts, params, loras)  # type: ignore[arg-type]
    answers = {tuple(tokens(o)) for o in outputs[:5]}
    assert len(answers) == 5, "each adapter answers in its own way"


def test_base_rows_equal_an_engine_without_adapters(
    llm: LLM, llama: Path, adapters: dict[str, LoRARequest]
) -> None:
    prompts = [ids(n, 30) for n in range(4)]
    loras = [None, adapters["r17-all"], None, adapters["r8-seven"]]
    mixed = [facts(o) for o in llm.generate(prompts, greedy(), loras)]
    with LLM(llama, max_model_len=256, max_num_seqs=8) as plain:
        base = [facts(o) for o in plain.generate(prompts, greedy())]
    assert [mixed[0], mixed[2]] == [base[0], base[2]]
    assert mixed[1] != base[1] and mixed[3] != base[3]


def test_no_adapter_leaks_into_a_neighbour(llm: LLM, llama: Path, tmp_path: Path) -> None:
    """Each signature adapter answers one token only; one other token would be a leak."""
    loras = [
        request(f"t{token}", make_signature_adapter(tmp_path / f"{token}", llama, token))
        for token in (65, 66, 67)
    ]
    outputs = llm.generate([ids(1, 20)] * 6, greedy(15), loras * 2)
    assert [set(tokens(o)) for o in outputs] == [{65}, {66}, {67}] * 2


# ------------------------------------------------------------------ names and versions


def test_an_unknown_name_is_an_error_and_never_the_base(llm: LLM) -> None:
    with pytest.raises(UnknownAdapterError, match="'nobody'"):
        llm.remove_lora("nobody")
    with pytest.raises(UnknownAdapterError, match="'nobody'"):
        llm.pin_lora("nobody")
    with pytest.raises(AdapterError, match="nowhere"):
        llm.generate([ids(1, 5)], greedy(), LoRARequest("a", lora_path="/nowhere"))


def test_add_list_and_remove(one_slot: LLM, adapters: dict[str, LoRARequest]) -> None:
    assert one_slot.list_loras() == {}
    assert one_slot.add_lora(adapters["r4-q"]) and one_slot.add_lora(adapters["r3-v"])
    names = one_slot.list_loras()
    assert sorted(names) == ["r3-v", "r4-q"] and len(set(names.values())) == 2
    assert one_slot.remove_lora("r4-q")
    assert list(one_slot.list_loras()) == ["r3-v"]
    with pytest.raises(UnknownAdapterError, match="loaded: r3-v"):
        one_slot.remove_lora("r4-q")


def test_identity_is_content(one_slot: LLM, adapters: dict[str, LoRARequest]) -> None:
    """Two names of one content share slot, cache and file; numbers mean nothing."""
    known = adapters["r8-seven"]
    alias = LoRARequest("another name", 17, known.lora_path)
    prompt = ids(1, 130)
    first = one_slot.generate(prompt, greedy(), known)[0]
    second = one_slot.generate(prompt, greedy(), alias)[0]
    assert facts(first) == facts(second)
    assert second.num_cached_tokens == 128
    assert second.lora_request == alias
    assert len(set(one_slot.list_loras().values())) == 1
    assert one_slot.engine.scheduler.slots.num_loads == 1


def test_a_name_with_other_weights_is_another_version(
    one_slot: LLM, llama: Path, tmp_path: Path
) -> None:
    prompt = ids(2, 130)
    path = make_adapter(tmp_path / "a", llama, seed=1)
    old = one_slot.generate(prompt, greedy(), request("a", path))[0]
    assert one_slot.generate(prompt, greedy(), request("a", path))[0].num_cached_tokens == 128
    shutil.rmtree(path)
    make_adapter(path, llama, seed=2)
    new = one_slot.generate(prompt, greedy(), request("a", path))[0]
    assert new.num_cached_tokens == 0
    assert new.adapter_fingerprint != old.adapter_fingerprint
    with LLM(llama, max_loras=1, **OPTIONS) as cold:  # type: ignore[arg-type]
        assert facts(cold.generate(prompt, greedy(), request("a", path))[0]) == facts(new)
    assert facts(new) != facts(old)


def test_the_scale_is_content_too(one_slot: LLM, llama: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", llama, alpha=16)
    old = one_slot.generate(ids(1, 70), greedy(), request("a", path))[0]
    edit_config(path, lora_alpha=4)
    new = one_slot.generate(ids(1, 70), greedy(), request("a", path))[0]
    assert new.num_cached_tokens == 0 and facts(new) != facts(old)


@pytest.mark.parametrize("params", [greedy(), greedy(4, prompt_logprobs=1)], ids=["", "prompt"])
def test_a_slot_shows_no_trace_of_its_last_adapter(
    one_slot: LLM, llama: Path, tmp_path: Path, params: object
) -> None:
    """Rank 16 on every module, then rank 4 on q alone, in the only slot there is."""
    everywhere = [*SEVEN, "embed_tokens", "lm_head"]
    large = request("large", make_adapter(tmp_path / "l", llama, rank=16, targets=everywhere))
    small = request(
        "small", make_adapter(tmp_path / "s", llama, rank=4, targets=["q_proj"], scale_b=1.0)
    )
    prompt = ids(3, 40)
    one_slot.generate(prompt, greedy(), large)
    after = one_slot.generate(prompt, params, small)[0]  # type: ignore[arg-type]
    assert one_slot.engine.scheduler.slots.num_evictions == 1
    with LLM(llama, max_loras=1, **OPTIONS) as cold:  # type: ignore[arg-type]
        expected = cold.generate(prompt, params, small)[0]  # type: ignore[arg-type]
        base = cold.generate(prompt, params)[0]  # type: ignore[arg-type]
    assert facts(after) == facts(expected) != facts(base)
    assert after.prompt_logprobs == expected.prompt_logprobs


# ------------------------------------------------------------------ limits


def test_a_rank_above_the_limit_is_refused(llama: Path, adapters: dict[str, LoRARequest]) -> None:
    with LLM(llama, max_lora_rank=8, **OPTIONS) as llm:  # type: ignore[arg-type]
        with pytest.raises(AdapterError, match=r"17.*max_lora_rank"):
            llm.add_lora(adapters["r17-all"])
        assert llm.list_loras() == {}
        assert llm.add_lora(adapters["r8-seven"])


def test_adapters_are_off_unless_asked_for(llama: Path, adapters: dict[str, LoRARequest]) -> None:
    with LLM(llama, max_model_len=128, max_num_seqs=2) as llm:
        assert llm.list_loras() == {}
        for use in (
            lambda: llm.generate(ids(1, 5), greedy(), adapters["r4-q"]),
            lambda: llm.add_lora(adapters["r4-q"]),
            lambda: llm.remove_lora("r4-q"),
            lambda: llm.pin_lora("r4-q"),
        ):
            with pytest.raises(ConfigError, match="enable_lora=True"):
                use()
        assert len(tokens(llm.generate(ids(1, 5), greedy())[0])) == 12


@pytest.mark.parametrize("broken", BROKEN_REASONS)
def test_a_broken_adapter_is_refused_before_anything_runs(
    llm: LLM, adapters: dict[str, LoRARequest], tmp_path: Path, broken: str
) -> None:
    good = adapters["r8-seven"]
    path = make_broken(Path(good.lora_path), tmp_path)[broken]
    expected = facts(llm.generate(ids(1, 9), greedy(), good)[0])
    steps = llm.engine.scheduler.stats.num_steps
    with pytest.raises(AdapterError, match=BROKEN_REASONS[broken]):
        llm.generate([ids(1, 9)] * 2, greedy(), [good, request("broken", path)])
    assert llm.engine.scheduler.stats.num_steps == steps
    assert "broken" not in llm.list_loras()
    assert facts(llm.generate(ids(1, 9), greedy(), good)[0]) == expected


# ------------------------------------------------------------------ pins


def test_a_pinned_adapter_is_never_evicted(llama: Path, adapters: dict[str, LoRARequest]) -> None:
    pinned, *others = adapters.values()
    with LLM(llama, max_loras=2, **OPTIONS) as llm:  # type: ignore[arg-type]
        llm.add_lora(pinned)
        assert llm.pin_lora(pinned.lora_name)
        llm.generate([ids(1, 9)] * 3, greedy(), others)
        slots, fingerprint = llm.engine.scheduler.slots, llm.list_loras()[pinned.lora_name]
        assert slots.num_loads == 4, "the others, one after another, in the other slot"
        assert fingerprint in slots.residents
        llm.generate(ids(1, 9), greedy(), pinned)
        assert slots.num_loads == 4
        llm.remove_lora(pinned.lora_name)
        assert fingerprint not in slots.residents
        llm.engine.check_integrity()


def test_when_every_slot_is_pinned_another_adapter_is_refused_not_forgotten(
    one_slot: LLM, adapters: dict[str, LoRARequest]
) -> None:
    """It could wait for ever."""
    one_slot.add_lora(adapters["r4-q"])
    try:
        one_slot.pin_lora("r4-q")
    except ConfigError as error:
        assert "max_loras" in str(error)  # the pin may be refused, or what comes after it
        return
    engine = one_slot.engine
    version = engine.load_adapter(adapters["r3-v"]).result()
    with pytest.raises((AdapterError, ConfigError), match="pin"):
        engine.add("waits", PromptTokens(ids(1, 9)), greedy(), version)
    assert not engine.has_work


# ------------------------------------------------------------------ while streams run


def run_to_end(llm: LLM) -> None:
    for _ in range(500):
        if not llm.engine.has_work:
            return
        llm.engine.step()
    raise AssertionError("a request never ends")


def test_an_adapter_removed_in_use_stays_until_its_users_end(
    one_slot: LLM, adapters: dict[str, LoRARequest]
) -> None:
    engine, lora = one_slot.engine, adapters["r8-seven"]
    expected = facts(one_slot.generate(ids(1, 9), greedy(20), lora)[0])
    version = engine.load_adapter(lora).result()
    store = engine.adapters
    assert store is not None and store.num_bytes > 0
    generation = engine.add("a", PromptTokens(ids(1, 9), lora_request=lora), greedy(20), version)
    for _ in range(5):
        engine.step()
    one_slot.remove_lora(lora.lora_name)
    assert one_slot.list_loras() == {}
    engine.check_integrity()
    run_to_end(one_slot)
    assert facts(generation.output()) == expected
    assert store.num_bytes == 0, "memory goes with the last user"
    again = one_slot.generate(ids(1, 9), greedy(20), lora)[0]
    assert facts(again) == expected


def test_a_reload_while_in_use_serves_both_versions(llm: LLM, llama: Path, tmp_path: Path) -> None:
    engine = llm.engine
    path = make_adapter(tmp_path / "a", llama, seed=1)
    other = make_adapter(tmp_path / "b", llama, seed=2)
    expected = alone(
        llm, [ids(1, 9)] * 2, greedy(20), [request("one", path), request("two", other)]
    )
    old = engine.load_adapter(request("a", path)).result()
    first = engine.add("first", PromptTokens(ids(1, 9)), greedy(20), old)
    for _ in range(5):
        engine.step()
    shutil.copytree(other, path, dirs_exist_ok=True)
    new = engine.load_adapter(request("a", path)).result()
    assert new.fingerprint != old.fingerprint
    second = engine.add("second", PromptTokens(ids(1, 9)), greedy(20), new)
    run_to_end(llm)
    assert [facts(first.output()), facts(second.output())] == expected


def test_streams_go_on_while_adapters_come_and_go(
    llm: LLM, llama: Path, adapters: dict[str, LoRARequest], tmp_path: Path
) -> None:
    engine = llm.engine
    loras = [
        request(f"t{token}", make_signature_adapter(tmp_path / f"{token}", llama, token))
        for token in (70, 71)
    ]
    streams = [
        engine.add(
            lora.lora_name, PromptTokens(ids(1, 9)), greedy(40), engine.load_adapter(lora).result()
        )
        for lora in loras
    ]
    for count, lora in enumerate([*adapters.values()] * 3):
        llm.add_lora(lora)
        engine.step()
        llm.remove_lora(lora.lora_name)
        assert all(len(stream.samples[0].token_ids) == count + 1 for stream in streams)
    run_to_end(llm)
    assert [set(tokens(stream.output())) for stream in streams] == [{70}, {71}]


def test_a_request_may_wait_for_its_adapter_while_others_run(
    llm: LLM, adapters: dict[str, LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lora = llm.engine, adapters["r17-all"]
    expected = alone(llm, [ids(1, 9), ids(2, 9)], greedy(20), [None, lora])
    llm.remove_lora(lora.lora_name)
    store = engine.adapters
    assert store is not None
    load, let_go = store.load, Event()

    def slow(asked: LoRARequest) -> AdapterVersion:
        let_go.wait(timeout=30)
        return load(asked)

    with monkeypatch.context() as patch:
        patch.setattr(store, "load", slow)
        future = engine.load_adapter(lora)
        waiting = engine.add("waits", PromptTokens(ids(2, 9)), greedy(20), future)
        running = engine.add("runs", PromptTokens(ids(1, 9)), greedy(20))
        for _ in range(10):
            engine.step()
        assert len(running.samples[0].token_ids) == 10 and not waiting.samples[0].token_ids
        let_go.set()
        future.result()
    run_to_end(llm)
    assert [facts(running.output()), facts(waiting.output())] == expected
    assert waiting.output().adapter_fingerprint == future.result().fingerprint


def test_a_bad_adapter_fails_its_own_request_alone(
    llm: LLM, adapters: dict[str, LoRARequest], tmp_path: Path
) -> None:
    engine = llm.engine
    expected = alone(llm, [ids(1, 9)], greedy(), [None])[0]
    bad = make_broken(Path(adapters["r8-seven"].lora_path), tmp_path)["nan"]
    future = engine.load_adapter(request("bad", bad))
    failed = engine.add("fails", PromptTokens(ids(2, 9)), greedy(n=2), future)
    good = engine.add("good", PromptTokens(ids(1, 9)), greedy())
    assert isinstance(future.exception(), AdapterError)
    assert failed in engine.step()
    assert failed.finished and isinstance(failed.error, AdapterError)
    assert [sample.finish_reason for sample in failed.output().outputs] == ["error"] * 2
    run_to_end(llm)
    assert facts(good.output()) == expected and good.error is None


def test_a_request_aborted_while_its_adapter_loads(
    llm: LLM, adapters: dict[str, LoRARequest]
) -> None:
    future: Future[AdapterVersion] = Future()
    generation = llm.engine.add("a", PromptTokens(ids(1, 9)), greedy(), future)
    llm.engine.step()
    llm.engine.abort("a")
    assert generation.finished and not llm.engine.has_work
    future.set_result(llm.engine.load_adapter(adapters["r4-q"]).result())
    llm.engine.step()
    assert generation.output().outputs[0].finish_reason == "abort"
    store = llm.engine.adapters
    assert store is not None and store.num_users(future.result()) == 0


def test_users_are_counted_down_whatever_ends_them(
    llm: LLM, adapters: dict[str, LoRARequest]
) -> None:
    engine, store = llm.engine, llm.engine.adapters
    assert store is not None
    version = engine.load_adapter(adapters["r3-v"]).result()
    engine.add("ends", PromptTokens(ids(1, 9)), greedy(3, n=3), version)
    engine.add("is aborted", PromptTokens(ids(1, 9)), greedy(50, n=2), version)
    assert store.num_users(version) == 2
    for _ in range(10):
        engine.step()
    assert store.num_users(version) == 1
    engine.abort("is aborted")
    assert store.num_users(version) == 0
