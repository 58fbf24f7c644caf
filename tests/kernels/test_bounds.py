"""No op writes outside its memory, and each writes all of its outputs (small shapes, interpreted).

`tests/gpu/kernels/test_bounds.py` does the same on a GPU, with more shapes.
"""

from __future__ import annotations

import guarded_ops
import pytest
import torch

from truegraft.errors import ConfigError
from truegraft.ops.triton.ops import TritonOps

CPU = torch.device("cpu")
CASES = guarded_ops.cases(tiny=True)


@pytest.mark.parametrize("name", CASES)
def test_an_op_stays_inside_its_memory(name: str) -> None:
    guarded_ops.run(CASES[name], torch.float16, CPU)


def test_a_slot_that_does_not_exist_is_refused_by_name() -> None:
    depth = torch.ones(3, dtype=torch.int32)
    for slot in (3, -2):
        slots = torch.tensor([0, -1, slot], dtype=torch.int32)
        with pytest.raises(ConfigError, match=rf"row 2 .*slot {slot}\b.*\b2\b"):
            TritonOps(torch.float16, CPU).plan_rows(slots, depth)
