"""The number of the state that choices depend on. Caches of plans have it in their keys, so that no plan is served that
was chosen under another policy of the process, or before a table changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from ..compat import free_in_children

number = 0
models = 0  # of the models that GPUs are chosen for by; plans have `number`, which follows it
contexts: bool | None = None  # whether a policy was ever set in a context
_lock = free_in_children(threading.Lock())
Function = TypeVar("Function", bound=Callable[..., object])


def advance() -> None:
    """Call it after the state has changed: who reads the new number then sees the new state."""
    global number
    with _lock:
        number += 1


def advance_models() -> None:
    """Call it after a GPU's model has changed."""
    global models
    with _lock:
        models += 1
    advance()


def of_models(maxsize: int) -> Callable[[Function], Function]:
    """An `lru_cache` that is emptied when a GPU's model changes, for functions whose results depend on it."""

    def remembering(function: Function) -> Function:
        @lru_cache(maxsize)
        def remembered(_: int, *arguments: object) -> object:
            return function(*arguments)

        @wraps(function)
        def now(*arguments: object) -> object:
            return remembered(models, *arguments)

        cast(Any, now).cache_clear, cast(Any, now).cache_info = remembered.cache_clear, remembered.cache_info
        return cast(Function, now)

    return remembering
