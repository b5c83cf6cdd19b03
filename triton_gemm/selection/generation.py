"""The number of the state that choices depend on. Caches of plans have it in their keys, so that no plan is served that
was chosen under another policy of the process, or before a table changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from itertools import count
from typing import Any, TypeVar, cast

number = 0
models = 0  # of the models that GPUs are chosen for by; plans have `number`, which follows it
contexts: bool | None = None  # whether a policy was ever set in a context
_numbers = count(1)  # no lock: a block that the garbage collector or a signal's handler ends may call these at any time
_followers: list[Callable[[int, bool], object]] = []
Function = TypeVar("Function", bound=Callable[..., object])


def advance() -> None:
    """Call it after the state has changed: who reads the new number then sees the new state."""
    global number
    try:
        number = next(_numbers)
    finally:  # whatever a signal's handler raises
        _notify()


def set_in_contexts() -> None:
    """Call it before a policy is set in a context."""
    global contexts
    if not contexts:
        contexts = True
        _notify()


def follow(follower: Callable[[int, bool], object]) -> None:
    """Has `follower(number, contexts)` called now and after each change, by the thread that has changed it."""
    _followers.append(follower)
    follower(number, bool(contexts))


def _notify() -> None:
    for follower in _followers:
        follower(number, bool(contexts))


def advance_models() -> None:
    """Call it after a GPU's model has changed."""
    global models
    models = next(_numbers)
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
