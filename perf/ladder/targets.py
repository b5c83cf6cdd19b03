"""What the ladder is meant to reach at 4096^3, and whether a record shows that it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from perf.ladder import views
from perf.ladder.record import Record
from perf.ladder.rungs_and_twins import stem_of
from perf.measure.roofline import SUSPICIOUS_RATIO, too_fast

# Share of cuBLAS in the same precision.
OF_CUBLAS = {
    "k06_pipelined": 0.85,
    "k08_tensor_cores": 0.90,
    "k10_tma": 0.95,
    "k11_warp_specialised": 1.00,
    "c07_warp_tiled": 0.75,
}
# The warp-tiled wmma twin over the single-warp one.
TWIN_OVER_TWIN = ("c11_wmma_fp16_warp_tiled", "c09_wmma_fp16", 2.0)


@dataclass(frozen=True)
class Outcome:
    """A target in words, what was measured, and whether that is enough."""

    what: str
    wanted: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted


def outcomes(record: Record) -> Iterator[Outcome]:
    """Every target that the record can decide."""
    size = views.ladder_size(record)
    if size is None:
        return
    steps = views.ladder(record)
    for step in steps:
        if step.tflops and step.twin_tflops:
            yield Outcome(f"{step.rung.name} as fast as {step.twin}", 1.0, step.tflops / step.twin_tflops)
    for before, step in pairwise(steps):
        if before.rung.precision == step.rung.precision and before.tflops and step.tflops:
            what = f"{step.rung.name} as fast as {before.rung.name}"
            yield Outcome(what, 1.0, step.tflops / before.tflops)
    best = fastest(record, size)
    for name, wanted in OF_CUBLAS.items():
        if name in best and best[name]["ratio"]:
            yield Outcome(f"{name} at {wanted:.2f} of cuBLAS", wanted, best[name]["ratio"]["median"])
    warp_tiled, single, wanted = TWIN_OVER_TWIN
    if warp_tiled in best and single in best:
        gain = best[single]["time_ms"]["median"] / best[warp_tiled]["time_ms"]["median"]
        yield Outcome(f"{warp_tiled} at {wanted:g} times {single}", wanted, gain)


def fastest(record: Record, size: int) -> dict[str, dict[str, Any]]:
    """Of every rung and twin its fastest variant's result at this size; half precision in fp16."""
    found: dict[str, dict[str, Any]] = {}
    for mode in views.modes(record):
        problem = views.squares(record, mode).get(size)
        if problem is None or mode == "bf16":
            continue
        for name, result in problem["providers"].items():
            known = found.get(stem_of(name))
            if views.timed(result) and (known is None or result["time_ms"]["median"] < known["time_ms"]["median"]):
                found[stem_of(name)] = result
    return found


def suspicious(record: Record) -> Iterator[str]:
    """Figures that are too good: half precision far beyond cuBLAS, or beyond what a Hopper does on random data."""
    for mode in views.modes(record):
        for size, problem in views.squares(record, mode).items():
            for name, result in problem["providers"].items():
                if not views.timed(result) or not result["ratio"] or mode not in ("fp16", "bf16") or size < 2048:
                    continue
                ratio, speed = result["ratio"]["median"], views.tflops(problem, result)
                if ratio > SUSPICIOUS_RATIO:
                    yield f"{name} on {mode} {size}: {ratio:.2f} of cuBLAS"
                if too_fast(speed, record.environment["gpu"]):
                    yield f"{name} on {mode} {size}: {speed:.0f} TFLOPS"
