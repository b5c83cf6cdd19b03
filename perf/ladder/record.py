"""The record of a run, `results.json`: written after every measurement, read to resume and to draw."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from perf.common.dataclass_json import REST, from_json, to_json
from perf.common.files import read_json, write_json
from perf.measure import environment
from perf.measure.environment import Environment

FILE = "results.json"
TF32_ROUNDING = "tf32 rounding"  # an experiment
T = TypeVar("T")
Added = TypeVar("Added", bound="TunedRung | CountedLaunch")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median over rounds and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True, kw_only=True)
class Error:
    """Of a product against fp64, as ratios."""

    norm: float | None  # of the difference, to the product's; None where a result is not finite
    componentwise: float | None = None  # the largest difference, to |A||B|
    bound: float | None = None  # the largest difference, to its bound
    vs_torch: float | None = None  # norm, to that of torch's own product
    toward_zero: float | None = None  # by which share the results are too small


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a kernel was compiled to, if known: registers of a thread, bytes of shared memory, spilled bytes."""

    registers: int | None = None
    shared: int | None = None
    spills: int | None = None


@dataclass(frozen=True, kw_only=True)
class Result(Resources):
    """A provider on a problem. absent: why it does not take that; failed: what is wrong with it."""

    config: str | None = None
    error: Error | None = None
    absent: str | None = None
    failed: str | None = None

    @property
    def norm(self) -> float | None:
        return self.error.norm if self.error else None


@dataclass(frozen=True, kw_only=True)
class Timed(Result):
    """One that passed the check. ratio: cuBLAS's time over its own, None where cuBLAS was not timed or was wrong."""

    time_ms: Spread
    ratio: Spread | None
    rounds: int
    repeats: int
    call_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What nvidia-smi says of the GPU: MHz, degrees Celsius, watts, and why it throttles."""

    clocks_sm: float | None
    clocks_mem: float | None
    temperature_gpu: float | None
    power_draw: float | None
    clocks_event_reasons_active: str | int | None

    @property
    def by_power(self) -> bool:
        """Whether the power limit lowers the clock: NVML's reason `SwPowerCap`."""
        return bool(int(str(self.clocks_event_reasons_active or 0), 0) & 4)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of matrices in a precision class."""

    M: int
    N: int
    K: int
    mode: str

    def tflops_in(self, ms: float) -> float:
        return 2 * self.M * self.N * self.K / 1e9 / ms


@dataclass(frozen=True, kw_only=True)
class ProblemResult(Product):
    """All providers on one `operands.Problem`; sets: of operands, in turn."""

    hot: bool
    seed: int
    budget_s: float
    clocks_before: Clocks
    sets: int
    providers: dict[str, Timed | Result]
    clocks_after: Clocks

    def timed(self, provider: str) -> Timed | None:
        result = self.providers.get(provider)
        return result if isinstance(result, Timed) else None

    def tflops(self, provider: str) -> float | None:
        """By the median time, of a provider that was timed."""
        result = self.timed(provider)
        return self.tflops_in(result.time_ms.median) if result else None


@dataclass(frozen=True, kw_only=True)
class TunedConfig(Resources):
    """A configuration in a tuning; it failed if it has no time."""

    time_ms: Spread | None = None
    blocks_per_sm: int | None = None


@dataclass(frozen=True, kw_only=True)
class TunedRung(Product):
    """What the autotuner timed, by configuration as `spelled`; failed: what is wrong with the winner's result; made: in
    which surroundings, if not the record's."""

    rung: str
    configs: dict[str, TunedConfig]
    failed: str | None = None
    made: Environment | None = None


@dataclass(frozen=True, kw_only=True)
class TwinBuild:
    """A twin's variants by name, or why it was not built."""

    variants: dict[str, Resources] | None = None
    unavailable: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """A copy's TB/s, read and written together, its bytes, and the SM clock while fp32 is multiplied."""

    copy_tbs: float
    copy_bytes: int
    sm_clock_mhz: float | None


@dataclass(frozen=True, kw_only=True)
class TF32Rounding:
    """Errors of a TF32 product, by who rounds the operands."""

    size: int
    errors: dict[str, Error] = field(metadata=REST)


@dataclass(frozen=True, kw_only=True)
class CountedLaunch(Product):
    """What Nsight Compute counted of a call, by `counters.METRICS`: of each kernel, the one that multiplies last. made:
    in which surroundings, if not the record's."""

    provider: str
    config: str
    kernels: dict[str, dict[str, float]]
    made: Environment | None = None


@dataclass(frozen=True, kw_only=True)
class StaticFacts(Resources):
    """What a rung's configuration becomes on an architecture, by `static` and `clock_model`, or why it does not
    compile. default: whether it is the configuration that is shown for the rung; mix: instructions by kind."""

    rung: str
    target: str
    config: str
    dtype: str
    default: bool
    blocks_per_sm: int | None = None
    instructions: int | None = None
    mix: dict[str, int] | None = None
    ceiling_tflops: float | None = None
    ceiling_share: float | None = None
    ceiling_limit: str | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Interpreted:
    """A rung in Triton's interpreter: its error as a norm and to its bound; why it did not take the operands, or what
    is wrong."""

    rung: str
    dtype: str
    M: int
    N: int
    K: int
    alpha: float | None = None
    beta: float | None = None
    norm: float | None = None
    bound: float | None = None
    seconds: float | None = None
    absent: str | None = None
    failed: str | None = None


@dataclass
class Record:
    """All that `results.json` in `folder` holds: the environment, and sections from a measurement's key to its result.

    today: the environment of new results, which for tunings and counters need not be the record's.
    """

    folder: Path
    environment: Environment
    twins: dict[str, TwinBuild] = field(default_factory=dict)
    problems: dict[str, ProblemResult] = field(default_factory=dict)
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    experiments: dict[str, TF32Rounding] = field(default_factory=dict)
    tuning: dict[str, TunedRung] = field(default_factory=dict)
    counted: dict[str, CountedLaunch] = field(default_factory=dict)
    static: dict[str, StaticFacts] = field(default_factory=dict)
    interpreter: dict[str, Interpreted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.today = self.environment

    @classmethod
    def open(cls, folder: Path, today: Environment, *, fresh: bool, adding: bool = False) -> tuple[Record, str]:
        """The record of `folder`, to be continued if it was made in the same surroundings; and what became of it.

        adding: only tunings or counters are added, which name their own surroundings, so that the rest stays whatever
        has changed; ValueError if it is of another GPU.

        Raises OSError where the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
        new = cls(folder, today)
        try:
            record = cls.read(folder)
        except FileNotFoundError:
            return new, "a new record"
        except ValueError:
            return new, f"{FILE} was unreadable: a new record"
        if fresh:
            return new, "a new record, the one that was there is dropped"
        changed = _changed(record.environment, today)
        if changed and not adding:
            return new, f"a new record: {', '.join(changed)} changed since the one that was there"
        if "gpu" in changed:
            raise ValueError(f"{folder / FILE} is of {record.environment['gpu']}, and this GPU is {today['gpu']}")
        record.today = today
        if changed:
            return record, "what is measured is added"
        record.environment = today
        return record, "continuing the record that is there"

    @property
    def tf32_rounding(self) -> TF32Rounding | None:
        return self.experiments.get(TF32_ROUNDING)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """A finished record, to draw from; raises ValueError if it is none. Sections that are unknown are dropped."""
        data = read_json(folder / FILE)
        known = {name: data[name] for name in CONTENTS if name in data}
        record: Record = from_json(cls, {"folder": folder, **known})
        return record

    def put(self, section: dict[str, T], key: str, result: T) -> None:
        """Adds one measurement to a section and saves: a run that ends here has lost nothing."""
        section[key] = result
        self.save()

    def put_problem(self, key: str, result: ProblemResult) -> None:
        """Adds a timed problem; providers of it that were timed before and not now stay."""
        before = self.problems[key].providers if key in self.problems else {}
        self.put(self.problems, key, replace(result, providers={**before, **result.providers}))

    def has_problem(self, key: str, providers: list[str], budget_s: float) -> bool:
        """Whether all of `providers` were timed on this problem, with at least this budget."""
        problem = self.problems.get(key)
        return problem is not None and problem.budget_s >= budget_s and problem.providers.keys() >= set(providers)

    def put_added(self, section: dict[str, Added], key: str, result: Added) -> None:
        """Adds a tuning, or what was counted, with its surroundings where they are not the record's."""
        if _changed(self.environment, self.today):
            result = replace(result, made=self.today)
        self.put(section, key, result)

    def has_tuning(self, key: str) -> bool:
        """Whether that was tuned in today's surroundings."""
        entry = self.tuning.get(key)
        if entry is None or entry.failed is not None:
            return False
        return not _changed(entry.made or self.environment, self.today)

    def failures(self) -> list[str]:
        """`provider on problem: reason` for all that failed the check."""
        failed = {
            f"{name} on {key}": result.failed
            for key, problem in self.problems.items()
            for name, result in problem.providers.items()
        }
        for section in (self.tuning, self.interpreter, self.static):
            failed |= {key: result.failed for key, result in section.items()}
        return [f"{what}: {reason}" for what, reason in failed.items() if reason is not None]

    def save(self) -> None:
        """Writes the whole record; a reader sees the old one or the new one, never a part."""
        write_json(self.folder / FILE, {name: to_json(getattr(self, name)) for name in CONTENTS})


def committed(folder: Path) -> list[Record]:
    """The records in a folder of results, in the order of GPUs."""
    records = [Record.read(path.parent) for path in folder.glob(f"*/{FILE}")]
    return sorted(records, key=lambda record: environment.order(record.environment))


def latest(records: Iterable[Record]) -> Record | None:
    """The one that was measured last."""
    return max(records, key=lambda record: str(record.environment["date"]), default=None)


CONTENTS = tuple(each.name for each in fields(Record) if each.name != "folder")
SECTIONS = CONTENTS[1:]


def _changed(made: Mapping[str, object], today: Mapping[str, object]) -> list[str]:
    """In what two surroundings differ that makes measurements differ."""
    return [name for name in environment.IDENTITY if made.get(name) != today.get(name)]
