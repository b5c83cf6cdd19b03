"""The command's groups, put together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from . import build, cache, calibrate, compare, doctor, explain, output, source_tree, tune, warmup

# click's, which newer versions of typer have themselves.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """Says with --json, too, why words are no call: typer tells people on stderr before a command runs."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **how: Any) -> Any:
        self.as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().main(args, *more, **how)

    def make_context(self, *words: Any, **how: Any) -> Any:
        with self._told():
            return super().make_context(*words, **how)

    def invoke(self, *words: Any) -> Any:
        with self._told():
            return super().invoke(*words)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except _UsageError as error:
            if self.as_json:
                output.error_document(error.format_message())  # type: ignore[attr-defined]
            raise


class _Sizes(TyperCommand):
    """Takes [BATCHx]MxNxK, as other commands write a GEMM, for M N K."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found: list[str] = []
        for word in args:
            if re.fullmatch(r"\d+(x\d+){2,3}", word):
                *batch, M, N, K = word.split("x")
                found += [M, N, K, *(["--batch", *batch] if batch else [])]
            else:
                found.append(word)
        return super().parse_args(ctx, found)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 something failed, 2 a wrong call, 130 interrupted. More: COMMAND --help.",
)
app.command("explain", cls=_Sizes)(explain.explain)
app.command("tune")(tune.tune)
app.command("compare")(compare.compare)
app.command("calibrate")(calibrate.calibrate)
app.command("warmup")(warmup.warmup)
app.command("build")(build.build)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)
for name, function in source_tree.commands().items():
    passing_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, context_settings=passing_on)(function)


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
    """Matrix multiplication for PyTorch in Triton: see which kernel a GEMM runs on, compare with torch, tune, share
    tables of measured choices, compile ahead of time, and check this machine."""
