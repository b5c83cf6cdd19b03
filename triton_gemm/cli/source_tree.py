"""Commands of the repository's `perf`, which a wheel does not hold: bench, ladder. They are passed on to it,
with all of their words, in a process that replaces this one, so that exit codes, signals and output are theirs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from . import output

ROOT = Path(__file__).parents[2]  # of a clone


def run_module(module: str, arguments: list[str]) -> None:
    """`python -m module` of the clone that this package is in, instead of this process."""
    if not (ROOT / "perf" / "__init__.py").exists():
        raise output.FailedError(
            f"`{module}` is in the repository and not in an installed package: "
            "clone it, and there `pip install -e '.[dev]'`, then run this again"
        )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def _passed_on(module: str, what: str) -> Callable[[typer.Context], None]:
    @output.command
    def run(context: typer.Context) -> None:
        run_module(module, context.args)

    run.__doc__ = what
    return run


COMMANDS = {
    "bench": _passed_on(
        "perf.bench", "Measure suites of shapes against cuBLAS: all words go to `python -m perf.bench`."
    ),
    "ladder": _passed_on("triton_gemm.ladder", "One rung by hand: all words go to `python -m triton_gemm.ladder`."),
}
