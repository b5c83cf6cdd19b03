"""Sweeps as rows of cells: what `perf.bench` prints and what pages show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from perf import scores, tables
from perf.environment import slug
from perf.providers import CUBLAS, OURS
from perf.record import read_json
from perf.scores import Score, Sweep
from perf.shapes import PRECISION, SUITES
from perf.tables import Cell
from triton_gemm.precision import SPLIT

FOLDER = "bench"
NOTHING = "No sweep is committed yet; `python -m perf.bench all` on a GPU makes them."
SCORE_COLUMNS = ("suite", "over", "shapes", "geometric mean", "minimum", "target", "losing", "")
WORST = 8  # losing shapes that are named


def folder_of(results: Path, surroundings: dict[str, Any]) -> Path:
    """Where the sweeps of a GPU and a Triton belong."""
    return results / slug(surroundings["gpu"]) / FOLDER / str(surroundings["triton"])


def columns(sweep: Sweep) -> list[str]:
    """The columns of `row`."""
    unit = sweep["unit"]
    if unit == "us":
        measured = ["ours µs", "cuBLAS µs", "ours least", "cuBLAS least"]
    else:
        measured = ["ours ms", "cuBLAS ms", f"ours {unit}", f"cuBLAS {unit}"]
    others = [f"to {name}" for name in other_providers(sweep)]
    return ["shape", *measured, "ratio", "  p20 to p80", *others, "error", "cuBLAS's", "kernel"]


def row(sweep: Sweep, key: str) -> list[Cell]:
    """One shape: both times and speeds, the ratio, both errors, and what ours ran."""
    shape = sweep["shapes"][key]
    results = [scores.timed(shape, name) for name in (OURS, CUBLAS)]
    if sweep["unit"] == "us":
        cells = [tables.number(1000 * r[f][g] if g else 1000 * r[f]) if r else None for f, g in _CALLS for r in results]
    else:
        speed = scores.tflops if sweep["unit"] == "TFLOPS" else scores.gbs
        cells = [tables.number(r["time_ms"]["median"], 4) if r else None for r in results]
        cells += [tables.number(speed(shape, r)) if r else None for r in results]
    spread = scores.spread(shape)
    ratios: list[Cell] = (
        [f"{spread['median']:.3f}", f"{spread['p20']:.3f} to {spread['p80']:.3f}"] if spread else [None] * 2
    )
    for name in other_providers(sweep):
        to_other = scores.ratio(shape, OURS, name)
        ratios.append(None if to_other is None else f"{to_other:.3f}")
    errors = [
        tables.error((shape["providers"].get(name, {}).get("error") or {}).get("norm")) for name in (OURS, CUBLAS)
    ]
    return [key, *cells, *ratios, *errors, outcome(shape["providers"].get(OURS, {}))]


_CALLS = (("time_ms", "median"), ("least_ms", None))


def other_providers(sweep: Sweep) -> list[str]:
    """The providers beside ours and cuBLAS, in the order they were measured."""
    names = dict.fromkeys(name for shape in sweep["shapes"].values() for name in shape["providers"])
    return [name for name in names if name not in (OURS, CUBLAS)]


def outcome(result: dict[str, Any]) -> str:
    """The kernel and configuration that ran, or why nothing did."""
    if "failed" in result:
        return f"FAILED: {result['failed']}"
    if "absent" in result:
        return f"absent: {result['absent']}"
    return str(result.get("config", "")).partition(": ")[0]


def score_row(score: Score) -> list[Cell]:
    """A line of the summary."""
    target = score.target
    wanted = "" if target is None else f"{target.mean:.2f}"
    wanted += f" / {target.minimum:.2f}" if target is not None and target.minimum is not None else ""
    verdict = {None: "", True: "met", False: "missed"}[score.met]
    count = str(len(score.ratios)) + (f" (+ {score.missing} not timed)" if score.missing else "")
    return [
        score.suite,
        score.over,
        count,
        f"{score.mean:.3f}",
        f"{score.minimum:.3f}",
        wanted,
        len(score.losers),
        verdict,
    ]


def score_rows(sweeps: Sequence[Sweep]) -> list[list[Cell]]:
    """The summary over sweeps, under their labels."""
    rows = []
    for sweep in sweeps:
        extra = scores.label(sweep).removeprefix(sweep["suite"])
        for score in scores.scores(sweep):
            first, *rest = score_row(score)
            rows.append([f"{first}{extra}", *rest])
    return rows


def committed(results: Path) -> list[Sweep]:
    """Every sweep under `results`, by GPU, Triton version and suite."""
    found = [read_json(path) for path in results.glob(f"*/{FOLDER}/*/*.json")]
    return sorted(found, key=_order)


def _order(sweep: Sweep) -> tuple[Any, ...]:
    version = [int(part) if part.isdigit() else -1 for part in str(sweep["environment"]["triton"]).split(".")]
    place = list(SUITES).index(sweep["suite"]) if sweep["suite"] in SUITES else len(SUITES)
    return sweep["environment"]["gpu"] or "", version, place, scores.label(sweep)


def summary(sweeps: Sequence[Sweep]) -> str:
    """A table for each GPU and Triton version: the block `bench`."""
    parts = []
    for place, group in groupby(sweeps, key=where):
        rows = score_rows(list(group))
        parts.append(f"{place}:\n\n{tables.table(SCORE_COLUMNS, rows)}")
    return "\n\n".join(parts) or NOTHING


def suite(sweeps: Sequence[Sweep], name: str) -> str:
    """Every shape of a suite, one table for each GPU and Triton version: the block `bench-<suite>`."""
    parts = [SUITES[name].reason[0].upper() + SUITES[name].reason[1:] + "."]
    own = [sweep for sweep in sweeps if sweep["suite"] == name and sweep["shapes"]]
    for sweep in own:
        rows = [row(sweep, key) for key in sweep["shapes"]]
        parts.append(f"{where(sweep)}, {sweep['dtype']}, {_shapes(sweep)}:\n\n{tables.table(columns(sweep), rows)}")
        if "copy_tbs" in sweep:
            parts.append(f"A copy reads and writes {tables.number(1000 * sweep['copy_tbs'])} GB/s.")
        parts += [losers(score) for score in scores.scores(sweep) if score.losers]
    return "\n\n".join(parts if own else [*parts, NOTHING])


PRECISION_COLUMNS = ("precision", "TFLOPS", "of cuBLAS's SGEMM", "error, norm", "error, worst element")
PRECISION_SIZE = "4096x4096x4096"


@dataclass(frozen=True)
class Point:
    """How fast and how wrong a product is in one way, on PRECISION_SIZE. mode: the suite it is from."""

    provider: str
    mode: str
    tflops: float
    error: Mapping[str, float]


def points(sweeps: Sequence[Sweep]) -> list[Point]:
    """Ours in each mode, and cuBLAS's where it has the mode."""
    found = []
    for sweep in sweeps:
        mode = sweep["suite"]
        shape = next((shape for key, shape in sweep["shapes"].items() if key.split()[0] == PRECISION_SIZE), None)
        if mode not in PRECISION or shape is None:
            continue
        for provider in (OURS,) if mode in SPLIT else (OURS, CUBLAS):
            result = scores.timed(shape, provider)
            if result is not None:
                found.append(Point(provider, mode, scores.tflops(shape, result), result["error"]))
    return found


def precision(sweeps: Sequence[Sweep]) -> str:
    """Speed and error of every way to multiply, one table for each GPU and Triton version: the block `precision`."""
    parts = []
    for place, group in groupby(sweeps, key=where):
        found = points(list(group))
        sgemm = next((point.tflops for point in found if (point.provider, point.mode) == (CUBLAS, "ieee")), None)
        rows = [
            [
                f"{point.provider} {point.mode}",
                tables.number(point.tflops),
                f"{point.tflops / sgemm:.2f}" if sgemm else None,
                *(tables.error(point.error.get(kind)) for kind in ("norm", "componentwise")),
            ]
            for point in found
        ]
        if rows:
            parts.append(f"{place}, {PRECISION_SIZE}:\n\n{tables.table(PRECISION_COLUMNS, rows)}")
    return "\n\n".join(parts) or NOTHING


def losers(score: Score) -> str:
    """The shapes that lose, in words, the worst first."""
    named = [f"{key} ({score.ratios[key]:.2f})" for key in score.losers[:WORST]]
    more = len(score.losers) - len(named)
    who = f"Below {score.target.mean if score.target else 1:g} of" if score.over == scores.COPY else "Slower than"
    return f"{who} {score.over}: {', '.join(named)}{f' and {more} more' if more else ''}."


def where(sweep: Sweep) -> str:
    made = sweep["environment"]
    return f"{made['gpu']}, torch {made['torch']}, Triton {made['triton']}, CUDA {made['cuda']}"


def _shapes(sweep: Sweep) -> str:
    count = len(sweep["shapes"])
    if sweep.get("unseen") is not None:
        return f"{count} shapes drawn with seed {sweep['unseen']}"
    listed = len(SUITES[sweep["suite"]].shapes)  # now; the suite may have grown since
    return f"all {count} shapes" if count == listed else f"{count} of {listed} shapes"
