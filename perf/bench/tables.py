"""Sweeps as rows of cells: what `perf.bench` prints and what pages show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from perf.bench import scores
from perf.bench.scores import Score, Sweep
from perf.common import formats
from perf.common.formats import Cell
from perf.measure import environment
from perf.measure.environment import slug
from perf.measure.providers import CUBLAS, OURS
from triton_gemm.arithmetic import EMULATED
from triton_gemm.suites import PRECISION, SUITES

FOLDER = "bench"
PAGE = "README.md"  # of every suite, in the folder of the sweeps of one GPU and Triton version
PICTURE = "precision.png"  # there, too
TRUTH = "fp64"  # torch's product in it is the truth of all errors
NOTHING = "No sweep is committed yet; `python -m perf.bench all` on a GPU makes them."
WORST = 8  # losing shapes that are named
RATIO = (
    "A ratio to a provider is the median over rounds of its time over ours in the same round. Times are medians of "
    "each one's own rounds, so their quotient may differ from the ratio where the GPU's clock drifts."
)


def folder_of(results: Path, surroundings: Mapping[str, Any]) -> Path:
    """Where the sweeps of a GPU and a Triton belong."""
    return results / slug(surroundings["gpu"]) / FOLDER / str(surroundings["triton"])


def page_of(results: Path, surroundings: Mapping[str, Any]) -> Path:
    """The page of the suites of a GPU and a Triton."""
    return folder_of(results, surroundings) / PAGE


def row(sweep: Sweep, key: str) -> dict[str, Cell]:
    """One shape by column: both times and speeds, the ratios, both errors, and what ours ran."""
    shape, unit = sweep["shapes"][key], sweep["unit"]
    results = {"ours": scores.timed(shape, OURS), "cuBLAS": scores.timed(shape, CUBLAS)}
    cells: dict[str, Cell] = {"shape": key}
    if unit == "us":
        cells |= {
            f"{who} µs": formats.number(1000 * r["time_ms"]["median"]) if r else None for who, r in results.items()
        }
        cells |= {f"{who} least": formats.number(1000 * r["least_ms"]) if r else None for who, r in results.items()}
    else:
        speed = scores.tflops if unit == "TFLOPS" else scores.gbs
        cells |= {f"{who} ms": formats.number(r["time_ms"]["median"], 4) if r else None for who, r in results.items()}
        cells |= {f"{who} {unit}": formats.number(speed(shape, r)) if r else None for who, r in results.items()}
    spread = scores.spread(shape)
    cells["ratio"] = f"{spread['median']:.3f}" if spread else None
    cells["  p20 to p80"] = f"{spread['p20']:.3f} to {spread['p80']:.3f}" if spread else None
    for name in other_providers(sweep):
        to_other = scores.ratio(shape, OURS, name)
        cells[f"to {name}"] = None if to_other is None else f"{to_other:.3f}"
    for column, name in () if sweep.get("dtype") == TRUTH else (("error", OURS), ("cuBLAS's", CUBLAS)):
        cells[column] = formats.error((shape["providers"].get(name, {}).get("error") or {}).get("norm"))
    return cells | {"kernel": outcome(shape["providers"].get(OURS, {}))}


def other_providers(sweep: Sweep) -> list[str]:
    """The providers other than ours and cuBLAS, in the order they were measured."""
    names = dict.fromkeys(name for shape in sweep["shapes"].values() for name in shape["providers"])
    return [name for name in names if name not in (OURS, CUBLAS)]


def absences(sweep: Sweep) -> list[str]:
    """Which of the other providers did not take shapes, how many, and why not."""
    counts: Counter[tuple[str, str]] = Counter()
    for shape in sweep["shapes"].values():
        for name in other_providers(sweep):
            reason = shape["providers"].get(name, {}).get("absent")
            counts.update([(name, reason)] if reason else [])
    total = len(sweep["shapes"])
    return [
        f"{name} is absent on {'all' if n == total else f'{n} of {total}'} shapes: {reason}."
        for (name, reason), n in counts.items()
    ]


def outcome(result: dict[str, Any]) -> str:
    """The kernel and configuration that ran, or why nothing did."""
    if "failed" in result:
        return f"FAILED: {result['failed']}"
    if "absent" in result:
        return f"absent: {result['absent']}"
    return str(result.get("config", "")).partition(": ")[0]


def _wanted(score: Score) -> str:
    """The target for mean and minimum, in words."""
    target = score.target
    wanted = "" if target is None else f"{target.mean:.2f}"
    return f"{wanted} / {target.minimum:.2f}" if target is not None and target.minimum is not None else wanted


def score_rows(sweeps: Sequence[Sweep]) -> list[dict[str, Cell]]:
    """The summary over sweeps, under their labels."""
    return [
        {
            "suite": name,
            "over": score.over,
            "shapes": f"{len(score.ratios)}" + (f" (+ {score.missing} not timed)" if score.missing else ""),
            "geometric mean": f"{score.mean:.3f}",
            "minimum": f"{score.minimum:.3f}",
            "target": _wanted(score),
            "losing": len(score.losers),
            "": {None: "", True: "met", False: "missed"}[score.met],
        }
        for sweep in sweeps
        for name, score in named_scores(sweep)
    ]


def named_scores(sweep: Sweep) -> list[tuple[str, Score]]:
    """The scores that a sweep decides, each by the name of its suite and what differs from the suite's list."""
    extra = scores.label(sweep).removeprefix(sweep["suite"])
    return [(f"{score.suite}{extra}", score) for score in scores.scores(sweep)]


def committed(results: Path) -> list[Sweep]:
    """Every sweep under `results`, by GPU, Triton version and suite."""
    found = environment.committed(results, f"{FOLDER}/*/*.json")
    return sorted(found, key=lambda sweep: (environment.order(sweep["environment"]), _place(sweep)))


def _place(sweep: Sweep) -> tuple[int, str]:
    """Of a sweep's suite among all."""
    known = list(SUITES)
    return known.index(sweep["suite"]) if sweep["suite"] in SUITES else len(known), scores.label(sweep)


def calls(sweeps: Sequence[Sweep]) -> str:
    """Python's time of a call by provider, of layers among many, in sweeps of the suites `host`: the block `host`."""
    parts = []
    for sweep in (each for each in sweeps if each.get("kind") == "host"):
        rows = (
            {"microseconds a call": key, **{name: _us(result) for name, result in shape["providers"].items()}}
            for key, shape in sweep["shapes"].items()
            if "weights" in key
        )
        parts += [f"Suite `{sweep['suite']}`: {where(sweep)}. {origin([sweep])}", formats.table_of(rows)]
    return "\n\n".join(parts) or NOTHING


def _us(result: Mapping[str, Any]) -> str | None:
    return f"{1000 * result['time_ms']['median']:.1f}" if result.get("time_ms") else None


def by_place(sweeps: Sequence[Sweep]) -> list[tuple[dict[str, Any], list[Sweep]]]:
    """For each GPU and Triton version an environment, and the sweeps; `sweeps` come in this order."""
    groups = [list(group) for _, group in groupby(sweeps, key=lambda sweep: environment.order(sweep["environment"]))]
    return [(group[0]["environment"], group) for group in groups]


def origin(sweeps: Iterable[Sweep]) -> str:
    """Which commits and sources they were measured at."""
    return environment.sentence(
        environment.stated(sweep["environment"], measured(sweep.get("kind"))) for sweep in sweeps
    )


def measured(kind: str | None) -> str:
    """What a sweep of a suite of that kind holds, a key of `environment.SOURCES`: times of calls, or of kernels."""
    return "host" if kind in ("host", "queue") else "bench"


def pages(sweeps: Sequence[Sweep]) -> dict[str, str]:
    """The pages of one GPU and Triton version by their files' names: the summary, and every shape of each suite."""
    made = sweeps[0]["environment"]
    names = dict.fromkeys(sweep["suite"] for sweep in sweeps)
    on = f"on {made['gpu']}, Triton {made['triton']}"
    parts = [
        f"# Every suite {on}",
        f"{'; '.join(dict.fromkeys(map(where, sweeps)))}. {origin(sweeps)}",
        "[docs/performance.md](../../../../../docs/performance.md) says what is measured and how, and what else is.",
        f"Every shape: {', '.join(f'[{name}]({name}.md)' for name in names)}.",
        RATIO,
        formats.table_of(score_rows(sweeps)),
    ]
    found = {PAGE: "\n\n".join(parts) + "\n"}
    for name in names:
        found[f"{name}.md"] = f"# Suite {name} {on}\n\n[Every suite]({PAGE}).\n\n{suite(sweeps, name)}\n"
    return found


def suite(sweeps: Sequence[Sweep], name: str) -> str:
    """Every shape of a suite in `sweeps`, a table for each sweep of it."""
    own = [sweep for sweep in sweeps if sweep["suite"] == name and sweep["shapes"]]
    parts = [SUITES[name].reason[0].upper() + SUITES[name].reason[1:] + ".", RATIO]
    for sweep in own:
        at = environment.place(sweep["environment"])  # the page of all says whether sources have changed since
        parts.append(f"{where(sweep)}; {sweep['dtype']}, {_shapes(sweep)}; {at}.")
        if sweep["dtype"] == TRUTH:
            parts.append("There are no errors: torch's fp64 product is the truth that errors are measured against.")
        parts.append(formats.table_of(row(sweep, key) for key in sweep["shapes"]))
        if "copy_tbs" in sweep:
            parts.append(f"A copy reads and writes {formats.number(1000 * sweep['copy_tbs'])} GB/s.")
        parts += [losers(score) for score in scores.scores(sweep) if score.losers]
        parts += absences(sweep)
    return "\n\n".join(parts)


PRECISION_SIZE = "4096x4096x4096"


@dataclass(frozen=True)
class Point:
    """How fast and how wrong a product is in one precision and layout, on PRECISION_SIZE.

    mode: the suite it is from; layout: of A and B, `nt` where B is stored transposed.
    """

    provider: str
    mode: str
    layout: str
    tflops: float
    error: Mapping[str, float]


def points(sweeps: Sequence[Sweep]) -> list[Point]:
    """Ours in each mode and layout, cuBLAS's where it has the mode, and those of AUTOTUNED where they were measured."""
    shapes = [
        (sweep["suite"], shape)
        for sweep in sweeps
        for key, shape in sweep["shapes"].items()
        if sweep["suite"] in PRECISION and key.split()[0] == PRECISION_SIZE
    ]
    return [
        Point(provider, mode, shape.get("layout", "nn"), scores.tflops(shape, result), result["error"])
        for mode, shape in shapes
        for provider in ((OURS,) if mode in EMULATED else (OURS, CUBLAS, *scores.AUTOTUNED))
        if (result := scores.timed(shape, provider)) is not None
    ]


def precision(sweeps: Sequence[Sweep]) -> str:
    """Speed and error of every precision, one table for each GPU and Triton version: the block `precision`."""
    parts = []
    for _, group in by_place(sweeps):
        found = points(group)
        sgemm = next((point.tflops for point in found if (point.provider, point.mode) == (CUBLAS, "ieee")), None)
        table = formats.table_of(
            {
                "precision": f"{point.provider} {point.mode}",
                "layout": point.layout,
                "TFLOPS": formats.number(point.tflops),
                "of cuBLAS's SGEMM": f"{point.tflops / sgemm:.2f}" if sgemm else None,
                "error, norm": None if point.mode == TRUTH else formats.error(point.error.get("norm")),
                "error, worst element": None
                if point.mode == TRUTH
                else formats.error(point.error.get("componentwise")),
            }
            for point in found
        )
        if found:
            used = [sweep for sweep in group if points([sweep])]
            parts += [f"{where(group[0])}, {PRECISION_SIZE}. {origin(used)}", table]
    return "\n\n".join(parts) or NOTHING


def losers(score: Score) -> str:
    """The shapes that lose, in words, the worst first."""
    named = [f"{key} ({score.ratios[key]:.2f})" for key in score.losers[:WORST]]
    more = len(score.losers) - len(named)
    who = f"Below {score.target.mean if score.target else 1:g} of" if score.over == scores.COPY else "Slower than"
    return f"{who} {score.over}: {', '.join(named)}{f' and {more} more' if more else ''}."


def where(sweep: Sweep) -> str:
    """The GPU and the versions, in words."""
    return environment.named(sweep["environment"])


def _shapes(sweep: Sweep) -> str:
    count = len(sweep["shapes"])
    if sweep.get("unseen") is not None:
        return f"{count} shapes drawn with seed {sweep['unseen']}"
    listed = len(SUITES[sweep["suite"]].shapes)  # now; the suite may have grown since
    return f"all {count} shapes" if count == listed else f"{count} of {listed} shapes"
