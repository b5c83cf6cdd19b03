"""How fast GPUs are: the measured ones from a file, others derived from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from triton_gemm import explain, kernels
from triton_gemm.hardware.device import SHARED_MEMORY, DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import BASE, FILE, NAMES, DeviceModel, measured, model_of, named_device

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


@pytest.mark.parametrize("name", NAMES)
def test_gpus_have_names(name: str) -> None:
    device = named_device(name)
    if name.startswith("sm_"):
        assert device == device_of_capability(device.capability)
    else:
        assert model_of(device) is measured()[device.name] and name.upper() in device.name
        assert device.bandwidth == measured()[device.name].bandwidth
    if device.capability >= (8, 0):
        assert explain(M=512, N=512, K=512, dtype=torch.float16, device=name).device == device.name


def test_a_gpu_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device must be one of sm_75, .*, h100, h200, not 'h300'"):
        named_device("h300")


@pytest.mark.parametrize("capability", [capability for capability in SHARED_MEMORY if capability >= (8, 0)], ids=str)
def test_others_are_scaled_by_memory_and_multiprocessors(capability: tuple[int, int]) -> None:
    base, gpu = measured()[BASE], replace(device_of_capability(capability), num_sms=66)
    model = model_of(gpu)
    assert model.l2 == pytest.approx(base.l2 / 2) and model.tensor == pytest.approx(base.tensor / 2)
    assert model.source.startswith("scaled from ")
    known = model_of(replace(gpu, bandwidth=base.bandwidth / 4))
    assert known.memory == pytest.approx(base.memory / 4)


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_kernel_has_costs_on_every_measured_gpu(name: str) -> None:
    costs = kernels.named(name).Costs
    assert name == costs.KERNEL
    for model in measured().values():
        assert isinstance(model.costs(costs), costs)
        assert DeviceModel(**model.as_dict()).costs(costs) == model.costs(costs)
