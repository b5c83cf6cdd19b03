"""The ladder's drawings, docs/drawings/*.svg: of each rung, and of twins whose memory differs from it.

They are changed by hand. What one shows, its facts, is recorded from the kernels or computed from what they compile to.
Its metadata have a digest of the facts, by which a test finds the drawings whose facts have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

from perf.common.files import link
from perf.ladder.drawings import replay, traces, twins
from perf.measure.environment import ROOT

FOLDER = ROOT / "docs" / "drawings"


def _tf32() -> Any:
    """The errors to three digits, as the last ones depend on the CPU that sums."""
    trace = traces.recorded()["k07"]
    return {**trace, "errors": {name: f"{error:.2e}" for name, error in trace["errors"].items()}}


def _timeline(rung: str, steps: int) -> Any:
    loop = replay.Loop.of(rung)
    return [loop.ahead, loop.slots, replay.pipelined(rung, steps).bars]


def _tiles() -> Any:
    trace = traces.recorded()["k09"]
    each, programs = trace["k_tiles"], trace["programs"]
    return [trace, [replay.tile_after_tile(rung, len(x), each).bars for rung in ("k08", "k09") for x in programs]]


def _stores() -> Any:
    c07 = twins.Source.of("c07_warp_tiled")
    return [twins.results_of("c07_warp_tiled"), *map(twins.stored_transposed, (c07.without(" + 4"), c07))]


def _fragments() -> Any:
    c10 = twins.Source.of("c10_wmma_fp16_padded")
    return [twins.fragment_rows(one, tile) for one in (c10.without(" + PAD"), c10) for tile in ("a_tile", "b_tile")]


FACTS: dict[str, Callable[[], Any]] = {
    "k01": lambda: traces.load_of("k01", "a"),
    "k02": lambda: [traces.load_of("k01", "a"), traces.load_of("k02", "b")],
    "k03": lambda: [
        str(traces.RUNGS["k03"].configs[0]),
        [traces.recorded()[rung][name] for rung in ("k01", "k02", "k03") for name in ("loaded", "fma", "most")],
    ],
    "k04": lambda: [
        traces.recorded()[rung][name] for rung in ("k03", "k04") for name in ("edge", "tile", "tiles", "a", "b")
    ],
    "k05": lambda: [traces.results_of("k04"), traces.results_of("k05")],
    "k05-twins": lambda: [
        *map(twins.results_of, ("c04_thread_tiled_1d", "c05_thread_tiled_2d", "c06_register_blocked"))
    ],
    "k06": lambda: [_timeline("k05", 3), _timeline("k06", 6)],
    "k06-twin": _stores,
    "k07": _tf32,
    "k08": lambda: _timeline("k08", 8),
    "k08-twin": _fragments,
    "k09": _tiles,
    "k10": lambda: [str(traces.RUNGS["k10"].configs[0]), traces.boxes(), traces.recorded()["k10"]],
    "k11": replay.ring,
}


def facts(name: str) -> str:
    """What a drawing shows, as JSON. Raises UnavailableError where the interpreter cannot be had."""
    return json.dumps(FACTS[name](), default=vars)


def digest(name: str) -> str:
    """As the drawing's metadata has it."""
    return f"Facts {hashlib.sha256(facts(name).encode()).hexdigest()[:12]}"


def path(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def of(rung: str) -> list[str]:
    """A rung's drawings, its own first."""
    return [name for name in FACTS if name.partition("-")[0] == rung]


def shown(name: str, folder: Path) -> str:
    """A drawing and its caption for a page in `folder`, in Markdown; empty where there is none."""
    if not path(name).exists():
        return ""
    title, caption = re.findall(r"<(?:title|desc)>(.*?)</", path(name).read_text())[:2]
    return f"![{unescape(title)}]({link(path(name), folder)})\n\n*{unescape(caption)}*"
