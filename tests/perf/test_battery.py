"""The battery: what it makes of tests that pass, fail, hang, die, cannot run, or miss a planted bug; its table, its
record, and that its tests are there."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perf import battery
from perf.accuracy import tables as accuracy_tables
from perf.measure import environment
from tests.support.patches import replace_all
from tests.support.processes import python, soon
from tests.support.report_records import SURROUNDINGS

ROOT = Path(__file__).parents[2]
TESTS = {
    "test_windows_gpu.py": """
        def test_nothing_outside_is_read_or_written():
            print("FAILED is no word of the last line\\n1,234 products; 0 failures")
        def test_operands_may_span_more():
            print("FAILED: fma: 3 elements are wrong\\nFAILED: portable: 1 is\\n12 products; 2 failures")
            assert False
        @pytest.mark.parametrize("bug", ["write", "read", "far"])
        def test_what_is_planted_is_found(bug):
            print("7 products")
            assert bug == "write", "the bug was not found"
    """,
    "test_sanitizer_gpu.py": """
        @pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
        def test_nothing_is_found(tool):
            assert tool == "memcheck", "x\\n========= Barrier error detected. Divergent threads\\n========= 1 error"
        @pytest.mark.parametrize("share", [1, 2])
        def test_consan(share):
            pytest.skip("needs Triton 3.9's ConSan")
        def test_racecheck():
            assert False
    """,
    "test_bad_input_gpu.py": """
        def test_which_dies():
            os._exit(1)
        def test_after_it():
            import perf
            assert "TRITON_INTERPRET" not in os.environ and perf.__file__ == ROOT + "/perf/__init__.py"
    """,
    "test_threads_gpu.py": """
        def test_that_waits_for_ever():
            subprocess.Popen(["sleep", "612.5"])
            time.sleep(600)
        def test_on_another_gpu():
            assert False
    """,
}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests as those of tests/gpu, in a folder."""
    folder = tmp_path / "tests"
    folder.mkdir()
    conftest = (ROOT / "tests/gpu/conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest + "def pytest_addoption(parser): parser.addoption('--tier')\n")
    (folder / "pytest.ini").touch()  # so that the repository's settings are not theirs
    for name, text in TESTS.items():
        head = f"import os, pytest, subprocess, time\nROOT = {str(ROOT)!r}\n"
        (folder / name).write_text(head + dedent(text))
    replace_all(monkeypatch, battery, TESTS=folder, JUNIT=tmp_path / "battery.xml", RESULTS=tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "describe", lambda _: SURROUNDINGS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return tmp_path


def rows(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(out.read_text())["sections"]}


def test_what_becomes_of_tests(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made_up / "made-up-gpu" / "battery-3.6.json"
    chosen = ["windows", "large offsets", "ConSan", "memcheck", "synccheck", "bad input", "numerics"]
    assert battery.main(["--only", *chosen, "--cores", "2", "--out", str(out)]) == 1
    (record,) = battery.RECORDS.committed(made_up)
    assert record["environment"] == SURROUNDINGS and [row["name"] for row in record["sections"]] == chosen
    found = rows(out)
    missed = "test_what_is_planted_is_found[{}]: AssertionError: the bug was not found"
    windows, far = found["windows"], found["large offsets"]
    assert (windows["cases"], windows["planted"], windows["found"]) == (1234, 2, 1) and windows["seconds"] >= 0
    assert windows["failures"] == [missed.format("read")]
    assert (far["cases"], far["planted"], far["found"]) == (12, 1, 0)
    span = [f"test_operands_may_span_more: {words}" for words in ("fma: 3 elements are wrong", "portable: 1 is")]
    assert sorted(far["failures"]) == [*span, missed.format("far")]
    assert (found["ConSan"]["cases"], found["ConSan"]["failures"]) == (0, [])
    assert found["ConSan"]["not_run"] == {"test_consan": "needs Triton 3.9's ConSan"}
    assert (found["memcheck"]["cases"], found["memcheck"]["failures"]) == (1, [])
    barrier = "test_nothing_is_found[synccheck]: Barrier error detected. Divergent threads"
    assert found["synccheck"]["failures"] == [barrier]
    (died,) = found["bad input"]["failures"]
    assert "test_which_dies" in died and "crashed" in died and found["bad input"]["cases"] == 2
    assert found["numerics"]["failures"] == ["no test has ended"]
    assert f"- Failed: synccheck, {barrier}" in capsys.readouterr().out


def test_a_whole_run_writes_its_record(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery, "SECTIONS", {"memcheck": battery.SECTIONS["memcheck"]})
    assert battery.main(["--only", "memcheck", "--cores", "1"]) == 0
    assert battery.RECORDS.committed(made_up) == []  # of a part
    assert battery.main(["--cores", "1"]) == 0
    assert set(rows(made_up / "made-up-gpu" / "battery-3.6.json")) == {"memcheck"}


def test_memory_bounds_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery.os, "sched_getaffinity", lambda _: range(32))
    for gib, processes in ((80, 16), (16, 3), (2, 1), (1000, 32)):
        monkeypatch.setattr(
            battery.torch.cuda, "get_device_properties", lambda _, gib=gib: SimpleNamespace(total_memory=gib << 30)
        )
        assert battery.at_once() == processes


@pytest.mark.full
def test_what_does_not_end_in_time_is_ended_with_its_children(made_up: Path) -> None:
    begin, out = time.monotonic(), made_up / "out.json"
    names = ["concurrency", "memcheck"]
    assert battery.main(["--only", *names, "--cores", "1", "--budget", "8", "--out", str(out)]) == 1
    assert time.monotonic() - begin < 60
    found = rows(out)
    (waits,), (late,) = found["concurrency"]["failures"], found["memcheck"]["failures"]
    assert "test_that_waits_for_ever" in waits and "no time was left" in late
    assert soon(
        lambda: "sleep 612.5" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )


# --- The table ---


def record(**changes: Any) -> dict[str, Any]:
    """The first committed one, in which all ran, and ConSan has these values."""
    found = battery.RECORDS.committed(environment.RESULTS)[0]
    of = {"ConSan": {"cases": 66, "planted": 1, "found": 1, "seconds": 12.3, **changes}}
    return found | {"sections": [x | {"not_run": {}} | of.get(x["name"], {}) for x in found["sections"]]}


def test_the_table_says_what_failed_and_what_did_not_run() -> None:
    text = battery.text(record(failures=["race: the planted bug was not found"], found=0))
    assert "| 66 | **1** | 0 of 1 | 12 |" in text and "- Failed: ConSan, race: the planted bug was not found" in text
    text = battery.text(record(cases=0, planted=0, found=0, not_run={"kernels": "no such tool"}))
    assert "| **not run** |  |  | 12 |" in text and "- Not run: ConSan, kernels: no such tool" in text


def test_the_status() -> None:
    assert battery.status(record()) == 0
    assert battery.status(record(failures=["no"], not_run={"a": "b"})) == 1
    assert battery.status(record(not_run={"test_consan": "no such tool"})) == 3


def test_the_products_of_numerics_are_counted() -> None:
    row = {"kind": "bf16", "kernel": "portable", "bits": "one sum", "wrong": {"normal": 0, "integers": 0}}
    table = accuracy_tables.summary({"ways": [row], "long": [], "ends": [], "failed": []})
    count = battery.COUNT.search(f"a table\n\n{table}\n")
    assert count is not None and count[1] == "2"


# --- The sections ---


@pytest.mark.full
def test_every_section_has_tests_of_its_own_and_no_bug_is_missing() -> None:
    command = ["-m", "pytest", "tests/gpu", "--collect-only", "-q", "--tier=full", "-p", "no:cacheprovider", "-n", "0"]
    tests = " ".join(pattern for _, pattern in battery.SECTIONS.values())
    output = python(*command, BATTERY=tests).stdout
    names = [line for line in output.splitlines() if "::" in line]
    found = {key: [x for x in names if re.search(battery.SECTIONS[key][1], x)] for key in battery.SECTIONS}
    assert all(found.values()) and len(names) == len(set(names)) == sum(map(len, found.values())), output
    planted = {key: sum(bool(battery.PLANTED.search(name)) for name in of) for key, of in found.items()}
    few = {"ConSan": 1, "large offsets": 1, "windows": 2, "memcheck": 2, "synccheck": 1}
    assert planted == {key: few.get(key, 0) for key in battery.SECTIONS}
