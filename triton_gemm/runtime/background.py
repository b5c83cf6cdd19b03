"""First calls that do not wait for the compiler: a product whose kernels are not loaded runs on others that give the
same bits, its stand-in, while worker processes compile its own.

The choice names the class of bits (`policies.choose`), and never looks at what is loaded or cached. So no bit depends
on what was compiled when. A call waits for the compiler where nothing that is loaded gives its class of bits, and under
the capture of a CUDA graph, which keeps what it has recorded.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, cast

import torch

from .. import arguments, kernels
from ..compat import INTERPRETED, cache_folder, free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate
from ..problem import GemmProblem, Layout
from ..selection import batch_invariance
from ..selection.bit_classes import bit_class
from ..selection.of_configs import OfKernel, of_configs
from ..selection.select import Selection, given, illegal, predicted_or_inf
from . import policies
from .binaries import identities
from .compiling import Compiler, ranks
from .worker import LostError, Worker, told

if TYPE_CHECKING:
    from .plan import GemmPlan

Job = tuple[GemmProblem, Selection]  # as workers take it
# A stand-in may be predicted to take so many times as long as the product's own kernel,
SLOWER = 1.5
LOST_US = 5_000.0  # or so many microseconds longer, which is less than waiting for the compiler
GROWN = 1.5  # how many times as many binaries there are when a faster stand-in is looked for again
COMPARED = 32  # configurations at most that are considered for a stand-in; two or three take a millisecond
# Numbers of rows of a weight, whose classes of bits are compiled at its first call.
AHEAD = (512, 256, 128, 64, 32, 16, 1024, 2048, 1, 2, 4, 8)
MAX_WEIGHTS = 4096
WORKERS = 2  # of a process; divided by the ranks on this host, but one at least
IDLE_S = 20.0  # after which a worker that has nothing to compile ends

Mode = Literal["wait", "raise", "own kernel"]  # what a thread does whose product has no loaded kernel
log = logging.getLogger("triton_gemm")
# Of first calls: "loaded" from Triton's cache, "stand-in", "waited" for the compiler, "raised".
counts: Counter[str] = Counter()
_lock = free_in_children(threading.RLock())
_available: dict[tuple[int, int], Available] = {}  # by GPUs' compute capability
_compilers: dict[tuple[tuple[int, int], ...], Compiler] = {}
_of_thread = threading.local()  # mode: a Mode
_held = 0  # blocks of `held` that are open
_lost = False  # whether this process can have no workers


class Available:
    """What this process has loaded for GPUs of one compute capability, or its workers have left in Triton's cache.

    configs: of the last binaries; weights: whose classes of bits were compiled ahead, as problems with M = 0; classes:
    these, by kind of problem; quick: the binaries that are compiled at a kind's first call; failed: binaries that
    cannot be compiled, and why.
    """

    def __init__(self) -> None:
        self.binaries: set[Hashable] = set()
        self.quick: set[Hashable] = set()
        self.configs: dict[OfKernel, None] = {}
        self.weights: set[GemmProblem] = set()
        self.classes: dict[GemmProblem, set[str]] = {}
        self.failed: dict[Hashable, str] = {}

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
        with _lock:
            configs = dict(self.configs)
        if selection.batch_invariant:
            candidates = [x for x in batch_invariance.ranked(problem, device) if x[1].algorithm[:2] in configs]
        else:
            candidates = [x for of_one in of_configs(problem, device, configs) for x in of_one]
        candidates = sorted([*candidates, *_quick(problem, selection, device)], key=lambda one: one[0])
        for stand_in in _of_its_class(problem, selection, device, candidates):
            if self.binaries.issuperset(identities(device, problem, stand_in)):
                return stand_in
        return None

    def ahead(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> list[Job]:
        """The jobs to compile ahead at a weight's first call: at the first call of a kind of problem those of `quick`
        that any number of rows may run on, and one for each new class of bits that rows in AHEAD choose and these do
        not give."""
        kind, weight = _kind(problem), replace(problem, M=0)
        single = problem.batch == 1 and problem.groups is None and problem.a.strides[2] == problem.c.strides[2] == 1
        with _lock:
            if not single or weight in self.weights or len(self.weights) >= MAX_WEIGHTS:
                return []
            self.weights.add(weight)
            is_first = kind not in self.classes
            classes = self.classes.setdefault(kind, set())
            classes.add(bit_class(problem, selection))
        jobs: list[Job] = []
        if is_first and not selection.batch_invariant:
            quick = [x for parts in (1, 2) for x in kernels.warp_specialised.quick(problem, device, parts)]
            one_way = [x for x in quick if x.algorithm[3:] == quick[0].algorithm[3:]]  # swapped and packed alike
            jobs += [(problem, Selection.of(x, "compiled ahead")) for x in one_way]
            self.quick.update(binary for job in jobs for binary in identities(device, *job))
        for rows in AHEAD:
            other = replace(problem, M=rows)
            try:
                choice = policies.choose(other, device, invariant=selection.batch_invariant)
                name = bit_class(other, choice)
            except Exception:  # no kernel takes so many rows, or the policy is "error": that is that call's to say
                continue
            if name not in classes:
                classes.add(name)
                stand_ins = _of_its_class(other, choice, device, _quick(other, choice, device))
                if not any(self.quick.issuperset(identities(device, other, x)) for x in stand_ins):
                    jobs.append((other, choice))
        return jobs


def _kind(problem: GemmProblem) -> GemmProblem:
    """What problems have in common whose binaries may be the same: all but sizes."""

    def without_pitch(layout: Layout) -> Layout:
        _, row, column = layout.strides
        return replace(layout, strides=(0, min(row, 2), min(column, 2)))

    a, b, c = map(without_pitch, (problem.a, problem.b, problem.c))
    return replace(problem, batch=1, M=0, N=0, K=0, a=a, b=b, c=c)


def _quick(problem: GemmProblem, selection: Selection, device: DeviceInfo) -> list[tuple[float, Candidate]]:
    """(predicted microseconds, candidate) of those that are compiled soonest, with K cut as in a selection unless sums
    are exact: first those that `Available.ahead` has compiled."""
    schedule = None if problem.arithmetic.exact else selection.schedule
    parts = 1 if schedule is None else schedule.split_k
    model = model_of(device)
    return [(predicted_or_inf(problem, x, model), x) for x in kernels.warp_specialised.quick(problem, device, parts)]


def _of_its_class(
    problem: GemmProblem, selection: Selection, device: DeviceInfo, candidates: list[tuple[float, Candidate]]
) -> Iterator[Selection]:
    """Of the candidates those that can stand in for a selection: legal, in its class of bits and not too slow."""
    own = Candidate(given(problem, selection.algorithm), selection.algorithm)
    own_us = predicted_or_inf(problem, own, model_of(device))
    wanted, limit = bit_class(problem, selection), max(own_us * SLOWER, own_us + LOST_US)
    for time_us, candidate in candidates:
        in_class = time_us <= limit and bit_class(problem, candidate) == wanted
        if in_class and illegal(problem, device, candidate) is None:
            yield Selection.of(candidate, f"until {selection.kernel} {selection.config} is compiled")


class WouldWaitError(Exception):
    """A call in the mode "raise" has launched nothing: its kernels are being compiled."""


class FirstCalls:
    """What the calls of one plan run on until its own kernels are loaded: on a stand-in, if there is one."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        with _lock:
            self.available = _available.setdefault(device.capability, Available())
        self.stand_in: GemmPlan | None = None
        self.looked = 0  # how many binaries were available when it was looked for
        self.compiler: Compiler | None = None  # of the plan's own kernels
        self.failed = False
        self.changing = threading.Lock()

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
            if self.compiler is None and not self.failed:
                if plan.load(*operands):
                    counts["loaded"] += 1
                    return None
                if not _can_cache():
                    counts["waited"] += 1
                    return None
                self._begin(plan, operands, waits=mode == "wait")
            if self.compiler is not None and self.compiler.done(job):
                why = self.compiler.failure(job)
                self.compiler.forget(job)
                self.compiler = None
                if why is None:
                    return None
                self._fail(job, why)
            if self.stand_in is not None and len(self.available.binaries) > GROWN * self.looked:
                self._look(plan)
            stand_in = self.stand_in
        if stand_in is None and mode == "raise":
            raise WouldWaitError
        if stand_in is None and not self.failed:
            _compiler(plan, self.device).join(job)
        return stand_in

    def _begin(self, plan: GemmPlan, operands: Sequence[torch.Tensor], waits: bool) -> None:
        """Looks for a stand-in, and else, if the call waits, compiles what is compiled soonest. Has kernels compiled in
        the background: those of other calls ahead, and the plan's own, unless the call is to wait for these."""
        self._look(plan)
        outcome = "stand-in" if self.stand_in is not None else "waited" if waits else "raised"
        counts[outcome] += 1
        log.debug("first call of %s: %s", plan.selection, outcome)
        job, compiler = (plan.problem, plan.selection), _compiler(plan, self.device)
        compiler.add(self.available.ahead(*job, self.device), first=True)
        if self.stand_in is None and waits:
            self.stand_in = self._compiled_soonest(plan, operands)
            if self.stand_in is None:
                return
        why = self.available.failed.get(_binaries(self.device, job)) if self.available.failed else None
        if why is None:
            compiler.add([job])
            self.compiler = compiler
        else:
            self.failed = True

    def _look(self, plan: GemmPlan) -> None:
        """Takes the stand-in that is the fastest now; keeps what there is where nothing available would do."""
        self.looked = len(self.available.binaries)
        found = self.available.nearest(plan.problem, plan.selection, self.device)
        if found is not None and (self.stand_in is None or found.algorithm != self.stand_in.selection.algorithm):
            self.stand_in = plan.like(found)

    def _compiled_soonest(self, plan: GemmPlan, operands: Sequence[torch.Tensor]) -> GemmPlan | None:
        """A stand-in that is compiled here in a fraction of the time of the plan's own kernels; None without one."""
        job = plan.problem, plan.selection
        stand_in = next(_of_its_class(*job, self.device, _quick(*job, self.device)), None)
        if stand_in is None or stand_in.algorithm == plan.selection.algorithm:
            return None
        found = plan.like(stand_in)
        try:
            found.compile(*operands)
        except Exception as error:
            log.warning("%s could not be compiled: %s", stand_in.algorithm, told(error))
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
    """Whether anything is compiled in the background: unless TRITON_GEMM_BACKGROUND=0, or where Python's executable is
    an application, which a worker would start again. ValueError for what is neither 0 nor 1."""
    found = os.environ.get("TRITON_GEMM_BACKGROUND", "1")
    if found not in ("0", "1"):
        raise ValueError(f"TRITON_GEMM_BACKGROUND must be 0 or 1, not {found!r}")
    return found == "1" and not INTERPRETED and not getattr(sys, "frozen", False)


def wait_until_compiled(timeout: float | None = None) -> bool:
    """Waits until nothing is being compiled in the background. Call it before you time a GEMM.

    The next call of everything that was called before then runs on its own kernel.

    Args:
        timeout: Seconds to wait at most. None: as long as it takes.

    Returns:
        Whether everything is compiled, or has failed.

    Raises:
        ValueError: A timeout below 0.
    """
    if timeout is not None and not arguments.number("wait_until_compiled", "timeout", timeout) >= 0:
        raise ValueError(f"wait_until_compiled(): timeout must be seconds, not {timeout!r}")
    deadline = None if timeout is None else time.monotonic() + timeout
    with _lock:
        compilers = list(_compilers.values())
    return all(x.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for x in compilers)


@contextmanager
def held() -> Iterator[None]:
    """For what times products: inside, first calls in all threads wait for their own kernels, and nothing is compiled
    in the background."""
    global _held
    with _lock:
        _held += 1
    try:
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
