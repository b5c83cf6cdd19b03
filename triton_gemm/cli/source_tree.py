"""Commands that are passed on with all of their words, in a process that replaces this one. So exit codes, signals and
output are theirs. They are `ladder`, and in a clone of the repository `bench`, which a wheel does not hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from . import output

ROOT = Path(__file__).parents[2]  # of a clone
MODULES = ("triton_gemm.ladder", "perf.bench")


def _passed_on(module: str) -> Callable[[typer.Context], None]:
    @output.command
    def run(context: typer.Context) -> None:
        if not (ROOT / module.replace(".", "/")).is_dir():
            raise output.FailedError(f"{module.rpartition('.')[2]} needs a clone of the repository")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", module, *context.args], environment)

    return run


def commands() -> dict[str, Callable[[typer.Context], None]]:
    """By name."""
    return {module.rpartition(".")[2]: _passed_on(module) for module in MODULES}
