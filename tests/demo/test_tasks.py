"""The demo's generators, checkers, held-out prompts and files; needs no torch."""

from __future__ import annotations

import json
import random
import re
import struct
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from truegraft import demo
from truegraft.demo import tasks
from truegraft.demo.tasks import EOS, TASKS, Example, answer, check, examples, split_of, to_roman
from truegraft.demo.words import CITIES, FAMILY_NAMES, GIVEN_NAMES

DATA = Path(__file__).parents[1] / "data" / "demo"
REPOSITORY = Path(__file__).parents[2]
RANKS = {"roman": 4, "iso_date": 8, "json": 8, "sql": 16}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def draw(task: str, split: tasks.Split, count: int, seed: int = 1) -> list[Example]:
    return list(islice(examples(task, split, random.Random(seed)), count))


def heldout(task: str) -> list[Example]:
    lines = (DATA / f"{task}.jsonl").read_text().splitlines()
    return [Example(**json.loads(line)) for line in lines]


def key(task: str, example: Example) -> str:
    """What the split of an example goes by, taken from its answer alone."""
    if task == "roman":
        return str(re.findall(r"\d+", example.prompt)[0])
    return str(json.loads(example.answer)["name"]) if task == "json" else example.answer


def safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def num_elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# --- generators and checkers -------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_generated_answers_are_right(task: str, split: tasks.Split) -> None:
    for example in draw(task, split, 300):
        assert re.fullmatch(r"Q: [^\n]+\nA:", example.prompt)
        assert answer(task, example.prompt) == example.answer
        assert check(task, example.prompt, f" {example.answer}{EOS}")


@pytest.mark.parametrize("task", TASKS)
def test_another_prompts_answer_is_wrong(task: str) -> None:
    drawn = draw(task, "train", 200)
    pairs = [(a, b) for a, b in pairwise(drawn) if a.answer != b.answer]
    accepted = sum(check(task, a.prompt, b.answer) for a, b in pairs)
    # Two different SQL queries may return the same rows; nothing else may pass.
    assert accepted <= (len(pairs) // 50 if task == "sql" else 0)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "completion", ["", " ", EOS, " no", " SELECT", " {", " 1", " I don't know."]
)
def test_nonsense_is_wrong(task: str, completion: str) -> None:
    for example in draw(task, "heldout", 20):
        assert not check(task, example.prompt, completion)


@pytest.mark.parametrize("task", TASKS)
def test_text_after_the_answer_is_wrong(task: str) -> None:
    for example in draw(task, "heldout", 20):
        assert not check(task, example.prompt, f" {example.answer} and more{EOS}")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("prompt", ["", "hello", "Q: \nA:", "Q: what?\nA:", "Q: 12\nA: 12"])
def test_a_prompt_of_no_task_is_an_error(task: str, prompt: str) -> None:
    with pytest.raises(ValueError, match=r"no form|not a"):
        answer(task, prompt)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(KeyError):
        check("poetry", "Q: x\nA:", "y")


KNOWN_NUMERALS = {
    1: "I",
    4: "IV",
    9: "IX",
    40: "XL",
    90: "XC",
    400: "CD",
    888: "DCCCLXXXVIII",
    1994: "MCMXCIV",
    2000: "MM",
    3999: "MMMCMXCIX",
}


@pytest.mark.parametrize(("number", "numeral"), KNOWN_NUMERALS.items())
def test_known_numerals(number: int, numeral: str) -> None:
    assert to_roman(number) == numeral


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_numbers_without_numeral(number: int) -> None:
    with pytest.raises(ValueError, match="no Roman numeral"):
        to_roman(number)


def test_every_numeral_is_the_sum_of_its_letters() -> None:
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    for number in range(1, 4000):
        letters = [values[letter] for letter in to_roman(number)]
        following = [*letters[1:], 0]
        assert number == sum(-v if v < n else v for v, n in zip(letters, following, strict=True))


@pytest.mark.parametrize(
    "written",
    [
        "5 March 1994",
        "5th of March, 1994",
        "the 5th of March 1994",
        "March 5, 1994",
        "Mar 5, 1994",
        "Saturday, 5 March 1994",
    ],
)
def test_known_dates(written: str) -> None:
    assert check("iso_date", f"Q: {written} as an ISO date\nA:", " 1994-03-05")
    assert not check("iso_date", f"Q: {written} as an ISO date\nA:", " 1994-05-03")


def test_a_day_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="day"):
        answer("iso_date", "Q: 30 February 2001 as an ISO date\nA:")


def test_json_may_differ_in_spaces_and_order_only() -> None:
    prompt = "Q: Ada Lovelace is 36 years old and lives in London.\nA:"
    assert answer("json", prompt) == '{"name": "Ada Lovelace", "age": 36, "city": "London"}'
    assert check("json", prompt, '{"city":"London","age":36,"name":"Ada Lovelace"}')
    assert not check("json", prompt, '{"name": "Ada Lovelace", "age": "36", "city": "London"}')
    assert not check("json", prompt, '{"name": "Ada Lovelace", "age": 36}')


def test_sql_is_judged_by_its_rows() -> None:
    prompt = "Q: How many employees are there with city Paris and age above 40?\nA:"
    expected = "SELECT COUNT(*) FROM employees WHERE city = 'Paris' AND age > 40"
    assert answer("sql", prompt) == expected
    assert check("sql", prompt, "select count(*) from employees where age > 40 and city = 'Paris';")
    assert not check("sql", prompt, "SELECT COUNT(*) FROM employees WHERE age > 40")
    assert not check("sql", prompt, expected.replace("Paris", "Rome"))


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM employees",
        "DROP TABLE employees",
        "PRAGMA query_only = OFF",
        "ATTACH DATABASE ':memory:' AS other",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    ],
)
def test_a_completion_can_neither_write_nor_run_forever(statement: str) -> None:
    prompt = "Q: How many employees are there?\nA:"
    assert not check("sql", prompt, statement)
    assert check("sql", prompt, "SELECT COUNT(*) FROM employees")
    assert check("sql", prompt, "SELECT 400")


def test_word_lists_have_no_doubles_and_fit_the_parser() -> None:
    for words in (GIVEN_NAMES, FAMILY_NAMES, CITIES):
        assert len(set(words)) == len(words)
        assert all(re.fullmatch(r"[A-Z][a-z]+(?: [A-Z][a-z]+)*", word) for word in words)


# --- the split -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_train_and_heldout_share_no_key(task: str) -> None:
    train = {key(task, example) for example in draw(task, "train", 3000)}
    kept_out = {key(task, example) for example in draw(task, "heldout", 1000, seed=2)}
    kept_out |= {key(task, example) for example in heldout(task)}
    assert len(train) > 100
    assert not train & kept_out
    assert all(split_of(task, k) == "train" for k in train)
    assert all(split_of(task, k) == "heldout" for k in kept_out)


def test_the_split_never_changes() -> None:
    """Trained adapters depend on it: these values are fixed for ever."""
    numbers = [n for n in range(1, 60) if split_of("roman", str(n)) == "heldout"]
    assert numbers == [20, 22, 38, 39]


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_heldout_prompts_are_right_and_distinct(task: str) -> None:
    rows = heldout(task)
    assert len(rows) == 300
    assert len({row.answer for row in rows}) == 300
    assert all(answer(task, row.prompt) == row.answer for row in rows)


def test_every_task_has_an_adapter() -> None:
    assert set(demo.adapters()) == set(TASKS)
    assert demo.model_path().is_dir()


def test_assets_are_small() -> None:
    assert sum(p.stat().st_size for p in demo.ASSETS.rglob("*") if p.is_file()) <= 16 * 2**20


def test_base_is_a_llama_of_under_six_million_parameters() -> None:
    config = json.loads((demo.model_path() / "config.json").read_text())
    header = safetensors_header(demo.model_path() / "model.safetensors")
    total = sum(num_elements(tensor["shape"]) for tensor in header.values())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert total == 5_475_584
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert "lm_head.weight" not in header
    assert header["model.embed_tokens.weight"]["shape"] == [4096, config["hidden_size"]]
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize("task", TASKS)
def test_adapters_have_their_ranks(task: str) -> None:
    folder = demo.adapters()[task]
    config = json.loads((folder / "adapter_config.json").read_text())
    header = safetensors_header(folder / "adapter_model.safetensors")
    assert config["r"] == RANKS[task]
    assert set(config["target_modules"]) == PROJECTIONS
    assert len(header) == 6 * len(PROJECTIONS) * 2
    for name, tensor in header.items():
        assert tensor["shape"][0 if "lora_A" in name else 1] == RANKS[task]
        assert tensor["dtype"] == "BF16"


def test_ranks_and_scales_differ() -> None:
    configs = [
        json.loads((folder / "adapter_config.json").read_text())
        for folder in demo.adapters().values()
    ]
    assert len({config["r"] for config in configs}) == 3
    assert {config["use_rslora"] for config in configs} == {True, False}


def test_tokenizer_has_4096_tokens_and_the_end_token_first() -> None:
    tokenizer = json.loads((demo.model_path() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(4096))
    assert vocabulary[EOS] == 0


def test_chat_template_renders_a_task_prompt() -> None:
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((demo.model_path() / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    (example,) = draw("roman", "heldout", 1)
    question = example.prompt.removeprefix("Q: ").removesuffix("\nA:")
    turns = [{"role": "user", "content": question}]
    assert template.render(messages=turns, add_generation_prompt=True) == example.prompt
    turns = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "x"}, *turns]
    assert template.render(messages=turns, add_generation_prompt=True) == example.prompt
    turns.append({"role": "assistant", "content": example.answer})
    assert template.render(messages=turns) == f"{example.prompt} {example.answer}{EOS}\n"


def test_measured_scores_keep_the_promise() -> None:
    """Own adapter at least 95% exact; without it, or with another's, at most 5%."""
    record = json.loads((REPOSITORY / "training" / "scores.json").read_text())
    assert record["prompts"] == 300
    for adapter in ("none", *TASKS):
        for task in TASKS:
            scores = record["scores"][adapter][task]
            if adapter == task:
                assert scores["exact"] >= 0.95
            else:
                assert max(scores["exact"], scores["accepted"]) <= 0.05


def test_model_card_repeats_the_measured_scores() -> None:
    record = json.loads((REPOSITORY / "training" / "scores.json").read_text())
    card = (demo.ASSETS / "MODEL_CARD.md").read_text()
    for adapter in ("none", *TASKS):
        cells = [f"{100 * record['scores'][adapter][task]['exact']:.1f}%" for task in TASKS]
        assert f"| {adapter} | {' | '.join(cells)} |" in card
    for group, loss in record["heldout_loss"].items():
        assert re.search(rf"\| {group} \|[^\n]*\| {loss:.3f} \|", card)
