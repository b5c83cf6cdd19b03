"""Candidates are compiled in processes: what they put into Triton's cache is found here, and none outlives a tuning."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import runs, soon, started
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import compat
from triton_gemm.kernels.launch import compiled
from triton_gemm.learning.candidates import ranked
from triton_gemm.runtime import worker
from triton_gemm.runtime.binaries import SCALARS, identity, launches_on, operands_of
from triton_gemm.runtime.compiling import Compiler
from triton_gemm.runtime.worker import LostError, Question, Worker
from triton_gemm.selection.select import select

# A worker that compiles nothing. Jobs are what it does: Python, which may set `answer`; what it prints goes nowhere.
STUB = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
pipe = Connection(os.dup(0))
(path, nice), target = pipe.recv(), pipe.recv()
print("a library says hello", flush=True)
pipe.send("ready")
while True:
    answer = None
    exec(pipe.recv())
    pipe.send(answer)
"""
# A process that tunes: the package's own worker, in which a compilation hangs, says that it has begun.
TUNES = """
import sys
from triton_gemm.runtime import worker
wait = "lambda *job: (open(job[-1], 'w').close(), __import__('time').sleep(60))"
hangs = f"from triton_gemm.runtime import worker; worker._compiled = {wait}; main(pipe)"
one = worker.Worker((None, (9, 0)), [sys.executable, "-c", worker.START.replace("main(pipe)", hangs)])
one.start()
print(one.process.pid, flush=True)
one.compile((None, sys.argv[1]), 60)
"""


def stub(code: str = STUB) -> Worker:
    return Worker(None, [sys.executable, "-c", code])


@contextmanager
def running(made: Worker) -> Iterator[Worker]:
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
def one() -> Iterator[Worker]:
    with running(stub()) as made:
        yield made


def finished(compiler: Compiler, *jobs: object) -> list[str | None]:
    assert soon(lambda: all(map(compiler.done, jobs)), 30)
    return [compiler.failure(job) for job in jobs]


def failures(compiler: Compiler, *jobs: object) -> list[str | None]:
    """Has the compiler compile these jobs, and closes it. Returns each job's error, or None."""
    compiler.add(jobs)
    found = finished(compiler, *jobs)
    compiler.close()
    return found


# --- One process ---


def test_what_a_worker_compiles_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sent here. It finds what this process finds, whatever lies in the current folder, and takes what cannot be
    compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # set too late for this process
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit")
    problem = problem_of(100, 64, 48)  # whose kernel no other test compiles here
    selection = select(problem, HOPPER)
    sent: dict[object, compat.MachineCode] = {}
    with running(Worker((HOPPER, (9, 0)), on_made=sent.update)) as made:
        environment = Path(f"/proc/{made.process.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in environment
        assert "has no attribute" in str(made.compile((problem, None), 60))
        assert made.compile((problem, selection), 60) is None
        right, wrong = Question(ranked, problem, HOPPER, selection), Question(ranked, problem, None, selection)
        assert made.compile(right, 60) is None and made.compile(wrong, 60)
        assert right.answer == ranked(problem, HOPPER, selection) and wrong.answer is None
    found: list[bool] = []
    launches = launches_on(HOPPER, problem, selection)
    operands = operands_of(problem, launches)
    monkeypatch.delenv("TRITON_INTERPRET")
    with compat.compiling_for((9, 0), tmp_path / "cache"), compat.compilations(lambda _, there: found.append(there)):
        for launch in launches:
            launch.kernel.device_caches.pop("sm_90", None)
            code = compat.machine_code(compiled(launch, operands, SCALARS))
            assert sent.pop(((9, 0), identity(launch, operands))) == code
    assert found == len(launches) * [True] and not sent


def test_a_worker_answers_what_is_asked(one: Worker) -> None:
    assert one.compile("print('stray', flush=True)", 10) is None
    assert one.compile("answer = 'ValueError: no'", 10) == "ValueError: no"


def test_what_takes_too_long_ends_with_all_that_it_has_started(one: Worker) -> None:
    first = one.process.pid
    ptxas = one.compile("answer = str(subprocess.Popen(['sleep', '60']).pid)", 10)
    assert one.compile("time.sleep(60)", 0.05) == "compiling takes more than 0.05 s"
    assert not runs(first) and soon(lambda: not runs(int(str(ptxas))))
    one.start()
    assert one.process.pid != first and one.compile("", 10) is None, "there is another"


def test_a_crash_is_the_candidates_failure_and_ends_what_the_compiler_has_started(one: Worker) -> None:
    assert one.compile("os.kill(os.getpid(), signal.SIGABRT)", 10) == "the compiler crashed with SIGABRT"
    one.start()
    ptxas = one.compile("answer = str(subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL).pid)", 10)
    os.kill(pid := one.process.pid, signal.SIGSEGV)
    assert soon(lambda: not runs(pid))
    assert one.compile("", 10) == "the compiler crashed with SIGSEGV"
    assert soon(lambda: not runs(int(str(ptxas))))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("sys.exit(3)", "it ended with 3"),
        ("pipe.close(); time.sleep(0.2); sys.exit(3)", "it ended with 3"),
        ("os.write(pipe.fileno(), b'\\0\\0\\0\\1?'); time.sleep(60)", "UnpicklingError"),
        (lambda: None, "PicklingError|AttributeError"),
    ],
)
def test_a_worker_that_ends_or_is_not_understood_is_lost(one: Worker, how: object, why: str) -> None:
    with pytest.raises(LostError, match=why):
        one.compile(how, 10)
    assert one.process is None


def test_one_that_cannot_be_killed_blocks_nothing(one: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    process = one.process
    one.pipe.send("time.sleep(60)")
    monkeypatch.setattr(worker, "GONE_S", 1.0)
    ending = threading.Thread(target=one.end, daemon=True)
    try:
        with monkeypatch.context() as sleeping:
            sleeping.setattr(os, "killpg", lambda *_: None)  # an uninterruptible sleep
            ending.start()
            time.sleep(0.1)
            closing = threading.Thread(target=one.close, daemon=True)
            closing.start()
            closing.join(0.5)
            assert not closing.is_alive()
            ending.join(10)
            assert not ending.is_alive() and runs(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", ["", "import sys; sys.exit(1)", STUB.replace('"ready"', '"else"'), "time.sleep(60)"])
def test_what_does_not_get_ready_is_lost(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START_S", 0.5)
    made = stub(f"import time\n{code}")
    with pytest.raises(LostError):
        made.start()
    assert made.process is None
    with pytest.raises(LostError, match="FileNotFoundError"):
        Worker(None, ["/no/such/python"]).start()


def test_a_killed_tuning_leaves_no_worker(tmp_path: Path) -> None:
    """Nor one in the midst of a compilation that hangs."""
    tuning = started(TUNES, tmp_path / "begun")
    pid = int(tuning.stdout.readline())
    assert soon((tmp_path / "begun").exists) and runs(pid)
    tuning.kill()
    tuning.wait()
    assert soon(lambda: not runs(pid))
    tuning.communicate()


# --- Many ---


class Workers:
    """Makes workers, and keeps them to look at."""

    def __init__(self, code: str = STUB) -> None:
        self.code, self.made = code, list[Worker]()

    def __call__(self) -> Worker:
        self.made.append(stub(self.code))
        return self.made[-1]

    def pids(self) -> list[int]:
        return [one.process.pid for one in self.made if one.process is not None]


def test_jobs_are_compiled_by_workers_and_then_loaded_here() -> None:
    workers, loaded = Workers(), list[object]()
    compiler = Compiler(loaded.append, workers, threads=3)
    assert workers.pids() == [], "none is started before there is something to compile"
    compiler.add(["answer = None", "answer = 'ValueError: no'"])
    assert finished(compiler, "answer = None", "answer = 'ValueError: no'") == [None, "ValueError: no"]
    assert loaded == ["answer = None"]
    pids = workers.pids()
    assert 1 <= len(pids) <= 2, "no more than there are jobs"
    compiler.close()
    assert not any(map(runs, pids)) and not any(thread.is_alive() for thread in compiler.threads)


def test_who_waits_for_a_job_compiles_it_while_processes_start() -> None:
    loaded = list[object]()
    compiler = Compiler(loaded.append, Workers(f"import time; time.sleep(60)\n{STUB}"), threads=2)
    compiler.add(["first", "second"])
    compiler.compile_here("first")
    assert compiler.done("first") and loaded == ["first"] and not compiler.done("second")
    compiler.compile_here("first")
    assert loaded == ["first"], "it was compiled before"
    compiler.close()


def test_who_is_ready_takes_what_others_start_for() -> None:
    """A process that starts for ever has no job of its own."""
    starting, made = f"import time; time.sleep(60)\n{STUB}", list[Worker]()

    def worker() -> Worker:
        made.append(stub(starting if made else STUB))
        return made[-1]

    compiler = Compiler(lambda job: None, worker, threads=3)
    jobs = [f"answer = None  # {i}" for i in range(9)]
    assert failures(compiler, *jobs) == 9 * [None]


def test_what_cannot_be_loaded_has_failed() -> None:
    compiler = Compiler(lambda job: {}[job], Workers(), threads=1)
    assert failures(compiler, "") == ["KeyError: ''"]


def test_a_compilation_that_hangs_costs_a_thread_nothing() -> None:
    workers = Workers()
    compiler = Compiler(lambda job: None, workers, threads=1, limit_s=2)
    jobs = ["time.sleep(60)", "answer = 'ValueError: no'", "answer = None"]
    assert failures(compiler, *jobs) == ["compiling takes more than 2 s", "ValueError: no", None]


def test_the_time_until_a_worker_is_ready_is_not_a_jobs() -> None:
    compiler = Compiler(lambda job: None, Workers(f"import time; time.sleep(3)\n{STUB}"), threads=1, limit_s=2)
    assert failures(compiler, "") == [None]


def test_a_worker_without_a_job_ends_and_another_starts(tmp_path: Path) -> None:
    noted, compiler = tmp_path / "pids", Compiler(lambda _: None, Workers(), threads=1, idle_s=0.05)
    for i in range(2):
        job = f"print(os.getpid(), file=open({str(noted)!r}, 'a'))  # {i}"
        compiler.add([job])
        assert finished(compiler, job) == [None]
        pids = [int(pid) for pid in noted.read_text().split()]
        assert len({*pids}) == i + 1 and soon(lambda pids=pids: not any(map(runs, pids)))
    compiler.close()


def test_without_workers_it_is_compiled_here_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Or who asks for it is told, once."""
    caplog.set_level(logging.WARNING, "triton_gemm.tuning")
    errors = list[LostError]()
    for how in ({}, {"on_lost": errors.append}):
        loaded: list[object] = []
        compiler = Compiler(loaded.append, Workers("raise SystemExit(2)"), threads=2, **how)
        assert failures(compiler, *range(6)) == 6 * [None] and sorted(map(str, loaded)) == [*"012345"]
    (message,) = caplog.messages
    assert message.endswith("is lost: it ended with 2") and [*map(str, errors)] == ["it ended with 2"]


def test_what_a_lost_worker_was_compiling_is_compiled_here(caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[object] = []
    compiler = Compiler(loaded.append, Workers(), threads=1)
    jobs = ["sys.exit(3)", "answer = 'ValueError: a worker says so'"]
    assert failures(compiler, *jobs) == [None, None] and loaded == jobs
    assert "ended with 3" in caplog.text


def test_what_was_killed_from_outside_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """There is one more worker, and then none."""
    loaded: list[object] = []
    compiler = Compiler(loaded.append, Workers(), threads=1)
    kill, answer = "os.kill(os.getpid(), signal.SIGKILL)", "answer = 'ValueError: a worker says so'"
    jobs = [kill, answer, f"{kill} ", f"{answer} "]
    killed = "the process that compiled it was killed with SIGKILL, as when memory runs out"
    assert failures(compiler, *jobs) == [killed, "ValueError: a worker says so", killed, None]
    assert loaded == jobs[3:]
    assert "SIGKILL ended 2 of them" in caplog.text


def test_closing_waits_for_no_worker_and_compiles_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it compiles, starts or has nothing to do."""
    starting = Workers(f"import time; time.sleep(60)\n{STUB}")
    for workers, job in ((Workers(), "time.sleep(60)"), (starting, "late")):
        loaded: list[object] = []
        compiler = Compiler(loaded.append, workers, threads=2)
        compiler.add([job])
        assert soon(lambda workers=workers: bool(workers.pids()))
        time.sleep(0.3)
        pids = workers.pids()
        begin = time.monotonic()
        compiler.close()
        assert time.monotonic() - begin < 2 and loaded == []
        assert not any(map(runs, pids)) and not any(thread.is_alive() for thread in compiler.threads)
    assert not caplog.records, "that is no loss"
