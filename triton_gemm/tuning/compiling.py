"""Compiles in threads of its own while something else is timed."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

THREADS = 16
LIMIT_S = 60.0  # of one compilation
PATIENCE_S = 5.0  # for what is being compiled at the end


class Compiler:
    """`compile(job)` for jobs in the order in which they come, many at once. Threads are daemons: one that never ends
    does not keep Python from ending."""

    def __init__(
        self,
        compile: Callable[[object], None],
        threads: int | None = None,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compile, self.limit_s, self.clock = compile, limit_s, clock
        self.waiting: deque[object] = deque()
        self.begun: dict[object, float] = {}
        self.ended: dict[object, str | None] = {}  # why not, or None
        self.changed = threading.Condition()
        self.closed = False
        count = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def add(self, jobs: Iterable[object]) -> None:
        with self.changed:
            self.waiting.extend(jobs)
            self.changed.notify_all()

    def failure(self, job: object) -> str | None:
        """Why a job that is `done` has failed, or None."""
        if job in self.ended:
            return self.ended[job]
        return f"compiling takes more than {self.limit_s:g} s"

    def done(self, job: object) -> bool:
        """Whether it has ended, or takes too long."""
        begun = self.begun.get(job)
        return job in self.ended or (begun is not None and self.clock() - begun > self.limit_s)

    def pause(self, seconds: float) -> None:
        """Waits until something has ended, at most so long."""
        with self.changed:
            self.changed.wait(seconds)

    def close(self) -> None:
        """Begins nothing more, and waits a little for what is under way."""
        with self.changed:
            self.closed = True
            self.waiting.clear()
            self.changed.notify_all()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting and not self.closed:
                    self.changed.wait()
                if self.closed:
                    return
                job = self.waiting.popleft()
                self.begun[job] = self.clock()
            why = None
            try:
                self.compile(job)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            with self.changed:
                self.ended[job] = why
                self.changed.notify_all()
