"""`truegraft check`: would this adapter be served, module by module, and if not, why not?

A dry run: no engine starts and nothing but the adapter's own tensors is read, unless it brings a
copy of the base's weights to compare.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truegraft.cli.console import emit_json, stdout, working
from truegraft.cli.serving import DEMO, DtypeOption, JsonOption, ModelOption, model_path
from truegraft.config import MAX_LORA_RANK, parse_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from truegraft.adapters.check import AdapterReport
    from truegraft.adapters.peft_format import ModuleRow
    from truegraft.model.architecture import Architecture


def check(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="An adapter's folder in PEFT layout.")
    ],
    model: ModelOption,
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Say whether an adapter fits a model.

    A dry run, module by module; exit code 1, with every reason, if it is refused.
    """
    wanted = parse_dtype(dtype)
    with working(f"reading {adapter}"):
        report = _inspect(_adapter_path(adapter, model), model_path(model), wanted)
    if json:
        emit_json(report.to_dict())
    else:
        _print(report)
    raise typer.Exit(0 if report.accepted else 1)


def _adapter_path(adapter: str, model: str) -> Path:
    """The folder; beside --model demo a demo adapter's name will do."""
    from truegraft import demo

    built_in = demo.adapters() if model == DEMO else {}
    return built_in.get(adapter, Path(adapter))


def _inspect(adapter: Path, model: Path, dtype: str) -> AdapterReport:
    """Raises ModelError for a wrong model; a wrong adapter is in the report."""
    import torch

    from truegraft.adapters.check import check_adapter
    from truegraft.model.architecture import Architecture
    from truegraft.model.checkpoint import fingerprint, load_weights

    arch = Architecture.from_directory(model)
    resolved = getattr(torch, arch.dtype if dtype == "auto" else dtype)
    weights = cache(lambda: load_weights(model, arch, resolved))

    def base_weight(module: str) -> Tensor:
        return weights()[_weight_name(arch, module)]

    return check_adapter(
        adapter,
        arch.target_modules(),
        max_rank=MAX_LORA_RANK,
        dtype=resolved,
        base_fingerprint=fingerprint(model),
        base_weight=base_weight,
    )


def _weight_name(arch: Architecture, module: str) -> str:
    tied = arch.tie_word_embeddings and module == "lm_head"
    return f"{'model.embed_tokens' if tied else module}.weight"


def _print(report: AdapterReport) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    table = Table("module", "rank", "scale", "A", "B", "bytes", "verdict")
    for column in table.columns[1:6]:
        column.justify = "right"
    for row in sorted(report.rows, key=_layer_order):
        table.add_row(*_cells(row, report))
    if report.rows:
        console.print(table)
        console.print(
            f"{len(report.rows)} modules, highest rank {report.max_rank}, "
            f"{report.num_bytes:,} bytes in {report.dtype}",
            soft_wrap=True,
        )
    if report.accepted:
        verdict = Text.assemble(("accepted", "bold green"), f": {report.path}")
        verdict.append(f"\nfingerprint {report.fingerprint}")
    else:
        verdict = Text.assemble(("refused", "bold red"), f": {report.path}")
        for reason in report.reasons:
            verdict.append(f"\n  - {reason}")
    console.print(verdict, soft_wrap=True)


def _layer_order(row: ModuleRow) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part) if part.isdigit() else 0, part) for part in row.module.split(".")]


def _cells(row: ModuleRow, report: AdapterReport) -> tuple[str, ...]:
    names = (row.module, row.a_name, row.b_name)
    faulty = any(name in reason for name in names for reason in report.reasons)
    return (
        row.module,
        str(row.rank),
        f"{row.scale:g}",
        "×".join(map(str, row.a_shape)),
        "×".join(map(str, row.b_shape)),
        f"{report.row_bytes(row):,}",
        "[red]refused[/]" if faulty else "[green]fits[/]",
    )
