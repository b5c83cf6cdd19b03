"""What examples/bench_gpt.py reports: tables, pages, and what it says without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import bench_gpt
from perf import example_tables, pages
from perf.record import write_json


def record() -> dict[str, Any]:
    """Ours is as fast, and a tenth faster compiled."""
    speeds = dict(zip((variant.name for variant in bench_gpt.VARIANTS), (1000.0, 1000.0, 2000.0, 2200.0), strict=True))
    variants: dict[str, Any] = {name: {"tokens_per_s": speed} for name, speed in speeds.items()}
    for name, base in bench_gpt.BASELINES.items():
        variants[name]["ratio"] = {"median": speeds[name] / speeds[base]}
    return {
        "environment": {"gpu": "NVIDIA H100", "torch": "2.11", "triton": "3.6.0", "cuda": "13.0"},
        "config": {"layers": 12, "width": 1024, "vocabulary": 50304},
        "cases": {
            "decode, batch 1": {"target": example_tables.DECODE, "variants": variants},
            "training, 8 x 1024": {"target": example_tables.TRAINING, "variants": variants},
        },
    }


def test_rows() -> None:
    decode, training = example_tables.rows(record())
    assert decode == ["decode, batch 1", "1,000", "1,000", "1.000", "2,000", "2,200", "1.100", "1.05", "missed"]
    assert training[-2:] == ["1.00", "met"]


def test_a_failure_is_shown_and_misses() -> None:
    found = record()
    found["cases"]["decode, batch 1"]["variants"][example_tables.OURS] = {"failed": "differs"}
    assert example_tables.rows(found)[0][2:4] == ["FAILED", None]
    assert example_tables.rows(found)[0][-1] == "missed"


def test_pages_show_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = "<!-- results:gpt -->\n<!-- /results -->"
    assert example_tables.NOTHING in pages.filled(text, None, tmp_path)
    folder = example_tables.folder_of(tmp_path, record()["environment"])
    folder.mkdir(parents=True)
    write_json(folder / example_tables.FILE, record())
    filled = pages.filled(text, None, tmp_path)
    assert "NVIDIA H100, torch 2.11, Triton 3.6.0" in filled and "| 2,200 | 1.100 | 1.05 | missed |" in filled


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_it_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpt.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_tiny_runs_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "examples.bench_gpt", "--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "('addmm', 'triton_gemm')" in done.stdout
