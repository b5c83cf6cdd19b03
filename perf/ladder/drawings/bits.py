"""Which bits of an operand are multiplied: k07's rounding to TF32, and the error that it makes."""

from __future__ import annotations

import struct

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.common.style import BLACK, GREY
from perf.ladder.drawings import traces
from perf.ladder.drawings.canvas import BLUE, EMPTY, GREEN, LIGHT, ORANGE, RED, Drawing, bare, boxes, key

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


def _words(axes: Axes, rows: dict[str, int]) -> None:
    """A line of 32 bits for each number; those that differ from the first line's are framed, of the ones that are
    read."""
    first = next(iter(rows.values()))
    for y, (name, bits) in enumerate(rows.items()):
        for begin, end, color in PARTS.values():
            places = [(x, x + 1, y + 0.12, y + 0.88) for x in range(begin, end)]
            boxes(axes, places, color, edgecolor="white", linewidth=0.5, alpha=0.8)
        for x in range(32):
            place = 31 - x
            changed = (bits ^ first) >> place & 1 and place >= IGNORED
            axes.text(x + 0.5, y + 0.5, str(bits >> place & 1), ha="center", va="center", fontsize=7.5)
            if changed:
                boxes(axes, [(x, x + 1, y + 0.12, y + 0.88)], "none", edgecolor=BLACK, linewidth=1.2)
        axes.text(-0.4, y + 0.5, name, ha="right", va="center", fontsize=8.5)
        axes.text(32.4, y + 0.5, f"{number(bits):.7f}", va="center", fontsize=8.5)
    axes.set(xlim=(0, 32), ylim=(0, len(rows)))
    bare(axes, equal=False)


def tf32() -> Drawing:
    trace = traces.recorded()["k07"]
    given, rounded = trace["given"], trace["rounded"]
    figure = plt.figure(figsize=(7.4, 4.1))
    top, bottom = figure.add_gridspec(2, 1, height_ratios=(1, 1.5), hspace=0.75)
    words = figure.add_subplot(top)
    lost, wrong = (figure.add_subplot(part) for part in bottom.subgridspec(1, 2, width_ratios=(1.5, 1), wspace=0.5))
    _words(words, {"fp32": given[0], "truncated": read(given[0]), "rounded by k07": rounded[0]})
    words.set_title("An operand's bits")
    key(words, {name: color for name, (*_, color) in PARTS.items()}, -0.03)
    x = [(number(bits) - 1) / STEP for bits in given[1:]]
    for name, bits, color, mark in (
        ("truncated", [read(bits) for bits in given[1:]], RED, "s"),
        ("rounded", rounded[1:], BLUE, "o"),
    ):
        missed = [(number(one) - 1) / STEP - where for one, where in zip(bits, x, strict=True)]
        lost.plot(x, missed, marker=mark, markersize=4, linewidth=1, color=color, label=name)
    lost.axhline(0, color=GREY, linewidth=0.8)
    lost.set(xlabel="operand: 1 and so many steps of TF32", ylabel="error, steps", title="What an operand loses")
    lost.legend(loc="upper left", bbox_to_anchor=(0, -0.36), ncols=2, borderaxespad=0, fontsize=8.5)
    # Of three digits, as the last ones depend on the CPU that sums.
    errors = {name: float(f"{trace['errors'][name]:.2e}") for name in ("truncated", "rounded")}
    wrong.barh(list(errors), list(errors.values()), color=[RED, BLUE], height=0.6)
    for row, value in enumerate(errors.values()):
        wrong.text(value, row, f" {value:.1e}", va="center", fontsize=9)
    wrong.set(xlim=(0, 1.45 * max(errors.values())), xticks=[], xlabel="error against fp64, norm")
    wrong.invert_yaxis()
    wrong.set_title("What k07's result misses")
    ratio = errors["truncated"] / errors["rounded"]
    caption = (
        f"A tensor core ignores the last {IGNORED} bits of an fp32 operand, which moves it toward zero. k07 rounds to "
        "the nearest number that the core reads, at most half a step away. Of random operands the product is "
        f"{ratio:.1f} times as far off when they are truncated."
    )
    return Drawing("How k07 rounds operands to TF32, and what that spares", caption, figure)
