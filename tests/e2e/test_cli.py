from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from broken_adapters import BROKEN_REASONS, make_broken
from tiny_models import make_adapter, make_model, make_signature_adapter

import truegraft
from truegraft import cli, demo
from truegraft.demo import show, tasks

TIMEOUT = 120  # seconds after which a process that hangs fails its test
COMMAND = [sys.executable, "-m", "truegraft.cli"]
SOURCES = str(Path(truegraft.__file__).parents[1])
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")},
    "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]),
    "TERM": "xterm-256color",
}
Here = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Files:
    model: Path
    red: Path
    blue: Path
    signature: Path  # answers "x" everywhere
    broken: dict[str, Path]

    @property
    def loras(self) -> list[str]:
        return [f"--lora=red={self.red}", f"--lora=blue={self.blue}", f"--lora=x={self.signature}"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("cli")
    model = make_model(root / "model")
    return Files(
        model=model,
        red=make_adapter(root / "red", model, rank=4, seed=1),
        blue=make_adapter(root / "blue", model, rank=24, seed=2),
        signature=make_signature_adapter(root / "signature", model, ord("x")),
        broken=make_broken(root / "red", root / "broken"),
    )


def truegraft_command(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command with pipes, as a script would; it never shows a traceback or a colour."""
    command = [*COMMAND, *map(str, args)]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT, env=ENVIRONMENT
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run the command in this process, which has torch already: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["truegraft", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return (code, *capsys.readouterr())

    return run


class Terminal:
    """The command on a pseudo-terminal. shown: all that it wrote there."""

    def __init__(self, *args: object, stdout: int | None = None) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, args)],
            stdin=child,
            stdout=child if stdout is None else stdout,
            stderr=child,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until `text` is shown after what was waited for before."""
        start = len(self.shown)
        while text not in self.shown[start:]:
            piece = self._read()
            assert piece, f"ended without showing {text!r}: {self.shown}"
            self.shown += piece

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while piece := self._read():
            self.shown += piece
        os.close(self._fd)
        return self.process.wait(TIMEOUT)

    def _read(self) -> str:
        ready, _, _ = select.select([self._fd], [], [], TIMEOUT)
        assert ready, f"hangs after {self.shown!r}"
        try:
            return os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # how Linux says that the other end is closed
            return ""


# --------------------------------------------------------------------------------- start-up


def test_help_and_version_come_without_torch() -> None:
    code = (
        "import sys; from truegraft.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print('torch' in sys.modules, end.code)"
    )
    for args, text in ([], "generate"), (["--version"], truegraft.__version__), (["-"], ""):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, env=ENVIRONMENT
        )
        assert text in done.stdout
        assert done.stdout.splitlines()[-1] == f"False {2 if args == ['-'] else 0}", done.stderr


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "check"])
def test_each_command_explains_itself(here: Here, command: str) -> None:
    code, out, err = here(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: truegraft {command}" in out


# --------------------------------------------------------------------------------- generate


def test_a_batch_of_prompts_each_with_its_adapter_as_json(files: Files) -> None:
    args = ["generate", "--model", files.model, *files.loras, "--json", "--max-tokens", 24]
    names = ["red", "blue", "base", "x"]
    prompts = ["one two one two one two", "-", "last"]
    choice = [f"--adapter={name}" for name in names]
    done = truegraft_command(
        *args, *choice, *(f"--prompt={p}" for p in prompts), "--speculate=3", stdin="a\n\nb b b b\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads(done.stdout)["results"]
    assert [r["prompt"] for r in results] == ["one two one two one two", "a", "b b b b", "last"]
    assert [r["adapter"] for r in results] == names
    assert results[3]["text"] == "x" * 24
    assert all(len(r["token_ids"]) == 24 or r["finish_reason"] == "stop" for r in results)
    assert sum(r["num_accepted_tokens"] for r in results) > 0
    fingerprints = [r["adapter_fingerprint"] for r in results]
    assert fingerprints[2] is None
    assert len(set(fingerprints)) == 4


def test_one_prompt_prints_its_text_and_nothing_else(files: Files, here: Here) -> None:
    args = ["generate", f"-m{files.model}", f"--lora=x={files.signature}", "--max-tokens=5"]
    code, out, err = here(*args, "-pHello")
    assert (code, out) == (0, "xxxxx\n")
    assert "5 tokens in" in err
    code, out, _ = here(*args, "-pHello", "-pHo", "--adapter=x")
    assert code == 0
    assert out.splitlines() == ["── 1 · x ──", "xxxxx", "── 2 · x ──", "xxxxx"]


def test_a_seed_replays_a_sampled_answer(files: Files, here: Here) -> None:
    args = ["generate", f"-m{files.model}", "-pHello", "--temperature=1.5", "--json"]
    first, again, other = (
        json.loads(here(*args, f"--seed={seed}")[1])["results"][0] for seed in (3, 3, 4)
    )
    assert first["seed"] == 3
    assert first == again
    assert first["token_ids"] != other["token_ids"]


def test_bytes_that_are_no_text_are_refused(files: Files) -> None:
    done = subprocess.run(
        [*COMMAND, "generate", f"-m{files.model}", "-p-"],
        input=b"caf\xe9\n",
        capture_output=True,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "utf-8:strict"},
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"valid Unicode" in done.stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--adapter=green", "--lora=red={red}"], "loaded: base, red"),
        (["--lora=red={red}", "--lora=blue={blue}"], "choose one with --adapter: red, blue"),
        (["--lora={red}"], "must be NAME=DIR"),
        (["--lora=base={red}"], "'base' means no adapter"),
        (["--lora=red={red}", "--lora=red={blue}"], "two adapters the name 'red'"),
        (["--adapter=base", "--adapter=base"], "2 --adapter for 1 prompts"),
        (["--top-p=7"], "top_p=7.0"),
        (["--max-tokens=0"], "max_tokens=0"),
        (["--max-tokens=many"], "--max-tokens"),
        (["--speculate=17"], "num_speculative_tokens=17"),
        (["--dtype=int4"], "dtype='int4'"),
        (["--model=/nowhere"], "nothing is downloaded"),
        (["--prompt="], "the prompt is empty"),
        (["--wrong"], "--wrong"),
    ],
)
def test_wrong_use_is_one_paragraph_and_exit_code_2(
    files: Files, here: Here, args: list[str], reason: str
) -> None:
    given = [arg.format(red=files.red, blue=files.blue) for arg in args]
    prompt = [] if "--prompt=" in args else ["--prompt=hi"]
    code, out, err = here("generate", f"--model={files.model}", "--json", *prompt, *given)
    assert (code, out) == (2, "")
    assert reason in err
    assert "Error: " in err


def test_a_refused_adapter_ends_generate_with_its_reasons(files: Files, here: Here) -> None:
    lora = f"--lora=bad={files.broken['dora']}"
    code, out, err = here("generate", f"--model={files.model}", lora, "--prompt=hi", "--json")
    assert (code, out) == (1, "")
    assert "DoRA" in err


def test_ctrl_c_leaves_generate_with_130_and_no_traceback(files: Files) -> None:
    many = [f"--prompt=request {i}" for i in range(32)]
    terminal = Terminal("generate", "--model", files.model, "--max-tokens=1900", *many)
    terminal.wait_for("requests")  # its progress bar: it is at work
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
    assert "\x1b[" in terminal.shown  # a terminal gets the bar that a pipe does not


# --------------------------------------------------------------------------------- chat


def test_chat_reads_a_pipe(files: Files) -> None:
    lines = ["hello", "/adapter x", "hello", "/reset", "hello", "/adapter base", "hello", "/quit"]
    args = ["chat", "--model", files.model, *files.loras, "--adapter=base", "--max-tokens=7"]
    done = truegraft_command(*args, stdin="\n".join([*lines, "not read"]))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("xxxxxxx\n") == 2
    # After /reset the history holds one turn of x; a conversation of its own says the same.
    alone = truegraft_command(*args, stdin="/adapter x\nhello\n/adapter base\nhello\n")
    assert done.stdout.split("xxxxxxx\n")[2] == alone.stdout.split("xxxxxxx\n")[1]
    assert done.stdout.split("xxxxxxx\n")[0] != alone.stdout.split("xxxxxxx\n")[1]


def test_chat_on_a_terminal_goes_on_after_a_mistake_and_leaves_at_ctrl_d(files: Files) -> None:
    args = ["chat", "--model", files.model, *files.loras, "--adapter=x", "--max-tokens=9"]
    terminal = Terminal(*args)
    terminal.wait_for("x> ")
    for line, answer, name in [
        ("/adapter green\n", "no adapter of this name", "x"),
        ("/dance\n", "no command", "x"),
        ("/adapter red\n", "", "red"),
        ("/adapter x\n", "", "x"),
        ("hello\n", "xxxxxxxxx\r\n", "x"),
    ]:
        terminal.type(line)
        terminal.wait_for(f"{name}> ")
        assert answer in terminal.shown
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_chat_of_a_pipe_ends_at_the_first_mistake(files: Files) -> None:
    done = truegraft_command("chat", "--model", files.model, stdin="/adapter red\nhello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no adapter of this name is loaded; loaded: base" in done.stderr


# --------------------------------------------------------------------------------- check


def test_check_tells_each_module_of_a_good_adapter(files: Files, here: Here) -> None:
    code, out, err = here("check", files.blue, "--model", files.model)
    assert (code, err) == (0, "")
    rows = [line.split("│")[1:-1] for line in out.splitlines() if "_proj" in line]
    assert len(rows) == 2 * 7
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    # rank 24, alpha 16; 64 → 2 heads of 16; (24 · 64 + 32 · 24) · 4 bytes
    found = cells["model.layers.1.self_attn.k_proj"]
    assert found == ["24", "0.666667", "24×64", "32×24", "9,216", "fits"]
    assert "accepted" in out


def test_check_and_generate_name_the_same_content(files: Files, here: Here) -> None:
    _, out, _ = here("check", files.red, "--model", files.model, "--json")
    report = json.loads(out)
    assert report["accepted"]
    assert report["reasons"] == []
    assert {m["rank"] for m in report["modules"]} == {4}
    assert report["num_bytes"] == sum(m["num_bytes"] for m in report["modules"])
    lora = f"--lora=red={files.red}"
    _, out, _ = here("generate", "-m", files.model, lora, "-phi", "--max-tokens=1", "--json")
    assert json.loads(out)["results"][0]["adapter_fingerprint"] == report["fingerprint"]


@pytest.mark.parametrize("name", BROKEN_REASONS)
def test_check_refuses_a_broken_adapter_with_its_reason(
    files: Files, here: Here, name: str
) -> None:
    code, out, err = here("check", files.broken[name], "--model", files.model)
    assert (code, err) == (1, "")
    assert "refused" in out
    assert BROKEN_REASONS[name] in out
    code, out, _ = here("check", files.broken[name], "--model", files.model, "--json")
    report = json.loads(out)
    assert (code, report["accepted"], report["fingerprint"]) == (1, False, None)
    assert any(BROKEN_REASONS[name] in reason for reason in report["reasons"])


def test_check_marks_the_modules_that_are_to_blame(files: Files, here: Here) -> None:
    _, out, _ = here("check", files.broken["nan"], "--model", files.model)
    refused = [line for line in out.splitlines() if "_proj" in line and "│ refused" in line]
    assert len(refused) == 1
    assert out.count("fits") == 13


def test_check_of_a_wrong_model_is_wrong_use(files: Files, here: Here) -> None:
    code, out, err = here("check", files.red, "--model", files.red)
    assert (code, out) == (2, "")
    assert "config.json" in err


@pytest.mark.parametrize("name", tasks.TASKS)
def test_check_accepts_each_demo_adapter(here: Here, name: str) -> None:
    code, out, _ = here("check", name, "--model", "demo")
    assert code == 0
    assert "accepted" in out
    path = demo.adapters()[name]
    assert here("check", path, "--model", demo.model_path())[1] == out


@pytest.mark.parametrize("name", BROKEN_REASONS)
def test_check_refuses_a_broken_demo_adapter(here: Here, tmp_path: Path, name: str) -> None:
    broken = make_broken(demo.adapters()["roman"], tmp_path)[name]
    code, out, _ = here("check", broken, "--model", "demo", "--json")
    assert code == 1
    assert any(BROKEN_REASONS[name] in reason for reason in json.loads(out)["reasons"])


# --------------------------------------------------------------------------------- demo


def key_of(task: str, prompt: str) -> str:
    """What the split of an example goes by, read off the prompt."""
    answer = tasks.answer(task, prompt)
    if task == "roman":
        return str(re.findall(r"\d+", prompt)[0])
    return str(json.loads(answer)["name"]) if task == "json" else answer


def test_the_demo_asks_only_what_was_held_out() -> None:
    asks = show.make_asks(show.MAX_PROMPTS)
    assert len(asks) == 4 * 3 * show.MAX_PROMPTS + len(show.FREE_PROMPTS)
    assert len({ask.prompt for ask in asks}) == 4 * show.MAX_PROMPTS + len(show.FREE_PROMPTS)
    for ask in asks:
        if ask.task is not None:
            assert tasks.split_of(ask.task, key_of(ask.task, ask.prompt)) == "heldout"


def test_the_demo_is_right_and_exact() -> None:
    done = truegraft_command("demo", "--prompts=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    *_, last = done.stdout.splitlines()
    assert last == "exact: 26/26 requests identical to the same request alone, without speculation"
    for task in tasks.TASKS:
        assert re.search(rf"right on {task}: {task} [12]/2, \w+ \d/2, base \d/2", done.stdout)


def test_the_demo_for_machines() -> None:
    done = truegraft_command("demo", "--prompts=1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["exact"] == {"identical": 14, "total": 14}
    assert 0 < report["num_accepted_tokens"] < report["num_draft_tokens"]
    own = [a for a in report["answers"] if a["own_adapter"]]
    assert [a["task"] for a in own] == list(tasks.TASKS)
    for found in own:
        assert tasks.check(found["task"], found["prompt"], found["answer"])
    others = [a for a in report["answers"] if a["task"] and not a["own_adapter"]]
    assert len(others) == 8
    assert sum(a["right"] for a in others) <= 1


def test_a_demo_adapter_answers_by_name(here: Here) -> None:
    prompt = show.make_asks(1)[0].prompt
    _, out, _ = here("generate", "-mdemo", "--adapter=roman", f"-p{prompt}")
    assert tasks.check("roman", prompt, out)
    _, out, _ = here("generate", "-mdemo", f"-p{prompt}", "--max-tokens=16")
    assert not tasks.check("roman", prompt, out)


def make_report(count: int, **changes: Any) -> show.Report:
    """`count` right and exact answers by own adapters, the first with `changes`."""
    prompt = "Q: 9 in Roman numerals\nA:"
    good = show.Answer(show.Ask(prompt, "roman", "roman"), "IX", True, True, 3, 4, 2)
    return show.Report((replace(good, **changes), *[good] * (count - 1)), 1.0, 2.0)


def test_a_demo_that_is_not_exact_or_often_wrong_fails(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(report: show.Report) -> tuple[int, str]:
        monkeypatch.setattr(show, "run", lambda *_: report)
        code, out, _ = here("demo")
        return code, out

    code, out = shown(make_report(4, identical=False))
    assert code == 1
    assert out.splitlines()[-1].startswith("exact: 3/4 requests identical")
    assert shown(make_report(4))[0] == 0
    wrong = make_report(4, right=False)
    assert shown(wrong)[0] == 0
    assert shown(make_report(1, right=False))[0] == 1
    assert shown(replace(wrong, answers=wrong.answers * 2))[0] == 1
    twenty_of_400 = replace(wrong, answers=(*wrong.answers * 20, *make_report(320).answers))
    assert shown(twenty_of_400)[0] == 0
    assert shown(replace(twenty_of_400, answers=twenty_of_400.answers[:-1]))[0] == 1


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, coloured: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["truegraft", "demo"])
    monkeypatch.setattr(show, "run", lambda *_: make_report(4))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    with pytest.raises(SystemExit):
        cli.main()
    assert bool(re.search(r"\x1b\[[\d;]*3\d", stream.getvalue())) == coloured


@pytest.mark.parametrize("args", [["--prompts=0"], ["--speculate=0"], ["--speculate=99"]])
def test_a_demo_of_nothing_is_wrong_use(here: Here, args: list[str]) -> None:
    code, out, err = here("demo", *args)
    assert (code, out) == (2, "")
    assert "Error: " in err
