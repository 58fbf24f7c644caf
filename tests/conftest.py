"""Settings of every lane. Loads nothing heavy: a lane that needs no torch does not wait for it."""

from __future__ import annotations

import os
import sys

import pytest

# Before torch is imported: its thread count is part of what a result's bits may depend on.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as truegraft sets it, if torch comes first

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine's own Python may lack it; its lane does not use it
    pass
else:
    settings.register_profile(
        "truegraft",
        derandomize=True,
        deadline=None,  # no test asserts a time
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("truegraft")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Fail a run in which one of the folders asked for holds no test."""
    if session.testsfailed:  # a file that cannot be imported: pytest says so itself
        return
    for arg in config.args:
        folder = (config.invocation_params.dir / arg).resolve()
        if folder.is_dir() and not any(item.path.is_relative_to(folder) for item in items):
            raise pytest.UsageError(f"{arg} holds no test")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """Give torch, where a test has imported it, the thread count that OMP_NUM_THREADS says."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
