"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """What these calls return, each in a new thread, which all begin together; raises what one of them raised."""
    start = threading.Barrier(len(calls))

    def begin(call: Callable[[], object]) -> object:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(begin, call) for call in calls]]
