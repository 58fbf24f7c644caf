"""Kernels on the CPU, through Triton's interpreter.

Triton decides when a kernel is decorated whether it is interpreted, its own library included. So
this must come before anything imports Triton, and no other lane may import `ops.triton`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def _interpreted() -> bool:
    """Whether the Triton in this process, if it is here, came up interpreted."""
    if "triton.language" not in sys.modules:
        return True
    from triton.language import cdiv
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(cdiv, InterpretedFunction)


os.environ["TRITON_INTERPRET"] = "1"
if not _interpreted():
    raise pytest.UsageError(
        "tests/kernels needs Triton's interpreter, but Triton was imported before without it; "
        "run the lane as `scripts/test kernels`, or name tests/kernels on pytest's command line."
    )


_ALLOWED = (
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    "ignore:.*encountered in:RuntimeWarning",  # lanes that a mask hides
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings stay errors, but for those that the interpreter makes of NumPy's scalars and NaN."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings(*_ALLOWED))
