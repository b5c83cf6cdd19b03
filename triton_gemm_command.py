"""The command `triton-gemm`, as it starts: its help is there at once, without torch, whose import takes seconds.

This is no part of the package, whose import has torch's. `triton_gemm.cli` has the commands.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "explain": "Show the candidates for a GEMM, their predicted and measured times, and which one runs.",
    "tune": "Time candidates for your GEMMs on this GPU, and save the fastest.",
    "compare": "Time your GEMMs with torch and with this package, and compare their errors.",
    "calibrate": "Fit the cost model to this GPU, in a minute.",
    "warmup": "Compile the kernels of your GEMMs into Triton's cache, without a GPU.",
    "build": "Build the C++ extension that launches repeated calls, without a GPU, unless it is there.",
    "doctor": "Check this machine, and say what to do about each fault.",
    "ladder": "Run a rung of the ladder: the same as `python -m triton_gemm.ladder`.",
    "bench": "Measure suites of shapes against cuBLAS: the same as `python -m perf.bench`.",
    "cache": "List, show, share and check tables of measured choices.",
}
OLDEST_TYPER = (0, 19)
NEEDS = "the command line needs typer 0.19 or newer, and rich: pip install 'typer>=0.19' rich"


def main() -> None:
    """The entry point."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        try:
            app = group()
        except ModuleNotFoundError:  # typer or rich, and the package says so
            pass
        else:
            for name, help in COMMANDS.items():
                app.command(name, help=help)(lambda: None)
            return run(app)
    from triton_gemm.cli import main

    main()


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> None:
    """Runs a command, whose words may be what fails: where nobody reads them, or the disk is full."""
    try:
        app(arguments, prog_name="triton-gemm")
    except OSError as error:  # of --help and --version
        sys.exit(f"error: {error}")
    finally:  # Python would try again as it ends, and fail with another exit status
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def group(**how: Any) -> typer.Typer:
    """The command without its commands. how: as `typer.Typer` takes them. ModuleNotFoundError where typer or rich is
    missing, or typer is too old."""
    import rich  # noqa: F401
    import typer

    if tuple(map(int, re.findall(r"\d+", typer.__version__)[:2])) < OLDEST_TYPER:
        raise ModuleNotFoundError(NEEDS, name="typer")
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit status: 0 done, 1 something failed, 2 a wrong call, 130 interrupted. More: COMMAND --help.",
        **how,
    )

    def show(wanted: bool) -> None:
        if wanted:
            from triton_gemm import __version__

            typer.echo(f"triton_gemm {__version__}")
            raise typer.Exit

    option = typer.Option(False, "--version", callback=show, is_eager=True, help="Show the version and exit.")

    @app.callback()
    def triton_gemm(version: bool = option) -> None:
        """Matrix multiplication for PyTorch in Triton: see which kernel a GEMM runs on, compare with torch, tune, share
        tables of measured choices, compile ahead of time, and check this machine."""

    return app
