"""What the ladder's drawings share: their style, rectangles and keys, and how one becomes an SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import triton
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from perf.common.style import DARK_SVG, PALETTE, STYLE

LIGHT, ORANGE, GREEN, PINK, BLUE, RED = PALETTE
EMPTY, WAITING, BUSY_WAIT = "#e8e8e8", "#f7dca6", "#bdbdbd"
DRAWING_STYLE = {
    **STYLE,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.grid": False,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # of the same widths, for readers who have one
    "svg.fonttype": "none",
    "svg.hashsalt": "ladder",
}
MADE_WITH = f"Triton {triton.__version__}, Matplotlib {matplotlib.__version__}"
Box = tuple[float, float, float, float]  # left, right, bottom, top


@dataclass(frozen=True)
class Drawing:
    """One picture: what it shows, in a title and a sentence."""

    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """The same text each time, with its title and description for who cannot see it."""
        text = io.StringIO()
        with plt.rc_context(DRAWING_STYLE):
            self.figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": MADE_WITH})
        plt.close(self.figure)
        head = f"<title>{escape(self.title, quote=False)}</title>\n <desc>{escape(self.caption, quote=False)}</desc>"
        head += f" {DARK_SVG}"
        found = re.sub(r"(<svg [^>]*?)>", rf'\1 role="img">\n {head}', text.getvalue(), count=1, flags=re.DOTALL)
        return re.sub(r" ?(<g id=.(?:axes|legend|text)_\d+.>) ?", r"\n\1", " ".join(found.split())) + "\n"


def boxes(axes: Axes, places: Iterable[Box], color: str, edge: float = 0, **style: Any) -> None:
    """Rectangles of one style, as one outline; edge: how wide its white line is."""
    outlines = [Outline([(x, y), (u, y), (u, v), (x, v), (x, y)], closed=True) for x, u, y, v in places]
    if outlines:
        known = {"facecolor": color, "edgecolor": "white", "linewidth": edge, **style}
        axes.add_patch(PathPatch(Outline.make_compound_path(*outlines), **known))


def words(axes: Axes, x: float, y: float, text: object, to: str = "center", **style: Any) -> None:
    """Around y, with x at their `to`, and small."""
    axes.text(x, y, str(text), ha=to, **{"va": "center", "fontsize": 8.5, **style})


def merged(places: Iterable[Box]) -> Iterable[Box]:
    """Rectangles of the same height that touch, from left to right, as one."""
    found: list[Box] = []
    for x, u, y, v in places:
        if found and found[-1][1:] == (x, y, v):
            x = found.pop()[0]
        found.append((x, u, y, v))
    return found


def key(axes: Axes, entries: dict[str, str], below: float = -0.2, *more: Any, **style: Any) -> None:
    """What colours mean, and other handles, under the axes."""
    handles = [*(plt.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in entries.items()), *more]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, below), "borderaxespad": 0, "handlelength": 1}
    place |= {"ncols": len(handles), "fontsize": 8.5, "columnspacing": 1.2}
    axes.legend(handles=handles, **{**place, **style})


def frame(axes: Axes, title: str, x: tuple[float, float], y: tuple[float, float], **more: Any) -> None:
    """Without lines and ticks, rows from above: from where to where x and y go. names: of rows, by y; ticks: words at
    some x; equal: whether both have the same scale; others as for `axes.set`."""
    names, ticks, equal = more.pop("names", {}), more.pop("ticks", {}), more.pop("equal", False)
    axes.set(xlim=x, ylim=y[::-1], aspect="equal" if equal else "auto", **more)
    axes.set_title(title, pad=None if equal else 5)
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_yticks([*names], [*names.values()])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
