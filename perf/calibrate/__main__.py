"""Where the device models come from: python -m perf.calibrate measure | fit FILE... | regret FILE...

`measure` (needs a GPU) times the candidates that are predicted to be fast, of every kernel in `kernels.KERNELS`, and
cuBLAS, on shapes of every regime, and writes them to one JSON file after each shape. `fit` finds the figures of the
GPU's `DeviceModel` that predict such times best and choose best by them, near the present ones, and writes them to
`triton_gemm/device_models.json`. `regret` says how much slower than the fastest of a shape's candidates the one is that
the present model picks; `fit` says so for both, and with --hold-out SEED of shapes that it has not seen. Exit status: 1
if a candidate gave wrong results, 2 for a mistake in the call, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

try:
    import numpy as np
    import torch
    from rich.console import Console
    from rich.table import Table
    from scipy.optimize import least_squares

    from perf.bench import sweep
    from perf.bench.scores import geometric_mean
    from perf.bench.shapes import Shape, spaced
    from perf.bench.suites import SUITES, unseen
    from perf.common import arguments as args
    from perf.common.files import read_json
    from perf.measure import environment, operands, timer
    from perf.measure.providers import CUBLAS, cublas
    from perf.measure.timer import DeviceLostError, Provider
    from triton_gemm import device_model, kernels
    from triton_gemm.device import DeviceInfo, device_info, device_of_capability
    from triton_gemm.device_model import DeviceModel, model_of
    from triton_gemm.kernels.candidate import Candidate
    from triton_gemm.kernels.schedule import Schedule
    from triton_gemm.plan import GemmPlan
    from triton_gemm.problem import GemmProblem
    from triton_gemm.select import Selection, predicted, ranked, select
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]'")

FILE = "calibration.json"
WIDE = 160  # columns where there is no terminal

# Suites that a shape may belong to, the narrow regimes first: it counts for the first.
REGIMES = ("batched", "bigk", "shortk", "square", "mid", "decode", "llm", "layouts")
OTHER = "other"
LISTED, DRAWN, SEED = 9, 6, 1  # shapes of each suite: from its list, and others of its regime
# Of more regimes more: nearly all of mid's have rows that begin inside of lines, some of them inside of sectors.
DRAWN_MORE = {"mid": 30, "llm": 18, "decode": 18}
PRECISIONS = {"bf16": "half", "fp16": "half"}  # modes whose name is not the precision's

# Where kernels compete: few rows on weights, tiny and odd matrices, and what tensor cores do not multiply. The columns
# and the length of the sum of weights:
WEIGHTS = (
    (1024, 1024),
    (4096, 4096),
    (14336, 4096),
    (28672, 8192),
    (8192, 28672),
    (576, 7168),
    (32768, 512),
    (512, 16384),
)
SMALL = ((64, 64, 64), (128, 128, 1024), (256, 256, 256), (512, 512, 512), (777, 333, 999), (1024, 1024, 1024))
OWN: tuple[tuple[str, tuple[Shape, ...]], ...] = (
    ("bf16", tuple(Shape(m, n, k, layout="nt") for n, k in WEIGHTS for m in (1, 2, 4, 8, 16, 24))),
    ("bf16", tuple(Shape(m, n, k) for n, k in WEIGHTS for m in (3, 12, 32))),
    ("bf16", tuple(Shape(*size, layout="nt") for size in ((16, 250, 4096), (7, 1000, 900), (2, 64, 65536)))),
    ("bf16", tuple(Shape(m, n, k, batch=512, layout="nt") for m, n, k in ((32, 32, 64), (4, 256, 128), (64, 64, 128)))),
    ("bf16", (*(Shape(*size) for size in SMALL), Shape(64, 28672, 8192), Shape(2047, 2049, 1023), Shape(63, 65, 127))),
    ("ieee", tuple(Shape(*size, layout=layout) for size in SMALL for layout in ("nn", "nt"))),
    ("ieee", tuple(Shape(m, 4096, 4096, layout="nt") for m in (1, 2, 4, 8, 32, 128, 4096))),
    ("fp64", (*(Shape(*size) for size in SMALL), Shape(16, 4096, 4096), Shape(2048, 2048, 2048))),
    ("tf32", tuple(Shape(m, 4096, 4096, layout="nt") for m in (1, 2, 4, 16, 64, 2048))),
)
SCALED = ("fp8-rows", "fp8-fast", "fp8-blocks", "int8", "tf32", "bf16x6")  # suites of which a few shapes are measured

KEEP = 16  # candidates of a shape, the fastest as predicted, of all kernels
LEAST = 3  # at least so many of each
MOST = 2  # and at most so many of one configuration, which differ in how the work is dealt out
BUDGET_S = 0.3

ERROR = 1.2  # what a shape's errors weigh in a fit
REGRET = 2.5, 2.5  # and its regret: in that of the persistent kernel, and in that of the others
LEAST_REGRET = 1e-4
LIKE = 0.04  # predictions that differ by so much are hardly told apart
PRIOR = 0.3  # weight of a figure's logarithm against them
ITERATIONS = 15
SCALE = 0.5  # of errors and regrets: larger ones count less than by their squares
MOVES = (0.08, 0.04, 0.02, 0.04, 0.02, 0.01)  # of a figure's logarithm
CLOSE = 0.01  # LIKE, for these
DIFFERENCE = 2e-3  # of a figure's logarithm, for slopes
WORST = 0.05  # regret from which on a shape is named
HELD_OUT = 3  # one in so many shapes

SIZES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
CLUSTER = (
    "CLUSTER_M",
    "CLUSTER_N",
)  # of kernels that have them, else 1; files from before there were clusters lack both
OTHERS = ("batch", "pad", "bias", "activation", "scales")  # figures of a shape that are written where it has them
COLUMNS = ("kernel", *SIZES, *CLUSTER, "programs", "split_tiles", "split_k", "swap_ab", "packed", "us")
WITHOUT_CLUSTERS = tuple(name for name in COLUMNS if name not in CLUSTER)


# ---- candidates ----


@dataclass(frozen=True)
class Way:
    """A kernel and one of its candidates for a shape."""

    kernel: str
    candidate: Candidate

    def selection(self) -> Selection:
        return Selection.of(self.kernel, self.candidate, "calibration")

    def __str__(self) -> str:
        return str(self.selection()).rpartition(":")[0]


def gemm_problem(shape: Shape, mode: str = "bf16") -> GemmProblem:
    """The library's problem for operands of that shape, without memory for them."""
    dtype = operands.MODE_DTYPES[mode]
    batch = () if shape.batch is None else (shape.batch,)

    def lay(rows: int, columns: int, layout: str) -> torch.Tensor:
        if layout == "t":
            return lay(columns, rows, "n").mT
        return torch.empty(*batch, rows, columns + shape.pad, dtype=dtype, device="meta")[..., :columns]

    a, b = lay(shape.M, shape.K, shape.layout[0]), lay(shape.K, shape.N, shape.layout[1])
    c = torch.empty(*batch, shape.M, shape.N, dtype=operands.OUT_DTYPES.get(dtype, dtype), device="meta")
    more = {"bias": shape.bias, "activation": shape.activation, "scales": shape.scales}
    return GemmProblem.of(a, b, c, precision=PRECISIONS.get(mode, mode), **more)


def ways(problem: GemmProblem, device: DeviceInfo) -> list[Way]:
    """The fastest as predicted, best first, of all legal candidates, and a few of each kernel and form of cluster."""
    found: list[Way] = []
    kept: Counter[Any] = Counter()
    for _, kernel, candidate in ranked(problem, device):
        of_config = (kernel, candidate.config, candidate.swap_ab, candidate.packed)
        of_form = (kernel, *(getattr(candidate.config, name, 1) for name in CLUSTER))
        if (len(found) < KEEP or kept[of_form] < LEAST) and kept[of_config] < MOST:
            illegal = kernels.named(kernel).illegal
            if illegal(candidate.problem, device, candidate.config, candidate.work) is None:
                found.append(Way(kernel, candidate))
                kept.update((of_form, of_config))
    return found


# ---- measured shapes and their file ----


@dataclass(frozen=True)
class Measured:
    """A shape in a mode, cuBLAS's time and each candidate's, in microseconds."""

    shape: Shape
    mode: str
    cublas_us: float
    us: Mapping[Way, float]

    @property
    def key(self) -> str:
        return f"{self.shape.key} {self.mode}"

    @property
    def regime(self) -> str:
        if self.mode != "bf16":
            return self.mode
        rows = min(self.shape.M, self.shape.N)
        if rows <= 32 and self.shape.batch is None:
            return "1 to 4 rows" if rows <= 4 else "5 to 16 rows" if rows <= 16 else "17 to 32 rows"
        return next((name for name in REGIMES if SUITES[name].regime(self.shape)), OTHER)

    @cached_property
    def problem(self) -> GemmProblem:
        return gemm_problem(self.shape, self.mode)

    @cached_property
    def best(self) -> Way:
        return min(self.us, key=self.us.__getitem__)

    def predicted(self, model: DeviceModel) -> list[float]:
        """Of each candidate, in their order."""
        return [predicted(self.problem, way.kernel, way.candidate, model) for way in self.us]

    def pick(self, model: DeviceModel) -> Way:
        """The model's; of equals the one that is not swapped."""
        times = zip(self.predicted(model), self.us, strict=True)
        return min(times, key=lambda one: (one[0], one[1].candidate.swap_ab))[1]


@dataclass(frozen=True)
class Calibration:
    """The measured shapes of one file, and the GPU."""

    device: DeviceInfo
    shapes: list[Measured]


def write(target: Path, surroundings: Mapping[str, Any], measured: Iterable[Measured]) -> None:
    """Writes what was measured, a line for each candidate; a reader sees the old file or the new one."""
    shapes = []
    for found in measured:
        shape = found.shape
        others = {name: getattr(shape, name) for name in OTHERS if getattr(shape, name) != getattr(Shape, name)}
        fields = {"M": shape.M, "N": shape.N, "K": shape.K, "layout": shape.layout, **others, "mode": found.mode}
        head = json.dumps({**fields, "cublas_us": _rounded(found.cublas_us)}).rstrip("}")
        rows = ",\n".join(f"   {json.dumps(_row(way, us), separators=(',', ':'))}" for way, us in found.us.items())
        shapes.append(f'  {head}, "rows": [\n{rows}]}}')
    described = json.dumps(dict(surroundings), indent=1).replace("\n", "\n ")
    text = ",\n".join(
        (
            f' "environment": {described}',
            f' "columns": {json.dumps(COLUMNS)}',
            ' "shapes": [\n' + ",\n".join(shapes) + "]",
        )
    )
    partial = target.with_suffix(".partial")
    partial.write_text(f"{{\n{text}\n}}\n")
    os.replace(partial, target)


def read(*sources: Path) -> Calibration:
    """What `write` wrote, of one GPU. Raises ValueError for another file, or those of several GPUs."""
    devices: set[DeviceInfo] = set()
    shapes: list[Measured] = []
    for source in sources:
        try:
            found = read_json(source)
            columns = tuple(found["columns"])
            if columns not in (COLUMNS, WITHOUT_CLUSTERS):
                raise ValueError(f"columns {found['columns']}")
            gpu = found["environment"]
            devices.add(replace(device_of_capability((9, 0)), name=gpu["gpu"], num_sms=gpu["num_sms"]))
            shapes += [_measured(entry, columns) for entry in found["shapes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} was not written by `measure`: {error}") from error
        if not found["shapes"]:
            raise ValueError(f"{source} holds no shape")
    if len(devices) > 1:
        raise ValueError(f"of several GPUs: {', '.join(sorted(device.name for device in devices))}")
    return Calibration(devices.pop(), shapes)


def _measured(entry: dict[str, Any], columns: Sequence[str]) -> Measured:
    others = {name: entry[name] for name in OTHERS if name in entry}
    shape = Shape(entry["M"], entry["N"], entry["K"], layout=entry["layout"], **others)
    problem = gemm_problem(shape, entry["mode"])
    us, known = {}, {}
    for row in entry["rows"]:
        if columns != COLUMNS:
            row = [*row[: 1 + len(SIZES)], 1, 1, *row[1 + len(SIZES) :]]
        kernel, *figures, programs, split_tiles, split_k, swap_ab, packed, time = row
        module: Any = kernels.named(kernel)
        sizes = dict(zip((*SIZES, *CLUSTER), figures, strict=True))
        config = module.Config(**{name: size for name, size in sizes.items() if name in SIZES or size > 1})
        if (packed, swap_ab) not in known:  # predictions remember what they know of one problem
            given = kernels.repack.repacked(problem, tuple(packed))
            known[packed, swap_ab] = given.swap_ab() if swap_ab else given
        given = known[packed, swap_ab]
        work = split_k if programs is None else Schedule(programs, split_tiles, split_k)
        us[Way(kernel, Candidate(given, config, work, swap_ab, tuple(packed)))] = time
    return Measured(shape, entry["mode"], entry["cublas_us"], us)


def _row(way: Way, us: float) -> list[Any]:
    candidate = way.candidate
    figures = [getattr(candidate.config, name, 1) for name in (*SIZES, *CLUSTER)]
    work = candidate.work
    dealt = (work.programs, work.split_tiles, work.split_k) if isinstance(work, Schedule) else (None, 0, work)
    return [way.kernel, *figures, *dealt, candidate.swap_ab, "".join(candidate.packed), _rounded(us)]


def _rounded(us: float) -> float:
    return float(f"{us:.5g}")


# ---- measure ----


def shapes_to_measure(
    limit: int | None, seed: int | None = None, suites: Sequence[str] | None = None
) -> tuple[tuple[Shape, str], ...]:
    """Some of each suite's shapes, others of its regime, and OWN, each once, with modes; with a seed only others of
    each regime, more of them; of some suites without OWN."""
    found: dict[tuple[str, str], tuple[Shape, str]] = {}
    for name in suites or (*REGIMES, *SCALED):
        suite = SUITES[name]
        drawn = DRAWN_MORE.get(name, DRAWN)
        listed = spaced(suite.shapes, LISTED) if seed is None else ()
        others = unseen(suite, SEED, drawn) if seed is None else unseen(suite, seed, 2 * drawn)
        for shape in (*listed, *others):
            mode = suite.mode or "bf16"
            found.setdefault((shape.key, mode), (shape, mode))
    for mode, shapes in OWN if seed is None and suites is None else ():
        found |= {(shape.key, mode): (shape, mode) for shape in shapes}
    every = tuple(found.values())
    evenly = np.linspace(0, len(every) - 1, min(limit or len(every), len(every)))
    return tuple(every[round(i)] for i in evenly)


def measure(
    shapes: Sequence[tuple[Shape, str]], out: Path, surroundings: Mapping[str, Any], console: Console
) -> list[str]:
    """Times every shape's candidates, writing `out` after each; what failed, as lines.

    Raises DeviceLostError where a candidate took the GPU down; what was measured before is kept.
    """
    device = torch.device(operands.DEVICE, torch.cuda.current_device())
    jobs = []
    for shape, mode in shapes:
        problem = gemm_problem(shape, mode)
        plans = {way: GemmPlan(problem, way.selection(), device) for way in ways(problem, device_info(device))}
        jobs.append((shape, mode, plans))
    console.print(f"{len(jobs)} shapes, {sum(len(plans) for *_, plans in jobs)} candidates: compiling")
    compile_all([(plan, mode) for _, mode, plans in jobs for plan in plans.values()])
    surroundings = {**surroundings, "clocks": sweep.clocks_under_load(sweep.SETTLE_S)}
    done: list[Measured] = []
    failures: list[str] = []
    for seed, (shape, mode, plans) in enumerate(jobs):
        try:
            found, failed = measure_shape(shape, mode, plans, seed)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            failures.append(f"{shape.key}: no memory: {error}".splitlines()[0])
            continue
        failures += failed
        if not found.us:
            continue
        done.append(found)
        write(out, surroundings, done)
        pick, best, base = found.us.get(next(iter(plans)), math.nan), found.us[found.best], found.cublas_us
        line = f"{seed + 1}/{len(jobs)} {found.key}: cuBLAS {base:.4g} us; of that {base / pick:.3f} times as fast the"
        console.print(f"{line} model's, {base / best:.3f} the best: {found.best}", highlight=False, soft_wrap=True)
    return failures


def measure_shape(shape: Shape, mode: str, plans: Mapping[Way, GemmPlan], seed: int) -> tuple[Measured, list[str]]:
    """Times candidates and cuBLAS by the one timer; and what failed."""
    problem = sweep.problem_of(shape, SUITES["llm"], sweep.Options(mode), seed)
    ours = [Provider(str(way), calling(plan)) for way, plan in plans.items()]
    timed = timer.measure(problem, [cublas(problem), *ours], CUBLAS, BUDGET_S, sweep.PACE)["providers"]
    us = {name: 1000 * result["time_ms"]["median"] for name, result in timed.items() if "time_ms" in result}
    failed = [
        f"{shape.key}: {name}: {result.get('failed') or result.get('absent')}"
        for name, result in timed.items()
        if name not in us
    ]
    kept = {way: us[str(way)] for way in plans if str(way) in us}
    return Measured(shape, mode, us.get(CUBLAS, math.nan), kept if CUBLAS in us else {}), failed


def calling(plan: GemmPlan) -> Callable[..., None]:
    """The plan as a provider calls it: with bias and scales one after another."""
    return lambda a, b, c, *auxiliary: plan.run(a, b, c, auxiliary)


def compile_all(plans: Sequence[tuple[GemmPlan, str]]) -> None:
    """Compiles plans, with the modes of their operands, many at once; a failure is left to the measurement, which meets
    it again."""
    index = torch.cuda.current_device()

    def one(planned: tuple[GemmPlan, str]) -> None:
        torch.cuda.set_device(index)  # the current device is a thread's own
        plan, mode = planned
        dtype = operands.MODE_DTYPES[mode]
        dtypes = {"a": dtype, "b": dtype} | dict.fromkeys(("c", "bias"), operands.OUT_DTYPES.get(dtype, dtype))
        dtypes |= dict.fromkeys(("a_scale", "b_scale"), torch.float32)
        for step in plan.steps:
            dtypes |= {temporary.name: temporary.dtype for temporary in step.launch.temporaries}
        # Sizes and strides are the launch's; of the tensors only type and alignment count.
        stand_ins = {name: torch.empty(64, dtype=dtype, device=operands.DEVICE) for name, dtype in dtypes.items()}
        for step in plan.steps:
            try:
                step.compile(stand_ins, {"alpha": 1.0, "beta": 0.0})
            except Exception:
                return

    with ThreadPoolExecutor(min(sweep.WARM_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(one, plans))
    torch.cuda.synchronize()


# ---- fit ----

Figures = dict[str, Any]
Place = tuple[str, ...]
FIXED = ("source", "num_sms", "bandwidth")


def places(entry: Any, only: Callable[[Place], bool], at: Place = ()) -> Iterator[Place]:
    """Where the figures that are fitted stand in a model's entry; all are positive."""
    for key in entry if isinstance(entry, Mapping) else map(str, range(len(entry))):
        value = _inside(entry, key)
        if isinstance(value, Mapping | list | tuple):
            yield from places(value, only, (*at, key))
        elif key not in FIXED and value > 0 and only((*at, key)):
            yield (*at, key)


def _inside(entry: Any, key: str) -> Any:
    return entry[key] if isinstance(entry, Mapping) else entry[int(key)]


def value_at(entry: Figures, place: Place) -> float:
    found: Any = entry
    for key in place:
        found = _inside(found, key)
    return float(found)


def with_values(entry: Figures, values: Mapping[Place, float]) -> Figures:
    """A copy of a model's entry with other figures."""
    found: Figures = json.loads(json.dumps(entry))
    for (*way, last), value in values.items():
        inner: Any = found
        for key in way:
            inner = _inside(inner, key)
        inner[last if isinstance(inner, dict) else int(last)] = float(value)
    return found


def fit(measured: Sequence[Measured], model: DeviceModel) -> DeviceModel:
    """The model with the least squares of errors, logarithms of predicted over measured time, and of regrets: first of
    the figures of the GPU and of the persistent kernel, which comes nearest to what the GPU can do, by that kernel's
    times; then of the other kernels that were measured. Every figure is drawn to what it was before."""
    first, *others = kernels.KERNELS
    timed = {way.kernel for found in measured for way in found.us}
    precisions = {found.problem.precision for found in measured}
    paces = {pace_of(precision) for precision in precisions}

    def of_others(place: Place) -> bool:
        if place[0] != "kernels" or place[1] not in timed.intersection(others):
            return False
        return place[1] != "portable" or (place[3] in precisions if place[2] == "products" else place[2] in paces)

    persistent = [
        replace(found, us={way: us for way, us in found.us.items() if way.kernel == first}) for found in measured
    ]
    persistent = [found for found in persistent if found.us]
    model = _fit(persistent, model, lambda place: place[0] != "kernels" or place[1] == first, REGRET[0])
    return _fit(measured, model, of_others, REGRET[1]) if timed.intersection(others) else model


def _fit(measured: Sequence[Measured], model: DeviceModel, only: Callable[[Place], bool], regret: float) -> DeviceModel:
    entry = model.as_dict()
    where = list(places(entry, only))
    start = np.log([value_at(entry, place) for place in where])
    problems = [found.problem for found in measured for _ in found.us]
    ways = [way for found in measured for way in found.us]
    taken = np.log([us for found in measured for us in found.us.values()])
    counts = np.array([len(found.us) for found in measured])
    firsts = np.cumsum(counts) - counts
    slower = np.exp(taken - np.repeat(np.minimum.reduceat(taken, firsts), counts)) - 1
    # A candidate that takes twice as long as the fastest is not picked anyway: its error weighs a quarter.
    weights = ERROR / (1 + slower) ** 2 / np.sqrt(np.repeat(counts, counts))
    lost = np.minimum(slower, 1.0)

    def at(x: np.ndarray) -> DeviceModel:
        return DeviceModel(**with_values(entry, dict(zip(where, np.exp(x), strict=True))))

    def guesses(moved: DeviceModel, rows: Iterable[int]) -> list[float]:
        return [math.log(predicted(problems[i], ways[i].kernel, ways[i].candidate, moved)) for i in rows]

    def residuals(guess: np.ndarray, x: np.ndarray, like: float = LIKE) -> np.ndarray:
        # As if the pick were drawn, so that it has a derivative. Roots, so that many small regrets count as one large.
        best = np.repeat(np.minimum.reduceat(guess, firsts), counts)
        chance = np.exp((best - guess) / like)
        regrets = np.add.reduceat(chance * lost, firsts) / np.add.reduceat(chance, firsts)
        return np.concatenate(
            [weights * (guess - taken), regret * np.sqrt(regrets + LEAST_REGRET), PRIOR * (x - start)]
        )

    dependent = [[i for i, way in enumerate(ways) if concerns(place, way, problems[i])] for place in where]

    def slopes(x: np.ndarray) -> np.ndarray:
        guess = np.array(guesses(at(x), range(len(ways))))
        here, columns = residuals(guess, x), []
        for j, rows in enumerate(dependent):
            there, other = x.copy(), guess.copy()
            there[j] += DIFFERENCE
            other[rows] = guesses(at(there), rows)
            columns.append((residuals(other, there) - here) / DIFFERENCE)
        return np.stack(columns, axis=1)

    def every(x: np.ndarray) -> np.ndarray:
        return residuals(np.array(guesses(at(x), range(len(ways)))), x)

    found = least_squares(every, start, jac=slopes, loss="soft_l1", f_scale=SCALE, max_nfev=ITERATIONS).x

    # Which of two near predictions is less has no derivative: one figure after the other is moved while that helps.
    guess = np.array(guesses(at(found), range(len(ways))))
    least = cost(residuals(guess, found, CLOSE))
    for by in MOVES:
        for j, rows in enumerate(dependent):
            for direction in (by, -by):
                there, other = found.copy(), guess.copy()
                there[j] += direction
                other[rows] = guesses(at(there), rows)
                moved = cost(residuals(other, there, CLOSE))
                if moved < least:
                    found, guess, least = there, other, moved
                    break
    return at(found)


def cost(residuals: np.ndarray) -> float:
    """What `least_squares` makes least."""
    return float(np.sum(np.sqrt(1 + (residuals / SCALE) ** 2) - 1))


def pace_of(precision: str) -> str:
    """Which of `portable`'s paces a precision has."""
    return precision if precision in ("ieee", "fp64") else "tensor"


def concerns(place: Place, way: Way, problem: GemmProblem) -> bool:
    """Whether a figure may change the prediction of a candidate."""
    if place[0] in ("copy", "copied"):
        return bool(way.candidate.packed)
    if place[0] != "kernels" or place[1] != "portable":
        return place[0] != "kernels" or place[1] == way.kernel
    name = problem.precision if place[2] == "products" else pace_of(problem.precision)
    return way.kernel == "portable" and name == place[3 if place[2] == "products" else 2]


def save(name: str, model: DeviceModel, out: Path) -> None:
    """Writes the model of a GPU, and keeps those of others."""
    entries = json.loads(out.read_text()) if out.exists() else {}
    figures = model.as_dict()
    short = {place: float(f"{value_at(figures, place):.4g}") for place in places(figures, lambda _: True)}
    out.write_text(json.dumps({**entries, name: with_values(figures, short)}, indent=1) + "\n")


# ---- regret ----


@dataclass(frozen=True)
class Choice:
    """What the model picked for a measured shape."""

    measured: Measured
    pick: Way

    @property
    def regret(self) -> float:
        """How much longer the pick takes than the best: 0.02 for 2 % longer."""
        return self.measured.us[self.pick] / self.measured.us[self.measured.best] - 1


def choices(measured: Iterable[Measured], model: DeviceModel) -> list[Choice]:
    """The picks of a model."""
    return [Choice(found, found.pick(model)) for found in measured]


def mean_regret(chosen: Sequence[Choice]) -> float:
    return sum(choice.regret for choice in chosen) / len(chosen)


def rms_error(measured: Sequence[Measured], model: DeviceModel) -> float:
    """Of the logarithm of predicted over measured time, all candidates alike."""
    pairs = [zip(found.predicted(model), found.us.values(), strict=True) for found in measured]
    errors = [math.log(guess / us) for found in pairs for guess, us in found]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def by_regime(chosen: Sequence[Choice]) -> dict[str, list[Choice]]:
    """The choices of each regime, and all."""
    found: dict[str, list[Choice]] = {}
    for choice in chosen:
        found.setdefault(choice.measured.regime, []).append(choice)
    return {**found, "all": list(chosen)}


def unmeasured(calibration: Calibration) -> list[str]:
    """Shapes for which select chooses what is not among the candidates."""
    found = []
    for measured in calibration.shapes:
        chosen = replace(select(measured.problem, calibration.device), reason="calibration")
        if not any(way.selection() == chosen for way in measured.us):
            found.append(measured.key)
    return found


def show_regret(title: str, shapes: Sequence[Measured], model: DeviceModel, console: Console) -> None:
    """A model's choices: a table by regime, and the worst."""
    table = Table(title=f"{title}: rms log error {rms_error(shapes, model):.3f}", title_justify="left")
    table.add_column("regime")
    for name in ("shapes", "mean regret", "worst", "cuBLAS / pick", "cuBLAS / best"):
        table.add_column(name, justify="right")
    chosen = choices(shapes, model)
    for name, group in by_regime(chosen).items():
        base = [choice.measured.cublas_us for choice in group]
        pick = [choice.measured.us[choice.pick] for choice in group]
        best = [choice.measured.us[choice.measured.best] for choice in group]
        table.add_row(
            name,
            str(len(group)),
            f"{100 * mean_regret(group):.2f} %",
            f"{100 * max(choice.regret for choice in group):.1f} %",
            f"{geometric_mean([b / p for b, p in zip(base, pick, strict=True)]):.3f}",
            f"{geometric_mean([b / p for b, p in zip(base, best, strict=True)]):.3f}",
        )
    console.print(table)
    for choice in sorted(chosen, key=lambda choice: -choice.regret):
        if choice.regret < WORST:
            break
        words = [f"{100 * choice.regret:.1f} % {choice.measured.key}:"]
        for what, way in (("picked", choice.pick), ("best", choice.measured.best)):
            us, guess = choice.measured.us[way], predicted(choice.measured.problem, way.kernel, way.candidate, model)
            words.append(f"{what} {way}, {us:.4g} us (predicted {guess:.4g});")
        console.print(" ".join(words).rstrip(";"), highlight=False, soft_wrap=True)


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if given.command == "measure":
        kernels.warp_specialised.choice.CLUSTERS_CHOSEN |= given.clusters
        return run_measure(given.out, shapes_to_measure(given.limit, given.seed, given.suites), console)
    try:
        calibration = read(*given.files)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device, shapes = calibration.device, calibration.shapes
    show_regret("present model", shapes, model_of(device), console)
    if given.command == "regret":
        absent = unmeasured(calibration)
        if absent:
            line = f"what select chooses was not measured for {len(absent)}: {', '.join(absent)}"
            console.print(line, highlight=False, soft_wrap=True)
    elif given.hold_out is None:
        source = ", ".join(os.path.relpath(file, environment.ROOT) for file in given.files)
        found = replace(fit(shapes, model_of(device)), source=source)
        show_regret("fitted model", shapes, found, console)
        save(device.name, found, given.out)
        console.print(f"wrote {given.out}", highlight=False, soft_wrap=True)
    else:
        held_out = set(Random(given.hold_out).sample(range(len(shapes)), len(shapes) // HELD_OUT))
        unseen_ones = [found for i, found in enumerate(shapes) if i in held_out]
        found = fit([found for i, found in enumerate(shapes) if i not in held_out], model_of(device))
        show_regret("present model, shapes held out", unseen_ones, model_of(device), console)
        show_regret("fitted without them", unseen_ones, found, console)
    return 0


def run_measure(out: Path | None, shapes: Sequence[tuple[Shape, str]], console: Console) -> int:
    surroundings = environment.describe("calibration")
    if surroundings["gpu"] is None or surroundings["capability"] != [9, 0]:
        print("error: `measure` needs a GPU that is sm_90, for all kernels", file=sys.stderr)
        return 2
    out = out or environment.RESULTS / environment.slug(surroundings["gpu"]) / FILE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        failures = measure(shapes, out, surroundings, console)
    except OSError as error:
        print(f"error: cannot write {out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    except DeviceLostError as lost:
        print(f"error: the GPU cannot be used any more {lost}; what was measured is kept", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    measuring = commands.add_parser("measure", help="time candidates and cuBLAS; needs a Hopper GPU")
    measuring.add_argument("--out", type=args.path, metavar="FILE", help=f"default perf/results/<gpu>/{FILE}")
    measuring.add_argument("--limit", type=args.count, metavar="N", help="at most N shapes, evenly spaced")
    measuring.add_argument("--seed", type=int, metavar="SEED", help="other shapes of each regime, none that is listed")
    measuring.add_argument("--suites", nargs="+", choices=SUITES, metavar="SUITE", help="shapes of these suites only")
    measuring.add_argument("--clusters", action="store_true", help="also candidates in clusters, if none are chosen")
    for name, what in (("fit", "find a model, and its regret"), ("regret", "of the present model")):
        command = commands.add_parser(name, help=f"{what}; needs no GPU")
        command.add_argument("files", type=args.path, metavar="FILE", nargs="+", help="what `measure` wrote")
        if name == "fit":
            there = device_model.FILE
            command.add_argument("--out", type=args.path, metavar="FILE", default=there, help=f"default {there.name}")
            command.add_argument("--hold-out", type=int, metavar="SEED", help="write nothing; judge by a third")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
