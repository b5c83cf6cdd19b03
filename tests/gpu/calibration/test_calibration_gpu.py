"""Calibration on a GPU: a minute gives a model that predicts and chooses well, on other GPUs' kernels too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import triton_gemm
from tests.gpu.runtime.test_plan_gpu import assert_right, pair
from tests.gpu.sharing import shared_gpu
from tests.support import table_fakes
from tests.support.processes import printed
from triton_gemm.calibration import probes
from triton_gemm.hardware import device_model
from triton_gemm.hardware.device import current_device_info


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables and models of this test alone."""
    with table_fakes.own_models(tmp_path, monkeypatch) as models:
        yield models


def test_a_minute_gives_a_model_that_predicts_what_it_has_not_seen() -> None:
    report = triton_gemm.calibrate()
    print(f"\n{report}")
    assert report.seconds <= 75 and not report.failed
    assert report.shapes >= 30 and report.timed >= 4 * report.shapes, "little was timed in the time"
    assert report.outcome in ("kept", "unchanged")
    if report.outcome == "kept":
        assert report.path is not None and report.path.exists()
        assert device_model.origin(current_device_info()) == "calibrated"
        assert report.error[1] < 1.05 * report.error[0] and report.regret[1] < report.regret[0] + 0.02
    for size in ((16, 4096, 4096), (800, 2392, 4472), (2048, 2048, 2048)):
        a, b = pair(size)
        assert_right(a, b, triton_gemm.matmul(a, b))


def test_every_probe_can_be_timed() -> None:
    """With time for all of them none fails, or takes too long to compile."""
    report = triton_gemm.calibrate(180, keep=False)
    print(f"\n{report}")
    assert report.outcome in ("not kept", "unchanged") and not report.failed
    assert report.shapes >= 0.95 * len(probes.probes(current_device_info()))


COLD = """
import os, triton_gemm
from triton_gemm.compat import compilations
missed = []
with compilations(lambda kernel, there: there or missed.append(kernel)):
    report = triton_gemm.calibrate(30, keep=False)
print(report)
assert report.outcome in ("not kept", "unchanged") and report.shapes >= 8 and not report.failed
assert len(missed) <= 2, f"{len(missed)} kernels were compiled while others were timed, more than the reference's"
try:
    raise AssertionError(f"a worker is left: {os.waitpid(-1, os.WNOHANG)}")
except ChildProcessError:
    print("timed", report.timed)
"""


def test_compiling_does_not_disturb_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been compiled before: processes do, and this one finds it in Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    output = printed(COLD)
    print(output)
    assert "timed" in output


PORTABLE = """
import torch, triton_gemm
from triton_gemm.hardware.device import current_device_info
assert current_device_info().capability == (8, 0)
report = triton_gemm.calibrate(60)
print(report)
assert report.outcome in ("kept", "unchanged") and report.shapes >= 25 and not report.failed
assert report.error[1] < 1.1 * report.error[0]
tuned = triton_gemm.tune([(512, 2048, 4096)], budget=20, bits="any")
print(tuned)
assert all(shape.measured for shape in tuned.shapes)
for size in ((16, 4096, 4096), (512, 2048, 4096), (2048, 2048, 2048)):
    M, N, K = size
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
    assert triton_gemm.explain(a, b).kernel != "warp_specialised"
    c, expected = triton_gemm.matmul(a, b), a.double() @ b.double()
    assert (c.double() - expected).norm() < 0.01 * expected.norm()
print("portable", triton_gemm.explain(a, b).kernel)
"""


def test_kernels_of_other_gpus_are_calibrated_and_tuned_by_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_CAPABILITY", "8.0")
    output = printed(PORTABLE)
    print(output)
    assert "portable portable" in output


def test_nothing_is_kept_while_another_process_uses_the_gpu(folder: Path) -> None:
    with shared_gpu():
        report = triton_gemm.calibrate(20)
        print(f"\n{report}")
        assert report.outcome == "refused"
    assert not folder.exists()


def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    triton_gemm.calibrate(10, keep=False)
    assert torch.cuda.memory_allocated() - before < 64 << 20
