"""The offline API as its users know it: prompts in many forms, ends, reports, seeds, opening and
closing."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.helpers import alone, facts, greedy, ids, seeded, tokens
from tiny_models import EOS, VOCAB_SIZE

from truegraft import LLM, LoRARequest, RequestOutput, SamplingParams
from truegraft.core.plan import StepPlan, StepResult
from truegraft.errors import ConfigError, RequestError
from truegraft.generation import PromptTokens
from truegraft.llm import mix_seed

GREETING = "hello"
TEXT = "the quick brown fox"
ASCII = list(range(32, 127))  # every answer of these tokens is text


def readable(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, allowed_token_ids=ASCII, **fields)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


# ------------------------------------------------------------------ prompts


def test_a_prompt_may_be_given_in_any_of_its_forms(llm: LLM) -> None:
    token_ids = list(TEXT.encode())
    forms: list[Any] = [
        TEXT,
        {"prompt": TEXT},
        {"prompt_token_ids": token_ids},
        token_ids,
        [TEXT],
        [token_ids],
        [{"prompt_token_ids": token_ids}],
        (TEXT,),
    ]
    answers = [llm.generate(form, greedy()) for form in forms]
    assert all(len(answer) == 1 for answer in answers)
    assert all(answer[0].prompt_token_ids == token_ids for answer in answers)
    assert len({tuple(tokens(answer[0])) for answer in answers}) == 1
    assert [answer[0].prompt for answer in answers[:4]] == [TEXT, TEXT, None, None]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [ids(n, 5 + 40 * (n % 3)) for n in range(11)]
    lengths = [1 + 7 * (n % 4) for n in range(11)]
    params = [greedy(length) for length in lengths]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens(output)) for output in outputs] == lengths
    assert len({output.request_id for output in outputs}) == 11
    assert all(output.finished and output.outputs[0].finished() for output in outputs)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], greedy()) == []


def test_each_prompt_has_its_own_parameters_and_adapter(
    llm: LLM, adapters: dict[str, LoRARequest]
) -> None:
    prompts = [ids(1, 9)] * 4
    params = [greedy(5), seeded(6), greedy(7), seeded(8)]
    loras = [None, adapters["r4-q"], adapters["r17-all"], None]
    outputs = llm.generate(prompts, params, loras)
    assert [len(tokens(o)) for o in outputs] == [5, 6, 7, 8]
    assert [o.lora_request for o in outputs] == loras
    assert [o.outputs[0].lora_request for o in outputs] == loras
    fingerprints = llm.list_loras()
    assert [o.adapter_fingerprint for o in outputs] == [
        lora and fingerprints[lora.lora_name] for lora in loras
    ]
    for output, param, lora in zip(outputs, params, loras, strict=True):
        assert facts(output) == facts(llm.generate(prompts[:1], param, lora)[0])


@pytest.mark.parametrize("name", ["sampling_params", "lora_request"])
def test_a_list_of_another_length_is_an_error(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} has 3 entries for 2 prompts"):
        generate: Any = llm.generate
        generate([TEXT] * 2, **{name: [None] * 3})


def test_chat_renders_the_template_and_adds_no_second_start(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, greedy())[0]
    assert bytes(one.prompt_token_ids).decode() == "user: hi\nassistant:"
    assert tokens(one) == tokens(llm.generate("user: hi\nassistant:", greedy())[0])
    many = llm.chat([conversation, conversation], greedy())
    assert [tokens(output) for output in many] == [tokens(one)] * 2
    bare = llm.chat(conversation, greedy(), add_generation_prompt=False)[0]
    assert bytes(bare.prompt_token_ids).decode() == "user: hi\n"


def test_chat_takes_another_template(llama: Path) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    with LLM(llama, chat_template=template, max_model_len=128, max_num_seqs=2) as llm:
        output = llm.chat([{"role": "user", "content": "a"}], greedy(1))[0]
    assert bytes(output.prompt_token_ids).decode() == "<a>"


# ------------------------------------------------------------------ how an answer ends


def test_text_is_the_tokens_decoded(llm: LLM) -> None:
    output = llm.generate(TEXT, readable())[0]
    assert text_of(output) == bytes(tokens(output)).decode()
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(llm: LLM, include: bool) -> None:
    whole = text_of(llm.generate(TEXT, readable(20))[0])
    stop = whole[7:9]
    at = whole.index(stop)
    params = readable(20, stop=["never seen", stop], include_stop_str_in_output=include)
    sample = llm.generate(TEXT, params)[0].outputs[0]
    assert sample.text == whole[: at + 2 * include]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert len(sample.token_ids) == at + 2 == len(sample.logprobs or ())


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_among_the_ids_but_not_in_the_text(llm: LLM, include: bool) -> None:
    whole = tokens(llm.generate(TEXT, readable(20))[0])
    stop = whole[9]
    end = whole.index(stop) + 1
    params = readable(20, stop_token_ids=[stop], include_stop_str_in_output=include)
    sample = llm.generate(TEXT, params)[0].outputs[0]
    assert sample.token_ids == whole[:end]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == bytes(whole[: end - (not include)]).decode()


def with_eos(bias: float = 100.0, **fields: Any) -> SamplingParams:
    """EOS is the likeliest token wherever it is allowed."""
    return greedy(8, logit_bias={EOS: bias}, **{"ignore_eos": False} | fields)


def test_eos_ends_an_answer_and_ignore_eos_does_not(llm: LLM) -> None:
    sample = llm.generate(TEXT, with_eos())[0].outputs[0]
    assert (sample.token_ids, sample.text) == ([EOS], "")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    sample = llm.generate(TEXT, with_eos(ignore_eos=True))[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason) == ([EOS] * 8, "length")


def test_special_tokens_are_shown_when_asked(llm: LLM) -> None:
    for skip in (True, False):
        params = with_eos(ignore_eos=True, skip_special_tokens=skip)
        assert text_of(llm.generate(TEXT, params)[0]) == ("" if skip else "<|end|>" * 8)


@pytest.mark.parametrize("min_tokens", [1, 5, 8])
def test_min_tokens_holds_off_eos_and_stop_tokens(llm: LLM, min_tokens: int) -> None:
    plain = tokens(llm.generate(TEXT, greedy(8))[0])
    sample = llm.generate(TEXT, with_eos(min_tokens=min_tokens))[0].outputs[0]
    assert len(sample.token_ids) == min(min_tokens + 1, 8)
    assert sample.token_ids[:min_tokens] == plain[:min_tokens]
    assert EOS not in sample.token_ids[:min_tokens]


def test_min_tokens_holds_off_stop_strings(llm: LLM) -> None:
    whole = text_of(llm.generate(TEXT, readable(20))[0])
    params = readable(20, stop=[whole[2]], min_tokens=10)
    sample = llm.generate(TEXT, params)[0].outputs[0]
    assert len(sample.token_ids) > 10
    assert sample.text.startswith(whole[:10])


def test_without_max_tokens_the_context_is_the_limit(llm: LLM) -> None:
    prompt = ids(1, 500)
    for limit in (None, 1000):
        sample = llm.generate(prompt, replace(greedy(), max_tokens=limit))[0].outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (12, "length")


def test_max_tokens_of_one(llm: LLM) -> None:
    assert len(tokens(llm.generate(TEXT, greedy(1))[0])) == 1


def test_without_detokenizing_there_are_ids_only(llm: LLM) -> None:
    plain = llm.generate(TEXT, greedy(logprobs=2))[0]
    output = llm.generate(TEXT, greedy(detokenize=False, logprobs=2))[0]
    assert (text_of(output), tokens(output)) == ("", tokens(plain))
    reported = output.outputs[0].logprobs
    assert reported and all(e.decoded_token is None for at in reported for e in at.values())


# ------------------------------------------------------------------ what is reported


def test_logprobs_hold_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    sample = llm.generate(TEXT, seeded(logprobs=3))[0].outputs[0]
    everything = llm.generate(TEXT, seeded(logprobs=VOCAB_SIZE))[0].outputs[0]
    assert sample.token_ids == everything.token_ids
    assert sample.logprobs is not None and everything.logprobs is not None
    for token, short, whole in zip(
        sample.token_ids, sample.logprobs, everything.logprobs, strict=True
    ):
        order = sorted(whole, key=lambda t: (-whole[t].logprob, t))
        assert list(short) == [token, *(t for t in order[:3] if t != token)]
        assert len(short) in (3, 4)
        assert whole[token].rank == order.index(token) + 1
        assert short[token].decoded_token == llm.get_tokenizer().token(token)
        total = torch.tensor([entry.logprob for entry in whole.values()]).logsumexp(0)
        assert abs(float(total)) < 1e-4
    chosen = [at[t].logprob for t, at in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize("top", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 63, 150])
def test_prompt_logprobs_have_one_entry_a_token(llm: LLM, top: int, length: int) -> None:
    prompt = ids(4, length)
    output = llm.generate(prompt, greedy(2, prompt_logprobs=top))[0]
    reported = output.prompt_logprobs
    assert reported is not None and len(reported) == length and reported[0] is None
    for token, at in zip(prompt[1:], reported[1:], strict=True):
        assert at is not None and next(iter(at)) == token
        assert top <= len(at) <= top + 1
    assert output.num_cached_tokens == 0


def test_prompt_logprobs_equal_the_logprobs_of_saying_it(llm: LLM) -> None:
    prompt = ids(4, 20)
    said = llm.generate(prompt, greedy(30))[0]
    whole = [*prompt, *tokens(said)]
    reported = llm.generate(whole, greedy(1, prompt_logprobs=0))[0].prompt_logprobs
    assert reported is not None
    again = [at[token].logprob for token, at in zip(whole[20:], reported[20:], strict=True) if at]
    assert again == facts(said)[0][1], "bit for bit"


def test_nothing_is_reported_that_was_not_asked_for(llm: LLM) -> None:
    output = llm.generate(TEXT, greedy(logprobs=None))[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_logprobs_are_raw_whatever_the_sampling_is(llm: LLM) -> None:
    plain = llm.generate(TEXT, greedy(1, logprobs=VOCAB_SIZE))[0].outputs[0]
    odd = seeded(1, logprobs=VOCAB_SIZE, logit_bias={7: 50.0}, repetition_penalty=1.5)
    other = llm.generate(TEXT, odd)[0].outputs[0]
    assert plain.logprobs is not None and other.logprobs is not None
    assert plain.logprobs[0] == other.logprobs[0]


def test_cached_tokens_are_counted_in_full_blocks(llm: LLM) -> None:
    prompt = ids(6, 200)
    assert llm.generate(prompt, greedy())[0].num_cached_tokens == 0
    warm = llm.generate([prompt, prompt[:130], ids(7, 200)], greedy())
    assert [output.num_cached_tokens for output in warm] == [192, 128, 0]


def test_chunks_are_counted(llm: LLM) -> None:
    outputs = llm.generate([ids(1, 200)], greedy()) + llm.generate([ids(2, 64)], greedy())
    assert [output.num_chunks for output in outputs] == [4, 1]


# ------------------------------------------------------------------ seeds and samples


def test_samples_differ_and_replay(llm: LLM) -> None:
    output = llm.generate(TEXT, seeded(n=4))[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert facts(llm.generate(TEXT, seeded(n=4))[0]) == facts(output)
    assert facts(llm.generate(TEXT, seeded(n=2))[0]) == facts(output)[:2]
    assert facts(llm.generate(TEXT, seeded(n=1))[0]) == facts(output)[:1]


def test_another_seed_gives_another_answer(llm: LLM) -> None:
    answers = {tuple(tokens(llm.generate(TEXT, seeded(seed=s))[0])) for s in range(5)}
    assert len(answers) == 5


def test_a_seed_that_nobody_gave_is_in_the_result_and_replays_it(llm: LLM) -> None:
    params = replace(seeded(n=2), seed=None)
    outputs = llm.generate([TEXT, TEXT], params)
    seeds = [output.outputs[0].seed for output in outputs]
    assert seeds == [mix_seed(7, 0), mix_seed(7, 1)], "from the engine's seed and the index"
    assert facts(outputs[0]) != facts(outputs[1])
    for output, seed in zip(outputs, seeds, strict=True):
        assert facts(llm.generate(TEXT, replace(params, seed=seed))[0]) == facts(output)
    assert [facts(o) for o in llm.generate([TEXT, TEXT], params)] == [facts(o) for o in outputs]


def test_seeds_of_a_call_do_not_collide() -> None:
    assert len({mix_seed(seed, index) for seed in range(20) for index in range(200)}) == 4000
    assert all(0 <= mix_seed(2**64 - 1, index) < 2**64 for index in range(9))


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1])
def test_any_seed_of_64_bits_replays(llm: LLM, seed: int) -> None:
    output = llm.generate(TEXT, seeded(seed=seed))[0]
    reported = output.outputs[0].seed
    assert reported == seed % 2**64
    assert facts(llm.generate(TEXT, seeded(seed=reported))[0]) == facts(output)


def test_a_greedy_answer_has_no_seed(llm: LLM) -> None:
    outputs = llm.generate(TEXT, greedy(n=2))[0].outputs
    assert [sample.seed for sample in outputs] == [None, None]
    assert outputs[0].token_ids == outputs[1].token_ids


# ------------------------------------------------------------------ what the model's folder says


@pytest.fixture
def opinionated(llama: Path, tmp_path: Path) -> Path:
    """The same model with defaults and two EOS ids in its generation_config.json."""
    path = shutil.copytree(llama, tmp_path / "model")
    defaults = {"eos_token_id": [EOS, 65], "do_sample": True, "temperature": 0.5, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def test_generation_config_gives_defaults_and_every_eos(opinionated: Path) -> None:
    with LLM(opinionated, max_model_len=128, max_num_seqs=2) as llm:
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.top_k, default.max_tokens) == (0.5, 7, 16)
        assert facts(llm.generate(TEXT)[0]) == facts(llm.generate(TEXT, default)[0])
        for eos in (EOS, 65):
            params = greedy(5, ignore_eos=False, logit_bias={eos: 100.0})
            sample = llm.generate(TEXT, params)[0].outputs[0]
            assert (sample.token_ids, sample.finish_reason) == ([eos], "stop")
            longer = llm.generate(TEXT, replace(params, min_tokens=3))[0].outputs[0]
            assert len(longer.token_ids) == 4 and {EOS, 65}.isdisjoint(longer.token_ids[:3])


def test_without_parameters_the_defaults_of_the_model_are_used(llm: LLM) -> None:
    output = llm.generate(TEXT)[0]
    assert len(tokens(output)) <= 16 and output.outputs[0].seed == mix_seed(7, 0)


# ------------------------------------------------------------------ requests that end early


def test_a_request_aborted_in_mid_flight_leaves_the_others_alone(llm: LLM) -> None:
    engine, prompts = llm.engine, [ids(n, 30) for n in range(3)]
    expected = alone(llm, prompts, greedy(20), [None] * 3)
    generations = [
        engine.add(name, PromptTokens(prompt), greedy(20))
        for name, prompt in zip("abc", prompts, strict=True)
    ]
    for _ in range(5):
        engine.step()
    engine.abort("b")
    engine.abort("b")
    engine.abort("never heard of")
    engine.check_integrity()
    cut = generations[1].output()
    assert cut.finished and cut.outputs[0].finish_reason == "abort"
    assert 0 < len(tokens(cut)) < 20
    while engine.has_work:
        engine.step()
    assert [facts(generations[i].output()) for i in (0, 2)] == [expected[0], expected[2]]


def test_an_aborted_request_that_has_not_started(llm: LLM) -> None:
    generation = llm.engine.add("a", PromptTokens(ids(1, 5)), greedy())
    llm.engine.abort("a")
    assert generation.finished and not llm.engine.has_work


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add("a", PromptTokens(ids(1, 5)), greedy())
    with pytest.raises(RequestError, match="request_id='a' is already in use"):
        llm.engine.add("a", PromptTokens(ids(2, 5)), greedy())
    llm.engine.abort("a")


def interrupt_once(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, *, at: int, after: bool
) -> Callable[[], bool]:
    """Make step `at` of the runner raise KeyboardInterrupt, before or after its work."""
    execute, calls = llm.engine.runner.execute, 0

    def interrupted(plan: StepPlan) -> StepResult:
        nonlocal calls
        calls += 1
        result = execute(plan) if calls != at or after else None
        if result is None or calls == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    return lambda: calls >= at


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 6])
@pytest.mark.parametrize("adapter", [None, "r17-all", "r8-seven"])
def test_ctrl_c_leaves_the_engine_clean(
    llama: Path,
    adapters: dict[str, LoRARequest],
    monkeypatch: pytest.MonkeyPatch,
    adapter: str | None,
    at: int,
    after: bool,
) -> None:
    lora = adapters[adapter] if adapter else None
    prompts = [ids(n, 100) for n in range(3)]
    with LLM(
        llama, enable_lora=True, max_loras=1, max_num_batched_tokens=64, max_model_len=256
    ) as llm:
        with monkeypatch.context() as patch:
            happened = interrupt_once(patch, llm, at=at, after=after)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy(), lora)
            assert happened()
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        outputs = llm.generate(prompts, greedy(), lora)
        other = llm.generate(prompts, greedy(), adapters["r4-q"])
        llm.engine.check_integrity()
    with LLM(
        llama, enable_lora=True, max_loras=1, max_num_batched_tokens=64, max_model_len=256
    ) as fresh:
        assert [facts(o) for o in outputs] == [
            facts(o) for o in fresh.generate(prompts, greedy(), lora)
        ]
        assert [facts(o) for o in other] == [
            facts(o) for o in fresh.generate(prompts, greedy(), adapters["r4-q"])
        ]


@pytest.mark.parametrize("place", ["runner.execute", "scheduler.commit"])
def test_a_signal_never_cuts_a_step_in_two(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever the key is pressed: here just after a part of a step that ends two requests."""
    expected = [facts(o) for o in llm.generate([GREETING, TEXT], greedy(3))]
    owner, name = place.split(".")
    part = getattr(llm.engine, owner)
    real = getattr(part, name)

    def pressed(*arguments: Any) -> Any:
        result = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(part, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([GREETING, TEXT], greedy(1))
    assert not llm.engine.has_work
    assert [facts(o) for o in llm.generate([GREETING, TEXT], greedy(3))] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------ opening and closing


def test_a_closed_engine_says_so_and_may_be_closed_again(llama: Path) -> None:
    with LLM(llama, max_model_len=128, max_num_seqs=2) as llm:
        assert tokens(llm.generate(TEXT, greedy(1))[0])
    llm.close()
    for use in (
        lambda: llm.generate(TEXT),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.list_loras(),
        lambda: llm.get_tokenizer(),
    ):
        with pytest.raises(ConfigError, match=r"this LLM is closed; make a new one"):
            use()


def test_the_context_closes_whatever_happens(llama: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM(llama, max_model_len=64, max_num_seqs=1) as llm:
        raise ZeroDivisionError
    with pytest.raises(ConfigError):
        _ = llm.engine


def big_tensors() -> list[torch.Tensor]:
    gc.collect()
    found = (o for o in gc.get_objects() if type(o) is torch.Tensor)
    return [tensor for tensor in found if tensor.numel() >= 2**12]


def test_opening_and_closing_twice_gives_all_memory_back(
    llama: Path, adapters: dict[str, LoRARequest]
) -> None:
    before = {id(tensor) for tensor in big_tensors()}
    kept: list[RequestOutput] = []
    for _ in range(2):
        llm = LLM(llama, enable_lora=True, max_loras=1, max_model_len=256, max_num_seqs=2)
        kept += llm.generate([TEXT, TEXT], greedy(n=2), [None, adapters["r17-all"]])
        references = [weakref.ref(t) for t in big_tensors() if id(t) not in before]
        assert len(references) > 10
        llm.close()
        gc.collect()
        assert [r().shape for r in references if r() is not None] == []  # type: ignore[union-attr]
    assert tokens(kept[0]) == tokens(kept[2])
