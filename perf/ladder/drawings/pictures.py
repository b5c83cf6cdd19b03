"""The ladder's drawings, docs/drawings/*.svg: one for each rung that has something to see."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt

from perf.ladder.drawings import places, times
from perf.ladder.drawings.canvas import LOOK, MADE_WITH, Drawing
from perf.measure.environment import ROOT

FOLDER = ROOT / "docs" / "drawings"
DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "k01": places.naive,
    "k02": places.coalesced,
    "k03": places.blocked,
    "k04": places.grouped,
    "k05": places.register_tiled,
    "k06": times.pipelined,
    "k08": times.tensor_cores,
    "k09": times.persistent,
    "k10": places.tma,
    "k11": times.warp_specialised,
}


@cache
def drawn(rung: str) -> str:
    """A rung's SVG, of traces that are recorded now. Raises UnavailableError where the interpreter cannot be had."""
    with plt.rc_context(LOOK):
        return DRAWINGS[rung]().svg()


def path(rung: str) -> Path:
    return FOLDER / f"{rung}.svg"


def write() -> None:
    """Draws all of them anew."""
    for rung in DRAWINGS:
        path(rung).write_text(drawn(rung))


def stale() -> list[Path]:
    """Those that are not what today's traces give; of other versions of Triton and Matplotlib nothing is compared."""
    old = {rung: path(rung).read_text() if path(rung).exists() else MADE_WITH for rung in DRAWINGS}
    return [path(rung) for rung, text in old.items() if MADE_WITH in text and text != drawn(rung)]


def shown(rung: str, folder: Path) -> str:
    """A rung's committed drawing and its caption for a page in `folder`, in Markdown; empty where it has none."""
    if not path(rung).exists():
        return ""
    title, caption = re.findall(r"<(?:title|desc)>(.*?)</", path(rung).read_text())[:2]
    link = Path(os.path.relpath(path(rung), folder)).as_posix()
    return f"![{unescape(title)}]({link})\n\n*{unescape(caption)}*"
