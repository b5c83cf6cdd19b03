"""The pictures with curves: speed against size, and the roofline. They measure nothing."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import triton
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from perf.common import formats
from perf.common.style import BLACK, CUBLAS_STYLE, LABEL_SIZE, PALE, RUNG_COLORS, RUNG_MARKS, label_ends, note, save
from perf.ladder import views
from perf.ladder.record import ProblemResult, Record
from perf.ladder.rungs_and_twins import MODE_TITLES, stem_of
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS
from triton_gemm.ladder import LADDER

SWEEP_COLUMNS = "size,provider,tflops,tflops_p20,tflops_p80,time_ms,ratio_to_cublas,call_us,error,config"
TWIN_MARKS = "s^v"  # of the twins of one rung, in their order; no rung has them
MARK_SIZE = 5.5
MOST_LINES = 9  # in one panel
RUNG_NAMES = [rung.name for rung in LADDER]
OWN_AXES = (
    "Each panel has an axis of its own, from zero. cuBLAS is in those whose kernels reach a quarter of its speed."
)
TWINS_DASHED = "Solid: rungs in Triton; dashed: their twins in CUDA C++. "
BANDS = "Lines are medians, bands go from the 20th to the 80th percentile of the rounds."
HOLLOW = (
    "Hollow, on grey: sizes that are no multiple of 16. There Triton does not know that rows start on 16 bytes. Loads "
    "and stores through pointers move one element at a time, but for k07's loads, and k05 to k09 lose their large "
    "tiles. TMA does not depend on it."
)


def sweep(record: Record, mode: str, folder: Path) -> Path:
    """TFLOPS against size, drawn by `triton.testing.perf_report` from the record; and its table with p20 and p80.

    Lines go through the sizes that are multiples of 16 and say nothing of others, which are marks apart. Many lines are
    in panels.
    """
    problems, names = views.squares(record, mode), views.lines(record, mode)
    _sweep_table(problems, names, folder / f"sweep-{mode}.csv")
    panels = panels_of(problems, names)
    height = 4.8 if len(panels) == 1 else 2.9 * len(panels)
    figure, all_axes = plt.subplots(
        len(panels), figsize=(8, height), sharex=True, squeeze=False, gridspec_kw={"hspace": 0.2}
    )
    for axes, shown in zip(all_axes[:, 0], panels, strict=True):
        lines = _sweep_panel(axes, problems, shown)
        axes.set_xlabel("")
        label_ends(axes, lines)
        if len(panels) > 1:
            axes.set_title(", ".join(stem_of(name) for name in shown if name in RUNG_NAMES), fontsize=LABEL_SIZE + 1)
    first, last = all_axes[0, 0], all_axes[-1, 0]
    title = f"{MODE_TITLES[mode]}: speed against size, operands not in L2\n{views.gpu(record)}"
    first.set_title(title if len(panels) == 1 else f"{title}\n\n{first.get_title(loc='left')}")
    last.set_xlabel("M = N = K")
    twins = TWINS_DASHED if any(stem_of(name) in TWINS for name in names) else ""
    apart = [] if all(map(views.aligned, problems)) else [HOLLOW]
    note(last, twins + BANDS, *apart, *([OWN_AXES] if len(panels) > 1 else []), width=125)
    return save(figure, folder / f"sweep-{mode}.png")


def panels_of(problems: dict[int, ProblemResult], names: Sequence[str]) -> list[list[str]]:
    """What is drawn together: all, or two rungs, their twins, and cuBLAS where it is at most four times as fast."""
    rung_of = {name: twin.rung if (twin := TWINS.get(stem_of(name))) else name[:3] for name in names if name != CUBLAS}
    rungs = sorted(set(rung_of.values()))
    if len(names) <= MOST_LINES or len(rungs) < 2:
        return [list(names)]

    def fastest(shown: Sequence[str]) -> float:
        return max((problem.tflops(name) or 0.0 for problem in problems.values() for name in shown), default=0.0)

    panels = [[name for name, rung in rung_of.items() if rung in rungs[i : i + 2]] for i in range(0, len(rungs), 2)]
    return [own + [name for name in names if name == CUBLAS and fastest([name]) <= 4 * fastest(own)] for own in panels]


def _sweep_panel(axes: Axes, problems: dict[int, ProblemResult], names: Sequence[str]) -> list[Line2D]:
    aligned = [size for size in problems if views.aligned(size)]
    styles = {provider: _style(provider) for provider in names}
    bench = triton.testing.Benchmark(
        x_names=["size"],
        x_vals=aligned,
        line_arg="provider",
        line_vals=names,
        line_names=names,
        plot_name="sweep",
        args={},
        ylabel="TFLOPS",
        x_log=True,
        styles=[(style["color"], style["linestyle"]) for style in styles.values()],
    )

    @triton.testing.perf_report(bench)  # type: ignore[untyped-decorator,unused-ignore]
    def tflops(size: int, provider: str) -> tuple[float, float, float]:
        return views.speeds(problems[size], provider) or (float("nan"),) * 3

    # It would make a figure of its own. Without save_path: it would drop p20 and p80 from its CSV.
    with patch.multiple(plt, figure=lambda: None, subplot=lambda: axes):
        tflops.run(show_plots=False, print_data=False)
    axes.legend().remove()
    lines = list(axes.lines)
    for line, (provider, style) in zip(lines, styles.items(), strict=True):
        line.set(linewidth=1.8 if provider == CUBLAS else 1.4, marker=style["marker"], markersize=MARK_SIZE)
        line.set_label(stem_of(provider))
    for band in axes.collections:
        band.set(alpha=0.12, linewidth=0)
    for size in [size for size in problems if size not in aligned]:
        axes.axvspan(size / 1.06, size * 1.06, color=PALE, linewidth=0, zorder=0)
        for provider, style in styles.items():
            speeds = views.speeds(problems[size], provider)
            if speeds:
                median, low, high = speeds
                axes.plot([size] * 2, [low, high], color=style["color"], linewidth=1)
                hollow: dict[str, Any] = {"markerfacecolor": "white", "markersize": MARK_SIZE}
                axes.plot(size, median, color=style["color"], marker=style["marker"], **hollow)
    axes.set_xticks(list(problems), [str(size) for size in problems])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    return lines


def _style(provider: str) -> dict[str, Any]:
    if provider == CUBLAS:
        return {**CUBLAS_STYLE, "linestyle": "-"}
    return rung_style(provider) if provider.startswith("k") else twin_style(stem_of(provider))


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
        csv.writer(file, lineterminator="\n").writerows([SWEEP_COLUMNS.split(","), *rows])


def rung_style(name: str) -> dict[str, Any]:
    """Colour, mark and line of a rung, the same in every picture."""
    place = RUNG_NAMES.index(name)
    return {"color": RUNG_COLORS[place], "marker": RUNG_MARKS[place], "linestyle": "-"}


def twin_style(stem: str) -> dict[str, Any]:
    """Colour, mark and line of a CUDA twin: its rung's colour, a mark of its own, dashed."""
    rung = next(rung for rung in LADDER if rung.id == TWINS[stem].rung)
    siblings = [other for other, twin in TWINS.items() if twin.rung == rung.id]
    return {**rung_style(rung.name), "marker": TWIN_MARKS[siblings.index(stem)], "linestyle": "--"}


ROOFLINE = (
    "A mark for each size M = N = K that is a multiple of 16, larger to the right; the sweeps have the other sizes. "
    "cuBLAS's mark stands where it was fastest."
)


def roofline(record: Record, folder: Path) -> Path:
    """Every rung under the measured ceilings, a copy's bandwidth and arithmetic's rates, at the sizes whose rows are
    aligned; the sweeps show the others."""
    figure, axes = plt.subplots(figsize=(8, 5.2))
    lines = []
    for rung, points in views.under_roofs(record):
        style = {**rung_style(rung.name), "markersize": MARK_SIZE, "linewidth": 1}
        lines += axes.plot(*zip(*points, strict=True), label=f"{rung.id} {rung.title}", **style)
    copy, roofs = views.roofs(record)
    measured = [roof.intensity for roof in roofs if roof.intensity]
    xs = [*measured, *(x for line in axes.lines for x in np.asarray(line.get_xdata(), dtype=float))]
    ys = [*(roof.tflops for roof in roofs), *(y for line in axes.lines for y in np.asarray(line.get_ydata()))]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(xs) / 1.5, max(xs) * 1.15)
    axes.set_ylim(min(ys) / 1.6, max(ys) * 1.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    left, right = axes.get_xlim()
    x = np.union1d(np.geomspace(left, right, 200), np.array(measured))
    style = {"color": BLACK, "linewidth": 1, "linestyle": ":", "zorder": 1.5}
    for roof in roofs:
        under = np.minimum(x * (copy or np.inf), roof.tflops)
        lines += axes.plot(x, under, label=f"{roof.label}: {formats.number(roof.tflops)}", **style)
        if roof.intensity in measured:
            lines[-1].set(linestyle="-", markevery=[int(np.searchsorted(x, roof.intensity))], markersize=5)
            lines[-1].set(**CUBLAS_STYLE)
    top = max(roof.tflops for roof in roofs)
    if copy:
        axes.plot(x[x * copy <= top], x[x * copy <= top] * copy, **style)
        _name_slope(axes, f"copy, {copy:.2f} TB/s", max(x[0], axes.get_ylim()[0] / copy), copy)
    label_ends(axes, lines)
    axes.set_ylabel("TFLOPS")
    axes.set_xlabel("FLOP for each byte that must cross DRAM (A and B read once, C written once)")
    axes.set_title(f"Every rung under measured ceilings\n{views.gpu(record)}")
    note(axes, ROOFLINE, width=125)
    return save(figure, folder / "roofline.png")


def _name_slope(axes: Axes, text: str, x: float, bandwidth: float) -> None:
    """Names the slope of a bandwidth in TB/s, along it."""
    (left, low), (right, high) = axes.transData.transform([(x, x * bandwidth), (2 * x, 2 * x * bandwidth)])
    angle = float(np.degrees(np.arctan2(high - low, right - left)))
    place: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "rotation_mode": "anchor"}
    axes.annotate(text, (x, x * bandwidth), (4, 8), rotation=angle, fontsize=LABEL_SIZE, **place)
