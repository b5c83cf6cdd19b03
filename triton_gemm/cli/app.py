"""The command's groups, put together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from triton_gemm_command import COMMANDS, group

from . import build, cache, calibrate, compare, doctor, explain, output, source_tree, tune, warmup

# click's, which newer versions of typer have themselves.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """Says with --json, too, why words are no call: typer tells people on stderr before a command runs."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **how: Any) -> Any:
        self.as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().main(args, *more, **how)

    def make_context(self, *words: Any, **how: Any) -> Any:
        with self._with_document():
            return super().make_context(*words, **how)

    def invoke(self, *words: Any) -> Any:
        with self._with_document():
            return super().invoke(*words)

    @contextmanager
    def _with_document(self) -> Iterator[None]:
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


app = group(cls=_Commands)
app.command("explain", cls=_Sizes, short_help=COMMANDS["explain"])(explain.explain)
for function in (tune.tune, compare.compare, calibrate.calibrate, warmup.warmup, build.build, doctor.doctor):
    app.command(function.__name__, short_help=COMMANDS[function.__name__])(function)
for name, passed_on in source_tree.commands().items():
    how = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=COMMANDS[name], context_settings=how)(passed_on)
app.add_typer(cache.app, name="cache", help=COMMANDS["cache"])
