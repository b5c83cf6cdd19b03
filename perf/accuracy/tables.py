"""Records of accuracy as tables: what the command prints and docs/accuracy.md shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perf.accuracy.inputs import ERRORS
from perf.common import formats
from perf.common.formats import Cell
from perf.measure.environment import Records

COLUMNS = ("products", "kernel", "classes", *ERRORS, "exact, NaN, infinity")
LONG_COLUMNS = ("products", "kernel", "bit class", "normal", "positive", "exact, NaN")

Record = Mapping[str, Any]


def _share(value: float | None) -> str | None:
    """A share of a bound: two figures, and a plain 0."""
    return None if value is None else "0" if value == 0 else f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}"


def _wrong(rows: Iterable[Mapping[str, Any]], within: Sequence[str] = ERRORS) -> str:
    """Whether all is where it should be, of inputs that have no bound, or how many elements are not."""
    counts = [(name, count) for row in rows for name, count in row["wrong"].items() if name not in within]
    wrong = sum(count for _, count in counts)
    return "" if not counts else "right" if not wrong else f"**{wrong:,} wrong**"


def rows(record: Record) -> list[list[Cell]]:
    """A row of COLUMNS for each kind of products and kernel: of its classes of bits the worst."""
    together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["ways"]:
        together.setdefault((row["kind"], row["kernel"]), []).append(row)
    found: list[list[Cell]] = []
    for (kind, kernel), members in together.items():
        worst = [
            max((row["of_bound"][name] for row in members if name in row["of_bound"]), default=None) for name in ERRORS
        ]
        classes = len({row["bits"] for row in members})
        found.append([kind, kernel, classes, *map(_share, worst), _wrong(members)])
    return found


def long_rows(record: Record) -> list[list[Cell]]:
    """A row of LONG_COLUMNS for each very long sum."""
    rows: list[list[Cell]] = []
    for row in record["long"]:
        shares = [_share(row["of_bound"].get(name)) for name in ("normal", "positive")]
        rows.append([row["kind"], row["kernel"], row["bits"], *shares, _wrong([row])])
    return rows


def summary(record: Record) -> str:
    """How many candidates and products, and what BLAS's rules came to, in a sentence."""
    products = sum(len(row["wrong"]) for part in ("ways", "long") for row in record[part])
    classes = len({(row["kind"], row["kernel"], row["bits"]) for row in record["ways"]})
    rules = "K = 0, alpha = 0 of NaN and beta = 0 of NaN are right in every dtype and precision"
    if _wrong(record["ends"]) == "":
        rules = "K = 0, alpha = 0 and beta = 0 were not measured"
    elif _wrong(record["ends"]) != "right":
        rules = f"K = 0, alpha = 0 and beta = 0: {_wrong(record['ends'])}"
    return f"{products:,} products of {classes} kernels and bit classes; {len(record['failed'])} failures. {rules}."


def text(record: Record) -> str:
    """Both tables of one record."""
    K = max((row["K"] for row in record["long"]), default=0)
    return "\n\n".join(
        [
            summary(record),
            formats.table(COLUMNS, rows(record)),
            f"Sums of {K:,} products, as `matmul` computes them, with and without batch invariance:",
            formats.table(LONG_COLUMNS, long_rows(record)),
        ]
    )


NOTHING = "No accuracy is committed yet; `python -m perf.accuracy` on a GPU measures it."
RECORDS = Records("accuracy/{triton}.json", "accuracy", NOTHING, text)
