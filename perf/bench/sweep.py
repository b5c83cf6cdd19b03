"""A sweep: one suite's shapes measured one after another, written down after each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perf.bench.peers import PEERS
from perf.bench.scores import AUTOTUNED, COMPILED
from perf.common.files import write_json
from perf.measure import operands, timer
from perf.measure.operands import Operands, Problem
from perf.measure.providers import CUBLAS, OURS, ROUTED
from perf.measure.roofline import clocks_under_load, copy_bandwidth
from perf.measure.timer import Pace, Provider
from triton_gemm.suites import Suite, chosen
from triton_gemm.suites.shapes import Shape

BUDGET_S = 0.15
PACE = Pace(patience_s=0.03, replay_ms=4.0, check_rows=1024, extras=False)
SETTLE_S = 1.5  # at the start of a suite, for the clocks
COPY_BUDGET_S = 0.3
WARM_THREADS = 16
DEFAULT_PROVIDERS = (OURS, CUBLAS)
# Providers that a suite is measured against as well as cuBLAS.
ALSO = {"epilogue": (COMPILED,), "host": (ROUTED,)}

Shown = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Options:
    """What the command line chose; budget_s is seconds of timing a shape, providers None is each suite's own; peers:
    those of AUTOTUNED as well."""

    dtype: str = "bf16"
    budget_s: float = BUDGET_S
    limit: int | None = None
    providers: tuple[str, ...] | None = None
    unseen: int | None = None
    warm: bool = False
    peers: bool = False

    def providers_of(self, suite: Suite) -> tuple[str, ...]:
        names = self.providers or (*DEFAULT_PROVIDERS, *ALSO.get(suite.name, ()))
        return tuple(dict.fromkeys((*names, *(AUTOTUNED if self.peers else ()))))


def file_name(suite: Suite, options: Options) -> str:
    """A sweep of other shapes or another type has another file."""
    words = [suite.name]
    words += [options.dtype] if options.dtype != "bf16" and suite.mode is None else []
    words += [f"unseen-{options.unseen}"] if options.unseen is not None else []
    return f"{'-'.join(words)}.json"


def problem_of(shape: Shape, suite: Suite, options: Options, seed: int) -> Problem:
    """A shape as a problem with random operands."""
    return Problem(**vars(shape), mode=suite.mode or options.dtype, seed=seed, cold=suite.cold)


def subjects(problem: Problem, names: Sequence[str]) -> list[Provider]:
    """The providers by name, for one problem."""
    return [replace(PEERS[name](problem), name=name) for name in names]


def run(suite: Suite, options: Options, file: Path, surroundings: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """Measures a suite on the current GPU; `shown(key, result)` is called after each shape. Returns what is in `file`.

    Raises DeviceLostError where a provider took the GPU down; what was measured before is kept.
    """
    shapes = chosen(suite, options.limit, options.unseen)
    names = options.providers_of(suite)
    problems = [problem_of(shape, suite, options, seed) for seed, shape in enumerate(shapes)]
    sweep: dict[str, Any] = {
        "suite": suite.name,
        "reason": suite.reason,
        "kind": suite.kind,
        "unit": suite.unit,
        "dtype": suite.mode or options.dtype,
        "budget_s": options.budget_s,
        "listed": len(suite.shapes),
        "unseen": options.unseen,
        "environment": surroundings,
        "shapes": {},
    }
    if options.warm and OURS in names:
        warm(problems)
    sweep["clocks_before"] = clocks_under_load(SETTLE_S)
    if suite.name == "decode":
        sweep |= copy_bandwidth(COPY_BUDGET_S, patience_s=0.5)
    write_json(file, sweep)
    for shape, problem in zip(shapes, problems, strict=True):
        measured = measure(problem, suite.kind, names, options.budget_s)
        described = {"name": shape.name, **operands.describe(problem)}
        kept = {name: measured[name] for name in ("sets", "providers")}
        sweep["shapes"][shape.key] = {**described, **kept}
        write_json(file, sweep)
        shown(shape.key, sweep["shapes"][shape.key])
    sweep["clocks_after"] = clocks_under_load(PACE.patience_s)
    write_json(file, sweep)
    return sweep


def measure(problem: Problem, kind: str, names: Sequence[str], budget_s: float) -> dict[str, Any]:
    """One shape: kernel time by graph replay, or the time of calls."""
    providers = subjects(problem, names)
    try:
        if kind == "graph":
            others = [name for name in names if name not in (OURS, CUBLAS)]
            return timer.measure(problem, providers, CUBLAS, budget_s, PACE, others)
        return timer.measure_calls(problem, providers, CUBLAS, budget_s, drain=kind == "queue")
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        reason = f"no memory for the operands or the check: {error}".splitlines()[0]
        return {"sets": 0, "providers": {name: {"failed": reason} for name in names}}


def warm(problems: Sequence[Problem]) -> None:
    """Compiles what triton_gemm will launch for each problem, many at once; a failure is left to the measurement."""
    index = torch.cuda.current_device()

    def one(problem: Problem) -> None:
        torch.cuda.set_device(index)  # the current device is a thread's own
        try:
            laid = Operands(problem, {problem.out_dtype}, 1, empty=True)
            subjects(problem, [OURS])[0].call(*laid.arguments()[0])
        except Exception:
            return

    with ThreadPoolExecutor(min(WARM_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(one, problems))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
