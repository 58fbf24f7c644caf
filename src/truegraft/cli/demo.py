"""`truegraft demo`: four adapters answer in one mixed batch, and each answer is checked.

Prints what `truegraft.demo.show` finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from truegraft.cli.console import emit, emit_json, progress, stdout, working
from truegraft.cli.serving import BASE, JsonOption, speculation
from truegraft.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from truegraft.demo.show import Answer, Report


def demo(
    prompts: Annotated[int, typer.Option(metavar="N", help="Prompts of each task.")] = 3,
    speculate: Annotated[int, typer.Option(metavar="K", help="Tokens drafted a step.")] = 4,
    json: JsonOption = False,
) -> None:
    """Show four adapters at work in one batch.

    Held-out prompts of four tasks go to their own adapter, to another and to the base, all in one
    batch with speculation; then each request runs alone without it and must give the same bits.
    Exit code 1 if one does not, or if own adapters answer less than 95% right (of fewer than 40
    prompts one may be wrong, but no adapter on all of its own).
    """
    if speculation(speculate) is None:
        raise ConfigError("--speculate 0: the demo compares speculation with none; give 1 to 16.")
    with working("loading torch"):
        from truegraft.demo import show
    with progress() as on_progress:
        report = show.run(prompts, speculate, on_progress)
    if json:
        emit_json(report.to_dict())
    else:
        _print(report)
    raise typer.Exit(0 if report.passed else 1)


def _print(report: Report) -> None:
    console = stdout()
    console.print(_table(report))
    for line in _summary(report):
        console.print(line, markup=False, soft_wrap=True)
    emit(
        f"exact: {report.num_identical}/{len(report.answers)} requests identical to the same "
        "request alone, without speculation"
    )


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(caption="drafts: accepted/proposed; dim: a wrong adapter or none, for contrast")
    table.add_column("prompt", max_width=44)
    table.add_column("adapter", no_wrap=True)
    table.add_column("answer", max_width=58)
    table.add_column("")
    table.add_column("drafts", justify="right", no_wrap=True)
    last = None
    for answer in report.answers:
        new = answer.ask.prompt != last
        last = answer.ask.prompt
        if new:
            table.add_section()
        drafts = f"{answer.num_accepted_tokens}/{answer.num_draft_tokens}"
        contrast = answer.ask.task is not None and not answer.ask.own
        table.add_row(
            _shown(last.removeprefix("Q: ").removesuffix("\nA:"), 88) if new else "",
            answer.ask.adapter or BASE,
            _shown(answer.text, 50 if contrast else 116),
            _mark(answer),
            drafts,
            style="dim" if contrast else None,
        )
    return table


def _shown(text: str, limit: int) -> Text:
    """One line, shortened, without the meaning that brackets have for rich."""
    from rich.text import Text

    line = text.replace("\n", "⏎")
    return Text(line if len(line) <= limit else f"{line[: limit - 1]}…")


def _mark(answer: Answer) -> str:
    if answer.right is None:
        return ""
    if answer.right:
        return "[green]✓[/]"
    return "[red]✗[/]" if answer.ask.own else "✗"


def _summary(report: Report) -> list[str]:
    lines = []
    for task, row in report.scores().items():
        scores = ", ".join(f"{who} {right}/{total}" for who, (right, total) in row.items())
        lines.append(f"right on {task}: {scores}")
    num_tokens = report.num_tokens
    lines.append(
        f"{num_tokens} tokens: {num_tokens / report.mixed_seconds:.0f} tokens/s in the mixed batch "
        f"({report.num_accepted_tokens} of {report.num_draft_tokens} drafts accepted), "
        f"{num_tokens / report.alone_seconds:.0f} tokens/s one by one"
    )
    return lines
