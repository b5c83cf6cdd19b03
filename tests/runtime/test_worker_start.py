"""What starts a worker: which Python, with which packages, in which folder, and how nice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_worker import running
from tests.support.processes import runs, soon
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm.runtime import background, worker
from triton_gemm.runtime.worker import LostError, Worker
from triton_gemm.selection.select import select

# A worker that imports nothing of this package: it answers with what it has found.
PROBE = """
pipe.recv()
pipe.send("ready")
pipe.recv()
pipe.send((sys.path, os.getcwd(), os.nice(0)))
"""


@pytest.fixture(autouse=True)
def probed_anew() -> Iterator[None]:
    worker.python.cache_clear()
    yield
    worker.python.cache_clear()


def seen_by_a_worker(**how: Any) -> Any:
    begin = worker.START.partition(f"from {worker.__name__}")[0]
    seen: list[Any] = []
    with running(Worker(None, [sys.executable, "-c", begin + PROBE], **how, on_made=seen.append)) as made:
        assert made.compile("", 10) is None
    return seen[0]


def compile_one() -> None:
    """A worker of this package starts, and compiles."""
    problem = problem_of(100, 64, 40)
    with running(Worker((HOPPER, (9, 0)))) as made:
        assert made.compile((problem, select(problem, HOPPER)), 120) is None


# --- The packages ---


class Named(str):
    """Some libraries have such strings for paths."""

    def __repr__(self) -> str:
        return f"Named({str(self)!r})"

    __str__ = __repr__


def test_no_entry_of_the_path_ends_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python skips what is no string."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strings = ["", Named("/a/b"), "'quotes\" and\nlines", "\udcff", *sys.path]
    monkeypatch.setattr(sys, "path", [tmp_path, b"/bytes", None, *strings])
    compile_one()
    path, _, _ = seen_by_a_worker()
    assert path == strings and {type(x) for x in path} == {str}


def test_modules_of_the_current_folder_are_not_taken_for_pythons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("multiprocessing", "socket", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert seen_by_a_worker()[1] == str(tmp_path)


# --- The folder ---


def test_a_worker_starts_where_the_current_folder_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    path, folder, _ = seen_by_a_worker()
    assert folder == "/" and path == sys.path[1:]
    compile_one()
    monkeypatch.setenv("TRITON_CACHE_DIR", "cache")  # where is that?
    with pytest.raises(LostError, match="FileNotFoundError"):
        seen_by_a_worker()


# --- How nice ---


def test_workers_of_the_background_are_nice() -> None:
    """And those are not that a tuner waits for."""
    here = os.nice(0)
    assert seen_by_a_worker()[2] == here
    assert seen_by_a_worker(nice=background.NICE)[2] == min(19, here + background.NICE) > here


# --- Which Python ---


def program(path: Path, does: str) -> Path:
    """A program that notes each of its starts."""
    path.write_text(f'#!/bin/sh\necho started >> "$0.starts"\n{does}\n')
    path.chmod(0o755)
    return path


def starts(path: Path) -> int:
    noted = Path(f"{path}.starts")
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def embedded(path: Path) -> None:
    """`multiprocessing` runs it, as an application says that embeds Python."""
    spawn.set_executable(os.fspath(path))


@pytest.fixture
def executable() -> Iterator[None]:
    before = spawn.get_executable()
    yield
    spawn.set_executable(before)


@pytest.mark.parametrize("does", ["echo 'a window opens'", "exit 3", 'echo "$2"', "echo 50989312", ":"])
def test_an_application_that_embeds_python_is_asked_once(does: str, tmp_path: Path, executable: None) -> None:
    """And then no worker is started, and nothing compiled in the background."""
    application = program(tmp_path / "application", does)
    embedded(application)
    assert worker.python() is None and not background.enabled.__wrapped__()
    with pytest.raises(LostError, match="application' is not this Python"):
        Worker((HOPPER, (9, 0))).start()
    assert starts(application) == 1


def test_an_application_that_does_not_end_is_ended(
    tmp_path: Path, executable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PROBE_S", 1.0)
    application = program(tmp_path / "python3", f"sleep 60 & echo $! > {tmp_path / 'pid'}\nwait")
    embedded(application)
    begin = time.monotonic()
    assert worker.python() is None and time.monotonic() - begin < 30
    assert soon(lambda: not runs(int((tmp_path / "pid").read_text()))), "and what it has started"


def test_a_python_by_another_name_is_taken(tmp_path: Path, executable: None) -> None:
    wrapper = program(tmp_path / "wrapper", f'exec {sys.executable} "$@"')
    embedded(wrapper)
    assert worker.python() == worker.python() == str(wrapper) and starts(wrapper) == 1
    assert background.enabled.__wrapped__()


def test_the_python_that_runs_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.subprocess, "Popen", lambda *_, **how: pytest.fail("it is known"))
    assert worker.python() == sys.executable


@pytest.mark.parametrize("found", [None, "", b"", "/no/such/python", b"/", sys.executable])
def test_without_a_python_there_are_no_workers(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in a frozen application."""
    monkeypatch.setattr(worker, "get_executable", lambda: found)
    monkeypatch.setattr(sys, "frozen", found == sys.executable, raising=False)
    assert worker.python() is None and not background.enabled.__wrapped__()
