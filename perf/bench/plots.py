"""The picture of the bench: speed and error of every precision. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from perf.bench.scores import INDUCTOR, TUNED
from perf.bench.tables import Point
from perf.common.style import CUBLAS_LOOK, GREY, LABEL_SIZE, PALETTE, STYLE, TRITON, legend_below, plain_log, save
from perf.measure.providers import CUBLAS, OURS


def precisions(points: Sequence[Point], where: str, path: Path) -> Path:
    """Speed and error of every way to multiply, a row for each, the most exact first."""
    least = {mode: min(p.error["norm"] for p in points if p.mode == mode) for mode in {p.mode for p in points}}
    modes = sorted(least, key=lambda mode: (least[mode], mode))
    with plt.rc_context(STYLE):
        size = (8, 0.3 * len(modes) + 0.5)
        figure, (speeds, errors) = plt.subplots(1, 2, figsize=size, sharey=True, width_ratios=(3, 2))
        for row, mode in enumerate(modes):
            own = [point.tflops for point in points if point.mode == mode]
            speeds.plot(own, [row] * len(own), color=GREY, linewidth=1, zorder=1)
            if least[mode] == 0:
                across = errors.get_yaxis_transform()
                errors.text(0.03, row, "0", transform=across, va="center", fontsize=LABEL_SIZE, color=GREY)
        for provider, look in PROVIDER_LOOKS.items():
            rows = [(modes.index(point.mode), point) for point in points if point.provider == provider]
            if not rows:
                continue
            speeds.plot([p.tflops for _, p in rows], [row for row, _ in rows], linestyle="", label=provider, **look)
            inexact = [(row, point.error["norm"]) for row, point in rows if point.error["norm"]]
            errors.plot([norm for _, norm in inexact], [row for row, _ in inexact], linestyle="", **look)
        plain_log(speeds)
        if any(least.values()):  # there is no logarithm of nothing but zeros
            errors.set_xscale("log")
        for axes in (speeds, errors):
            axes.margins(x=0.1)
            axes.set_ylim(len(modes) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
        speeds.set_yticks(range(len(modes)), modes)
        speeds.set_xlabel("TFLOPS of the product asked for (log scale)")
        errors.set_xlabel("relative error (norm)")
        speeds.set_title(f"Speed and error of each precision, M = N = K = 4096\n{where}")
        legend_below(speeds)
        return save(figure, path)


PROVIDER_LOOKS: dict[str, dict[str, Any]] = {
    OURS: {"color": TRITON, "marker": "o", "markersize": 8},
    CUBLAS: {**CUBLAS_LOOK, "markersize": 4.5},
    TUNED: {"color": PALETTE[1], "marker": "s", "markersize": 4.5},
    INDUCTOR: {"color": PALETTE[2], "marker": "^", "markersize": 5},
}
