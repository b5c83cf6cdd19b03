"""Where the cost model's constants come from: python -m perf.calibrate measure | fit FILE | regret FILE.

`measure` (needs a Hopper GPU) times the plausible tiles and schedules of the warp-specialised kernel, and cuBLAS, on
shapes of every regime, and writes them to one JSON file after each shape. `fit` finds the constants of
`triton_gemm.cost_model` that predict such times best, near the present ones, and prints them as they stand there.
`regret` says how much slower than the fastest of a shape's candidates the one is that the model picks, by its present
constants; `fit` says so for both. A fit makes predictions good and choices need not follow: adopt it where its regret
is smaller. Exit status: 1 if a candidate gave wrong results, 2 for a mistake in the call, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

try:
    import numpy as np
    import torch
    from rich.console import Console
    from rich.table import Table

    from perf.bench import sweep
    from perf.bench.scores import geometric_mean
    from perf.bench.shapes import Shape, spaced
    from perf.bench.suites import SUITES, unseen
    from perf.common import arguments as args
    from perf.common.files import read_json
    from perf.measure import environment, operands, timer
    from perf.measure.operands import Problem
    from perf.measure.providers import CUBLAS, cublas
    from perf.measure.timer import DeviceLostError, Provider
    from triton_gemm import cost_model
    from triton_gemm.config import GemmConfig
    from triton_gemm.device import DeviceInfo, device_info, device_of_capability
    from triton_gemm.kernels import warp_specialised
    from triton_gemm.kernels.schedule import Schedule
    from triton_gemm.plan import GemmPlan
    from triton_gemm.problem import GemmProblem
    from triton_gemm.select import Candidate, repacked, select
    from triton_gemm.select import candidates as ways
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]'")

FILE = "calibration.json"
MODE = "bf16"
WIDE = 160  # columns where there is no terminal

# Suites that a shape may belong to, the narrow regimes first: it counts for the first.
REGIMES = ("batched", "bigk", "shortk", "square", "mid", "decode", "llm", "layouts")
OTHER = "other"
LISTED, DRAWN, SEED = 9, 6, 1  # shapes of each suite: from its list, and others of its regime
DRAWN_MID = 30  # of mid, nearly all of which have rows that begin inside of lines, some of them inside of sectors
# Few rows on a weight that lies row-major, which no suite has.
OWN = (Shape(16, 4096, 4096), Shape(16, 4096, 14336), Shape(64, 28672, 8192))

KEEP = 20  # candidates of a shape, the fastest by the model
BUDGET_S = 0.3
# Legal for 16-bit C too, where the same tile with a fourth stage is at least as fast; the model knows no difference.
FP32_C = GemmConfig(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)

# Of the cost model's constants those that are not fitted, or not of the persistent kernel.
FIXED = ("SHARPNESS", "PAIRS", "MAX_PARTS", "SECTOR", "FMAS", "SIDES", "WARPS", "PROGRAM", "HANDED_ON")
TILE = 32_768  # elements of the largest tile, in which a figure for each element is printed
GOOD = 1.25  # times a shape's fastest; slower candidates are not picked anyway and weigh less
POOR_WEIGHT = 0.5
PRIOR = 0.08  # weight of a constant's logarithm against that of one candidate's time
ITERATIONS = 60
CONVERGED = 1e-5  # of the sum of squares in an iteration
WORST = 0.05  # regret from which on a shape is named

COLUMNS = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"),
    *("programs", "split", "parts", "swapped", "packed", "us"),
)
Value = float | tuple[float, ...] | dict[Any, float]


# ---- candidates ----


def described(candidate: Candidate) -> str:
    """A candidate's name among those of its shape."""
    schedule = candidate.schedule
    notes = [f", {schedule.split} tiles in {schedule.parts} parts"] if schedule.split else []
    notes += [", transposed"] * candidate.swapped + [f", {name} copied" for name in candidate.packed]
    return f"{candidate.config}{''.join(notes)}"


def gemm_problem(shape: Shape) -> GemmProblem:
    """The library's problem for contiguous operands of that shape, without memory for them."""
    dtype = operands.MODE_DTYPES[MODE]
    batch = () if shape.batch is None else (shape.batch,)

    def lay(rows: int, columns: int, layout: str) -> torch.Tensor:
        if layout == "t":
            return torch.empty(*batch, columns, rows, dtype=dtype, device="meta").mT
        return torch.empty(*batch, rows, columns, dtype=dtype, device="meta")

    a, b = lay(shape.M, shape.K, shape.layout[0]), lay(shape.K, shape.N, shape.layout[1])
    return GemmProblem.of(a, b, lay(shape.M, shape.N, "n"))


def candidates(problem: GemmProblem, device: DeviceInfo) -> list[Candidate]:
    """The fastest by the model, best first, of all that can compute a problem; none if it is not for this kernel."""
    if select(problem, device).kernel != "warp_specialised":
        return []
    configs = [c for c in warp_specialised.CONFIGS if c != FP32_C]
    return sorted(ways(problem, device, configs), key=Candidate.microseconds)[:KEEP]


# ---- measured shapes and their file ----


@dataclass(frozen=True)
class Measured:
    """A shape, cuBLAS's time and each candidate's, in microseconds."""

    shape: Shape
    cublas_us: float
    us: Mapping[Candidate, float]

    @property
    def regime(self) -> str:
        return next((name for name in REGIMES if SUITES[name].regime(self.shape)), OTHER)

    @cached_property
    def best(self) -> Candidate:
        return min(self.us, key=self.us.__getitem__)

    def pick(self) -> Candidate:
        """The model's, as its constants are now; of equals, as in select, the one that is not swapped."""
        return min(self.us, key=lambda candidate: (candidate.microseconds(), candidate.swapped))


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
        batch = {} if shape.batch is None else {"batch": shape.batch}
        fields = {"M": shape.M, "N": shape.N, "K": shape.K, "layout": shape.layout, **batch}
        head = json.dumps({**fields, "cublas_us": _rounded(found.cublas_us)}).rstrip("}")
        rows = ",\n".join(f"   {json.dumps(_row(candidate, us))}" for candidate, us in found.us.items())
        shapes.append(f'  {head}, "rows": [\n{rows}]}}')
    described = json.dumps(dict(surroundings), indent=1).replace("\n", "\n ")
    text = ",\n".join(
        (
            f' "environment": {described}',
            f' "dtype": "{MODE}"',
            f' "columns": {json.dumps(COLUMNS)}',
            ' "shapes": [\n' + ",\n".join(shapes) + "]",
        )
    )
    partial = target.with_suffix(".partial")
    partial.write_text(f"{{\n{text}\n}}\n")
    os.replace(partial, target)


def read(source: Path) -> Calibration:
    """What `write` wrote, without candidates that only fp32 C has use for. Raises ValueError for another file."""
    try:
        found = read_json(source)
        if tuple(found["columns"]) != COLUMNS or found["dtype"] != MODE:
            raise ValueError(f"columns {found['columns']} of {found['dtype']}")
        device = replace(device_of_capability((9, 0)), num_sms=found["environment"]["num_sms"])
        shapes = [_measured(entry) for entry in found["shapes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} was not written by `measure`: {error}") from error
    if not shapes:
        raise ValueError(f"{source} holds no shape")
    return Calibration(device, shapes)


def _measured(entry: dict[str, Any]) -> Measured:
    shape = Shape(entry["M"], entry["N"], entry["K"], batch=entry.get("batch"), layout=entry["layout"])
    problem = gemm_problem(shape)
    us = {}
    for *figures, programs, split, parts, swapped, packed, time in entry["rows"]:
        config = GemmConfig(**dict(zip(COLUMNS, figures, strict=False)))
        if config != FP32_C:
            given = repacked(problem, tuple(packed))
            given = given.swap_ab() if swapped else given
            us[Candidate(given, config, Schedule(programs, split, parts), swapped, tuple(packed))] = time
    return Measured(shape, entry["cublas_us"], us)


def _row(candidate: Candidate, us: float) -> list[Any]:
    figures = [getattr(candidate.config, name) for name in COLUMNS[:5]]
    schedule = candidate.schedule
    dealt = (schedule.programs, schedule.split, schedule.parts)
    return [*figures, *dealt, candidate.swapped, "".join(candidate.packed), _rounded(us)]


def _rounded(us: float) -> float:
    return float(f"{us:.5g}")


# ---- measure ----


def shapes_to_measure(limit: int | None) -> tuple[Shape, ...]:
    """Some of each suite's shapes, others of its regime, and OWN, each once."""
    found: dict[str, Shape] = {}
    for name in REGIMES:
        suite = SUITES[name]
        for shape in (*spaced(suite.shapes, LISTED), *unseen(suite, SEED, DRAWN_MID if name == "mid" else DRAWN)):
            found.setdefault(shape.key, shape)
    found |= {shape.key: shape for shape in OWN}
    return spaced(tuple(found.values()), limit)


def measure(shapes: Sequence[Shape], out: Path, surroundings: Mapping[str, Any], console: Console) -> list[str]:
    """Times every shape's candidates, writing `out` after each; what failed, as lines.

    Raises DeviceLostError where a candidate took the GPU down; what was measured before is kept.
    """
    device = torch.device(operands.DEVICE, torch.cuda.current_device())
    jobs = []
    for shape in shapes:
        problem = gemm_problem(shape)
        plans = {
            c: GemmPlan(problem, c.selection("calibration"), device) for c in candidates(problem, device_info(device))
        }
        if plans:
            jobs.append((shape, plans))
    console.print(f"{len(jobs)} shapes, {sum(len(plans) for _, plans in jobs)} candidates: compiling")
    compile_all([plan for _, plans in jobs for plan in plans.values()])
    surroundings = {**surroundings, "clocks": sweep.clocks_under_load(sweep.SETTLE_S)}
    done: list[Measured] = []
    failures: list[str] = []
    for seed, (shape, plans) in enumerate(jobs):
        try:
            found, failed = measure_shape(shape, plans, seed)
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
        line = f"{seed + 1}/{len(jobs)} {shape.key}: cuBLAS {base:.4g} us; of that {base / pick:.3f} times as fast the"
        console.print(
            f"{line} model's, {base / best:.3f} the best: {described(found.best)}", highlight=False, soft_wrap=True
        )
    return failures


def measure_shape(shape: Shape, plans: Mapping[Candidate, GemmPlan], seed: int) -> tuple[Measured, list[str]]:
    """Times candidates beside cuBLAS by the one timer; and what failed."""
    problem = Problem(shape.M, shape.N, shape.K, MODE, seed=seed, batch=shape.batch, layout=shape.layout)
    ours = [Provider(described(candidate), plan.run) for candidate, plan in plans.items()]
    timed = timer.measure(problem, [cublas(problem), *ours], CUBLAS, BUDGET_S, sweep.PACE)["providers"]
    us = {name: 1000 * result["time_ms"]["median"] for name, result in timed.items() if "time_ms" in result}
    failed = [
        f"{shape.key}: {name}: {result.get('failed') or result.get('absent')}"
        for name, result in timed.items()
        if name not in us
    ]
    kept = {candidate: us[described(candidate)] for candidate in plans if described(candidate) in us}
    return Measured(shape, us.get(CUBLAS, math.nan), kept if CUBLAS in us else {}), failed


def compile_all(plans: Sequence[GemmPlan]) -> None:
    """Compiles plans, many at once; a failure is left to the measurement, which meets it again."""
    index = torch.cuda.current_device()
    dtypes = dict.fromkeys(("a", "b", "c", "packed_a", "packed_b"), operands.MODE_DTYPES[MODE])
    dtypes |= {"workspace": torch.float32, "counters": torch.int32}

    def one(plan: GemmPlan) -> None:
        torch.cuda.set_device(index)  # the current device is a thread's own
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


# ---- the model's constants as a vector of logarithms ----


def constants() -> dict[str, Value]:
    """The cost model's constants that are fitted, as they are now; all are positive."""
    return {name: value for name, value in vars(cost_model).items() if name.isupper() and name not in FIXED}


@contextmanager
def replaced(values: Mapping[str, Value]) -> Iterator[None]:
    """Lets the cost model reckon with other constants for a while."""
    before = constants()
    assert set(values) <= set(before)
    vars(cost_model).update(values)
    try:
        yield
    finally:
        vars(cost_model).update(before)


def flat(values: Mapping[str, Value]) -> np.ndarray:
    """The constants' logarithms, in the order of `values`."""
    found: list[float] = []
    for value in values.values():
        found += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return np.log(found)


def unflat(vector: np.ndarray, like: Mapping[str, Value]) -> dict[str, Value]:
    """What `flat` made a vector of, in the form of `like`."""
    figures = iter(np.exp(vector).tolist())
    found: dict[str, Value] = {}
    for name, value in like.items():
        if isinstance(value, dict):
            found[name] = {key: next(figures) for key in value}
        elif isinstance(value, tuple):
            found[name] = tuple(next(figures) for _ in value)
        else:
            found[name] = next(figures)
    return found


def as_source(values: Mapping[str, Value]) -> list[str]:
    """The lines in which cost_model.py says these constants, to three digits, less comments.

    A pair is a figure and another for each element of a tile.
    """
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            kind = cost_model.__annotations__[name]
            lines += [f"{name}: {kind} = {{", *(f"    {key}: {_figure(x)}," for key, x in value.items()), "}"]
        elif isinstance(value, tuple):
            lines.append(f"{name} = ({_figure(value[0])}, {_figure(TILE * value[1])} / {TILE:_})")
        else:
            lines.append(f"{name} = {_figure(value)}")
    return lines


def _figure(x: float) -> str:
    """Three digits; thousands and thousandths by exponent."""
    exponent = 3 * (math.floor(math.log10(x)) // 3) if x >= 1000 else -3 if x < 0.01 else 0
    digits = f"{x / 10.0**exponent:.3g}"
    if exponent:
        return f"{digits}e{exponent}"
    return digits if "." in digits else f"{digits}.0"


# ---- fit ----


def fit(measured: Sequence[Measured]) -> dict[str, Value]:
    """The constants with the least squares of the logarithms of predicted over measured time: Levenberg-Marquardt,
    each constant drawn to its present value. Tiles without a step of their own get one."""
    present = constants()
    tiles = {(c.config.BLOCK_M or 0, c.config.BLOCK_N or 0) for found in measured for c in found.us}
    present["STEP"] = cost_model.STEP | {tile: cost_model.step(*tile) for tile in sorted(tiles - set(cost_model.STEP))}
    start = flat(present)
    rows = [candidate for found in measured for candidate in found.us]
    taken = np.log([us for found in measured for us in found.us.values()])
    weights = np.array(
        [1.0 if us < GOOD * found.us[found.best] else POOR_WEIGHT for found in measured for us in found.us.values()]
    )

    def residuals(vector: np.ndarray) -> np.ndarray:
        with replaced(unflat(vector, present)):
            errors = np.log([candidate.microseconds() for candidate in rows]) - taken
        return np.concatenate([weights * errors, PRIOR * (vector - start)])

    return unflat(least_squares(residuals, start), present)


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt with differences for derivatives: where the sum of the squares of `residuals(x)` is least."""
    x, damping, step = start, 1e-2, 1e-4
    r = residuals(x)
    for _ in range(ITERATIONS):
        jacobian = np.stack([(residuals(x + step * unit) - r) / step for unit in np.eye(len(x))], axis=1)
        square = jacobian.T @ jacobian
        scale = np.diag(np.diag(square) + 1e-9)
        while True:
            moved = x - np.linalg.solve(square + damping * scale, jacobian.T @ r)
            now = residuals(moved)
            if now @ now < r @ r:
                break
            damping *= 4
            if damping > 1e6:
                return x
        gain = 1 - (now @ now) / (r @ r)
        x, r, damping = moved, now, max(damping / 3, 1e-6)
        if gain < CONVERGED:
            return x
    return x


# ---- regret ----


@dataclass(frozen=True)
class Choice:
    """What the model picked for a measured shape."""

    measured: Measured
    pick: Candidate

    @property
    def regret(self) -> float:
        """How much longer the pick takes than the best: 0.02 for 2 % longer."""
        return self.measured.us[self.pick] / self.measured.us[self.measured.best] - 1


def choices(measured: Iterable[Measured]) -> list[Choice]:
    """The picks of the model, as its constants are now."""
    return [Choice(found, found.pick()) for found in measured]


def mean_regret(chosen: Sequence[Choice]) -> float:
    return sum(choice.regret for choice in chosen) / len(chosen)


def rms_error(measured: Sequence[Measured]) -> float:
    """Of the logarithm of predicted over measured time, all candidates alike."""
    errors = [math.log(candidate.microseconds() / us) for found in measured for candidate, us in found.us.items()]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def by_regime(chosen: Sequence[Choice]) -> dict[str, list[Choice]]:
    """The choices of each regime, and all."""
    found: dict[str, list[Choice]] = {}
    for name in (*REGIMES, OTHER):
        of_it = [choice for choice in chosen if choice.measured.regime == name]
        if of_it:
            found[name] = of_it
    return {**found, "all": list(chosen)}


def unmeasured(calibration: Calibration) -> list[str]:
    """Shapes for which select, by the model's present constants, chooses what is not among the candidates."""
    found = []
    for measured in calibration.shapes:
        chosen = select(gemm_problem(measured.shape), calibration.device)
        if chosen.kernel == "warp_specialised" and not any(c.selection(chosen.reason) == chosen for c in measured.us):
            found.append(measured.shape.key)
    return found


def show_regret(title: str, calibration: Calibration, console: Console) -> None:
    """The model's choices, as its constants are now: a table by regime, and the worst."""
    table = Table(title=f"{title}: rms log error {rms_error(calibration.shapes):.3f}", title_justify="left")
    table.add_column("regime")
    for name in ("shapes", "mean regret", "worst", "cuBLAS / pick", "cuBLAS / best"):
        table.add_column(name, justify="right")
    chosen = choices(calibration.shapes)
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
        words = [f"{100 * choice.regret:.1f} % {choice.measured.shape.key}:"]
        for what, candidate in (("picked", choice.pick), ("best", choice.measured.best)):
            us, guess = choice.measured.us[candidate], candidate.microseconds()
            words.append(f"{what} {described(candidate)}, {us:.4g} us (predicted {guess:.4g});")
        console.print(" ".join(words).rstrip(";"), highlight=False, soft_wrap=True)
    absent = unmeasured(calibration)
    if absent:
        line = f"what select chooses was not measured for {len(absent)}: {', '.join(absent)}"
        console.print(line, highlight=False, soft_wrap=True)


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if given.command == "measure":
        return run_measure(given.out, given.limit, console)
    try:
        calibration = read(given.file)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show_regret("present constants", calibration, console)
    if given.command == "fit":
        found = fit(calibration.shapes)
        with replaced(found):
            show_regret("fitted constants", calibration, console)
        for line in as_source(found):
            console.print(line, highlight=False, markup=False)
    return 0


def run_measure(out: Path | None, limit: int | None, console: Console) -> int:
    surroundings = environment.describe("calibration")
    if surroundings["gpu"] is None or surroundings["capability"] != [9, 0]:
        print("error: `measure` needs a GPU that is sm_90, which the kernel is for", file=sys.stderr)
        return 2
    out = out or environment.RESULTS / environment.slug(surroundings["gpu"]) / FILE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        failures = measure(shapes_to_measure(limit), out, surroundings, console)
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
    for name, what in (("fit", "find constants, and their regret"), ("regret", "of the present constants")):
        command = commands.add_parser(name, help=f"{what}; needs no GPU")
        command.add_argument("file", type=args.path, metavar="FILE", help="what `measure` wrote")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
