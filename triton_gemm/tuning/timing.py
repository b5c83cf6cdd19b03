"""The one timer's core: what times kernels on a GPU so that times can be compared. `perf/measure/timer.py` reports by
it, and `tuning` chooses by it.

A kernel's time is the replay of a CUDA graph that walks over operand sets larger together than the L2 cache. Kernels
take turns, round by round, on a GPU whose clocks have settled, and are compared within rounds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from ..compat import occupy

MAX_REPEATS = 512
REPLAY_MS = 8.0
SETTLED = 0.01  # clocks have settled when two stretches of work differ by less
STRETCH_S = 0.25
COLD_FACTOR = 2.0  # operand sets together exceed the L2 cache by this factor
MEMORY_SHARE = 0.4  # of the free memory that operand sets may take
MAX_SETS = 512
HEAD_START = 200_000  # clocks of a multiprocessor, some 100 us: until Python has queued a replay
TRIES = (3, 7)  # at the time of one call, at least and at most
AGREE = 1.25  # times the least of them: a second one as short as that confirms it
Stopwatch = Callable[[], Callable[[], float]]  # starts, and gives what reads the milliseconds of one call


class DeviceLostError(RuntimeError):
    """The CUDA context is unusable after a kernel's error; nothing more can be measured in this process."""


def lost(device: torch.device | None = None) -> RuntimeError | None:
    """What CUDA says of a GPU on which no kernel can run any more, as after an illegal access; else None."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return error
    return None


class Replay:
    """A CUDA graph of `repeats` calls, going round a list of them (one for each operand set)."""

    def __init__(self, calls: Sequence[Callable[[], object]], repeats: int) -> None:
        self.repeats = repeats
        self.graph = torch.cuda.CUDAGraph()
        calls[0]()  # libraries make their handles at the first call, which a capture forbids
        # Other threads may load what they have compiled meanwhile. This one may not unload a kernel, as a collection of
        # what is no longer used does.
        with no_garbage(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for i in range(repeats):
                calls[i % len(calls)]()
        self.graph.replay()
        torch.cuda.synchronize()

    def start(self) -> Callable[[], float]:
        """Queues one replay; what it returns gives the milliseconds of one call, once the GPU is done.

        On an idle GPU `begin` would be recorded at once, and what Python does until the replay is queued would count.
        So an idle one waits first, outside of what is measured; one that has work meets both one after the other.
        """
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if torch.cuda.current_stream().query():
            occupy(HEAD_START)
        begin.record()
        self.graph.replay()
        end.record()

        def read() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / self.repeats

        return read


@dataclass(frozen=True)
class Queue:
    """Calls as Python makes them, without a graph: `start` makes `length` of them, one after another.

    Its time is milliseconds a call: Python's alone or, with `drain`, until the GPU is done with them all.
    """

    calls: Sequence[Callable[[], object]]
    length: int
    drain: bool
    keep: bool = False  # whether results live until all calls are made, so that each has an address of its own

    def start(self) -> Callable[[], float]:
        calls = [self.calls[i % len(self.calls)] for i in range(self.length)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kept = []
        for call in calls:
            result = call()
            if self.keep:
                kept.append(result)
        if self.drain:
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
        return lambda: 1000 * took / self.length


@contextmanager
def no_garbage() -> Iterator[None]:
    """Keeps Python's collector out of the times. Nothing is collected before: with torch imported that takes 0.1 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def once_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the GPU, after one that is not timed, and after work that lasts while Python queues it:
    launching takes longer than a small kernel.

    The least of several tries, because another thread that runs Python may keep this one from queueing the call for
    milliseconds. While no two agree, there are more of them, each behind four times as much work.
    """
    call()
    least, most = TRIES
    clocks = 2 * HEAD_START
    tries = sorted(_once_ms(call, clocks) for _ in range(least))
    while tries[1] > AGREE * tries[0] and len(tries) < most:
        clocks *= 4
        tries = sorted([*tries, _once_ms(call, clocks)])
    return tries[0]


def _once_ms(call: Callable[[], object], clocks: int) -> float:
    """A try, behind work of so many clocks."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    occupy(clocks)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def repeats(estimate_ms: float, sets: int, replay_ms: float = REPLAY_MS) -> int:
    """Calls in one replay: enough for the clock, few enough to take turns, and every set at least once."""
    return max(sets, min(MAX_REPEATS, round(replay_ms / estimate_ms)), 1)


def settle(start: Stopwatch, patience_s: float, stretch_s: float = STRETCH_S) -> None:
    """Keeps the GPU busy until two successive stretches of work take the same time, at most `patience_s`."""
    before: float | None = None
    deadline = time.perf_counter() + patience_s
    while time.perf_counter() < deadline:
        stretch = time.perf_counter() + min(stretch_s, patience_s)
        reads: list[Callable[[], float]] = []
        while not reads or time.perf_counter() < stretch:  # where others use the GPU, one alone may take longer
            reads.append(start())
            if len(reads) % 4 == 0:
                reads[-1]()
        now = median(read() for read in reads)
        if before is not None and abs(now - before) <= SETTLED * before:
            return
        before = now


def round_count(round_ms: float, budget_s: float, bounds: tuple[int, int]) -> int:
    """Rounds that fit the budget, within `bounds`."""
    return max(bounds[0], min(bounds[1], int(1000 * budget_s / max(round_ms, 1e-6))))


def interleave(starts: Mapping[str, Stopwatch], rounds: int) -> dict[str, list[float]]:
    """Times of each name, one a round. Every other round runs backwards, so none always follows another."""
    names = list(starts)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            pending[name].append(starts[name]())
    return {name: [read() for read in reads] for name, reads in pending.items()}


def ratios(times: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[float]:
    """The baseline's time over the other's in the same round: 1 is as fast, more is faster."""
    return [base / own for base, own in zip(times[baseline], times[name], strict=True)]


def set_count(size: int, l2: int, free: int, cold: float = COLD_FACTOR) -> int:
    """How many operand sets of `size` bytes are `cold` times L2 together and still leave memory."""
    return max(1, min(math.ceil(cold * l2 / size), int(MEMORY_SHARE * free / size), MAX_SETS))


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; integers from -8 to 8, of int8 from all there are. Zeros would run faster than real data."""
    if not dtype.is_floating_point:
        low, high = (-128, 128) if dtype == torch.int8 else (-8, 9)
        return torch.randint(low, high, shape, dtype=dtype, device=generator.device, generator=generator)
    if dtype == torch.float64:
        return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
    return torch.randn(shape, dtype=torch.float32, device=generator.device, generator=generator).to(dtype)
