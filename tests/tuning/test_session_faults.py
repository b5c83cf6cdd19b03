"""What a tuning does about candidates that fail, processes that end and files that cannot be written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support import table_fakes
from tests.support.lab_fakes import FakeLab
from tests.support.processes import forked
from tests.support.table_fakes import HOPPER, problem_of
from tests.support.threads import at_once
from tests.tuning.test_session import LARGE, SMALL, chance, fastest, tuned
from tests.tuning.test_session import nothing_left as nothing_left
from triton_gemm import tables
from triton_gemm.kernels import portable
from triton_gemm.selection.select import select
from triton_gemm.tables import files
from triton_gemm.tuning.journal import ENDED, Journal
from triton_gemm.tuning.report import ShapeReport
from triton_gemm.tuning.session import Session, Wishes
from triton_gemm.tuning.timing import DeviceLostError

FORKED = multiprocessing.get_context("fork")


def test_a_candidate_that_fails_is_left_out_and_named(folder: Path) -> None:
    bad = fastest()
    lab = FakeLab(chance, broken=lambda one: "its bits are not those of the model's choice" if one == bad else None)
    (shape,) = tuned(folder, lab=lab).shapes
    assert shape.outcome == "tuned" and shape.selection != bad
    assert len(shape.failed) == 1 and "its bits" in shape.failed[0][1]


def test_a_users_configuration_that_cannot_run_is_named(folder: Path) -> None:
    own = portable.Config(4096, 4096, 4096, 4, 3)
    (shape,) = tuned(folder, configs=(own,)).shapes
    assert shape.measured and [what for what, _ in shape.failed] == [str(own)]
    assert "portable: " in shape.failed[0][1]


def test_without_the_models_choice_nothing_is_tuned(folder: Path) -> None:
    lab = FakeLab(chance, broken=lambda selection: "no memory" if selection.source == "model" else None)
    assert tuned(folder, lab=lab).shapes[0].why == "the model's choice: no memory"


def test_a_candidate_that_ends_the_process_is_skipped_the_next_time(folder: Path) -> None:
    """It is named on disk before it runs; who finds the name of a process that is no more leaves it out."""
    bad = fastest()

    def die() -> None:
        Journal(folder / "x.tuning.jsonl", tables.versions()).begin(SMALL, bad)
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(die)
    child.join()
    assert child.exitcode == -signal.SIGKILL and len(list(folder.iterdir())) == 1
    lab = FakeLab(chance)
    (shape,) = tuned(folder, lab=lab).shapes
    assert bad not in lab.kernels.timed and shape.outcome == "tuned"
    assert any(ENDED in why for _, why in shape.failed)
    # It stays so, without the file of the process that died, until a version is another.
    assert [file.name for file in folder.glob("x.tuning.jsonl*")] == ["x.tuning.jsonl"]
    lab = FakeLab(chance)
    tuned(folder, lab=lab)
    assert bad not in lab.kernels.timed
    lab = FakeLab(chance)
    tuned(folder, lab=lab, versions="another")
    assert bad in lab.kernels.timed


def test_a_process_that_lives_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    path, begun = folder / "x.tuning.jsonl", FORKED.Event()

    def live() -> None:
        Journal(path, "1").begin(SMALL, fastest())
        begun.set()
        threading.Event().wait()

    child = forked(live)
    try:
        assert begun.wait(60)
        assert Journal(path, "1").failure(SMALL, fastest()) is None and len(list(folder.iterdir())) == 1
    finally:
        child.kill()
        child.join()
    assert Journal(path, "1").failure(SMALL, fastest()) == ENDED


def test_a_process_of_another_machine_is_given_a_minute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container that hung, and was started again under another name; by the clock of the folder."""
    path = folder / "x.tuning.jsonl"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "a1b2")
        Journal(path, "1").begin(SMALL, fastest())
    (note,) = folder.iterdir()
    with monkeypatch.context() as fast:
        fast.setattr(time, "time", lambda: note.stat().st_mtime + 3600)
        assert Journal(path, "1").failure(SMALL, fastest()) is None and list(folder.iterdir()) == [note]
    written = note.stat().st_mtime
    os.utime(note, (written - 50, written - 50))
    assert Journal(path, "1").failure(SMALL, fastest()) is None and list(folder.iterdir()) == [note]
    os.utime(note, (written - 61, written - 61))
    assert Journal(path, "1").failure(SMALL, fastest()) == ENDED and list(folder.iterdir()) == [path]
    assert Journal(path, "1").failure(SMALL, fastest()) == ENDED, "which is remembered"


def test_a_lost_gpu_costs_nothing_that_was_found(folder: Path) -> None:
    bad = fastest(SMALL)

    def broken(selection: Any) -> str | None:
        if selection == bad:
            raise DeviceLostError("an illegal memory access was encountered")
        return None

    with pytest.raises(DeviceLostError):
        tuned(folder, {LARGE: 2, SMALL: 1}, FakeLab(chance, broken=broken))
    assert tables.lookup(LARGE, HOPPER) is not None and tables.lookup(SMALL, HOPPER) is None


def test_a_tuning_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {LARGE: 3, SMALL: 2, problem_of(512): 1}

    def stop(report: ShapeReport) -> None:
        if report.problem == SMALL:
            raise KeyboardInterrupt

    lab = FakeLab(lambda selection: chance(selection) if selection.work != select(SMALL, HOPPER).work else 1.2)
    with pytest.raises(KeyboardInterrupt):
        tuned(folder, problems, lab, ended=stop)
    lab = FakeLab(chance)
    report = tuned(folder, problems, lab, resume=True)
    assert [shape.outcome for shape in report.shapes][:2] == ["known", "known"]
    assert [problem for problem, _ in lab.benches] == [problem_of(512)]
    assert all(shape.selection is not None for shape in report.shapes)
    tuned(folder, problems, lab := FakeLab(chance))
    assert len(lab.benches) == 3, "without resume all are tuned again"
    monkeypatch.setattr(tables, "versions", lambda: "another")
    tuned(folder, problems, lab := FakeLab(chance), resume=True)
    assert len(lab.benches) == 3, "and with it what other versions have tuned"


def test_an_entry_that_is_not_used_is_no_reason_to_leave_a_product_out(folder: Path) -> None:
    """As one of the class of bits that the model chose before a calibration."""
    tables.store(SMALL, table_fakes.another(SMALL, bits=False), HOPPER, us=1.0, default_us=2.0)
    (shape,) = tuned(folder, resume=True).shapes
    assert shape.outcome == "tuned" and shape.stored
    assert tuned(folder, resume=True).shapes[0].outcome == "known"


def test_what_stays_is_known_too_and_forgotten_with_the_tables(folder: Path) -> None:
    even = FakeLab(lambda selection: 1.0)
    assert tuned(folder, lab=even).shapes[0].outcome == "stays"
    assert tuned(folder, resume=True).shapes[0].outcome == "known"
    assert tuned(folder, resume=True, bits="any").shapes[0].outcome == "tuned"
    tables.clear()
    assert tuned(folder, resume=True).shapes[0].outcome == "tuned"


def test_what_there_was_no_time_for_is_not_known(folder: Path) -> None:
    lab = FakeLab(lambda selection: 1.0, compile_s=0.5)
    report = tuned(folder, lab=lab, budget=3.0)
    assert report.shapes[0].outcome == "stays" and report.shapes[0].timed < report.shapes[0].candidates
    assert tuned(folder, resume=True).shapes[0].outcome == "tuned"


@pytest.mark.parametrize("after", range(1, 5))
def test_kill_9_at_any_time_loses_nothing_that_was_stored(after: int, folder: Path) -> None:
    """A child tunes problem after problem and tells each that is stored; it is killed, and the table has them all."""
    problems = {problem_of(64 + 8 * i, 1024, 1024): 1 for i in range(500)}
    received, sent = FORKED.Pipe(duplex=False)
    child = forked(partial(tuned, folder, problems, budget=1e9, ended=lambda one: sent.send((one.problem, one.stored))))
    stored = [received.recv() for _ in range(after)]
    child.kill()
    child.join()
    while received.poll():
        stored.append(received.recv())
    assert child.exitcode == -signal.SIGKILL
    tables.reload()
    kept = [problem for problem, was in stored if was]
    assert kept and all(tables.lookup(problem, HOPPER) for problem in kept)
    report = tuned(folder, dict.fromkeys([problem for problem, _ in stored], 1), resume=True)
    assert {shape.outcome for shape in report.shapes} == {"known"}


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_keeps_what_was_there_and_tunes_on(
    fault: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(folder, {LARGE: 1})
    before = table_fakes.table_in(folder).read_bytes()
    with monkeypatch.context() as faulty:
        faulty.setattr(files.os, "fsync", Mock(side_effect=OSError(fault, os.strerror(fault))))
        report = tuned(folder, {SMALL: 1})
    assert report.shapes[0].outcome == "not stored" and not report.shapes[0].stored
    assert table_fakes.table_in(folder).read_bytes() == before
    assert tables.lookup(LARGE, HOPPER) is not None


def test_without_a_folder_it_tunes_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.queries, "folder", lambda: None)
    report = Session(FakeLab(chance), Journal(None, "1"), Wishes(60.0)).run({SMALL: 1}, lambda report: None)
    assert report.shapes[0].outcome == "not stored" and not report.shapes[0].stored


def test_two_tune_at_once_and_both_are_kept(folder: Path) -> None:
    problems = [{problem_of(64 * i + j, 1024, 1024): 1 for i in range(1, 6)} for j in (0, 16)]
    at_once(*(partial(tuned, folder, each) for each in problems))
    tables.reload()
    assert all(tables.lookup(problem, HOPPER) for each in problems for problem in each)


def test_a_journal_that_is_cut_short_is_read_as_far_as_it_goes(folder: Path) -> None:
    folder.mkdir(parents=True)
    path = folder / "x.tuning.jsonl"
    journal = Journal(path, "1")
    journal.failed(SMALL, fastest(SMALL), "first")
    with path.open("a") as file:
        file.write('\n{"event": "failed", "vers')
    journal.failed(LARGE, fastest(LARGE), "second")
    path.write_text(path.read_text() + '\n[]\nnull\n{"event": 1, "versions": "1", "key": [], "why": {}}\n')
    again = Journal(path, "1")
    assert again.failure(SMALL, fastest(SMALL)) == "first" and again.failure(LARGE, fastest(LARGE)) == "second"
    assert Journal(path, "2").failure(SMALL, fastest(SMALL)) is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_journal_leaves_no_file_open(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.tuning.jsonl", "1")
    journal.failed(SMALL, select(SMALL, HOPPER), "why")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        journal.failed(SMALL, select(SMALL, HOPPER), "why")
        journal.stays(SMALL, "same", select(SMALL, HOPPER))
    assert len(os.listdir("/proc/self/fd")) == before
