"""GPUs by name, the peaks of their data sheets, and predictions that no GPU could keep."""

from __future__ import annotations

from random import Random

import pytest
import torch

from triton_gemm import explain
from triton_gemm.arithmetic import ARITHMETICS
from triton_gemm.hardware import gpus
from triton_gemm.hardware.device import SHARED_MEMORY, DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import measured, model_of, origin
from triton_gemm.hardware.gpus import NAMES, SHEETS, named_device
from triton_gemm.reporting.candidates import compare
from triton_gemm.selection.select import select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape, between

# Dense TFLOPS (TOPS of int8) as printed, halved where a sheet prints those of sparse matrices. Sources as in `gpus`.
PUBLISHED = {
    "a100": {"ieee": 19.5, "fp64": 19.5, "tf32": 156, "half": 312, "int8": 624},
    "a10": {"ieee": 31.2, "tf32": 62.5, "half": 125, "int8": 250},
    "l4": {"ieee": 30.3, "tf32": 60, "half": 121, "fp8": 242.5, "int8": 242.5},
    "l40s": {"ieee": 91.6, "tf32": 183, "half": 366, "fp8": 733, "int8": 733},
    "h20": {"tf32": 74, "half": 148, "fp8": 296, "int8": 296},
    "h100-pcie": {"ieee": 51, "fp64": 51, "tf32": 378, "half": 756.5, "fp8": 1513, "int8": 1513},
    "h100": {"ieee": 67, "fp64": 67, "tf32": 494.5, "half": 989.5, "fp8": 1979, "int8": 1979},
    "h200": {"ieee": 67, "fp64": 67, "tf32": 494.5, "half": 989.5, "fp8": 1979, "int8": 1979},
    "rtx3060": {"ieee": 12.7, "half": 25.5},
    "rtx3090": {"ieee": 35.6, "tf32": 35.6, "half": 71.2, "int8": 284},
    "rtx4090": {"ieee": 82.6, "tf32": 82.6, "half": 165.2, "fp8": 330.3, "int8": 660.6},
    "rtx5060": {"ieee": 19.2},
    "rtx5090": {"ieee": 104.8, "tf32": 104.8, "half": 209.5, "int8": 838},
    "rtx-pro-6000": {"ieee": 126, "half": 503.8},
    "b200": {"ieee": 75, "fp64": 37, "tf32": 1100, "half": 2250, "fp8": 4500, "int8": 4500},
    "b300": {"ieee": 75, "fp64": 1.25, "tf32": 1125, "half": 2250, "fp8": 4500},
}


@pytest.mark.parametrize("name", NAMES)
def test_gpus_have_names(name: str) -> None:
    device = named_device(name)
    if name.startswith("sm_"):
        assert device == device_of_capability(device.capability)
    else:
        assert device.shared_memory == SHARED_MEMORY[device.capability] and device.clock and device.power_limit
        assert named_device(device.name) == device
    if device.capability >= (8, 0):
        assert explain(M=512, N=512, K=512, dtype=torch.float16, device=name).device == device.name


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("A100", "a100"),
        ("A100-SXM4-80GB", "a100"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("H100", "h100"),
        ("h100 sxm", "h100"),
        ("H100_PCIe", "h100-pcie"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("pro6000", "rtx-pro-6000"),
        ("sm90", "sm_90"),
        ("SM_120", "sm_120"),
    ],
)
def test_names_are_known_in_any_form(word: str, name: str) -> None:
    assert named_device(word) == named_device(name)
    assert explain(M=64, N=64, K=64, dtype=torch.float16, device=word).device == named_device(name).name


@pytest.mark.parametrize("name", ["h300", "", "A10G", "RTX 4090 Laptop GPU"])
def test_a_gpu_without_a_name_is_refused(name: str) -> None:
    """A part of a name is another GPU's: A10G has other figures than A10."""
    with pytest.raises(ValueError, match=r"device must be one of a100, .*, b300, .*, sm_80, .*, not '"):
        named_device(name)
    with pytest.raises(ValueError, match=r"explain\(\): device must be one of a100, .*, not '"):
        explain(M=64, N=64, K=64, dtype=torch.float16, device=name or "?")


def test_the_measured_gpus_have_names() -> None:
    for name in ("h100", "h200"):
        device = named_device(name)
        assert model_of(device) is measured()[device.name]
        assert device.bandwidth == measured()[device.name].bandwidth


@pytest.mark.parametrize("name", PUBLISHED)
def test_peaks_are_those_of_data_sheets(name: str) -> None:
    device = named_device(name)
    peaks = {unit: 2 * device.num_sms * gpus.rate(device, unit) / 1e6 for unit in PUBLISHED[name]}
    assert peaks == pytest.approx(PUBLISHED[name], rel=0.03)


def test_a_gpu_without_a_sheet_has_its_architectures_rates_and_its_own_clock() -> None:
    ada = DeviceInfo("NVIDIA RTX 2000 Ada Generation", (8, 9), 22, SHARED_MEMORY[8, 9], clock=2130)
    assert gpus.rate(ada, "half") == 512 * 2130 and gpus.bandwidth(ada) == 864e3
    geforce = DeviceInfo("NVIDIA GeForce RTX 4060", (8, 9), 24, SHARED_MEMORY[8, 9], bandwidth=272e3, clock=2460)
    assert gpus.rate(geforce, "half") == 256 * 2460 and gpus.bandwidth(geforce) == 272e3
    assert gpus.rate(geforce, "int8") == 1024 * 2460 and gpus.rate(named_device("sm_80"), "fp8") == 0
    newer = DeviceInfo("NVIDIA of tomorrow", (13, 0), 200, SHARED_MEMORY[9, 0])
    assert gpus.rate(newer, "half") == gpus.rate(named_device("sm_121"), "half")


def sixteen_to_8192(random: Random, mode: str) -> Shape:
    """A shape of any size, as that precision takes it."""
    M, N, K = (16 * between(random, 1, 512, 1) for _ in range(3))
    scales = None if ARITHMETICS[mode].plain else random.choice(("tensor", "rows"))
    return Shape(M, N, K, layout="nt" if scales else random.choice(("nt", "nn", "tn")), scales=scales)


@pytest.mark.few(shows=lambda name, mode: {name, mode})
@pytest.mark.parametrize("mode", ARITHMETICS)
@pytest.mark.parametrize("name", SHEETS)
def test_nothing_is_predicted_to_be_faster_than_the_gpu(name: str, mode: str) -> None:
    """By figures of its own, not the package's: published peaks, and three percent for how they are rounded."""
    device, arithmetic, random = named_device(name), ARITHMETICS[mode], Random(36)
    if device.capability < arithmetic.capability:
        pytest.skip(f"{name} does not multiply {mode}")
    peak = PUBLISHED.get(name, {}).get(arithmetic.unit) or 2 * device.num_sms * gpus.rate(device, arithmetic.unit) / 1e6
    terms = len(arithmetic.planes.terms) if arithmetic.planes else 1
    for i in range(200):
        problem = gemm_problem(sixteen_to_8192(random, mode), "bf16" if mode == "half" else mode)
        M, N, K = problem.M, problem.N, problem.K
        moved = problem.dtype.itemsize * K * (M + N) + problem.out_dtype.itemsize * M * N
        least = 0.995 * max(2 * terms * M * N * K / (1.03e6 * peak), moved / SHEETS[name].bandwidth / 1e3)
        reason = select(problem, device).reason
        assert float(reason.split()[1]) >= least, problem  # said with three digits
        assert ("not measured on this GPU" in reason) == (origin(device) == "derived")
        if i < 3:
            assert all(
                one.predicted_us is None or one.predicted_us >= least for one in compare(problem, device).fastest
            )
