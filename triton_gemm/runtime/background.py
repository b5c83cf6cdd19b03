"""First calls that do not wait for the compiler: a product whose kernels are not loaded runs on others that give the
same bits, its stand-in. Worker processes compile its own once enough calls need them.

The choice names the class of bits (`policies.choose`), and never looks at what is loaded or cached. So no bit depends
on what was compiled when. A call waits for the compiler where nothing that is loaded gives its class of bits, and under
the capture of a CUDA graph, which keeps what it has recorded.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, cast

import torch

from .. import arguments
from ..compat import INTERPRETED, cache_folder
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate
from ..selection.select import given, predicted_or_inf
from . import stand_ins
from .binaries import identities
from .compiling import Compiler, ranks
from .stand_ins import Available, Job
from .worker import LostError, Worker, error_line, python

if TYPE_CHECKING:
    from .plan import GemmPlan

# Microseconds that calls lose, by prediction, before a kernel is compiled in the background. Compiling takes a core
# for seconds, which pays for a size that is called often and not for one that is called once.
WORTH_US = 10_000.0
BY_PYTHON_US = 20.0  # that a call loses on the host, which C++ would launch
GROWN = 1.5  # how many times as many binaries there are when a faster stand-in is looked for again
WORKERS = 2  # of a process; divided by the ranks on this host, but one at least
IDLE_S = 20.0  # after which a worker that has nothing to compile ends
NICE = 10  # of workers: the application's threads come first

Mode = Literal["wait", "raise", "own kernel"]  # what a thread does whose product has no loaded kernel
log = logging.getLogger("triton_gemm")
# Of first calls: "loaded" from Triton's cache, "stand-in", "waited" for the compiler, "raised".
counts: Counter[str] = Counter()
_lock = stand_ins.lock
_available: dict[tuple[int, int], Available] = {}  # by GPUs' compute capability
_compilers: dict[tuple[tuple[int, int], ...], Compiler] = {}
_of_thread = threading.local()  # mode: a Mode
_held: set[object] = set()  # blocks of `held` that are open
_lost = False  # whether this process can have no workers


class WouldWaitError(Exception):
    """A call in the mode "raise" has launched nothing: its kernels are not compiled yet."""


class FirstCalls:
    """What the calls of one plan run on until its own kernels are loaded: on a stand-in, if there is one."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        with _lock:
            self.available = _available.setdefault(device.capability, Available())
        self.own: tuple[Hashable, ...] = ()  # the plan's binaries, from its first call on
        self.number = -1  # of these
        self.seen = -1  # how often binaries had been added when its own were looked for
        self.stand_in: GemmPlan | None = None
        self.binaries_at_last_search = 0  # how many were available then
        self.lost_us = 0.0  # by each call that does not run on the plan's own kernels, predicted
        self.failed = False
        self.changing = threading.RLock()  # a handler of signals may multiply, too

    def instead_of(self, plan: GemmPlan, operands: Sequence[torch.Tensor]) -> GemmPlan | None:
        """The plan to launch in place of `plan`, or None to launch `plan` itself, compiling it first if need be.
        WouldWaitError instead of compiling in the mode "raise"."""
        mode: Mode = getattr(_of_thread, "mode", "wait")
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if _held or mode == "own kernel" or ((_lost or capturing) and not self.failed):
            return None
        job: Job = (plan.problem, plan.selection)
        with self.changing:
            if plan.compiled:
                return None
            if not self.failed:
                why = self.available.ended(self.number)
                if why:
                    self._fail(job, why)
                elif why is not None:
                    plan.load(*operands)  # or the call compiles them
                    return None
                elif self._may_load() and plan.load(*operands):
                    if self.number < 0:
                        counts["loaded"] += 1
                    with _lock:
                        self.available.wanted.pop(self.number, None)
                    return None
                elif self.number >= 0:
                    self._lose(plan)
                elif _can_cache():
                    self._begin(plan, operands, waits=mode == "wait")
                else:
                    counts["waited"] += 1
                    return None
            if len(self.available.binaries) > GROWN * self.binaries_at_last_search:
                self._look(plan)
                self.lost_us = self._predicted_loss(plan)
            stand_in = self.stand_in
        if stand_in is None and mode == "raise":
            raise WouldWaitError
        if stand_in is None and not self.failed:
            _compiler(plan, self.device).join(job)
        return stand_in

    def _begin(self, plan: GemmPlan, operands: Sequence[torch.Tensor], waits: bool) -> None:
        """Looks for a stand-in, and else, if the call waits, compiles what is compiled soonest. Has kernels of other
        calls compiled ahead."""
        job, compiler = (plan.problem, plan.selection), _compiler(plan, self.device)
        self.own = identities(self.device, *job)
        self._look(plan)
        outcome = "stand-in" if self.stand_in is not None else "waited" if waits else "raised"
        counts[outcome] += 1
        log.debug("first call of %s: %s", plan.selection, outcome)
        compiler.add(self.available.ahead(*job, self.device), first=True)
        if self.stand_in is None and waits:
            self.stand_in = self._compiled_soonest(plan, operands)
            if self.stand_in is None:
                return
        self.number = self.available.wait_for(self.own, compiler, job)
        self.lost_us = self._predicted_loss(plan)
        self._lose(plan)

    def _predicted_loss(self, plan: GemmPlan) -> float:
        """Microseconds by which the stand-in is slower than the plan's own kernel, host time included. torch's product
        counts as twice as slow."""
        model = model_of(self.device)
        ways = [x.selection.algorithm for x in (plan, self.stand_in) if x is not None]
        times = [predicted_or_inf(plan.problem, Candidate(given(plan.problem, x), x), model) for x in ways]
        lost_us = times[-1] - times[0] if self.stand_in is not None else times[0]
        return BY_PYTHON_US + max(0.0, lost_us) if math.isfinite(lost_us) else BY_PYTHON_US

    def _may_load(self) -> bool:
        """Whether the plan's own binaries may be in Triton's cache: at its first call, and if they are available and
        some were added since they were looked for."""
        before, self.seen = self.seen, self.available.added
        return before != self.seen and self.available.binaries.issuperset(self.own)

    def _lose(self, plan: GemmPlan) -> None:
        """Has the plan's own kernels compiled in the background, once calls have lost enough without them."""
        if self.available.failed and self.own in self.available.failed:
            self.failed = True
            return
        with _lock:
            self.available.lost[self.number] += self.lost_us
            if self.available.lost[self.number] >= WORTH_US:
                self.available.wanted.pop(self.number, None)
                self.available.order(self.number, _compiler(plan, self.device), (plan.problem, plan.selection))

    def _look(self, plan: GemmPlan) -> None:
        """Takes the stand-in that is the fastest now; keeps what there is where nothing available would do."""
        self.binaries_at_last_search = len(self.available.binaries)
        found = self.available.nearest(plan.problem, plan.selection, self.device)
        if found is not None and (self.stand_in is None or found.algorithm != self.stand_in.selection.algorithm):
            self.stand_in = plan.like(found)

    def _compiled_soonest(self, plan: GemmPlan, operands: Sequence[torch.Tensor]) -> GemmPlan | None:
        """A stand-in that is compiled here in a fraction of the time of the plan's own kernels; None without one."""
        job = plan.problem, plan.selection
        stand_in = next(stand_ins.of_its_class(*job, self.device, stand_ins.quick(*job, self.device)), None)
        if stand_in is None or stand_in.algorithm == plan.selection.algorithm:
            return None
        found = plan.like(stand_in)
        try:
            found.compile(*operands)
        except Exception as error:
            log.warning("%s could not be compiled: %s", stand_in.algorithm, error_line(error))
            return None
        self.available.add(self.device, plan.problem, stand_in)
        return found

    def _fail(self, job: Job, why: str) -> None:
        """Keeps that the plan's own kernels cannot be compiled, and says so once for each binary."""
        self.failed = True
        binaries = _binaries(self.device, job)
        with _lock:
            is_known = binaries in self.available.failed
            self.available.failed[binaries] = why
        if not is_known:
            replacement = "torch's product" if self.stand_in is None else self.stand_in.selection.algorithm
            log.warning("%s could not be compiled: %s; %s stays in its place", job[1].algorithm, why, replacement)


def _binaries(device: DeviceInfo, job: Job) -> Hashable:
    return identities(device, *job)


@contextmanager
def first_calls(mode: Mode) -> Iterator[None]:
    """Inside, what calls of this thread do whose product has no loaded kernel. "wait": they run on a stand-in, and else
    wait for the compiler, as outside; "raise": WouldWaitError in the place of a wait; "own kernel": they wait for their
    own kernel."""
    before = getattr(_of_thread, "mode", "wait")
    _of_thread.mode = mode
    try:
        yield
    finally:
        _of_thread.mode = before


def _compiler(plan: GemmPlan, device: DeviceInfo) -> Compiler:
    """One for each pair of the compute capability that is planned for, and the GPU's own."""
    capability = torch.cuda.get_device_capability(plan.device)
    key = device.capability, capability
    with _lock:
        if key not in _compilers:
            count = max(1, WORKERS // ranks())
            made = partial(_left_in_cache, device)
            worker = partial(Worker, (device, capability), nice=NICE)
            _compilers[key] = Compiler(made, worker, count, on_lost=_give_up, idle_s=IDLE_S)
        return _compilers[key]


def _left_in_cache(device: DeviceInfo, job: object) -> None:
    """A worker has left the binaries of a job in Triton's cache, from where calls load them."""
    if not _lost:
        _available[device.capability].add(device, *cast(Job, job))


@lru_cache(maxsize=1)
def enabled() -> bool:
    """Whether anything is compiled in the background: unless TRITON_GEMM_BACKGROUND=0, or where there is no Python that
    a worker could run. What is neither 0 nor 1 counts as 1."""
    found = os.environ.get("TRITON_GEMM_BACKGROUND", "1")
    if found not in ("0", "1"):
        log.warning("TRITON_GEMM_BACKGROUND must be 0 or 1, not %r: it counts as 1", found)
    return found != "0" and not INTERPRETED and python() is not None


def wait_until_compiled(timeout: float | None = None) -> bool:
    """Has the kernels of all calls so far compiled, and waits for them. Call it before you time a GEMM.

    The next call of everything that was called before then runs on its own kernel, unless that has failed to compile.

    Args:
        timeout: Seconds to wait at most. None: as long as it takes.

    Returns:
        Whether everything is compiled, or has failed.

    Raises:
        ValueError: A timeout below 0.
    """
    if timeout is not None and not arguments.number("wait_until_compiled", "timeout", timeout) >= 0:
        raise ValueError(f"wait_until_compiled(): timeout must be seconds, not {timeout!r}")
    with _lock:
        for available in list(_available.values()):
            available.order_all()
    return _wait(timeout)


def _wait(timeout: float | None = None) -> bool:
    """Waits for the compilations under way, at most so many seconds; whether they have ended."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with _lock:
        compilers = list(_compilers.values())
    return all(x.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for x in compilers)


@contextmanager
def held() -> Iterator[None]:
    """For what times products: inside, first calls in all threads wait for their own kernels, and nothing is compiled
    in the background."""
    block = object()
    try:
        _held.add(block)  # in one step, without a lock: the garbage collector may end a block wherever one is held
        _wait()
        yield
    finally:
        _held.discard(block)


def _give_up(lost: LostError) -> None:
    """Calls wait for the compiler from now on."""
    global _lost
    _lost = True
    log.warning("first calls of products wait for the compiler: it cannot be run in other processes: %s", lost)


@lru_cache(maxsize=1)
def _can_cache() -> bool:
    """Whether other processes can leave binaries for this one in Triton's cache."""
    folder = cache_folder()
    there = next((x for x in (folder, *folder.parents) if x.exists()), folder)
    return os.access(there, os.W_OK)


def _forget() -> None:
    """In a forked child: its parent's workers and GPUs are not its own."""
    for compiler in _compilers.values():
        compiler.abandon()
    _compilers.clear()
    _available.clear()


os.register_at_fork(after_in_child=_forget)
