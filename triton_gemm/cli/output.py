"""What all commands share: one JSON document or tables, errors in a sentence, and exit codes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import printable as printable

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else, for programs.")]
Function = TypeVar("Function", bound=Callable[..., None])


class FailedError(Exception):
    """What ends a command: a sentence for people, and the exit code."""

    def __init__(self, words: str, code: int = FAILED) -> None:
        super().__init__(words)
        self.code = code


def wrong_call(words: str) -> FailedError:
    return FailedError(words, WRONG_CALL)


def command(function: Function) -> Function:
    """Has errors of a command end it with a sentence on stderr, and with --json with a document on stdout too; with 2
    where the call is wrong (ValueError, TypeError, NotImplementedError), else 1 (RuntimeError, OSError)."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except (FailedError, ValueError, TypeError, RuntimeError, OSError) as error:
            if isinstance(error, typer.Exit | typer.Abort):  # which are RuntimeErrors
                raise
            wrong = isinstance(error, ValueError | TypeError | NotImplementedError)
            code = error.code if isinstance(error, FailedError) else WRONG_CALL if wrong else FAILED
            end(str(error).partition("\nException raised from")[0], code, bool(options.get("as_json")))
        except KeyboardInterrupt:
            end("interrupted", INTERRUPTED, bool(options.get("as_json")))

    return run  # type: ignore[return-value]


def end(words: str, code: int, as_json: bool) -> None:
    """Says why, and exits."""
    if as_json:
        error_document(words)
    typer.echo(f"error: {printable(words)}", err=True)
    raise typer.Exit(code)


def error_document(words: str) -> None:
    """Says why on stdout, where that takes anything: it may be what failed, and stderr gets it, too."""
    with suppress(OSError):
        typer.echo(json.dumps({"error": words}))


def show(data: Any, as_json: bool, render: Callable[[Console], None]) -> None:
    """A command's result: `data` as a JSON document, or `render` for people."""
    if as_json:
        typer.echo(json.dumps(data, indent=1, default=_plain, allow_nan=False))
    else:
        render(console())


def _plain(x: object) -> object:
    """What JSON has no word for."""
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype | Path) else repr(x)


class _Console(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(printable(x) if isinstance(x, str) else x for x in objects), **how)


def console() -> Console:
    """As wide as the terminal; where there is none, so wide that no line is broken."""
    found = _Console(highlight=False, markup=False)
    return found if found.is_terminal else _Console(highlight=False, markup=False, width=240)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, title: str | None = None) -> Table:
    """A table whose first `left` columns are words, the others figures. None is an empty cell."""
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = _widths(columns, cells, left, console().width - 2 * (len(columns) - 1))
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        made.add_column(column, justify="left" if number < left else "right", overflow="fold", width=width)
    for row in cells:
        made.add_row(*row)
    return made


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], left: int, room: int) -> list[int | None]:
    """Of columns that are wrapped between words, figures only where they must be; None, which leaves it to rich, where
    all fit as they are, or words do not: rich breaks words of wide columns where it could wrap others."""
    texts = list(zip(columns, *cells, strict=True))
    wanted = [max(map(len, text)) for text in texts]
    words = [max(map(len, " ".join(text).split()), default=0) for text in texts]
    whole = [max(map(len, (*text[0].split(), *text[1:])), default=0) for text in texts[left:]]
    for least in ([*words[:left], *whole], words):
        more = room - sum(least)
        if more >= 0 and sum(wanted) > room:
            lacking = [wanted[i] - least[i] for i in range(left)]
            given = [min(lack, more * lack // max(1, sum(lacking))) for lack in lacking]
            return [*(least[i] + given[i] for i in range(left)), *least[left:]]
    return [None] * len(columns)


def us(value: float | None) -> str | None:
    """Microseconds, in three figures or whole."""
    return None if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def counted(count: int, one: str, many: str = "") -> str:
    """ "1 kernel", "2 kernels", "2 entries"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
