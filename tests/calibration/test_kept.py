"""Calibrated models on disk: used at once, said, and set aside where their files are wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_gemm
from tests.calibration.test_calibration import H200, OTHER, Lab, calibrated, slower
from tests.calibration.test_calibration import few as few
from tests.calibration.test_calibration import models as models
from tests.support import table_fakes
from tests.support.command_line import call, document, words_of
from tests.support.processes import forked
from tests.tables.test_faults import JSON
from triton_gemm import tables
from triton_gemm.calibration import figures, kept
from triton_gemm.cli import output
from triton_gemm.cli.explain import render
from triton_gemm.hardware import device_model
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.device_model import DeviceModel, model_of, model_without_calibration
from triton_gemm.reporting import doctor, storage
from triton_gemm.reporting.candidates import compare
from triton_gemm.runtime import policies
from triton_gemm.selection import generation
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.tables import files


def test_it_is_kept_for_its_gpu_key_and_used_at_once(models: Path) -> None:
    problem = gemm_problem(unseen(SUITES["decode"], 3, 1)[0])
    before, number = policies.by_model(problem, OTHER), generation.number
    assert device_model.origin(OTHER) == "derived" and device_model.origin(H200) == "shipped"
    changed = replace(model_without_calibration(OTHER), launch=99.0)
    path = kept.store(changed, OTHER)
    assert path == models / "sm_90-132sms-6016bit-500W.v1.json" and generation.number > number
    assert model_of(OTHER).launch == 99.0 and model_of(OTHER) is model_of(OTHER)
    assert model_of(OTHER).source.startswith("calibrated 20") and device_model.origin(OTHER) == "calibrated"
    assert model_of(H200) is model_without_calibration(H200), "another power limit is another silicon"
    assert policies.by_model(problem, OTHER).reason != before.reason, "what was chosen before is chosen again"
    assert select(problem, OTHER).reason == policies.by_model(problem, OTHER).reason
    with triton_gemm.batch_invariant():
        assert "99" not in policies.choose(problem, H200).reason and policies.choose(problem, OTHER)
    kept.reload()
    assert model_of(OTHER).launch == 99.0
    again = kept.load(path).kept
    assert again is not None and again.entry["kernels"] == figures.rounded(changed.as_dict())["kernels"]
    assert kept.clear() == 1 and device_model.origin(OTHER) == "derived" and policies.by_model(problem, OTHER) == before


def test_a_users_model_goes_before_a_shipped_one_and_a_new_one_starts_from_the_shipped() -> None:
    kept.store(slower(H200), H200)
    assert model_of(H200).memory == pytest.approx(0.65 * device_model.measured()["NVIDIA H200"].memory, rel=1e-3)
    report = calibrated(Lab(H200, model_without_calibration(H200)), 3.0)
    assert report.start == device_model.measured()["NVIDIA H200"].source


def another_class() -> DeviceModel:
    """A model that chooses another class of bits for LONG: memory ten times as slow."""
    shipped = model_without_calibration(H200)
    return replace(shipped, memory=shipped.memory / 10)


LONG = table_fakes.problem_of(16, 576, 7168)


def test_an_entry_of_the_class_of_before_is_left_out_at_once() -> None:
    before = policies.by_model(LONG, H200)
    tables.store(LONG, before, H200, us=4.0, default_us=5.0)
    assert policies.choose(LONG, H200).source == "user's table"
    kept.store(another_class(), H200)
    assert bit_class(LONG, select(LONG, H200)) != bit_class(LONG, before)
    assert policies.choose(LONG, H200) == select(LONG, H200)
    kept.clear()
    assert policies.choose(LONG, H200).source == "user's table"


def test_fingerprints_and_explanations_name_it() -> None:
    first = triton_gemm.selection_fingerprint(OTHER, parts=True)
    question: dict[str, Any] = {"M": 16, "N": 4096, "K": 4096, "dtype": torch.bfloat16, "device": OTHER}
    plain = triton_gemm.explain(**question)
    assert first["device model"].startswith("derived, ") and plain.model == "derived"
    assert "chosen by the model, policy" in str(plain)
    kept.store(slower(), OTHER)
    second = triton_gemm.selection_fingerprint(OTHER, parts=True)
    assert {name for name in first if first[name] != second[name]} == {"device model"}
    assert second["device model"].startswith("calibrated, ")
    explained = triton_gemm.explain(**question)
    assert explained.model == "calibrated" and "chosen by the calibrated model, policy" in str(explained)
    shown = io.StringIO()
    render(compare(LONG, OTHER), output.Console(file=shown, width=240))
    assert "chosen by the calibrated model, policy" in shown.getvalue()
    assert triton_gemm.selection_fingerprint(OTHER) == triton_gemm.selection_fingerprint(OTHER)
    edited(file_of(), lambda found: found.update(measured="2001-01-01", by="another"))  # the same figures
    assert model_of(OTHER).source == "calibrated 2001-01-01, by another"
    assert triton_gemm.selection_fingerprint(OTHER, parts=True) == second


def test_the_doctor_says_which_model_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_gemm.reporting.doctor._devices", lambda: (OTHER,))

    def sentences() -> str:
        return " ".join(word for found in (*doctor._kernels(), *storage.stored((OTHER,))) for word in found[1:])

    assert "not measured" in sentences() and "triton-gemm calibrate" in sentences()
    kept.store(slower(), OTHER)
    assert "calibrated 20" in sentences() and "not measured" not in sentences() and "not used" not in sentences()
    edited(file_of(), UNLIKE["zero"])
    assert "is not used: model.memory is not a valid value" in sentences() and "not measured" in sentences()


def file_of(info: DeviceInfo = OTHER) -> Path:
    return kept.store(slower(info), info)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    kept.reload()


WRONG: dict[str, tuple[Any, str]] = {
    "truncated": (None, "not-json"),
    "empty": (lambda found: found.clear(), "no-model"),
    "a later format": (lambda found: found.update(format=2), "future-format"),
    "no silicon": (lambda found: found.update(silicon="x"), "no-model"),
    "no model": (lambda found: found.update(model=[]), "no-model"),
    "of another silicon": (lambda found: found["silicon"].update(power_limit=1), "other-silicon"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_set_aside(what: str, caplog: pytest.LogCaptureFixture) -> None:
    change, word = WRONG[what]
    path = file_of()
    if change is None:
        path.write_text(path.read_text()[:500])
        kept.reload()
    else:
        edited(path, change)
    assert model_of(OTHER) is model_without_calibration(OTHER)
    assert not path.exists() and path.with_name(f"{path.name}.{word}.1").exists()
    assert "quarantined" in caplog.text
    assert kept.store(slower(), OTHER) == path and device_model.origin(OTHER) == "calibrated"


def test_who_reads_waits_for_no_writer() -> None:
    path = file_of()
    path.write_text("{")
    kept.reload()
    with files.locked(path.parent):
        begin = time.monotonic()
        assert model_of(OTHER) is model_without_calibration(OTHER)
        assert time.monotonic() - begin < files.WAIT / 2 and path.exists()


UNLIKE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a figure is missing": lambda found: found["model"].pop("l2"),
    "a figure more": lambda found: found["model"].update(warmth=1.0),
    "a tile is missing": lambda found: found["model"]["kernels"]["warp_specialised"]["step"].pop("128x128"),
    "a pair of three": lambda found: found["model"]["copy"].append(1.0),
    "negative": lambda found: found["model"].update(memory=-1.0),
    "zero": lambda found: found["model"].update(memory=0),
    "huge": lambda found: found["model"].update(memory=1e300),
    "a million times more": lambda found: found["model"].update(memory=1e7 * found["model"]["memory"]),
    "a million times less": lambda found: found["model"].update(memory=1e-7 * found["model"]["memory"]),
    "more than nothing": lambda found: found["model"]["kernels"]["gemv"].update(imbalance=1e7),
    "a word": lambda found: found["model"].update(memory="fast"),
    "true": lambda found: found["model"].update(memory=True),
    "other multiprocessors": lambda found: found["model"].update(num_sms=131),
    "a number for a text": lambda found: found["model"].update(source=1),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_model_of_other_figures_is_left_and_not_used(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another version of the package may use it."""
    path = file_of()
    edited(path, UNLIKE[what])
    assert model_of(OTHER) is model_without_calibration(OTHER) and path.exists()
    assert "calibrate again" in caplog.text and "not used" in caplog.text


@settings(max_examples=40)
@given(st.binary(max_size=300) | JSON.map(lambda x: json.dumps(x).encode()))
def test_nothing_in_a_file_raises(text: bytes) -> None:
    assert kept.parse(text).kept is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_while_saving_loses_nothing(where: str) -> None:
    path = file_of()
    before = path.read_bytes()

    def work() -> None:
        setattr(os, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        kept.store(model_without_calibration(OTHER), OTHER)

    process = forked(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL and path.read_bytes() == before
    kept.reload()
    assert device_model.origin(OTHER) == "calibrated"
    assert kept.store(model_without_calibration(OTHER), OTHER) == path and path.read_bytes() != before
    assert [one.name for one in path.parent.glob("*.tmp")] == []


@pytest.mark.usefixtures("few")
def test_a_folder_that_cannot_be_written_to(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", os.devnull)
    report = calibrated(Lab(OTHER, slower()))
    assert report.outcome == "not kept" and report.path is None and "no model is kept" in caplog.text
    assert report.figures
    monkeypatch.setattr(tables, "folder", lambda: None)
    assert kept.store(slower(), OTHER) is None and kept.find(OTHER) is None
    assert kept.listed() == [] and kept.clear() == 0


def test_where_there_is_none_nvml_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_gemm.hardware.nvml.power_limit", lambda uuid: pytest.fail("NVML was asked"))
    assert kept.find(replace(OTHER, power_limit=0, uuid="x")) is None


def test_cache_lists_and_clears_models() -> None:
    path = file_of()
    assert [x["file"] for x in document("cache", "ls")["models"]] == [str(path)]
    assert "calibrated 20" in words_of("cache", "ls")
    assert words_of("cache", "clear", "--yes") == "deleted 0 tables" and path.exists()
    document("cache", "clear", "--models", code=2)
    assert words_of("cache", "clear", "--models", "--yes") == "deleted 1 model" and not path.exists()
    edited(file_of(), UNLIKE["zero"])
    assert "not used" in words_of("cache", "ls")


@pytest.mark.parametrize("devices", [(), (OTHER,)], ids=["no GPU", "a GPU"])
def test_models_that_are_set_aside_are_named(devices: tuple[DeviceInfo, ...]) -> None:
    path = file_of()
    edited(path, lambda found: found.update(format=2))
    aside = path.with_name(f"{path.name}.future-format.1")
    assert device_model.origin(OTHER) == "derived" and aside.exists()
    assert tables.set_aside() == [] and not any("models" in str(file) for _, file, _ in tables.listed())
    assert document("cache", "ls")["set_aside"] == [str(aside)]
    assert f"quarantined: {aside}" in call("cache", "ls").output.replace("\n", "")
    ((status, _, advice),) = (one for one in storage.stored(devices) if aside.name in one[1])
    assert status == "note" and "move" in advice
