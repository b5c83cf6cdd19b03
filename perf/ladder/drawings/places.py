"""Where things lie: addresses, tiles, registers and shared memory, a drawing for each of k01 to k05 and k10."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common.style import GREY
from perf.ladder.drawings import canvas, traces
from perf.ladder.drawings.canvas import (
    BLUE,
    EMPTY,
    GREEN,
    LIGHT,
    ORANGE,
    RED,
    Drawing,
    boxes,
    frame,
    key,
    merged,
    words,
)
from perf.ladder.drawings.traces import LINE, RUNGS, SECTOR

LOADED = {"read by a lane": BLUE, "moved and not used by this load": ORANGE, "not touched": EMPTY}
OF_A_THREAD = {"results in a thread's registers": GREEN, "of its warp": canvas.WAITING}
OF_A_THREAD |= {"words of A it reads": BLUE, "of B": RED}


# ---- k01, k02: a warp's load ----


def _load(axes: Axes, access: traces.Access, title: str, rows: int) -> None:
    """Of so many rows, lines of memory by address."""
    lines = sorted({first // LINE for first in access.lanes})
    row = {line: (i + 0.06, i + 0.94) for i, line in enumerate(lines)}
    boxes(axes, [(0, LINE, *y) for y in row.values()], EMPTY)
    boxes(
        axes,
        [(s * SECTOR % LINE, s * SECTOR % LINE + SECTOR, *row[s * SECTOR // LINE]) for s in access.sectors],
        ORANGE,
    )
    boxes(axes, [(x % LINE, x % LINE + access.width, *row[x // LINE]) for x in access.lanes], BLUE, 0.4)
    for x in range(SECTOR, LINE, SECTOR):
        axes.axvline(x, color="white", linewidth=1.2)
    shown = {row[x][0] + 0.44: f"+ {LINE * x:,}" for x in (lines if len(lines) <= 8 else [*lines[::8], lines[-1]])}
    ticks = {x: str(x) for x in range(0, LINE + 1, SECTOR)}
    frame(axes, title, (0, LINE), (0, rows), names=shown, ticks=ticks, xlabel="byte of a 128-byte line")


def _access_text(rung: str, operand: str, access: traces.Access) -> str:
    sectors = len(access.sectors)
    return (
        f"{rung}: one load of {operand.upper()} by a warp touches {sectors} sectors of {SECTOR} bytes, of whose "
        f"{sectors * SECTOR} bytes it uses {access.used}"
    )


def naive() -> Drawing:
    access = traces.load_of("k01", "a")
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    _load(axes, access, f"k01: {len(access.sectors)} sectors for {access.used} bytes", 32)
    axes.set_ylabel("address of the line in A, bytes")
    for lane in (0, 8, 16, 24, 31):
        words(axes, LINE + 3, lane + 0.5, f"lane {lane}", "left", color=GREY)
    key(axes, LOADED, -0.17)
    caption = f"{_access_text('k01', 'a', access)}. Its lanes read rows of A that lie {access.lanes[1]:,} bytes apart."
    return Drawing("The addresses of one load by a warp of k01", caption, figure)


def coalesced() -> Drawing:
    before, access = traces.load_of("k01", "a"), traces.load_of("k02", "b")
    each, moved = access.width // 4, len(access.sectors)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.2), gridspec_kw={"wspace": 0.35})
    _load(left, before, f"k01, a load of A: {len(before.sectors)} sectors, {before.used} bytes used", 32)
    _load(right, access, f"k02, a load of B: {moved} sectors, {access.used} bytes used", 8)
    left.set_ylabel("address of the line, bytes")
    for lane in range(0, traces.WARP, 8):
        words(right, LINE + 3, lane // 8 + 0.5, f"lanes {lane} to {lane + 7}", "left", color=GREY)
    key(left, LOADED, -0.2)
    text = f"A lane reads {access.width} bytes, {each} columns of B.\nFor each of its {each} FMAs the warp moves\n"
    text += f"{moved // each} sectors, and not {len(before.sectors)}."
    words(right, 0, 5.1, text, "left", va="top", fontsize=9)
    caption = (
        f"{_access_text('k02', 'b', access)}. A lane reads {access.width} bytes at once, {each} neighbouring columns "
        f"of B: {moved // each} sectors for each FMA of a warp's lanes, where k01 needs {len(before.sectors)}."
    )
    return Drawing("The addresses of one load by a warp, k01 against k02", caption, figure)


# ---- k03: a tile's reuse ----


def blocked() -> Drawing:
    config, trace = RUNGS["k03"].configs[0], traces.recorded()
    m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
    figure, (axes, bars) = plt.subplots(
        1, 2, figsize=(7.4, 3.4), gridspec_kw={"width_ratios": (1.25, 1), "wspace": 0.1}
    )
    of_k, first = 5, k + 6  # of C's corner
    row, column = first + 20, first + 52
    boxes(axes, [(0, k, first, first + m), (first, first + n, 0, k)], LIGHT)
    boxes(axes, [(first, first + n, first, first + m)], EMPTY)
    boxes(axes, [(first, first + n, row, row + 1)], BLUE, alpha=0.55)
    boxes(axes, [(column, column + 1, first, first + m)], RED, alpha=0.55)
    boxes(axes, [(of_k - 0.5, of_k + 1.5, row - 0.5, row + 1.5)], BLUE)
    boxes(axes, [(column - 0.5, column + 1.5, of_k - 0.5, of_k + 1.5)], RED)
    words(axes, 0, first - 1.5, f"A, {m} x {k}", "left", va="bottom")
    words(axes, first - 2, k / 2, f"B, {k} x {n}", "right")
    words(axes, first + n / 2, first + m + 3, f"C, {m} x {n} results of a program", va="top")
    words(axes, first + 2, row - 1.5, f"one of A: {n} results", "left", color=BLUE, va="bottom")
    words(axes, column - 1.5, first + m - 2, f"one of B: {m} results", "right", color=RED, va="bottom")
    frame(axes, "A tile of A and one of B in shared memory", (-12, first + n + 1), (0, first + m + 9), equal=True)
    bytes_per_fma = {rung: 4 * trace[rung]["loaded"] / trace[rung]["fma"] for rung in ("k01", "k02", "k03")}
    bars.barh(list(bytes_per_fma), list(bytes_per_fma.values()), color=[GREY, GREY, BLUE], height=0.6)
    for i, value in enumerate(bytes_per_fma.values()):
        words(bars, value + 0.06, i, f"{value:.3g}", "left", fontsize=9)
    limits = {"xlim": (0, 4.8), "ylim": (2.5, -0.5)}
    bars.set(**limits, xlabel="bytes a program loads for an FMA", title="What is loaded from L1, L2 or memory")
    often = {1: "once", 2: "twice"}[trace["k03"]["most"]]
    caption = (
        f"A program loads an element of a tile {often}, and uses one of A {n} times and one of B {m} times: "
        f"{bytes_per_fma['k03']:.3g} bytes loaded for an FMA, where k02 loads {bytes_per_fma['k02']:.3g}."
    )
    return Drawing("How often a tile in shared memory is used", caption, figure)


# ---- k04: the order of programs ----


def grouped() -> Drawing:
    trace, counts = traces.recorded(), {}
    figure, both = plt.subplots(1, 2, figsize=(7.4, 3.9), gridspec_kw={"wspace": 0.12})
    for axes, (rung, text) in zip(both, {"k03": "down the columns", "k04": "groups of rows"}.items(), strict=True):
        edge, rows, columns = (trace[rung][name] for name in ("edge", "a", "b"))
        counts[rung] = len(rows) + len(columns)
        wide = edge / 28
        boxes(axes, [(0, edge, 0, edge)], EMPTY)
        boxes(axes, [(-1.6 * wide, -0.6 * wide, min(rows), max(rows) + 1)], BLUE)
        boxes(axes, [(min(columns), max(columns) + 1, -1.6 * wide, -0.6 * wide)], RED)
        of = {column: [row for row, one in trace[rung]["tiles"] if one == column] for column in columns}
        boxes(axes, merged((x, x + 1, min(mine), max(mine) + 1) for x, mine in of.items()), GREEN)
        title = f"{rung}, {text}:\n{len(rows)} + {len(columns)} = {counts[rung]} tiles of A and B a step"
        frame(axes, title, (-2 * wide, edge + 1), (-2 * wide, edge + 1), equal=True)
        words(axes, edge / 2, edge / 2, f"C, {edge} x {edge} tiles", color=GREY)
    programs, size = len(trace["k04"]["tiles"]), trace["k03"]["edge"] * trace["k03"]["tile"]
    entries = {f"tiles of the first {programs} programs": GREEN, "rows of A they read": BLUE}
    key(both[0], {**entries, "columns of B they read": RED}, -0.02)
    caption = (
        f"The {programs} programs that an H100 runs at once, at {size} x {size}. In each step of K, "
        f"k03's ask L2 for {counts['k03']} different tiles of A and B, and k04's for {counts['k04']}."
    )
    return Drawing("Which tiles run at once, k03 against k04", caption, figure)


# ---- k05: registers ----


def thread(axes: Axes, name: str, results: traces.Results) -> None:
    """A tile of C, the results of one thread and of its warp, and what it reads of A and B for them."""
    m, n = results.tile
    boxes(axes, [(0, n, 0, m)], EMPTY)
    boxes(axes, merged((x, x + 1, y, y + 1) for y in results.warp_rows for x in results.warp_columns), canvas.WAITING)
    boxes(axes, [(x, x + 1, y, y + 1) for y in results.rows for x in results.columns], GREEN, 0.15)
    boxes(axes, [(-5, -2, y, y + 1) for y in results.rows], BLUE, 0.15)
    boxes(axes, [(x, x + 1, -5, -2) for x in results.columns], RED, 0.15)
    counts = f"{len(results.rows)} x {len(results.columns)} results,\n{results.words} words for {results.count} FMAs"
    frame(axes, f"{name}: {counts}", (-9, n + 1), (-9, m + 1), equal=True)
    words(axes, -6, m / 2, "A", "right", color=BLUE, fontsize=9)
    words(axes, n / 2, -6, "B", color=RED, fontsize=9, va="bottom")
    words(axes, n - 2, m - 2, f"C, {m} x {n}", "right", color=GREY, va="bottom")


def threads(found: dict[str, traces.Results], size: tuple[float, float]) -> plt.Figure:
    """A panel for each of these names."""
    widths = [results.tile[1] + 12 for results in found.values()]
    figure, panels = plt.subplots(1, len(found), figsize=size, gridspec_kw={"width_ratios": widths, "wspace": 0.07})
    for axes, (name, results) in zip(panels, found.items(), strict=True):
        thread(axes, name, results)
    key(panels[0], OF_A_THREAD, -0.04)
    return figure


def register_tiled() -> Drawing:
    found = {rung: traces.results_of(rung) for rung in ("k04", "k05")}
    (k04, k05) = found.values()
    caption = (
        "For each step of K a thread reads the words of its rows and columns from shared memory: "
        f"{k04.words} for {k04.count} FMAs in k04's tile of {k04.tile[0]} x {k04.tile[1]}, "
        f"{k05.words} for {k05.count} in k05's of {k05.tile[0]} x {k05.tile[1]}."
    )
    return Drawing("The results that one thread holds, k04 against k05", caption, threads(found, (7.4, 3.2)))


# ---- k10: boxes and the swizzle ----


def tma() -> Drawing:
    config, found = RUNGS["k10"].configs[0], traces.boxes()
    m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
    figure, (left, *both) = plt.subplots(
        1, 3, figsize=(8, 2.9), gridspec_kw={"width_ratios": (1.9, 1, 1), "wspace": 0.4}
    )
    count = 0
    for name, x0, rows, columns, color in (("a", 0, m, k, BLUE), ("b", k + 24, k, n, RED)):
        high, wide = found[name]
        corners = [(x0 + x, y) for y in range(0, rows, high) for x in range(0, columns, wide)]
        count += len(corners)
        boxes(left, [(x, x + wide, y, y + high) for x, y in corners], color, 1.5)
        text = f"{name.upper()}, {rows} x {columns}:\n{len(corners)} of {high} x {wide}"
        words(left, x0, rows + 6, text, "left", va="top", color=color)
    frame(left, f"{count} boxes for a k-tile", (-2, k + 26 + n), (-2, m + 44), equal=True)
    places = traces.recorded()["k10"]["swizzle"]
    titles = {"Unswizzled": [list(range(8))] * 8, "As TMA swizzles it": places}
    for axes, (title, of_row) in zip(both, titles.items(), strict=True):
        cells = [(x, y, held) for y, row in enumerate(of_row) for x, held in enumerate(row)]
        for color in (EMPTY, GREEN):
            mine = [(x, x + 1, y, y + 1) for x, y, held in cells if (held == 2) == (color == GREEN)]
            boxes(axes, mine, color, 0.8)
        for x, y, held in cells:
            words(axes, x + 0.5, y + 0.5, held, fontsize=8)
        names, ticks = {0.5: "row 0", 7.5: "row 7"}, {0.5: "banks\n0 to 3", 7.5: "banks\n28 to 31"}
        frame(axes, title, (-0.02, 8.02), (0, 8), names=names, ticks=ticks, equal=True)
        axes.tick_params(labelsize=8)
    banks = {row.index(2) for row in places}
    caption = (
        f"{count} instructions copy a k-tile. Right, rows of a box in pieces of 16 bytes, by number: unswizzled, piece "
        f"2 of {len(places)} rows would lie in the same banks; TMA puts it into {len(banks)} different groups of banks."
    )
    return Drawing("What TMA copies, and where it puts it", caption, figure)
