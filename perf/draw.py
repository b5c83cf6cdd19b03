"""The pictures of a record. Each function writes one PNG and measures nothing."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import triton
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perf import seeds, static, views
from perf.bench_tables import Point
from perf.providers import CUBLAS, MODE_TITLES, stem_of
from perf.record import Record
from triton_gemm.ladder import LADDER

TRITON, CUDA, BLACK, GREY = "#1f6fb4", "#d9762b", "#111111", "#8a8a8a"
MARKERS = "osD^vPX"
UNDRAWN = ("fp8-rows", "fp8-fast-rows")  # which lie on fp8 and fp8-fast
MODE_MARKS = {"ieee": "o", "tf32": "s", "fp16": "^"}
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "legend.frameon": False,
}


def precisions(points: Sequence[Point], where: str, path: Path) -> Path:
    """Speed against error of every way to multiply that has an error; one of the scaled ways stands for all."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.5))
        for point in (point for point in points if point.error["norm"] > 0 and point.mode not in UNDRAWN):
            mode, theirs = point.mode, point.provider == CUBLAS
            color, mark = (BLACK, "s") if theirs else (TRITON, "o")
            below = mode == "tf32" if theirs else mode == "ieee" or "x3" in mode  # where there is room
            at = (point.error["norm"], point.tflops)
            axes.plot(*at, mark, color=color, label=point.provider)
            axes.annotate(mode, at, (0, -15 if below else 8), textcoords="offset points", ha="center", color=color)
        handles = {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.legend(handles.values(), handles.keys())
        axes.margins(0.12)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.invert_xaxis()
        axes.set_xlabel("relative error in the norm, against fp64 (better to the right)")
        axes.set_ylabel("TFLOPS of the product asked for")
        axes.set_title(f"M = N = K = 4096: speed against error\n{where}")
        return _save(figure, path)


def everything(record: Record, folder: Path) -> list[Path]:
    """Draws whatever the record has data for; returns the pictures."""
    pictures: list[Path] = []
    with plt.rc_context(STYLE):
        pictures += [sweep(record, mode, folder) for mode in views.modes(record)]
        if views.ladder(record):
            pictures.append(ladder(record, folder))
        if views.roofs(record)[1]:
            pictures.append(roofline(record, folder))
        pictures += [experiment(record, source, folder) for source in views.measured_experiments(record)]
        if views.factors(record):
            pictures.append(factors(record, folder))
        if any("registers" in facts for facts in record["static"].values()):
            pictures += [static_resources(record, folder), static_ceilings(record, folder)]
    return pictures


def gpu(record: Record) -> str:
    return str(record.environment["gpu"] or "no GPU")


def ramp(base: str, count: int) -> list[Any]:
    """`count` shades from light to full `base`."""
    colour = np.array(matplotlib.colors.to_rgb(base))
    return [tuple(1 - (1 - colour) * share) for share in np.linspace(1, 0.4, count)[::-1]]


def styles(names: list[str]) -> list[tuple[Any, str]]:
    """Colour and line of each provider: rungs in one hue, twins in another, darker up the ladder; cuBLAS black."""
    rungs = [name for name in names if name.startswith("k")]
    twins = [name for name in names if name.startswith("c") and name != CUBLAS]
    found: dict[str, tuple[Any, str]] = {CUBLAS: (BLACK, "--")}
    found |= {name: (colour, "-") for name, colour in zip(rungs, ramp(TRITON, len(rungs)), strict=True)}
    found |= {name: (colour, "-") for name, colour in zip(twins, ramp(CUDA, len(twins)), strict=True)}
    return [found[name] for name in names]


SWEEP_COLUMNS = (
    "size",
    "provider",
    "tflops",
    "tflops_p20",
    "tflops_p80",
    "time_ms",
    "ratio_to_cublas",
    "call_us",
    "error",
    "config",
)


def sweep(record: Record, mode: str, folder: Path) -> Path:
    """TFLOPS against size, drawn by `triton.testing.perf_report` from the record; and its table with p20 and p80."""
    problems, names = views.squares(record, mode), views.lines(record, mode)
    name = f"sweep-{mode}"
    bench = triton.testing.Benchmark(
        x_names=["size"],
        x_vals=list(problems),
        line_arg="provider",
        line_vals=names,
        line_names=names,
        plot_name=name,
        args={},
        xlabel="M = N = K",
        ylabel="TFLOPS",
        x_log=True,
        styles=styles(names),
    )
    rows: list[tuple[Any, ...]] = []

    @triton.testing.perf_report(bench)  # type: ignore[untyped-decorator,unused-ignore]
    def tflops(size: int, provider: str) -> tuple[float, float, float]:
        problem = problems[size]
        result = problem["providers"].get(provider)
        if not views.timed(result):
            return float("nan"), float("nan"), float("nan")
        flop, times = 2 * size**3 / 1e9, result["time_ms"]
        median, low, high = flop / times["median"], flop / times["p80"], flop / times["p20"]
        ratio = result["ratio"]["median"] if result["ratio"] else float("nan")
        error = result["error"]["norm"]
        figures = (median, low, high, times["median"], ratio, result["call_us"], error)
        rows.append((size, provider, *(f"{figure:.4g}" for figure in figures), result.get("config", "")))
        return median, low, high

    # Without save_path: perf_report would save before making the folder, and drop p20 and p80 from its CSV.
    tflops.run(show_plots=False, print_data=False)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([SWEEP_COLUMNS, *rows])
    figure = plt.gcf()
    axes = figure.axes[0]
    figure.set_size_inches(9, 5)
    axes.set_title(f"{MODE_TITLES[mode]}: kernel time against size, cold L2\n{gpu(record)}")
    axes.set_xticks(list(problems), [str(size) for size in problems])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    for i, (line, provider) in enumerate(zip(axes.lines, names, strict=True)):
        line.set(linewidth=2 if provider == CUBLAS else 1.4, marker=MARKERS[i % len(MARKERS)], markersize=4)
        line.set_label(stem_of(provider))
    handles = sorted(axes.lines, key=lambda line: -_last(line.get_ydata()))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return _save(figure, folder / f"{name}.png")


def _last(values: Any) -> float:
    known = [float(value) for value in values if not np.isnan(float(value))]
    return known[-1] if known else 0.0


def ladder(record: Record, folder: Path) -> Path:
    """Each rung's bar above its fastest twin's, with % of cuBLAS, registers, shared memory and spills."""
    steps = views.ladder(record)
    figure, axes = plt.subplots(figsize=(6, 0.56 * len(steps) + 1.2))
    largest = max(filter(None, [s.tflops for s in steps] + [s.cublas_tflops for s in steps]), default=1.0)
    smallest = min(filter(None, [s.tflops for s in steps] + [s.twin_tflops for s in steps]), default=0.1)
    for row, step in enumerate(steps):
        _ladder_bar(axes, row - 0.19, step.tflops, step.own, TRITON, largest)
        _ladder_bar(axes, row + 0.19, step.twin_tflops, step.twin_result, CUDA, largest)
        if step.cublas_tflops:
            axes.plot([step.cublas_tflops] * 2, [row - 0.45, row + 0.45], color=BLACK, ls=(0, (2, 1)), lw=1.4)
    _plain_log(axes)
    axes.set_xlim(smallest / 2, largest * 1.25)
    axes.set_ylim(len(steps) - 0.5, -0.9)
    axes.set_yticks(range(len(steps)), [f"{s.rung.id} {s.rung.title}" for s in steps])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("TFLOPS (log scale)")
    for x, heading in COLUMNS:
        axes.text(x, -0.75, heading, transform=axes.get_yaxis_transform(), fontsize=9, color=GREY, va="center")
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=TRITON),
        plt.Rectangle((0, 0), 1, 1, color=CUDA),
        plt.Line2D([], [], color=BLACK, ls=(0, (2, 1))),
    ]
    labels = ["Triton", "its fastest CUDA C++ twin", "cuBLAS in the same precision"]
    axes.legend(handles, labels, ncols=3, loc="upper left", bbox_to_anchor=(-0.3, -0.9 / (0.56 * len(steps))))
    size = views.ladder_size(record)
    axes.set_title(f"The ladder at M = N = K = {size}\n{gpu(record)}", pad=12)
    return _save(figure, folder / "ladder.png")


COLUMNS = ((1.02, "TFLOPS"), (1.17, "of cuBLAS"), (1.37, "regs"), (1.48, "shared"), (1.64, "spills"))


def _ladder_bar(
    axes: Axes, y: float, tflops: float | None, result: dict[str, Any] | None, colour: str, largest: float
) -> None:
    if result is None:
        return
    if tflops is None:
        why = "failed its check" if "failed" in result else "not run on this GPU"
        axes.text(0.01, y, why, transform=axes.get_yaxis_transform(), fontsize=8.5, color=GREY, va="center")
        return
    axes.barh(y, tflops, height=0.36, color=colour)
    ratio = result.get("ratio")
    shared = result.get("shared")
    cells = (
        f"{tflops:.3g}",
        f"{100 * ratio['median']:.3g} %" if ratio else "",
        result.get("registers", ""),
        f"{shared / 1024:.0f} KiB" if shared is not None else "",
        result.get("spills", ""),
    )
    for (x, _), cell in zip(COLUMNS, cells, strict=True):
        axes.text(x, y, str(cell), transform=axes.get_yaxis_transform(), fontsize=9, color=colour, va="center")


def roofline(record: Record, folder: Path) -> Path:
    """Every rung under the measured ceilings, at the sizes whose rows are aligned; the sweeps show the others."""
    bandwidth, roofs = views.roofs(record)
    figure, axes = plt.subplots(figsize=(9, 5.2))
    x = np.geomspace(30, 40_000, 400)
    top = max(roof.tflops for roof in roofs)
    for roof in roofs:
        slope = np.minimum(x * bandwidth, roof.tflops) if bandwidth else np.full_like(x, roof.tflops)
        axes.plot(x, slope, color=BLACK, lw=1.2)
        side = {"va": "top", "y": roof.tflops * 0.94} if "ieee" in roof.label else {"va": "bottom", "y": roof.tflops}
        axes.text(x=x[-1], s=f"{roof.label}: {roof.tflops:.0f} TFLOPS", ha="right", fontsize=8.5, **side)
    if bandwidth:
        axes.text(33, 33 * bandwidth * 2.2, f"copy, {bandwidth:.2f} TB/s", fontsize=8.5, ha="left")
    colours = dict(zip((rung.name for rung in LADDER), ramp(TRITON, len(LADDER)), strict=True))
    ends: list[list[tuple[str, tuple[float, float]]]] = []
    for mode in views.modes(record):
        for rung in LADDER:
            points = [
                (views.point_intensity(problem), views.tflops(problem, problem["providers"][rung.name]))
                for size, problem in views.squares(record, mode).items()
                if size % 16 == 0 and views.timed(problem["providers"].get(rung.name))
            ]
            if points and mode in MODE_MARKS:
                axes.plot(*zip(*points, strict=True), color=colours[rung.name], lw=0.8, marker=MODE_MARKS[mode], ms=4)
                if ends and np.allclose(np.log(ends[-1][-1][1]), np.log(points[-1]), atol=0.3):
                    ends[-1].append((rung.id, points[-1]))
                else:
                    ends.append([(rung.id, points[-1])])
    for together in ends:  # rungs that end in one place share a label
        names = sorted({name for name, _ in together})
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        axes.annotate(label, together[-1][1], xytext=(5, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=top * 1.6)
    axes.set_xlabel("FLOP for each byte that must cross DRAM (A and B read once, C written once)")
    axes.set_ylabel("TFLOPS")
    axes.set_title(f"Every rung under measured ceilings, one mark a size\n{gpu(record)}")
    return _save(figure, folder / "roofline.png")


def experiment(record: Record, source: seeds.Experiment, folder: Path) -> Path:
    """One source: speed-up over its naive kernel here and as published; for a source of one kernel, GFLOPS."""
    rows = [row for row in views.experiment(record, source) if row.time_ms]
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.9))
    places = np.arange(len(rows))
    if len(source.kernels) == 1:
        values, label = [row.gflops or 0 for row in rows], "GFLOPS"
    else:
        values, label = [row.speedup or 0 for row in rows], "speed-up over the source's naive kernel (log scale)"
    axes.barh(places - 0.19, values, height=0.36, color=CUDA, label=f"here: {gpu(record)}")
    published = [row.published_speedup for row in rows]
    if any(published):
        axes.barh(places + 0.19, [p or 0 for p in published], height=0.36, color=GREY, label="published")
    for place, row, value in zip(places, rows, values, strict=True):
        share = f", {100 * row.cublas_share:.3g} % of cuBLAS" if row.cublas_share else ""
        text = f" {value:.3g}{'' if label == 'GFLOPS' else 'x'}: {row.time_ms:.3g} ms{share}"
        axes.text(value, place - 0.19, text, va="center", fontsize=8.5)
        if row.published_speedup:
            axes.text(row.published_speedup, place + 0.19, f" {row.published_speedup:.3g}x", va="center", fontsize=8.5)
    axes.set_yticks(places, [f"{row.kernel.id} {row.kernel.title}" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if label != "GFLOPS":
        _plain_log(axes)
        axes.set_xlim(min(0.5, *values) / 1.5, max([*values, *filter(None, published)]) * 8)
    else:
        axes.set_xlim(0, max(values) * 1.6)
    axes.set_xlabel(label)
    if any(published):
        axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, -0.6 / (0.55 * len(rows) + 1.0)))
    axes.set_title(f"{source.id}: {source.source}\nits kernels at M = N = K = {source.size}, hot L2")
    return _save(figure, folder / f"experiment-{source.id}.png")


def factors(record: Record, folder: Path) -> Path:
    """The factor each rung predicts over another, and the one that was measured."""
    rows = views.factors(record)
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.7))
    places = np.arange(len(rows))
    axes.barh(places - 0.19, [row.predicted for row in rows], height=0.36, color=GREY, label="predicted")
    measured = [row.measured or 0 for row in rows]
    axes.barh(places + 0.19, measured, height=0.36, color=TRITON, label="measured")
    for place, row in zip(places, rows, strict=True):
        axes.text(row.predicted, place - 0.19, f" {row.predicted:.3g}", va="center", fontsize=8.5)
        if row.measured:
            axes.text(row.measured, place + 0.19, f" {row.measured:.3g}", va="center", fontsize=8.5)
    axes.axvline(1, color=BLACK, lw=0.8)
    _plain_log(axes)
    axes.set_xlim(0.5, max([*measured, *(row.predicted for row in rows)]) * 1.6)
    axes.set_yticks(places, [f"{row.rung.id} over {row.over}" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("factor (log scale)")
    axes.legend(loc="lower right", fontsize=8.5)
    axes.set_title(
        f"Predicted and measured gain of every rung at M = N = K = {views.ladder_size(record)}\n{gpu(record)}"
    )
    return _save(figure, folder / "factors.png")


def static_resources(record: Record, folder: Path) -> Path:
    """Registers and shared memory of the default configurations, by architecture."""
    rungs = views.static_defaults(record)
    targets = _targets(rungs)
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for axis, key, scale, label in (
        (axes[0], "registers", 1, "registers a thread"),
        (axes[1], "shared", 1024, "shared memory a block (KiB)"),
    ):
        _grouped_bars(axis, rungs, targets, key, scale)
        axis.set_ylabel(label)
    axes[1].set_xticks(range(len(rungs)), list(rungs), rotation=30, ha="right")
    axes[0].legend(ncols=len(targets), fontsize=8.5, loc="upper left", bbox_to_anchor=(0, 1.13))
    axes[0].set_title("Static facts, not timings: what each rung compiles to, default configuration", pad=20)
    return _save(figure, folder / "static-resources.png")


def static_ceilings(record: Record, folder: Path) -> Path:
    """The predicted ceiling of the default configurations, as a share of each architecture's units."""
    rungs = views.static_defaults(record)
    figure, axes = plt.subplots(figsize=(9, 4))
    targets = _targets(rungs)
    _grouped_bars(axes, rungs, targets, "ceiling_share", 0.01)
    axes.set_xticks(range(len(rungs)), list(rungs), rotation=30, ha="right")
    axes.set_ylabel("% of the units' peak")
    axes.legend(ncols=len(targets), fontsize=8.5, loc="upper left", bbox_to_anchor=(0, 1.12))
    axes.set_title("Static facts, not timings: the ceiling that counting bytes predicts", pad=30)
    return _save(figure, folder / "static-ceilings.png")


def _targets(rungs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    seen = {target for facts in rungs.values() for target in facts}
    return [target for target in (f"sm_{major}{minor}" for major, minor in static.CAPABILITIES) if target in seen]


def _grouped_bars(
    axes: Axes, rungs: dict[str, dict[str, dict[str, Any]]], targets: list[str], key: str, scale: float
) -> None:
    width = 0.8 / len(targets)
    for i, (target, colour) in enumerate(zip(targets, ramp(TRITON, len(targets)), strict=True)):
        places = np.arange(len(rungs)) + (i - (len(targets) - 1) / 2) * width
        heights = [facts.get(target, {}).get(key, 0) / scale for facts in rungs.values()]
        axes.bar(places, heights, width=width, color=colour, label=target)
    axes.grid(axis="x", visible=False)


def _plain_log(axes: Axes) -> None:
    """A logarithmic x axis whose ticks read 0.1, 1, 10."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path
