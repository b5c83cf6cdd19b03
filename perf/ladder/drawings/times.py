"""What happens when: loads, products and stores on a clock, a drawing for each of k06, k08, k09 and k11."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common import formats
from perf.common.style import note
from perf.ladder.clock_model import LATENCY_CLOCKS
from perf.ladder.drawings import replay, traces
from perf.ladder.drawings.canvas import BUSY_WAIT, EMPTY, GREEN, ORANGE, PINK, WAITING, Drawing, boxes, key
from perf.ladder.drawings.traces import RUNGS
from perf.measure import roofline

DURATIONS = (
    "Order and waits are the kernel's. Durations are arithmetic: a load takes a clock for "
    f"{roofline.L2_BYTES_PER_CLOCK} bytes, and {LATENCY_CLOCKS} more; a product runs at the units' peak; "
    "a program is alone on its SM."
)


def _of_time(axes: Axes) -> None:
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


TIMES = {"load on its way": ORANGE, "tile waits in shared memory": WAITING, "product": GREEN}


def _timeline(axes: Axes, clock: replay.Clock, slots: int, steps: int, rows: str = "slot {}") -> float:
    """A row for each slot of shared memory: loads, tiles that wait, products; below, the units. Returns their end."""
    products = {bar.step: bar for bar in clock.of_kind("product")[:steps]}
    loads = [bar for bar in clock.of_kind("copy") if bar.step in products]
    end = max(bar.end for bar in products.values())
    boxes(axes, [(bar.start, bar.end, bar.slot + 0.12, bar.slot + 0.88) for bar in loads], ORANGE)
    kept = [(bar.end, products[bar.step].start, bar.slot + 0.12, bar.slot + 0.88) for bar in loads]
    boxes(axes, [box for box in kept if box[1] > box[0]], WAITING)
    line = {"edgecolor": "white", "linewidth": 0.6}
    boxes(axes, [(bar.start, bar.end, bar.slot + 0.12, bar.slot + 0.88) for bar in products.values()], GREEN, **line)
    boxes(axes, [(0, end, slots + 0.32, slots + 0.98)], EMPTY)
    boxes(axes, [(bar.start, bar.end, slots + 0.32, slots + 0.98) for bar in products.values()], GREEN, **line)
    for bar in [*loads, *products.values()]:
        if bar.end - bar.start > 0.04 * end:
            axes.text((bar.start + bar.end) / 2, bar.slot + 0.5, str(bar.step), ha="center", va="center", fontsize=8)
    for bar in products.values():
        axes.text((bar.start + bar.end) / 2, slots + 0.65, str(bar.step), ha="center", va="center", fontsize=8)
    names = [rows.format(slot) for slot in range(slots)]
    axes.set_yticks([*(slot + 0.5 for slot in range(slots)), slots + 0.65], [*names, "units"])
    axes.set_ylim(slots + 1.1, 0)
    _of_time(axes)
    return end


def busy(clock: replay.Clock, steps: int) -> float:
    """Share of the time in which the units multiply, of the first steps and from the end of the first product."""
    first, *products = clock.of_kind("product")[:steps]
    return sum(bar.end - bar.start for bar in products) / (products[-1].end - first.end)


def _title(rung: str, clock: replay.Clock, steps: int) -> str:
    config = RUNGS[rung].configs[0]
    tile = f"{config.BLOCK_M} x {config.BLOCK_N} x {config.BLOCK_K}"
    return f"{rung}, {tile}: after the first product, units are busy {formats.percent(busy(clock, steps))} of the time"


def pipelined() -> Drawing:
    steps = {"k05": 3, "k06": 6}
    clocks = {rung: replay.pipelined(rung, count + 2) for rung, count in steps.items()}
    figure, both = plt.subplots(
        2, 1, figsize=(7.4, 3.6), sharex=True, gridspec_kw={"height_ratios": (2, 3), "hspace": 0.5}
    )
    ends = []
    for axes, (rung, count) in zip(both, steps.items(), strict=True):
        slots = replay.Loop.of(rung).slots
        ends.append(_timeline(axes, clocks[rung], slots, count, "tile" if rung == "k05" else "slot {}"))
        axes.set_title(_title(rung, clocks[rung], count), pad=5)
    both[0].set_xlim(0, max(ends))
    both[1].set_xlabel("clocks; numbers are steps of K")
    key(both[1], TIMES, -0.42)
    note(both[1], DURATIONS, below=66)
    caption = (
        "k05 loads a tile, waits, multiplies, and only then loads the next. "
        f"k06 asks for a tile {replay.Loop.of('k06').ahead} steps ahead, and it arrives while another is multiplied."
    )
    return Drawing("Loads and products over time, k05 against k06", caption, figure)


def tensor_cores() -> Drawing:
    steps = 8
    clock, loop = replay.pipelined("k08", steps + 2), replay.Loop.of("k08")
    figure, axes = plt.subplots(figsize=(7.4, 2.1))
    axes.set_xlim(0, _timeline(axes, clock, loop.slots, steps))
    axes.set_title(_title("k08", clock, steps), pad=5)
    axes.set_xlabel("clocks; numbers are steps of K")
    key(axes, TIMES, -0.38)
    note(axes, DURATIONS, below=66)
    caption = (
        f"k08's ring has {loop.slots} slots. A product is asynchronous: the next one is started before it has ended. "
        "Its slot is filled again only when it has."
    )
    return Drawing("Loads and products of k08 over time", caption, figure)


def persistent() -> Drawing:
    trace = traces.recorded()["k09"]
    each, mine = trace["k_tiles"], trace["programs"]
    figure, both = plt.subplots(2, 1, figsize=(7.4, 4.6), sharex=True, gridspec_kw={"hspace": 0.36})
    ends = dict[str, float]()
    for axes, rung in zip(both, ("k08", "k09"), strict=True):
        for row, tiles in enumerate(mine):
            clock = replay.tile_after_tile(rung, len(tiles), each)
            products, stores = clock.of_kind("product"), clock.of_kind("store")
            ends[rung] = max(ends.get(rung, 0.0), stores[-1].end)
            boxes(axes, [(bar.start, bar.end, row + 0.1, row + 0.5) for bar in clock.of_kind("copy")], ORANGE)
            boxes(axes, [(0, stores[-1].end, row + 0.5, row + 0.9)], EMPTY)
            spans = [products[i : i + each] for i in range(0, len(products), each)]
            boxes(axes, [(span[0].start, span[-1].end, row + 0.5, row + 0.9) for span in spans], GREEN)
            boxes(axes, [(bar.start, bar.end, row + 0.5, row + 0.9) for bar in stores], PINK)
            for span, tile in zip(spans, tiles, strict=True):
                axes.text(
                    (span[0].start + span[-1].end) / 2,
                    row + 0.7,
                    f"tile {tile}",
                    ha="center",
                    va="center",
                    fontsize=8,
                )
        axes.set_yticks([row + 0.5 for row in range(len(mine))], [f"SM {row}" for row in range(len(mine))])
        axes.set_ylim(len(mine), 0)
        _of_time(axes)
    both[0].set_title("k08: a program for each tile, one after another on an SM", pad=5)
    both[1].set_title("k09: one program on each SM, which loops over tiles", pad=5)
    both[0].set_xlim(0, max(ends.values()))
    both[1].set_xlabel("clocks")
    key(both[1], {"loads on their way": ORANGE, "products": GREEN, "store of C": PINK, "units idle": EMPTY}, -0.36)
    note(both[1], DURATIONS, below=62)
    saved = 1 - ends["k09"] / ends["k08"]
    caption = (
        f"{sum(map(len, mine))} tiles of C, each of {each} k-tiles, on {len(mine)} SMs. k09 asks for a tile's first "
        f"k-tiles before it stores the tile before, which saves {formats.percent(saved)} here, and less if K is longer."
    )
    return Drawing("Tiles over time, k08 against k09", caption, figure)


# ---- k11: the ring ----


def warp_specialised() -> Drawing:
    ring = replay.ring()
    clock, slots, config = ring.clock, ring.slots, RUNGS["k11"].configs[0]
    m, n, k = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    figure, axes = plt.subplots(figsize=(7.4, 3.6))
    products = {bar.step: bar for bar in clock.of_kind("product")}
    loads, stores = clock.of_kind("copy"), clock.of_kind("store")
    end = stores[-1].end
    line = {"edgecolor": "white", "linewidth": 0.5}
    rows = {"load": 0.0, "mma": slots + 1.4, "store": slots + 2.4}
    waits = {role: [(x, u) for who, x, u in ring.waits if who == role] for role in ("load", "mma")}
    for role in ("load", "mma"):
        boxes(axes, [(0, end if role == "mma" else loads[-1].start, rows[role] + 0.2, rows[role] + 0.8)], EMPTY)
        boxes(axes, [(x, u, rows[role] + 0.2, rows[role] + 0.8) for x, u in waits[role]], BUSY_WAIT)
    boxes(axes, [(bar.start, bar.end, bar.slot + 1.32, bar.slot + 2.08) for bar in loads], ORANGE)
    kept = [(bar.end, products[bar.step].start, bar.slot + 1.32, bar.slot + 2.08) for bar in loads]
    boxes(axes, [box for box in kept if box[1] > box[0]], WAITING)
    boxes(axes, [(b.start, b.end, b.slot + 1.32, b.slot + 2.08) for b in products.values()], GREEN, **line)
    boxes(axes, [(b.start, b.end, rows["mma"] + 0.2, rows["mma"] + 0.8) for b in products.values()], GREEN, **line)
    boxes(axes, [(b.start, b.end, rows["store"] + 0.2, rows["store"] + 0.8) for b in stores], PINK)
    boxes(axes, [(bar.start, bar.start + end / 200, 0.2, 0.8) for bar in loads], ORANGE)
    for name, mark, look in (("full", "v", "black"), ("empty", "^", "white")):
        turns = [
            (when, slot + 1.32 + (0.76 if name == "empty" else 0)) for who, slot, when in ring.turns if who == name
        ]
        style = {"color": "black", "markerfacecolor": look, "markersize": 4.5, "linestyle": "", "clip_on": False}
        axes.plot(*zip(*turns, strict=True), marker=mark, label=f"barrier “{name}” turns", **style)
    for bar in products.values():
        for y in (bar.slot + 1.7, rows["mma"] + 0.5):
            axes.text((bar.start + bar.end) / 2, y, str(bar.step), ha="center", va="center", fontsize=7.5)
    axes.set_yticks(
        [0.5, *(slot + 1.7 for slot in range(slots)), rows["mma"] + 0.5, rows["store"] + 0.5],
        ["load warp", *(f"slot {slot}" for slot in range(slots)), "mma warps", "TMA store"],
    )
    axes.set_title(f"k11, a ring of {slots} slots of A and B, {m} x {n} x {k}", pad=5)
    axes.set(
        xlim=(0, end), ylim=(rows["store"] + 1, 0), xlabel="clocks; numbers are k-tiles, counted through two tiles of C"
    )
    _of_time(axes)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in TIMES.items()]
    handles += [plt.Rectangle((0, 0), 1, 1, color=BUSY_WAIT, label="role waits for a barrier")]
    handles += [plt.Rectangle((0, 0), 1, 1, color=PINK, label="store of C"), *axes.get_lines()]
    axes.legend(handles=handles, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.18), borderaxespad=0, fontsize=8.5)
    note(axes, f"The simulator's trace of k11. {DURATIONS}", below=94, width=98)
    ahead = sum(bar.start < stores[0].start for bar in loads) - sum(b.end <= stores[0].start for b in products.values())
    caption = (
        "The load warp fills a slot when its barrier “empty” has turned, the mma warps multiply it when “full” has. As "
        f"the first tile of C is stored, {ahead} k-tiles of the next are there or on their way."
    )
    return Drawing("k11's slots, barriers and roles over time", caption, figure)
