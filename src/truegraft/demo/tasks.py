r"""The four demo tasks: examples to train on, held-out prompts, and checkers.

Each task turns `Q: {input}\nA:` into ` {answer}<|endoftext|>`. A checker computes the right answer
from the prompt alone (SQL: by running both queries on a small database), so it needs no stored
answers. Knows nothing about models or tokens.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from truegraft.demo.words import CITIES, FAMILY_NAMES, GIVEN_NAMES, MONTHS, WEEKDAYS

Split = Literal["train", "heldout"]

EOS = "<|endoftext|>"
HELDOUT_SHARE = 10  # one key in this many is held out


class Example(NamedTuple):
    """One prompt and its answer, without the space before and the end token after."""

    prompt: str
    answer: str


class _Draft(NamedTuple):
    """An example before its split is known."""

    key: str  # what must not be in both splits: the number, the date, the person, the query
    question: str
    answer: str


@dataclass(frozen=True)
class _Task:
    draw: Callable[[random.Random], _Draft]
    solve: Callable[[str], str]  # question to answer; ValueError if it is not of this task
    same: Callable[[str, str], bool]  # is the first (a completion) as good as the second


def split_of(task: str, key: str) -> Split:
    """The split of a key: by its SHA-256, so it is the same on every machine and run."""
    digest = hashlib.sha256(f"{task}:{key}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_SHARE == 0 else "train"


def examples(task: str, split: Split, rng: random.Random) -> Iterator[Example]:
    """Endless examples of one task whose key is in `split`; they may repeat.

    Raises KeyError for an unknown task.
    """
    draw = _TASKS[task].draw
    while True:
        draft = draw(rng)
        if split_of(task, draft.key) == split:
            yield Example(f"Q: {draft.question}\nA:", draft.answer)


def answer(task: str, prompt: str) -> str:
    """The right answer, computed from the prompt.

    Raises KeyError for an unknown task and ValueError for a prompt that is not of the task.
    """
    match = re.fullmatch(r"Q: (.+)\nA:", prompt)
    if match is None:
        raise ValueError(f"not a 'Q: …\\nA:' prompt: {prompt!r}")
    return _TASKS[task].solve(match[1])


def check(task: str, prompt: str, completion: str) -> bool:
    """Whether `completion` answers `prompt`; a final end token and outer spaces do not count."""
    return _TASKS[task].same(completion.removesuffix(EOS).strip(), answer(task, prompt))


def _parse(forms: tuple[str, ...], slots: dict[str, str], question: str) -> dict[str, str]:
    """The slot values of the one form that `question` is an instance of."""
    for form in forms:
        match = _form_regex(form, tuple(slots.items())).fullmatch(question)
        if match is not None:
            return match.groupdict()
    raise ValueError(f"no form of this task matches {question!r}")


@cache
def _form_regex(form: str, slots: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    pattern = re.escape(form)
    for name, expression in slots:
        pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{expression})")
    return re.compile(pattern)


# --- roman: a number to its Roman numeral -------------------------------------------------------

_ROMAN_FORMS = ("{n} in Roman numerals", "Write {n} as a Roman numeral.", "Roman numeral for {n}?")
_ROMAN_DIGITS = (("M", "", ""), ("C", "D", "M"), ("X", "L", "C"), ("I", "V", "X"))


def to_roman(number: int) -> str:
    """1 to 3999 in the usual subtractive notation; ValueError outside."""
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral for {number}")
    numeral = ""
    for digit, (one, five, ten) in zip(f"{number:04}", _ROMAN_DIGITS, strict=True):
        patterns = ("", "a", "aa", "aaa", "ab", "b", "ba", "baa", "baaa", "ac")
        numeral += patterns[int(digit)].translate({97: one, 98: five, 99: ten})
    return numeral


def _draw_roman(rng: random.Random) -> _Draft:
    number = rng.randint(1, 3999)
    return _Draft(str(number), rng.choice(_ROMAN_FORMS).format(n=number), to_roman(number))


def _solve_roman(question: str) -> str:
    return to_roman(int(_parse(_ROMAN_FORMS, {"n": r"[1-9]\d*"}, question)["n"]))


# --- iso_date: a written date to year-month-day ------------------------------------------------

_DATE_FORMS = (
    "{day} {month} {year}",
    "{day}{th} {month} {year}",
    "{day}{th} of {month}, {year}",
    "the {day}{th} of {month} {year}",
    "{month} {day}, {year}",
    "{month} {day}{th}, {year}",
    "{mon} {day}, {year}",
    "{day} {mon} {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {day}, {year}",
)
_DATE_QUESTIONS = ("{date} as an ISO date", "Write {date} in ISO format.", "ISO date of {date}?")
_DATE_SLOTS = {
    "day": r"[1-9]\d?",
    "th": "st|nd|rd|th",
    "month": "|".join(MONTHS),
    "mon": "|".join(name[:3] for name in MONTHS),
    "weekday": "|".join(WEEKDAYS),
    "year": r"\d{4}",
}
_FIRST_DAY, _LAST_DAY = datetime.date(1800, 1, 1), datetime.date(2199, 12, 31)


def _ordinal_suffix(day: int) -> str:
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th") if day // 10 != 1 else "th"


def _draw_date(rng: random.Random) -> _Draft:
    date = datetime.date.fromordinal(rng.randint(_FIRST_DAY.toordinal(), _LAST_DAY.toordinal()))
    month = MONTHS[date.month - 1]
    written = rng.choice(_DATE_FORMS).format(
        day=date.day,
        th=_ordinal_suffix(date.day),
        month=month,
        mon=month[:3],
        weekday=WEEKDAYS[date.weekday()],
        year=date.year,
    )
    question = rng.choice(_DATE_QUESTIONS).format(date=written)
    return _Draft(date.isoformat(), question, date.isoformat())


def _solve_date(question: str) -> str:
    written = _parse(_DATE_QUESTIONS, {"date": ".+"}, question)["date"]
    slots = _parse(_DATE_FORMS, _DATE_SLOTS, written)
    names = [name[:3] for name in MONTHS]
    month = names.index((slots.get("month") or slots["mon"])[:3]) + 1
    return datetime.date(int(slots["year"]), month, int(slots["day"])).isoformat()


# --- json: a sentence about a person to a JSON object ------------------------------------------

_JSON_FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "{name} from {city} is {age}.",
    "At {age}, {name} lives in {city}.",
    "In {city} lives {name}, aged {age}.",
)
_JSON_SLOTS = {
    "name": r"[A-Z][a-z]+ [A-Z][a-z]+",
    "age": r"[1-9]\d?",
    "city": r"[A-Z][a-z]+(?: [A-Z][a-z]+)*",
}


def _person_json(name: str, age: int, city: str) -> str:
    return json.dumps({"name": name, "age": age, "city": city})


def _draw_json(rng: random.Random) -> _Draft:
    name = f"{rng.choice(GIVEN_NAMES)} {rng.choice(FAMILY_NAMES)}"
    age, city = rng.randint(18, 99), rng.choice(CITIES)
    question = rng.choice(_JSON_FORMS).format(name=name, age=age, city=city)
    return _Draft(name, question, _person_json(name, age, city))


def _solve_json(question: str) -> str:
    slots = _parse(_JSON_FORMS, _JSON_SLOTS, question)
    return _person_json(slots["name"], int(slots["age"]), slots["city"])


def _same_json(completion: str, expected: str) -> bool:
    try:
        return bool(json.loads(completion) == json.loads(expected))
    except json.JSONDecodeError:
        return False


# --- sql: a question over a fixed schema to a query --------------------------------------------

SCHEMA = """\
CREATE TABLE employees (name TEXT, city TEXT, department TEXT, salary INTEGER, age INTEGER);
CREATE TABLE products (name TEXT, category TEXT, color TEXT, price INTEGER, stock INTEGER);
CREATE TABLE orders (customer TEXT, city TEXT, product TEXT, quantity INTEGER, total INTEGER);
"""
_VALUES: dict[str, tuple[str, ...]] = {
    "city": CITIES[:16],
    "department": ("Sales", "Support", "Research", "Finance", "Legal", "Design"),
    "category": ("Books", "Games", "Tools", "Music", "Garden", "Kitchen"),
    "color": ("red", "green", "blue", "black", "white", "yellow"),
    "product": ("lamp", "chair", "table", "clock", "mirror", "radio", "bottle", "basket"),
}
_RANGES = {  # column: (low, high, step) of the numbers in questions and rows
    "salary": (2000, 9000, 100),
    "age": (20, 65, 1),
    "price": (5, 500, 5),
    "stock": (0, 900, 10),
    "quantity": (1, 50, 1),
    "total": (10, 2000, 10),
}
_TABLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # table: (the column that names a row, text columns, number columns)
    "employees": ("name", ("city", "department"), ("salary", "age")),
    "products": ("name", ("category", "color"), ("price", "stock")),
    "orders": ("customer", ("city", "product"), ("quantity", "total")),
}
_AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
_SQL_FORMS = {  # question to query; {where} is empty or a list of conditions
    "How many {table} are there{where}?": "SELECT COUNT(*) FROM {table}{where}",
    "List all {table}{where}.": "SELECT * FROM {table}{where}",
    "What is the {agg} {num} of {table}{where}?": "SELECT {agg}({num}) FROM {table}{where}",
    "Show the {text} of {table}{where}.": "SELECT {text} FROM {table}{where}",
    "Count the {table} per {text}{where}.": (
        "SELECT {text}, COUNT(*) FROM {table}{where} GROUP BY {text}"
    ),
    "Which {n} {table} have the highest {num}{where}?": (
        "SELECT {label} FROM {table}{where} ORDER BY {num} DESC LIMIT {n}"
    ),
    "Which {n} {table} have the lowest {num}{where}?": (
        "SELECT {label} FROM {table}{where} ORDER BY {num} LIMIT {n}"
    ),
}
_SQL_SLOTS = {
    "table": "|".join(_TABLES),
    "agg": "|".join(_AGGREGATES),
    "num": "|".join(_RANGES),
    "text": "|".join(_VALUES),
    "n": r"[1-9]\d?",
    "where": "| with .+",
}
_COMPARISONS = {"above": ">", "below": "<"}
_MAX_SQL_STEPS = 1_000_000  # virtual-machine steps before a completion's query is stopped


def _draw_sql(rng: random.Random) -> _Draft:
    table = rng.choice(tuple(_TABLES))
    _, texts, numbers = _TABLES[table]
    conditions = []
    for column in rng.sample(texts + numbers, rng.choice((0, 1, 1, 2, 2))):
        if column in _VALUES:
            conditions.append(f"{column} {rng.choice(_VALUES[column])}")
        else:
            low, high, step = _RANGES[column]
            number = rng.randrange(low, high, step)
            conditions.append(f"{column} {rng.choice(tuple(_COMPARISONS))} {number}")
    question = rng.choice(tuple(_SQL_FORMS)).format(
        table=table,
        agg=rng.choice(tuple(_AGGREGATES)),
        num=rng.choice(numbers),
        text=rng.choice(texts),
        n=rng.randint(2, 20),
        where=f" with {' and '.join(conditions)}" if conditions else "",
    )
    query = _solve_sql(question)
    return _Draft(query, question, query)


def _solve_sql(question: str) -> str:
    for form, query in _SQL_FORMS.items():
        match = _form_regex(form, tuple(_SQL_SLOTS.items())).fullmatch(question)
        if match is not None:
            slots = match.groupdict()
            slots["where"] = _where_clause(slots["where"])
            slots["agg"] = _AGGREGATES.get(slots.get("agg", ""), "")
            return query.format(label=_TABLES[slots["table"]][0], **slots)
    raise ValueError(f"no form of this task matches {question!r}")


def _where_clause(conditions: str) -> str:
    """' with city Paris and age above 30' to " WHERE city = 'Paris' AND age > 30"."""
    parts = []
    for condition in conditions.removeprefix(" with ").split(" and ") if conditions else ():
        column, value = condition.split(" ", 1)
        if column in _VALUES:
            parts.append(f"{column} = '{value}'")
        else:
            word, number = value.split(" ")
            parts.append(f"{column} {_COMPARISONS[word]} {int(number)}")
    return f" WHERE {' AND '.join(parts)}" if parts else ""


@cache
def _database() -> sqlite3.Connection:
    """400 seeded rows a table in memory; afterwards only reading is allowed."""
    rng = random.Random(0)
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.executescript(SCHEMA)
    for table, (_, texts, numbers) in _TABLES.items():
        for _ in range(400):
            label = f"{rng.choice(GIVEN_NAMES)} {rng.choice(FAMILY_NAMES)}"
            row = (label, *(rng.choice(_VALUES[column]) for column in texts))
            row += tuple(str(rng.randrange(*_RANGES[column])) for column in numbers)
            database.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", row)
    database.execute("PRAGMA query_only = ON")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    database.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY
    )
    database.set_progress_handler(lambda: 1, _MAX_SQL_STEPS)
    return database


def _same_sql(completion: str, expected: str) -> bool:
    """Same rows in the same order; a query that fails, writes or runs for long is wrong."""
    try:
        rows = _database().execute(completion).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return False
    return rows == _database().execute(expected).fetchall()


def _same_text(completion: str, expected: str) -> bool:
    return completion == expected


_TASKS = {
    "roman": _Task(_draw_roman, _solve_roman, _same_text),
    "iso_date": _Task(_draw_date, _solve_date, _same_text),
    "json": _Task(_draw_json, _solve_json, _same_json),
    "sql": _Task(_draw_sql, _solve_sql, _same_sql),
}
TASKS: tuple[str, ...] = tuple(_TASKS)
