"""A pytest plugin: runs the tests that the file MUTATION_TESTS names, in that order. Where it names none, runs all of
them, and puts there how long each takes that passes and which lines of the package it runs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

FILE = Path(os.environ["MUTATION_TESTS"])
CHOSEN: list[str] = json.loads(FILE.read_text())
MEASURED = coverage.Coverage(data_file=None, config_file=False, include=[f"{Path.cwd()}/triton_gemm/*"])
seconds: dict[str, float] = defaultdict(float)
failed: set[str] = set()


def pytest_configure() -> None:
    if not CHOSEN:
        MEASURED.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHOSEN:
        place = {name: i for i, name in enumerate(CHOSEN)}
        items[:] = sorted((x for x in items if x.nodeid in place), key=lambda x: place[x.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    if not CHOSEN:
        MEASURED.switch_context(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] += report.duration
    if not report.passed:
        failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    if CHOSEN:
        return
    MEASURED.stop()
    passed = {name: round(took, 4) for name, took in seconds.items() if name not in failed}
    data = MEASURED.get_data()
    lines = {}
    for path in data.measured_files():
        of_line = data.contexts_by_lineno(path).items()
        lines[os.path.relpath(path)] = {line: [name for name in names if name in passed] for line, names in of_line}
    FILE.write_text(json.dumps({"seconds": passed, "lines": lines}))
