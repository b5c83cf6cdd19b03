"""A thread for what would delay the calls of a service: files, the model's predictions, loading machine code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch

from ..hardware.graphs import allow_during_captures

_T = TypeVar("_T")


class Aside:
    """One daemon thread, which starts with the first job. What it does breaks no capture of other threads. Jobs let
    others have Python between their parts (`time.sleep(0)`)."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[object], Callable[[], object], int]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, job: Callable[[], _T], index: int) -> Future[_T]:
        """Has a job done after those before, with that device as the current one."""
        found: Future[_T] = Future()
        self._jobs.put((found, job, index))  # type: ignore[arg-type]
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="triton_gemm learner", daemon=True)
            self._thread.start()
        return found

    def _work(self) -> None:
        allow_during_captures()
        while True:
            future, job, index = self._jobs.get()
            try:
                with torch.cuda.device(index):
                    future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del future, job  # and with them what they hold
