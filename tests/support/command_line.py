"""Calls of the command `triton-gemm` in this process, and what they print for people and for programs."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner, Result

from triton_gemm.cli.app import app


def call(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(x) for x in arguments], input=stdin, prog_name="triton-gemm")


def document(*arguments: object, code: int = 0) -> Any:
    """What a call with --json prints, all of it."""
    done = call(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def words_of(*arguments: object, code: int = 0, stdin: str | None = None) -> str:
    """What a call prints for people, on one line."""
    done = call(*arguments, stdin=stdin)
    assert done.exit_code == code, done.output
    return " ".join(re.sub(r"[│╭╰─╮╯]", " ", done.output).split())
