"""Runs jobs, as many at a time as there are cores for, and reads what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from perf.battery.sections import Job, Section
from perf.measure.environment import ROOT

SKIPPED = 77  # exit status of a check that cannot run on this machine, by Automake's convention
COUNT = re.compile(r"^([\d,]+) (?:products|launches)\b", re.MULTILINE)
FAILED = re.compile(r"^FAILED:? (.*)", re.MULTILINE)
PYTEST = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)
OUTCOME = re.compile(r"(\d+) (passed|failed|errors?)\b")
DETAIL = re.compile(r"^=+ *((?:Invalid|Barrier error|Error:).*)", re.MULTILINE)  # of compute-sanitizer
POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """What became of a job. cases: that it tried; failures: in words; skipped: why it could not run; found: whether it
    found a planted bug, None where it has none; begin, end: in seconds since all began."""

    section: str
    job: str
    cases: int = 0
    failures: tuple[str, ...] = ()
    skipped: str | None = None
    found: bool | None = None
    begin: float = 0.0
    end: float = 0.0

    def __str__(self) -> str:
        if self.skipped is not None:
            said = f"cannot run: {self.skipped}"
        elif self.found is not None:
            said = "planted bug found" if self.found else "PLANTED BUG NOT FOUND"
        else:
            said = f"{self.cases:,}, {len(self.failures)} failed"
        return f"{self.section}: {self.job}: {said}"


def read(section: str, job: Job, status: int | None, said: str) -> Outcome:
    """What a job's output means. status: its exit status, None where it was ended."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")[:300]
    if status == SKIPPED:
        return Outcome(section, job.name, skipped=last)
    if job.finds is not None:
        found = status not in (0, None) and re.search(job.finds, said) is not None
        missed = f"{job.name}: the planted bug was not found: {last}"
        return Outcome(section, job.name, failures=() if found else (missed,), found=found)
    cases, wrong = _tests(said) if PYTEST.search(said) else (_count(said), 0)
    failures = tuple(dict.fromkeys(f"{job.name}: {words}" for words in FAILED.findall(said)))
    if status is None:
        failures += (f"{job.name}: it did not end in time; last: {last}",)
    elif (status or wrong) and not failures:
        detail = DETAIL.search(said)
        failures = (f"{job.name}: exit status {status}: {detail[1] if detail else last}",)
    elif not status and not cases:
        failures = (f"{job.name}: it tried nothing: {last}",)
    return Outcome(section, job.name, cases, failures)


def _count(said: str) -> int:
    """The last that is said."""
    return sum(int(number.replace(",", "")) for number in COUNT.findall(said)[-1:])


def _tests(said: str) -> tuple[int, int]:
    """(tests that ran, those of them that failed) as pytest says in its last line."""
    counts = {word: int(number) for number, word in OUTCOME.findall(PYTEST.findall(said)[-1])}
    return sum(counts.values()), sum(counts.values()) - counts.get("passed", 0)


@dataclass
class _Running:
    section: str
    job: Job
    process: subprocess.Popen[str]
    output: TextIO
    begin: float

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self, now: float, status: int | None) -> Outcome:
        self.output.seek(0)
        found = read(self.section, self.job, status, self.output.read())
        self.output.close()
        return Outcome(**{**vars(found), "begin": self.begin, "end": now})


@contextmanager
def _ended(running: list[_Running]) -> Iterator[None]:
    """Leaves no process behind."""
    try:
        yield
    finally:
        for each in running:
            each.end()


def run(
    chosen: Sequence[Section], cores: int, budget: float, advance: Callable[[str], Any], logs: Path
) -> list[Outcome]:
    """Runs all jobs in their order, but smaller ones before those for which too few cores are free. After `budget`
    seconds what still runs is ended, and what has not begun does not begin; both have failed. logs: a folder for what
    they say."""
    logs.mkdir(parents=True, exist_ok=True)
    waiting = [(section.name, job) for section in chosen for job in section.jobs]
    running: list[_Running] = []
    done: list[Outcome] = []
    begin, free = time.monotonic(), cores
    surroundings = _environment()
    with _ended(running):
        while waiting or running:
            now = time.monotonic() - begin
            for each in list(running):
                status = each.process.poll()
                if status is None and now < budget:
                    continue
                if status is None:
                    each.end()
                running.remove(each)
                free += min(each.job.cores, cores)
                done.append(each.outcome(now, status))
                advance(str(done[-1]))
            if now >= budget:
                why = "no time was left"
                late = [
                    Outcome(name, x.name, failures=(f"{x.name}: {why}",), begin=now, end=now) for name, x in waiting
                ]
                done, waiting = done + late, []
            for name, job in list(waiting):
                if min(job.cores, cores) <= free:
                    free -= min(job.cores, cores)
                    waiting.remove((name, job))
                    running.append(_start(name, job, surroundings, now, logs))
            time.sleep(POLL_S)
    return done


def _start(section: str, job: Job, surroundings: dict[str, str], now: float, logs: Path) -> _Running:
    name = re.sub(r"\W+", "-", f"{section} {job.name}")
    output = (logs / f"{name}.log").open("w+", errors="replace")  # `outcome` closes it
    process = subprocess.Popen(
        job.command, cwd=ROOT, env=surroundings, stdout=output, stderr=output, text=True, start_new_session=True
    )
    return _Running(section, job, process, output, now)


def _environment() -> dict[str, str]:
    """Of all jobs: this repository, compiled kernels, and a thread for each process."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**found, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def summary(section: Section, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A section's row of the record."""
    mine = [outcome for outcome in outcomes if outcome.section == section.name]
    planted = [outcome for outcome in mine if outcome.found is not None]
    tried = [outcome for outcome in mine if outcome.found is None]
    return {
        "name": section.name,
        "what": section.what,
        "cases": sum(outcome.cases for outcome in tried),
        "failures": [words for outcome in mine for words in outcome.failures],
        "planted": len(planted),
        "found": sum(outcome.found is True for outcome in planted),
        "not_run": {outcome.job: outcome.skipped for outcome in mine if outcome.skipped is not None},
        "seconds": round(max((x.end for x in mine), default=0.0) - min((x.begin for x in mine), default=0.0), 1),
    }
