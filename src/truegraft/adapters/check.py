"""A dry run: would this adapter be served, and if not, why not?

Reads through `peft_format`, as a load does, so the answer is the load's. Knows nothing about
printing; the command line and the server show the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truegraft.adapters.peft_format import BaseWeight, ModuleRow, describe_adapter, read_adapter
from truegraft.errors import AdapterError
from truegraft.model.architecture import TargetShape


@dataclass(frozen=True)
class AdapterReport:
    """What was found. rows: the modules that bind, also of a refused adapter, by name.

    fingerprint: set when accepted. reasons: all that is wrong; empty when accepted.
    """

    path: str
    dtype: str
    rows: tuple[ModuleRow, ...]
    reasons: tuple[str, ...]
    fingerprint: str | None

    @property
    def accepted(self) -> bool:
        """Whether a load would succeed."""
        return not self.reasons

    @property
    def num_parameters(self) -> int:
        """Elements of all rows."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in the model's dtype."""
        return sum(self.row_bytes(row) for row in self.rows)

    @property
    def max_rank(self) -> int:
        """Highest rank, 0 without rows."""
        return max((row.rank for row in self.rows), default=0)

    def row_bytes(self, row: ModuleRow) -> int:
        """Bytes of one row in the model's dtype."""
        return row.num_parameters * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields, the totals, and one object per row."""
        return {
            "path": self.path,
            "accepted": self.accepted,
            "reasons": list(self.reasons),
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "num_modules": len(self.rows),
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "max_rank": self.max_rank,
            "modules": [self._row_dict(row) for row in self.rows],
        }

    def _row_dict(self, row: ModuleRow) -> dict[str, Any]:
        return {
            "module": row.module,
            "rank": row.rank,
            "scale": row.scale,
            "a_shape": list(row.a_shape),
            "b_shape": list(row.b_shape),
            "num_bytes": self.row_bytes(row),
        }


def check_adapter(
    path: str | Path,
    targets: Mapping[str, TargetShape],
    *,
    max_rank: int,
    dtype: torch.dtype,
    base_fingerprint: str = "",
    base_weight: BaseWeight | None = None,
) -> AdapterReport:
    """Read config, headers and values as a load would. Never raises for a bad adapter."""
    rows = describe_adapter(path, targets, max_rank=max_rank).rows
    fingerprint: str | None = None
    reasons: tuple[str, ...] = ()
    try:
        fingerprint = read_adapter(
            path,
            targets,
            max_rank=max_rank,
            dtype=dtype,
            base_fingerprint=base_fingerprint,
            base_weight=base_weight,
        ).fingerprint
    except AdapterError as error:
        reasons = error.reasons
    return AdapterReport(str(path), str(dtype).removeprefix("torch."), rows, reasons, fingerprint)
