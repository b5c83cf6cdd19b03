"""Turns: how the learner counts calls, and adds launches after them, though C++ launches them.

A plan that has a turn counts its calls down, in C++ by one decrement, and the learner reads the counts in a thread of
its own. That thread also names a job: a CUDA graph, which the next call of any such plan on the job's stream launches
after its own kernels. A call is reported to the learner where it must know on what that ran. A plan without a
turn costs nothing: that is every plan, unless a rule of `use` learns. The learner may name another plan, of the same
bits, that calls run on instead.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable
from ctypes import c_int64
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..compat import free_in_children, in_transform, is_profiling, launch_hooks, must_dispatch
from ..hardware import driver
from ..hardware.graphs import launch as launch_graph
from ..hardware.graphs import rest
from ..selection import generation

if TYPE_CHECKING:
    from .plan import GemmPlan

NEVER = 1 << 62  # calls
REPORTS_CALL, REPORTS_STREAM = 1, 2  # of a call: that it was, to the learner; and its stream
log = logging.getLogger("triton_gemm.learning")


class Turn:
    """How the calls of a plan are counted, and what is requested of them."""

    def __init__(self, product: Any) -> None:
        # `product` is the learner's own. `own` is what C++ has too: calls until Python takes one; what the next call
        # does (REPORTS_CALL, REPORTS_STREAM, or 0); the stream that a call has reported.
        self.product, self.own, self._read = product, (c_int64 * 3)(NEVER, 0, -1), NEVER

    def calls(self) -> int:
        """How many there were since the last count."""
        before, self._read = self._read, self.own[0]
        return before - self._read

    def request_call(self, wanted: bool) -> None:
        """Whether the next call of this plan is reported to the learner."""
        self.own[1] = REPORTS_CALL if wanted else 0

    def request_stream(self) -> None:
        """Has the next call of this plan report its stream."""
        self.own[2] = -1
        self.own[1] = REPORTS_STREAM

    @property
    def stream(self) -> int | None:
        """What a call has reported since."""
        return None if self.own[2] < 0 else self.own[2]

    def hand_over(self) -> None:
        """Has Python take the next calls, which run on the plan that is named instead."""
        self.own[0] = self._read = 0


class Job(ctypes.Structure):
    """As C++ has it (`compat/cpp/launch.h`)."""

    withdrawn = True  # whether no call is to launch it any more

    _fields_ = (
        *((name, c_int64) for name in ("until", "inside", "launched", "device")),
        *((name, ctypes.c_uint64) for name in ("stream", "graph", "ended", "launch", "record")),
    )

    def begin(self, device: int, stream: int, graph: int, ended: int) -> None:
        """Has the next call on that stream launch a graph and record an event. Waits for the end of the one before."""
        self._wait()
        self.launch, self.record = driver.address_of("cuGraphLaunch"), driver.address_of("cuEventRecord")
        self.launched, self.device, self.stream, self.graph, self.ended = -1, device, stream, graph, ended
        self.withdrawn = False
        self._set(1)  # the last, as threads read it first

    def withdraw(self) -> None:
        """No call begins to launch it any more."""
        self._set(-1)
        self.withdrawn = True

    def _set(self, until: int) -> None:
        if extension is None:
            self.until = until
        else:  # an Arm CPU might show other threads a plain store before those of the graph
            extension.set_job(ctypes.addressof(self), until)

    def is_idle(self) -> bool:
        """Whether no thread is launching it, this one included: a signal's handler may come amid `run`."""
        if not _launching.acquire(blocking=False):
            return False
        _launching.release()
        return not self.inside

    def end(self) -> None:
        """There is none. No other thread launches it afterwards."""
        self.withdraw()
        self._wait()

    def _wait(self) -> None:
        while not self.is_idle() and _runner != threading.get_ident():
            rest()

    def run(self, device: int, stream: int) -> None:
        """Of a call that Python has launched. By C++ where there is the extension, so that one thread alone does it."""
        global _runner
        if extension is not None:
            if not is_watched():
                extension.run_job(ctypes.addressof(self), device, stream)
            return
        if _launching.acquire(blocking=False):  # or another thread does, or this one before a signal came
            try:
                _runner = threading.get_ident()
                if self.until > 0 and (self.device, self.stream) == (device, stream) and not is_watched():
                    self.until = 0
                    self.launched = launch_graph(self.graph, self.ended, stream)
            finally:
                _runner = None
                _launching.release()


class Learner(Protocol):
    def new(self, plan: GemmPlan) -> None:
        """Gives a new plan a turn, if it wants that."""

    def turn(self, plan: GemmPlan, b: torch.Tensor, stream: int) -> None:
        """A call of a plan was launched, on this second operand and this stream. It never raises."""

    def stop(self) -> None:
        """Nothing learns any more: ends what is under way, and gives its memory back, soon."""


job = Job(-1, launched=-1)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))  # C++ has its address, also when Python ends
_launching = free_in_children(threading.Lock())  # a job, by Python
_runner: int | None = None  # the thread that has it
extension: Any = None  # of C++, once it is loaded
make: Callable[[], Learner] | None = None  # set by `learning`, which is above
active: Callable[[], bool] = bool  # whether a rule learns; set by `functional.routing`, which is above
counts: Counter[str] = Counter()  # of what was learned, for `report_routing`
_learner: Learner | None = None  # from the first rule that learns on


def begin() -> None:
    """Call it after a rule that learns was added. Plans from before the first of them are made anew."""
    global _learner
    if _learner is None and make is not None:
        _learner = make()
        generation.advance()


def end() -> None:
    """Call it after such a rule was removed."""
    if _learner is not None and not active():
        _learner.stop()


def give(plan: GemmPlan) -> None:
    """Gives a new plan a turn, if there is a learner and it wants that. It never raises."""
    if _learner is not None:
        try:
            _learner.new(plan)
        except Exception as error:
            log.warning("a GEMM is not timed: %s: %s", type(error).__name__, error)


def count(turn: Turn, device: int, stream: int) -> None:
    """Counts a call that Python has launched."""
    turn.own[0] -= 1
    if job.until > 0:
        job.run(device, stream)


def is_watched() -> bool:
    """Whether nothing may be launched beside a call here: under capture, or by whoever watches, in any thread."""
    return bool(
        torch.cuda.is_current_stream_capturing()
        or is_profiling()
        or must_dispatch()
        or in_transform()
        or launch_hooks()
    )


def report_call(plan: GemmPlan, b: torch.Tensor, stream: int) -> None:
    """Reports a call to the learner, or its stream."""
    turn = plan.turn
    if turn is not None and turn.own[1] == REPORTS_STREAM:
        if not is_watched():
            turn.own[2], turn.own[1] = stream, 0
    elif _learner is not None and active():
        _learner.turn(plan, b, stream)
    elif turn is not None:
        turn.request_call(False)


def forget() -> None:
    """In a forked child: what its parent was learning is not its own. It learns anew where a rule begins there."""
    global _learner, _runner
    _learner = _runner = None
    job.withdraw()
    job.inside = 0
