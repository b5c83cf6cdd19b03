"""Records of accuracy as tables: what the command prints and docs/accuracy.md shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from perf.accuracy.inputs import ERRORS
from perf.common import formats
from perf.common.formats import Cell
from perf.measure.environment import Records

Record = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]  # of a record


def _share(value: float | None) -> str | None:
    """A share of a bound: two figures, and a plain 0."""
    return None if value is None else "0" if value == 0 else f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}"


def _wrong(rows: Rows) -> str:
    """Whether all is where it should be, of inputs that have no bound, or how many elements are not."""
    counts = [count for row in rows for name, count in row["wrong"].items() if name not in ERRORS]
    return "" if not counts else f"**{sum(counts):,} wrong**" if any(counts) else "right"


def _worst(name: str, rows: Rows) -> str | None:
    return _share(max((row["of_bound"][name] for row in rows if name in row["of_bound"]), default=None))


# Of the bit classes of a kind of products and a kernel; and of one very long sum.
COLUMNS: dict[str, Callable[[Rows], Cell]] = {
    "products": lambda rows: rows[0]["kind"],
    "kernel": lambda rows: rows[0]["kernel"],
    "classes": lambda rows: len({row["bits"] for row in rows}),
    **{name: partial(_worst, name) for name in ERRORS},
    "exact, NaN, infinity": _wrong,
}
LONG_COLUMNS: dict[str, Callable[[Rows], Cell]] = {
    **{name: COLUMNS[name] for name in ("products", "kernel")},
    "bit class": lambda rows: rows[0]["bits"],
    **{name: COLUMNS[name] for name in ("normal", "positive")},
    "exact, NaN": _wrong,
}


def summary(record: Record) -> str:
    """How many candidates and products, and what BLAS's rules came to, in a sentence."""
    products = sum(len(row["wrong"]) for part in ("ways", "long") for row in record[part])
    classes = len({(row["kind"], row["kernel"], row["bits"]) for row in record["ways"]})
    found = _wrong(record["ends"])
    rules = f"K = 0, alpha = 0 and beta = 0{f': {found}' if found else ' were not measured'}"
    if found == "right":
        rules = "K = 0, alpha = 0 of NaN and beta = 0 of NaN are right in every dtype and precision"
    return f"{products:,} products of {classes} kernels and bit classes; {len(record['failed'])} failures. {rules}."


def text(record: Record) -> str:
    """Both tables of one record."""
    K = max((row["K"] for row in record["long"]), default=0)
    together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["ways"]:
        together.setdefault((row["kind"], row["kernel"]), []).append(row)
    return "\n\n".join(
        [
            summary(record),
            formats.table_by(COLUMNS, together.values()),
            f"Sums of {K:,} products, as `matmul` computes them, with and without batch invariance:",
            formats.table_by(LONG_COLUMNS, [[row] for row in record["long"]]),
        ]
    )


NOTHING = "No accuracy is committed yet; `python -m perf.accuracy` on a GPU measures it."
RECORDS = Records("accuracy/{triton}.json", "accuracy", NOTHING, text)
