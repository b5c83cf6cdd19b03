"""What the command lines share: the parser, types of arguments, and the refusal of flags that would be ignored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def parser(command: str, doc: str | None, **more: Any) -> argparse.ArgumentParser:
    """That of `python -m perf.COMMAND`. doc: the module's docstring, which is printed as it is."""
    keeps_lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m perf.{command}", description=doc, formatter_class=keeps_lines, **more)


def path(text: str) -> Path:
    """A file or folder that is named: an empty word would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name")
    return Path(text)


def name_of(known: Iterable[str]) -> Callable[[str], str]:
    """One of these names. For arguments of which there may be none, which argparse's `choices` refuses."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"no {text!r}; there are {'; '.join(known)}")
        return text

    return name


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Several of these names, with commas between them, each once."""
    one = name_of(known)
    return lambda text: tuple(dict.fromkeys(map(one, text.split(","))))


def count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text!r}")
    return number


def shard(text: str) -> tuple[int, int]:
    """One of so many parts of a list: 1/4 to 4/4."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"a shard is 1/4 to 4/4, not {text!r}")
    return int(index), int(count)


def refuse(parser: argparse.ArgumentParser, found: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Ends the program, as argparse does, where a flag among `names` is given; `why` it would be ignored."""
    ignored = [f"--{name}" for name in names if getattr(found, name) != parser.get_default(name)]
    if ignored:
        parser.error(f"{', '.join(ignored)} would be ignored: {why}")
