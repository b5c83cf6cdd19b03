"""What pictures and pages show, read out of a record. Nothing here measures or draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perf.ladder import published, tasks
from perf.ladder.record import Record
from perf.ladder.rungs_and_twins import MODES, rungs_of, stem_of, twin_name
from perf.ladder.static import ARCHITECTURES
from perf.measure import roofline
from perf.measure.numerics import mode_of
from perf.measure.operands import MODE_DTYPES
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS
from triton_gemm.ladder import LADDER, Rung

Result = dict[str, Any]


def gpu(record: Record) -> str:
    return str(record.environment["gpu"] or "no GPU")


def timed(result: Result | None) -> bool:
    return result is not None and "time_ms" in result


def tflops(problem: dict[str, Any], result: Result) -> float:
    """By the median time."""
    flop = 2 * problem["M"] * problem["N"] * problem["K"]
    return flop / result["time_ms"]["median"] / 1e9


def speeds(problem: dict[str, Any], provider: str) -> tuple[float, float, float] | None:
    """TFLOPS of a provider that was timed: by the median time, and the 20th and 80th percentile."""
    result = problem["providers"].get(provider)
    if not timed(result):
        return None
    flop, times = 2 * problem["M"] * problem["N"] * problem["K"] / 1e9, result["time_ms"]
    return flop / times["median"], flop / times["p80"], flop / times["p20"]


def aligned(size: int) -> bool:
    """Whether Triton knows that rows of `size` elements start on 16 bytes: it needs a multiple of 16."""
    return size % 16 == 0


def squares(record: Record, mode: str) -> dict[int, dict[str, Any]]:
    """The problems of a size sweep, by size."""
    found = {
        problem["M"]: problem
        for problem in record["problems"].values()
        if problem["mode"] == mode and not problem["hot"]
    }
    return dict(sorted(found.items()))


def modes(record: Record) -> list[str]:
    """The precision classes that were swept."""
    return [mode for mode in MODES if squares(record, mode)]


def lines(record: Record, mode: str) -> list[str]:
    """The providers of a sweep in the ladder's order, cuBLAS last; of each twin the variant swept over all sizes."""
    swept = squares(record, mode).values()
    seen = {name for problem in swept for name, result in problem["providers"].items() if timed(result)}
    rungs = [rung.name for rung in rungs_of(mode)]
    twins = [
        twin_name(twin.stem, variants[0])
        for twin in TWINS.values()
        if (variants := [v for v in twin.variants if published.mode_of(twin, v) == mode])
    ]
    return [name for name in [*rungs, *twins, CUBLAS] if name in seen]


@dataclass(frozen=True)
class Step:
    """A rung on the ladder: its own result, its fastest twin's and cuBLAS's, on one problem."""

    rung: Rung
    problem: dict[str, Any]
    own: Result
    twin: str | None

    @property
    def tflops(self) -> float | None:
        return tflops(self.problem, self.own) if timed(self.own) else None

    @property
    def twin_result(self) -> Result | None:
        return self.problem["providers"][self.twin] if self.twin else None

    @property
    def twin_tflops(self) -> float | None:
        return tflops(self.problem, self.twin_result) if self.twin_result else None

    @property
    def cublas_tflops(self) -> float | None:
        result = self.problem["providers"].get(CUBLAS)
        return tflops(self.problem, result) if result and timed(result) else None

    def share(self, result: Result | None) -> float | None:
        """Of cuBLAS, by the TFLOPS that are shown: one number for a bar and for the text next to it.

        The median of the ratios round by round, `ratio` in the record, can differ: what takes several times as long
        as cuBLAS is timed apart (`timer.SLOW`), and then the GPU is cooler and cuBLAS faster.
        """
        theirs = self.cublas_tflops
        return tflops(self.problem, result) / theirs if result and timed(result) and theirs else None


def ladder_size(record: Record) -> int | None:
    """The size at which the ladder is shown, if any was swept."""
    sizes = {size for mode in modes(record) for size in squares(record, mode)}
    return tasks.ladder_size(sizes) if sizes else None


def ladder(record: Record) -> list[Step]:
    """The rungs that were measured, in order."""
    size = ladder_size(record)
    found = []
    for rung in LADDER:
        problem = squares(record, mode_of(rung.precision, rung.dtypes[0])).get(size or 0)
        own = problem["providers"].get(rung.name) if problem else None
        if problem is None or own is None:
            continue
        twins = {
            name: result
            for name, result in problem["providers"].items()
            if stem_of(name) in rung.twins and timed(result)
        }
        fastest = min(twins, key=lambda name: twins[name]["time_ms"]["median"]) if twins else None
        found.append(Step(rung, problem, own, fastest))
    return found


@dataclass(frozen=True)
class Factor:
    """A rung's predicted and measured gain over another."""

    rung: Rung
    over: str
    predicted: float
    measured: float | None


def factors(record: Record) -> list[Factor]:
    """For every rung that predicts one."""
    speeds = {step.rung.id: step.tflops for step in ladder(record)}
    found = []
    for rung in LADDER:
        if rung.predicted is None or rung.id not in speeds:
            continue
        over, predicted = rung.predicted
        own, other = speeds[rung.id], speeds.get(over)
        found.append(Factor(rung, over, predicted, own / other if own and other else None))
    return found


@dataclass(frozen=True)
class ExperimentRow:
    """A published kernel and its twin here."""

    kernel: published.Kernel
    provider: str
    variant: str
    precision: str
    error: float | None
    time_ms: float | None
    gflops: float | None
    speedup: float | None
    cublas_share: float | None
    published_speedup: float | None
    published_share: float | None
    reason: str


def experiment(record: Record, source: published.Experiment) -> list[ExperimentRow]:
    """The rows of one source's experiment; a kernel that was not measured says why."""
    results = []
    for kernel in source.kernels:
        problem, provider = tasks.experiment_problem(source, kernel)
        providers = record["problems"].get(problem.key, {}).get("providers", {})
        results.append((kernel, problem, provider, providers))
    _, _, naive_provider, naive_providers = results[0]
    naive = naive_providers.get(naive_provider)
    rows = []
    for kernel, problem, provider, providers in results:
        result = providers.get(provider, {"absent": "not measured"})
        own = result["time_ms"]["median"] if timed(result) else None
        has_naive = own is not None and timed(naive) and len(source.kernels) > 1
        ratio = result.get("ratio")
        rows.append(
            ExperimentRow(
                kernel=kernel,
                provider=provider,
                variant=published.twin_of(kernel.id)[1].params,
                precision=problem.mode,
                error=result.get("error", {}).get("norm"),
                time_ms=own,
                gflops=problem.flop / own / 1e6 if own else None,
                speedup=naive["time_ms"]["median"] / own if has_naive and naive and own else None,
                cublas_share=ratio["median"] if ratio else None,
                published_speedup=source.published_speedup(kernel),
                published_share=source.published_share(kernel),
                reason=result.get("failed") or result.get("absent") or "",
            )
        )
    return rows


def measured_experiments(record: Record) -> list[published.Experiment]:
    """The sources of which at least one kernel was timed."""
    return [source for source in published.EXPERIMENTS if any(row.time_ms for row in experiment(record, source))]


def compared_experiments(record: Record) -> list[published.Experiment]:
    """Those of which two kernels or more were timed: one alone has nothing to be drawn against."""
    sources = measured_experiments(record)
    return [source for source in sources if sum(row.time_ms is not None for row in experiment(record, source)) > 1]


@dataclass(frozen=True)
class Roof:
    """A ceiling of the roofline; `intensity` is where it was measured."""

    label: str
    tflops: float
    intensity: float | None = None


def roofs(record: Record) -> tuple[float | None, list[Roof]]:
    """Measured copy bandwidth (TB/s) and the ceilings of compute: FFMA by the clock, cuBLAS by measurement."""
    measured = record["ceilings"].get("measured", {})
    found = []
    clock, capability = measured.get("sm_clock_mhz"), tuple(record.environment.get("capability", ()))
    if clock and capability in roofline.FLOP_PER_CLOCK and "ieee" in modes(record):
        peak = roofline.unit_peak_tflops(
            (capability[0], capability[1]), "ieee", record.environment["num_sms"], clock / 1e3
        )
        found.append(Roof(f"FFMA units at {clock:.0f} MHz", peak))
    for mode in (mode for mode in modes(record) if mode != "bf16"):
        best = [
            (tflops(problem, problem["providers"][CUBLAS]), point_intensity(problem))
            for problem in squares(record, mode).values()
            if timed(problem["providers"].get(CUBLAS))
        ]
        if best:
            found.append(Roof(f"best cuBLAS {mode}", *max(best)))
    return measured.get("copy_tbs"), found


def point_intensity(problem: dict[str, Any]) -> float:
    """FLOP a byte of DRAM traffic that cannot be avoided."""
    itemsize = MODE_DTYPES[problem["mode"]].itemsize
    return roofline.intensity(problem["M"], problem["N"], problem["K"], itemsize)


def under_roofs(record: Record) -> list[tuple[str, Rung, list[tuple[float, float]]]]:
    """Precision class, rung, and intensity and TFLOPS at every aligned size; fp16 stands for bf16."""
    found = []
    for mode in (mode for mode in modes(record) if mode != "bf16"):
        for rung in rungs_of(mode):
            points = [
                (point_intensity(problem), tflops(problem, problem["providers"][rung.name]))
                for size, problem in squares(record, mode).items()
                if aligned(size) and timed(problem["providers"].get(rung.name))
            ]
            if points:
                found.append((mode, rung, points))
    return found


def unmeasured(record: Record) -> list[str]:
    """`provider: reason (problems)` for all that did not take a problem, and for twins that were not built."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for key, problem in record["problems"].items():
        for name, result in problem["providers"].items():
            if "absent" in result:
                reasons.setdefault((name, result["absent"]), []).append(key)
    found = [f"{name}: {reason} ({', '.join(keys)})" for (name, reason), keys in reasons.items()]
    found += [
        f"{stem}: twin not built: {twin['unavailable'].splitlines()[0]}"
        for stem, twin in record["twins"].items()
        if "unavailable" in twin
    ]
    return found


def static_defaults(record: Record) -> dict[str, dict[str, dict[str, Any]]]:
    """Static facts of the default configurations: rung, then architecture."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for facts in record["static"].values():
        if facts["default"]:
            found.setdefault(facts["rung"], {})[facts["target"]] = facts
    return {
        rung.name: {target: found[rung.name][target] for target in ARCHITECTURES if target in found[rung.name]}
        for rung in LADDER
        if rung.name in found
    }
