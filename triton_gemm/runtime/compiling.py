"""Compiles while something else is timed: in processes, each with a thread of this one."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .worker import LostError, Worker, error_line

THREADS = 16
STARTING = 4  # processes at once: of more the first is ready later, as each imports torch
LIMIT_S = 60.0  # of one compilation
PATIENCE_S = 5.0  # for what is being compiled at the end
CGROUP = Path("/sys/fs/cgroup")  # a container's own
RANKS = (  # where the number of a run's processes on a host is told
    "LOCAL_WORLD_SIZE",  # by torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "PMI_LOCAL_SIZE",  # Cray's PALS
    "SLURM_STEP_TASKS_PER_NODE",  # srun, for every node, as in "2(x3),1"; a batch script's own process has it not
)

log = logging.getLogger("triton_gemm.tuning")


def _disturbs(lost: LostError) -> None:
    log.warning("compiling in this process, which disturbs what is timed: a process of its own is lost: %s", lost)


class Compiler:
    """`compile(job)` for jobs in the order in which they come, many at once. Threads are daemons: one that never ends
    does not keep Python from ending. Who waits for a job that no thread has taken may `compile_here`.

    A process takes seconds to start: it is started when there is a job, which whoever is ready first takes. A thread
    whose process cannot be started, or is lost, goes on alone: its `compile` compiles. What a process was compiling
    when something outside killed it has failed, and there is one more process.

    Args:
        worker: Makes what has a process compile a job first, one for each thread. What `compile` then does is to load
            what is in Triton's cache.
        on_lost: Called once when a process is lost.
        idle_s: Seconds after which a process that has no job ends, and another is started for the next one.
        calls: How many calls need a job. The most needed is next, and of equals the oldest.
        on_end: Called with each job that has ended, and why it has failed or None. Without it `failure` says so later.
    """

    def __init__(
        self,
        compile: Callable[[object], None],
        worker: Callable[[], Worker | None] = lambda: None,
        threads: int | None = None,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[LostError], None] = _disturbs,
        idle_s: float | None = None,
        calls: Callable[[object], int] = lambda job: 0,
        on_end: Callable[[object, str | None], None] | None = None,
    ) -> None:
        self.compile, self.limit_s, self.clock = compile, limit_s, clock
        self.on_lost, self.idle_s, self.calls = on_lost, idle_s, calls
        self.waiting: deque[object] = deque()
        self.begun: dict[object, float] = {}
        self.ended: dict[object, str | None] = {}  # why not, or None
        self.on_end = on_end or self.ended.__setitem__
        self.changed = threading.Condition()
        self.closed = self.reported = False
        self.starting = 0  # processes
        # A core is left to the thread that times. A worker takes about a second of CPU to begin with and some hundred
        # MB, measured once on two cores: less than machines with GPUs have for each core.
        count = threads or max(1, min(THREADS, cores() // ranks() - 1))
        self.workers = [worker() for _ in range(count)]
        name = "triton_gemm compiler"
        self.threads = [threading.Thread(target=self._work, args=(x,), name=name, daemon=True) for x in self.workers]
        for thread in self.threads:
            thread.start()

    def add(self, jobs: Iterable[object]) -> None:
        with self.changed:
            self.waiting.extend(jobs)
            self.changed.notify_all()

    def cancel(self, jobs: Iterable[object]) -> set[object]:
        """Removes jobs that no thread has taken yet, and returns them. They are not `done`, and may be added again."""
        with self.changed:
            cancelled = set(jobs).intersection(self.waiting)
            self.waiting = deque(job for job in self.waiting if job not in cancelled)
        return cancelled

    def join(self, job: object) -> bool:
        """Waits for a job that a thread has taken. One that none has is cancelled; whether that is so."""
        if self.cancel([job]):
            return True
        with self.changed:
            self.changed.wait_for(lambda: job not in self.begun or self.done(job), self.limit_s)
        return False

    def compile_here(self, job: object) -> None:
        """Compiles a job in this thread and process, if no thread has taken it yet."""
        if self.cancel([job]):
            self.begun[job] = self.clock()
            self._end(job, self._load(job))

    def failure(self, job: object) -> str | None:
        """Why a job that is `done` has failed, or None."""
        if job in self.ended:
            return self.ended[job]
        return f"compiling takes more than {self.limit_s:g} s"

    def done(self, job: object) -> bool:
        """Whether it has ended, or takes too long."""
        begun = self.begun.get(job)
        return job in self.ended or (begun is not None and self.clock() - begun > self.limit_s)

    def wait(self, timeout: float | None) -> bool:
        """Waits until every job is done, at most so many seconds; whether it is."""
        deadline = math.inf if timeout is None else self.clock() + timeout

        def is_done() -> bool:
            return not self.waiting and all(map(self.done, [*self.begun]))

        with self.changed:
            while not is_done():
                left = deadline - self.clock()
                if left <= 0:
                    return False
                self.changed.wait(min(left, 1.0))  # one that hangs is done without a notice
        return True

    def abandon(self) -> None:
        """In a forked child: closes its copies of the ends of pipes, so that workers see the parent's end."""
        for worker in self.workers:
            if worker is not None and worker.pipe is not None:
                worker.pipe.close()

    def pause(self, seconds: float) -> None:
        """Waits until something has ended, at most so long."""
        with self.changed:
            self.changed.wait(seconds)

    def close(self) -> None:
        """Begins nothing more, ends the processes, and waits a little for what is under way in this one."""
        with self.changed:
            self.closed = True
            self.waiting.clear()
            self.changed.notify_all()
        for worker in self.workers:
            if worker is not None:
                worker.close()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, worker: Worker | None) -> None:
        try:
            while True:
                if worker is not None and worker.process is None and not self._start(worker):
                    worker = None
                with self.changed:
                    idle_s = None if worker is None else self.idle_s
                    if not self.changed.wait_for(lambda: self.waiting or self.closed, idle_s):
                        job = None
                    elif self.closed:
                        return
                    else:
                        job = max(self.waiting, key=self.calls)
                        self.waiting.remove(job)
                        self.begun[job] = self.clock()
                if job is None and worker is not None:
                    worker.end()
                    continue
                why = None
                try:
                    if worker is not None:
                        why = worker.compile(job, self.limit_s)
                except LostError as lost:
                    if self.closed:
                        return
                    worker = None
                    self._report(lost)
                if why is None:
                    self.begun[job] = self.clock()
                    why = self._load(job)
                self._end(job, why)
        finally:
            if worker is not None:
                worker.end()

    def _start(self, worker: Worker) -> bool:
        """Starts a process once there are more jobs than processes that start now, of which there are STARTING at most;
        whether it has started."""
        with self.changed:
            self.changed.wait_for(lambda: self.starting < min(len(self.waiting), STARTING) or self.closed)
            self.starting += 1
        try:
            if not self.closed:
                worker.start()
        except LostError as lost:
            if not self.closed:
                self._report(lost)
            return False
        finally:
            with self.changed:
                self.starting -= 1
                self.changed.notify_all()
        return True

    def _end(self, job: object, why: str | None) -> None:
        self.on_end(job, why)
        with self.changed:
            self.begun.pop(job, None)
            self.changed.notify_all()

    def _load(self, job: object) -> str | None:
        try:
            self.compile(job)
        except Exception as error:
            return error_line(error)
        return None

    def _report(self, lost: LostError) -> None:
        with self.changed:
            is_first, self.reported = not self.reported, True
        if is_first:
            self.on_lost(lost)


def cores() -> int:
    """Those that this process may use, as far as its container's CPU quota goes."""
    count = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of cgroup v2, v1
        with suppress(OSError, ValueError):  # there is none, or "max"
            quota, period = (int(x) for name in names for x in (CGROUP / name).read_text().split())
            if quota > 0:
                count = min(count, max(1, quota // period))
    return count


def ranks() -> int:
    """The processes of a distributed run that share this host's cores, as what has started them says; of hosts with
    different numbers the most."""
    counts = (int(n) for name in RANKS for n in re.findall(r"(?:^|,)(\d+)", os.environ.get(name, "")))
    return max([1, *counts])
