"""How fast GPUs are: the measured ones from a file, others derived from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from triton_gemm import kernels
from triton_gemm.hardware.device import SHARED_MEMORY, DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import BASE, FILE, DeviceModel, measured, model_of
from triton_gemm.hardware.gpus import l2_bandwidth, rate

H100 = DeviceInfo(BASE, (9, 0), 132, SHARED_MEMORY[9, 0])


def test_measured_gpus_are_found_by_name() -> None:
    assert set(measured()) == {BASE, "NVIDIA H200"}
    for name, model in measured().items():
        assert model_of(replace(H100, name=name)) is model
        assert model.as_dict() == json.loads(FILE.read_text())[name]
    assert model_of(replace(H100, num_sms=66)).num_sms == 66  # a part of one


def test_a_stand_in_for_hopper_is_an_h100() -> None:
    ours, base = model_of(device_of_capability((9, 0))), measured()[BASE]
    assert replace(ours, source=base.source, bandwidth=base.bandwidth).memory == pytest.approx(base.memory, rel=0.01)
    assert (ours.l2, ours.tensor, ours.launch) == (base.l2, base.tensor, base.launch)


@pytest.mark.parametrize("capability", [capability for capability in SHARED_MEMORY if capability >= (8, 0)], ids=str)
def test_others_are_scaled_by_memory_multiprocessors_and_peaks(capability: tuple[int, int]) -> None:
    base, gpu = measured()[BASE], replace(device_of_capability(capability), num_sms=66)
    model, peak = model_of(gpu), rate(gpu, "half")
    l2 = l2_bandwidth(gpu)
    assert model.l2 == pytest.approx(l2 / 128 if l2 else base.l2 / 2)
    assert model.tensor == pytest.approx(base.tensor / 2 * peak / rate(H100, "half"))
    assert model.source.startswith("scaled from ") and model.capability == capability
    assert model.shared_memory_per_sm == {164: 164, 100: 100, 228: 228}[(gpu.shared_memory >> 10) + 1] << 10
    of_sm, of_warp = model.kernels["portable"]["products"]["half"]
    if capability == (9, 0):
        assert [of_sm, of_warp] == base.kernels["portable"]["products"]["half"]
    else:
        assert (of_sm, of_warp) == (peak, peak / 4)
    known = model_of(replace(gpu, bandwidth=base.bandwidth / 4))
    assert known.memory == pytest.approx(base.memory / 4)


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_kernel_has_costs_on_every_measured_gpu(name: str) -> None:
    costs = kernels.named(name).Costs
    assert name == costs.KERNEL
    for model in measured().values():
        assert isinstance(model.costs(costs), costs)
        assert DeviceModel(**model.as_dict()).costs(costs) == model.costs(costs)
