"""What the pictures share: colours and marks that everybody can tell apart, and labels that do not collide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

# Okabe and Ito's colours, which are told apart with any colour vision; without yellow, which is too pale for a line,
# and without black, which is cuBLAS's.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00")
TRITON, CUDA = PALETTE[4], PALETTE[5]
# In an SVG: dark pages have it light on dark. A colour keeps its hue, and so its name.
DARK_SVG = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(.92) hue-rotate(180deg) } }</style>"
# A colour and a mark for each rung of the ladder: those six, and five of Paul Tol's muted and dark schemes. Who lacks a
# kind of cones takes none for another that has the same mark.
_BROWN, _OLIVE, _WINE, _INDIGO, _PURPLE = "#661100", "#666633", "#882255", "#332288", "#AA4499"
RUNG_COLORS = (
    *(_BROWN, _OLIVE, PALETTE[3], PALETTE[1], PALETTE[4], PALETTE[5]),
    *(_WINE, PALETTE[0], PALETTE[2], _INDIGO, _PURPLE),
)
RUNG_MARKS = "oXP<*>*oXP<"
BLACK, GREY, PALE = "#000000", "#6b6b6b", "#f0f0f0"
CUBLAS_STYLE: dict[str, Any] = {"color": BLACK, "marker": "D"}  # in every picture, and nothing else's
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "figure.subplot.wspace": 0.25,
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "legend.frameon": False,
}
LABEL_SIZE = 9
NOTE_SIZE = 8.5


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions nearest to `wanted` (ascending; least squares) that are `gap` apart, between `low` and `high`."""
    together: list[tuple[float, int]] = []  # mean and number of labels that touch, each less the gaps below it
    for i, position in enumerate(wanted):
        mean, count = position - i * gap, 1
        while together and together[-1][0] > mean:
            other, others = together.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        together.append((mean, count))
    bases = np.repeat([mean for mean, _ in together], [count for _, count in together])
    bases = np.minimum(np.maximum(bases, low), high - gap * (len(wanted) - 1))
    return [float(base + i * gap) for i, base in enumerate(bases)]


def label_ends(axes: Axes, lines: Sequence[Line2D]) -> None:
    """Names lines in the right margin, each as near to its last point as the names fit, with a sample before it.

    The limits of the axes must be final.
    """
    box = axes.get_window_extent()
    ends = []
    for line in lines:
        known = np.asarray(line.get_xydata(), dtype=float)
        known = known[np.isfinite(known).all(axis=1)]
        if len(known):
            ends.append((line, (float(known[-1, 0]), float(known[-1, 1]))))
    ends.sort(key=lambda end: end[1][1])
    wanted = [(axes.transData.transform(point)[1] - box.y0) / box.height for _, point in ends]
    gap = 1.35 * LABEL_SIZE * axes.figure.dpi / 72 / box.height
    for (line, point), height in zip(ends, spread(wanted, gap, 0, 1), strict=True):
        leader = {"arrowstyle": "-", "linestyle": ":", "color": line.get_color(), "shrinkA": 0, "shrinkB": 3}
        axes.annotate("", point, (1.04, height), textcoords="axes fraction", arrowprops=leader)
        sample = Line2D([1.04, 1.07, 1.1], [height] * 3, transform=axes.transAxes, clip_on=False, markevery=[1])
        sample.set(color=line.get_color(), linestyle=line.get_linestyle(), linewidth=line.get_linewidth())
        sample.set(marker=line.get_marker(), markersize=line.get_markersize(), label="_sample")
        axes.add_artist(sample)
        axes.text(1.115, height, str(line.get_label()), transform=axes.transAxes, va="center", fontsize=LABEL_SIZE)


def legend_below(axes: Axes, *handles: Any, below: float = 40) -> None:
    """A legend in one line, `below` points under the axes: of all labelled artists, or of `handles`."""
    under = axes.transAxes + ScaledTranslation(0, -below / 72, axes.figure.dpi_scale_trans)
    shown = list(handles) or axes.get_legend_handles_labels()[0]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": under, "borderaxespad": 0}
    axes.legend(handles=shown, ncols=len(shown), fontsize=LABEL_SIZE, columnspacing=1.4, **place)


def note(axes: Axes, *paragraphs: str, below: float = 40, width: int = 100) -> None:
    """What a reader must know to read the picture, `below` points under the axes, `width` characters a line."""
    text = "\n".join(fill(paragraph, width) for paragraph in paragraphs)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    axes.annotate(text, (0, 0), (0, -below), fontsize=NOTE_SIZE, color=GREY, **place)


def plain_log(axes: Axes) -> None:
    """A logarithmic x axis whose ticks read 0.1, 1, 10."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def save(figure: Figure, path: Path) -> Path:
    """Writes and closes a picture."""
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path
