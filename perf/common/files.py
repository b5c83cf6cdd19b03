"""The files of results: JSON that is written whole, and paths as they are said to a reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_json(source: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    found: dict[str, Any] = json.loads(source.read_text())
    return found


def write_json(target: Path, data: dict[str, Any]) -> None:
    """Writes `data` to `target`; a reader sees the old file or the new one, never a part."""
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(data, file, indent=1, allow_nan=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def shown(path: Path) -> str:
    """The path as short as it can be said here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
