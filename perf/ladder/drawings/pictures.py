"""The ladder's drawings, docs/drawings/*.svg: of each rung, and of twins whose memory differs from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt

from perf.common.files import link
from perf.ladder.drawings import bits, places, times, twins
from perf.ladder.drawings.canvas import DRAWING_STYLE, MADE_WITH, Drawing
from perf.measure.environment import ROOT

FOLDER = ROOT / "docs" / "drawings"
DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "k01": places.naive,
    "k02": places.coalesced,
    "k03": places.blocked,
    "k04": places.grouped,
    "k05": places.register_tiled,
    "k05-twins": twins.thread_tiled,
    "k06": times.pipelined,
    "k06-twin": twins.warp_tiled,
    "k07": bits.tf32,
    "k08": times.tensor_cores,
    "k08-twin": twins.padded,
    "k09": times.persistent,
    "k10": places.tma,
    "k11": times.warp_specialised,
}


@cache
def drawn(name: str) -> str:
    """A drawing's SVG, of traces that are recorded now. Raises UnavailableError where the interpreter cannot be had."""
    with plt.rc_context(DRAWING_STYLE):
        return DRAWINGS[name]().svg()


def path(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def of(rung: str) -> list[str]:
    """A rung's drawings, its own first."""
    return [name for name in DRAWINGS if name.partition("-")[0] == rung]


def write() -> None:
    """Draws all of them anew."""
    for name in DRAWINGS:
        path(name).write_text(drawn(name))


def stale() -> list[Path]:
    """Those that are not what today's traces give; of other versions of Triton and Matplotlib nothing is compared."""
    old = {name: path(name).read_text() if path(name).exists() else MADE_WITH for name in DRAWINGS}
    return [path(name) for name, text in old.items() if MADE_WITH in text and text != drawn(name)]


def shown(name: str, folder: Path) -> str:
    """A committed drawing and its caption for a page in `folder`, in Markdown; empty where there is none."""
    if not path(name).exists():
        return ""
    title, caption = re.findall(r"<(?:title|desc)>(.*?)</", path(name).read_text())[:2]
    return f"![{unescape(title)}]({link(path(name), folder)})\n\n*{unescape(caption)}*"
