"""`triton-gemm warmup`, `tune` and `compare`: what they pass on to the package, and what they print of its answers."""

from __future__ import annotations

import csv
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.command_line import call, document, words_of
from tests.support.table_fakes import problem_of
from triton_gemm import cli
from triton_gemm.cli import products, words
from triton_gemm.hardware.gpus import named_device
from triton_gemm.layers import problems_of
from triton_gemm.runtime import precompile
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.suites import SUITES
from triton_gemm.tuning.report import Comparison, ProductComparison, ShapeReport, TuningReport

H200 = named_device("h200")
COMPARE = "compare", "--shapes", "1x2x3"
FIGURES = {"torch_us": 12.0, "ours_us": 10.0, "ratio": 1.2, "noise": 0.01, "torch_error": 1e-3, "ours_error": 2e-3}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was to be compiled, and the failures of it."""
    jobs: dict[str, Any] = {"failures": ()}

    def fake(problems: Any, devices: Any, **how: Any) -> precompile.Precompiled:
        jobs.update(how, problems=problems, devices=[device.name for device in devices])
        how["progress"](1, 2), how["selecting"](1, 2)
        none = "there is no C compiler"
        return precompile.Precompiled(3, 1, len(problems), tmp_path, 4.2, jobs["failures"], driver_module=none)

    monkeypatch.setattr(cli.warmup, "precompile", fake)
    return jobs


def test_warmup_says_what_was_compiled(jobs: dict[str, Any], tmp_path: Path) -> None:
    shapes = ("--shapes", "512x1024x2048,2x16x32x64", "--dtype", "fp16")
    shown = words_of("warmup", *shapes, "--arch", "sm_90", "--out", tmp_path)
    assert "3 kernels for 2 GEMMs" in shown and "1 compiled in 4 s, 2 were compiled before" in shown
    assert "Triton's driver module: there is no C compiler" in shown
    assert "launches repeated calls: TRITON_GEMM_NATIVE is 0" in shown
    hoppers = ["NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "sm_90"]
    assert jobs["devices"] == hoppers and jobs["cache"] == tmp_path
    assert [problem.batch for problem in jobs["problems"]] == [1, 2]
    assert call("warmup", "--suite", "square", "--device", "h200").exit_code == 0
    assert len(jobs["problems"]) == len(SUITES["square"].shapes)
    jobs["failures"] = ("gemv_kernel: it broke",)
    assert document("warmup", *shapes, "--device", "h200", code=1)["failures"] == ["gemv_kernel: it broke"]
    assert jobs["devices"] == ["NVIDIA H200"]


def test_warmup_of_weights_is_what_prepare_compiles(jobs: dict[str, Any]) -> None:
    given = ("warmup", "--device", "h200", "--weights", "96x64, 64x96,96x64", "--rows", "1-3, 9,2 - 4")
    plain, other = ((), torch.bfloat16, False), (("--dtype", "fp16", "--bias", "--layout", "nt"), torch.float16, True)
    for options, dtype, bias in (plain, other):
        assert "3 kernels for 10 GEMMs" in words_of(*given, *options)
        wanted = problems_of([(96, 64), (64, 96)], [1, 2, 3, 9, 4], dtype, bias)
        assert jobs["problems"] == list(wanted)


@pytest.mark.parametrize(("options", "least", "most"), [([], 0, 0), (["same"], 2, 30), (["any"], 20, 40)])
def test_warmup_compiles_what_tune_would_time(options: list[str], least: int, most: int, jobs: dict[str, Any]) -> None:
    given = [f"--candidates={bits}" for bits in options]
    assert call("warmup", "--shapes", "512x1024x2048", "--device", "h200", *given).exit_code == 0
    problem = problem_of(512, 1024, 2048)
    found = jobs["also"](problem, H200)
    assert least <= len(found) <= most
    classes = {bit_class(problem, selection) for selection in found}
    assert len(classes) > 1 if options == ["any"] else len(classes) == len(options)


def compared(outcome: str = "measured", **figures: float) -> Comparison:
    one = ProductComparison(problem_of(8), outcome, "", 2, **figures)  # type: ignore[arg-type]
    return Comparison("a GPU", True, (one,), 3.0)


class FakeTuning(ModuleType):
    """`triton_gemm.tuning` as far as the command knows it. It compares two products, and ends with `error`."""

    outcome = "tuned"
    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__("triton_gemm.tuning")
        self.requested: dict[str, Any] = {}
        self.reports = [compared(**FIGURES), compared(**FIGURES)]
        self.read_shapes = lambda path: {problem_of(8): 3, problem_of(): 1}

    def tune(self, shapes: Any, **how: Any) -> TuningReport:
        self.requested = {"shapes": shapes, **how}
        logging.getLogger("triton_gemm.tuning").info("one product is done")
        return TuningReport((ShapeReport(problem_of(), 1, self.outcome),), "a GPU", "same", "graph", 60.0, 12.3)

    def compare(self, shapes: Any, *, progress: Any, **how: Any) -> Any:
        self.requested = {"shapes": shapes, **how}
        for report in self.reports:
            progress(report)
        if self.error is not None:
            raise self.error
        return report


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> FakeTuning:
    fake = FakeTuning()
    monkeypatch.setitem(sys.modules, "triton_gemm.tuning", fake)
    monkeypatch.setattr(logging.getLogger("triton_gemm.tuning"), "handlers", [])
    return fake


def test_tune_passes_its_options_on(tuning: FakeTuning, tmp_path: Path) -> None:
    shapes = "4096x4096x4096,16x14336x4096"
    done = words_of("tune", "--shapes", shapes, "--layout", "nt", "--budget", "1.5m", "--bits", "any", "--resume")
    assert "one product is done" in done and "a GPU: 1 tuned" in done
    how = {"budget": 90.0, "bits": "any", "measure": "graph", "resume": True, "repeat": 1, "device": None}
    assert {name: tuning.requested[name] for name in how} == how
    texts = [words.problem_text(problem) for problem in tuning.requested["shapes"]]
    assert texts == ["4096x4096x4096 bf16 nt", "16x14336x4096 bf16 nt"]
    assert document("tune", "--suite", "decode", "--measure", "eager")["shapes"][0]["outcome"] == "tuned"
    assert tuning.requested["measure"] == "eager" and len(tuning.requested["shapes"]) == len(SUITES["decode"].shapes)
    file = tmp_path / "shapes.json"
    file.touch()
    assert call("tune", "--shapes-from", file).exit_code == 0
    assert tuning.requested["shapes"] == file, "with how often each was called"
    assert products.recorded(file) == [problem_of(8), problem_of()], "which `warmup` compiles"
    for tuning.outcome in ("refused", "failed", "not stored"):
        assert document("tune", "--shapes", "1x2x3", code=1)


def test_tune_takes_weights_with_rows(tuning: FakeTuning, tmp_path: Path) -> None:
    words_of("tune", "--weights", "4096x1024,512x64", "--rows", "1-8,64", "--bias")
    assert tuning.requested["rows"] == [1, 2, 3, 4, 5, 6, 7, 8, 64]
    texts = [words.problem_text(problem) for problem in tuning.requested["shapes"]]
    assert texts == ["1x4096x1024 bf16 nt bias n", "1x512x64 bf16 nt bias n"]
    file = tmp_path / "shapes.json"
    file.touch()
    words_of("tune", "--shapes-from", file, "--rows", "1-4096")
    assert tuning.requested["shapes"] == file and tuning.requested["rows"] == [*range(1, 4097)]


def test_a_dry_run_times_nothing() -> None:
    printed = words_of("tune", "--weights", "4096x4096", "--rows", "1-64", "--dry-run", "--device", "h200")
    assert "64x4096x4096 bf16 nt warp_specialised " in printed and "for 8 GEMMs; nothing was timed" in printed
    found = document("tune", "--shapes", "64x64x64", "--dry-run", "--device", "h200")
    assert len(found["shapes"][0]["candidates"]) > 1 and "torch" not in found["shapes"][0]["candidates"]
    any_bits = "tune", "--shapes", "64x64x64", "--dry-run", "--device", "h200", "--bits", "any"
    assert document(*any_bits)["shapes"][0]["candidates"][-1] == "torch" and " torch " in words_of(*any_bits)


def test_compare_passes_its_options_on(tuning: FakeTuning, tmp_path: Path) -> None:
    options = "--shapes 16x32x64,8x16x32x64 --layout nt --budget 9s --device cuda:0"
    done = words_of("compare", *options.split())
    assert "a step of your model, as recorded (2 calls): 0.024 ms with torch, 0.02 with triton_gemm, on a GPU" in done
    assert {name: tuning.requested[name] for name in ("budget", "device")} == {"budget": 9.0, "device": "cuda:0"}
    texts = [words.problem_text(problem) for problem in tuning.requested["shapes"]]
    assert texts == ["16x32x64 bf16 nt", "8x16x32x64 bf16 nt"]
    found = document("compare", "--suite", "decode")
    assert found["torch_ms"] == 0.024 and found["products"][0]["ratio"] == 1.2
    file = tmp_path / "shapes.json"
    file.touch()
    assert call("compare", "--shapes-from", file).exit_code == 0
    assert tuning.requested["shapes"] == file, "with how often each was called"


def test_compare_takes_layers_at_powers_of_two(tuning: FakeTuning) -> None:
    assert call("compare", "--weights", "32x64", "--rows", "3-20,7,100-103", "--bias").exit_code == 0
    assert [problem.M for problem in tuning.requested["shapes"]] == [3, 4, 8, 16, 20, 7, 100, 103]
    assert all(problem.bias == "n" and problem.b.column_major for problem in tuning.requested["shapes"])


def test_compare_writes_a_table_and_a_plot(tuning: FakeTuning, tmp_path: Path) -> None:
    products = (*compared(**FIGURES).products, *compared("no time").products)
    tuning.reports = [replace(compared(), products=products)]
    drawn = tmp_path / "ratios.svg"
    document(*COMPARE, "--csv", tmp_path / "x.csv", "--plot", drawn, code=1)
    first, second = csv.DictReader((tmp_path / "x.csv").open())
    assert first["product"] == "8x1024x2048 bf16 nn" and first["calls"] == "2" and "problem" not in first
    assert {name: float(first[name]) for name in FIGURES} == FIGURES
    assert second["outcome"] == "no time" and second["ratio"] == ""
    assert drawn.read_text().lstrip().startswith("<?xml")


def test_compare_draws_nothing_where_nothing_was_measured(tuning: FakeTuning, tmp_path: Path) -> None:
    tuning.reports = [compared("failed")]
    shown = words_of(*COMPARE, "--plot", tmp_path / "x.png", code=1)
    assert "8x1024x2048 bf16 nn: failed nothing was measured" in shown
    tuning.reports = [Comparison("a GPU", True)]
    assert "nothing was measured" in words_of(*COMPARE, "--csv", tmp_path / "x.csv")


def test_compare_says_that_matplotlib_is_missing(tuning: FakeTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = words_of(*COMPARE, "--plot", "x.png", code=1)
    assert "error: --plot needs matplotlib: pip install matplotlib" in shown
    assert not tuning.requested, "before anything is measured"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("the GPU cannot be used any more"), 1, "any more")],
)
def test_compare_shows_what_it_has_found_until_then(
    tuning: FakeTuning, error: BaseException, code: int, message: str
) -> None:
    tuning.error = error
    done = call(*COMPARE, "--json")
    assert done.exit_code == code and message in done.stderr and json.loads(done.stdout)["torch_ms"] == 0.024
    tuning.reports = []
    assert message in document(*COMPARE, code=code)["error"]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_can_be_tuned(name: str) -> None:
    dtype = None if SUITES[name].mode else words.dtype("fp16")
    problems = products.of_suite(name, dtype)
    assert len(problems) <= len(SUITES[name].shapes)
    assert {problem.dtype for problem in problems} == {dtype} or SUITES[name].mode
    assert any(not problem.a.aligned for problem in problems) is (name == "odd")
