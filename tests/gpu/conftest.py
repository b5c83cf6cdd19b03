"""All tests here need a GPU. `make gpu-battery` sets by environment variables which of them run, and until when."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

os.environ.setdefault("TRITON_GEMM_BACKGROUND", "0")  # a test of a product runs its own kernel at the first call
CHOSEN = os.environ.get("BATTERY", "").split()  # regular expressions of their names; what takes longest first
DEADLINE = float(os.environ.get("BATTERY_DEADLINE", "inf"))  # of time.time()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
    if CHOSEN:
        items[:] = [item for words in CHOSEN for item in items if re.search(words, item.nodeid)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before pytest-timeout's, which ends the process: a kernel that waits for ever cannot be interrupted."""
    if CHOSEN:
        item.user_properties.append(("begin", time.time()))
        item.add_marker(pytest.mark.timeout(max(1.0, DEADLINE - time.time()), method="thread"), append=False)
    return (yield)


def pytest_runtest_setup() -> None:
    if time.time() > DEADLINE:
        pytest.fail("no time was left")
