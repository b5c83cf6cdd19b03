"""What `make gpu-battery` asks of these tests by environment variables: which run, and until when."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator

import pytest

os.environ.setdefault("TRITON_GEMM_BACKGROUND", "0")  # a test of a product runs its own kernel at the first call
CHOSEN = os.environ.get("BATTERY", "").split()  # regular expressions of their names; what takes longest first
DEADLINE = float(os.environ.get("BATTERY_DEADLINE", "inf"))  # of time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
