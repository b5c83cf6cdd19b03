"""Fallback kernels, called stand-ins, which run until a product's own kernel is compiled. A stand-in is loaded, in a
kit or in Triton's cache, gives the same bits as the product's own kernel, and is predicted to be fast enough."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from ctypes import c_int64
from heapq import merge
from itertools import count
from operator import itemgetter
from weakref import WeakValueDictionary

from ..compat import free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate, parts_of
from ..problem import GemmProblem
from ..selection import batch_invariance
from ..selection.bit_classes import bit_class
from ..selection.of_configs import OfKernel, of_configs
from ..selection.select import Selection, given, illegal, predicted_or_inf
from . import kits
from .binaries import identities
from .compiling import Compiler

Job = tuple[GemmProblem, Selection]  # as workers take it
# A stand-in may be predicted to take so many times as long as the product's own kernel,
SLOWER = 1.5
SLOWER_OF_KITS = 1.25, 5.0  # likewise, of kits' kernels; where the first finds none, up to the second
LOST_US = 5_000.0  # or so many microseconds longer, which is less than waiting for the compiler
COMPARED = 32  # configurations at most that are considered for a stand-in; two or three take a millisecond
ORDERED_FROM = 2  # calls that need a kernel, so that what is called once is not compiled
lock = free_in_children(threading.RLock())

changes = 0  # the number of the state that decides what calls run on which have no kernels of their own
_numbers = count(1)
_followers: list[Callable[[], None]] = []


def change() -> None:
    """Call it after kernels became available, or calls may run on no stand-in any more. What C++ launches in place of
    own kernels is Python's to decide again."""
    global changes
    try:
        changes = next(_numbers)
    finally:  # whatever a signal's handler raises
        for changed in _followers:
            changed()


def follow(changed: Callable[[], None]) -> None:
    """Registers `changed`, to be called after each change."""
    if changed not in _followers:
        _followers.append(changed)


class Wanted:
    """Binaries that plans wait for, and the job that makes them."""

    def __init__(self, binaries: tuple[Hashable, ...], compiler: Compiler, job: Job) -> None:
        self.binaries, self.compiler, self.job = binaries, compiler, job
        self.by_python, self.by_cpp = 0, c_int64()  # calls without the binaries, by who launched a stand-in
        self.ordered = False
        self.error: str | None = None  # of the compilation; "": it has succeeded

    def __reduce__(self) -> tuple[type, tuple[Job]]:
        return tuple, (self.job,)  # which alone workers are sent

    @property
    def calls(self) -> int:
        return self.by_python + self.by_cpp.value

    def order(self) -> None:
        """Has a worker compile it, unless one does or has done so."""
        with lock:
            if not self.ordered:
                self.ordered = True
                self.compiler.add([self])

    def join(self) -> None:
        """Waits for the worker that compiles it. What none has begun is ordered no more: the caller compiles it."""
        if self.ordered and self.compiler.join(self):
            self.ordered = False


class Available:
    """What this process has loaded for GPUs of one compute capability, or its workers have left in Triton's cache."""

    def __init__(self) -> None:
        self.binaries: set[Hashable] = set()
        self.configs: dict[OfKernel, None] = {}  # of the last binaries
        self.wanted: WeakValueDictionary[Hashable, Wanted] = WeakValueDictionary()  # by binaries, what plans wait for

    def add(self, device: DeviceInfo, problem: GemmProblem, selection: Selection) -> None:
        binaries, config = identities(device, problem, selection), (selection.kernel, selection.config)
        with lock:
            self.binaries.update(binaries)
            self.configs.pop(config, None)
            self.configs[config] = None
            if len(self.configs) > COMPARED:
                del self.configs[next(iter(self.configs))]
        change()

    def want(self, binaries: tuple[Hashable, ...], compiler: Compiler, job: Job) -> Wanted:
        """What plans of these binaries wait for."""
        with lock:
            return self.wanted.setdefault(binaries, Wanted(binaries, compiler, job))

    def nearest(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> Selection | None:
        """The available candidate of least predicted time in the class of bits of a selection, or None: without one, or
        where it would be too slow."""
        with lock:
            configs = dict(self.configs)
        of_kits = bool(kits.made(device.capability))
        for stand_in in alike(problem, selection, device, configs, of_kits):
            binaries = identities(device, problem, stand_in)
            if self.binaries.issuperset(binaries) or (of_kits and kits.holds(problem, device, stand_in)):
                return stand_in
        return None


def alike(
    problem: GemmProblem, selection: Selection, device: DeviceInfo, configs: Collection[OfKernel], of_kits: bool
) -> Iterator[Selection]:
    """Candidates in the class of bits of a selection that may stand in for it, the fastest first: of configurations
    and, for `of_kits`, all that the model knows of and a kit may have."""
    own = Candidate(given(problem, selection.algorithm), selection.algorithm)
    own_us = predicted_or_inf(problem, own, model_of(device))
    wanted = bit_class(problem, selection)
    if selection.batch_invariant:
        ranked = batch_invariance.ranked(problem, device)
        loaded = [x for x in ranked if of_kits or x[1].algorithm[:2] in configs]
    else:
        parts = None if problem.arithmetic.exact else parts_of(selection.work)
        loaded = [x for of_one in of_configs(problem, device, configs, parts) for x in of_one]
    limit = max(own_us * SLOWER, own_us + LOST_US)
    within_limit = sorted((x for x in loaded if x[0] <= limit), key=itemgetter(0))
    others = _of_kits(problem, device, own_us) if of_kits and not selection.batch_invariant else ()
    for _, candidate in merge(within_limit, others, key=itemgetter(0)):
        if bit_class(problem, candidate) == wanted and illegal(problem, device, candidate) is None:
            yield Selection.of(candidate, f"until {selection.kernel} {selection.config} is compiled")


def _of_kits(problem: GemmProblem, device: DeviceInfo, own_us: float) -> Iterator[tuple[float, Candidate]]:
    """What a kit may have, the fastest first. Slow ones are looked for last, as that takes longer."""
    before = 0.0
    for slower in SLOWER_OF_KITS if own_us < math.inf else ():
        yield from (x for x in kits.ranked_within(problem, device, own_us * slower) if x[0] > before)
        before = own_us * slower
