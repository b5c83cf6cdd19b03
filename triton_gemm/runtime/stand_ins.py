"""Fallback kernels, called stand-ins, which run until a product's own kernel is compiled. A stand-in is loaded or in
Triton's cache, gives the same bits as the product's own kernel, and is predicted to be fast enough."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import replace

from .. import kernels
from ..compat import free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate, parts_of
from ..problem import GemmProblem, Layout
from ..selection import batch_invariance
from ..selection.bit_classes import bit_class
from ..selection.of_configs import OfKernel, of_configs
from ..selection.select import Selection, given, illegal, predicted_or_inf
from . import policies
from .binaries import identities
from .compiling import Compiler

Job = tuple[GemmProblem, Selection]  # as workers take it
# A stand-in may be predicted to take so many times as long as the product's own kernel,
SLOWER = 1.5
LOST_US = 5_000.0  # or so many microseconds longer, which is less than waiting for the compiler
COMPARED = 32  # configurations at most that are considered for a stand-in; two or three take a millisecond
# At a weight's first call a kernel is compiled for each bit class that these numbers of rows would use.
# M = 1 comes first: decoding needs it soon, and stand-ins for more rows do not have its bit class.
AHEAD = (1, 512, 256, 128, 64, 32, 16, 1024, 2048, 2, 4, 8)
MAX_WEIGHTS = 4096
lock = free_in_children(threading.RLock())


class Available:
    """What this process has loaded for GPUs of one compute capability, or its workers have left in Triton's cache.

    binaries, configs: the binaries, and the configurations of the last ones; added: how often there were new ones.
    weights: for which kernels were compiled ahead, as problems with M = 0; classes: their bit classes, by kind of
    problem; quick: the binaries that are compiled at a kind's first call.
    numbers: of each set of binaries that a plan waits for, its index; lost: by index, the microseconds that calls lost
    without them; wanted: by index, the compiler and the job, until they are ordered; ordered: the same, from then on
    until they are compiled.
    failed: sets of binaries that could not be compiled, and why.
    """

    def __init__(self) -> None:
        self.binaries: set[Hashable] = set()
        self.quick: set[Hashable] = set()
        self.configs: dict[OfKernel, None] = {}
        self.weights: set[GemmProblem] = set()
        self.classes: dict[GemmProblem, set[str]] = {}
        self.added = 0
        self.numbers: dict[Hashable, int] = {}
        self.lost: list[float] = []
        self.wanted: dict[int, tuple[Compiler, Job]] = {}
        self.ordered: dict[int, tuple[Compiler, Job]] = {}
        self.failed: dict[Hashable, str] = {}

    def add(self, device: DeviceInfo, problem: GemmProblem, selection: Selection) -> None:
        binaries, config = identities(device, problem, selection), (selection.kernel, selection.config)
        with lock:
            self.binaries.update(binaries)
            self.added += 1
            self.configs.pop(config, None)
            self.configs[config] = None
            if len(self.configs) > COMPARED:
                del self.configs[next(iter(self.configs))]

    def wait_for(self, binaries: Hashable, compiler: Compiler, job: Job) -> int:
        """The index of a plan's set of binaries. They may be ordered from now on."""
        with lock:
            number = self.numbers.setdefault(binaries, len(self.lost))
            if number == len(self.lost):
                self.lost.append(0.0)
            self.wanted.setdefault(number, (compiler, job))
        return number

    def order(self, number: int, compiler: Compiler, job: Job) -> None:
        """Adds a job to a compiler, which compiles the binaries of that index, unless they are ordered already."""
        with lock:
            if number not in self.ordered:
                self.ordered[number] = compiler, job
                compiler.add([job])

    def order_all(self) -> None:
        """Orders everything that is wanted."""
        with lock:
            for number, (compiler, job) in list(self.wanted.items()):  # a handler of signals may want more meanwhile
                self.order(number, compiler, job)
                self.wanted.pop(number, None)

    def ended(self, number: int) -> str | None:
        """The error of a compilation that has ended, or "" if it succeeded. None if it is under way or was not ordered.
        The binaries may be ordered again afterwards."""
        with lock:
            if number not in self.ordered:
                return None
            compiler, job = self.ordered[number]
            if not compiler.done(job):
                return None
            why = compiler.failure(job)
            compiler.forget(job)
            del self.ordered[number]
        return why or ""

    def nearest(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> Selection | None:
        """The available candidate of least predicted time in the class of bits of a selection, or None: without one, or
        where it would be too slow."""
        with lock:
            configs = dict(self.configs)
        if selection.batch_invariant:
            candidates = [x for x in batch_invariance.ranked(problem, device) if x[1].algorithm[:2] in configs]
        else:
            parts = None if problem.arithmetic.exact else parts_of(selection.work)
            candidates = [x for of_one in of_configs(problem, device, configs, parts) for x in of_one]
        candidates = sorted([*candidates, *quick(problem, selection, device)], key=lambda one: one[0])
        for stand_in in of_its_class(problem, selection, device, candidates):
            if self.binaries.issuperset(identities(device, problem, stand_in)):
                return stand_in
        return None

    def ahead(self, problem: GemmProblem, selection: Selection, device: DeviceInfo) -> list[Job]:
        """The jobs to compile ahead at a weight's first call: at the first call of a kind of problem those of `quick`
        that any number of rows may run on, and one for each new class of bits that rows in AHEAD choose and these do
        not give."""
        kind, weight = _kind(problem), replace(problem, M=0)
        single = problem.batch == 1 and problem.groups is None and problem.a.strides[2] == problem.c.strides[2] == 1
        with lock:
            if not single or weight in self.weights or len(self.weights) >= MAX_WEIGHTS:
                return []
            self.weights.add(weight)
            is_first = kind not in self.classes
            classes = self.classes.setdefault(kind, set())
            classes.add(bit_class(problem, selection))
        jobs: list[Job] = []
        if is_first and not selection.batch_invariant:
            found = [x for parts in (1, 2) for x in kernels.warp_specialised.quick(problem, device, parts)]
            one_way = [x for x in found if x.algorithm[3:] == found[0].algorithm[3:]]  # swapped and packed alike
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
                others = of_its_class(other, choice, device, quick(other, choice, device))
                if not any(self.quick.issuperset(identities(device, other, x)) for x in others):
                    jobs.append((other, choice))
        return jobs


def _kind(problem: GemmProblem) -> GemmProblem:
    """What problems have in common whose binaries may be the same: all but sizes."""

    def without_pitch(layout: Layout) -> Layout:
        _, row, column = layout.strides
        return replace(layout, strides=(0, min(row, 2), min(column, 2)))

    a, b, c = map(without_pitch, (problem.a, problem.b, problem.c))
    return replace(problem, batch=1, M=0, N=0, K=0, a=a, b=b, c=c)


def quick(problem: GemmProblem, selection: Selection, device: DeviceInfo) -> list[tuple[float, Candidate]]:
    """(predicted microseconds, candidate) of those that are compiled soonest, with K cut as in a selection unless sums
    are exact: first those that `Available.ahead` has compiled."""
    schedule = None if problem.arithmetic.exact else selection.schedule
    parts = 1 if schedule is None else schedule.split_k
    model = model_of(device)
    return [(predicted_or_inf(problem, x, model), x) for x in kernels.warp_specialised.quick(problem, device, parts)]


def of_its_class(
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
