"""Functions in the place of others: those that note their calls, and several of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def noted(
    patch: pytest.MonkeyPatch, owner: object, name: str, what: Callable[..., Any] = lambda *given, **_: given
) -> list[Any]:
    """Replaces a function by one that calls it. Returns a list, to which each call adds `what` of its arguments."""
    function, seen = getattr(owner, name), list[Any]()

    def noting(*given: Any, **how: Any) -> Any:
        seen.append(what(*given, **how))
        return function(*given, **how)

    patch.setattr(owner, name, noting)
    return seen


def replace_all(patch: pytest.MonkeyPatch, owner: object, /, **values: object) -> None:
    """Replaces attributes of a module or a class."""
    for name, value in values.items():
        patch.setattr(owner, name, value)
