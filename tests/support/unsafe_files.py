"""Files from which no code is loaded: what makes one of them of a right one, and words of the error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SOMEBODY = 12345  # another user


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    os.chown(path, SOMEBODY, SOMEBODY)


def make_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by(make: Callable[[Path], Any], file: Path) -> None:
    file.unlink()
    make(file)


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


Faults = dict[str, tuple[Callable[[Path], Any], str]]
# Others could have written them.
FOREIGN: Faults = {
    "a file that its group may write": (lambda file: file.chmod(0o664), "others may write to"),
    "a file that all may write": (lambda file: file.chmod(0o646), "others may write to"),
    "a folder that its group may write": (lambda file: file.parent.chmod(0o770), "others may write to"),
    "a folder that all may write": (lambda file: file.parent.chmod(0o1777), "others may write to"),
    "a folder that is a link": (lambda file: make_a_link(file.parent), "a link instead of a folder"),
    "somebody's file": (give_away, f"belongs to user {SOMEBODY}"),
    "somebody's folder": (lambda file: give_away(file.parent), f"belongs to user {SOMEBODY}"),
}
IRREGULAR: Faults = {
    "a pipe": (partial(replace_by, os.mkfifo), "no regular file"),
    "a folder": (partial(replace_by, lambda file: (file / "with").mkdir(parents=True)), "no regular file"),
    "a link": (make_a_link, "is a link"),
}
