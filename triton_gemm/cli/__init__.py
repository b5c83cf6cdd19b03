"""The command `triton-gemm`: a thin layer over functions that return plain data, a file for each group of commands.

It needs typer and rich, which `import triton_gemm` does not: `pip install typer rich`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 something failed, 2 a wrong call, 130 interrupted."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        sys.exit("error: the command line needs typer and rich: pip install typer rich")
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)
    try:
        app(arguments, prog_name="triton-gemm")
    except OSError as error:  # of --help and --version, whose words cannot be written
        sys.exit(f"error: {error}")
    finally:
        _drop_what_cannot_be_written()


def _drop_what_cannot_be_written() -> None:
    """Python would try again as it ends, and fail with another exit status."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
