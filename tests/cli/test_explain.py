"""`triton-gemm explain`, and the descriptions of GPUs that `doctor` prints and `explain` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import triton_gemm
from tests.support import table_fakes
from tests.support.command_line import document, words_of
from tests.support.table_fakes import another, problem_of
from triton_gemm import cli, tables
from triton_gemm.cli import words
from triton_gemm.hardware import nvml
from triton_gemm.hardware.gpus import named_device
from triton_gemm.reporting import doctor
from triton_gemm.reporting.doctor import Finding
from triton_gemm.selection.select import select
from triton_gemm.tables import records
from triton_gemm.tuning.candidates import candidates

H200 = named_device("h200")
PRODUCT = ["512", "1024", "2048"]  # problem_of()
store = partial(table_fakes.store, device=H200, us=10.0, default_us=12.0)


def test_explain_shows_candidates_and_the_choice(folder: Path) -> None:
    found = document("explain", *PRODUCT, "--device", "h200", "--limit", "4")
    assert document("explain", "512x1024x2048", "--device", "h200", "--limit", "4") == found
    batched = document("explain", "3x512x1024x2048", "--device", "h200", "--limit", "1")
    assert batched["problem"]["batch"] == 3 and batched["problem"]["M"] == 512
    chosen = select(problem_of(), H200)
    assert found["device"]["name"] == "NVIDIA H200" and found["problem"]["N"] == 1024
    assert (found["chosen"]["by"], found["chosen"]["kernel"]) == ("model", chosen.kernel)
    predicted = [candidate["predicted_us"] for candidate in found["candidates"]]
    assert len(predicted) == 4 and predicted == sorted(predicted)
    assert [candidate["chosen"] for candidate in found["candidates"]] == [True, False, False, False]
    assert found["candidates"][0]["config"]["BLOCK_M"] == chosen.config.BLOCK_M
    bits = found["candidates"][0]["bits"]
    assert bits == triton_gemm.explain(M=512, N=1024, K=2048, dtype=torch.bfloat16, device="h200").bits
    shown = words_of("explain", *PRODUCT, "--device", "h200")
    assert f"-> {chosen.kernel}" in shown and "chosen by the model, policy cached" in shown and bits not in shown
    assert bits in words_of("explain", *PRODUCT, "--device", "h200", "--bits")
    assert found["model"] == "shipped" and "predicted times: shipped model" in shown, "and not the history of its fit"
    assert "predicted times: derived model" in words_of("explain", *PRODUCT, "--device", "a100")


def test_explain_knows_what_was_measured_and_who_chose(folder: Path) -> None:
    store(problem_of(), nth=25)
    found = document("explain", *PRODUCT, "--device", "h200", "--limit", "2")
    models, candidate = (candidate for candidate in found["candidates"] if candidate["known_us"])
    assert models["known_us"] == 12.0 and not models["chosen"], "the model's choice, measured at the same time"
    assert candidate["known_us"] == 10.0 and candidate["chosen"] and candidate["table"] == "user's table"
    assert candidate["config"]["BLOCK_M"] == another(problem_of(), 25).config.BLOCK_M
    assert len(found["candidates"]) == 3
    assert found["chosen"]["by"] == "user's table"
    assert "10 (user's table)" in words_of("explain", *PRODUCT, "--device", "h200")
    with triton_gemm.policy("model"):
        assert document("explain", *PRODUCT, "--device", "h200")["chosen"]["by"] == "model"


def test_the_time_of_another_choice_is_not_shown_for_this_one(folder: Path) -> None:
    """An entry has the time of the model's choice as it was when the product was tuned."""
    store(problem_of(), nth=25)
    path = table_fakes.table_in(folder)
    text = path.read_text()
    for default in ("portable 64x64x32 4 warps 3 stages", ""):
        path.write_text(text.replace(records.named(select(problem_of(), H200)), default))
        tables.reload()
        (one,) = (one for one in document("explain", *PRODUCT, "--device", "h200")["candidates"] if one["known_us"])
        assert one["known_us"] == 10.0 and one["table"] == "user's table"


def test_a_tuned_configuration_that_the_model_knows_nothing_of_is_shown(folder: Path) -> None:
    """As a user's own may be."""
    problem, choice = problem_of(dtype=torch.float16), select(problem_of(dtype=torch.float16), H200)
    own = [triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=4, num_stages=1)]
    selection = next(one for one in candidates(problem, H200, choice, "any", own) if one.config.num_stages == 1)
    assert tables.store(problem, selection, H200, us=1.0, default_us=2.0, bits="any")
    found = document("explain", *PRODUCT, "--dtype", "fp16", "--device", "h200")
    last = found["candidates"][-1]
    assert (last["predicted_us"], last["known_us"], last["config"]["num_stages"]) == (None, 1.0, 1)
    assert "1 (user's table)" in words_of("explain", *PRODUCT, "--dtype", "fp16", "--device", "h200")


def test_explain_marks_what_runs_under_batch_invariance(folder: Path) -> None:
    """Parts in turn are no candidate of everyone's."""
    question = "explain", "4096x576x7168", "--layout", "nt", "--device", "h200"
    with triton_gemm.batch_invariant():
        found, shown = document(*question), words_of(*question)
    (candidate,) = (candidate for candidate in found["candidates"] if candidate["chosen"])
    assert candidate["schedule"] == found["chosen"]["schedule"] and candidate["predicted_us"] > 0
    assert "-> warp_specialised" in shown and "bits same, for any number of rows" in shown
    assert "for any number of rows" not in words_of(*question)


def test_explain_compiles_on_request(folder: Path) -> None:
    question = "explain", "16x32x64", "--device", "sm_90", "--limit", "2", "--compile", "1"
    found = document(*question)
    (launch,) = found["candidates"][0]["launches"]
    assert 0 < launch["registers"] <= 255 and launch["spills"] == 0 and launch["shared_memory"] >= 0
    assert found["candidates"][1]["launches"] == []
    assert "registers" in words_of(*question)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ("--bias n --activation gelu --dtype fp16 --layout nt", "512x1024x2048 fp16 nt bias n gelu on"),
        ("--dtype fp32 --precision bf16x6", "fp32 nn bf16x6 on"),
        ("--batch 8 --dtype float64", "8x512x1024x2048 fp64 nn on"),
        ("--dtype fp8 --layout nt --scales rows --fast-accum", "fp8 nt fp8 fast scales rows to bfloat16 on"),
        ("--groups 4 --out-dtype fp32", "4x512x1024x2048 bf16 nn groups of m to float32 on"),
        ("--beta 0.5 --dtype fp16", "fp16 nn + beta C on"),
    ],
)
def test_explain_takes_all_that_a_product_has(options: str, printed: str, folder: Path) -> None:
    assert printed in words_of("explain", *PRODUCT, "--device", "h200", *options.split())


@pytest.mark.parametrize("text", ['{"devices": []}', "{}"])
def test_a_description_without_a_gpu_is_called_so(folder: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "doc.json"
    path.write_text(text)
    printed = words_of("explain", "64", "64", "64", "--device", path, code=2)
    assert "describes no GPU" in printed and "on a machine with one" in printed


@pytest.mark.parametrize(
    "wrong",
    [
        *({"num_sms": "132"}, {"num_sms": 0}, {"num_sms": True}, {"bus_width": "6016"}, {"power_limit": -700}),
        *({"capability": [9]}, {"capability": "90"}, {"bandwidth": "fast"}, {"name": 5}, {"cores": 5}),
    ],
    ids=str,
)
def test_a_file_that_describes_no_gpu_is_refused_and_changes_nothing(
    wrong: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    store(problem_of())
    before = table_fakes.table_in(folder)
    device = {"name": "half a Hopper", "capability": [9, 0], "num_sms": 66, "shared_memory": 232448}
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"devices": [device]}))
    assert document("explain", *PRODUCT, "--device", file)["device"]["num_sms"] == 66
    file.write_text(json.dumps({"devices": [device | {"bus_width": 6016, "power_limit": 700} | wrong]}))
    for command in (["explain", *PRODUCT], ["cache", "show"]):
        assert "describes no GPU" in document(*command, "--device", file, code=2)["error"]
    assert table_fakes.table_in(folder) == before and not tables.set_aside()


def test_doctor_shows_what_it_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    found = document("doctor", code=int(doctor.examine().broken))
    assert {one["about"] for one in found["findings"]} >= {"versions", "GPU", "compiler", "caches", "policy"}
    findings = (Finding("GPU", "good", "there is one"), Finding("GPU", "broken", "it is on fire", "put it out"))
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis(findings, (H200,)))
    shown = words_of("doctor", code=1)
    assert "GPU good there is one BROKEN it is on fire put it out 1 broken" in shown
    assert document("doctor", code=1)["devices"][0]["num_sms"] == 132


def test_doctors_device_can_be_asked_about(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis((Finding("GPU", "good", ""),), (H200,)))
    file = tmp_path / "here.json"
    file.write_text(json.dumps(document("doctor")))
    assert words.device(str(file)) == H200
    # A GPU that is there has no power limit of its own: NVML is asked, here and not where the file is read.
    here = replace(H200, power_limit=0, uuid="known")
    monkeypatch.setattr(nvml, "power_limit", lambda uuid: 700 if uuid == "known" else 0)
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis((Finding("GPU", "good", ""),), (here,)))
    file.write_text(json.dumps(document("doctor")))
    monkeypatch.setattr(nvml, "power_limit", lambda uuid: 0)
    store(problem_of())
    assert document("explain", *PRODUCT, "--device", file)["chosen"]["by"] == "user's table"
