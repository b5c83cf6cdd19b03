"""A comparison with torch, without a GPU: products are torch's on the CPU, and their times are made up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.lab_fakes import FULL, FakeLab, bench_of, small
from tests.support.patches import noted
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm.functional import routing
from triton_gemm.problem import Layout
from triton_gemm.runtime import background
from triton_gemm.tuning import gpu, recording, timing
from triton_gemm.tuning.comparison import MOST_ROUNDS, PRECISE, Comparing
from triton_gemm.tuning.gpu import TORCH
from triton_gemm.tuning.report import COLUMNS, Comparison, ProductComparison
from triton_gemm.tuning.session import against_torch
from triton_gemm.tuning.timing import DeviceLostError
from triton_gemm.tuning.trials import FailedError

pytestmark = pytest.mark.usefixtures("no_gpu")
SMALL, LARGE = problem_of(64, 4096, 4096), problem_of(4096, 4096, 4096)
Lab = partial(FakeLab, lambda one: 1.2 if one == TORCH else 1.0, has_torch=True)


def compared(lab: Any, calls: Any, budget: float = 60.0, recorded: bool = False) -> Comparison:
    seen: list[Comparison] = []
    found = Comparing(lab, budget, seen.append).run(calls, recorded)
    assert [len(x.products) for x in seen] == [*range(1, len(found.products) + 1)] and seen[-1] == found
    return found


def test_the_ratio_is_known_within_its_noise() -> None:
    lab = Lab(noise=0.01)
    report = compared(lab, {SMALL: 1, LARGE: 3})
    assert [one.problem for one in report.products] == [LARGE, SMALL], "the most called first"
    for one in report.products:
        assert one.measured and abs(one.ratio / 1.2 - 1) <= one.noise <= PRECISE
        assert one.torch_us == pytest.approx(one.ratio * one.ours_us) and one.ours_us == pytest.approx(1000, rel=0.1)
        assert (one.torch_error, one.ours_error) == (2e-3, 1e-3) and one.rounds % 24 == 0 and one.kernel
    assert report.torch_ms == pytest.approx(4 * 1.2, rel=0.05) and report.ours_ms == pytest.approx(4, rel=0.05)
    assert json.dumps(report.as_dict(), allow_nan=False) and report.seconds > 0
    noisy = compared(Lab(noise=0.2), {SMALL: 1}).products[0]
    assert noisy.noise > PRECISE and noisy.rounds <= MOST_ROUNDS and abs(noisy.ratio / 1.2 - 1) <= noisy.noise


def test_its_rounds_are_bounded_by_time() -> None:
    """Of what takes long at least a few are taken, whatever the budget."""
    lab = Lab(noise=0.2)
    lab.kernels.round_s = lambda candidates: 10.0
    lab.kernels.pause(1.0)
    time = lab.kernels.time

    def slowly(candidates: Any, rounds: int) -> Any:
        lab.kernels.clock += 10 * rounds
        return time(candidates, rounds)

    lab.kernels.time = slowly
    found = compared(lab, {SMALL: 2, LARGE: 1}, budget=20.0)
    assert [(one.outcome, one.rounds) for one in found.products] == [("measured", 5), ("no time", 0)]


def test_what_cannot_be_measured_is_reported_and_others_are_measured() -> None:
    planes = replace(SMALL, dtype=torch.float32, out_dtype=torch.float32, precision="bf16x3")
    full, broken, empty = replace(SMALL, N=64), replace(SMALL, N=128), replace(SMALL, M=0)
    lab = Lab(broken=lambda one: "torch: it has no kernel" if one == TORCH and lab.benches[-1][0] == broken else None)
    lab.full = (full,)
    report = compared(lab, {problem: 1 for problem in (planes, full, broken, empty, SMALL)})
    assert [one.outcome for one in report.products] == ["failed"] * 4 + ["measured"]
    assert planes not in lab.compiled and empty not in lab.compiled
    lines = str(report).splitlines()
    assert lines[2:6] == [
        "64x4096x4096 fp32 nn bf16x3: failed: torch has no fp32 product in bf16x3",
        "64x64x4096 bf16 nn: failed: operands of 9 MiB are too much for 1 MiB of free memory",
        "64x128x4096 bf16 nn: failed: torch: it has no kernel",
        "0x4096x4096 bf16 nn: failed: its result is empty",
    ]
    assert "these GEMMs once each, without 4 of 5 GEMMs: 1." in lines[-1]
    assert report.products[0].as_dict()["ratio"] is None


def test_a_policy_that_allows_nothing_else_is_named() -> None:
    with triton_gemm.policy("error"):
        (one,) = compared(Lab(), {SMALL: 1}).products
    assert one.outcome == "failed" and 'the policy is "error"' in one.why


def test_what_is_throttled_is_measured_again_and_then_refused() -> None:
    lab = Lab()
    lab.slowed = lambda now: ("too hot",) if now < 0.3 else ()
    assert compared(lab, {SMALL: 1}).products[0].measured and [seed for _, seed in lab.benches] == [0, 1]
    lab = Lab()
    lab.slowed = lambda now: ("too hot",)
    (one,) = compared(lab, {SMALL: 1}).products
    assert (one.outcome, one.why) == ("refused", "the GPU is too hot") and math.isnan(one.ratio)
    assert str(compared(lab, {SMALL: 1})).splitlines()[-1] == "nothing was measured"


def test_what_costs_the_gpu_ends_it_with_what_was_found() -> None:
    lab, seen = Lab(), []
    prepare = lab.kernels.prepare

    def lost(one: Any) -> float:
        if lab.benches[-1][0] == SMALL:
            raise DeviceLostError("the GPU cannot be used any more")
        return prepare(one)

    lab.kernels.prepare = lost
    with pytest.raises(DeviceLostError):
        Comparing(lab, 60.0, seen.append).run({LARGE: 2, SMALL: 1}, False)
    assert len(seen) == 1 and seen[0].products[0].measured


def test_it_is_printed_as_a_table() -> None:
    one = ProductComparison(SMALL, "measured", "", 3, 12.345, 10.0, 1.2345, 0.004, 1e-3, 2e-3, 24, "a kernel")
    other = ProductComparison(LARGE, "no time")
    report = Comparison("a GPU", True, (one, other), 7.0)
    rows = str(report).splitlines()
    assert rows[0].split() == ["GEMM", *" ".join(COLUMNS).split()] and len(rows[0]) == len(rows[1])
    assert " ".join(rows[1].split()) == "64x4096x4096 bf16 nn 3 12.35 10 1.234 0.4 1.0e-03 2.0e-03"
    assert rows[2] == "4096x4096x4096 bf16 nn: no time"
    step = "a step of your model, as recorded (3 calls), without 1 of 2 GEMMs"
    assert rows[3] == f"{step}: 0.03704 ms with torch, 0.03 with triton_gemm, on a GPU"
    assert str(replace(report, recorded=False)).splitlines()[3].startswith("these 3 calls, without 1")
    assert report.ratio == pytest.approx(1.2345) and math.isnan(replace(report, products=(other,)).ratio)
    nt = replace(one, problem=replace(SMALL, b=Layout((0, 1, 4096))))
    assert str(replace(report, products=(nt,))).splitlines()[1].startswith("64x4096x4096 bf16 nt ")


def test_torch_is_timed_beside_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, choice = bench_of(small(has_beta=True, bias="n"), tmp_path)
    assert bench.prepare(TORCH) > 0 and bench.ready(TORCH)
    assert bench.time([TORCH, choice], 4) == [[1.0] * 4] * 2 and bench.round_s([TORCH, choice]) > 0
    torchs, ours = bench.errors()
    assert 0 < torchs < 0.005 and ours > 0.1, "the fake multiplies, and adds no bias"
    monkeypatch.setattr(gpu, "relative_errors", FULL)
    assert all(map(math.isnan, bench.errors())), "there is no memory for them"
    bench.drop(TORCH)
    assert not list(tmp_path.iterdir()), "the journal knows nothing of torch"


def test_torchs_faults_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = bench_of(small(), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(FailedError, match=r"^torch: RuntimeError: cuBLAS takes no"):
        patch.setattr(torch, "mm", Mock(side_effect=RuntimeError("cuBLAS takes no such strides\nand more")))
        bench.prepare(TORCH)
    with monkeypatch.context() as patch, pytest.raises(FailedError, match="torch: results are not finite"):
        patch.setattr(torch, "mm", lambda a, b, out: out)
        bench.prepare(TORCH)
    monkeypatch.setattr(gpu, "LIMIT_S", 0.05)
    monkeypatch.setattr(torch.cuda.Event, "hangs", True)
    with pytest.raises(DeviceLostError, match=r"process: torch: it runs for more than 0.05 s$"):
        bench.prepare(TORCH)
    assert not list(tmp_path.iterdir())
    planes = small(dtype=torch.float32, out_dtype=torch.float32, precision="tf32x3")
    bench.problem = planes
    with pytest.raises(FailedError, match="no fp32 product in tf32x3"):
        bench.prepare(TORCH)


def test_torch_takes_turns_with_a_winner_that_was_timed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a bench of the tuner; where torch refuses, or the winner fails now, there is no ratio."""
    bench, choice = bench_of(small(), tmp_path, "any")
    winner = table_fakes.another(small())
    bench.prepare(winner)
    assert against_torch(bench, winner, 0.1) == against_torch(bench, choice, 0.1) == (1.0, False)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", None)
        assert against_torch(bench, winner, 0.1) is None
    monkeypatch.setattr(bench, "_launch", None)
    assert against_torch(bench, choice, 0.1) is None


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Times about a millisecond; whether first calls were held at each."""
    held: list[bool] = []

    class Replay:
        def __init__(self, calls: Any, repeats: int) -> None:
            self.repeats = repeats
            calls[-1]()

        def start(self) -> Any:
            held.append(bool(background._held))
            return lambda: 1 + 0.001 * random.random()

    monkeypatch.setattr(timing, "Replay", Replay)
    yield held


def test_a_whole_comparison(tuned_on_the_cpu: Path, replays: list[bool]) -> None:
    seen: list[Comparison] = []
    report = triton_gemm.compare([small(), (48, 64, 96), small(bias="n")], progress=seen.append)
    first, second = report.products
    assert first.calls == 2 and second.calls == 1, "sizes and a problem that are the same product"
    assert first.measured and first.ratio == pytest.approx(1, abs=0.01) and report.device == HOPPER.name
    assert 0 < first.torch_error < 0.005 and 0 < first.ours_error < 0.005 and second.ours_error > 0.1
    assert all(replays) and not background._held and seen[-1] == report and not report.recorded
    assert "these 3 calls: 3.0" in str(report)
    assert not list(tuned_on_the_cpu.glob("*.json")), "nothing is stored"


def test_recorded_calls_are_counted(tuned_on_the_cpu: Path, replays: list[bool], tmp_path: Path) -> None:
    recording.write(tmp_path / "shapes.json", {small(): 5, small(bias="n"): 2})
    report = triton_gemm.compare(tmp_path / "shapes.json")
    assert report.recorded and [one.calls for one in report.products] == [5, 2]
    assert "a step of your model, as recorded (7 calls): 7.0" in str(report)
    assert triton_gemm.compare({small(): 4}).recorded


def test_what_runs_is_what_a_call_would_run(tuned_on_the_cpu: Path, replays: list[bool]) -> None:
    (one,) = triton_gemm.compare([small()]).products
    tuned = table_fakes.another(small(), 1)
    assert triton_gemm.tables.store(small(), tuned, HOPPER, us=1.0, default_us=2.0)
    (other,) = triton_gemm.compare([small()]).products
    assert str(tuned.config) in other.kernel and other.kernel != one.kernel


def test_what_is_routed_does_not_count(
    tuned_on_the_cpu: Path, replays: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's product would be ours under `use`: the innermost rule refuses all meanwhile."""
    rule = routing.Rule(frozenset(), frozenset(), None, "same bits")
    monkeypatch.setattr(routing, "_rules", [rule])
    monkeypatch.setattr(routing._overrides, "register", lambda: False)
    seen = noted(monkeypatch, torch, "mm", lambda *_, **how: routing._rules[-1])
    triton_gemm.compare([small()])
    refused = {one.refuses("mm", torch.ones(1), torch.ones(1)) for one in seen if one is not rule}
    assert seen and rule not in seen and refused == {"the predicate says no"} and routing._rules == [rule]
