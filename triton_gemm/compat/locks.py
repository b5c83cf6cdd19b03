"""Locks in processes that fork: only a private method, which Python's own modules call too, makes a lock free again."""

from __future__ import annotations

import os
from typing import TypeVar

_Lock = TypeVar("_Lock")


def free_in_children(lock: _Lock) -> _Lock:
    """`lock`, which a forked child finds free: the thread that may have held it lives in the parent alone. For locks of
    modules, as Python's own modules do it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
