"""Times the candidates of shapes, and cuBLAS."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perf.bench import sweep
from perf.calibrate.times import CLUSTER, Measured, write
from perf.measure import operands, timer
from perf.measure.compile_ahead import compile_ahead
from perf.measure.providers import CUBLAS, cublas
from perf.measure.roofline import clocks_under_load
from perf.measure.timer import Provider
from triton_gemm import kernels
from triton_gemm.hardware.device import DeviceInfo, device_info
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.select import Selection, ranked, select
from triton_gemm.suites import SUITES
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named

KEEP = 16  # candidates of a shape, the fastest as predicted, of all kernels
LEAST = 3  # at least so many of each
MOST = 2  # and at most so many of one configuration, which differ in how the work is dealt out
BUDGET_S = 0.3


def candidates_of(problem: GemmProblem, device: DeviceInfo) -> list[Candidate]:
    """What select chooses, then the fastest as predicted, best first, of all legal candidates, and a few of each kernel
    and form of cluster."""
    found: list[Candidate] = []
    kept: Counter[Any] = Counter()
    chosen = select(problem, device).algorithm
    candidates = [candidate for _, candidate in ranked(problem, device, any_bits=True)]
    for candidate in sorted(candidates, key=lambda candidate: candidate.algorithm != chosen):
        kernel, config, work, swap_ab, packed = candidate.algorithm
        of_config = (kernel, config, swap_ab, packed)
        of_form = (kernel, *(getattr(config, name, 1) for name in CLUSTER))
        if (len(found) >= KEEP and kept[of_form] >= LEAST) or kept[of_config] >= MOST:
            continue
        if kernels.named(kernel).illegal(candidate.problem, device, config, work) is None:
            found.append(candidate)
            kept.update((of_form, of_config))
    return found


def measure(shapes: Sequence[tuple[Shape, str]], out: Path, surroundings: Mapping[str, Any]) -> list[str]:
    """Times every shape's candidates, writing `out` after each; what failed, as lines.

    Raises DeviceLostError where a candidate took the GPU down; what was measured before is kept.
    """
    device = torch.device(operands.DEVICE, torch.cuda.current_device())
    jobs = []
    for shape, mode in shapes:
        problem = gemm_problem(shape, mode)
        found = candidates_of(problem, device_info(device))
        jobs.append((shape, mode, {x: GemmPlan(problem, Selection.of(x, ""), device) for x in found}))
    print(f"{len(jobs)} shapes, {sum(len(plans) for *_, plans in jobs)} candidates: compiling", flush=True)
    compile_ahead({gemm_problem(shape, mode): [x.selection for x in plans.values()] for shape, mode, plans in jobs})
    surroundings = {**surroundings, "clocks": clocks_under_load(sweep.SETTLE_S)}
    done: list[Measured] = []
    failures: list[str] = []
    for seed, (shape, mode, plans) in enumerate(jobs):
        try:
            measured, failed = measure_shape(shape, mode, plans, seed)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            failures.append(f"{shape.key}: no memory: {error}".splitlines()[0])
            continue
        failures += failed
        if not measured.us:
            continue
        done.append(measured)
        write(out, surroundings, done)
        us, best, base = measured.us, measured.best, measured.cublas_us
        pick = us.get(next(iter(plans)), math.nan)
        line = f"{seed + 1}/{len(jobs)} {measured.key}: cuBLAS {base:.4g} us; of that {base / pick:.3f} times as fast"
        line += f" the model's, {base / us[best]:.3f} the best: {named(plans[best].selection)}"
        print(line, flush=True)
    return failures


def measure_shape(
    shape: Shape, mode: str, plans: Mapping[Candidate, GemmPlan], seed: int
) -> tuple[Measured, list[str]]:
    """Times candidates and cuBLAS by the one timer; and what failed."""
    problem = sweep.problem_of(shape, SUITES["llm"], sweep.Options(mode), seed)
    names = {candidate: named(plan.selection) for candidate, plan in plans.items()}
    ours = [Provider(names[candidate], calling(plan)) for candidate, plan in plans.items()]
    timed = timer.measure(problem, [cublas(problem), *ours], CUBLAS, BUDGET_S, sweep.PACE)["providers"]
    us = {name: 1000 * result["time_ms"]["median"] for name, result in timed.items() if "time_ms" in result}
    failed = [
        f"{shape.key}: {name}: {result.get('failed') or result.get('absent')}"
        for name, result in timed.items()
        if name not in us
    ]
    kept = {candidate: us[name] for candidate, name in names.items() if name in us}
    return Measured(shape, mode, us.get(CUBLAS, math.nan), kept if CUBLAS in us else {}), failed


def calling(plan: GemmPlan) -> Callable[..., None]:
    """The plan as a provider calls it: with bias and scales one after another."""
    return lambda a, b, c, *auxiliary: plan.run(a, b, c, auxiliary)
