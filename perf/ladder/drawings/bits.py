"""Which bits of an operand are multiplied: k07's rounding to TF32, and the error that it makes."""

from __future__ import annotations

import struct

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common.style import BLACK, GREY
from perf.ladder.drawings import traces
from perf.ladder.drawings.canvas import BLUE, EMPTY, GREEN, LIGHT, ORANGE, RED, Drawing, boxes, frame, key, words

IGNORED = 13  # bits of an fp32 operand, the last ones, that a tensor core does not read in TF32
PARTS = {"sign": (0, 1, EMPTY), "exponent": (1, 9, LIGHT), "mantissa that is read": (9, 19, GREEN)}
PARTS["not read"] = (19, 32, ORANGE)
STEP = 2.0**-10  # between neighbours of TF32 from 1 to 2


def number(bits: int) -> float:
    """The fp32 number that has these bits."""
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def read(bits: int) -> int:
    """What a tensor core reads of it."""
    return bits >> IGNORED << IGNORED


def _operand(axes: Axes, rows: dict[str, int]) -> None:
    """A line of 32 bits for each number. Framed are those that differ from the first line's, of the ones that are
    read."""
    first = next(iter(rows.values()))
    frame(axes, "An operand's bits", (0, 32), (0, len(rows)), names={y + 0.5: name for y, name in enumerate(rows)})
    for y, bits in enumerate(rows.values()):
        cells = [(x, x + 1, y + 0.12, y + 0.88) for x in range(32)]
        for begin, end, color in PARTS.values():
            boxes(axes, cells[begin:end], color, 0.5, alpha=0.8)
        changed = [cell for x, cell in enumerate(cells[:-IGNORED]) if (bits ^ first) >> 31 - x & 1]
        boxes(axes, changed, "none", 1.2, edgecolor=BLACK)
        for x in range(32):
            words(axes, x + 0.5, y + 0.5, bits >> 31 - x & 1, fontsize=7.5)
        words(axes, 32.4, y + 0.5, f"{number(bits):.7f}", "left")
    key(axes, {name: color for name, (*_, color) in PARTS.items()}, -0.03)


def tf32() -> Drawing:
    trace = traces.recorded()["k07"]
    given, rounded = trace["given"], trace["rounded"]
    figure = plt.figure(figsize=(7.4, 4.1))
    top, bottom = figure.add_gridspec(2, 1, height_ratios=(1, 1.5), hspace=0.75)
    lost, wrong = (figure.add_subplot(part) for part in bottom.subgridspec(1, 2, width_ratios=(1.5, 1), wspace=0.5))
    of_operand = {"fp32": given[0], "truncated": read(given[0]), "rounded by k07": rounded[0]}
    _operand(figure.add_subplot(top), of_operand)
    x = [(number(bits) - 1) / STEP for bits in given[1:]]
    for name, after, style in (("truncated", map(read, given[1:]), "s-"), ("rounded", rounded[1:], "o-")):
        missed = [(number(one) - 1) / STEP - where for one, where in zip(after, x, strict=True)]
        lost.plot(x, missed, style, color=BLUE if name == "rounded" else RED, markersize=4, linewidth=1, label=name)
    lost.axhline(0, color=GREY, linewidth=0.8)
    lost.set(xlabel="operand: 1 and so many steps of TF32", ylabel="error, steps", title="What an operand loses")
    lost.legend(loc="upper left", bbox_to_anchor=(0, -0.36), ncols=2, borderaxespad=0, fontsize=8.5)
    # Of three digits, as the last ones depend on the CPU that sums.
    errors = {name: float(f"{trace['errors'][name]:.2e}") for name in ("truncated", "rounded")}
    wrong.barh(list(errors), list(errors.values()), color=[RED, BLUE], height=0.6)
    for row, value in enumerate(errors.values()):
        words(wrong, value, row, f" {value:.1e}", "left", fontsize=9)
    limits = {"xlim": (0, 1.45 * max(errors.values())), "ylim": (1.5, -0.5)}
    wrong.set(**limits, xticks=[], xlabel="error against fp64, norm", title="What k07's result misses")
    caption = (
        f"A tensor core ignores the last {IGNORED} bits of an fp32 operand, which moves it toward zero. k07 rounds to "
        "the nearest number that the core reads, at most half a step away. Of random operands the product is "
        f"{errors['truncated'] / errors['rounded']:.1f} times as far off when they are truncated."
    )
    return Drawing("How k07 rounds operands to TF32, and what that spares", caption, figure)
