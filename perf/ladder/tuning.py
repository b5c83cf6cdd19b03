"""What the autotuner timed for a rung: the fastest, the predicted one, and what each choice is worth.

It is read out of a record. Nothing here measures or draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perf.common import formats
from perf.ladder import prediction, tasks
from perf.ladder.record import Record
from perf.measure import environment
from perf.measure.numerics import mode_of
from perf.measure.operands import MODE_DTYPES
from perf.measure.roofline import FLOP_PER_CLOCK
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import spelled

# What a configuration chooses, in words, and how it is read from one.
CHOICES = {
    "tile": lambda config: "x".join(map(str, tile(config))),
    "num_warps": lambda config: config.num_warps,
    "num_stages": lambda config: config.num_stages,
    "GROUP_M": lambda config: config.GROUP_M,
}
HOW = (
    "The times are those that `triton.autotune` chooses by: `do_bench`, with an L2 cache that is emptied before each "
    "call, on clocks as they come, of the kernel alone, without what a rung does to its operands first. So they "
    "compare configurations of one rung. Rungs are compared by the report's own times, which take turns on settled "
    "clocks: a rung may be faster there and slower here, as k11 is against k10. The prediction is arithmetic (`clocks` "
    "in `perf/ladder/prediction.py`): waves of tiles, times steps of K, times the slowest of units, L2, shared memory "
    "and latency. It knows nothing of GROUP_M, DRAM and power; of equal configurations it takes the first of the list."
)


@dataclass(frozen=True)
class Timed:
    """One configuration: TFLOPS by the median time and at the 20th and 80th percentile, clocks that are predicted (None
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
    made: dict[str, Any]
    timed: tuple[Timed, ...]
    failed: tuple[GemmConfig, ...]

    @cached_property
    def fastest(self) -> Timed:
        return max(self.timed, key=lambda timed: timed.tflops)

    @cached_property
    def predicted(self) -> Timed | None:
        """The one of the fewest predicted clocks."""
        known = [timed for timed in self.timed if timed.clocks is not None]
        return min(known, key=lambda timed: timed.clocks or 0.0, default=None)

    def expected(self, timed: Timed) -> float | None:
        """The TFLOPS that are predicted, scaled so that the best prediction is as fast as what was fastest."""
        if self.predicted is None or timed.clocks is None:
            return None
        return self.fastest.tflops * (self.predicted.clocks or 0.0) / timed.clocks

    def share(self, timed: Timed) -> float:
        """Of the fastest."""
        return timed.tflops / self.fastest.tflops

    def by_tile(self) -> list[list[Timed]]:
        """The fastest tile first, and of each tile the fastest first."""
        tiles: dict[tuple[int, ...], list[Timed]] = {}
        for timed in sorted(self.timed, key=lambda timed: -timed.tflops):
            tiles.setdefault(tile(timed.config), []).append(timed)
        return list(tiles.values())

    def one_choice_off(self, choice: str) -> list[Timed]:
        """Those that differ from the fastest in this choice alone, the fastest first."""
        best = self.fastest.config
        found = [
            timed
            for timed in self.timed
            if [name for name, read in CHOICES.items() if read(timed.config) != read(best)] == [choice]
        ]
        return sorted(found, key=lambda timed: -timed.tflops)


def tile(config: GemmConfig) -> tuple[int, ...]:
    return tuple(size for name, size in config.meta().items() if name.startswith("BLOCK"))


def config_of(text: str) -> GemmConfig:
    """`spelled` backwards, for a kernel with tiles of A and B."""
    sizes, warps, stages, *group = text.split(",")
    m, n, k = map(int, sizes.split("x"))
    return GemmConfig(m, n, k, int(group[0]) if group else None, int(warps), int(stages))


def shown(record: Record) -> list[Tuning]:
    """Of every rung the tuning in its first precision class, at the ladder's size."""
    found = []
    for rung in LADDER:
        mode = mode_of(rung.precision, rung.dtypes[0])
        entries = {
            entry["M"]: entry
            for entry in record["tuning"].values()
            if entry.get("rung") == rung.name and entry["mode"] == mode and any("time_ms" in t for t in _timed(entry))
        }
        if entries:
            found.append(_tuning(record, rung, entries[tasks.ladder_size(entries)]))
    return found


def _timed(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from entry["configs"].values()


def _tuning(record: Record, rung: Rung, entry: dict[str, Any]) -> Tuning:
    made = entry.get("made", record.environment)
    size = (entry["M"], entry["N"], entry["K"])
    capability = (made["capability"][0], made["capability"][1])
    itemsize = MODE_DTYPES[entry["mode"]].itemsize
    timed, failed = [], []
    for text, facts in entry["configs"].items():
        config = config_of(text)
        if "time_ms" not in facts:
            failed.append(config)
            continue
        blocks, clocks = facts.get("blocks_per_sm"), None
        if blocks is not None and capability in FLOP_PER_CLOCK:
            clocks = prediction.clocks(config, entry["mode"], itemsize, capability, size, made["num_sms"], blocks)
        speed = {name: 2 * size[0] * size[1] * size[2] / ms / 1e9 for name, ms in facts["time_ms"].items()}
        about = (clocks, facts.get("registers"), facts.get("spills"))
        timed.append(Timed(config, speed["median"], speed["p80"], speed["p20"], *about))
    return Tuning(rung, entry["mode"], size, made, tuple(timed), tuple(failed))


def picture(rung: Rung) -> str:
    """The file's name."""
    return f"tuning-{rung.id}.png"


def says(tuning: Tuning) -> str:
    """What the figures of a tuning say, in a paragraph."""
    M, N, K = tuning.size
    speeds = [timed.tflops for timed in tuning.timed]
    best = tuning.fastest.config
    fields = "tile, warps, stages" if best.GROUP_M is None else "tile, warps, stages, GROUP_M"
    where = f"On {environment.short(tuning.made['gpu'])}, {tuning.mode}, {M} x {N} x {K}"
    text = (
        f"{where}: of {len(speeds)} configurations, as the tuner times the kernel alone, the slowest reaches "
        f"{formats.number(min(speeds))} TFLOPS and the fastest {formats.number(max(speeds))}, "
        f"{max(speeds) / min(speeds):.2f} times as much. The fastest is `{spelled(best)}` ({fields})."
    )
    parts = []
    for choice, read in CHOICES.items():
        others = tuning.one_choice_off(choice)
        if others:
            shares = ", ".join(f"{read(timed.config)} {_percent(tuning.share(timed))}" for timed in others)
            parts.append(f"{choice} {shares}")
    if parts:
        text += f" With one choice changed, and of its speed: {'; '.join(parts)}."
    if tuning.predicted is not None:
        if tuning.predicted == tuning.fastest:
            text += " The prediction names it."
        else:
            share = _percent(tuning.share(tuning.predicted))
            text += f" The prediction names `{spelled(tuning.predicted.config)}`, which reaches {share} of it."
    if tuning.failed:
        text += f" {', '.join(f'`{spelled(config)}`' for config in tuning.failed)} failed."
    return text


def _percent(share: float) -> str:
    """With a digit after the point: choices often differ by less than 1 %."""
    return f"{100 * share:.1f} %"
