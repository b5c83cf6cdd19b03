"""What the autotuner timed for a rung: the fastest, the modelled one, and what each choice is worth.

It is read out of a record, told in words and drawn. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from perf.common import formats
from perf.common.style import BLACK, CUDA, GREY, LABEL_SIZE, PALE, PALETTE, TRITON, legend_below, note, save
from perf.ladder import clock_model, tasks
from perf.ladder.record import Record, TunedConfig, TunedRung
from perf.measure import environment
from perf.measure.environment import Environment
from perf.measure.numerics import mode_of
from perf.measure.operands import MODE_DTYPES, Problem
from perf.measure.roofline import TYPICAL
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import spelled

# What a configuration chooses, in words, and how it is read from one.
CHOICES: dict[str, Callable[[GemmConfig], object]] = {
    "tile": lambda config: "x".join(map(str, tile(config))),
    "num_warps": lambda config: config.num_warps,
    "num_stages": lambda config: config.num_stages,
    "GROUP_M": lambda config: config.GROUP_M,
}
HOW = (
    "These are the times that `triton.autotune` chooses by, from `do_bench`. The L2 cache is emptied before each "
    "call, and nothing waits until the GPU's clock has settled. Only the kernel is timed, without what a rung does "
    "to its operands first. So the times compare configurations of one rung. Rungs are compared by the report's own "
    "times, for which all take turns after the clock has settled: a rung may be faster there and slower here, as "
    "k11 is against k10.\n\n"
    "The model is arithmetic (`clocks` in `perf/ladder/clock_model.py`): waves of tiles, times steps of K, times "
    "the slowest of arithmetic units, issue slots, L2, shared memory and latency. GROUP_M, DRAM and power are not "
    "in it. Of equal configurations it takes the first of the list."
)


@dataclass(frozen=True)
class TimedConfig:
    """One configuration: TFLOPS by the median time and at the 20th and 80th percentile, modelled clocks (None
    where its registers are not known), registers of a thread and spills."""

    config: GemmConfig
    tflops: float
    low: float
    high: float
    clocks: float | None
    registers: int | None
    spills: int | None


@dataclass(frozen=True)
class Tuning:
    """A rung's tuning on one problem: what was timed, in the order of the rung's list, and what failed.

    ladder_tflops: the rung's speed in the ladder's own measurement of this problem, if there is one.
    """

    rung: Rung
    mode: str
    size: tuple[int, int, int]
    made: Environment
    timed: tuple[TimedConfig, ...]
    failed: tuple[GemmConfig, ...]
    ladder_tflops: float | None = None

    @cached_property
    def fastest(self) -> TimedConfig:
        return max(self.timed, key=lambda timed: timed.tflops)

    @cached_property
    def modelled(self) -> TimedConfig | None:
        """The one of the fewest modelled clocks."""
        known = [timed for timed in self.timed if timed.clocks is not None]
        return min(known, key=lambda timed: timed.clocks or 0.0, default=None)

    def expected(self, timed: TimedConfig) -> float | None:
        """The modelled TFLOPS, scaled so that the best of them are those of what was fastest."""
        if self.modelled is None or timed.clocks is None:
            return None
        return self.fastest.tflops * (self.modelled.clocks or 0.0) / timed.clocks

    def share(self, timed: TimedConfig) -> float:
        """Of the fastest."""
        return timed.tflops / self.fastest.tflops

    def by_tile(self) -> list[list[TimedConfig]]:
        """The fastest tile first, and of each tile the fastest first."""
        tiles: dict[tuple[int, ...], list[TimedConfig]] = {}
        for timed in sorted(self.timed, key=lambda timed: -timed.tflops):
            tiles.setdefault(tile(timed.config), []).append(timed)
        return list(tiles.values())

    def one_choice_off(self, choice: str) -> list[TimedConfig]:
        """Those that differ from the fastest in this choice alone, the fastest first."""
        best = self.fastest.config
        alike = [
            timed
            for timed in self.timed
            if [name for name, read in CHOICES.items() if read(timed.config) != read(best)] == [choice]
        ]
        return sorted(alike, key=lambda timed: -timed.tflops)


def tile(config: GemmConfig) -> tuple[int, ...]:
    return tuple(size for name, size in config.meta().items() if name.startswith("BLOCK"))


def config_of(text: str) -> GemmConfig:
    """`spelled` backwards, for a kernel with tiles of A and B."""
    sizes, warps, stages, *group = text.split(",")
    m, n, k = map(int, sizes.split("x"))
    return GemmConfig(m, n, k, int(group[0]) if group else None, int(warps), int(stages))


def shown(record: Record) -> list[Tuning]:
    """Of every rung the tuning in its first precision class, at the ladder's size."""
    tunings = []
    for rung in LADDER:
        mode = mode_of(rung.precision, rung.dtypes[0])
        by_size = {
            entry.M: entry
            for entry in record.tuning.values()
            if (entry.rung, entry.mode) == (rung.name, mode)
            if entry.failed is None and any(config.time_ms for config in entry.configs.values())
        }
        if by_size:
            tunings.append(_tuning(record, rung, by_size[tasks.ladder_size(by_size)]))
    return tunings


def _tuning(record: Record, rung: Rung, entry: TunedRung) -> Tuning:
    made = entry.made or record.environment
    configs = {config_of(text): facts for text, facts in entry.configs.items()}
    measured = record.problems.get(Problem(entry.M, entry.N, entry.K, entry.mode).key)
    return Tuning(
        rung=rung,
        mode=entry.mode,
        size=(entry.M, entry.N, entry.K),
        made=made,
        timed=tuple(
            TimedConfig(
                config=config,
                tflops=entry.tflops_in(facts.time_ms.median),
                low=entry.tflops_in(facts.time_ms.p80),
                high=entry.tflops_in(facts.time_ms.p20),
                clocks=_clocks(config, facts, entry, made),
                registers=facts.registers,
                spills=facts.spills,
            )
            for config, facts in configs.items()
            if facts.time_ms
        ),
        failed=tuple(config for config, facts in configs.items() if not facts.time_ms),
        ladder_tflops=measured.tflops(rung.name) if measured else None,
    )


def _clocks(config: GemmConfig, facts: TunedConfig, entry: TunedRung, made: Environment) -> float | None:
    major, minor = made["capability"]
    if facts.blocks_per_sm is None or (major, minor) not in TYPICAL:
        return None
    itemsize, size = MODE_DTYPES[entry.mode].itemsize, (entry.M, entry.N, entry.K)
    num_sms, blocks, persistent = made["num_sms"], facts.blocks_per_sm, entry.rung[:3] in clock_model.PERSISTENT
    return clock_model.clocks(
        config, entry.mode, itemsize, (major, minor), size, num_sms, blocks, persistent=persistent
    )


def picture(rung: Rung) -> str:
    """The file's name."""
    return f"tuning-{rung.id}.png"


def summary(tuning: Tuning) -> str:
    """What the figures of a tuning say, in a paragraph."""
    M, N, K = tuning.size
    speeds = [timed.tflops for timed in tuning.timed]
    best = tuning.fastest.config
    fields = "tile, warps, stages" if best.GROUP_M is None else "tile, warps, stages, GROUP_M"
    where = f"On {environment.short(tuning.made['gpu'])}, {tuning.mode}, {M} x {N} x {K}"
    text = (
        f"{where}: the tuner timed {len(speeds)} configurations by kernel time. The slowest reaches "
        f"{formats.number(min(speeds))} TFLOPS and the fastest {formats.number(max(speeds))}, "
        f"{max(speeds) / min(speeds):.2f} times as much. The fastest is `{spelled(best)}` ({fields})."
    )
    shares = [
        f"{choice} {read(timed.config)}: {_percent(tuning.share(timed))}"
        for choice, read in CHOICES.items()
        for timed in tuning.one_choice_off(choice)
    ]
    if shares:
        text += f" Shares of its speed where one of these alone is changed, a tile as a whole: {', '.join(shares)}."
    if tuning.modelled is not None:
        if tuning.modelled == tuning.fastest:
            text += " The model chose the same configuration."
        else:
            share = _percent(tuning.share(tuning.modelled))
            text += f" The model chose `{spelled(tuning.modelled.config)}`, which reaches {share} of that speed."
    if tuning.failed:
        text += f" {', '.join(f'`{spelled(config)}`' for config in tuning.failed)} failed."
    return text


def _percent(share: float) -> str:
    """With a digit after the point: choices often differ by less than 1 %."""
    return f"{100 * share:.1f} %"


# --- The picture: every configuration's TFLOPS, by tile ---

WARPS = {2: PALETTE[2], 4: TRITON, 8: CUDA, 16: PALETTE[3]}  # colours
STAGES = {1: "o", 2: "v", 3: "^", 4: "s", 5: "P", 6: "X"}  # marks; cuBLAS's is none of them
LINE = 0.235  # inches
COLUMNS: dict[str, Callable[[TimedConfig], object]] = {
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
    "Modelled speeds are scaled, so that the best of them lies at the fastest speed. The line through a mark goes "
    "from the 20th to the 80th percentile."
)
OF_THE_LADDER = (
    "In the ladder this rung has {tflops} TFLOPS: there rungs take turns after the clock has settled, and all that "
    "a rung does counts, its passes over the operands too. Compare rungs by those figures, and configurations of "
    "one rung by these."
)


def draw(tuning: Tuning, folder: Path) -> Path:
    """A line for each configuration, those of a tile together: a mark whose colour says the warps and whose shape the
    stages, a tick at its modelled speed, and the figures. Rings are round the fastest and the modelled one."""
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


def _line(axes: Axes, y: int, timed: TimedConfig, tuning: Tuning) -> None:
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
    if timed is tuning.modelled:
        verdicts.append("modelled")
        axes.plot(timed.tflops, y, marker="s", markersize=15, markerfacecolor="none", color=GREY, clip_on=False)
    for place, read in zip(PLACES, COLUMNS.values(), strict=True):
        value = read(timed)
        _text(axes, place, y, "" if value is None else str(value), colour)
    _text(axes, VERDICT, y, ", ".join(verdicts), BLACK)


def _colour(warps: int) -> str:
    return WARPS.get(warps, GREY)


def _mark(stages: int) -> str:
    return STAGES.get(stages, "*")


def _text(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), fontsize=LABEL_SIZE, color=colour, va="center")


def _legend(axes: Axes, tuning: Tuning) -> None:
    def sample(marker: str, colour: str, label: str, size: float = 6, face: str | None = None) -> Line2D:
        style = {"marker": marker, "color": colour, "markersize": size, "markerfacecolor": face or colour}
        return plt.Line2D([], [], linestyle="", label=label, **style)

    warps = sorted({timed.config.num_warps for timed in tuning.timed})
    stages = sorted({timed.config.num_stages for timed in tuning.timed})
    handles = [sample("o", _colour(n), f"{n} warps") for n in warps]
    handles += [sample(_mark(n), GREY, f"{n} stage{'s' if n > 1 else ''}") for n in stages]
    handles.append(sample("o", BLACK, "the fastest", 11, "none"))
    if tuning.modelled is not None:
        handles.append(sample("s", GREY, "the fastest modelled", 11, "none"))
        handles.append(sample("|", GREY, "modelled speed", 10))
    legend_below(axes, *handles, ncols=COLUMNS_OF_LEGEND)
    ladder = tuning.ladder_tflops
    of_the_ladder = [OF_THE_LADDER.format(tflops=formats.number(ladder))] if ladder else []
    note(axes, NOTE, *of_the_ladder, below=48 + 17 * -(-len(handles) // COLUMNS_OF_LEGEND))
