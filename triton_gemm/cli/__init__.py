"""The command `triton-gemm`: a thin layer over functions that return plain data, a file for each group of commands.

It needs typer and rich, which `import triton_gemm` does not: `pip install 'typer>=0.19' rich`. Without them only
`doctor` runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from triton_gemm_command import NEEDS, run


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 something failed, 2 a wrong call, 130 interrupted."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        _alone(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)
    run(app, arguments)


def _alone(arguments: Sequence[str]) -> NoReturn:
    """Runs `doctor`, and says of other commands what they need."""
    as_json = "--json" in arguments
    if [x for x in arguments if x != "--json"] != ["doctor"]:
        if as_json:
            print(json.dumps({"error": NEEDS}))
        sys.exit(f"error: {NEEDS}")
    from ..reporting.doctor import examine

    found = examine()
    print(json.dumps(found.document(), indent=1) if as_json else printable(f"{found}\n{NEEDS}"))
    sys.exit(found.broken)


def printable(text: str) -> str:
    """A text whose control characters are written out: a file's could tell a terminal to do anything."""
    return "".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in text)
