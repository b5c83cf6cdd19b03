"""The bench of processes under different conditions: how each is set up, what a round prints, and the table."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import triton_gemm
from perf.bench import __main__ as bench
from perf.bench import processes
from perf.measure import environment, operands
from tests.support.processes import printed
from tests.support.report_records import SURROUNDINGS
from triton_gemm.compat import cxx_compiler
from triton_gemm.runtime import native_build, native_file

# Prints microseconds, which double in each round; under one condition it fails, under another after two rounds.
CHILD = """
import json, sys
condition, us = sys.argv[1], {"clean": 4.0, "16 idle threads": 6.0}.get(sys.argv[1], 5.0)
if condition == "after a tqdm bar": sys.exit("no module tqdm")
for i, _ in enumerate(sys.stdin):
    if condition == "4 threads load a checkpoint" and i == 2: sys.exit(7)
    print(json.dumps({"us": {"matmul": us, "linear": 2 * us}, "launched_by": "C++", "threads": 1}), flush=True)
    us *= 2
"""


def test_conditions_have_their_threads() -> None:
    """All are set up in one new process, one after another. A checkpoint is loaded during rounds only."""
    code = f"""
import threading, time, torch
from perf.bench import processes
loads, load = [], torch.load
torch.load = lambda path: loads.append(load(path))
for condition in {processes.CONDITIONS}:
    during = processes.set_up(condition)
    assert not loads
    with during():
        print(threading.active_count() - 1)
        while condition == {processes.LOADING!r} and not loads:
            time.sleep(0.1)
    print(threading.active_count() - 1)
    loads.clear()
"""
    assert [int(x) for x in printed(code).split()] == [0, 0, 0, 0, 1, 1, 17, 17, 21, 17, 17, 17]


def test_the_one_without_a_compiler_finds_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++")
    surroundings: dict[str, str] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: surroundings.update(env))
    processes.started(processes.CLEAN, str(tmp_path))
    assert surroundings["CXX"] == "g++" and surroundings["PATH"] != str(tmp_path)
    processes.started(processes.NO_COMPILER, str(tmp_path))
    for name in ("CXX", "PATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, surroundings[name])
    assert cxx_compiler() is None and native_file.extensions() == []
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        native_build.build()


def test_a_result_is_printed_for_each_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, with calls that sleep."""
    waits = {"matmul": 0.002, "linear": 0.001}
    monkeypatch.setattr(processes, "CALLS", 2)
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(triton_gemm, "use", nullcontext)
    monkeypatch.setattr(triton_gemm, "matmul", lambda a, b: time.sleep(waits["matmul"]))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda a, b: time.sleep(waits["linear"]))
    monkeypatch.setattr(sys, "argv", ["-c", processes.CLEAN])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    processes.child()
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(results) == 2 and {result["launched_by"] for result in results} == {"Python"}
    for result in results:
        assert list(result["us"]) == ["matmul", "linear under use()", "linear by torch"]
        assert result["us"]["matmul"] >= 2000 and result["us"]["linear by torch"] >= 1000
        assert result["threads"] == threading.active_count()


def test_the_command_writes_ratios_to_the_clean_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "CHILD", CHILD)
    monkeypatch.setattr(environment, "RESULTS", tmp_path)
    monkeypatch.setattr(environment, "describe", lambda _: SURROUNDINGS)
    monkeypatch.setattr(native_build, "ahead", lambda: "no g++")
    assert bench.main(["processes", "--rounds", "3"]) == 1
    output = capfd.readouterr()
    assert "C++ launches no calls: no g++" in output.err and "no module tqdm" in output.err
    assert "FAILED after a tqdm bar" in output.err and "FAILED 4 threads load a checkpoint" in output.err
    with (tmp_path / "made-up-gpu" / processes.FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["process"], row["call"]) for row in rows[::2]] == [
        (name, "matmul") for name in processes.CONDITIONS if name not in (processes.BAR, processes.LOADING)
    ]
    assert {row["over_clean"] for row in rows if row["process"] == processes.IDLE} == {"1.500"}
    idle = next(row for row in rows if row["process"] == processes.IDLE)
    assert idle["host_us"] == "24.00"  # of 12, 24 and 48: the first round is dropped
    assert {row["commit"] for row in rows} == {SURROUNDINGS["commit"]}
    assert f"| {processes.IDLE} | matmul | 24.00 |" in output.out
    monkeypatch.setattr(processes, "CHILD", "import sys; sys.exit(1)")
    (tmp_path / "made-up-gpu" / processes.FILE).unlink()
    assert bench.main(["processes"]) == 1 and not list((tmp_path / "made-up-gpu").iterdir())
