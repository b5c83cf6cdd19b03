"""Runs calls in new threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """Runs each call in a new thread, all at the same time. Returns the results, or raises one of their errors."""
    start = threading.Barrier(len(calls))

    def begin(call: Callable[[], object]) -> object:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(begin, call) for call in calls]]
