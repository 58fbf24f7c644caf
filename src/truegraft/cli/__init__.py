"""The command line: `truegraft demo | generate | chat | check`.

This page is the entry: it maps errors to exit codes and holds the list of commands, one file each.
Nothing here imports torch; a command does so when it runs, so that help is there at once.

Exit codes: 0 done; 1 an adapter was refused, an answer was wrong or a proof failed; 2 wrong usage,
setting, model or request; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from truegraft import __version__
from truegraft.cli import chat, check, demo, generate
from truegraft.cli.console import emit, prepare_streams, show_error
from truegraft.errors import (
    AdapterError,
    ExactnessError,
    NonFiniteError,
    TruegraftError,
    UnknownAdapterError,
)

app = typer.Typer(
    name="truegraft",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(check.check)


def main() -> None:
    """Run the command that sys.argv names and exit with its code."""
    prepare_streams()
    try:
        app(prog_name="truegraft")
    except TruegraftError as error:
        show_error(error)
        sys.exit(exit_code(error))


def exit_code(error: TruegraftError) -> int:
    """1 for what was tried and failed, 2 for what could not be tried."""
    if isinstance(error, UnknownAdapterError):
        return 2
    return 1 if isinstance(error, (AdapterError, ExactnessError, NonFiniteError)) else 2


def _show_version(wanted: bool) -> None:
    if wanted:
        emit(f"truegraft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Serve many LoRA adapters over one base model, with bit-exact answers."""
    if context.invoked_subcommand is None:
        emit(context.get_help())
