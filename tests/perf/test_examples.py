"""What examples/bench_gpt.py reports: tables, pages, and what it says without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import bench_gpt
from perf.common.files import write_json
from perf.measure import environment
from perf.pages import gpt_tables
from perf.pages.results import Results
from tests.support.processes import python
from tests.support.report_records import block


def record() -> dict[str, Any]:
    """Ours is as fast, and a tenth faster compiled."""
    speeds = dict(zip((variant.name for variant in bench_gpt.VARIANTS), (1000.0, 1000.0, 2000.0, 2200.0), strict=True))
    variants: dict[str, Any] = {name: {"tokens_per_s": speed} for name, speed in speeds.items()}
    for name, base in bench_gpt.BASELINES.items():
        variants[name]["ratio"] = {"median": speeds[name] / speeds[base]}
    return {
        "environment": {"gpu": "NVIDIA H100", "torch": "2.12", "triton": "3.6.0", "cuda": "13.0"},
        "config": {"layers": 12, "width": 1024, "vocabulary": 50304},
        "cases": {
            "decode, batch 1": {"target": gpt_tables.DECODE, "variants": variants},
            "training, 8 x 1024": {"target": gpt_tables.TRAINING, "variants": variants},
        },
    }


def test_rows() -> None:
    decode, training = gpt_tables.rows(record())
    assert decode == ["decode, batch 1", "1,000", "1,000", "1.000", "2,000", "2,200", "1.100", "1.05", "missed"]
    assert training[-2:] == ["1.00", "met"]


def test_a_failure_is_shown_and_misses() -> None:
    found = record()
    found["cases"]["decode, batch 1"]["variants"][gpt_tables.OURS] = {"failed": "differs"}
    assert gpt_tables.rows(found)[0][2:4] == ["FAILED", None]
    assert gpt_tables.rows(found)[0][-1] == "missed"


def test_pages_have_the_newest_triton_of_each_gpu(tmp_path: Path) -> None:
    for gpu, version in (("NVIDIA H100", "3.6.0"), ("NVIDIA H100", "3.10.0"), ("NVIDIA H200", "3.9.0")):
        found = record()
        found["environment"] |= {"gpu": gpu, "triton": version}
        write_json(gpt_tables.RECORDS.path(tmp_path, found["environment"]), found)
    models = gpt_tables.RECORDS.committed(tmp_path)
    assert environment.newest(models[::-1]) == models[:0:-1]
    newest = block("gpt", Results.read(tmp_path))
    assert [newest.count(f"Triton {version}") for version in ("3.6.0", "3.10.0", "3.9.0")] == [0, 1, 1]


def test_quick_leaves_what_is_given() -> None:
    plain, quick, given = (
        bench_gpt.parse(words) for words in ([], ["--quick"], ["--quick", "--layers", "4", "--rounds", "9"])
    )
    assert (plain.layers, plain.rounds) == (bench_gpt.LAYERS, bench_gpt.ROUNDS)
    assert (quick.layers, quick.rounds) == (2, 5)
    assert (given.layers, given.rounds) == (4, 9)


@pytest.mark.full
@pytest.mark.slow
def test_tiny_runs_in_the_interpreter() -> None:
    done = python("-m", "examples.bench_gpt", "--tiny")
    assert done.returncode == 0, done.stderr
    assert "('addmm', 'triton_gemm')" in done.stdout
