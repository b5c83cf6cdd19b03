"""What the autotuner timed for a rung: the fastest, the modelled one, and what each choice is worth.

It is read out of a record and told in words. Nothing here measures or draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from perf.common import formats
from perf.ladder import clock_model, tasks
from perf.ladder.record import Record, TunedConfig, TunedRung
from perf.measure import environment
from perf.measure.environment import Environment
from perf.measure.numerics import mode_of
from perf.measure.operands import MODE_DTYPES
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
PICTURE = "tuning.png"
HOW = (
    "These are the times that `triton.autotune` chooses by, from `do_bench`. The L2 cache is emptied before each "
    "call, and nothing waits until the GPU's clock has settled. Only the kernel is timed, without what a rung does "
    "to its operands first. So the times compare configurations of one rung. Rungs are compared by the report's own "
    "times, for which all take turns after the clock has settled: a rung may be faster there and slower here. "
    "The clock of each run was not recorded.\n\n"
    "The model is arithmetic (`clocks` in `perf/ladder/clock_model.py`): waves of tiles, times steps of K, times "
    "the slowest of arithmetic units, issue slots, L2, shared memory and latency. GROUP_M, DRAM and power are not "
    "in it. Of equal configurations, before rounding, it takes the first of the list."
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
    """A rung's tuning on one problem: what was timed, in the order of the rung's list, and what failed."""

    rung: Rung
    mode: str
    size: tuple[int, int, int]
    made: Environment
    timed: tuple[TimedConfig, ...]
    failed: tuple[GemmConfig, ...]

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


def summary(tuning: Tuning) -> str:
    """What the figures of a tuning say, in a paragraph."""
    M, N, K = tuning.size
    speeds = [timed.tflops for timed in tuning.timed]
    best = tuning.fastest.config
    fields = "tile, warps, stages" if best.GROUP_M is None else "tile, warps, stages, GROUP_M"
    where = f"On {environment.short(tuning.made['gpu'])}, {tuning.mode}, {M} x {N} x {K}"
    text = (
        f"{where}: the tuner timed {len(speeds)} configurations with `do_bench`. The slowest reaches "
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
