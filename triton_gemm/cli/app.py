"""The command's groups, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import cache, calibrate, doctor, explain, source_tree, tune, warmup

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 something failed, 2 a wrong call, 130 interrupted. More: docs/cli.md.",
)
app.command("explain")(explain.explain)
app.command("tune")(tune.tune)
app.command("calibrate")(calibrate.calibrate)
app.command("warmup")(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)
for name, function in source_tree.COMMANDS.items():
    passing_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, context_settings=passing_on, rich_help_panel="Only in a clone of the repository")(function)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triton_gemm {__version__}")
        raise typer.Exit


@app.callback()
def triton_gemm(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Matrix multiplication for PyTorch in Triton: see which kernel a product runs on, choose by measurement, keep and
    share what was measured, compile ahead of time, and find out what does not work here."""
