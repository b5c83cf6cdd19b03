"""How figures are written: numbers, shares, sizes, and Markdown tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Cell = str | int | float | None


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A Markdown table: the first column to the left, the others to the right; None is an empty cell."""
    lines = [" | ".join(columns), " | ".join([":--"] + ["--:"] * (len(columns) - 1))]
    lines += [" | ".join("" if cell is None else str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


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
