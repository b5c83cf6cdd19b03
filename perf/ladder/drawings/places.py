"""Where things lie: addresses, tiles, registers and shared memory, a drawing for each of k01 to k05 and k10."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common.style import GREY
from perf.ladder.drawings import traces
from perf.ladder.drawings.canvas import (
    BLUE,
    EMPTY,
    GREEN,
    LIGHT,
    ORANGE,
    RED,
    WAITING,
    Box,
    Drawing,
    bare,
    boxes,
    key,
    merged,
)
from perf.ladder.drawings.traces import LINE, RUNGS, SECTOR

# ---- k01, k02: a warp's load ----


def _load(axes: Axes, access: traces.Access, title: str) -> None:
    lines = sorted({first // LINE for first in access.lanes})
    row = {line: i for i, line in enumerate(lines)}
    boxes(axes, [(0, LINE, i + 0.06, i + 0.94) for i in row.values()], EMPTY)
    moved = [(s * SECTOR % LINE, row[s * SECTOR // LINE]) for s in access.sectors]
    boxes(axes, [(x, x + SECTOR, y + 0.06, y + 0.94) for x, y in moved], ORANGE)
    used = [(first % LINE, row[first // LINE]) for first in access.lanes]
    boxes(axes, [(x, x + access.width, y + 0.06, y + 0.94) for x, y in used], BLUE, edgecolor="white", linewidth=0.4)
    for x in range(SECTOR, LINE, SECTOR):
        axes.axvline(x, color="white", linewidth=1.2)
    axes.set(xlim=(0, LINE), ylim=(len(lines), 0), xticks=range(0, LINE + 1, SECTOR), title=title)
    shown = lines if len(lines) <= 8 else [*lines[::8], lines[-1]]
    axes.set_yticks([row[line] + 0.5 for line in shown], [f"+ {LINE * line:,}" for line in shown])
    axes.set_xlabel("byte of a 128-byte line")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


LOADED = {"read by a lane": BLUE, "moved and not used by this load": ORANGE, "not touched": EMPTY}


def _says(rung: str, operand: str, access: traces.Access) -> str:
    sectors = len(access.sectors)
    return (
        f"{rung}: one load of {operand.upper()} by a warp touches {sectors} sectors of {SECTOR} bytes, of whose "
        f"{sectors * SECTOR} bytes it uses {access.used}"
    )


def naive() -> Drawing:
    access = traces.load_of("k01", "a")
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    _load(axes, access, f"k01: {len(access.sectors)} sectors for {access.used} bytes")
    axes.set_ylabel("address of the line in A, bytes")
    for lane in (0, 8, 16, 24, 31):
        axes.text(LINE + 3, lane + 0.5, f"lane {lane}", va="center", fontsize=8.5, color=GREY)
    key(axes, LOADED, -0.17)
    caption = f"{_says('k01', 'a', access)}. Its lanes read rows of A that lie {access.lanes[1]:,} bytes apart."
    return Drawing("The addresses of one load by a warp of k01", caption, figure)


def coalesced() -> Drawing:
    before, access = traces.load_of("k01", "a"), traces.load_of("k02", "b")
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.2), gridspec_kw={"wspace": 0.35})
    _load(left, before, f"k01, a load of A: {len(before.sectors)} sectors, {before.used} bytes used")
    _load(right, access, f"k02, a load of B: {len(access.sectors)} sectors, {access.used} bytes used")
    left.set_ylabel("address of the line, bytes")
    right.set_ylim(8, 0)
    for lane in range(0, traces.WARP, 8):
        right.text(LINE + 3, lane // 8 + 0.5, f"lanes {lane} to {lane + 7}", va="center", fontsize=8.5, color=GREY)
    key(left, LOADED, -0.2)
    words = access.width // 4
    says = f"A lane reads {access.width} bytes, {words} columns of B.\nFor each of its {words} FMAs the warp moves\n"
    right.text(
        0, 5.1, f"{says}{len(access.sectors) // words} sectors, and not {len(before.sectors)}.", va="top", fontsize=9
    )
    caption = (
        f"{_says('k02', 'b', access)}. A lane reads {access.width} bytes at once, {words} neighbouring columns of B: "
        f"{len(access.sectors) // words} sectors for each FMA of a warp's lanes, where k01 needs {len(before.sectors)}."
    )
    return Drawing("The addresses of one load by a warp, k01 against k02", caption, figure)


# ---- k03: a tile's reuse ----


def blocked() -> Drawing:
    config, trace = RUNGS["k03"].configs[0], traces.recorded()
    m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
    figure, (axes, bars) = plt.subplots(
        1, 2, figsize=(7.4, 3.4), gridspec_kw={"width_ratios": (1.25, 1), "wspace": 0.1}
    )
    gap, row, column, of_k = 6, 20, 52, 5
    left, top = k + gap, k + gap
    boxes(axes, [(0, k, top, top + m)], LIGHT)
    boxes(axes, [(left, left + n, 0, k)], LIGHT)
    boxes(axes, [(left, left + n, top, top + m)], EMPTY)
    boxes(axes, [(left, left + n, top + row, top + row + 1)], BLUE, alpha=0.55)
    boxes(axes, [(left + column, left + column + 1, top, top + m)], RED, alpha=0.55)
    boxes(axes, [(of_k - 0.5, of_k + 1.5, top + row - 0.5, top + row + 1.5)], BLUE)
    boxes(axes, [(left + column - 0.5, left + column + 1.5, of_k - 0.5, of_k + 1.5)], RED)
    axes.text(0, top - 1.5, f"A, {m} x {k}", va="bottom", fontsize=8.5)
    axes.text(left - 2, k / 2, f"B, {k} x {n}", ha="right", va="center", fontsize=8.5)
    axes.text(left + n / 2, top + m + 3, f"C, {m} x {n} results of a program", ha="center", va="top", fontsize=8.5)
    axes.text(left + 2, top + row - 1.5, f"one of A: {n} results", color=BLUE, fontsize=8.5, va="bottom")
    axes.text(
        left + column - 1.5, top + m - 2, f"one of B: {m} results", color=RED, fontsize=8.5, ha="right", va="bottom"
    )
    axes.set(xlim=(-12, left + n + 1), ylim=(0, top + m + 9))
    bare(axes)
    axes.set_title("A tile of A and one of B in shared memory")
    asked = {rung: 4 * trace[rung]["loaded"] / trace[rung]["fma"] for rung in ("k01", "k02", "k03")}
    bars.barh(list(asked), list(asked.values()), color=[GREY, GREY, BLUE], height=0.6)
    for i, value in enumerate(asked.values()):
        bars.text(value + 0.06, i, f"{value:.3g}", va="center", fontsize=9)
    bars.set(xlim=(0, 4.8), xlabel="bytes a program loads for an FMA")
    bars.invert_yaxis()
    bars.set_title("What is loaded from L1, L2 or memory")
    often = {1: "once", 2: "twice"}[trace["k03"]["most"]]
    caption = (
        f"A program loads an element of a tile {often}, and uses one of A {n} times and one of B {m} times: "
        f"{asked['k03']:.3g} bytes loaded for an FMA, where k02 loads {asked['k02']:.3g}."
    )
    return Drawing("How often a tile in shared memory is used", caption, figure)


# ---- k04: the order of programs ----


def _runs(tiles: Sequence[Sequence[int]]) -> Iterable[Box]:
    """Tiles that lie under one another, and neighbouring columns of the same rows, as one rectangle."""
    columns: dict[int, list[int]] = {}
    for row, column in tiles:
        columns.setdefault(column, []).append(row)
    return merged([(column, column + 1, min(rows), max(rows) + 1) for column, rows in sorted(columns.items())])


def grouped() -> Drawing:
    trace = traces.recorded()
    figure, both = plt.subplots(1, 2, figsize=(7.4, 3.9), gridspec_kw={"wspace": 0.12})
    counts = {}
    for axes, (rung, says) in zip(both, {"k03": "down the columns", "k04": "groups of rows"}.items(), strict=True):
        found = trace[rung]
        edge, tiles = found["edge"], found["tiles"]
        counts[rung] = len(found["a"]), len(found["b"])
        wide = edge / 28
        boxes(axes, [(0, edge, 0, edge)], EMPTY)
        boxes(axes, [(-1.6 * wide, -0.6 * wide, min(found["a"]), max(found["a"]) + 1)], BLUE)
        boxes(axes, [(min(found["b"]), max(found["b"]) + 1, -1.6 * wide, -0.6 * wide)], RED)
        boxes(axes, _runs(tiles), GREEN)
        axes.set(xlim=(-2 * wide, edge + 1), ylim=(-2 * wide, edge + 1))
        bare(axes)
        axes.set_title(
            f"{rung}, {says}:\n{len(found['a'])} + {len(found['b'])} = {sum(counts[rung])} tiles of A and B a step"
        )
        axes.text(edge / 2, edge / 2, f"C, {edge} x {edge} tiles", ha="center", fontsize=8.5, color=GREY)
    entries = {f"tiles of the first {len(trace['k04']['tiles'])} programs": GREEN, "rows of A they read": BLUE}
    key(both[0], {**entries, "columns of B they read": RED}, -0.02)
    size = trace["k03"]["edge"] * trace["k03"]["tile"]
    caption = (
        f"The {len(trace['k04']['tiles'])} programs that an H100 runs at once, at {size} x {size}. In each step of K, "
        f"k03's ask L2 for {sum(counts['k03'])} different tiles of A and B, and k04's for {sum(counts['k04'])}."
    )
    return Drawing("Which tiles run at once, k03 against k04", caption, figure)


# ---- k05: registers ----

OF_A_THREAD = {
    "results in a thread's registers": GREEN,
    "of its warp": WAITING,
    "words of A it reads": BLUE,
    "of B": RED,
}


def thread(axes: Axes, name: str, results: traces.Results) -> None:
    """A tile of C, the results of one thread and of its warp, and what it reads of A and B for them."""
    m, n = results.tile
    boxes(axes, [(0, n, 0, m)], EMPTY)
    of_warp = [(x, x + 1, y, y + 1) for y in results.warp_rows for x in results.warp_columns]
    boxes(axes, merged(of_warp), WAITING)
    mine = [(x, x + 1, y, y + 1) for y in results.rows for x in results.columns]
    boxes(axes, mine, GREEN, edgecolor="white", linewidth=0.15)
    boxes(axes, [(-5, -2, y, y + 1) for y in results.rows], BLUE, edgecolor="white", linewidth=0.15)
    boxes(axes, [(x, x + 1, -5, -2) for x in results.columns], RED, edgecolor="white", linewidth=0.15)
    axes.set(xlim=(-9, n + 1), ylim=(-9, m + 1))
    bare(axes)
    axes.set_title(
        f"{name}: {len(results.rows)} x {len(results.columns)} results,\n{results.words} words for {results.count} FMAs"
    )
    axes.text(-6, m / 2, "A", ha="right", va="center", color=BLUE)
    axes.text(n / 2, -6, "B", ha="center", va="bottom", color=RED)
    axes.text(n - 2, m - 2, f"C, {m} x {n}", ha="right", va="bottom", fontsize=8.5, color=GREY)


def register_tiled() -> Drawing:
    found = {rung: traces.results_of(rung) for rung in ("k04", "k05")}
    widths = [results.tile[1] + 12 for results in found.values()]
    figure, both = plt.subplots(1, 2, figsize=(7.4, 3.2), gridspec_kw={"width_ratios": widths, "wspace": 0.08})
    for axes, (rung, results) in zip(both, found.items(), strict=True):
        thread(axes, rung, results)
    key(both[0], OF_A_THREAD, -0.04)
    (k04, k05) = found.values()
    caption = (
        "For each step of K a thread reads the words of its rows and columns from shared memory: "
        f"{k04.words} for {k04.count} FMAs in k04's tile of {k04.tile[0]} x {k04.tile[1]}, "
        f"{k05.words} for {k05.count} in k05's of {k05.tile[0]} x {k05.tile[1]}."
    )
    return Drawing("The results that one thread holds, k04 against k05", caption, figure)


# ---- k10: boxes and the swizzle ----


def tma() -> Drawing:
    config, found = RUNGS["k10"].configs[0], traces.boxes()
    m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
    places = traces.recorded()["k10"]["swizzle"]
    figure, (left, plain, mixed) = plt.subplots(
        1, 3, figsize=(8, 2.9), gridspec_kw={"width_ratios": (1.9, 1, 1), "wspace": 0.4}
    )
    count = 0
    for name, x0, rows, columns, color in (("a", 0, m, k, BLUE), ("b", k + 24, k, n, RED)):
        high, wide = found[name]
        corners = [(x0 + x, y) for y in range(0, rows, high) for x in range(0, columns, wide)]
        count += len(corners)
        boxes(left, [(x, x + wide, y, y + high) for x, y in corners], color, edgecolor="white", linewidth=1.5)
        says = f"{name.upper()}, {rows} x {columns}:\n{len(corners)} of {high} x {wide}"
        left.text(x0, rows + 6, says, fontsize=8.5, va="top", color=color)
    left.set(xlim=(-2, k + 26 + n), ylim=(-2, m + 44))
    bare(left)
    left.set_title(f"{count} boxes for a k-tile")
    for axes, title, of_row in (
        (plain, "Unswizzled", [list(range(8))] * 8),
        (mixed, "As TMA swizzles it", places),
    ):
        for chunk in range(8):
            cells = [
                (x, x + 1, y, y + 1) for y, row in enumerate(of_row) for x, held in enumerate(row) if held == chunk
            ]
            color = {2: GREEN}.get(chunk, EMPTY)
            boxes(axes, cells, color, edgecolor="white", linewidth=0.8)
        for y, row in enumerate(of_row):
            for x, held in enumerate(row):
                axes.text(x + 0.5, y + 0.5, str(held), ha="center", va="center", fontsize=8)
        axes.set(xlim=(-0.02, 8.02), ylim=(0, 8), xticks=[0.5, 7.5], yticks=[0.5, 7.5], aspect="equal")
        axes.set_xticklabels(["banks\n0 to 3", "banks\n28 to 31"], fontsize=8)
        axes.set_yticklabels(["row 0", "row 7"], fontsize=8)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(title)
    banks = {row.index(2) for row in places}
    caption = (
        f"{count} instructions copy a k-tile. Right, rows of a box in pieces of 16 bytes, by number: unswizzled, piece "
        f"2 of {len(places)} rows would lie in the same banks; TMA puts it into {len(banks)} different groups of banks."
    )
    return Drawing("What TMA copies, and where it puts it", caption, figure)
