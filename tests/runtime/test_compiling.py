"""The compiler of the background: who waits for it, and how many threads it has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import triton_gemm
from triton_gemm.runtime import background, compiling
from triton_gemm.runtime.compiling import Compiler

Makes = Callable[..., Compiler]


@pytest.fixture
def compiler_of() -> Iterator[Makes]:
    """Makes compilers, which are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda *given, **how: stack.enter_context(closing(Compiler(*given, **how)))


class Waits:
    """Compiles nothing before `begin` is set, and fails for "fails". Notes what it has compiled."""

    def __init__(self) -> None:
        self.begun, self.begin, self.compiled = threading.Event(), threading.Event(), list[object]()

    def __call__(self, job: object) -> None:
        self.begun.set()
        assert self.begin.wait(30)
        self.compiled.append(job)
        if job == "fails":
            raise ValueError("no such kernel")


def test_a_compiler_is_joined_where_a_thread_has_the_job(compiler_of: Makes) -> None:
    compiler = compiler_of(waits := Waits(), threads=1)
    compiler.join("not added")
    compiler.add([1, 2])
    assert waits.begun.wait(10)
    compiler.join(2)  # which no thread has begun
    threading.Timer(0.05, waits.begin.set).start()
    compiler.join(1)
    assert waits.compiled == [1] and compiler.wait(10) and waits.compiled == [1]


def test_a_compiler_says_when_all_is_done(compiler_of: Makes) -> None:
    compiler = compiler_of(waits := Waits(), threads=1)
    assert compiler.wait(0)
    compiler.add([1, 2])
    assert not compiler.wait(0.05)
    waits.begin.set()
    assert compiler.wait(10) and waits.compiled == [1, 2]
    assert not compiler.begun and all(compiler.done(job) and compiler.failure(job) is None for job in (1, 2))


def test_the_most_called_job_is_next(compiler_of: Makes) -> None:
    """As it is when a thread takes one; of equals the oldest."""
    calls, ended = {name: 2 for name in ("a", "b", "fails", "d")}, list[tuple[object, str | None]]()
    compiler = compiler_of(waits := Waits(), threads=1, calls=calls.get, on_end=lambda *end: ended.append(end))
    compiler.add("a")
    assert waits.begun.wait(10)
    compiler.add(["b", "fails", "d"])
    calls.update(fails=3, d=4)
    waits.begin.set()
    assert compiler.wait(10) and waits.compiled == ["a", "d", "fails", "b"]
    assert ended == [("a", None), ("d", None), ("fails", "ValueError: no such kernel"), ("b", None)]
    assert not compiler.begun and not compiler.ended, "no job is remembered"


def test_jobs_are_compiled_at_once_and_in_order(compiler_of: Makes) -> None:
    both, order = threading.Barrier(2), []
    # Ends only where two are compiled at once.
    compiler = compiler_of(lambda job: order.append(job) or both.wait(10), threads=2)
    compiler.add(range(6))
    assert compiler.wait(20) and sorted(order[:2]) == [0, 1] and sorted(order) == list(range(6))
    assert all(compiler.failure(job) is None for job in range(6))


def test_what_no_thread_has_taken_can_be_cancelled(compiler_of: Makes) -> None:
    compiler = compiler_of(waits := Waits(), threads=1)
    compiler.add([0, 1, 2, 3])
    assert waits.begun.wait(10)
    assert compiler.cancel([0, 1, 3, "none"]) == {1, 3}
    waits.begin.set()
    assert compiler.wait(10) and waits.compiled == [0, 2] and not compiler.done(1)
    compiler.add([1])
    assert compiler.wait(10) and waits.compiled == [0, 2, 1]


def test_what_compiles_for_too_long_has_failed_and_keeps_no_one(compiler_of: Makes) -> None:
    compiler = compiler_of(waits := Waits(), threads=2, limit_s=0.05)
    compiler.add(["hangs", "too", "late"])
    while not compiler.done("hangs"):
        compiler.pause(0.01)
    assert compiler.failure("hangs") == "compiling takes more than 0.05 s"
    assert not compiler.done("late"), "it has not begun"
    assert all(thread.daemon for thread in compiler.threads)
    waits.begin.set()


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


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process on the host, in no container."""
    monkeypatch.setattr(compiling, "CGROUP", tmp_path)
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


def test_a_core_is_left_to_the_thread_that_times(compiler_of: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each rank on the host."""
    cases = ((1, "", 1), (2, "", 1), (8, "", 7), (64, "", 16), (64, "8", 7), (8, "8", 1), (8, "0", 7), (8, "-2", 7))
    for cores, ranks, count in cases:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert len(compiler_of(lambda job: None).threads) == count


@pytest.mark.parametrize("name", RANKS, ids=RANKS.get)
def test_who_starts_ranks_says_how_many_share_a_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling.ranks() == 1
    for value, ranks in (("8", 8), ("1", 1), ("0", 1), ("", 1), ("-2", 1), ("many", 1)):
        monkeypatch.setenv(name, value)
        assert compiling.ranks() == ranks, value


def test_ranks_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many each node has. A batch script's own process is no rank, whatever the job asks for; one that
    srun starts may start others itself."""
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "8")
    assert compiling.ranks() == 1
    for value, ranks in (("4(x2)", 4), ("2(x13),1", 2), ("5,8(x3)", 8), ("1", 1)):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", value)
        assert compiling.ranks() == ranks, value
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
    files: dict[str, str], cores: int, compiler_of: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        file = compiling.CGROUP / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert len(compiler_of(lambda job: None).threads) == max(1, min(compiling.THREADS, cores - 1))


def test_one_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    background.enabled.cache_clear()
    for value, enabled in (("0", False), ("1", True)):
        monkeypatch.setenv("TRITON_GEMM_BACKGROUND", value)
        assert background.enabled.__wrapped__() == enabled
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", "yes")  # which is said, and raises nothing amid a user's call
    assert background.enabled() and background.enabled()
    assert caplog.messages == ["TRITON_GEMM_BACKGROUND must be 0 or 1, not 'yes': it counts as 1"]
    background.enabled.cache_clear()


def test_whether_workers_can_leave_binaries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background, "cache_folder", lambda: tmp_path / "not" / "made")
    assert background._can_cache.__wrapped__()
    monkeypatch.setattr(os, "access", lambda folder, _: folder != tmp_path)
    assert not background._can_cache.__wrapped__()
