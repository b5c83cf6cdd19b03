"""One trial in service, step by step: a generator that goes on where what it waits for is so, and never waits itself.

It runs in a thread aside. What the GPU does for it is a graph that a call launches after its own kernels
(`runtime.turns`), or a copy on a stream of the package's own. A call does more for it twice: it says on what stream it
ran, and takes the trial's memory there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch

from ..compat import fills_what_is_empty, is_profiling
from ..hardware import driver, nvml
from ..hardware.device import DeviceInfo
from ..hardware.graphs import Mark, TimedGraph, launch, own_stream, relaxed, rest
from ..runtime import background, step, turns
from ..runtime.workspace import PER_THREAD
from ..tuning import journal_of
from ..tuning.conditions import Conditions, complaint
from ..tuning.journal import Journal
from . import block
from .candidates import Outcome, Ranked, TrialCandidate, ranked
from .halving import FEW, FINAL_ROUNDS, FINAL_ROUNDS_OF_FEW, Halving
from .statistics import LONGEST_US, Product, Tempo

COMPILED_S = 120.0  # until candidates' kernels are compiled: those that are not are left out then
LOADED_S = 1.0  # between modules that are loaded
FULL_S = 60.0  # until the memory that is free is read again
HANGS_S = 10.0  # after which a launch that has not ended may never end
BYTES_A_US = 1e6  # of memory that is filled and copied, about half of what an H100 moves
# CUDA errors that say nothing of what is launched: no memory, and captures of other threads (900 to 908).
OF_OTHERS = {2, *range(900, 909)}
log = logging.getLogger("triton_gemm.learning")

_T = TypeVar("_T")
Wait = Callable[[], bool] | None  # whether it can go on; None: it is to be tried later
Steps = Generator[Wait, None, _T]


@dataclass(frozen=True)
class Call:
    """A call that was just launched: its second operand, its stream, and what bits its policy asks for."""

    b: torch.Tensor
    stream: int
    bits: str


class NoTrialError(Exception):
    """There can be no trial now; the text says why."""


class Trial:
    """A trial of a product whose calls run `plan`."""

    journal: Journal
    layout: block.Layout
    operands: block.Operands

    def __init__(
        self,
        product: Product,
        plan: Any,
        device: DeviceInfo,
        l2: int,  # bytes of the cache
        tempo: Tempo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.product, self.plan, self.device, self.l2 = product, plan, device, l2
        self.tempo, self.clock = tempo, clock
        self.stream: int | None = None  # of the calls after which it goes on, once it does
        # Whether it needs memory and launches now; whether it may have them, as one trial at a time; whether the next
        # process starts with what it finds.
        self.is_prepared = self.has_turn = self.keeps = False
        self.candidates: list[TrialCandidate] = []
        self.later: list[Ranked] = []  # what is timed another time
        self.graphs: list[TimedGraph] = []
        self.begun = False  # whether the journal says that one is launched for the first time
        self.at = clock()  # when it went on last
        self.launched: tuple[TimedGraph, float] | None = None  # a graph that has not ended, and when it was launched
        self.requested: Callable[[Call], Any] | None = None  # what a call of its product is to do
        self.hears = False  # whether a call is to report its stream
        self.found: Any = None  # and what came of that
        self.steps = self._run()
        self.wait: Wait = None

    @property
    def needs_call(self) -> bool:
        return self.requested is not None or self.hears or (self.has_turn and turns.job.until > 0)

    @property
    def has_own_b(self) -> bool:
        return "operands" in vars(self) and self.operands.own_address is not None

    def go_on(self) -> Outcome | None:
        """As far as it can; what was found, at the end. Raises NoTrialError, and what the driver says of a broken GPU.
        Other threads may have Python meanwhile."""
        wait = self.wait
        try:
            while wait is None or wait():
                self.at = self.clock()
                self.wait = wait = next(self.steps)
                rest()
                if wait is None:
                    break
        except StopIteration as end:
            found: Outcome = end.value
            return found
        return None

    def take(self, call: Call) -> None:
        """In the thread of a call that was just launched, if it is `requested`."""
        if self.requested is not None and call.stream == self.stream:
            try:
                self.found = self.requested(call)
            except Exception as error:
                self.found = error
            self.requested = None

    def close(self) -> None:
        """Gives up what it holds. Nobody is in `go_on` or `take`."""
        if self.has_turn:
            turns.job.end()
        self.requested = None
        try:
            self.steps.close()
            if self.begun and not self._hangs():  # else it is blamed once the process has ended
                self.journal.end()
        finally:
            self.begun = False
            with relaxed():
                while self.graphs:
                    self.graphs.pop().close()
            self.candidates.clear()
            vars(self).pop("operands", None)  # what else refers to a trial may end later

    def _hangs(self) -> bool:
        graph, since = self.launched or (None, self.clock())
        with relaxed():
            return self.clock() > since + HANGS_S and graph is not None and graph.read() is None

    # --- The steps ---

    def _run(self) -> Steps[Outcome]:
        yield from self._load_all()
        if len(self.candidates) > 1:
            yield from self._make_operands()
        for candidate in list(self.candidates) if len(self.candidates) > 1 else ():
            yield from self._check(candidate)
        incumbent = self.candidates[0]
        final_rounds = FINAL_ROUNDS_OF_FEW if self.later else FINAL_ROUNDS
        halving = Halving([x.us / incumbent.us for x in self.candidates], final_rounds, rest)
        while halving.winner is None:
            which = halving.next()
            halving.add(which, (yield from self._sample(self.candidates[which])))
            self.product.us = halving.us(0)
        if not halving.samples[0]:
            return Outcome(None, incumbent.ranked, incumbent.us, incumbent.us, 0, 1)
        if (why := unfit(nvml.slowed(self.device.uuid))) is not None:
            raise NoTrialError(why)
        winner = halving.winner
        if self.later and not winner:  # whoever came near has another chance
            self.later[:0] = [self.candidates[i].ranked for i in halving.left[1:]]
        best, samples = self.candidates[winner], len(halving.samples[winner])
        plan = best.plan if winner else None
        return Outcome(plan, best.ranked, halving.us(winner), halving.us(0), samples, len(self.candidates))

    def _load_all(self) -> Steps[None]:
        """The incumbent and what is timed against it, loaded: workers compile what kits do not have."""
        if (why := unfit(nvml.slowed(self.device.uuid))) is not None:
            raise NoTrialError(why)
        problem = self.product.problem
        self.journal = journal_of(self.device)
        rest()
        own, *others = self.product.ranked or (yield from self._ranked())
        if not self.product.ranked:
            others, self.later = others[: FEW - 1], others[FEW - 1 :]
        self.candidates, coming = [TrialCandidate(own, own.us, plan=self.plan)], []
        self._has_loaded(own.modules)
        for x in others:
            if self.journal.failure(problem, x.selection) is None:
                is_there = x.is_there
                wanted = None if is_there else background.order(self.plan, self.device, x.selection, x.binaries)
                coming.append(TrialCandidate(x, x.us, wanted))
            rest()
        deadline = self.clock() + COMPILED_S
        while coming:
            found = self._next(coming, deadline)
            if found is None:
                yield lambda: self._next(coming, deadline) is not None
            else:
                coming.remove(found)
                self._load(found)
        self.candidates[1:] = sorted(self.candidates[1:], key=lambda x: x.us)

    def _ranked(self) -> Steps[list[Ranked]]:
        of = self.product.problem, self.device, self.product.selection
        question = background.submit(self.plan, self.device, ranked, *of)
        if question is None:
            return ranked(*of)
        yield lambda: question.error is not None
        if question.answer is None:
            raise NoTrialError(f"its candidates are not known: {question.error}")
        found: list[Ranked] = question.answer
        return found

    def _next(self, coming: Sequence[TrialCandidate], deadline: float) -> TrialCandidate | None:
        """Which may be loaded now. A module that is loaded already is not waited for; of others one comes in LOADED_S.
        After the deadline what is not compiled is given up."""
        now = self.clock()
        found = [x for x in coming if x.is_compiled or now >= deadline]
        may_load = now >= self.tempo.loaded + LOADED_S
        return next(
            (x for x in found if may_load or self.tempo.modules.issuperset(self._named(x.ranked.modules))), None
        )

    def _named(self, modules: tuple[str, ...]) -> list[tuple[int, str]]:
        return [(self.product.index, x) for x in modules]

    def _has_loaded(self, modules: tuple[str, ...]) -> None:
        self.tempo.modules.update(self._named(modules))

    def _load(self, candidate: TrialCandidate) -> None:
        modules, wanted = step.modules(), candidate.wanted
        candidate.plan = self.plan.like(candidate.selection)
        rest()
        if not candidate.plan.load(cached=wanted is not None and wanted.error == ""):
            log.debug("%s is left out, not compiled: %s", candidate.selection, None if wanted is None else wanted.error)
            return
        self.candidates.append(candidate)
        self._has_loaded(candidate.ranked.modules)
        if step.modules() > modules:
            self.tempo.loaded = self.clock()

    def _at_call(self, job: Callable[[Call], _T]) -> Steps[_T]:
        """What a job gives that a call of the product does, on the trial's stream."""
        self.requested = job
        yield lambda: self.requested is None
        found, self.found = self.found, None
        if isinstance(found, torch.OutOfMemoryError):
            raise NoTrialError("torch has less memory than it had")
        if isinstance(found, Exception):
            raise found
        return cast(_T, found)

    def _stream_of_calls(self) -> Steps[int]:
        of_plans = [plan.turn for plan in self.product.plans]
        for turn in of_plans:
            turn.request_stream()
        self.hears = True
        yield lambda: any(turn.stream is not None for turn in of_plans)
        self.hears = False
        found: int = next(turn.stream for turn in of_plans if turn.stream is not None)
        if found == PER_THREAD:
            raise NoTrialError("each thread has that stream for itself")
        return found

    def _afford(self, us: float) -> Steps[None]:
        if not self.tempo.allows(us):
            yield partial(self.tempo.allows, us)
        self.tempo.spent += us

    def _make_operands(self) -> Steps[None]:
        """Takes the block and fills it."""
        index, tempo = self.product.index, self.tempo
        layout = block.Layout.of(self.product.problem, [x.plan for x in self.candidates], self.l2)
        if layout is None:
            raise NoTrialError(f"its operands take more than {block.LIMIT >> 20} MiB")
        self.is_prepared = True
        yield lambda: self.has_turn
        self.stream = yield from self._stream_of_calls()
        is_free = self.clock() >= tempo.full_until and block.is_free(index, self.stream, layout.nbytes)
        if not is_free:
            tempo.full_until = max(tempo.full_until, self.clock() + FULL_S)
            raise NoTrialError(f"torch has no {layout.nbytes >> 20} MiB that are free, or the GPU not twice as many")

        reserved, mark = torch.cuda.memory_reserved(index), Mark()

        def allocate(call: Call) -> tuple[torch.Tensor, int, str]:
            if fills_what_is_empty():
                raise NoTrialError("torch fills what is allocated")
            with relaxed():
                memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.plan.device)
                mark.set(call.stream)
            return memory, call.b.data_ptr(), call.bits

        memory, address, bits = yield from self._at_call(allocate)
        if torch.cuda.memory_reserved(index) > reserved:
            raise NoTrialError("torch had to ask the driver for its memory, or another thread had")
        self.keeps = bits == "same"
        self.operands = block.Operands(self.product.problem, layout, memory, address if layout.own else None)
        del memory
        if not mark.passed():  # what used the memory before has not ended
            yield mark.passed
        yield from self._afford(layout.nbytes / BYTES_A_US)
        self.operands.fill(own_stream(index))

    def _check(self, candidate: TrialCandidate) -> Steps[None]:
        """Makes a candidate's graphs, launches it for the first time, and compares its result with the incumbent's."""
        problem, operands, own = self.product.problem, self.operands, own_stream(self.product.index)
        is_incumbent, why = candidate is self.candidates[0], None
        into = "expected" if is_incumbent else ("c", 0)
        try:
            candidate.count = launches_of(candidate.us)
            first = self._graph(candidate, [operands.values(candidate.plan, 0, into)])
            candidate.graph = self._graph(
                candidate, [operands.values(candidate.plan, i) for i in range(candidate.count)]
            )
            operands.prepare(into, own)
            yield from self._afford(candidate.us + 2 * operands.layout.places["expected"][1] / BYTES_A_US)
            if not is_incumbent:
                self.journal.begin(problem, candidate.selection)
                self.begun = True
            yield from self._launch(first)
            if not (is_incumbent or operands.is_as_expected(into, own)):
                why = "its bits are not those of the incumbent"
        except RuntimeError as error:
            why = f"{error}".splitlines()[0]
        if is_incumbent and why is not None:
            raise NoTrialError(why)
        was_launched, self.begun = self.begun, False
        if was_launched:
            self.journal.end()
        if why is not None:
            if operands.own_address is not None:
                raise NoTrialError(f"{why}: the application may have written its weight")
            if was_launched:
                self.journal.failed(problem, candidate.selection, why)
            log.debug("%s is left out: %s", candidate.selection, why)
            self.candidates.remove(candidate)

    def _graph(self, candidate: TrialCandidate, launches: Sequence[tuple[Any, ...]]) -> TimedGraph:
        frames = []
        for values in launches:
            rest()
            for one in candidate.plan.steps:
                frames.append(step.Frame(one.entry))
                if error := frames[-1].fill(values):
                    raise driver.DriverError("cuTensorMapReplaceAddress", error)
        self.graphs.append(TimedGraph(self.product.index, [(x.config, x.function, x.pointers) for x in frames]))
        return self.graphs[-1]

    def _launch(self, graph: TimedGraph) -> Steps[float]:
        """Has a call launch a graph; the microseconds that it has taken."""
        job, stream = turns.job, self.stream
        assert stream is not None
        if self.has_own_b:
            error = yield from self._at_call(partial(self._beside, graph))
        else:
            while True:
                yield lambda: not (background.is_held() or is_profiling())
                job.begin(self.product.index, stream, graph.graph, graph.ended)
                if background.is_held():  # since that was read
                    job.withdraw()
                yield lambda: job.launched >= 0 or (job.withdrawn and job.is_idle())
                if job.launched >= 0:  # else it was withdrawn, by `background.held`
                    break
            error = job.launched
        if error:
            refused = driver.DriverError("cuGraphLaunch", error)
            raise NoTrialError(f"{refused}") if error in OF_OTHERS else refused
        self.launched = graph, self.clock()
        while (us := graph.read()) is None:
            yield None
        self.launched = None
        return us

    def _beside(self, graph: TimedGraph, call: Call) -> int:
        """Launches a graph that reads the call's own b; the driver's error, or 0."""
        if call.b.data_ptr() != self.operands.own_address:
            raise NoTrialError("its weight is elsewhere now")
        return launch(graph.graph, graph.ended, call.stream)

    def _sample(self, candidate: TrialCandidate) -> Steps[float]:
        """Microseconds of a launch."""
        yield from self._afford(candidate.count * candidate.us)
        candidate.us = (yield from self._launch(candidate.graph)) / candidate.count
        return candidate.us


def launches_of(us: float) -> int:
    """Of a sample of a kernel that takes so long."""
    return max(1, min(block.LAUNCHES, int(LONGEST_US / us)))


def unfit(slowed: tuple[str, ...]) -> str | None:
    """Why a GPU is not fit to be timed whose driver says that."""
    now = Conditions(1.0, slowed=slowed)
    return complaint(now, now, 1.0)
