"""What tuning remembers apart from tables: candidates that failed, and problems for which the model's choice stayed.

A marker file names the candidate during its first launch, which may hang the GPU or end the process. A marker left by a
dead process blames that candidate, which is skipped from then on. A marker from another host, or from a container that
was started again under another name, counts as dead after LAUNCHED_S seconds. Journal and markers are in the folder of
tables, and apply to one version of everything: what failed in another is tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ..problem import GemmProblem
from ..selection.select import Selection
from ..tables.files import say_once
from ..tables.records import plain, text_of

LAUNCHED_S = 60.0  # upper bound of a first launch and its check: the launch itself times out after 10 s
ENDED = "the process ended, or was ended, during its first launch"


class Journal:
    """What is known of candidates from tunings before."""

    def __init__(self, path: Path | None, versions: str) -> None:
        self.path, self.versions = path, versions  # a file, None where nothing can be kept; of what is tuned with
        self.me = _process(os.getpid())
        self.failures: dict[str, str] = {}
        self.stayed: set[str] = set()
        for line in _lines(path):
            self._take(line)
        self._find_the_dead()

    def failure(self, problem: GemmProblem, selection: Selection) -> str | None:
        """Why a candidate failed before, or None."""
        return self.failures.get(_key(problem, selection))

    def has_stayed(self, problem: GemmProblem, bits: str, choice: Selection) -> bool:
        """Whether `choice`, the model's, was not beaten before: a GPU that was calibrated since may have another."""
        return _key(problem, f"{bits} {_key(problem, choice)}") in self.stayed

    def failed(self, problem: GemmProblem, selection: Selection, why: str) -> None:
        self._append("failed", _key(problem, selection), f"{selection}"[:100], why[:500])

    def stays(self, problem: GemmProblem, bits: str, choice: Selection) -> None:
        key = _key(problem, f"{bits} {_key(problem, choice)}")
        self._append("stays", key, f"{problem.M}x{problem.N}x{problem.K}", "")

    def begin(self, problem: GemmProblem, selection: Selection) -> None:
        """It is launched for the first time now."""
        flight = self._flight(self.me)
        if flight is None:
            return
        try:
            flight.parent.mkdir(parents=True, exist_ok=True)
            with open(flight, "w") as file:
                file.write(_line("failed", self.versions, _key(problem, selection), f"{selection}"[:100], ENDED))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            say_once(f"{flight} cannot be written, so what hangs will be tried again: {error.strerror}")

    def end(self) -> None:
        """What was launched has ended."""
        flight = self._flight(self.me)
        if flight is not None:
            try:
                flight.unlink(missing_ok=True)
            except OSError:
                return

    def _flight(self, process: str) -> Path | None:
        return None if self.path is None else self.path.with_name(f"{self.path.name}.{process}")

    def _append(self, event: str, key: str, what: str, why: str) -> None:
        line = _line(event, self.versions, key, what, why)
        self._take(line)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write, so that lines of several processes do not mix; a line that was cut short ends before it.
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, f"\n{line}\n".encode())
            finally:
                os.close(file)
        except OSError as error:
            say_once(f"{self.path} cannot be written: {error.strerror}")

    def _take(self, line: str) -> None:
        try:
            found = json.loads(line)
            event, versions, key, why = (found[name] for name in ("event", "versions", "key", "why"))
        except (ValueError, TypeError, KeyError, RecursionError):  # cut short, or of another version
            return
        if versions == self.versions and isinstance(key, str):
            if event == "failed":
                self.failures[key] = str(why)
            elif event == "stays":
                self.stayed.add(key)

    def _find_the_dead(self) -> None:
        """Takes what a process was at that is no more for failed."""
        for flight in [] if self.path is None else sorted(self.path.parent.glob(f"{self.path.name}.*")):
            process = flight.name.removeprefix(f"{self.path.name}.") if self.path else ""
            if process == self.me or _lives(process, flight):
                continue
            for line in _lines(flight):
                self._take(line)
                try:
                    found = json.loads(line)
                    if found["versions"] == self.versions:
                        self._append("failed", found["key"], found["what"], found["why"])
                except (ValueError, TypeError, KeyError):
                    continue
            try:
                flight.unlink(missing_ok=True)
            except OSError:
                continue


def _key(problem: GemmProblem, what: Selection | str) -> str:
    """Of a candidate for a problem, or of a problem and a text."""
    of = what if isinstance(what, str) else plain(what.algorithm)
    return hashlib.sha256(text_of([plain(problem), of]).encode()).hexdigest()[:24]


def _line(event: str, versions: str, key: str, what: str, why: str) -> str:
    found: dict[str, Any] = {"event": event, "versions": versions, "key": key, "what": what, "why": why}
    return json.dumps(found)


def _lines(path: Path | None) -> list[str]:
    try:
        return [] if path is None else [line for line in path.read_text(errors="replace").splitlines() if line]
    except OSError:
        return []


def _process(pid: int) -> str:
    """A name that no other process has, as far as can be known: machine, number, and when it began."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "0"
    return f"{socket.gethostname()}~{pid}~{began}"


def _lives(process: str, flight: Path) -> bool:
    """Whether a process of that name, whose file this is, may still run: of another machine, as long as it is young."""
    host, _, rest = process.partition("~")
    pid = rest.partition("~")[0]
    if not pid.isdigit():
        return True
    if host != socket.gethostname():
        return _age_s(flight) < LAUNCHED_S
    return _process(int(pid)) == process and Path(f"/proc/{pid}").exists()


def _age_s(file: Path) -> float:
    """Seconds since a file was written, by the clock of whatever keeps the folder: machines' own clocks differ."""
    try:
        with tempfile.TemporaryFile(dir=file.parent) as now:
            return os.fstat(now.fileno()).st_mtime - file.stat().st_mtime
    except OSError:  # it is gone, or nothing can be written here
        return 0.0
