"""The battery: what it makes of commands that pass, fail, hang, die, cannot run, or miss a planted bug; its table, its
record, and that its commands are there."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.accuracy import tables as accuracy_tables
from perf.battery import __main__ as command
from perf.battery import running, tables
from perf.battery.running import Outcome, read
from perf.battery.sections import Job, Section, named, sections
from perf.measure import environment
from perf.pages import blocks
from perf.pages.results import Results
from tests import windows
from tests.gpu import sanitize
from tests.perf_records import SURROUNDINGS

ROOT = Path(__file__).parent.parent


def script(code: str, name: str = "it", cores: int = 1, finds: str | None = None) -> Job:
    return Job(name, (sys.executable, "-c", code), cores, finds)


def said(words: str, status: int = 0) -> str:
    return f"print({words!r}); raise SystemExit({status})"


def ran(*jobs: Job, folder: Path, cores: int = 4, budget: float = 30.0) -> tuple[dict[str, Any], list[Outcome]]:
    """A section's row, and the outcomes of its jobs."""
    section = Section("made up", "what a test needs", jobs)
    outcomes = running.run([section], cores, budget, lambda _: None, folder)
    return running.summary(section, outcomes), outcomes


# --- What commands say ---


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        ("1,234 launches", 1234),
        ("12,264 products of 3 kernels and classes of bits; 0 failures.", 12264),
        (
            "98,765 products in 240 s; problems planned: 3 on fma\nNo wrong element, and no byte written elsewhere.",
            98765,
        ),
        ("10,002 products; 0 failures", 10002),
        ("....\n12 passed, 3 skipped in 4.56s", 12),
        ("=========== 7 passed in 61.00s (0:01:01) ===========", 7),
        ("a (3, 4)\nb\n52 launches\n========= ERROR SUMMARY: 0 errors", 52),
    ],
)
def test_cases_are_counted(words: str, cases: int) -> None:
    outcome = read("made up", Job("it", ()), 0, words + "\n")
    assert (outcome.cases, outcome.failures) == (cases, ())


@pytest.mark.parametrize(
    ("words", "status", "failure"),
    [
        ("FAILED: bf16: 3 elements are wrong\n5 products; 1 failures", 1, "it: bf16: 3 elements are wrong"),
        ("FAILED tests/gpu/a.py::b - assert 1 == 2\n1 failed, 4 passed in 3.21s", 1, "it: tests/gpu/a.py::b - assert"),
        ("2 errors in 3.21s", 1, "it: exit status 1: 2 errors in 3.21s"),
        (
            "x\n========= Invalid __global__ read of size 2\n========= ERROR SUMMARY: 1 error",
            9,
            "Invalid __global__ read",
        ),
        ("Traceback\nRuntimeError: no", 1, "it: exit status 1: RuntimeError: no"),
        ("", -11, "it: exit status -11: it said nothing"),
        ("done", 0, "it: it tried nothing: done"),
        ("3 skipped in 1.00s", 0, "it: it tried nothing"),
        ("3 launches", None, "it: it did not end in time; last: 3 launches"),
    ],
)
def test_failures_are_told(words: str, status: int | None, failure: str) -> None:
    outcome = read("made up", Job("it", ()), status, words + "\n")
    assert len(outcome.failures) == 1 and failure in outcome.failures[0]


@pytest.mark.parametrize(
    ("words", "status", "found"),
    [
        ("Invalid __global__ write of size 2", 9, True),
        ("Invalid __global__ write of size 2", 0, False),
        ("another error", 1, False),
        ("Invalid __global__ write of size 2", None, False),
    ],
)
def test_a_planted_bug_is_to_be_found(words: str, status: int | None, found: bool) -> None:
    outcome = read("made up", Job("it", (), finds="Invalid __global__ (read|write)"), status, words)
    assert outcome.found is found and bool(outcome.failures) is not found and outcome.cases == 0


def test_what_cannot_run_says_why_and_has_not_passed() -> None:
    for job in (Job("it", ()), Job("it", (), finds="bug")):
        outcome = read("made up", job, running.SKIPPED, "compute-sanitizer not found: install it\n")
        assert outcome.skipped == "compute-sanitizer not found: install it"
        assert (outcome.cases, outcome.failures, outcome.found) == (0, (), None)
    assert running.SKIPPED == windows.SKIPPED == sanitize.SKIPPED


# --- Running them ---


def test_jobs_run_at_the_same_time_as_far_as_there_are_cores(tmp_path: Path) -> None:
    nap = "import time; time.sleep(0.5); print('2 launches')"
    begin = time.monotonic()
    row, outcomes = ran(*(script(nap, str(i)) for i in range(4)), folder=tmp_path)
    together = time.monotonic() - begin
    assert row["cases"] == 8 and row["failures"] == [] and 0.5 <= row["seconds"] <= together
    assert max(x.begin for x in outcomes) < min(x.end for x in outcomes)
    _, outcomes = ran(script(nap, "a", cores=2), script(nap, "b", cores=9), folder=tmp_path)
    first, second = sorted(outcomes, key=lambda x: x.begin)
    assert second.begin >= first.end  # a job that wants more than all cores gets all


def test_a_smaller_job_goes_before_one_that_has_to_wait(tmp_path: Path) -> None:
    jobs = [script(said("1 launches"), name, cores) for name, cores in (("a", 3), ("b", 4), ("c", 1))]
    _, outcomes = ran(*jobs, folder=tmp_path)
    begun = {outcome.job: outcome.begin for outcome in outcomes}
    assert begun["a"] == begun["c"] < begun["b"]


@pytest.mark.full
def test_what_does_not_end_in_time_is_ended_with_its_children(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; print('7 launches', flush=True); {start}"
    begin = time.monotonic()
    row, _ = ran(script(parent, "slow"), script(said("1 launches"), "late"), folder=tmp_path, cores=1, budget=8.0)
    assert time.monotonic() - begin < 30
    assert row["failures"] == ["slow: it did not end in time; last: 7 launches", "late: no time was left"]
    time.sleep(0.2)
    assert is_gone(tmp_path / "pid")


def test_an_interruption_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    long = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    short = f"import pathlib, time\nwhile not pathlib.Path({str(pid)!r}).exists(): time.sleep(0.01)\ntime.sleep(0.2)"

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run([Section("made up", "", (script(short), script(long, "b")))], 2, 60.0, interrupted, tmp_path)
    assert is_gone(pid)


def is_gone(pid: Path) -> bool:
    """Whether the process that has written its number there is none any more, or one that has ended."""
    state = Path("/proc", pid.read_text(), "stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_jobs_run_compiled_kernels_of_this_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os, perf; print(os.getcwd(), perf.__file__, 'TRITON_INTERPRET' in os.environ); print('1 launches')"
    row, _ = ran(script(code), folder=tmp_path / "logs")
    assert row["failures"] == []
    assert (tmp_path / "logs" / "made-up-it.log").read_text().startswith(f"{ROOT} {ROOT}/perf/__init__.py False\n")


# --- The record, the table and the command ---


def made_up_record(**changes: Any) -> dict[str, Any]:
    def row(name: str, cases: int, planted: int) -> dict[str, Any]:
        plain = {"failures": [], "found": planted, "not_run": {}, "seconds": 12.3, "what": f"what {name} is"}
        return {"name": name, "cases": cases, "planted": planted, **plain}

    rows = [row("fuzzing", 61_234, 0), row("memcheck", 456, 2), row("ConSan", 66, 1) | changes]
    made = {**SURROUNDINGS, "sources": environment.source_hash("battery")}
    return {"environment": made, "sections": rows, "cores": 16, "seconds": 512.3}


def test_the_table() -> None:
    text = blocks.filled(
        "<!-- results:battery -->\n<!-- /results -->", Results([], [], [], [], [made_up_record()]), environment.RESULTS
    )
    assert "| check | what is tried | cases | failures | planted bugs found | seconds |" in text
    assert "| fuzzing | what fuzzing is | 61,234 | 0 |  | 12 |" in text
    assert "| memcheck | what memcheck is | 456 | 0 | 2 of 2 | 12 |" in text
    assert "| all |  | 61,756 | 0 | 3 of 3 | 512 |" in text
    assert "Made-up GPU, torch 2.11.0, Triton 3.6.0" in text and "Not run" not in text


def test_the_table_says_what_failed_and_what_did_not_run() -> None:
    text = tables.text(made_up_record(failures=["race: the planted bug was not found"], found=0))
    assert "| 66 | **1** | 0 of 1 | 12 |" in text and "- Failed: ConSan, race: the planted bug was not found" in text
    text = tables.text(made_up_record(cases=0, planted=0, found=0, not_run={"kernels": "no such tool"}))
    assert "| **not run** |  |  | 12 |" in text and "- Not run: ConSan, kernels: no such tool" in text


def test_the_status() -> None:
    assert command.status(made_up_record()) == 0
    assert command.status(made_up_record(failures=["no"], not_run={"a": "b"})) == 1
    assert command.status(made_up_record(not_run={"kernels": "no such tool"})) == 3


@pytest.mark.parametrize(("words", "status"), [("1,200 launches", 0), ("FAILED: it", 1)])
def test_the_command_writes_a_record(
    words: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = (script(said(words, status)), script(said("a bug", 1), "bug", finds="a bug"))
    made_up = (Section("made up", "what a test needs", jobs), Section("other", "nothing", ()))
    monkeypatch.setattr(command, "sections", lambda *_: made_up)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.environment, "describe", lambda _: SURROUNDINGS)
    assert command.main(["--only", "made up"]) == status
    assert tables.committed(tmp_path) == []  # not of a part
    assert command.main([]) == status
    assert (tmp_path / "made-up-gpu" / "battery-3.6.json").exists()
    (record,) = tables.committed(tmp_path)
    assert record["sections"][0]["cases"] == (0 if status else 1200) and record["sections"][0]["found"] == 1
    assert record["environment"] == SURROUNDINGS
    assert "| made up | what a test needs |" in capsys.readouterr().out
    assert command.main(["--only", "other", "--out", str(tmp_path / "other.json")]) == 0
    assert json.loads((tmp_path / "other.json").read_text())["sections"][0]["name"] == "other"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        command.main([])
    assert exit_.value.code == 2 and "there is no CUDA device here" in capsys.readouterr().err


# --- The sections ---

EVERY = sections(16, command.BUDGET_S, Path("build"))


def test_sections_are_chosen_by_name() -> None:
    names = [section.name for section in EVERY]
    assert len(set(names)) == len(names) == len(named(EVERY, []))
    assert [section.name for section in named(EVERY, ["memcheck", "windows"])] == ["memcheck", "windows"]
    assert {"memcheck", "synccheck", "ConSan", "windows", "large offsets"} <= {
        section.name for section in EVERY if any(job.finds for job in section.jobs)
    }


@pytest.mark.parametrize(
    "job", [pytest.param(job, id=f"{x.name} {job.name}") for x in EVERY for job in x.jobs if job.command[2] != "pytest"]
)
def test_every_command_takes_its_arguments(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own parser has them."""
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):  # noqa: N818
        pass

    def parsed(self: argparse.ArgumentParser, arguments: Any = None) -> Any:
        parse(self, arguments)
        raise Parsed

    python, flag, name, *arguments = job.command
    assert (python, flag) == (sys.executable, "-m")
    module = importlib.import_module("perf.accuracy.__main__" if name == "perf.accuracy" else name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(Parsed):
        module.main(arguments)


def test_the_products_of_numerics_are_counted() -> None:
    way = {"kind": "bf16", "kernel": "portable", "bits": "one sum", "wrong": {"normal": 0, "integers": 0}}
    said = accuracy_tables.said({"ways": [way], "long": [], "ends": [], "failed": []})
    count = running.COUNT.search(f"a table\n\n{said}\n")
    assert count is not None and count[1] == "2"


def test_every_file_of_tests_is_there() -> None:
    found = [job for section in EVERY for job in section.jobs if job.command[2] == "pytest"]
    files = [word for job in found for word in job.command if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)
    assert all("--tier=full" in job.command for job in found)


def test_it_makes_ten_thousand_calls_in_windows_and_fits_sixteen_cores() -> None:
    (found,) = named(EVERY, ["windows"])
    calls = [int(job.command[job.command.index("--calls") + 1]) for job in found.jobs if job.finds is None]
    assert sum(calls) >= 10_000
    assert all(job.cores <= 16 for section in EVERY for job in section.jobs)
    assert all(
        job.cores == 1 for x in sections(1, 600, Path()) for job in x.jobs if job.name not in ("threads", "load")
    )
