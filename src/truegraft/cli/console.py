"""Where a command writes: answers and JSON to stdout, all else to stderr.

Colour, bars and spinners appear on a terminal only, and no colour where NO_COLOR is set. Knows
nothing about models.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120  # columns of a table that goes to a file

OnProgress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""


def stdout() -> Console:
    """For tables and coloured lines."""
    return _console(stderr=False)


def stderr() -> Console:
    """For errors and progress."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    fixed = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=PIPED_WIDTH if fixed else None)


def prepare_streams() -> None:
    """Let no byte or character end the program.

    What the output's encoding lacks is written as '?'; what is no text on stdin comes in as lone
    surrogates, which the tokenizer refuses with a message.
    """
    streams = {sys.stdin: "surrogateescape", sys.stdout: "replace", sys.stderr: "replace"}
    for stream, errors in streams.items():
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def emit(text: str, end: str = "\n") -> None:
    """Write text to stdout as it is, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def emit_json(document: Any) -> None:
    """Write one JSON document to stdout, in ASCII."""
    emit(json.dumps(document))


def note(text: str) -> None:
    """One line about the work, to stderr."""
    stderr().print(text, style="dim", markup=False, soft_wrap=True)


def show_error(error: Exception) -> None:
    """An error as a paragraph, to stderr."""
    from rich.text import Text

    stderr().print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)


def working(what: str) -> AbstractContextManager[object]:
    """A spinner beside `what` while the block runs."""
    from rich.text import Text

    return stderr().status(Text(what))


@contextmanager
def progress() -> Iterator[OnProgress]:
    """A bar that the yielded function moves. On a file or a pipe it shows nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
