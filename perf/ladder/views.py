"""What pictures and pages show, read out of a record, and whether the ladder's targets are met. Nothing here measures
or draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from perf.ladder import published, tasks
from perf.ladder.record import ProblemResult, Record, Result, StaticFacts, Timed
from perf.ladder.rungs_and_twins import MODES, rungs_of, stem_of, twin_name
from perf.ladder.static import ARCHITECTURES
from perf.measure import roofline
from perf.measure.numerics import mode_of
from perf.measure.operands import MODE_DTYPES
from perf.measure.providers import CUBLAS
from perf.measure.roofline import SUSPICIOUS_RATIO, too_fast
from reference_cuda import TWINS
from triton_gemm.ladder import LADDER, Rung

# Targets at 4096^3: the share of cuBLAS in the same precision.
OF_CUBLAS = {
    "k06_pipelined": 0.85,
    "k08_tensor_cores": 0.90,
    "k10_tma": 0.95,
    "k11_warp_specialised": 1.00,
    "c07_warp_tiled": 0.75,
}
# The warp-tiled wmma twin over the single-warp one.
TWIN_OVER_TWIN = ("c11_wmma_fp16_warp_tiled", "c09_wmma_fp16", 2.0)

NOT_MEASURED = Result(absent="not measured")


def gpu(record: Record) -> str:
    return record.environment["gpu"] or "no GPU"


def speeds(problem: ProblemResult, provider: str) -> tuple[float, float, float] | None:
    """TFLOPS of a provider that was timed: by the median time, and the 20th and 80th percentile."""
    result = problem.timed(provider)
    if result is None:
        return None
    times = result.time_ms
    return problem.tflops_in(times.median), problem.tflops_in(times.p80), problem.tflops_in(times.p20)


def aligned(size: int) -> bool:
    """Whether Triton knows that rows of `size` elements start on 16 bytes: it needs a multiple of 16."""
    return size % 16 == 0


def squares(record: Record, mode: str) -> dict[int, ProblemResult]:
    """The problems of a size sweep, by size."""
    swept = {problem.M: problem for problem in record.problems.values() if problem.mode == mode and not problem.hot}
    return dict(sorted(swept.items()))


def modes(record: Record) -> list[str]:
    """The precision classes that were swept."""
    return [mode for mode in MODES if squares(record, mode)]


def lines(record: Record, mode: str) -> list[str]:
    """The providers of a sweep in the ladder's order, cuBLAS last; of each twin the variant swept over all sizes."""
    timed = {name for problem in squares(record, mode).values() for name in problem.providers if problem.timed(name)}
    rungs = [rung.name for rung in rungs_of(mode)]
    twins = [
        twin_name(twin.stem, variants[0])
        for twin in TWINS.values()
        if (variants := [v for v in twin.variants if published.mode_of(twin, v) == mode])
    ]
    return [name for name in [*rungs, *twins, CUBLAS] if name in timed]


def share(problem: ProblemResult, provider: str) -> float | None:
    """Of cuBLAS, by the TFLOPS that are shown: one number for a bar and for the text next to it.

    The median of the ratios round by round, `ratio` in the record, can differ: what takes several times as long
    as cuBLAS is timed apart (`timer.SLOW`), and then the GPU is cooler and cuBLAS faster.
    """
    tflops, cublas = problem.tflops(provider), problem.tflops(CUBLAS)
    return tflops / cublas if tflops and cublas else None


@dataclass(frozen=True)
class Step:
    """A rung on the ladder: it, its fastest twin and cuBLAS on one problem."""

    rung: Rung
    problem: ProblemResult
    twin: str | None

    @property
    def own(self) -> Result:
        return self.problem.providers[self.rung.name]

    @property
    def tflops(self) -> float | None:
        return self.problem.tflops(self.rung.name)

    @property
    def twin_tflops(self) -> float | None:
        return self.problem.tflops(self.twin) if self.twin else None

    @property
    def cublas_tflops(self) -> float | None:
        return self.problem.tflops(CUBLAS)

    @property
    def over_twin(self) -> float | None:
        """The rung's TFLOPS over its fastest twin's."""
        return self.tflops / self.twin_tflops if self.tflops and self.twin_tflops else None

    def share(self, provider: str) -> float | None:
        return share(self.problem, provider)


def ladder_size(record: Record) -> int | None:
    """The size at which the ladder is shown, if any was swept."""
    sizes = {size for mode in modes(record) for size in squares(record, mode)}
    return tasks.ladder_size(sizes) if sizes else None


def ladder(record: Record) -> list[Step]:
    """The rungs that were measured, in order."""
    size = ladder_size(record)
    steps = []
    for rung in LADDER:
        problem = squares(record, mode_of(rung.precision, rung.dtypes[0])).get(size or 0)
        if problem is None or rung.name not in problem.providers:
            continue
        twins = {
            name: result.time_ms.median
            for name in problem.providers
            if stem_of(name) in rung.twins and (result := problem.timed(name))
        }
        steps.append(Step(rung=rung, problem=problem, twin=min(twins, key=twins.__getitem__, default=None)))
    return steps


@dataclass(frozen=True)
class Factor:
    """A rung's predicted and measured gain over another."""

    rung: Rung
    over: str
    predicted: float
    measured: float | None


def factors(record: Record) -> list[Factor]:
    """For every rung that predicts one."""
    tflops = {step.rung.id: step.tflops for step in ladder(record)}
    gains = []
    for rung in LADDER:
        if rung.predicted is None or rung.id not in tflops:
            continue
        over, predicted = rung.predicted
        own, other = tflops[rung.id], tflops.get(over)
        measured = own / other if own and other else None
        gains.append(Factor(rung=rung, over=over, predicted=predicted, measured=measured))
    return gains


@dataclass(frozen=True)
class ExperimentRow:
    """A published kernel and its twin here, in words and with its result."""

    kernel: published.Kernel
    twin: str
    mode: str
    result: Result
    time_ms: float | None
    gflops: float | None
    speedup: float | None
    cublas_share: float | None
    published_speedup: float | None
    published_share: float | None


def experiment(record: Record, source: published.Experiment) -> list[ExperimentRow]:
    """The rows of one source's experiment; a kernel that was not measured says why."""
    rows = []
    naive_ms: float | None = None
    for kernel in source.kernels:
        problem, provider = tasks.experiment_problem(source, kernel)
        measured = record.problems.get(problem.key)
        timed = measured.timed(provider) if measured else None
        own_ms = timed.time_ms.median if timed else None
        if kernel == source.kernels[0] and len(source.kernels) > 1:
            naive_ms = own_ms
        rows.append(
            ExperimentRow(
                kernel=kernel,
                twin=f"{stem_of(provider)} ({published.twin_of(kernel.id)[1].params})",
                mode=problem.mode,
                result=measured.providers[provider] if measured and provider in measured.providers else NOT_MEASURED,
                time_ms=own_ms,
                gflops=problem.flop / own_ms / 1e6 if own_ms else None,
                speedup=naive_ms / own_ms if naive_ms and own_ms else None,
                cublas_share=share(measured, provider) if measured else None,
                published_speedup=source.published_speedup(kernel),
                published_share=source.published_share(kernel),
            )
        )
    return rows


def measured_experiments(record: Record) -> list[published.Experiment]:
    """The sources of which at least one kernel was timed."""
    return [source for source in published.EXPERIMENTS if any(row.time_ms for row in experiment(record, source))]


def compared_experiments(record: Record) -> list[published.Experiment]:
    """Those of which the naive kernel and another were timed: one alone has nothing to be drawn against."""
    sources = measured_experiments(record)
    return [source for source in sources if sum(row.speedup is not None for row in experiment(record, source)) > 1]


@dataclass(frozen=True)
class Roof:
    """A ceiling of the roofline; `intensity` is where it was measured."""

    label: str
    tflops: float
    intensity: float | None = None


def roofs(record: Record) -> tuple[float | None, list[Roof]]:
    """Measured copy bandwidth (TB/s) and the ceilings of compute: FFMA by the clock, cuBLAS by measurement."""
    ceilings = record.ceilings.get("measured")
    clock = ceilings.sm_clock_mhz if ceilings else None
    compute = []
    major, minor = record.environment.get("capability", (0, 0))
    gpu = roofline.TYPICAL.get((major, minor))
    if clock and gpu and "ieee" in modes(record):
        peak = record.environment["num_sms"] * roofline.flop_per_clock(gpu, "ieee") * clock / 1e6
        compute.append(Roof(label=f"FFMA units at {clock:.0f} MHz", tflops=peak))
    for mode in (mode for mode in modes(record) if mode != "bf16"):
        points = [point for problem in squares(record, mode).values() for point in _points(problem, CUBLAS)]
        if points:
            tflops, intensity = max((tflops, intensity) for intensity, tflops in points)
            compute.append(Roof(label=f"best cuBLAS {mode}", tflops=tflops, intensity=intensity))
    return ceilings.copy_tbs if ceilings else None, compute


def _points(problem: ProblemResult, provider: str) -> Iterator[tuple[float, float]]:
    """FLOP a byte of DRAM traffic that cannot be avoided, and TFLOPS; nothing if it was not timed."""
    tflops = problem.tflops(provider)
    if tflops is not None:
        yield roofline.intensity(problem.M, problem.N, problem.K, MODE_DTYPES[problem.mode].itemsize), tflops


def under_roofs(record: Record) -> list[tuple[Rung, list[tuple[float, float]]]]:
    """Rungs, and intensity and TFLOPS at every aligned size; fp16 stands for bf16."""
    curves = []
    for mode in (mode for mode in modes(record) if mode != "bf16"):
        problems = [problem for size, problem in squares(record, mode).items() if aligned(size)]
        for rung in rungs_of(mode):
            points = [point for problem in problems for point in _points(problem, rung.name)]
            if points:
                curves.append((rung, points))
    return curves


def unmeasured(record: Record) -> list[str]:
    """`provider: reason (problems)` for all that did not take a problem, and for twins that were not built."""
    problems: dict[tuple[str, str], list[str]] = {}
    for key, problem in record.problems.items():
        for name, result in problem.providers.items():
            if result.absent is not None:
                problems.setdefault((name, result.absent), []).append(key)
    absent = [f"{name}: {reason} ({', '.join(keys)})" for (name, reason), keys in problems.items()]
    not_built = [
        f"{stem}: twin not built: {twin.unavailable.splitlines()[0]}"
        for stem, twin in record.twins.items()
        if twin.unavailable is not None
    ]
    return absent + not_built


def static_defaults(record: Record) -> dict[str, dict[str, StaticFacts]]:
    """Static facts of the default configurations: rung, then architecture."""
    defaults = {(facts.rung, facts.target): facts for facts in record.static.values() if facts.default}
    by_rung = {
        rung.name: {target: defaults[rung.name, target] for target in ARCHITECTURES if (rung.name, target) in defaults}
        for rung in LADDER
    }
    return {name: by_target for name, by_target in by_rung.items() if by_target}


# --- Targets ---


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
    steps = ladder(record)
    for step in steps:
        if step.over_twin:
            yield Outcome(f"{step.rung.name} as fast as {step.twin}", 1.0, step.over_twin)
    for before, step in pairwise(steps):
        if before.rung.precision == step.rung.precision and before.tflops and step.tflops:
            yield Outcome(f"{step.rung.name} as fast as {before.rung.name}", 1.0, step.tflops / before.tflops)
    best = fastest(record, ladder_size(record) or 0)
    for name, wanted in OF_CUBLAS.items():
        if name in best and (ratio := best[name].ratio):
            yield Outcome(f"{name} at {wanted:.2f} of cuBLAS", wanted, ratio.median)
    warp_tiled, single, wanted = TWIN_OVER_TWIN
    if warp_tiled in best and single in best:
        gain = best[single].time_ms.median / best[warp_tiled].time_ms.median
        yield Outcome(f"{warp_tiled} at {wanted:g} times {single}", wanted, gain)


def fastest(record: Record, size: int) -> dict[str, Timed]:
    """Of every rung and twin its fastest variant's result at this size; half precision in fp16."""
    best: dict[str, Timed] = {}
    for mode in (mode for mode in modes(record) if mode != "bf16"):
        problem = squares(record, mode).get(size)
        for name, result in problem.providers.items() if problem else ():
            known = best.get(stem_of(name))
            if isinstance(result, Timed) and (known is None or result.time_ms.median < known.time_ms.median):
                best[stem_of(name)] = result
    return best


def suspicious(record: Record) -> Iterator[str]:
    """Figures that are too good: half precision far beyond cuBLAS, or beyond what a Hopper does on random data."""
    large = [
        (f"on {mode} {size}", problem)
        for mode in modes(record)
        for size, problem in squares(record, mode).items()
        if mode in ("fp16", "bf16") and size >= 2048
    ]
    for where, problem in large:
        for name in problem.providers:
            result = problem.timed(name)
            if result is None or result.ratio is None:
                continue
            tflops = problem.tflops_in(result.time_ms.median)
            if result.ratio.median > SUSPICIOUS_RATIO:
                yield f"{name} {where}: {result.ratio.median:.2f} of cuBLAS"
            if too_fast(tflops, gpu(record)):
                yield f"{name} {where}: {tflops:.0f} TFLOPS"
