"""A C++ compiler that compiles nothing: it notes how it was called, and writes what it is told to."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
for output; do :; done
{does}
"""
BUILT = "what was built"


@dataclass(frozen=True)
class Compiler:
    """path: the command, which notes its arguments in `log`, a line for each call."""

    path: Path
    log: Path

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def links(self) -> int:
        """How often it has linked."""
        return sum("-shared" in call for call in self.calls())


def make(folder: Path, does: str = f'echo "{BUILT}" > "$output"') -> Compiler:
    """A compiler that runs these commands of a shell; `$output` is the file that it is to write."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Compiler(folder / "fake-c++", folder / "calls")
    made.path.write_text(SCRIPT.format(log=shlex.quote(str(made.log)), does=does))
    made.path.chmod(0o755)
    return made
