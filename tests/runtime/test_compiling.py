"""The compiler of the background: who waits for it, and when its workers end."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

import triton_gemm
from triton_gemm.runtime import compiling
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
        begin.set()
        assert compiler.wait(10) and compiled == [1, 2]
        assert not compiler.begun and all(compiler.done(job) and compiler.failure(job) is None for job in compiled)
    finally:
        compiler.close()


def test_the_most_called_job_is_next() -> None:
    """As it is when a thread takes one; of equals the oldest."""
    begun, begin, calls = threading.Event(), threading.Event(), {name: 2 for name in "abcd"}
    compiled: list[object] = []
    ended: list[tuple[object, str | None]] = []

    def compile(job: object) -> None:
        begun.set()
        begin.wait()
        compiled.append(job)
        if job == "c":
            raise ValueError("no such kernel")

    compiler = Compiler(compile, threads=1, calls=lambda job: calls[str(job)], on_end=lambda *end: ended.append(end))
    try:
        compiler.add("a")
        assert begun.wait(10)
        compiler.add("bcd")
        calls.update(c=3, d=4)
        begin.set()
        assert compiler.wait(10) and compiled == ["a", "d", "c", "b"]
        assert ended == [("a", None), ("d", None), ("c", "ValueError: no such kernel"), ("b", None)]
        assert not compiler.begun and not compiler.ended, "no job is remembered"
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
    compiler = Compiler(lambda _: None, lambda: worker, 1, idle_s=0.05)
    try:
        for job in (1, 2):
            worker.ended.clear()
            compiler.add([job])
            assert compiler.wait(10) and worker.ended.wait(10)
        assert worker.said == ["start", "compile 1", "end", "start", "compile 2", "end"]
    finally:
        compiler.close()


def test_who_has_no_workers_is_told_once() -> None:
    worker, said = IdleWorker(), []
    worker.start = Mock(side_effect=LostError("no processes"))
    compiler = Compiler(lambda _: None, lambda: worker, 2, on_lost=said.append)
    try:
        compiler.add([1, 2, 3])
        assert compiler.wait(10) and [str(x) for x in said] == ["no processes"]
    finally:
        compiler.close()


def test_waiting_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="timeout"):
        triton_gemm.wait_until_compiled(-1)
    with pytest.raises(TypeError, match="timeout"):
        triton_gemm.wait_until_compiled("long")


RANKS = {
    "LOCAL_WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI",
    "MV2_COMM_WORLD_LOCAL_SIZE": "MVAPICH",
    "MPI_LOCALNRANKS": "MPICH",
    "PMI_LOCAL_SIZE": "PALS",
    "SLURM_STEP_TASKS_PER_NODE": "srun",
}


@pytest.mark.parametrize("name", RANKS, ids=RANKS.get)
def test_who_starts_ranks_says_how_many_share_a_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in RANKS:
        monkeypatch.delenv(other, raising=False)
    assert compiling.ranks() == 1
    for told, ranks in (("8", 8), ("1", 1), ("0", 1), ("", 1), ("-2", 1), ("many", 1)):
        monkeypatch.setenv(name, told)
        assert compiling.ranks() == ranks, told


def test_ranks_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many each node has. A batch script's own process is no rank, whatever the job asks for; one that
    srun starts may start others itself."""
    for other in RANKS:
        monkeypatch.delenv(other, raising=False)
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "8")
    assert compiling.ranks() == 1
    for told, ranks in (("4(x2)", 4), ("2(x13),1", 2), ("5,8(x3)", 8), ("1", 1)):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", told)
        assert compiling.ranks() == ranks, told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compiling.ranks() == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "400000\n"}, 64),
        ({}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, 64),
    ],
    ids=str,
)
def test_a_containers_quota_of_cores_counts(
    files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(compiling, "CGROUP", tmp_path, raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    compiler = Compiler(lambda job: None)
    compiler.close()
    assert len(compiler.threads) == max(1, min(compiling.THREADS, cores - 1))
