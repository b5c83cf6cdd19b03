"""The compiler of the background: who waits for it, and when its workers end."""

from __future__ import annotations

import threading

import pytest

import triton_gemm
from triton_gemm.runtime.compiling import Compiler
from triton_gemm.runtime.worker import LostError


def one_that_waits() -> tuple[Compiler, threading.Event, list[object]]:
    """A compiler that compiles nothing before the event, and what it has compiled."""
    begin, compiled = threading.Event(), []

    def compile(job: object) -> None:
        begin.wait()
        compiled.append(job)

    return Compiler(compile, threads=1), begin, compiled


def test_a_compiler_is_joined_where_a_thread_has_the_job() -> None:
    compiler, begin, compiled = one_that_waits()
    try:
        compiler.join("not added")
        compiler.add([1, 2])
        while not compiler.begun:
            pass
        compiler.join(2)  # which no thread has begun
        threading.Timer(0.05, begin.set).start()
        compiler.join(1)
        assert compiled == [1] and compiler.wait(10) and compiled == [1]
    finally:
        compiler.close()


def test_a_compiler_says_when_all_is_done() -> None:
    compiler, begin, compiled = one_that_waits()
    try:
        assert compiler.wait(0)
        compiler.add([1, 2])
        assert not compiler.wait(0.05)
        compiler.add([3, 4], first=True)
        begin.set()
        assert compiler.wait(10) and compiled == [1, 3, 4, 2]
        for job in compiled:
            compiler.forget(job)
        assert not compiler.begun and not compiler.ended
    finally:
        compiler.close()


class IdleWorker:
    """Notes when a process is started and ended."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.process: object = None
        self.ended = threading.Event()

    def start(self) -> None:
        self.process = object()
        self.said.append("start")

    def compile(self, job: object, limit_s: float) -> None:
        self.said.append(f"compile {job}")

    def end(self, patience_s: float = 0.0) -> int:
        self.process = None
        self.said.append("end")
        self.ended.set()
        return 0

    def close(self) -> None:
        pass


def test_a_worker_without_a_job_ends_and_another_starts() -> None:
    worker = IdleWorker()
    compiler = Compiler(lambda _: None, lambda: worker, 1, idle_s=0.05)  # type: ignore[arg-type,return-value]
    try:
        for job in (1, 2):
            worker.ended.clear()
            compiler.add([job])
            assert compiler.wait(10) and worker.ended.wait(10)
        assert worker.said == ["start", "compile 1", "end", "start", "compile 2", "end"]
    finally:
        compiler.close()


def test_who_has_no_workers_is_told_once() -> None:
    def lost() -> None:
        raise LostError("no processes")

    worker, said = IdleWorker(), []
    worker.start = lost  # type: ignore[method-assign]
    compiler = Compiler(lambda _: None, lambda: worker, 2, on_lost=said.append)  # type: ignore[arg-type,return-value]
    try:
        compiler.add([1, 2, 3])
        assert compiler.wait(10) and [str(x) for x in said] == ["no processes"]
    finally:
        compiler.close()


def test_waiting_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="timeout"):
        triton_gemm.wait_until_compiled(-1)
    with pytest.raises(TypeError, match="timeout"):
        triton_gemm.wait_until_compiled("long")  # type: ignore[arg-type]
