"""The GPU as a bench: compiles candidates, checks what they compute, and times them by the one timer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from statistics import median
from typing import Literal, TypeGuard, cast

import torch

from ..compat import loading
from ..hardware import nvml
from ..hardware.device import device_info
from ..problem import GemmProblem
from ..runtime.compiling import Compiler
from ..runtime.plan import GemmPlan
from ..runtime.policies import by_model
from ..runtime.worker import Worker
from ..runtime.workspace import release_captured
from ..selection.select import Selection
from ..suites.problems import gemm_problem
from ..suites.shapes import Shape
from ..tables.files import Bits
from . import timing
from .conditions import Conditions
from .journal import Journal
from .of_torch import torchs_product
from .operands import BETA, Operands, operands, sets_of
from .report import Measure
from .timing import DeviceLostError
from .trials import FailedError
from .truth import distance, relative_errors

LIMIT_S = 10.0  # of a candidate's first launch
REPLAY_MS = 4.0
QUEUE = (20, 200)  # calls in a row of "eager", at least and at most
REFERENCE = 1024  # sides of the product that is timed before and after: too small to meet the power limit
REPLAYS = 21  # of it
PATIENCE_S, STRETCH_S = 0.4, 0.05  # for the clocks to settle
Torch = Literal["torch"]
TORCH: Torch = "torch"  # as a candidate: torch's own GEMM
Candidate = Selection | Torch
Run = Callable[[Operands], torch.Tensor]  # launches a product, and gives the tensor that will have the result


class Gpu:
    """One GPU, for as long as it is tuned on: its compiler, and what says whether it is fit to be measured."""

    def __init__(self, device: torch.device, journal: Journal, bits: Bits, measure: Measure) -> None:
        self.device, self.info, self.journal = device, device_info(device), journal
        self.bits, self.measure = bits, measure
        target = self.info, torch.cuda.get_device_capability(device)  # the GPU may be treated as an older one
        self.compiler = Compiler(self._compile, partial(Worker, target))
        self.plans: dict[tuple[GemmProblem, Selection], GemmPlan | None] = {}  # None before it is compiled
        self.reference: timing.Replay | None = None
        self.held: tuple[object, ...] = ()  # what the reference product reads and writes: a graph keeps addresses only

    def now(self) -> float:
        return time.monotonic()

    def prepare(self, problem: GemmProblem, candidates: Sequence[Selection]) -> None:
        """Has candidates compiled, after those that came before, and then makes the reference product, so that no
        product's share of the budget pays for it."""
        new = [candidate for candidate in candidates if (problem, candidate) not in self.plans]
        self.plans |= {(problem, candidate): None for candidate in new}
        self.compiler.add([(problem, candidate) for candidate in new])
        with suppress(torch.OutOfMemoryError):  # reported later by the bench, which allocates the operands
            self._reference()

    def _compile(self, job: object) -> None:
        """Plans and compiles a candidate: what cannot be planned has failed like what cannot be compiled."""
        torch.cuda.set_device(self.device)  # the current device is a thread's own
        problem, candidate = cast(tuple[GemmProblem, Selection], job)
        plan = self.plans[problem, candidate] = GemmPlan(problem, candidate, self.device)
        plan.compile()

    def ready(self, problem: GemmProblem, candidates: Sequence[Selection]) -> bool:
        """Whether all of these, which are `prepare`d, are compiled or have failed."""
        return all(self.compiler.done((problem, candidate)) for candidate in candidates)

    def pause(self, seconds: float) -> None:
        self.compiler.pause(seconds)

    def bench(self, problem: GemmProblem, candidates: Sequence[Selection], seed: int) -> Bench:
        """torch.OutOfMemoryError where there is too little memory for the operands."""
        self.prepare(problem, candidates)
        return Bench(self, problem, candidates[0], seed)

    def forget(self, problem: GemmProblem) -> None:
        """Its candidates will not be timed again: those that nothing compiles yet are not compiled, so that the next
        problem's need not wait for them."""
        keys = [key for key in self.plans if key[0] == problem]
        cancelled = self.compiler.cancel(keys)
        for key in keys:
            if key in cancelled or self.compiler.done(key):
                del self.plans[key]

    def conditions(self) -> Conditions:
        replay = self._reference()
        timing.settle(replay.start, PATIENCE_S, STRETCH_S)
        reads = [replay.start() for _ in range(REPLAYS)]
        mhz, slowed = nvml.sm_clock(self.info.uuid), nvml.slowed(self.info.uuid)
        times = sorted(read() for read in reads)
        return Conditions(median(times), mhz, slowed, times[REPLAYS * 4 // 5] / times[REPLAYS // 5])

    def _reference(self) -> timing.Replay:
        if self.reference is not None:
            return self.reference
        problem = gemm_problem(Shape(REFERENCE, REFERENCE, REFERENCE), "bf16")
        plan = GemmPlan(problem, by_model(problem, self.info), self.device)
        a, b, c = operands(problem, 1, self.device)[0]
        self.held = (plan, a, b, c)
        call = partial(plan.run, a, b, c)
        repeats = timing.repeats(timing.once_ms(call), 1, 1.0)
        with loading:
            self.reference = timing.Replay([call], repeats)
        return self.reference

    def close(self) -> None:
        self.compiler.close()


class Bench:
    """One problem on a GPU, with its operands; as `trials.Bench` has it."""

    def __init__(self, gpu: Gpu, problem: GemmProblem, incumbent: Selection, seed: int) -> None:
        self.gpu, self.problem, self.incumbent = gpu, problem, incumbent
        l2 = torch.cuda.get_device_properties(gpu.device).L2_cache_size
        count = sets_of(problem, l2, torch.cuda.mem_get_info(gpu.device)[0])
        self.sets = operands(problem, count, gpu.device, seed)
        self.c = self.sets[0][2].clone() if problem.has_beta else None
        self.expected: torch.Tensor | None = None  # the incumbent's result
        self.torchs: torch.Tensor | None = None  # and torch's
        self.starts: dict[Candidate, timing.Stopwatch] = {}
        self.round_ms: dict[Candidate, float] = {}

    def now(self) -> float:
        return self.gpu.now()

    def pause(self, seconds: float) -> None:
        self.gpu.compiler.pause(seconds)

    def ready(self, candidate: Candidate) -> bool:
        if self.gpu.measure == "eager":  # compiling takes Python's time, which is measured
            return all(self.gpu.compiler.done(key) for key in self.gpu.plans if key[0] == self.problem)
        return candidate == TORCH or self.gpu.compiler.done((self.problem, candidate))

    def prepare(self, candidate: Candidate) -> float:
        """Torch's product, too: FailedError where torch has none."""
        run = self._of_torch() if candidate == TORCH else self._compiled(candidate)
        if self._is_optional(candidate):
            self.gpu.journal.begin(self.problem, candidate)
        try:
            why = self._check(candidate, self._launch(run, candidate))
            if why is None:
                return self._make_ready(run, candidate)
        except DeviceLostError:
            raise
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise FailedError(f"{error}".splitlines()[0]) from None
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            if timing.lost(self.gpu.device) is not None:
                self._lost(candidate, why)
        finally:
            self.gpu.journal.end()
        return self._fail(candidate, why)

    def _compiled(self, candidate: Selection) -> Run:
        key = (self.problem, candidate)
        if candidate == self.incumbent:  # nothing is timed yet that this process could disturb
            self.gpu.compiler.compile_here(key)
        while not self.gpu.compiler.done(key):
            self.gpu.compiler.pause(0.1)
        why = self.gpu.compiler.failure(key)
        if why is not None:
            self._fail(candidate, why)
        plan = self.gpu.plans[key]
        assert plan is not None
        return partial(self._run, plan)

    def _of_torch(self) -> Run:
        product, why = torchs_product(self.problem)
        if product is None:
            raise FailedError(why)
        beta = BETA if self.problem.has_beta else 0.0
        return lambda of: product(*of, beta=beta)

    def _is_optional(self, candidate: Candidate) -> TypeGuard[Selection]:
        """Whether tuning can leave it out. The journal records failures of such candidates only: the model's choice and
        torch's GEMM are what users run anyway."""
        return candidate not in (self.incumbent, TORCH)

    def _fail(self, candidate: Candidate, why: str) -> float:
        if self._is_optional(candidate):
            self.gpu.journal.failed(self.problem, candidate, why)
        raise FailedError(f"torch: {why}" if candidate == TORCH else why)

    def _launch(self, run: Run, candidate: Candidate) -> torch.Tensor:
        """For the first time, and waits for at most LIMIT_S seconds; the result."""
        first = self.sets[0]
        if self.c is not None:
            first[2].copy_(self.c)
        else:
            first[2].fill_(math.nan if first[2].is_floating_point() else -(2**31))
        torch.cuda.synchronize(self.gpu.device)
        result = run(first)
        self._wait([(candidate, _recorded())], LIMIT_S)
        return result

    def _wait(self, launched: Sequence[tuple[Candidate, torch.cuda.Event]], limit_s: float) -> None:
        """Until the last of what was launched, in this order, has ended; the first that has not is to blame."""
        deadline = time.monotonic() + limit_s
        for candidate, ended in launched:
            try:
                while not ended.query():
                    if time.monotonic() > deadline:
                        self._lost(candidate, f"it runs for more than {limit_s:.3g} s")
                    time.sleep(0)
            except DeviceLostError:
                raise
            except RuntimeError as error:
                self._lost(candidate, f"{error}".splitlines()[0])

    def _run(self, plan: GemmPlan, of: Operands) -> torch.Tensor:
        a, b, c, *auxiliary = of
        plan.run(a, b, c, tuple(auxiliary), 1.0, BETA if self.problem.has_beta else 0.0)
        return c

    def _check(self, candidate: Candidate, c: torch.Tensor) -> str | None:
        """Why what it has computed is wrong, or None. Of torch's own result `errors` says how wrong it is."""
        if not self._is_optional(candidate):
            if c.is_floating_point() and not bool(torch.isfinite(c).all()):
                return "results are not finite (C holds NaN before the call)"
            if candidate == TORCH:
                self.torchs = c.clone()
            else:
                self.expected = c.clone()
            return None
        assert self.expected is not None
        if torch.equal(c, self.expected):
            return None
        if self.gpu.bits == "same":
            return "its bits are not those of the model's choice"
        off = distance(c, self.expected)
        bound = tolerance(self.problem)
        return (
            None if off <= bound else f"its result is off by {off:.3g} of the model's choice, {bound:.3g} is rounding"
        )

    def errors(self) -> tuple[float, float]:
        """Torch's and the incumbent's relative errors against fp64, once both are prepared; NaN where there is too
        little memory to compute them."""
        assert self.torchs is not None and self.expected is not None
        try:
            torchs, ours = relative_errors(self.problem, self.sets[0], self.c, (self.torchs, self.expected))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.nan, math.nan
        return torchs, ours

    def _make_ready(self, run: Run, candidate: Candidate) -> float:
        calls: list[Callable[[], object]] = [partial(run, of) for of in self.sets]
        with loading:  # what other threads load meanwhile keeps this one from launching
            estimate = timing.once_ms(calls[-1])
        if self.gpu.measure == "eager":
            least, most = QUEUE
            length = max(least, min(most, round(REPLAY_MS / estimate)))
            self.starts[candidate] = timing.Queue(calls, length, drain=True).start
        else:
            length = timing.repeats(estimate, len(calls), REPLAY_MS)
            with loading:  # what else is compiled is loaded before the capture, or after
                self.starts[candidate] = timing.Replay(calls, length).start
        self.round_ms[candidate] = estimate * length
        return estimate

    def time(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        launched: list[tuple[Candidate, torch.cuda.Event]] = []
        limit_s = LIMIT_S + 10 * rounds * self.round_s(candidates)

        def watched(candidate: Candidate) -> Callable[[], float]:
            read = self.starts[candidate]()
            launched.append((candidate, _recorded()))

            def wait() -> float:
                self._wait(launched, limit_s)
                launched.clear()
                return read()

            return wait

        eager = self.gpu.measure == "eager"
        with timing.no_garbage() if eager else nullcontext():
            times = timing.interleave(
                {str(i): partial(watched, candidate) for i, candidate in enumerate(candidates)}, rounds
            )
        return list(times.values())

    def round_s(self, candidates: Sequence[Candidate]) -> float:
        return sum(self.round_ms[candidate] for candidate in candidates) / 1000

    def drop(self, candidate: Candidate) -> None:
        self.starts.pop(candidate, None)

    def close(self) -> None:
        """Gives its memory back."""
        self.starts.clear()
        self.sets.clear()
        release_captured()
        self.c = self.expected = self.torchs = None

    def _lost(self, candidate: Candidate, why: str) -> None:
        what = candidate if candidate == TORCH else f"{candidate.kernel} {candidate.config}"
        message = f"the GPU cannot be used any more in this process: {what}: {why}"
        if self._is_optional(candidate):
            self.gpu.journal.failed(self.problem, candidate, why)
            message += ". Another process leaves it out; what was tuned before is kept, and tuning goes on from there "
            message += "with resume=True"
        raise DeviceLostError(message)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def tolerance(problem: GemmProblem) -> float:
    """How far results of other sums may be apart, as a share of their norm: eight times what rounding makes of sums of
    random numbers, whose errors grow as the square root of K, and of C's own rounding."""
    arithmetic = problem.arithmetic
    if not problem.out_dtype.is_floating_point:
        return 0.0
    of_sums = max(arithmetic.unit_roundoff, arithmetic.cut, arithmetic.operand_error**2)
    of_c = torch.finfo(problem.out_dtype).eps / 2
    return 8 * (math.sqrt(max(1, problem.K)) * of_sums + of_c)
