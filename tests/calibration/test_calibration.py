"""Calibration without a GPU: a model is planted, and made-up kernels take the times that it predicts and noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.command_line import document, words_of
from tests.support.lab_fakes import FakeLab
from triton_gemm import calibration
from triton_gemm.calibration import figures, fit, measuring, probes, session
from triton_gemm.calibration.report import CalibrationReport, Progress
from triton_gemm.hardware import device
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.device_model import DeviceModel, model_of, model_without_calibration
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection, predicted, ranked
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.tuning.journal import Journal
from triton_gemm.tuning.timing import DeviceLostError

H200 = named_device("h200")
OTHER = replace(H200, name="another Hopper", power_limit=500)
AMPERE = replace(OTHER, name="a GPU without wgmma", capability=(8, 0), num_sms=108)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of models, empty, in a test alone."""
    with table_fakes.own_models(tmp_path, monkeypatch) as models:
        yield models


def planted(start: DeviceModel) -> DeviceModel:
    """A GPU whose memory and L2 are slower than its model says, and its tensor cores and CUDA cores too."""
    entry = start.as_dict()
    factors = {("memory",): 0.65, ("l2",): 0.6, ("launch",): 1.3}
    for place in figures.places(entry):
        if "step" in place and place[1] == "warp_specialised":
            factors[place] = 1.3
        if "products" in place:
            factors[place] = 0.7
    return DeviceModel(**figures.with_values(entry, {at: x * figures.value_at(entry, at) for at, x in factors.items()}))


def slower(info: DeviceInfo = OTHER) -> DeviceModel:
    return planted(model_without_calibration(info))


def test_what_a_data_sheet_says_is_not_fitted() -> None:
    entry = model_without_calibration(H200).as_dict()
    fitted = {place[0] for place in figures.places(entry)}
    assert fitted == {"launch", "memory", "l2", "tensor", "copy", "copied", "kernels"}
    sizes = ("num_sms", "shared_memory_per_sm", "capability")
    assert all(figures.rounded(entry)[name] == entry[name] for name in sizes)


class Lab(FakeLab):
    """Kernels that take what a model predicts, and some more or less that it knows nothing of."""

    def __init__(self, info: DeviceInfo, true: DeviceModel, seed: int = 0, off: float = 0.03, **how: Any) -> None:
        super().__init__(self.milliseconds, seed, **how)
        self.info, self.true, self.off = info, true, off

    def milliseconds(self, selection: Selection) -> float:
        problem, _ = self.benches[-1]
        return true_us(problem, candidate_of(problem, selection), self.true, self.off) / 1000


def candidate_of(problem: GemmProblem, selection: Selection) -> Candidate:
    packed = triton_gemm.kernels.repack.repacked(problem, selection.packed)
    given = packed.swap_ab() if selection.swap_ab else packed
    return Candidate(given, selection.algorithm)


def true_us(problem: GemmProblem, candidate: Candidate, true: DeviceModel, off: float = 0.03) -> float:
    kernel, *how = candidate.algorithm
    unknown = Random(repr((problem, kernel, tuple(how)))).gauss(0, off)
    return predicted(problem, candidate, true) * exp(unknown)


def calibrated(lab: Lab, budget: float = 20.0, **how: Any) -> CalibrationReport:
    return session.Session(lab, budget, **how).run()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few products, for what does not depend on how many."""
    monkeypatch.setattr(probes, "SHAPES", probes.SHAPES[:12])


def regret_of(model: DeviceModel, true: DeviceModel, info: DeviceInfo, count: int = 8) -> float:
    """How much longer a model's picks take than the fastest candidates, in the mean of unseen shapes."""
    lost = []
    for name in ("mid", "decode", "square", "bigk", "llm"):
        for shape in unseen(SUITES[name], 11, count):
            problem = gemm_problem(shape)
            candidates = [candidate for _, candidate in ranked(problem, info)]
            taken = [predicted(problem, candidate, true) for candidate in candidates]
            guess = [predicted(problem, candidate, model) for candidate in candidates]
            lost.append(taken[guess.index(min(guess))] / min(taken) - 1)
    return sum(lost) / len(lost)


@pytest.mark.parametrize("info", [OTHER, AMPERE], ids=["Hopper", "portable kernels"])
def test_a_planted_model_is_found_and_its_choices_are_good(info: DeviceInfo) -> None:
    start = model_without_calibration(info)
    true = planted(start)
    report = calibrated(Lab(info, true), budget=16.0)
    assert report.outcome == "kept" and report.path is not None and report.path.exists(), report
    assert report.shapes >= 20 and report.timed > 3 * report.shapes
    assert report.error[1] < 0.6 * report.error[0]
    found = model_of(info)
    assert found is not start and found.memory == pytest.approx(true.memory, rel=0.12)
    assert regret_of(found, true, info) < 0.6 * regret_of(start, true, info)
    kernels = {kernel for timed in probes.probes(info) for kernel in (one.kernel for one in timed.candidates)}
    assert ("warp_specialised" in kernels) == (info.capability == (9, 0)) and "portable" in kernels
    own = found.kernels["portable"]["products"]["half"][0] / start.kernels["portable"]["products"]["half"][0]
    assert 0.6 < own < 0.9


def test_what_is_not_measured_changes_with_what_is_like_it() -> None:
    """Tiles that no candidate has take as much more as others of their family."""
    start = model_without_calibration(OTHER)
    true = planted(start)
    probed = [probe for probe in probes.probes(OTHER) if probe.problem.precision == "half"][:16]
    timed = [
        fit.Timed(probe.problem, {one: true_us(probe.problem, one, true, 0.0) for one in probe.candidates.values()})
        for probe in probed
    ]
    found = fit.fit(timed, start).model
    configs = [candidate.algorithm.config for one in timed for candidate in one.us]
    tiles = {f"{config.BLOCK_M}x{config.BLOCK_N}" for config in configs}
    steps, before = found.kernels["warp_specialised"]["step"], start.kernels["warp_specialised"]["step"]
    unmeasured = [tile for tile in steps if tile not in tiles]
    assert unmeasured and all(1.1 < steps[tile] / before[tile] < 1.5 for tile in unmeasured)
    with torch.device("meta"):  # a default device is not the fit's
        known = fit.fit(timed, start, fit.SHIPPED).model
    assert abs(known.memory / start.memory - 1) < abs(found.memory / start.memory - 1), "a shipped model changes less"


def test_a_short_budget_times_the_first_products_and_is_kept_to() -> None:
    true = slower()
    reports = [calibrated(Lab(OTHER, true), budget, keep=False) for budget in (4.0, 7.0)]
    assert reports[0].shapes < reports[1].shapes and all(report.seconds <= report.budget for report in reports)
    assert [report.outcome for report in reports] == ["not kept", "not kept"]
    few_ones = calibrated(Lab(OTHER, true), 1.0)
    assert few_ones.outcome == "refused" and "larger budget" in few_ones.why
    assert model_of(OTHER).source.startswith("scaled")


@pytest.mark.usefixtures("few")
def test_products_are_timed_as_soon_as_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first while others compile; what never ends does not keep the others waiting."""
    lab = Lab(OTHER, model_without_calibration(OTHER), compile_s=0.3)
    steps: list[Progress] = []
    report = calibrated(lab, 60.0, progress=steps.append)
    assert report.shapes > 8 and steps[0].seconds_left > 45 and steps[-1].timed > 20
    assert [step.number for step in steps] == list(range(1, 13)) and steps[0].count == 12
    stuck = Lab(OTHER, model_without_calibration(OTHER))
    first = probes.probes(OTHER)[0].problem
    monkeypatch.setattr(stuck, "ready", lambda problem, selections: problem != first)
    assert session.LEAST <= calibrated(stuck, 20.0).shapes < 12


@pytest.mark.usefixtures("few")
def test_what_fails_is_left_out_and_reported() -> None:
    true = slower()
    tile = "128x256x64"

    def broken(selection: Selection) -> str | None:
        return "spills" if tile in str(selection.config) else None

    report = calibrated(Lab(OTHER, true, broken=broken), 30.0)
    assert report.outcome == "kept" and report.shapes >= session.LEAST
    assert report.failed and all(tile in what and why == "spills" for what, why in report.failed)
    again = calibrated(Lab(OTHER, true), failure=lambda problem, selection: broken(selection))
    assert {why for _, why in again.failed} <= {"skipped: spills"} and "skipped: spills" in str(again)


@pytest.mark.usefixtures("few")
def test_a_lost_or_throttled_gpu_keeps_nothing(models: Path) -> None:
    with pytest.raises(DeviceLostError):
        lost = Mock(side_effect=DeviceLostError("it runs for more than 10 s"))
        calibrated(Lab(OTHER, model_without_calibration(OTHER), broken=lost))
    lab = Lab(OTHER, slower())
    lab.slowed = lambda now: ("too hot",)
    report = calibrated(lab)
    assert report.outcome == "refused" and "too hot" in report.why and not models.exists()


@pytest.mark.usefixtures("few")
def test_what_was_timed_while_the_gpu_was_shared_is_timed_again() -> None:
    lab = Lab(OTHER, slower())
    lab.kernels.slow = lambda now: 1.5 if 2.0 < now < 4.0 else 1.0
    report = calibrated(lab)
    assert report.outcome == "kept" and report.shapes > 8 and report.repeated > 0
    assert len(lab.benches) == 12 + report.repeated


SAME = fit.Score(0.1, 0.1, 0.03)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("shipped", "after", "kept"),
    [(False, SAME, False), (False, fit.Score(0.09, 0.09, 0.031), True), (True, fit.Score(0.09, 0.09, 0.031), False)],
    ids=["no better", "better than a scaled one", "no faster picks than a shipped one's"],
)
def test_a_model_that_is_no_better_is_not_kept(
    shipped: bool, after: fit.Score, kept: bool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = model_without_calibration(OTHER)
    monkeypatch.setattr(session, "measured", lambda: {"made up": start} if shipped else {})
    monkeypatch.setattr(session, "fit", lambda _, start, width: fit.Fitted(start, SAME, after))
    report = calibrated(Lab(OTHER, slower()))
    assert report.outcome == ("kept" if kept else "unchanged") and (report.path is not None) == models.exists() == kept
    assert ("no faster" in report.why) == shipped


def test_a_fit_is_judged_by_what_it_has_not_seen() -> None:
    """Times that follow no model are fitted better than they are predicted."""
    start, random = model_without_calibration(OTHER), Random(1)
    timed = []
    for probe in probes.probes(OTHER)[:16]:
        us = {
            one: predicted(probe.problem, one, start) * exp(random.gauss(0, 0.3)) for one in probe.candidates.values()
        }
        timed.append(fit.Timed(probe.problem, us))
    found, data = fit.fit(timed, start), fit.Data(timed)
    assert data.score(data.errors(found.model)).misfit < 0.95 * found.after.misfit


def test_a_gpu_is_treated_as_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.treated_as((9, 0)) == (9, 0)
    monkeypatch.setenv(device.CAPABILITY, "8.0")
    assert device.treated_as((9, 0)) == (8, 0)
    for wrong in ("9.1", "10.0", "8", "x", "8.0.1"):
        monkeypatch.setenv(device.CAPABILITY, wrong)
        with pytest.warns(UserWarning, match=r"TRITON_GEMM_CAPABILITY must be a compute capability up to 9\.0"):
            assert device.treated_as((9, 0)) == (9, 0)


def test_a_wrong_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="budget must be a positive number"):
        triton_gemm.calibrate(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="sees no GPU"):
        triton_gemm.calibrate()


def test_the_command_reports_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = CalibrationReport("kept", "a GPU", "scaled from b", 30.0, 29.0, path=tmp_path, shapes=3, timed=9)
    calibrate = Mock(side_effect=lambda *_, **__: report)
    monkeypatch.setattr(calibration, "calibrate", calibrate)
    found = document("calibrate", "--budget", "30s")
    assert found["outcome"] == "kept" and found["error_before"] is None
    calibrate.assert_called_once_with(30.0, keep=True, progress=None, device=None)
    assert "9 candidates of 3 GEMMs" in words_of("calibrate", "--dry-run", "--device", "cuda:0")
    assert calibrate.call_args.kwargs["keep"] is False
    report = replace(report, outcome="not kept")
    words_of("calibrate", "--dry-run"), words_of("calibrate", code=1)
    report = replace(report, outcome="refused", why="the GPU is too hot")
    assert "refused: the GPU is too hot" in words_of("calibrate", "--dry-run", code=1)
    words_of("calibrate", "--budget", "none", code=2)
    report = replace(report, outcome="unchanged")
    words_of("calibrate")


def test_where_the_models_choice_fails_others_are_compared_with_the_next() -> None:
    probe = probes.probes(OTHER)[1]
    first, second, *rest = probe.candidates
    lab = Lab(OTHER, model_without_calibration(OTHER), broken=lambda selection: "no" if selection == first else None)
    (timed,) = measuring.measure(lab, [probe], 10.0).timed
    assert len(timed.us) == 1 + len(rest) and probe.candidates[second] in timed.us


def test_measuring_needs_two_candidates() -> None:
    lab = Lab(OTHER, model_without_calibration(OTHER), broken=lambda selection: "no" if selection != first else None)
    probe = probes.probes(OTHER)[1]
    first = next(iter(probe.candidates))
    found = measuring.measure(lab, [probe], 10.0)
    assert found.timed == [] and len(found.failed) == len(probe.candidates) - 1


def test_a_choice_that_stayed_has_not_where_the_model_has_another(tmp_path: Path) -> None:
    problem = table_fakes.problem_of()
    first, second = table_fakes.another(problem, 1), table_fakes.another(problem, 2)
    journal = Journal(tmp_path / "x.tuning.jsonl", "1")
    journal.stays(problem, "same", first)
    again = Journal(tmp_path / "x.tuning.jsonl", "1")
    assert again.has_stayed(problem, "same", replace(first, reason="about 3 us"))
    assert not again.has_stayed(problem, "same", second) and not again.has_stayed(problem, "any", first)
