"""What a report consists of: a list of tasks, each of which adds one measurement to the record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from perf.common.dataclass_json import from_json
from perf.common.progress import Advance, Task
from perf.ladder import counters, interpret, published, rungs_and_twins, static
from perf.ladder.record import (
    TF32_ROUNDING,
    Ceilings,
    Error,
    ProblemResult,
    Record,
    Resources,
    TF32Rounding,
    TunedConfig,
    TunedRung,
    TwinBuild,
)
from perf.measure import operands, providers, roofline, timer
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from perf.measure.timer import Provider
from reference_cuda import TWINS, LoadedTwin, TwinUnavailable, load, load_all
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import architecture
from triton_gemm.ladder import Rung
from triton_gemm.ladder.command import spelled
from triton_gemm.tuning.of_torch import fp32_precision

LADDER_SIZE = 4096
SIZES = (512, 1024, 1400, 2048, 3000, 4096, 6144, 8192)
QUICK_SIZES = (1024, LADDER_SIZE)
QUICK_MODES = ("ieee", "tf32", "fp16")
NAIVE_RUNGS = ("k01", "k02")  # they and their twins stop at LADDER_SIZE: above it one call takes seconds
BUDGET_S = 1.0
QUICK_BUDGET_S = 0.4
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    rungs: tuple[Rung, ...]
    every_rung: bool
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    quick: bool
    counters: bool
    tuning: bool = False

    @property
    def budget_s(self) -> float:
        return QUICK_BUDGET_S if self.quick else BUDGET_S

    def stems(self) -> list[str]:
        """The twins of these rungs."""
        ids = {rung.id for rung in self.rungs}
        return [stem for stem, twin in TWINS.items() if ids.intersection(twin.rungs)]


Twins = dict[str, LoadedTwin | TwinUnavailable]


def build_task(record: Record, twins: Twins) -> Task:
    """Fills `twins`, which everything else on a GPU needs."""
    return Task("building twins", len(TWINS), lambda advance: _build_twins(record, twins, advance))


def gpu_tasks(record: Record, options: Options, twins: Twins) -> list[Task]:
    """Ceilings, problems and experiments that are not in the record yet."""
    tasks = []

    def measure_ceilings() -> None:
        record.put(record.ceilings, "measured", from_json(Ceilings, roofline.measure(options.budget_s)))

    def measure_rounding() -> None:
        record.put(record.experiments, TF32_ROUNDING, tf32_rounding(options.rungs))

    if "measured" not in record.ceilings:
        tasks.append(_single("copy bandwidth and clock", measure_ceilings))
    tasks += _sweeps(record, options, twins)
    rounds = "tf32" in options.modes and any(rung.id == "k07" for rung in options.rungs)
    if rounds and TF32_ROUNDING not in record.experiments:
        tasks.append(_single(TF32_ROUNDING, measure_rounding))
    if options.every_rung:
        tasks += _experiments(record, options, twins)
    return tasks


def _sweeps(record: Record, options: Options, twins: Twins) -> list[Task]:
    tasks = []
    compiled: set[tuple[str, bool]] = set()
    for mode in options.modes:
        rungs = rungs_and_twins.rungs_of(mode, options.rungs)
        for size in options.sizes:
            problem = Problem(size, size, size, mode)
            subjects = sweep_providers(problem, options, twins, record)
            if record.has_problem(problem.key, [s.name for s in subjects], options.budget_s):
                continue
            variety = (mode, size % 16 == 0)  # Triton compiles them apart
            if variety not in compiled:
                compiled.add(variety)
                tasks.append(_compile_task(rungs, problem))
            tasks.append(_problem_task(record, problem, subjects, options))
    return tasks


def _compile_task(rungs: list[Rung], problem: Problem) -> Task:
    size = (problem.M, problem.N, problem.K)
    return _single(
        f"compiling for {problem.key} and its like", lambda: rungs_and_twins.precompile(rungs, size, problem.dtype)
    )


def tuning_tasks(record: Record, options: Options) -> list[Task]:
    """What the autotuner times for each rung that has a choice, on the ladder's size and nothing else; less what is
    recorded in today's surroundings. The winner's result is checked against fp64, and nothing else is timed."""
    tasks = []
    size = ladder_size(options.sizes)
    capability = torch.cuda.get_device_capability()
    for mode in options.modes:
        problem = Problem(size, size, size, mode)
        rungs = [
            rung
            for rung in rungs_and_twins.rungs_of(mode, options.rungs)
            if len(rung.configs) > 1 and rungs_and_twins.runs_on(rung, capability)
            if not record.has_tuning(tuning_key(rung, problem))
        ]
        if rungs:
            tasks.append(_compile_task(rungs, problem))
            tasks += [_tuning_task(record, rung, problem) for rung in rungs]
    return tasks


def counting_tasks(record: Record, options: Options) -> list[Task]:
    """Nsight Compute's counters of the chosen rungs and, with all of them, of S3's twins that can be built, in one run
    of ncu. Nothing is timed. What was counted of these rungs before is dropped: their configurations may have changed.
    """
    capability = torch.cuda.get_device_capability()
    rungs = [rung for rung in options.rungs if rungs_and_twins.runs_on(rung, capability)]

    def run() -> None:
        chosen = list(counters.launches(record, rungs))
        if options.every_rung:
            chosen += [one for one in map(counters.of_s3, counters.TAUGHT) if _can_be_built(one.provider)]
        found = counters.count(chosen)
        providers = {one.provider for one in chosen}
        for key in [key for key, launch in record.counted.items() if launch.provider in providers]:
            del record.counted[key]
        for key, launch in found.items():
            record.put_added(record.counted, key, launch)

    return [_single("counting", run)]


def _can_be_built(twin: str) -> bool:
    """Whether there is a compiler for it."""
    try:
        load(rungs_and_twins.stem_of(twin))
    except TwinUnavailable:
        return False
    return True


def _tuning_task(record: Record, rung: Rung, problem: Problem) -> Task:
    def run() -> None:
        result: dict[str, Any] = {}
        with fp32_precision("tf32" if problem.mode == "tf32" else "ieee"):
            laid = operands.Operands(problem, {problem.out_dtype}, 1)
            check = operands.Check(laid)
            provider = rungs_and_twins.rung_provider(
                rung, (problem.M, problem.N, problem.K), problem.dtype, inspect=True
            )
            timer.is_right(provider, laid, check, result, torchs=False)
        keep_tuning(record, rung, problem, result, result.get("failed"))
        torch.cuda.empty_cache()

    return _single(f"tuning {tuning_key(rung, problem)}", run)


def tuning_key(rung: Rung, problem: Problem) -> str:
    return f"{rung.name} {problem.key}"


def keep_tuning(
    record: Record, rung: Rung, problem: Problem, result: dict[str, Any], failed: str | None = None
) -> None:
    """Takes `tuning` out of a rung's result and puts it into the record's section of that name, or that it `failed`; a
    rung that does not take the problem, or has one configuration, leaves nothing there."""
    tuning: dict[GemmConfig, TunedConfig] = result.pop("tuning", {})
    configs = {spelled(config): tuned for config, tuned in tuning.items()}
    if configs or failed:
        M, N, K = problem.M, problem.N, problem.K
        entry = TunedRung(rung=rung.name, mode=problem.mode, M=M, N=N, K=K, configs=configs, failed=failed)
        record.put_added(record.tuning, tuning_key(rung, problem), entry)


def _experiments(record: Record, options: Options, twins: Twins) -> list[Task]:
    tasks = []
    for problem, names in experiment_problems():
        built = [name for name in names if isinstance(twins[rungs_and_twins.stem_of(name)], LoadedTwin)]
        chosen = [CUBLAS, *built] if problem.mode != "int32" else built
        if built and not record.has_problem(problem.key, chosen, options.budget_s):
            subjects = [_provider(name, twins, record) for name in chosen]
            tasks.append(_problem_task(record, problem, subjects, options))
    return tasks


def _single(label: str, run: Callable[[], None]) -> Task:
    def whole(advance: Advance) -> None:
        run()
        advance(label)

    return Task(label, 1, whole)


def _problem_task(record: Record, problem: Problem, subjects: list[Provider], options: Options) -> Task:
    baseline = CUBLAS if problem.mode != "int32" else None

    def run() -> None:
        result = timer.measure(problem, subjects, baseline, options.budget_s)
        for rung in options.rungs:
            keep_tuning(record, rung, problem, result["providers"].get(rung.name, {}))
        record.put_problem(problem.key, from_json(ProblemResult, result))
        torch.cuda.empty_cache()

    return _single(problem.key, run)


def _build_twins(record: Record, twins: Twins, advance: Advance) -> None:
    twins |= load_all(progress=lambda stem, _: advance(stem))
    arch = architecture(torch.cuda.get_device_capability())
    known = [stem for stem, loaded in twins.items() if isinstance(loaded, LoadedTwin)]
    missing = [stem for stem in known if stem not in record.twins or not record.twins[stem].variants]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        resources = pool.map(lambda stem: rungs_and_twins.twin_resources(stem, arch), missing)
        built = {stem: TwinBuild(variants=variants) for stem, variants in zip(missing, resources, strict=True)}
    for stem, loaded in twins.items():
        if isinstance(loaded, TwinUnavailable):
            record.twins[stem] = TwinBuild(unavailable=str(loaded))
        elif stem in built:
            record.twins[stem] = built[stem]
    record.save()


def sweep_providers(problem: Problem, options: Options, twins: Twins, record: Record) -> list[Provider]:
    """cuBLAS, the rungs and the twins of a precision class; every variant of a twin at the ladder's size."""
    size = (problem.M, problem.N, problem.K)
    at_ladder = ladder_size(options.sizes) == problem.M
    subjects = [providers.cublas()]
    for rung in rungs_and_twins.rungs_of(problem.mode, options.rungs):
        if problem.M <= LADDER_SIZE or rung.id not in NAIVE_RUNGS:
            subjects.append(rungs_and_twins.rung_provider(rung, size, problem.dtype, inspect=at_ladder))
    for stem in options.stems():
        twin = TWINS[stem]
        too_slow = problem.M > LADDER_SIZE and twin.rung in NAIVE_RUNGS
        if too_slow or not isinstance(twins[stem], LoadedTwin):
            continue
        variants = [v for v in twin.variants if published.mode_of(twin, v) == problem.mode]
        for variant in variants if at_ladder else variants[:1]:
            subjects.append(_provider(rungs_and_twins.twin_name(stem, variant), twins, record))
    return subjects


def _provider(name: str, twins: Twins, record: Record) -> Provider:
    """cuBLAS, or a twin that was built, by its provider's name."""
    if name == CUBLAS:
        return providers.cublas()
    stem, _, variant = name.partition("/")
    loaded = twins[stem]
    assert isinstance(loaded, LoadedTwin)
    resources = record.twins[stem].variants or {}
    return rungs_and_twins.twin_provider(loaded, TWINS[stem].variant(variant), resources.get(variant, Resources()))


def ladder_size(sizes: Iterable[int]) -> int:
    """The size at which the ladder is shown: LADDER_SIZE, the largest below it, or the smallest above."""
    return min(sizes, key=lambda size: (size > LADDER_SIZE, abs(size - LADDER_SIZE)))


def experiment_problems() -> list[tuple[Problem, list[str]]]:
    """Each source's shape in each precision its kernels use, and the twins to time there.

    L2 is left hot: the sources time one call after another on the same matrices. Sources that share a shape share
    the measurement.
    """
    twins_of: dict[Problem, list[str]] = {}
    for experiment in published.EXPERIMENTS:
        for kernel in experiment.kernels:
            problem, name = experiment_problem(experiment, kernel)
            names = twins_of.setdefault(problem, [])
            if name not in names:
                names.append(name)
    return list(twins_of.items())


def experiment_problem(experiment: published.Experiment, kernel: published.Kernel) -> tuple[Problem, str]:
    """The problem on which a published kernel's twin is timed, and the provider's name."""
    twin, variant = published.twin_of(kernel.id)
    size = experiment.size
    problem = Problem(size, size, size, published.mode_of(twin, variant), hot=True)
    return problem, rungs_and_twins.twin_name(twin.stem, variant)


def tf32_rounding(rungs: tuple[Rung, ...]) -> TF32Rounding:
    """The error of a TF32 product by who rounds the operands: cuBLAS, k07, and k07 told not to."""
    rung = next(rung for rung in rungs if rung.id == "k07")
    size = LADDER_SIZE
    laid = operands.Operands(Problem(size, size, size, "tf32"), set(), 1)
    (a, b), check = laid.sets[0], operands.Check(laid)
    calls: dict[str, timer.Call] = {
        "cuBLAS": lambda a, b, c: torch.mm(a, b, out=c),
        "k07, operands rounded to nearest": rung.launch,
        "k07, operands truncated": lambda a, b, c: rung.launch(a, b, c, round_operands=False),
    }
    errors = {}
    with fp32_precision("tf32"):
        for name, call in calls.items():
            c = torch.full((size, size), float("nan"), device="cuda")
            call(a, b, c)
            error, _ = check.verdict(c)
            toward_zero = float((check.expected.abs() - c.double().abs()).sum() / check.expected.abs().sum())
            errors[name] = from_json(Error, {**error, "toward_zero": toward_zero})
    return TF32Rounding(size=size, errors=errors)


def cpu_tasks(record: Record, options: Options) -> Iterator[Task]:
    """Without a GPU: the static facts and the interpreter, less what is recorded."""

    def keeper(section: dict[str, T], advance: Advance) -> Callable[[str, T], None]:
        def done(key: str, result: T) -> None:
            record.put(section, key, result)
            advance(key)

        return done

    static_jobs = static.jobs(options.rungs, every_config=not options.quick)
    missing = [job for job in static_jobs if job.key not in record.static]
    if missing:
        yield Task("compiling", len(missing), lambda to: static.compile_all(missing, keeper(record.static, to)))
    waiting = [
        rung for rung in options.rungs if any(job.key not in record.interpreter for job in interpret.jobs([rung]))
    ]
    jobs = interpret.jobs(waiting)
    if jobs:
        yield Task("interpreting", len(jobs), lambda to: interpret.run(jobs, keeper(record.interpreter, to)))
