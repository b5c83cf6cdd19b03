"""A process that has imported torch, Triton and pytest, and forks to run tests of the tree it lies in.

Run as a script in a copy of the checkout, by `runner.Worker`, with the names of what it imports. It reads requests,
and answers each with a line. The package and its tests are imported in the fork alone, so that each sees the tree as it
is then, and dies with what it did. Nothing of the checkout is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[2]
LIMIT_S = {True: 60.0, False: 600.0}  # of what has no limit of its own: collecting; a test that is measured


class Noting:
    """A plugin of pytest: runs the chosen tests in their order, and notes which began, which passed, and how long they
    took; with `coverage`, lets it know whose lines it sees."""

    def __init__(self, status: Path, chosen: list[str] | None, coverage: Any) -> None:
        self.status, self.chosen, self.coverage = status, chosen, coverage
        self.tests: dict[str, dict[str, Any]] = {}
        self.begun = 0.0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen is not None:
            place = {name: i for i, name in enumerate(self.chosen)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.status.write_text(nodeid)
        self.begun = time.monotonic()
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests.setdefault(report.nodeid, {"passed": True, "seconds": 0.0})
        test["passed"] = test["passed"] and report.passed
        test["seconds"] = round(time.monotonic() - self.begun, 4)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            test["words"] = str(crash.message if crash is not None else report.longrepr)[-300:]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tests[report.nodeid or "collection"] = {
                "passed": False,
                "seconds": 0.0,
                "words": str(report.longrepr)[-300:],
            }


def lines_of(measured: Any, tests: list[str]) -> dict[str, dict[int, list[int]]]:
    """By file and line of the package, the tests that ran it, as places in `tests`."""
    data, place = measured.get_data(), {name: i for i, name in enumerate(tests)}
    return {
        str(Path(path).relative_to(TREE)): {
            line: [place[name] for name in names if name in place]
            for line, names in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }


def run(request: dict[str, Any]) -> dict[str, Any]:
    """In the fork: runs batches of tests until one fails."""
    import hypothesis
    import pytest

    sys.dont_write_bytecode = not request["coverage"]
    hypothesis.settings.register_profile("mutation", database=None, derandomize=True, deadline=None)
    measured = None
    if request["coverage"]:
        import coverage

        measured = coverage.Coverage(data_file=None, config_file=False, include=[f"{TREE}/triton_gemm/*"])
        measured.start()
    tests: dict[str, dict[str, Any]] = {}
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutation"]
    for batch in request["batches"]:
        files = list(dict.fromkeys(name.partition("::")[0] for name in batch))
        noting = Noting(Path(request["status"]), batch if request["chosen"] else None, measured)
        stop = [] if request["coverage"] else ["-x"]
        # with full, a test that is only in the full tier can be chosen; of a file, the fast tier is measured
        tier = ["--tier=full"] if request["chosen"] else ["--tier=fast"]
        code = pytest.main([*options, *stop, *tier, *files], plugins=[noting])
        tests |= noting.tests
        if code not in (0, 5) and not request["coverage"]:
            break
    found = sys.modules.get("triton_gemm")
    inside = found is None or Path(found.__file__ or "").is_relative_to(TREE)
    answer: dict[str, Any] = {"tests": tests, "code": int(code), "inside": inside}
    if measured is not None:
        measured.stop()
        answer["lines"] = lines_of(measured, list(tests))
    return answer


def forked(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fork that runs the request, or says that a test took too long, or how the fork died."""
    status, log = Path(request["status"]), Path(request["log"])
    answer = log.with_suffix(".json")
    status.write_text("")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            answer.write_text(json.dumps(run(request)))
        finally:
            os._exit(0)
    began, seen, since, late, parent = time.monotonic(), "", time.monotonic(), "", os.getppid()
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            now, test = time.monotonic(), status.read_text()
            if test != seen:
                seen, since = test, now
            if os.getppid() != parent:  # which was killed
                sys.exit(1)
            if now - since > request["limits"].get(seen, LIMIT_S[request["chosen"]]):
                late = seen or "collection"
                break
            time.sleep(0.02)
    finally:  # of an interrupt too
        kill(child)  # and what it started
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    seconds = round(time.monotonic() - began, 2)
    if late:
        return {"late": late, "seconds": seconds}
    if not answer.exists():
        return {"died": seen or "collection", "seconds": seconds}
    return json.loads(answer.read_text()) | {"seconds": seconds}


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the fork first
    sys.path[:] = [str(TREE), *(path for path in sys.path[1:] if path and path != str(TREE))]
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for request in requests():
        print(json.dumps(forked(request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
