"""What happens when: loads, products and stores on a clock, a drawing for each of k06, k08, k09 and k11."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common import formats
from perf.common.style import note
from perf.ladder.clock_model import LATENCY_CLOCKS
from perf.ladder.drawings import replay, traces
from perf.ladder.drawings.canvas import BUSY_WAIT, EMPTY, GREEN, ORANGE, PINK, WAITING, Drawing, boxes, key, words
from perf.ladder.drawings.traces import RUNGS
from perf.measure import roofline

DURATIONS = (
    "Order and waits are the kernel's. Durations are arithmetic: a load takes a clock for "
    f"{roofline.L2_BYTES_PER_CLOCK} bytes, and {LATENCY_CLOCKS} more; a product runs at the units' peak; "
    "a program is alone on its SM."
)
ONE_SLOT = "Three stages are drawn, which have two slots; two stages have one."  # of k06
TIMES = {"load on its way": ORANGE, "tile waits in shared memory": WAITING, "product": GREEN}
NUMBERS = "clocks; numbers are steps of K"


def _frame(axes: Axes, title: str, end: float, names: dict[float, str], bottom: float) -> None:
    """Rows by their names, on a clock."""
    axes.set(xlim=(0, end), ylim=(bottom, 0))
    axes.set_yticks([*names], [*names.values()])
    axes.set_title(title, pad=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _bars(axes: Axes, bars: Iterable[replay.Bar], color: str, row: float, edge: float = 0, high: float = 0.76) -> None:
    """A row for each slot, the first around this one."""
    places = [(bar.start, bar.end, row + bar.slot - high / 2, row + bar.slot + high / 2) for bar in bars]
    boxes(axes, places, color, edge)


def _in_one_row(bars: Iterable[replay.Bar]) -> list[replay.Bar]:
    return [replay.Bar(bar.what, bar.start, bar.end, bar.step) for bar in bars]


def _numbers(axes: Axes, bars: Iterable[replay.Bar], row: float, least: float = 0, size: float = 8) -> None:
    for bar in bars:
        if bar.end - bar.start > least:
            words(axes, (bar.start + bar.end) / 2, row + bar.slot, bar.step, fontsize=size)


def _slots(axes: Axes, clock: replay.Clock, row: float, steps: int, edge: float) -> list[replay.Bar]:
    """Loads, tiles that wait, and products, the first so many; the loads."""
    products = {bar.step: bar for bar in clock.of_kind("product")[:steps]}
    loads = [bar for bar in clock.of_kind("copy") if bar.step in products]
    _bars(axes, loads, ORANGE, row)
    waits = [replay.Bar("wait", bar.end, products[bar.step].start, bar.step, bar.slot) for bar in loads]
    _bars(axes, [bar for bar in waits if bar.end > bar.start], WAITING, row)
    _bars(axes, products.values(), GREEN, row, edge)
    return loads


def busy(clock: replay.Clock, steps: int) -> float:
    """Share of the time in which the units multiply, of the first steps and from the end of the first product."""
    first, *products = clock.of_kind("product")[:steps]
    return sum(bar.end - bar.start for bar in products) / (products[-1].end - first.end)


def _timelines(figsize: tuple[float, float], below: float, **steps: int) -> plt.Figure:
    """Of so many steps of rungs: a row for each slot of shared memory, and below the units."""
    slots = {rung: replay.Loop.of(rung).slots for rung in steps}
    clocks = {rung: replay.pipelined(rung, count + 2) for rung, count in steps.items()}
    until = max(clocks[rung].of_kind("product")[count - 1].end for rung, count in steps.items())
    ratios = {"height_ratios": [slots[rung] + 1 for rung in steps], "hspace": 0.5}
    figure, panels = plt.subplots(len(steps), figsize=figsize, sharex=True, squeeze=False, gridspec_kw=ratios)
    for (axes,), (rung, count) in zip(panels, steps.items(), strict=True):
        products, config, units = clocks[rung].of_kind("product")[:count], RUNGS[rung].configs[0], slots[rung] + 0.65
        loads, end = _slots(axes, clocks[rung], 0.5, count, 0.6), products[-1].end
        boxes(axes, [(0, end, units - 0.33, units + 0.33)], EMPTY)
        _bars(axes, _in_one_row(products), GREEN, units, 0.6, 0.66)
        _numbers(axes, [*loads, *products], 0.5, 0.04 * end)
        _numbers(axes, _in_one_row(products), units)
        names = {slot + 0.5: "tile" if rung == "k05" else f"slot {slot}" for slot in range(slots[rung])}
        share = f"alone, after its first product, it keeps units busy {formats.percent(busy(clocks[rung], count))}"
        title = f"{rung}, {config.BLOCK_M} x {config.BLOCK_N} x {config.BLOCK_K}: {share}"
        _frame(axes, title, until, {**names, units: "units"}, slots[rung] + 1.1)
    axes.set_xlabel(NUMBERS)
    key(axes, TIMES, below)
    note(axes, DURATIONS, below=66)
    return figure


def pipelined() -> Drawing:
    caption = (
        "k05 loads a tile, waits, multiplies, and only then loads the next. "
        f"k06 asks for a tile {replay.Loop.of('k06').ahead} steps ahead, and it arrives while another is multiplied. "
        "Each is drawn alone on its SM. On a GPU two to four programs share an SM and fill one another's waits, so k06 "
        f"gains less than the drawing shows. {ONE_SLOT}"
    )
    figure = _timelines((7.4, 3.6), -0.42, k05=3, k06=6)
    return Drawing("Loads and products over time, k05 against k06", caption, figure)


def tensor_cores() -> Drawing:
    caption = (
        f"k08's ring has {replay.Loop.of('k08').slots} slots. A product is asynchronous: the next one is started "
        "before it has ended. Its slot is filled again only when it has."
    )
    return Drawing("Loads and products of k08 over time", caption, _timelines((7.4, 2.1), -0.38, k08=8))


def persistent() -> Drawing:
    each, mine = (traces.recorded()["k09"][name] for name in ("k_tiles", "programs"))
    figure, both = plt.subplots(2, 1, figsize=(7.4, 4.6), sharex=True, gridspec_kw={"hspace": 0.36})
    clocks = {rung: [replay.tile_after_tile(rung, len(x), each) for x in mine] for rung in ("k08", "k09")}
    ends = {rung: max(clock.of_kind("store")[-1].end for clock in of) for rung, of in clocks.items()}
    titles = {"k08": "a program for each tile, one after another on an SM"}
    titles["k09"] = "one program on each SM, which loops over tiles"
    for axes, (rung, title) in zip(both, titles.items(), strict=True):
        for row, (tiles, clock) in enumerate(zip(mine, clocks[rung], strict=True)):
            loads, products, stores = map(clock.of_kind, ("copy", "product", "store"))
            spans = [(x[0].start, x[-1].end) for x in (products[i : i + each] for i in range(0, len(products), each))]
            boxes(axes, [(bar.start, bar.end, row + 0.1, row + 0.5) for bar in loads], ORANGE)
            boxes(axes, [(0, stores[-1].end, row + 0.5, row + 0.9)], EMPTY)
            boxes(axes, [(*span, row + 0.5, row + 0.9) for span in spans], GREEN)
            boxes(axes, [(bar.start, bar.end, row + 0.5, row + 0.9) for bar in stores], PINK)
            for span, tile in zip(spans, tiles, strict=True):
                words(axes, sum(span) / 2, row + 0.7, f"tile {tile}", fontsize=8)
        names = {row + 0.5: f"SM {row}" for row in range(len(mine))}
        _frame(axes, f"{rung}: {title}", max(ends.values()), names, len(mine))
    axes.set_xlabel("clocks")
    key(axes, {"loads on their way": ORANGE, "products": GREEN, "store of C": PINK, "units idle": EMPTY}, -0.36)
    note(axes, DURATIONS, below=62)
    caption = (
        f"{sum(map(len, mine))} tiles of C, each of {each} k-tiles, on {len(mine)} SMs. k09 asks for a tile's first "
        f"k-tiles before it stores the tile before, which saves {formats.percent(1 - ends['k09'] / ends['k08'])} here, "
        "and less if K is longer."
    )
    return Drawing("Tiles over time, k08 against k09", caption, figure)


def warp_specialised() -> Drawing:
    ring, config = replay.ring(), RUNGS["k11"].configs[0]
    products, stores = (ring.clock.of_kind(what) for what in ("product", "store"))
    figure, axes = plt.subplots(figsize=(7.4, 3.6))
    end, rows = stores[-1].end, {"load": 0.5, "mma": ring.slots + 1.9, "store": ring.slots + 2.9}
    loads = _slots(axes, ring.clock, 1.7, len(products), 0.5)
    for role, until in (("load", loads[-1].start), ("mma", end)):
        boxes(axes, [(0, until, rows[role] - 0.3, rows[role] + 0.3)], EMPTY)
        waits = [replay.Bar("wait", x, u, 0) for who, x, u in ring.waits if who == role]
        _bars(axes, waits, BUSY_WAIT, rows[role], high=0.6)
    _bars(axes, _in_one_row(products), GREEN, rows["mma"], 0.5, 0.6)
    _bars(axes, stores, PINK, rows["store"], high=0.6)
    boxes(axes, [(bar.start, bar.start + end / 200, 0.2, 0.8) for bar in loads], ORANGE)
    for name, mark, face in (("full", "v", "black"), ("empty", "^", "white")):
        turns = [(when, slot + 1.32 + 0.76 * (name == "empty")) for who, slot, when in ring.turns if who == name]
        style = {"color": "black", "markerfacecolor": face, "markersize": 4.5, "linestyle": "", "clip_on": False}
        axes.plot(*zip(*turns, strict=True), marker=mark, label=f"barrier “{name}” turns", **style)
    _numbers(axes, products, 1.7, size=7.5)
    _numbers(axes, _in_one_row(products), rows["mma"], size=7.5)
    names = {0.5: "load warp", **{slot + 1.7: f"slot {slot}" for slot in range(ring.slots)}}
    names |= {rows["mma"]: "mma warps", rows["store"]: "TMA store"}
    title = f"k11, a ring of {ring.slots} slots of A and B, {config.BLOCK_M} x {config.BLOCK_N} x {config.BLOCK_K}"
    _frame(axes, title, end, names, rows["store"] + 0.5)
    axes.set_xlabel("clocks; numbers are k-tiles, counted through two tiles of C")
    entries = {**TIMES, "role waits for a barrier": BUSY_WAIT, "store of C": PINK}
    key(axes, entries, -0.18, *axes.get_lines(), ncols=3, handlelength=2, columnspacing=2)
    note(axes, f"The simulator's trace of k11. {DURATIONS}", below=94, width=98)
    ahead = sum(bar.start <= stores[0].start for bar in loads) - sum(b.end <= stores[0].start for b in products)
    caption = (
        "The load warp fills a slot when its barrier “empty” has turned, the mma warps multiply it when “full” has. As "
        f"the first tile of C is stored, {ahead} k-tiles of the next are there or on their way."
    )
    return Drawing("k11's slots, barriers and roles over time", caption, figure)
