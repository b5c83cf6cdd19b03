"""Runs one rung by hand, as `triton_gemm.ladder.command` is told to: timed on a GPU, else interpreted and compiled."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text

from perf.common import formats, progress
from perf.common.dataclass_json import from_json
from perf.common.formats import Cell
from perf.common.progress import Task
from perf.ladder import interpret, rungs_and_twins, static
from perf.ladder.record import Interpreted, Resources, Result, StaticFacts, Timed
from perf.measure import providers, timer
from perf.measure.numerics import mode_of
from perf.measure.operands import Operands, Problem
from perf.measure.providers import CUBLAS
from triton_gemm.compat import INTERPRETED
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import DeviceInfo, architecture, device_info, device_of_capability
from triton_gemm.ladder import Rung
from triton_gemm.ladder.command import BUDGET_S, NAMES, SIZE, Call, MistakeError, Size, claims, spelled
from triton_gemm.ladder.launch_checks import refusing
from triton_gemm.problem import UnsupportedOperandError, aligned
from triton_gemm.runtime import aot
from triton_gemm.tuning.timing import DeviceLostError

SMALL: Size = (96, 128, 64)  # for the interpreter, where the given shape is too large
INTERPRETED_MOST = 256**3  # M N K that the interpreter is given; more takes it minutes
PACE = timer.Pace(patience_s=0.5, check_rows=1024, extras=False)
CONFIG_WIDTH, CELL_WIDTH = 24, 10
STATIC = ("registers", "shared KiB", "spills")
TIMED = ("ms", "TFLOPS", "of cuBLAS", "error", *STATIC)


@dataclass(frozen=True)
class Work:
    """A rung, its operands' (M, N, K), dtype and layout, and the configurations to try."""

    rung: Rung
    shape: Size
    dtype: torch.dtype
    layout: str
    configs: tuple[GemmConfig, ...]

    @classmethod
    def of(cls, call: Call, rung: Rung, device: DeviceInfo) -> Work:
        """What `call` means on `device`; raises MistakeError where that cannot run."""
        shape, dtype = call.shape or (SIZE, SIZE, SIZE), call.dtype or rung.dtypes[0]
        if not rungs_and_twins.runs_on(rung, device.capability):
            raise MistakeError(
                f"{rung.id} runs on {claims(rung)}, not on {device.name} ({architecture(device.capability)})"
            )
        for config in call.configs:
            reason = rung.illegal(config, device, dtype)
            if reason is not None:
                raise MistakeError(f"{rung.id} {refusing(reason)} {spelled(config)} on {device.name}: {reason}")
        meta = aot.operands(shape, dtype, call.layout)
        configs = call.configs or tuple(rung.legal_configs(device, dtype, aligned=aligned(*meta)))
        if not configs:
            raise MistakeError(f"{rung.id} has no configuration that {device.name} can run on such operands")
        return cls(rung, shape, dtype, call.layout, configs)

    def title(self, shape: Size) -> str:
        M, N, K = shape
        return f"{self.rung.id} {self.rung.title}, {NAMES[self.dtype]} {self.layout}, M x N x K = {M} x {N} x {K}"

    def require_operands(self) -> None:
        """Raises MistakeError where the rung cannot take operands that lie so."""
        try:
            static.capture(self.rung, self.configs[0], self.shape, self.dtype, self.layout)
        except UnsupportedOperandError as error:
            raise MistakeError(f"{self.rung.id}: {error}") from error


class Lines:
    """A table that is printed line by line, as the lines come to be known."""

    def __init__(self, console: Console, columns: Sequence[str]) -> None:
        self.console = console
        self.show("tile,warps,stages,group", columns, "bold")

    def show(self, name: str, cells: Sequence[Cell], style: str = "") -> None:
        words = ["" if cell is None else str(cell) for cell in cells]
        text = f"{name:<{CONFIG_WIDTH}}" + "".join(f" {word:>{CELL_WIDTH}}" for word in words)
        say(self.console, text.rstrip(), style)

    def failed(self, name: str, reason: str) -> None:
        say(self.console, f"{name:<{CONFIG_WIDTH}} failed: {reason}", "red")


def run(call: Call) -> int:
    """Runs the rung that a command line of `triton_gemm.ladder.command` names; the exit status."""
    assert call.rung is not None
    console = Console()
    timed = torch.cuda.is_available() and not INTERPRETED and call.arch is None
    try:
        return (measured if timed else not_measured)(call, call.rung, console)
    except MistakeError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"error: no memory for the operands or the check: {error}".splitlines()[0], file=sys.stderr)
        return 2
    except DeviceLostError as lost:
        print(f"error: the GPU cannot be used any more {lost}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def measured(call: Call, rung: Rung, console: Console) -> int:
    """Times the configurations on the current GPU, each in turn with cuBLAS."""
    device = device_info(torch.device("cuda"))
    work = Work.of(call, rung, device)
    work.require_operands()
    M, N, K = work.shape
    problem = Problem(M, N, K, mode_of(rung.precision, work.dtype), layout=work.layout)
    cublas = providers.cublas(problem)
    budget_s = call.budget_s or BUDGET_S
    say(console, f"{work.title(work.shape)}, {device.name}", "bold")
    for sentence in _left_out(call, work):
        say(console, sentence)
    lines = Lines(console, TIMED)
    results: dict[GemmConfig, Result] = {}

    def compile_all(advance: Callable[[str], None]) -> None:
        laid = Operands(problem, {problem.out_dtype}, 1, empty=True)
        a, b, c = laid.arguments()[0]
        rungs_and_twins.compile_together([(rung, config) for config in work.configs], a, b, c)
        advance("compiled")

    def measure_all(advance: Callable[[str], None]) -> None:
        _show_timed(lines, CUBLAS, _measured(problem, [cublas], budget_s), problem)
        advance(CUBLAS)
        for config in work.configs:
            own = rungs_and_twins.configured_provider(rung, config, work.shape, work.dtype, work.layout)
            results[config] = _measured(problem, [cublas, own], budget_s)
            _show_timed(lines, spelled(config), results[config], problem)
            advance(spelled(config))

    tasks = [Task("compiling", 1, compile_all), Task("measuring", 1 + len(work.configs), measure_all)]
    progress.run(tasks, console)
    right = {config: result for config, result in results.items() if isinstance(result, Timed)}
    if len(work.configs) > 1 and right:
        best = min(right, key=lambda config: right[config].time_ms.median)
        say(console, "best:", "bold green")
        _show_timed(lines, spelled(best), right[best], problem, "bold green")
    return 0 if len(right) == len(results) else 1


def _measured(problem: Problem, subjects: Sequence[timer.Provider], budget_s: float) -> Result:
    """The last of `subjects`, in turn with the others."""
    results = timer.measure(problem, subjects, CUBLAS, budget_s, PACE)["providers"]
    result: Result = from_json(Timed | Result, results[subjects[-1].name])
    return result


def _show_timed(lines: Lines, name: str, result: Result, problem: Problem, style: str = "") -> None:
    if not isinstance(result, Timed):
        lines.failed(name, result.failed or result.absent or "")
        return
    ms = result.time_ms.median
    share = formats.percent(result.ratio.median) if result.ratio else None  # of cuBLAS, where that was right
    speed = [formats.number(ms, 4), formats.number(problem.flop / ms / 1e9), share]
    lines.show(name, [*speed, formats.error(result.norm), *_static_cells(result)], style)


def not_measured(call: Call, rung: Rung, console: Console) -> int:
    """The error in Triton's interpreter, and what the compiler makes of the configurations; no timings."""
    if INTERPRETED and call.arch is not None:
        raise MistakeError("--arch compiles, which TRITON_INTERPRET=1 forbids: unset it")
    if INTERPRETED and not rung.interpretable:
        raise MistakeError(f"{rung.id} is written in Gluon, which Triton's interpreter does not know")
    if call.budget_s is not None:
        raise MistakeError("--budget is for timing, and nothing is timed here")
    device = device_of_capability(call.arch or static.TUNED_CAPABILITY)
    work = Work.of(call, rung, device)
    if not INTERPRETED:
        work.require_operands()
    shape = work.shape if math.prod(work.shape) <= INTERPRETED_MOST else SMALL
    say(console, work.title(shape if INTERPRETED else work.shape), "bold")
    for sentence in (*_explained(call, work, shape, device), *_left_out(call, work)):
        say(console, sentence)
    lines = Lines(console, ("error",) if INTERPRETED else ("error", *STATIC))
    errors: dict[str, Interpreted] = {}  # by what the interpreter sees of a configuration
    failed = False

    def show(config: GemmConfig, facts: StaticFacts | None) -> None:
        nonlocal failed
        interpreted = errors.get(str(config.meta()))
        reason = (interpreted and interpreted.failed) or (facts and facts.failed)
        if reason:
            failed = True
            lines.failed(spelled(config), reason)
        else:
            error = formats.error(interpreted.norm if interpreted else None)
            lines.show(spelled(config), [error, *_static_cells(facts or Resources())])

    def interpret_all(advance: Callable[[str], None]) -> None:
        def done(key: str, row: Interpreted) -> None:
            if row.absent is not None:
                raise MistakeError(f"{rung.id}: {row.absent}")
            seen = by_key[key]
            errors[seen] = row
            for config in work.configs if INTERPRETED else ():
                if str(config.meta()) == seen:
                    show(config, None)
            advance(spelled(seen_apart[seen].config or rung.configs[0]))

        try:
            interpret.run(seen_apart.values(), done)
        except interpret.UnavailableError as error:
            say(console, f"error: none, since the interpreter does not run here ({error}).")

    def compile_all(advance: Callable[[str], None]) -> None:
        def done(key: str, facts: StaticFacts) -> None:
            show(jobs[key].config, facts)
            advance(spelled(jobs[key].config))

        static.compile_all(jobs.values(), done)

    seen_apart = {
        str(config.meta()): interpret.Job(rung, work.dtype, (*shape, 1.0, 0.0), work.layout, config)
        for config in work.configs
    }
    by_key = {job.key: seen for seen, job in seen_apart.items()}
    pending = [
        static.Job(rung, config, device.capability, False, work.shape, work.dtype, work.layout)
        for config in work.configs
    ]
    jobs = {job.key: job for job in pending}
    tasks = [Task("interpreting", len(seen_apart), interpret_all)] if rung.interpretable else []
    tasks += [] if INTERPRETED else [Task("compiling", len(jobs), compile_all)]
    progress.run(tasks, console)
    return 1 if failed else 0


def _explained(call: Call, work: Work, shape: Size, device: DeviceInfo) -> list[str]:
    """Why nothing is timed, and what there is."""
    if INTERPRETED:
        reason = "TRITON_INTERPRET=1 is set, so nothing is timed or compiled; unset it for registers and the like."
    elif call.arch is not None:
        reason = "Nothing is timed: --arch asks what the compiler makes of the rung."
    else:
        reason = "Nothing is timed: torch sees no CUDA GPU here."
    M, N, K = shape
    of_error = f"error: in Triton's interpreter at {M} x {N} x {K}, against fp64."
    if not work.rung.interpretable:
        of_error = "error: none, since Triton's interpreter does not know Gluon."
    of_facts = f"registers, shared memory, spills: compiled for {architecture(device.capability)}."
    return [reason, of_error] if INTERPRETED else [reason, of_error, of_facts]


def _left_out(call: Call, work: Work) -> list[str]:
    """That some of the rung's configurations are not tried."""
    count = len(work.rung.configs) - len(work.configs)
    if call.configs or not count:
        return []
    return [f"{count} of {len(work.rung.configs)} configurations are left out, as the autotuner does on such operands."]


def _static_cells(facts: Resources) -> list[Cell]:
    return [facts.registers, formats.kib(facts.shared), facts.spills]


def say(console: Console, text: str, style: str = "") -> None:
    """Prints a line as it is: not cut, not wrapped, no markup in it."""
    console.print(Text(text, style=style), soft_wrap=True)
