"""The picture of the bench: speed and error of every precision. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from perf.bench.scores import INDUCTOR, TUNED
from perf.bench.tables import Point
from perf.common.style import (
    CUBLAS_STYLE,
    GREY,
    LABEL_SIZE,
    PALE,
    PALETTE,
    STYLE,
    TRITON,
    legend_below,
    note,
    plain_log,
    save,
)
from perf.measure.providers import CUBLAS, OURS


def precisions(points: Sequence[Point], where: str, path: Path) -> Path:
    """Speed and error of every precision in every layout, a row for each, the most exact precisions first."""
    least = {mode: min(p.error["norm"] for p in points if p.mode == mode) for mode in {p.mode for p in points}}
    kinds = sorted({(least[p.mode], p.mode, p.layout) for p in points})
    modes = list(dict.fromkeys(mode for _, mode, _ in kinds))
    with plt.rc_context(STYLE):
        size = (8, 0.22 * len(kinds) + 0.5)
        figure, (speeds, errors) = plt.subplots(1, 2, figsize=size, sharey=True, width_ratios=(3, 2))
        for row, (error, mode, layout) in enumerate(kinds):
            both = [point.tflops for point in points if (point.mode, point.layout) == (mode, layout)]
            speeds.plot(both, [row] * len(both), color=GREY, linewidth=1, zorder=1)
            if error == 0:
                across = errors.get_yaxis_transform()
                errors.text(0.03, row, "0", transform=across, va="center", fontsize=LABEL_SIZE, color=GREY)
            for axes in (speeds, errors) if modes.index(mode) % 2 else ():
                axes.axhspan(row - 0.5, row + 0.5, color=PALE, linewidth=0, zorder=0)
        for provider, style in PROVIDER_STYLES.items():
            own = [point for point in points if point.provider == provider]
            rows = [(kinds.index((least[point.mode], point.mode, point.layout)), point) for point in own]
            if not rows:
                continue
            speeds.plot([p.tflops for _, p in rows], [row for row, _ in rows], linestyle="", label=provider, **style)
            inexact = [(row, point.error["norm"]) for row, point in rows if point.error["norm"]]
            errors.plot([norm for _, norm in inexact], [row for row, _ in inexact], linestyle="", **style)
        plain_log(speeds)
        if any(least.values()):  # there is no logarithm of nothing but zeros
            errors.set_xscale("log")
        for axes in (speeds, errors):
            axes.margins(x=0.1)
            axes.set_ylim(len(kinds) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
        speeds.set_yticks(range(len(kinds)), [f"{mode} {layout}" for _, mode, layout in kinds])
        speeds.set_xlabel("TFLOPS of the product asked for (log scale)")
        errors.set_xlabel("relative error (norm)")
        speeds.set_title(f"Speed and error of each precision and layout, M = N = K = 4096\n{where}")
        legend_below(speeds)
        note(speeds, "nt: A row-major, B column-major, as a linear layer's weight lies; and so on.", below=62)
        return save(figure, path)


PROVIDER_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": TRITON, "marker": "o", "markersize": 8},
    CUBLAS: {**CUBLAS_STYLE, "markersize": 4.5},
    TUNED: {"color": PALETTE[1], "marker": "s", "markersize": 4.5},
    INDUCTOR: {"color": PALETTE[2], "marker": "^", "markersize": 5},
}
