"""The command `triton-gemm`: a thin layer over functions that return plain data, a file for each group of commands.

It needs typer and rich, which `import triton_gemm` does not: `pip install 'triton_gemm[cli]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 something failed, 2 a wrong call, 130 interrupted."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        sys.exit("error: the command line needs typer and rich: pip install 'triton_gemm[cli]'")
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)
    app(arguments, prog_name="triton-gemm")
