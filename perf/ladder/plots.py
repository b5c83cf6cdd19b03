"""The pictures of a record. Each function writes one PNG and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from perf.common import formats
from perf.common.style import (
    BLACK,
    CUBLAS_STYLE,
    CUDA,
    GREY,
    LABEL_SIZE,
    PALE,
    PALETTE,
    STYLE,
    legend_below,
    note,
    plain_log,
    save,
)
from perf.ladder import autotuner, curves, published, static, views
from perf.ladder.record import Record, StaticFacts, Timed
from perf.measure import environment
from triton_gemm.ladder.command import spelled

ARCHITECTURE_MARKS = "os^vP"


def everything(record: Record, folder: Path) -> list[Path]:
    """Draws whatever the record has data for; returns the pictures."""
    pictures: list[Path] = []
    with plt.rc_context(STYLE):
        pictures += [curves.sweep(record, mode, folder) for mode in views.modes(record) if views.lines(record, mode)]
        if views.ladder(record):
            pictures.append(ladder(record, folder))
        if views.roofs(record)[1] and views.under_roofs(record):
            pictures.append(curves.roofline(record, folder))
        pictures += [experiment(record, source, folder) for source in views.compared_experiments(record)]
        if views.factors(record):
            pictures.append(factors(record, folder))
        if any(facts.registers is not None for facts in record.static.values()):
            pictures.append(static_resources(record, folder))
    return pictures + tunings(record, folder)


def tunings(record: Record, folder: Path) -> list[Path]:
    """Every configuration that the autotuner timed, as a share of its rung's fastest; nothing if none is recorded."""
    found = autotuner.shown(record)
    if not found:
        return []
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 0.4 * len(found) + 0.8))
        across: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": LABEL_SIZE, "va": "center"}
        for row, tuning in enumerate(found):
            color = curves.rung_style(tuning.rung.name)["color"]
            shares = [100 * tuning.share(timed) for timed in tuning.timed]
            axes.plot(shares, [row] * len(shares), "o", color=color, alpha=0.6, label="" if row else TIMED)
            if tuning.modelled:
                style = {"color": BLACK, "markerfacecolor": "none", "markersize": 11}
                axes.plot(100 * tuning.share(tuning.modelled), row, "s", label="" if row else MODELLED, **style)
            for x, cell in ((1.04, formats.number(tuning.fastest.tflops)), (1.2, spelled(tuning.fastest.config))):
                axes.text(x, row, cell, **across)
        for x, heading in ((1.04, "TFLOPS"), (1.2, "the fastest: tile, warps, stages, GROUP_M")):
            axes.text(x, -1, heading, color=GREY, **across)
        axes.set(xlim=(0, 103), ylim=(len(found) - 0.5, -0.6), xlabel="% of the fastest configuration's speed")
        axes.set_yticks(range(len(found)), [f"{tuning.rung.id} {tuning.rung.title}" for tuning in found])
        axes.set_title(f"What the autotuner timed, M = N = K = {found[0].size[0]}\n{views.gpu(record)}", pad=22)
        legend_below(axes)
        return [save(figure, folder / autotuner.PICTURE)]


TIMED, MODELLED = "a configuration, in the rung's colour", "the model's choice"


def ladder(record: Record, folder: Path) -> Path:
    """Each rung's bar above its fastest twin's, with % of cuBLAS, registers, shared memory and spills.

    fp32 units and tensor cores have an axis each, from zero, so that bars of one panel are as long as they are fast.
    """
    steps = views.ladder(record)
    panels = {
        "fp32 units": [step for step in steps if step.rung.precision == "ieee"],
        "tensor cores": [step for step in steps if step.rung.precision != "ieee"],
    }
    panels = {title: group for title, group in panels.items() if group}
    heights = [len(group) + 0.4 for group in panels.values()]
    figure, all_axes = plt.subplots(
        len(panels), figsize=(5.6, 0.52 * sum(heights) + 0.6 + 0.5 * len(panels)), squeeze=False,
        gridspec_kw={"height_ratios": heights, "hspace": 0.22},
    )  # fmt: skip
    for axes, (title, group) in zip(all_axes[:, 0], panels.items(), strict=True):
        _ladder_panel(axes, title, group)
    for x, heading in LADDER_COLUMNS:
        first = all_axes[0, 0]
        first.text(x, -0.75, heading, transform=first.get_yaxis_transform(), fontsize=9, color=GREY, va="center")
    last = all_axes[-1, 0]
    last.set_xlabel("TFLOPS; each panel has an axis of its own, from zero")
    legend_below(
        last,
        plt.Rectangle((0, 0), 1, 1, color=GREY, label="Triton rung, in its colour"),
        plt.Rectangle((0, 0), 1, 1, label="its twin in CUDA C++", **_twin_bar(GREY)),
        plt.Line2D([], [], markersize=5, linewidth=1, label="cuBLAS, same precision", **CUBLAS_STYLE),
    )
    note(last, TWIN, below=62)
    made = f"{environment.named(record.environment)}, {record.environment['date'][:10]}"
    all_axes[0, 0].set_title(f"The ladder at M = N = K = {views.ladder_size(record)}\n{made}")
    return save(figure, folder / "ladder.png")


def _ladder_panel(axes: Axes, title: str, steps: Sequence[views.Step]) -> None:
    for row, step in enumerate(steps):
        apart = 0.19 if step.twin else 0
        colour = curves.rung_style(step.rung.name)["color"]
        _ladder_bar(axes, row - apart, step, step.rung.name, BLACK, color=colour)
        if step.twin:
            _ladder_bar(axes, row + apart, step, step.twin, GREY, **_twin_bar(colour))
        if step.cublas_tflops:
            axes.plot([step.cublas_tflops] * 2, [row - 0.42, row + 0.42], color=BLACK, linewidth=1)
            axes.plot(step.cublas_tflops, row, markersize=5, **CUBLAS_STYLE)
    speeds = [speed for step in steps for speed in (step.tflops, step.twin_tflops, step.cublas_tflops) if speed]
    axes.set_xlim(0, 1.06 * max(speeds, default=1.0))
    axes.set_ylim(len(steps) - 0.5, -0.9)
    axes.set_yticks(range(len(steps)), [f"{step.rung.id} {step.rung.title}" for step in steps])
    axes.grid(axis="y", visible=False)
    axes.set_ylabel(title, color=GREY)


TWIN = (
    "A twin teaches its rung's idea in CUDA C++ and no other: the fastest of its variants is drawn. It is not CUDA at "
    "its best, which is cuBLAS. Shares of cuBLAS divide the TFLOPS that are drawn."
)
LADDER_COLUMNS = ((1.02, "TFLOPS"), (1.17, "of cuBLAS"), (1.37, "regs"), (1.48, "shared"), (1.64, "spills"))


def _twin_bar(colour: str) -> dict[str, Any]:
    return {"facecolor": "white", "edgecolor": colour, "hatch": "/////", "linewidth": 0.8}


def _ladder_bar(axes: Axes, y: float, step: views.Step, provider: str, text: str, **style: Any) -> None:
    result = step.problem.providers[provider]
    if not isinstance(result, Timed):
        reason = "failed its check" if result.failed is not None else "not run on this GPU"
        axes.text(0.01, y, reason, transform=axes.get_yaxis_transform(), fontsize=8.5, color=GREY, va="center")
        return
    tflops = step.problem.tflops_in(result.time_ms.median)
    axes.barh(y, tflops, height=0.36, **style)
    cells = (
        formats.number(tflops),
        formats.percent(step.share(provider)),
        result.registers,
        f"{result.shared / 1024:.0f} KiB" if result.shared is not None else None,
        result.spills,
    )
    for (x, _), cell in zip(LADDER_COLUMNS, cells, strict=True):
        shown = "" if cell is None else str(cell)
        axes.text(x, y, shown, transform=axes.get_yaxis_transform(), fontsize=9, color=text, va="center")


def experiment(record: Record, source: published.Experiment, folder: Path) -> Path:
    """Speed-ups over the source's own naive kernel, here and as published."""
    rows = [row for row in views.experiment(record, source) if row.speedup]
    here, published = [row.speedup for row in rows], [row.published_speedup for row in rows]
    columns = {
        "here": [f"{formats.number(value)}x" for value in here],
        "published": [f"{formats.number(value)}x" if value else None for value in published],
        "ms here": [formats.number(row.time_ms) for row in rows],
        "of cuBLAS": [formats.percent(row.cublas_share) for row in rows],
    }
    figure, axes = _pairs(
        [f"{row.kernel.id} {row.kernel.title}" for row in rows],
        {f"its twins here, on {views.gpu(record)}": (here, CUDA), "published, on the author's GPU": (published, GREY)},
        columns,
    )
    axes.set_xlabel("speed-up over the source's naive kernel (log scale)")
    axes.set_title(f"{source.id}: {source.source}\nM = N = K = {source.size}, hot L2")
    return save(figure, folder / f"experiment-{source.id}.png")


def factors(record: Record, folder: Path) -> Path:
    """The factor each rung predicts over another, and the one that was measured."""
    rows = views.factors(record)
    predicted, measured = [row.predicted for row in rows], [row.measured for row in rows]
    figure, axes = _pairs(
        [f"{row.rung.id} over {row.over}" for row in rows],
        {"measured, in the rung's colour": (measured, GREY), "predicted, before measuring": (predicted, GREY)},
        {
            "predicted": [formats.number(value) for value in predicted],
            "measured": [formats.number(value) for value in measured],
        },
    )
    for y, row in enumerate(rows):
        known = [row.measured] if row.measured else []
        axes.plot(known, [y] * len(known), "o", color=curves.rung_style(row.rung.name)["color"], markersize=6, zorder=4)
    axes.axvline(1, color=BLACK, linewidth=0.8, zorder=1)
    axes.set_xlabel("times as fast (log scale)")
    axes.set_title(
        f"Predicted and measured gain of every rung, M = N = K = {views.ladder_size(record)}\n{views.gpu(record)}"
    )
    return save(figure, folder / "factors.png")


def _pairs(
    names: Sequence[str], series: dict[str, tuple[Sequence[float | None], str]], columns: dict[str, Any]
) -> tuple[Figure, Axes]:
    """A row for each name: a dot and a ring for the two series, joined; and columns of text."""
    figure, axes = plt.subplots(figsize=(5.2, 0.36 * len(names) + 0.7))
    for row, both in enumerate(zip(*(values for values, _ in series.values()), strict=True)):
        known = [value for value in both if value]
        axes.plot(known, [row] * len(known), color=GREY, linewidth=1, zorder=1)
    for i, (label, (values, color)) in enumerate(series.items()):
        places = [row for row, value in enumerate(values) if value]
        if places:
            style = {"markerfacecolor": "white", "markersize": 9, "zorder": 2} if i else {"markersize": 5, "zorder": 3}
            axes.plot([values[row] for row in places], places, "o", color=color, label=label, **style)
    plain_log(axes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    shown = [value for values, _ in series.values() for value in values if value]
    axes.set_xlim(min(shown) / 1.25, max(1.25 * max(shown), 2.5 * min(shown)))
    axes.set_ylim(len(names) - 0.5, -1.1)
    axes.set_yticks(range(len(names)), names)
    across = axes.get_yaxis_transform()
    for x, (heading, cells) in enumerate((heading, cells) for heading, cells in columns.items() if any(cells)):
        place = {"x": 1.04 + 0.2 * x, "transform": across, "fontsize": LABEL_SIZE, "va": "center"}
        axes.text(y=-0.75, s=heading, color=GREY, **place)
        for row, cell in enumerate(cells):
            axes.text(y=row, s=cell or "", **place)
    legend_below(axes)
    return figure, axes


def static_resources(record: Record, folder: Path) -> Path:
    """Registers and shared memory of the default configurations: a panel each, a row for each rung, a mark for each
    architecture."""
    panels: dict[str, Callable[[StaticFacts], float | None]] = {
        "registers a thread (255 at most)": lambda facts: facts.registers,
        "shared memory a block, KiB": lambda facts: None if facts.shared is None else facts.shared / 1024,
    }
    rungs = views.static_defaults(record)
    seen = {target for facts in rungs.values() for target in facts}
    targets = [target for target in static.ARCHITECTURES if target in seen]
    height = 0.5 * len(rungs) + 1
    figure, all_axes = plt.subplots(1, len(panels), figsize=(8, height), sharey=True, squeeze=False)
    for axes, (label, read) in zip(all_axes[0], panels.items(), strict=True):
        for i, target in enumerate(targets):
            offset = 0.84 * ((i + 0.5) / len(targets) - 0.5)
            points = [
                (value, row + offset)
                for row, facts in enumerate(rungs.values())
                if target in facts and (value := read(facts[target])) is not None
            ]
            style: dict[str, Any] = {"color": PALETTE[i], "marker": ARCHITECTURE_MARKS[i], "markersize": 4.5}
            if points:
                style["label"] = f"{target}\n{static.ARCHITECTURES[target]}"
                axes.plot(*zip(*points, strict=True), linestyle="", clip_on=False, zorder=3, **style)
        for row in range(0, len(rungs), 2):
            axes.axhspan(row - 0.5, row + 0.5, color=PALE, linewidth=0, zorder=0)
        axes.set_xlim(left=0)
        axes.set_ylim(len(rungs) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)
        axes.tick_params(axis="y", length=0)
    first = all_axes[0][0]
    first.set_yticks(range(len(rungs)), list(rungs))
    first.set_title("Static facts, not timings: what each rung's default configuration takes", pad=40)
    first.legend(ncols=len(targets), loc="lower left", bbox_to_anchor=(0, 1), handletextpad=0.1, fontsize=LABEL_SIZE)
    note(first, "No mark: the rung is not for this architecture.")
    return save(figure, folder / "static-resources.png")
