"""Pages that play what a kernel did: the accesses of a trace step by step, or bars on a clock. Each is one file, which
needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .trace import SECTOR, WARP, Access, Trace, named

TEMPLATE = Path(__file__).with_name("player.html")
MOST = 400  # steps that a page plays
GAP = 4  # elements between two matrices

KEY = {
    "load": "loaded",
    "moved": "moved in the same sectors, and not asked for",
    "kept": "k-tile waits in shared memory",
    "product": "product",
    "store": "stored",
    "wait": "waits for a barrier",
    "outside": "no element of the matrix",
}

COUNTED = {"load": "loads", "product": "products"}

Cell = tuple[str, str, int, int, int, int]  # a matrix, what was done, row, column, rows, columns
Scene = dict[str, Any]


def page(scenes: Sequence[Scene]) -> str:
    """The page of these scenes."""
    data = json.dumps(scenes, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("DATA", data, 1)


def scene(name: str, title: str, key: Mapping[str, str] | None = None, **what: Any) -> Scene:
    """One of matrices or one on a clock. grids: each one's name, label, rows, columns and place; steps: what each says,
    and its cells; keep: earlier ones stay, pale. lanes: their names; bars: lane, kind, begin, end, text, and whether it
    repeats one that is counted; counted: kinds, and what they are called."""
    kinds = {bar[1] for bar in what.get("bars", [])} | {
        cell[1] for one in what.get("steps", []) for cell in one["cells"]
    }
    known = {kind: text for kind, text in {**KEY, **(key or {})}.items() if kind in kinds}
    end = max((bar[3] for bar in what.get("bars", [])), default=1)
    return {"name": name, "title": title, "note": "", "key": known, "keep": True, "unit": "clocks", "end": end, **what}


def rectangles(rows: Iterable[int], columns: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Elements as few rectangles: row, column, rows, columns."""
    found: dict[tuple[int, int], list[int]] = {}
    for row, places in groupby(sorted({*zip(map(int, rows), map(int, columns), strict=True)}), lambda place: place[0]):
        for run in _runs(column for _, column in places):
            found.setdefault(run, []).append(row)
    return [(first, column, count, wide) for (column, wide), held in found.items() for first, count in _runs(held)]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs of neighbours: the first, and how many."""
    found: list[tuple[int, int]] = []
    for x in numbers:
        first, count = found[-1] if found else (x, 0)
        if count and first + count == x:
            found[-1] = first, count + 1
        else:
            found.append((x, 1))
    return found


# ---- An exercise's own run ----


def of_run(name: str, title: str, run: Any, wrong: str | None) -> Scene:
    """What a learner's kernels did: of a trace, or of the ring's events."""
    more: dict[str, Any] = {"note": "The last step says what is wrong." if wrong else "It is solved."}
    if not isinstance(run, Trace):
        return _of_ring(name, title, run, wrong, **more)
    if name == "e06_pipeline":
        return _of_pipeline(name, title, run, wrong, **more)
    waves = name == "e04_group"
    steps = _waves(run, 16) if waves else [_step(run, access) for access in run.accesses[:MOST]]
    if len(run.accesses) > MOST and not waves:
        more["note"] += f" The first {MOST} of {len(run.accesses):,} accesses are played."
    places = _banks(run) if name == "e12_swizzle" else None
    grids, steps = places or (_grids(run), steps)
    steps.append({"says": wrong or "It is solved.", "cells": steps[-1]["cells"] if steps else []})
    return scene(name, title, grids=grids, steps=steps, keep=places is None, wrong=wrong, **more)


def _grids(trace: Trace) -> list[dict[str, Any]]:
    """C with A to the left and B above; others below one another."""
    found, bottom = [], 0
    sizes = {name: x.shape for name, x in trace.operands.items()}
    deep, left = (sizes["b"][0] + GAP, sizes["a"][1] + GAP) if {"a", "b", "c"} <= sizes.keys() else (0, 0)
    corners = {"a": (0, deep), "b": (left, 0), "c": (left, deep)} if deep else {}
    for name, (rows, columns) in sizes.items():
        x, y = corners.get(name, (0, bottom))
        found.append({"name": name, "label": name, "rows": rows, "columns": columns, "x": x, "y": y})
        bottom = max(bottom, y + rows + 2 * GAP)
    return found


def _step(trace: Trace, access: Access) -> dict[str, Any]:
    """One access, and the sectors that a warp's moves. Rows begin at whole ones (`trace.matrix`)."""
    if access.kind == "dot":
        return {"says": f"program {named(access.program)} multiplies.", "cells": []}
    verb = {"load": "loads", "store": "stores", "outside": "goes beyond"}[access.kind]
    text = f"program {named(access.program)} {verb} {access.operand}: {_counted(len(access.rows), 'element')}"
    cells: list[Cell] = []
    if 0 < len(access.rows) <= WARP and access.kind != "outside":
        text += f" in {_counted(access.sectors(), 'sector')}"
        x = trace.operands[access.operand]
        each = SECTOR // x.element_size()
        begin = {(int(row), int(i) // each * each) for row, i in zip(access.rows, access.columns, strict=True)}
        cells = [(access.operand, "moved", row, i, 1, min(each, x.shape[1] - i)) for row, i in sorted(begin)]
    cells += [(access.operand, access.kind, *place) for place in rectangles(access.rows, access.columns)]
    return {"says": f"{text}.", "cells": cells}


def _counted(count: int, one: str) -> str:
    return f"{count} {one}{'s' * (count != 1)}"


def _waves(trace: Trace, together: int) -> list[dict[str, Any]]:
    """A step for so many programs, which run at once: what they read of A and B, and store of C."""
    steps, programs = [], [*trace.programs().items()]
    for first in range(0, len(programs), together):
        some = programs[first : first + together]
        accesses = [access for _, of_program in some for access in of_program if len(access.rows)]
        cells, strips = [], {}
        for name in "abc":
            mine = [access for access in accesses if access.operand == name]
            rows, columns = ([int(i) for one in mine for i in getattr(one, axis)] for axis in ("rows", "columns"))
            strips[name] = len({i // 16 for i in (rows if name == "a" else columns)})
            cells += [(name, "store" if name == "c" else "load", *place) for place in rectangles(rows, columns)]
        text = f"Programs {first} to {first + len(some) - 1} read strips of A: {strips['a']}, of B: {strips['b']}."
        steps.append({"says": text, "cells": cells})
    return steps


def _banks(trace: Trace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """Exercise 12: where eight lanes that read a column of chunks find them in shared memory; None if it has no such
    store. Chunks have 16 bytes, four banks."""
    stores = trace.of("shared", "store")
    if len(stores) != 1 or len(stores[0].columns) != 64 * 64:
        return None
    rows, places = stores[0].rows.reshape(64, 8, 8)[:8, :, 0], stores[0].columns.reshape(64, 8, 8)[:8, :, 0] // 8
    grids = [{"name": "shared", "label": "8 rows of shared memory, 32 banks", "rows": 8, "columns": 8, "x": 0, "y": 0}]
    steps = []
    for chunk in range(8):
        banks = [int(place) for place in places[:, chunk]]
        turns = max(map(banks.count, banks))
        cells = [
            ("shared", "load", int(row) % 8, place, 1, 1) for row, place in zip(rows[:, chunk], banks, strict=True)
        ]
        steps.append({"says": f"Eight lanes read chunk {chunk} of their rows: wavefronts {turns}.", "cells": cells})
    return grids, steps


def _of_pipeline(name: str, title: str, trace: Trace, wrong: str | None, **more: Any) -> Scene:
    """Exercise 6: the first program's loads and products in their order, on a clock where each takes four steps."""
    bars: list[list[Any]] = []
    loads: dict[str, list[int]] = {"a": [], "b": []}  # when each k-tile is there
    now = dots = 0
    for access in next(iter(trace.programs().values()), []):
        if access.kind == "dot":
            now = max([now, *(there[dots] for there in loads.values() if len(there) > dots)])
            bars.append([2, "product", now, now + 4, dots + 1, False])
            now, dots = now + 4, dots + 1
        elif access.kind == "load" and access.operand in loads:
            there = loads[access.operand]
            there.append(now + 4)
            bars.append(["ab".index(access.operand), "load", now, now + 4, len(there), False])
    more["note"] += " Numbers are k-tiles. The order is your kernel's; that each thing takes four steps is assumed."
    lanes = ["loads of a", "loads of b", "products"]
    return scene(name, title, lanes=lanes, bars=bars, unit="steps", counted=COUNTED, wrong=wrong, **more)


def _of_ring(name: str, title: str, events: Sequence[Any], wrong: str | None, **more: Any) -> Scene:
    """Exercise 13: events are (role, what, slot, k-tile), of which each takes a moment."""
    slots = 1 + max([2, *(slot for _, _, slot, _ in events)])
    lanes = ["load", "multiply", *(f"slot {i}" for i in range(slots))]
    bars: list[list[Any]] = []
    held: dict[int, list[Any]] = {}  # what a slot has at the moment
    for moment, (role, what, slot, step) in enumerate(events):
        if what != "ended":
            bars.append([lanes.index(role), what, moment, moment + 1, step, what == "wait"])
        if what != "wait":
            if slot in held:
                held.pop(slot)[3] = moment
            if what != "ended":
                held[slot] = [2 + slot, "kept" if what == "load" else "product", moment, len(events), step, True]
                bars.append(held[slot])
    return scene(name, title, lanes=lanes, bars=bars, unit="steps", counted=COUNTED, wrong=wrong, **more)
