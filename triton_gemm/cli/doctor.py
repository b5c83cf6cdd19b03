"""`triton-gemm doctor`: what works here and what does not."""

from __future__ import annotations

from dataclasses import asdict, replace

import typer
from rich.console import Console
from rich.text import Text

from ..reporting.doctor import Diagnosis, examine
from ..tables import Silicon
from . import output

_LOOK = {"good": ("good", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "red bold")}


@output.command
def doctor(as_json: output.Json = False) -> None:
    """Check this machine, and say what to do about each fault.

    It checks the GPU and its driver, torch, Triton, compilers, caches, tables, the policy and environment variables.
    It needs no GPU. The exit status is 1 if something is broken. Add the output to a bug report.
    """
    found = examine()
    data = {
        "findings": [asdict(finding) for finding in found.findings],
        # With the power limit, without which no table of theirs is found elsewhere.
        "devices": [asdict(replace(x, power_limit=Silicon.of(x).power_limit)) for x in found.devices],
        "broken": found.broken,
    }
    output.show(data, as_json, lambda console: render(found, console))
    if found.broken:
        raise typer.Exit(output.FAILED)


def render(found: Diagnosis, console: Console) -> None:
    """A line for each finding, and what to do below it."""
    width = max(len(finding.about) for finding in found.findings)
    before = ""
    for finding in found.findings:
        word, style = _LOOK[finding.status]
        about = finding.about if finding.about != before else ""
        before = finding.about
        line = Text.assemble(f"{about:<{width}}  ", (f"{word:<6}", style), f"  {output.printable(finding.says)}")
        console.print(line, soft_wrap=True)
        if finding.do:
            console.print(f"{'':<{width + 10}}{finding.do}", soft_wrap=True)
    broken = sum(finding.status == "broken" for finding in found.findings)
    console.print(f"{broken} broken" if broken else "nothing is broken", style="bold")
