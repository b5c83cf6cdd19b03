"""Measure GEMMs in turns and alone, with the clock that each then has: python -m perf.bench alone.

Candidates that take turns, a few milliseconds each, run at one clock. One that runs alone sets its own: a board at its
power limit lowers the clock until the power is met, so a kernel that takes more energy is slower alone than in turns.
PRODUCTS in bf16 are measured both ways, in the model's choice, the tables', the best predicted of each tile size, and
cuBLAS. Exit status: 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any

import torch

from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown
from perf.measure import environment
from perf.measure.compile_ahead import compile_ahead
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.device import DeviceInfo, current_device_info
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import policies
from triton_gemm.selection.select import Selection, ranked
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named
from triton_gemm.tuning import measuring
from triton_gemm.tuning.gpu import TORCH, Candidate, Gpu
from triton_gemm.tuning.timing import Stopwatch, interleave, ratios, settle

NAME, FILE = "alone", "alone.csv"
CUBLAS = "cuBLAS"
PRODUCTS = (
    *(Shape(n, n, n) for n in (2048, 4096, 8192, 16384)),
    *(Shape(M, 28672, 4096, layout="nt") for M in (1024, 3000)),
    *(Shape(M, 14336, 4096, layout="nt") for M in (512, 2048)),
    *(Shape(4096, 11008, 4096, layout="nt"), Shape(1024, 4096, 14336, layout="nt")),
    *(Shape(5120, 4608, 10112, layout="tt"), Shape(6528, 2688, 7296, layout="nt")),
    *(Shape(M, N, K, layout="tn") for M, N, K in ((6912, 7808, 4736), (8320, 2816, 11008), (8960, 2688, 7424))),
    Shape(2176, 2176, 8320, layout="tn"),
)
WITHIN = 1.2  # of the best prediction, and at most CANDIDATES
CANDIDATES, TURNS, ALONE_MS, BLOCKS = 15, 16, 260.0, 2
SPIN, LAUNCH_US = 100_000, 2.0  # clocks that a kernel waits, to tell the clock by; what its events add
COLUMNS = ("product", "candidate", "turns_us", "turns", "alone_us", "alone", "mhz")  # `turns`, `alone`: of cuBLAS


def of_each_tile(problem: GemmProblem, device: DeviceInfo, count: int) -> list[Selection]:
    """The choices of tables and of the model, and the best predicted of each tile size in each size of cluster."""
    chosen = (policies.choose(problem, device), policies.by_model(problem, device))
    found = {x.algorithm: x for x in chosen}
    timed = ranked(problem, device, any_bits=True)
    kinds = set()
    for us, candidate in timed:
        config: Any = candidate.algorithm.config
        kind = config.BLOCK_M, config.BLOCK_N, getattr(config, "ctas", 1)
        if us <= WITHIN * timed[0][0] and kind not in kinds and len(found) < count:
            kinds.add(kind)
            found.setdefault(candidate.algorithm, Selection.of(candidate, ""))
    return list(found.values())


def clock_mhz() -> Callable[[], float]:
    """Queues a kernel that spins. The function returned waits for it and gives the SM clock in MHz."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(SPIN)
    end.record()

    def read() -> float:
        end.synchronize()
        return SPIN / (1000 * begin.elapsed_time(end) - LAUNCH_US)

    return read


def alone(start: Stopwatch, replay_ms: float) -> tuple[float, float]:
    """Milliseconds of a call and MHz, in the second half of ALONE_MS, of replays that take about so long."""
    times, clocks = [], []
    for _ in range(math.ceil(ALONE_MS / (4 * replay_ms))):
        waiting, clock = [start() for _ in range(4)], clock_mhz()
        times += [read() for read in waiting]
        clocks.append(clock())
    return median(times[len(times) // 2 :]), median(clocks[len(clocks) // 2 :])


def measure(gpu: Gpu, problem: GemmProblem, candidates: Sequence[Selection]) -> Iterator[list[formats.Cell]]:
    """COLUMNS of cuBLAS and each candidate. FailedError for one that is wrong."""
    by_name: dict[str, Candidate] = {CUBLAS: TORCH, **{named(x): x for x in candidates}}
    by_itself: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    with closing(gpu.bench(problem, candidates, 0)) as bench:
        for name in sorted(by_name, key=lambda name: name == CUBLAS):  # others are compared with the first candidate
            bench.prepare(by_name[name])
        starts = {name: bench.starts[candidate] for name, candidate in by_name.items()}
        settle(starts[CUBLAS], 0.6)
        in_turns = interleave(starts, TURNS)
        for block in range(BLOCKS):
            for name in list(by_name)[:: -1 if block % 2 else 1]:
                by_itself[name].append(alone(starts[name], bench.round_ms[by_name[name]]))
    sums: Mapping[str, float] = {name: sum(ms for ms, _ in found) for name, found in by_itself.items()}
    for name, found in by_itself.items():
        turns = median(ratios(in_turns, name, CUBLAS))
        us = f"{1000 * median(in_turns[name]):.5g}", f"{turns:.3f}", f"{1000 * sums[name] / BLOCKS:.5g}"
        mhz = sum(x for _, x in found) / BLOCKS
        yield [problem_text(problem), name, *us, f"{sums[CUBLAS] / sums[name]:.3f}", f"{mhz:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m perf.bench {NAME}", description=__doc__)
    parser.add_argument("--candidates", type=args.count, default=CANDIDATES, metavar="N", help="at most (%(default)s)")
    given = parser.parse_args(arguments)
    surroundings: Mapping[str, Any] = environment.describe("tuning")
    if surroundings["gpu"] is None:
        parser.error(f"{NAME} needs a CUDA GPU, and torch sees none here")
    info = current_device_info()
    jobs = {x: of_each_tile(x, info, given.candidates) for x in (gemm_problem(shape, "bf16") for shape in PRODUCTS)}
    compile_ahead(jobs)
    measured: list[list[formats.Cell]] = []
    with measuring(NAME, None, "any") as gpu:
        for problem, candidates in jobs.items():
            found = list(measure(gpu, problem, candidates))
            measured += found
            print(formats.table(COLUMNS, found), flush=True)
            file = environment.write_csv(surroundings, FILE, COLUMNS, measured)
    print(f"Written to {shown(file)}.")
    return 0
