"""`make explore` also writes a page that plays the traces of the ladder's drawings, step by step or on a clock."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perf.ladder.clock_model import LATENCY_CLOCKS
from perf.ladder.drawings import replay, traces, twins
from perf.ladder.drawings.traces import LINE, RUNGS, SECTOR
from perf.ladder.explorer import PAGE as EXPLORER
from perf.measure.roofline import L2_BYTES_PER_CLOCK
from triton_gemm.ladder.exercises.player import COUNTED, Scene, page, rectangles, scene

PAGE = EXPLORER.with_name("player.html")
WORD = 4  # bytes
TOGETHER = 33  # programs of a wave in a step
LOAD = "moved"  # on a clock: of the colour that loads have in the drawings
DURATIONS = (
    "Order and waits are the kernel's. Durations are arithmetic: a load takes a clock for "
    f"{L2_BYTES_PER_CLOCK} bytes, and {LATENCY_CLOCKS} more; a product runs at the units' peak; "
    "a program is alone on its SM."
)
ONE_SLOT = "Three stages are drawn, which have two slots; two stages have one."  # of k06
PLAYED = ("k01", "k02", "k03", "k04", "k05", "k06", "k08", "k09", "k11")


def title(rung: str) -> str:
    return f"{rung} {RUNGS[rung].title}"


def warp(rung: str, operand: str) -> Scene:
    """A warp's load, lane by lane: lines of 128 bytes, a word to a column."""
    access = traces.load_of(rung, operand)
    lines = sorted({first // LINE for first in access.lanes})
    label = f"{len(lines)} lines of {LINE} bytes in {operand.upper()}"
    grid = {"name": "m", "label": label, "rows": len(lines), "columns": LINE // WORD, "x": 0, "y": 0}
    steps: list[dict[str, Any]] = []
    moved = set[int]()
    for lane, first in enumerate(access.lanes):
        row, sector = lines.index(first // LINE), first // SECTOR
        fresh = [("m", "moved", row, sector * SECTOR % LINE // WORD, 1, SECTOR // WORD)] if sector not in moved else []
        moved.add(sector)
        text = f"Lane {lane} reads {access.width} bytes. Sectors moved: {len(moved)}, of {SECTOR} bytes."
        used = ("m", "load", row, first % LINE // WORD, 1, access.width // WORD)
        steps.append({"says": text, "cells": [*fresh, used]})
    steps[-1]["says"] += f" Of {len(moved) * SECTOR} bytes the load uses {access.used}."
    wavefronts = 1 + max(twins.turns(range(first // WORD, (first + access.width) // WORD) for first in access.lanes))
    what = f"{title(rung)}: one load of {operand.upper()} by a warp"
    note = "What stays grey was not moved. Sectors are what L2 sends where L1 has not kept them. "
    note += f"L1 takes this load in {wavefronts} wavefronts."
    return scene(rung, what, grids=[grid], steps=steps, note=note)


def wave(rung: str) -> Scene:
    """The programs that run at once, in their order: tiles of C, rows of tiles of A and columns of B."""
    trace = traces.recorded()[rung]
    edge, tiles = trace["edge"], trace["tiles"]
    near, far = edge // 40, edge // 8  # how wide strips are drawn, and where C begins
    grids = [
        {"name": "a", "label": "A", "rows": edge, "columns": near, "x": 0, "y": far},
        {"name": "b", "label": "B", "rows": near, "columns": edge, "x": far, "y": 0},
        {"name": "c", "label": "C, in tiles", "rows": edge, "columns": edge, "x": far, "y": far},
    ]
    steps: list[Any] = []
    for last in range(TOGETHER, len(tiles) + 1, TOGETHER):
        some = tiles[last - TOGETHER : last]
        rows, columns = ({tile[i] for tile in tiles[:last]} for i in (0, 1))
        cells = [("c", "product", *of) for of in rectangles(*zip(*some, strict=True))]
        cells += [("a", "load", row, 0, 1, near) for row in sorted({row for row, _ in some})]
        cells += [("b", "load", 0, column, near, 1) for column in sorted({column for _, column in some})]
        read = f"{len(rows)} + {len(columns)} = {len(rows) + len(columns)} tiles of A and B a step of K"
        steps.append({"says": f"{last} programs need {read}.", "cells": cells})
    key = {"product": "tiles that run at once", "load": "strips of A and B that they read"}
    return scene(rung, f"{title(rung)}: which tiles run at once", key, grids=grids, steps=steps)


def clock(rung: str, bars: Sequence[replay.Bar], slots: int, waits: Sequence[Any] = ()) -> Scene:
    """Loads, tiles that wait and products in their slots, and the units."""
    roles = {"load": "load warp", "mma": "mma warps"} if waits else {}
    stores = ["store"] if any(bar.what == "store" for bar in bars) else []
    lanes = [*(f"slot {i}" for i in range(slots)), "units", *stores, *roles.values()]
    products = {bar.step: bar for bar in bars if bar.what == "product"}
    found: list[list[Any]] = [[lanes.index(roles[role]), "wait", begin, end, "", False] for role, begin, end in waits]
    for bar in bars:
        if bar.what == "store":
            found.append([slots + 1, "store", bar.start, bar.end, "", False])
        elif bar.step in products:
            kind = {"copy": LOAD}.get(bar.what, bar.what)
            found.append([bar.slot, kind, bar.start, bar.end, bar.step, False])
            if kind == LOAD and products[bar.step].start > bar.end:
                found.append([bar.slot, "kept", bar.end, products[bar.step].start, "", False])
            elif kind == "product":
                found.append([slots, kind, bar.start, bar.end, bar.step, True])
    what, note = (
        f"{title(rung)}: loads and products over time",
        f"Numbers are steps of K. {DURATIONS}" + f" {ONE_SLOT}" * (rung == "k06"),
    )
    key = {LOAD: "load on its way", "store": "store of C"}
    counted = {LOAD if kind == "load" else kind: name for kind, name in COUNTED.items()}
    return scene(rung, what, key, lanes=lanes, bars=found, counted=counted, note=note)


def scenes() -> Iterator[Scene]:
    """All of them, of traces that are recorded now."""
    yield from (warp("k01", "a"), warp("k02", "b"), wave("k03"), wave("k04"))
    for rung, steps in (("k05", 4), ("k06", 8), ("k08", 10)):
        yield clock(rung, replay.pipelined(rung, steps).bars, replay.Loop.of(rung).slots)
    each = traces.recorded()["k09"]["k_tiles"]
    yield clock("k09", replay.tile_after_tile("k09", 3, each).bars, replay.Loop.of("k09").slots)
    ring = replay.ring()
    yield clock("k11", ring.clock.bars, ring.slots, ring.waits)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.player", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default build/player.html")
    out: Path = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page([*scenes()]))
    print(f"{out}: open it in a browser ({out.stat().st_size / 2**10:.0f} KiB)")


if __name__ == "__main__":
    main()
