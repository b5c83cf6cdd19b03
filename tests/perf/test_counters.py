"""Nsight Compute's counters of the ladder: which launches, what is read of ncu's output, and what is said of it."""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from perf.ladder import counted, counters, report_page, tasks
from perf.ladder.counters import LARGE_SIZE, METRICS, READY, SIZE, STALLS, UNITS, Launch
from perf.ladder.record import CountedLaunch, Record
from perf.pages.results import Results
from reference_cuda import TwinUnavailable
from tests.support.report_records import OPTIONS, SURROUNDINGS, block, committed_record
from triton_gemm.ladder import LADDER
from triton_gemm.ladder.command import config_of


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return committed_record(tmp_path)


def figures(**changes: float) -> dict[str, float]:
    """Of a kernel whose loads wait for shared memory, at 4096^3 in fp32: 0.2 GiB by DRAM in 4 ms."""
    made = {**dict.fromkeys(METRICS, 0.0), **dict.fromkeys(UNITS, 10.0), **dict.fromkeys(STALLS, 0.01)}
    made |= {"ns": 4e6, "DRAM read": 1.5e8, "DRAM written": 6.4e7, "L2 read": 8e9, "L2 written": 6.4e7}
    made |= {"FMA pipe": 60.0, "L1 and shared memory": 90.0, "shared memory": 3.0, "a barrier": 0.9, READY: 0.55}
    return made | changes


def printed(*kernels: tuple[str, Mapping[str, float]]) -> str:
    """As ncu prints it: what the program says, columns, units, a row a kernel, and lines that are none."""
    rows: list[list[Any]] = [["ID", "Kernel Name", *METRICS.values()], ["", "", *["unit"] * len(METRICS)]]
    rows += [[i, name, *(f"{found[figure]:,}" for figure in METRICS)] for i, (name, found) in enumerate(kernels)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return f"==PROF== Connected to process 7\n{text.getvalue()}==PROF== Disconnected\n"


def count_all(
    record: Record, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), nvcc: bool = True
) -> list[list[str]]:
    """Fills the record by a made-up ncu; returns its command lines."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    def load(stem: str) -> None:
        if not nvcc:
            raise TwinUnavailable(f"{stem}: no nvcc")

    monkeypatch.setattr(tasks, "load", load)
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        chosen = [Launch.read(text) for text in command[command.index("perf.ladder.counters") + 1 :]]
        kernels = []
        for one in chosen:
            copies = 2 if one.provider == "k07_tf32" else 0
            kernels += [("repack_kernel", figures(ns=1e5, **{"DRAM read": 6.4e7}))] * copies
            kernels.append((f"{one.provider}_kernel", figures(**{"global": 64 * 4 * 2**20})))
        return SimpleNamespace(stdout=printed(*kernels), returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    (task,) = tasks.counting_tasks(record, OPTIONS)
    task.run(lambda _: None)
    return commands


def test_every_rung_is_counted_as_it_was_tuned_in_one_run(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    record.today = {**SURROUNDINGS, "gpu": record.environment["gpu"]}
    (command,) = count_all(record, monkeypatch)
    assert command[0] == "ncu" and ",".join(METRICS.values()) in command
    again = Record.read(record.folder)
    assert again.counted == record.counted
    assert [one.rung for one in counted.counted(again)] == list(LADDER)
    for one in counted.counted(again):
        tuned = record.problems[f"{one.launch.mode} {SIZE}x{SIZE}x{SIZE}"].providers[one.rung.name].config
        assert str(config_of(one.rung, one.launch.config)) == tuned
        assert one.launch.made == record.today, "what is added names its own surroundings"
    by_size = [(one.rung.id, one.launch.config.rpartition(",")[2]) for one in counted.counted(again, LARGE_SIZE)]
    assert by_size == [("k03", "1"), ("k04", "8"), ("k08", "128"), ("k08", "8")]


def test_copies_of_operands_are_in_the_bytes_and_not_in_the_shares(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_all(record, monkeypatch)
    (k07,) = [one for one in counted.counted(record) if one.rung.id == "k07"]
    assert list(k07.launch.kernels) == ["repack_kernel 1", "repack_kernel 2", "k07_tf32_kernel"]
    assert k07.product["FMA pipe"] == 60.0 and k07.total("ns") == 4.2e6
    assert k07.dram_bytes == 1.5e8 + 2 * 6.4e7 + 3 * 6.4e7 and k07.least_bytes == 3 * 4 * SIZE**2


def test_only_what_runs_here_is_counted(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rungs that do not claim the GPU, and twins that cannot be built, are left out; what was counted before goes."""
    record.counted["old"] = CountedLaunch(
        provider="k03_blocked", config="32x32x32,4,1", mode="ieee", M=SIZE, N=SIZE, K=SIZE, kernels={"a": figures()}
    )
    count_all(record, monkeypatch, capability=(8, 0), nvcc=False)
    assert [one.rung.id for one in counted.counted(record)] == [f"k{i:02d}" for i in range(1, 10)]
    assert counted.loads(record) == ""
    (few,) = tasks.counting_tasks(record, replace(OPTIONS, rungs=LADDER[:1], every_rung=False))
    few.run(lambda _: None)
    assert len(counted.counted(record)) == 9, "what is not counted again stays"


ONE = counters.of_s3("S3.3")


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (SimpleNamespace(returncode=2, stderr="", stdout="==ERROR== ERR_NVGPUCTRPERM: no"), "ERR_NVGPUCTRPERM"),
        (SimpleNamespace(returncode=2, stderr="error: no nvcc", stdout="==ERROR== status 2"), "^error: no nvcc"),
        (SimpleNamespace(returncode=9, stderr="", stdout=""), "status 9"),
        (FileNotFoundError(2, "No such file", "ncu"), "No such file"),
        (subprocess.TimeoutExpired("ncu", 300), "longer than 300 s"),
        (SimpleNamespace(returncode=0, stdout="==PROF== No kernels were profiled."), "no table: ==PROF== No kernels"),
        (SimpleNamespace(returncode=0, stdout=printed(("repack_kernel", figures()))), "no product of c03"),
        (SimpleNamespace(returncode=0, stdout=printed(("a", figures())).replace("dram__bytes_read", "x")), "no dram__"),
        (
            SimpleNamespace(returncode=0, stdout=printed(("a", figures())).replace("8,000,000", "n/a")),
            "no l1tex__m_xbar",
        ),
    ],
)
def test_ncu_that_fails_says_why(done: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=[done]))  # which raises errors
    with pytest.raises(counters.CountingError, match=reason):
        counters.count([ONE])


def test_the_sentence_of_the_counters(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results([record], [])
    assert "No counters are committed yet" in block("counted", results)
    assert counted.loads(record) == counted.table(record) == ""
    count_all(record, monkeypatch)
    (k03,) = [one for one in counted.counted(record) if one.rung.id == "k03"]
    text = counted.sentence(k03)
    assert text.startswith("L1 and shared memory 90 %, FMA pipe 60 %")
    assert "For 10 % of its time a warp could issue an instruction, but another warp did. It waits for shared" in text
    assert text.endswith("shared memory (54 %), a barrier (16 %).") and "Address arithmetic" not in text
    page = block("k03", results, record.folder)
    assert all(part in page for part in text.split("It waits for")) and "[It waits for](" in page
    table = block("counted", results)
    assert all(f"| {rung.id} {rung.title} |" in table for rung in LADDER) and "copies" in table.lower()
    order = block("launch-order", results)
    assert "| k03, 64x64 | by columns |" in order and "| k08, 128x256 | groups of 8 rows |" in order
    assert "| S3.3 | global | 64 | 64 |" in counted.loads(record)
    assert table.splitlines()[4] in report_page.write(record, []).read_text()
