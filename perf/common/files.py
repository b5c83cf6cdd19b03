"""The files of results: JSON that is written whole, times of its trials, and paths as they are said to a reader."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(source: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    found: dict[str, Any] = json.loads(source.read_text())
    return found


def write_json(target: Path, data: dict[str, Any]) -> None:
    """Writes `data` to `target`, whole: lists and objects that hold no others are a line each."""
    write_whole(target, _text(data) + "\n")


def _text(value: Any, indent: str = "\n") -> str:
    """indent: of its line; what is deep inside has no more of it."""
    of = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(x, (Mapping, list, tuple)) for x in of):
        return json.dumps(value, separators=(",", ":"))
    inner = indent[:3] + " "
    if isinstance(value, Mapping):
        return (
            "{" + ",".join(f"{inner}{json.dumps(name)}: {_text(x, inner)}" for name, x in value.items()) + indent + "}"
        )
    return "[" + ",".join(inner + _text(x, inner) for x in of) + indent + "]"


def write_whole(target: Path, text: str) -> None:
    """Writes a file; a reader sees the old one or the new one, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def times_of(product: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of the candidates of a product that was tuned, by name.

    Times below the fastest of the final are left out: records before 4eb4b15 have such times, of candidates that left
    the trial at a higher clock. Slower ones of that clock cannot be told and stay.
    """
    least = product.get("fastest_us") or 0.0
    return {name: us for us, name in product["times"] if us >= least}


def link(target: Path, folder: Path) -> str:
    """From a page in `folder`."""
    return Path(os.path.relpath(target, folder)).as_posix()


def shown(path: Path) -> str:
    """The path as short as it can be said here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
