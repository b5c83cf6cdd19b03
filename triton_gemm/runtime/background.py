"""First calls that do not wait for the compiler: a product whose kernels are not loaded runs on others that give the
same bits, its stand-in. From its second call on worker processes compile its own, those that most calls need first.

The choice names the class of bits (`policies.choose`), and never looks at what is loaded or cached. So no bit depends
on what was compiled when. A call waits for the compiler where nothing that is loaded gives its class of bits, and under
the capture of a CUDA graph, which keeps what it has recorded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from .. import arguments
from ..compat import INTERPRETED, cache_folder
from ..hardware.device import DeviceInfo
from ..kernels.launch import is_warm
from ..selection.select import Selection
from . import stand_ins, turns
from .binaries import identities, receive
from .compiling import Compiler, ranks
from .stand_ins import Available, Wanted
from .worker import LostError, Question, Worker, python

if TYPE_CHECKING:
    from .plan import GemmPlan

GROWN = 1.5  # how many times as many binaries there are when a faster stand-in is sought again
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
        self.wanted: Wanted | None = None  # the plan's own binaries, from its first call on
        self.was_warm = False  # whether Triton's cache was, at the first call
        self.seen = -1  # `stand_ins.changes` when it was last decided what calls run on
        self.stand_in: GemmPlan | None = None
        self.compared = -1  # binaries that were available when a stand-in was sought; before, there may be a kit's
        self.changing = threading.RLock()  # a handler of signals may multiply, too

    @property
    def failed(self) -> bool:
        return self.wanted is not None and bool(self.wanted.error)

    def decided(self, number: int) -> GemmPlan | None:
        """The stand-in that calls run on by the decision of that number, if that still holds and it is loaded."""
        stand_in = self.stand_in
        return stand_in if number == stand_ins.changes and stand_in is not None and stand_in.compiled else None

    def instead_of(self, plan: GemmPlan, operands: Sequence[torch.Tensor]) -> GemmPlan | None:
        """The plan to launch in place of `plan`, or None to launch `plan` itself, compiling it first if need be.
        WouldWaitError instead of compiling in the mode "raise"."""
        mode: Mode = getattr(_of_thread, "mode", "wait")
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if _held or mode == "own kernel" or ((_lost or capturing) and not self.failed):
            return None
        with self.changing:
            changes = stand_ins.changes
            if plan.compiled or self._has_own(plan, operands):
                return None
            if self.wanted is None and not _can_cache():
                counts["waited"] += 1
                return None
            wanted = self.wanted or self._begin(plan, mode, operands)
            if plan.compiled:
                return None
            self._find_stand_in(plan, wanted)
            stand_in = self.stand_in
            wanted.by_python += 1
            if wanted.calls >= stand_ins.ORDERED_FROM:
                wanted.order()
            self.seen = changes
        if stand_in is None and mode == "raise":
            raise WouldWaitError
        if stand_in is None and not self.failed:
            wanted.join()
        return stand_in

    def _has_own(self, plan: GemmPlan, operands: Sequence[torch.Tensor]) -> bool:
        """Whether the call runs on the plan's own kernels. They are loaded here if they may be in Triton's cache, which
        is so at the first call and after a change. The call compiles them if a worker did so in vain."""
        if self.wanted is None:
            self.was_warm = is_warm()
            if loaded := plan.load(*operands, cached=self.was_warm):
                counts["loaded"] += 1
            return loaded
        if self.wanted.error == "":
            return plan.load(*operands) or True
        is_new = self.seen != stand_ins.changes and not self.failed
        is_there = is_new and self.available.binaries.issuperset(self.wanted.binaries)
        return is_there and plan.load(*operands)

    def _begin(self, plan: GemmPlan, mode: Mode, operands: Sequence[torch.Tensor]) -> Wanted:
        """What the plan waits for from its first call on, unless that finds it in Triton's cache, for which it waits
        where there is no stand-in. Counts what that call does."""
        job = plan.problem, plan.selection
        self.wanted = self.available.want(identities(self.device, *job), _compiler(plan, self.device), job)
        self._find_stand_in(plan, self.wanted)
        if self.stand_in is not None:
            outcome = "stand-in"
        elif mode != "wait":
            outcome = "raised"
        else:
            outcome = "loaded" if not self.was_warm and plan.load(*operands) else "waited"
        counts[outcome] += 1
        log.debug("first call of %s: %s", plan.selection, outcome)
        return self.wanted

    def _find_stand_in(self, plan: GemmPlan, wanted: Wanted) -> None:
        """Takes the stand-in that is the fastest now, once there are so many more; keeps what there is where nothing
        available would do."""
        if len(self.available.binaries) <= GROWN * self.compared:
            return
        self.compared = len(self.available.binaries)
        found = self.available.nearest(plan.problem, plan.selection, self.device)
        if found is not None and (self.stand_in is None or found.algorithm != self.stand_in.selection.algorithm):
            self.stand_in = plan.like(found)
            self.stand_in.calls = wanted.by_cpp


@contextmanager
def first_calls(mode: Mode) -> Iterator[None]:
    """Inside, what calls of this thread do whose product has no loaded kernel. With "wait", as outside, they run on a
    stand-in, and else wait for the compiler. With "raise" they raise WouldWaitError in the place of a wait. With "own
    kernel" they wait for their own kernel."""
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
            worker = partial(Worker, (device, capability), nice=NICE, on_made=receive)
            _compilers[key] = Compiler(
                lambda _: None,  # the calls load what workers compile
                worker,
                count,
                on_lost=_give_up,
                idle_s=IDLE_S,
                calls=attrgetter("calls"),
                on_end=partial(_ended, device),
            )
        return _compilers[key]


def order(plan: GemmPlan, device: DeviceInfo, selection: Selection, binaries: tuple[Hashable, ...]) -> Wanted | None:
    """Has a worker compile the kernels of another selection for a plan's problem, and returns what says that it has;
    None where none can. binaries: their `identities`."""
    if not enabled() or _lost or not _can_cache():
        return None
    with _lock:
        available = _available.setdefault(device.capability, Available())
    wanted = available.want(binaries, _compiler(plan, device), (plan.problem, selection))
    wanted.order()
    return wanted


def submit(plan: GemmPlan, device: DeviceInfo, function: Callable[..., Any], *arguments: object) -> Question | None:
    """Has a worker of a plan's kernels call a function of a module; None where none can."""
    if not enabled() or _lost:
        return None
    question = Question(function, *arguments)
    _compiler(plan, device).add([question])
    return question


def is_held() -> bool:
    """Whether a block of `held` is open."""
    return bool(_held)


def _ended(device: DeviceInfo, job: object, error: str | None) -> None:
    """A worker has sent the binaries of a job, and left them in Triton's cache, or could not compile them."""
    if isinstance(job, Question):
        job.error = error or ""
        return
    wanted = cast(Wanted, job)
    if _lost:
        return
    wanted.error = error or ""
    if error is None:
        _available[device.capability].add(device, *wanted.job)
    else:
        stays = "a kernel with the same bits, or torch's product, stays in its place"
        log.warning("%s could not be compiled: %s; %s", wanted.job[1].algorithm, error, stays)
        stand_ins.change()


def wrong() -> str | None:
    """What is wrong with the value of TRITON_GEMM_BACKGROUND, or None."""
    found = os.environ.get("TRITON_GEMM_BACKGROUND", "1")
    return None if found in ("0", "1") else f"TRITON_GEMM_BACKGROUND must be 0 or 1, not {found!r}: it counts as 1"


@lru_cache(maxsize=1)
def enabled() -> bool:
    """Whether anything is compiled in the background: unless TRITON_GEMM_BACKGROUND=0, or where there is no Python that
    a worker could run. What is neither 0 nor 1 counts as 1."""
    if (words := wrong()) is not None:
        log.warning("%s", words)
    return os.environ.get("TRITON_GEMM_BACKGROUND") != "0" and not INTERPRETED and python() is not None


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
    for available in list(_available.values()):
        for wanted in list(available.wanted.values()):
            wanted.order()
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
        turns.job.end()
        stand_ins.change()
        _wait()
        yield
    finally:
        _held.discard(block)


def _give_up(lost: LostError) -> None:
    """Calls wait for the compiler from now on."""
    global _lost
    _lost = True
    stand_ins.change()
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
