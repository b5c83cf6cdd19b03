"""How figures are written: numbers, shares, sizes, and Markdown tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Cell = str | int | float | None


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A Markdown table: the first column and those of words to the left, the others to the right; None is an empty
    cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    sides = [":--", *(":--" if _words(list(column)) else "--:" for column in list(zip(*cells, strict=True))[1:])]
    sides += ["--:"] * (len(columns) - len(sides))  # where there is no row
    lines = [" | ".join(row) for row in (columns, sides, *cells)]
    return "\n".join(f"| {line} |" for line in lines)


def table_by(columns: Mapping[str, Callable[[Any], Cell]], things: Iterable[Any]) -> str:
    """A table with a row for each of the things: below each heading what its function says of it."""
    return table([*columns], [[of(thing) for of in columns.values()] for thing in things])


def table_of(rows: Iterable[Mapping[str, Cell]]) -> str:
    """A table of rows that name their columns; the longest names all. Nothing where there is no row."""
    found = list(rows)
    columns = max(map(list, found), key=len, default=[])
    return table(columns, [[row.get(name) for name in columns] for row in found]) if found else ""


def folded(summary: str, *parts: str) -> str:
    """Markdown of which a page shows the summary, until it is opened."""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def _words(cells: Sequence[str]) -> bool:
    """Whether most of what a column has begins with a letter, a mark of code or a link."""
    filled = [cell for cell in cells if cell]
    return 2 * sum(cell[0].isalpha() or cell[0] in "`[*" for cell in filled) > len(filled)


def number(value: float | None, digits: int = 3) -> str | None:
    """`digits` significant figures, never in powers of ten."""
    if value is None:
        return None
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def percent(value: float | None) -> str | None:
    """A share as a whole percentage; small ones with two figures."""
    if value is None:
        return None
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.2g} %"


def error(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def kib(value: int | None) -> str | None:
    return None if value is None else f"{value / 1024:.1f}"
