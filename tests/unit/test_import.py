"""`import truegraft` is cheap and quiet, and its public names are the ones it promises."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import truegraft

SOURCE = Path(truegraft.__file__).parent.parent
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "ray", "tokenizers", "typer")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter where a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "use",
    [
        "import truegraft",
        "from truegraft import SamplingParams; SamplingParams(temperature=0.0)",
        "import truegraft.errors, truegraft.api, truegraft.config",
        "import truegraft.core.scheduler, truegraft.speculation.ngram",
    ],
)
def test_light_imports_load_nothing_heavy(use: str) -> None:
    done = run(f"{use}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_importing_configures_no_logging() -> None:
    state = "[logging.root.handlers, logging.root.level, logging.getLogger('truegraft').handlers]"
    code = f"import logging\nbefore = {state}\nimport truegraft.api\nprint(before == {state})"
    assert run(code).stdout == "True\n"


def test_the_names_checked_by_types_are_the_names_there_are() -> None:
    tree = ast.parse((SOURCE / "truegraft" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: statement.module
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert {*homes, "__version__"} == set(truegraft.__all__)
    for name, module in homes.items():
        assert module == "truegraft.llm" or getattr(truegraft, name).__module__ == module


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'truegraft' has no attribute 'Nonsense'"):
        truegraft.Nonsense  # noqa: B018


def test_every_error_is_public() -> None:
    from truegraft import errors

    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == {name for name in truegraft.__all__ if name.endswith("Error")}
