"""`triton-gemm doctor`: what works here and what does not."""

from __future__ import annotations

import typer
from rich.text import Text

from ..reporting.doctor import Diagnosis, examine
from . import output


@output.command
def doctor(as_json: output.Json = False) -> None:
    """Check this machine, and say what to do about each fault.

    It checks the GPU and its driver, torch, Triton, compilers, caches, tables, the policy and environment variables.
    It needs no GPU. The exit status is 1 if something is broken. Add the output to a bug report.
    """
    found = examine()
    output.show(found.document(), as_json, lambda console: console.print(coloured(found), soft_wrap=True))
    if found.broken:
        raise typer.Exit(output.FAILED)


def coloured(found: Diagnosis) -> Text:
    """Its words, in which groups of the pattern are named by their colour."""
    text = Text(output.printable(str(found)))
    text.highlight_regex(r"(?m)^\w* +(?:(?P<green>good)  |(?P<yellow>note)  |(?P<red>BROKEN))  ")
    text.highlight_regex(r".*\Z", "bold")
    return text
