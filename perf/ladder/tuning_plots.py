"""The picture of a tuning: every configuration's TFLOPS, by tile."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from perf.common import formats
from perf.common.style import BLACK, CUDA, GREY, LABEL_SIZE, PALE, PALETTE, TRITON, legend_below, note, save
from perf.ladder.tuning import Timed, Tuning, picture, tile
from perf.measure import environment

WARPS = {2: PALETTE[2], 4: TRITON, 8: CUDA, 16: PALETTE[3]}  # colours
STAGES = {1: "o", 2: "v", 3: "^", 4: "s", 5: "P", 6: "X"}  # marks; cuBLAS's is none of them
LINE = 0.235  # inches
COLUMNS = {
    "TFLOPS": lambda timed: formats.number(timed.tflops),
    "warps": lambda timed: timed.config.num_warps,
    "stages": lambda timed: timed.config.num_stages,
    "GROUP_M": lambda timed: timed.config.GROUP_M,
    "regs": lambda timed: timed.registers,
}
PLACES = (1.03, 1.19, 1.31, 1.44, 1.62)  # of the columns, in widths of the axes
VERDICT = 1.74
COLUMNS_OF_LEGEND = 4
NOTE = (
    "Predicted speeds are scaled, so that the best of them lies at the fastest speed. The line through a mark goes "
    "from the 20th to the 80th percentile."
)


def configurations(tuning: Tuning, folder: Path) -> Path:
    """A line for each configuration, those of a tile together: a mark whose colour says the warps and whose shape the
    stages, a tick where it was predicted, and the figures. Rings are round the fastest and the predicted one."""
    tiles = tuning.by_tile()
    lines = [timed for together in tiles for timed in together]
    figure, axes = plt.subplots(figsize=(5.2, LINE * len(lines) + 0.5))
    for y, timed in enumerate(lines):
        _line(axes, y, timed, tuning)
    starts = [sum(map(len, tiles[:i])) for i in range(len(tiles))]
    for i, (start, together) in enumerate(zip(starts, tiles, strict=True)):
        if i % 2 == 0:
            axes.axhspan(start - 0.5, start + len(together) - 0.5, color=PALE, linewidth=0, zorder=0)
    for place, (name, read) in zip(PLACES, COLUMNS.items(), strict=True):
        _text(axes, place, -1, name if any(read(timed) is not None for timed in lines) else "", GREY)
    axes.set_yticks(starts, ["x".join(map(str, tile(together[0].config))) for together in tiles])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    most = max(max(timed.high, tuning.expected(timed) or 0.0) for timed in lines)
    axes.set_xlim(0, 1.04 * most)
    axes.set_xlabel("TFLOPS")
    M, N, K = tuning.size
    axes.set_title(
        f"{tuning.rung.id} {tuning.rung.title}: what the autotuner timed, by BLOCK_M x BLOCK_N x BLOCK_K\n"
        f"{tuning.mode}, M x N x K = {M} x {N} x {K}, {environment.short(tuning.made['gpu'])}",
        pad=22,
    )
    _legend(axes, tuning)
    return save(figure, folder / picture(tuning.rung))


def _line(axes: Axes, y: int, timed: Timed, tuning: Tuning) -> None:
    config = timed.config
    colour = _colour(config.num_warps)
    axes.plot([timed.low, timed.high], [y, y], linewidth=1.2, color=colour, zorder=4)
    axes.plot(timed.tflops, y, marker=_mark(config.num_stages), markersize=6, color=colour, zorder=4)
    expected = tuning.expected(timed)
    if expected is not None:
        axes.plot(expected, y, marker="|", markersize=10, color=GREY, zorder=3)
    verdicts = []
    if timed is tuning.fastest:
        verdicts.append("fastest")
        axes.plot(timed.tflops, y, marker="o", markersize=12, markerfacecolor="none", color=BLACK, clip_on=False)
    if timed is tuning.predicted:
        verdicts.append("predicted")
        axes.plot(timed.tflops, y, marker="s", markersize=15, markerfacecolor="none", color=GREY, clip_on=False)
    for place, read in zip(PLACES, COLUMNS.values(), strict=True):
        value = read(timed)
        _text(axes, place, y, "" if value is None else str(value), colour)
    _text(axes, VERDICT, y, ", ".join(verdicts), BLACK)


def _colour(warps: int) -> str:
    return WARPS.get(warps, GREY)


def _mark(stages: int) -> str:
    return STAGES.get(stages, "*")


def _text(axes: Axes, x: float, y: float, says: str, colour: str) -> None:
    axes.text(x, y, says, transform=axes.get_yaxis_transform(), fontsize=LABEL_SIZE, color=colour, va="center")


def _legend(axes: Axes, tuning: Tuning) -> None:
    def sample(marker: str, colour: str, label: str, size: float = 6, face: str | None = None) -> Line2D:
        look = {"marker": marker, "color": colour, "markersize": size, "markerfacecolor": face or colour}
        return plt.Line2D([], [], linestyle="", label=label, **look)

    warps = sorted({timed.config.num_warps for timed in tuning.timed})
    stages = sorted({timed.config.num_stages for timed in tuning.timed})
    handles = [sample("o", _colour(n), f"{n} warps") for n in warps]
    handles += [sample(_mark(n), GREY, f"{n} stage{'s' if n > 1 else ''}") for n in stages]
    handles.append(sample("o", BLACK, "the fastest", 11, "none"))
    if tuning.predicted is not None:
        handles.append(sample("s", GREY, "the predicted one", 11, "none"))
        handles.append(sample("|", GREY, "predicted speed", 10))
    legend_below(axes, *handles, ncols=COLUMNS_OF_LEGEND)
    note(axes, NOTE, below=48 + 17 * -(-len(handles) // COLUMNS_OF_LEGEND))
