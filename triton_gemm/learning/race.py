"""One race in service, step by step: a generator that goes on at each turn on its stream, and never waits.

What takes the host time is done aside. What the GPU does is queued on the caller's stream, after its call, a sample at
a time, and looked at in a later turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ..hardware import driver, nvml
from ..hardware.device import DeviceInfo
from ..hardware.graphs import Mark, TimedGraph, own_stream
from ..runtime import background, kits, step
from ..tuning import journal_of
from ..tuning.conditions import Conditions, complaint
from ..tuning.journal import Journal
from . import block
from .candidates import candidates
from .halving import Halving
from .statistics import LONGEST_US, Product, Tempo

COMPILED_S = 120.0  # until candidates' kernels are compiled: those that are not are left out then
LOADED_S = 1.0  # between modules that are loaded
FULL_S = 60.0  # until it is looked again whether there is memory
BYTES_A_US = 1e6  # of memory that is filled and compared, about half of what an H100 moves
log = logging.getLogger("triton_gemm.learning")

_T = TypeVar("_T")
Steps = Generator[None, "Call", _T]


@dataclass(frozen=True)
class Call:
    """A call that was just launched: of what product, its second operand and its stream."""

    product: Product
    b: torch.Tensor
    stream: int


@dataclass(frozen=True)
class Outcome:
    """What a race has found. plan: the winner's, or None where the incumbent stays; us: of the winner, and before_us of
    the incumbent, in the same places; candidates: that were timed, with the incumbent."""

    plan: Any
    us: float
    before_us: float
    samples: int
    candidates: int


class NoRaceError(Exception):
    """There can be no race now; the text says why."""


@dataclass(eq=False)
class Entrant:
    """What is raced. us: of a launch, by the model and then by the last sample; wanted: its compilation, if it needs
    one; values: of the launch whose result is compared; count: launches of a sample; graph: of these."""

    plan: Any
    us: float
    wanted: Any = None
    values: tuple[Any, ...] = ()
    count: int = 0
    graph: Any = None


class Race:
    """Of a product whose calls run `plan` on a stream. l2: bytes of the cache; ask: has another thread do a job."""

    journal: Journal
    operands: block.Operands
    flag: torch.Tensor
    comparison: list[Callable[[], object]]

    def __init__(
        self,
        product: Product,
        plan: Any,
        stream: int,
        device: DeviceInfo,
        l2: int,
        tempo: Tempo,
        ask: Callable[[Callable[[], Any]], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.product, self.plan, self.stream, self.device, self.l2 = product, plan, stream, device, l2
        self.tempo, self.ask, self.clock = tempo, ask, clock
        self.entrants: list[Entrant] = []
        self.graphs: list[TimedGraph] = []
        self.begun = False  # whether the journal says that one is launched for the first time
        self.at = clock()  # of the last call of its own product
        self.steps = self._run()
        next(self.steps)

    def is_on(self, index: int, stream: int) -> bool:
        return (index, stream) == (self.product.index, self.stream)

    def step(self, call: Call) -> Outcome | None:
        """Goes on, after a call on the race's stream; what was found, at the end. Raises NoRaceError, and what the
        driver says of a broken GPU."""
        if call.product is self.product:
            self.at = self.clock()
        try:
            self.steps.send(call)
        except StopIteration as end:
            found: Outcome = end.value
            return found
        return None

    def close(self) -> None:
        """Gives up what it holds."""
        self.steps.close()
        self.tempo.leave(self)
        if self.begun:
            self.journal.end()
        while self.graphs:
            self.ask(self.graphs.pop().close)
        self.entrants.clear()
        for held in ("operands", "comparison"):  # what else refers to a race may end later
            vars(self).pop(held, None)

    # --- The steps ---

    def _run(self) -> Steps[Outcome]:
        call = yield
        self.entrants = yield from self._aside(self._enter)
        deadline = self.clock() + COMPILED_S
        for entrant in self.entrants[1:]:
            yield from self._load(entrant, deadline)
        while call.product is not self.product or not self.tempo.enter(self):  # there is memory for one race
            call = yield
        if len(self.entrants) > 1:
            yield from self._make_operands(call)
        for entrant in list(self.entrants) if len(self.entrants) > 1 else ():
            yield from self._check(entrant)
        incumbent = self.entrants[0]
        halving = Halving([x.us / incumbent.us for x in self.entrants])
        while halving.winner is None:
            which = halving.next()
            halving.add(which, (yield from self._sample(self.entrants[which])))
            self.product.us = halving.us(0)
        if not halving.samples[0]:
            return Outcome(None, incumbent.us, incumbent.us, 0, 1)
        if (why := unfit((yield from self._aside(partial(nvml.slowed, self.device.uuid))))) is not None:
            raise NoRaceError(why)
        winner = halving.winner
        plan = self.entrants[winner].plan if winner else None
        samples = len(halving.samples[winner])
        return Outcome(plan, halving.us(winner), halving.us(0), samples, len(self.entrants))

    def _enter(self) -> list[Entrant]:
        """The incumbent and what is raced against it, which workers compile if kits do not have it. Done aside."""
        if (why := unfit(nvml.slowed(self.device.uuid))) is not None:
            raise NoRaceError(why)
        problem = self.product.problem
        self.journal = journal_of(self.device)
        self.flag = torch.zeros((), dtype=torch.bool, pin_memory=torch.cuda.is_available())
        found: list[Entrant] = []
        for us, selection in candidates(problem, self.device, self.product.selection):
            if not found:
                found.append(Entrant(self.plan, us))
            elif self.journal.failure(problem, selection) is None:
                plan = self.plan.like(selection)
                is_there = kits.serves(problem, self.device, selection)
                found.append(Entrant(plan, us, None if is_there else background.order(plan, self.device)))
                time.sleep(0)  # other threads may have Python now
        return found

    def _aside(self, job: Callable[[], _T]) -> Steps[_T]:
        """What a job gives that another thread does."""
        future = self.ask(job)
        while not future.done():
            yield
        found: _T = future.result()
        return found

    def _afford(self, us: float) -> Steps[None]:
        while not self.tempo.allows(us):
            yield
        self.tempo.spent += us
        if not self.operands.is_whole():
            raise NoRaceError("the memory of its weight was freed")

    def _drop(self, entrant: Entrant, why: str) -> None:
        log.debug("%s is left out: %s", entrant.plan.selection, why)
        self.entrants.remove(entrant)

    def _load(self, entrant: Entrant, deadline: float) -> Steps[None]:
        """Loads its kernels, at most one module in LOADED_S."""
        wanted = entrant.wanted
        while wanted is not None and wanted.error is None and self.clock() < deadline:
            yield
        while self.clock() < self.tempo.loaded + LOADED_S:
            yield
        modules = step.modules()
        if not (yield from self._aside(partial(entrant.plan.load, cached=wanted is not None and wanted.error == ""))):
            self._drop(entrant, "it is not compiled" if wanted is None else f"it is not compiled: {wanted.error}")
        elif step.modules() > modules:
            self.tempo.loaded = self.clock()

    def _make_operands(self, call: Call) -> Steps[None]:
        """Takes the block and fills it."""
        index, problem, tempo = self.product.index, self.product.problem, self.tempo
        layout = block.Layout.of(problem, [x.plan for x in self.entrants], self.l2)
        if layout is None:
            raise NoRaceError(f"its operands take more than {block.LIMIT >> 20} MiB")
        is_free = self.clock() >= tempo.full_until
        if is_free:
            is_free = yield from self._aside(partial(block.is_free, index, self.stream, layout.nbytes))
            tempo.full_until = self.clock() + (0.0 if is_free else FULL_S)
        if not is_free:
            raise NoRaceError(f"torch has no {layout.nbytes >> 20} MiB that are free, or the GPU not twice as many")
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.plan.device)
        self.operands = block.Operands(problem, layout, memory, call.b if layout.own else None)
        self.mark = Mark()
        self.mark.set(self.stream)
        while not self.mark.passed():  # what used the memory before has ended
            yield
        yield from self._afford(layout.nbytes / BYTES_A_US)
        self.comparison = yield from self._aside(self._fill)

    def _fill(self) -> list[Callable[[], object]]:
        """Fills the operands, and compares two results, so that no call waits for the kernels of these. Done aside, on
        a stream of its own."""
        operands = self.operands  # whose memory is nobody else's until the stream has ended, also where the race ends
        stream = torch.cuda.ExternalStream(own_stream(self.product.index), self.plan.device)
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                comparison = operands.comparison(self.flag)
                operands.fill()
                for key in ("expected", ("c", 0)):
                    operands.prepare(key)
                for compare in comparison:
                    compare()
        finally:
            stream.synchronize()
        return comparison

    def _check(self, entrant: Entrant) -> Steps[None]:
        """Makes an entrant's graph, launches it for the first time, and compares its result with the incumbent's."""
        problem, selection, operands = self.product.problem, entrant.plan.selection, self.operands
        is_incumbent = entrant is self.entrants[0]
        into, why = "expected" if is_incumbent else ("c", 0), None
        try:
            entrant.graph = yield from self._aside(partial(self._graph, entrant, into))
            if not is_incumbent:
                yield from self._aside(partial(self.journal.begin, problem, selection))
                self.begun = True
            yield from self._afford(entrant.us + 4 * operands.layout.places["expected"][1] / BYTES_A_US)
            operands.prepare(into)
            yield
            launch(entrant.plan, entrant.values, self.stream)
            yield
            for compare in () if is_incumbent else self.comparison:
                compare()
                yield
            self.mark.set(self.stream)
            yield
            while not self.mark.passed():
                yield
            if not is_incumbent and bool(self.flag):
                why = "its bits are not those of the incumbent"
        except RuntimeError as error:
            why = f"{error}".splitlines()[0]
        if is_incumbent and why is not None:
            raise NoRaceError(why)
        if not is_incumbent:
            yield from self._aside(self.journal.end)
            self.begun = False
        if why is not None:
            if operands.own_b is None:  # which the application may have written meanwhile
                yield from self._aside(partial(self.journal.failed, problem, selection, why))
            self._drop(entrant, why)

    def _graph(self, entrant: Entrant, into: Any) -> TimedGraph:
        """A sample: as many launches as LONGEST_US allow, of one set of operands after another. Done aside."""
        entrant.values, entrant.count = self.operands.values(entrant.plan, 0, into), launches_of(entrant.us)
        frames = []
        for number in range(entrant.count):
            values = self.operands.values(entrant.plan, number)
            time.sleep(0)
            for one in entrant.plan.steps:
                frames.append(step.Frame(one.entry))
                if error := frames[-1].fill(values):
                    raise driver.DriverError("cuTensorMapReplaceAddress", error)
        self.graphs.append(TimedGraph(self.product.index, [(x.config, x.function, x.pointers) for x in frames]))
        return self.graphs[-1]

    def _sample(self, entrant: Entrant) -> Steps[float]:
        """Microseconds of a launch."""
        yield from self._afford(entrant.count * entrant.us)
        entrant.graph.start(self.stream)
        yield
        while (us := entrant.graph.read()) is None:
            yield
        yield
        entrant.us = us / entrant.count
        return entrant.us


def launch(plan: Any, values: tuple[Any, ...], stream: int) -> None:
    for one in plan.steps:
        one.call(stream, values)


def launches_of(us: float) -> int:
    """Of a sample of a kernel that takes so long."""
    return max(1, min(block.LAUNCHES, int(LONGEST_US / us)))


def unfit(slowed: tuple[str, ...]) -> str | None:
    """Why a GPU is not fit to be timed whose driver says that."""
    now = Conditions(1.0, slowed=slowed)
    return complaint(now, now, 1.0)
