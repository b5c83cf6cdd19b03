"""The number of the state that choices depend on. Caches of plans have it in their keys, so that no plan is served that
was chosen under another policy of the process, or before a table changed."""

from __future__ import annotations

import threading

from .compat import free_in_children

number = 0
contexts: bool | None = None  # whether a policy was ever set in a context
_lock = free_in_children(threading.Lock())


def advance() -> None:
    """Call it after the state has changed: who reads the new number then sees the new state."""
    global number
    with _lock:
        number += 1
