"""For every test: no model hub, no usage reports, threads that do not fight over few cores, and platforms at the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PLATFORMS = ("history", "platform", "cases", "pair")  # fixtures that keep a platform running to the end of the session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Platforms that are up take processor time from whatever runs beside them: first all tests that need none, then
    those that start their own, then those that share one."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("serve") is None:
        return 0
    return 1 + max(
        (1 + at for at, name in enumerate(PLATFORMS) if name in getattr(item, "fixturenames", ())), default=0
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure's report parses source, and CPython 3.11 cannot parse inside of a parse: a finalizer that logs a traceback
    meanwhile would end the whole session in a SystemError."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
