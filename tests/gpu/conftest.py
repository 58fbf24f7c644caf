"""The GPU lane: without a GPU every test fails, and says so. A skip would look like a pass."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device: this lane needs one (scripts/test-gpu)", pytrace=False)
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.fail(f"{torch.cuda.get_device_name()} is older than sm_90", pytrace=False)


def pytest_report_header() -> str:
    if not torch.cuda.is_available():
        return "device: none"
    return f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}"
