"""The pictures with curves: speed against size, and against the bytes that it costs. They measure nothing."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import triton
from matplotlib.axes import Axes

from perf.common import formats
from perf.common.style import BLACK, CUBLAS_LOOK, LABEL_SIZE, PALE, PALETTE, label_ends, note, save
from perf.ladder import views
from perf.ladder.record import ProblemResult, Record
from perf.ladder.rungs_and_twins import MODE_TITLES, stem_of
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS
from triton_gemm.ladder import LADDER

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
TWIN_MARKS = "s^vP"  # of the twins of one rung, in their order; a rung's own is a circle
TWINS_DASHED = "Solid: rungs in Triton; dashed: their twins in CUDA C++. "
BANDS = "Lines are medians, bands go from the 20th to the 80th percentile of the rounds."
HOLLOW = (
    "Hollow, on grey: sizes that are no multiple of 16. There Triton does not know that rows start on 16 bytes, and "
    "loads and stores through pointers move one element at a time. TMA does not depend on it."
)


def sweep(record: Record, mode: str, folder: Path) -> Path:
    """TFLOPS against size, drawn by `triton.testing.perf_report` from the record; and its table with p20 and p80.

    Lines go through the sizes that are multiples of 16 and say nothing of others, which are marks apart.
    """
    problems, names = views.squares(record, mode), views.lines(record, mode)
    aligned = [size for size in problems if views.aligned(size)]
    name = f"sweep-{mode}"
    looks = {provider: _look(provider) for provider in names}
    bench = triton.testing.Benchmark(
        x_names=["size"],
        x_vals=aligned,
        line_arg="provider",
        line_vals=names,
        line_names=names,
        plot_name=name,
        args={},
        xlabel="M = N = K",
        ylabel="TFLOPS",
        x_log=True,
        styles=[(look["color"], look["linestyle"]) for look in looks.values()],
    )

    @triton.testing.perf_report(bench)  # type: ignore[untyped-decorator,unused-ignore]
    def tflops(size: int, provider: str) -> tuple[float, float, float]:
        return views.speeds(problems[size], provider) or (float("nan"),) * 3

    # Without save_path: perf_report would save before making the folder, and drop p20 and p80 from its CSV.
    tflops.run(show_plots=False, print_data=False)
    _sweep_table(problems, names, folder / f"{name}.csv")
    figure = plt.gcf()
    axes = figure.axes[0]
    axes.get_legend().remove()
    figure.set_size_inches(8, 4.8)
    lines = list(axes.lines)
    for line, (provider, look) in zip(lines, looks.items(), strict=True):
        line.set(linewidth=1.8 if provider == CUBLAS else 1.4, marker=look["marker"], markersize=4.5)
        line.set_label(stem_of(provider))
    for band in axes.collections:
        band.set(alpha=0.12, linewidth=0)
    for size in [size for size in problems if size not in aligned]:
        axes.axvspan(size / 1.06, size * 1.06, color=PALE, linewidth=0, zorder=0)
        for provider, look in looks.items():
            speeds = views.speeds(problems[size], provider)
            if speeds:
                median, low, high = speeds
                axes.plot([size] * 2, [low, high], color=look["color"], linewidth=1)
                hollow = {"markerfacecolor": "white", "markersize": 5}
                axes.plot(size, median, color=look["color"], marker=look["marker"], **hollow)
    axes.set_title(f"{MODE_TITLES[mode]}: speed against size, operands not in L2\n{views.gpu(record)}")
    axes.set_xticks(list(problems), [str(size) for size in problems])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    label_ends(axes, lines)
    twins = TWINS_DASHED if any(look["linestyle"] == "--" for look in looks.values()) else ""
    note(axes, twins + BANDS, *([] if len(aligned) == len(problems) else [HOLLOW]), width=125)
    return save(figure, folder / f"{name}.png")


def _look(provider: str) -> dict[str, Any]:
    if provider == CUBLAS:
        return {**CUBLAS_LOOK, "linestyle": "-"}
    return rung_look(provider) if provider.startswith("k") else twin_look(stem_of(provider))


def _sweep_table(problems: dict[int, ProblemResult], names: Sequence[str], path: Path) -> None:
    rows: list[Sequence[object]] = []
    for size, problem in problems.items():
        for provider in names:
            speeds, result = views.speeds(problem, provider), problem.timed(provider)
            if speeds and result:
                ratio = result.ratio.median if result.ratio else float("nan")
                figures = (*speeds, result.time_ms.median, ratio, result.call_us, result.norm)
                rows.append((size, provider, *(f"{figure:.4g}" for figure in figures), result.config or ""))
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([SWEEP_COLUMNS, *rows])


def rung_look(name: str) -> dict[str, Any]:
    """Colour, mark and line of a rung: neighbours on the ladder differ in colour."""
    place = [rung.name for rung in LADDER].index(name)
    return {"color": PALETTE[place % len(PALETTE)], "marker": "o", "linestyle": "-"}


def twin_look(stem: str) -> dict[str, Any]:
    """Colour, mark and line of a CUDA twin: its rung's colour, a mark of its own, dashed."""
    rung = next(rung for rung in LADDER if rung.id == TWINS[stem].rung)
    siblings = [other for other, twin in TWINS.items() if twin.rung == rung.id]
    return {**rung_look(rung.name), "marker": TWIN_MARKS[siblings.index(stem)], "linestyle": "--"}


MODE_MARKS = {"ieee": "o", "tf32": "s", "fp16": "^"}


def roofline(record: Record, folder: Path) -> Path:
    """Every rung under the measured ceilings, at the sizes whose rows are aligned; the sweeps show the others."""
    bandwidth, roofs = views.roofs(record)
    figure, axes = plt.subplots(figsize=(8, 5.2))
    lines = []
    for mode, rung, points in views.under_roofs(record):
        look = {**rung_look(rung.name), "marker": MODE_MARKS[mode]}
        label = f"{rung.id} {rung.title}"
        lines += axes.plot(*zip(*points, strict=True), linewidth=1, markersize=4.5, label=label, **look)
    measured = [roof.intensity for roof in roofs if roof.intensity]
    xs = [*measured, *(x for line in lines for x in line.get_xdata())]
    ys = [*(roof.tflops for roof in roofs), *(y for line in lines for y in line.get_ydata())]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(xs) / 1.5, max(xs) * 1.15)
    axes.set_ylim(min(ys) / 1.6, max(ys) * 1.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    left, right = axes.get_xlim()
    x = np.union1d(np.geomspace(left, right, 200), np.array(measured))
    for roof in roofs:
        under = np.minimum(x * bandwidth, roof.tflops) if bandwidth else np.full_like(x, roof.tflops)
        says = f"{roof.label}: {formats.number(roof.tflops)}"
        lines += axes.plot(x, under, color=BLACK, linewidth=1, linestyle=":", zorder=1.5, label=says)
        if roof.intensity:
            lines[-1].set(linestyle="-", markevery=[int(np.searchsorted(x, roof.intensity))], markersize=5)
            lines[-1].set(**CUBLAS_LOOK)
    if bandwidth:
        _name_slope(axes, f"copy, {bandwidth:.2f} TB/s", x[0], bandwidth)
    label_ends(axes, lines)
    axes.set_xlabel("FLOP for each byte that must cross DRAM (A and B read once, C written once)")
    axes.set_ylabel("TFLOPS")
    axes.set_title(f"Every rung under measured ceilings\n{views.gpu(record)}")
    note(axes, ROOFLINE, width=125)
    return save(figure, folder / "roofline.png")


ROOFLINE = (
    "A mark for each size M = N = K that is a multiple of 16, larger to the right; the sweeps have the other sizes. "
    "cuBLAS's mark stands where it was fastest."
)


def _name_slope(axes: Axes, says: str, x: float, bandwidth: float) -> None:
    """Names the slope of a bandwidth in TB/s, along it."""
    (left, low), (right, high) = axes.transData.transform([(x, x * bandwidth), (2 * x, 2 * x * bandwidth)])
    angle = float(np.degrees(np.arctan2(high - low, right - left)))
    place: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "rotation_mode": "anchor"}
    axes.annotate(says, (x, x * bandwidth), (4, 8), rotation=angle, fontsize=LABEL_SIZE, **place)
