"""First calls that do not wait for the compiler: a product whose kernels are not loaded runs on loaded ones that give
the same bits, while worker processes compile its own.

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
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import torch

from .. import arguments
from ..compat import INTERPRETED, cache_folder, free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..selection import batch_invariance
from ..selection.bit_classes import bit_class
from ..selection.of_configs import OfKernel, of_configs
from ..selection.select import Selection, given, illegal, predicted_or_inf
from . import policies
from .binaries import identities
from .compiling import Compiler, ranks
from .worker import LostError, Worker

if TYPE_CHECKING:
    from .plan import GemmPlan

Job = tuple[GemmProblem, Selection]  # as workers take it
SLOWER = 1.5  # than the product's own kernel: as much slower as one is taken that stands in
LOST_US = 5_000.0  # or so many microseconds, which are less than a wait of a second for the compiler
COMPARED = 32  # configurations at most, for one that stands in: a millisecond for two or three
AHEAD = (512, 256, 128, 64, 32, 16, 1024, 2048)  # rows of a weight whose classes of bits are compiled at its first call
MAX_WEIGHTS = 4096
WORKERS = 2  # of a process, or of all ranks on this host together
IDLE_S = 20.0  # after which a worker that has nothing to compile ends

log = logging.getLogger("triton_gemm")
counts: Counter[str] = Counter()  # of first calls: "loaded", "stand-in", "waited", "not here"
_lock = free_in_children(threading.RLock())
_available: dict[tuple[int, int], Available] = {}  # by GPUs' compute capability
_compilers: dict[tuple[tuple[int, int], ...], Compiler] = {}
_of_thread = threading.local()  # waits: whether its calls may wait for the compiler
_held = 0  # blocks of `held` that are open
_lost = False  # whether this process can have no workers


class Available:
    """What this process has loaded for GPUs of one compute capability, or its workers have left in Triton's cache."""

    def __init__(self) -> None:
        self.binaries: set[Hashable] = set()
        self.configs: dict[OfKernel, None] = {}  # that the last of the binaries have
        self.classes: set[str] = set()  # of bits, of what was called or compiled ahead
        self.weights: set[GemmProblem] = set()  # whose classes were compiled ahead

    def add(self, device: DeviceInfo, problem: GemmProblem, selection: Selection) -> None:
        binaries, config = identities(device, problem, selection), (selection.kernel, selection.config)
        with _lock:
            self.binaries.update(binaries)
            self.configs.pop(config, None)
            self.configs[config] = None
            if len(self.configs) > COMPARED:
                del self.configs[next(iter(self.configs))]

    def nearest(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> Selection | None:
        """The available candidate of least predicted time in the class of bits of a selection, or None: without one, or
        where it would be too slow."""
        way = Candidate(given(problem, selection.algorithm), selection.algorithm)
        own = predicted_or_inf(problem, way, model_of(device))
        wanted, limit = bit_class(problem, selection), max(own * SLOWER, own + LOST_US)
        with _lock:
            configs = dict(self.configs)
        if selection.batch_invariant:
            found = [x for x in batch_invariance.ranked(problem, device) if x[1].algorithm[:2] in configs]
        else:
            found = [x for of_one in of_configs(problem, device, configs) for x in of_one]
        for time_us, candidate in sorted(found, key=lambda one: one[0]):
            if time_us > limit:
                break
            if bit_class(problem, candidate) == wanted and illegal(problem, device, candidate) is None:
                other = Selection.of(candidate, f"until {selection.kernel} {selection.config} is compiled")
                if self.binaries.issuperset(identities(device, problem, other)):
                    return other
        return None

    def opened(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> list[Job]:
        """At the first call of a weight what to compile ahead: for numbers of rows in AHEAD the choices that open
        classes of bits. That call's own class is not among them."""
        alone = problem.batch == 1 and problem.groups is None and problem.a.strides[2] == problem.c.strides[2] == 1
        weight = replace(problem, M=0)
        with _lock:
            self.classes.add(bit_class(problem, selection))
            if not alone or weight in self.weights or len(self.weights) >= MAX_WEIGHTS:
                return []
            self.weights.add(weight)
        jobs: list[Job] = []
        for rows in AHEAD:
            other = replace(problem, M=rows)
            try:
                choice = policies.choose(other, device, invariant=selection.batch_invariant)
            except RuntimeError:  # the policy is "error", or no kernel multiplies so many rows
                continue
            name = bit_class(other, choice)
            if name not in self.classes:
                self.classes.add(name)
                jobs.append((other, choice))
        return jobs


class WouldWaitError(Exception):
    """A call that does `not_wait` has launched nothing: its kernels are being compiled."""


class FirstCalls:
    """What the calls of one plan run on until its own kernels are loaded."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        with _lock:
            self.available = _available.setdefault(device.capability, Available())
        self.plan: GemmPlan | None = None  # which stands in
        self.compiler: Compiler | None = None  # of the plan's own kernels
        self.failed = False
        self.changing = threading.Lock()

    def instead_of(self, plan: GemmPlan) -> GemmPlan | None:
        """The plan that a call runs, or None for its own: it is loaded now, or the call has to compile it.
        WouldWaitError where it would have to and does `not_wait`."""
        compiles_here = _held or _lost or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        with self.changing:
            if plan.compiled or (compiles_here and not self.failed):
                return None
            if self.compiler is None and not self._begin(plan):
                return None
            assert self.compiler is not None
            if self.compiler.done(job := _job(plan)) and not self.failed:
                why = self.compiler.failure(job)
                self.compiler.forget(job)
                if why is None:
                    return None
                self.failed = True
                instead = "torch's product" if self.plan is None else self.plan.selection
                log.warning("%s could not be compiled: %s; in its place stays %s", plan.selection, why, instead)
            if self.plan is None and getattr(_of_thread, "waits", True):
                return None
        if self.plan is None:
            raise WouldWaitError
        return self.plan

    def _begin(self, plan: GemmPlan) -> bool:
        """Whether the plan's own kernels are compiled in the background from now on; else they are loaded, or the call
        has to compile them."""
        if plan.load():
            counts["loaded"] += 1
            return False
        if not _can_cache():
            counts["waited"] += 1
            return False
        stand_in = self.available.nearest(plan.problem, plan.selection, self.device)
        compiler = _compiler(self.device, torch.cuda.get_device_capability(plan.device))
        waits = stand_in is None and getattr(_of_thread, "waits", True)
        if not waits:
            compiler.add([_job(plan)])
        compiler.add(self.available.opened(plan.problem, plan.selection, self.device), first=True)
        if waits:
            counts["waited"] += 1
            log.debug("waiting for the compiler of %s", plan.selection)
            compiler.join(_job(plan))
            return False
        counts["stand-in" if stand_in else "not here"] += 1
        self.plan = None if stand_in is None else plan.like(stand_in)
        self.compiler = compiler
        return True


def _job(plan: GemmPlan) -> Job:
    return plan.problem, plan.selection


@contextmanager
def not_wait() -> Iterator[None]:
    """Inside, a call of this thread that would wait for the compiler raises WouldWaitError, and its kernels are
    compiled in the background."""
    before, _of_thread.waits = getattr(_of_thread, "waits", True), False
    try:
        yield
    finally:
        _of_thread.waits = before


def _compiler(device: DeviceInfo, capability: tuple[int, int]) -> Compiler:
    """That of all plans on such GPUs, which may be treated as older ones than they are."""
    key = device.capability, capability
    with _lock:
        if key not in _compilers:
            count = max(1, WORKERS // ranks())
            made = partial(_is_compiled, device)
            worker = partial(Worker, (device, capability))
            _compilers[key] = Compiler(made, worker, count, on_lost=_give_up, idle_s=IDLE_S)
        return _compilers[key]


def _is_compiled(device: DeviceInfo, job: object) -> None:
    """A worker has left the binaries of a job in Triton's cache, from where calls load them."""
    if not _lost:
        _available[device.capability].add(device, *cast(Job, job))


@lru_cache(maxsize=1)
def enabled() -> bool:
    """Whether anything is compiled in the background: unless TRITON_GEMM_BACKGROUND=0. ValueError for what is neither 0
    nor 1."""
    found = os.environ.get("TRITON_GEMM_BACKGROUND", "1")
    if found not in ("0", "1"):
        raise ValueError(f"TRITON_GEMM_BACKGROUND must be 0 or 1, not {found!r}")
    return found == "1" and not INTERPRETED


def wait_until_compiled(timeout: float | None = None) -> bool:
    """Waits until nothing is being compiled in the background: the next call of every product that was called before
    then runs on its own kernel. Call it before you time products.

    timeout: seconds to wait at most, by default as long as it takes. Whether all is compiled, or has failed.

    Raises ValueError for a timeout below 0.
    """
    if timeout is not None and not arguments.number("wait_until_compiled", "timeout", timeout) >= 0:
        raise ValueError(f"wait_until_compiled(): timeout must be seconds, not {timeout!r}")
    deadline = None if timeout is None else time.monotonic() + timeout
    with _lock:
        compilers = list(_compilers.values())
    return all(x.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for x in compilers)


@contextmanager
def held(*, drain: bool = True) -> Iterator[None]:
    """Inside, first calls in all threads compile their own kernels: for what times products. drain: whether to wait for
    what is being compiled in the background, so that nothing is meanwhile."""
    global _held
    with _lock:
        _held += 1
    try:
        if drain:
            wait_until_compiled()
        yield
    finally:
        with _lock:
            _held -= 1


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
