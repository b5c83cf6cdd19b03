"""A rung by hand where kernels are interpreted: the errors shown, and the timed path with a clock that stands still."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from perf.ladder import by_hand, rungs_and_twins
from perf.ladder.record import Resources
from perf.measure import timer
from perf.measure.providers import CUBLAS
from tests.support.lab_fakes import take_gpu_away
from tests.support.table_fakes import HOPPER
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.ladder import LADDER, Rung, command
from triton_gemm.tuning.timing import DeviceLostError

HEADING = "tile,warps,stages,group ms TFLOPS of cuBLAS error registers shared KiB spills"
# Largest error (norm) of a product of 64 terms.
LARGEST = {"fp32": 1e-6, "tf32": 5e-4, "fp16": 5e-4, "bf16": 4e-3}


def shown(out: str) -> dict[str, list[str]]:
    """The cells of the lines below the heading, by configuration."""
    lines = out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("tile,warps"))
    return {line.split()[0]: line.split()[1:] for line in lines[heading + 1 :]}


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(rung, command.NAMES[dtype], id=f"{rung.id}-{command.NAMES[dtype]}")
        for rung in LADDER
        if rung.interpretable
        for dtype in rung.dtypes
    ],
)
def test_the_error_of_every_rung(rung: Rung, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = command.spelled(rung.configs[-1])
    arguments = [rung.id, "--dtype", dtype, "--shape", "64x40x72", "--layout", "nt", "--config", config]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "nothing is timed or compiled" in out and "interpreter at 64 x 40 x 72" in out
    ((name, (error,)),) = shown(out).items()
    assert name == config
    assert 0 < float(error) < LARGEST["tf32" if rung.precision == "tf32" else dtype]


def test_all_configurations_are_shown_and_large_shapes_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["k03", "--size", "4096"]) == 0
    out = capsys.readouterr().out
    assert "M x N x K = 96 x 128 x 64" in out
    assert set(shown(out)) == {command.spelled(config) for config in next(r for r in LADDER if r.id == "k03").configs}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("k11", "k11 is written in Gluon, which Triton's interpreter does not know"),
        ("k06 --arch sm_90", "--arch compiles, which TRITON_INTERPRET=1 forbids: unset it"),
        ("k06 --budget 1", "--budget is for timing, and nothing is timed here"),
        ("k10 --size 100", "k10: TMA cannot take a (100, 100)"),
    ],
)
def test_a_message_names_what_the_interpreter_cannot_do(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments.split()) == 2
    assert f"error: {sentence}" in capsys.readouterr().err


# --- As on a GPU ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is the interpreter: products are right, and each takes a millisecond."""
    take_gpu_away(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(by_hand, "INTERPRETED", False)
    for module in (by_hand, rungs_and_twins):
        monkeypatch.setattr(module, "device_info", lambda _: HOPPER)
    monkeypatch.setattr(by_hand.static, "capture", lambda *_: None)
    monkeypatch.setattr(rungs_and_twins, "compile_together", lambda *_: None)
    resources = Resources(registers=158, shared=24576, spills=0)
    monkeypatch.setattr(rungs_and_twins, "compiled", lambda *_: resources)


@pytest.mark.usefixtures("gpu")
def test_a_line_has_time_speed_error_and_resources(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["k06", "--shape", "64x96x80", "--layout", "tn", "--config", "64x64x16,4,3", "--config", "32x32x16"]
    assert command.main([*arguments, "--budget", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("k06 pipelined, fp32 tn, M x N x K = 64 x 96 x 80, sm_90\n")
    heading = next(line for line in out.splitlines() if line.startswith("tile"))
    assert " ".join(heading.split()) == HEADING
    lines = shown(out)
    assert lines[CUBLAS][:4] == ["1", "0.000983", "100", "%"]
    for config in ("64x64x16,4,3,8", "32x32x16,4,3,8"):
        ms, tflops, *share, error, registers, shared, spills = lines[config]
        assert (ms, tflops, share) == ("1", "0.000983", ["100", "%"])
        assert 0 < float(error) < 1e-6
        assert (registers, shared, spills) == ("158", "24.0", "0")
    assert out.splitlines()[-2] == "best:" and out.splitlines()[-1].startswith("64x64x16,4,3,8")


@pytest.mark.usefixtures("gpu")
def test_without_a_configuration_all_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["k03", "--size", "48", "--budget", "0.01"]) == 0
    configs = {command.spelled(config) for config in next(rung for rung in LADDER if rung.id == "k03").configs}
    assert set(shown(capsys.readouterr().out)) == {CUBLAS, "best:", *configs}


@pytest.mark.usefixtures("gpu")
def test_what_is_wrong_is_not_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = rungs_and_twins.configured_provider

    def half_wrong(rung: Rung, config: Any, *how: Any) -> timer.Provider:
        def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
            c.copy_(a @ b)
            c[0] = math.nan

        return timer.Provider(str(config), call) if config.BLOCK_M == 64 else right(rung, config, *how)

    monkeypatch.setattr(rungs_and_twins, "configured_provider", half_wrong)
    assert command.main(["k04", "--size", "48", "--config", "64x64x16", "--config", "32x32x32"]) == 1
    out = capsys.readouterr().out
    assert "64x64x16,4,1,8           failed: 48 results are not finite" in out
    assert out.splitlines()[-1].startswith("32x32x32,4,1,8 ")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "capability", "sentence"),
    [
        ("k11", (8, 0), "k11 runs on sm_90, not on sm_80 (sm_80)"),
        ("k10", (8, 9), "k10 runs on sm_90 and newer, not on sm_89 (sm_89)"),
        ("k08 --config 128x256x64,8,4", (8, 9), "k08 cannot take 128x256x64,8,4,8 on sm_89: needs"),
    ],
)
def test_a_message_names_what_this_gpu_cannot_run(
    arguments: str,
    capability: tuple[int, int],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_hand, "device_info", lambda _: device_of_capability(capability))
    assert command.main(arguments.split()) == 2
    assert f"error: {sentence}" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nhard"),
            2,
            "error: no memory for the operands or the check",
        ),
        (DeviceLostError("after cuBLAS: boom"), 1, "error: the GPU cannot be used any more after cuBLAS"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_end_in_the_middle_is_reported(
    error: BaseException,
    status: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timer, "measure", Mock(side_effect=error))
    assert command.main(["k06", "--size", "64"]) == status
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
