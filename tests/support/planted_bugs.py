"""What the checks of planted bugs must do: fail for each bug, and pass on the kernel as it is.

A tier that runs these tests so finds each of the bugs in the kernel itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.support.gluon_threads import DeadlockError

UNCHANGED = "unchanged"


def with_each(bugs: Iterable[str]) -> pytest.MarkDecorator:
    """Runs a test for each bug, and for the kernel as it is."""
    return pytest.mark.parametrize("bug", [UNCHANGED, *bugs])


def caught(bug: str) -> AbstractContextManager[object]:
    return nullcontext() if bug == UNCHANGED else pytest.raises((AssertionError, DeadlockError, IndexError))
