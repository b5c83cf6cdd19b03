"""Wrong launches of rungs raise where kernels are compiled; what `aot.capture` notes is checked as well."""

import pytest
import torch

from tests.wrong_launches import Wrong, wrong_launches
from triton_gemm import aot
from triton_gemm.config import GemmConfig
from triton_gemm.device import device_of_capability
from triton_gemm.ladder import LADDER, Rung, k04_grouped, k08_tensor_cores, rung


@pytest.mark.parametrize(
    ("rung", "wrong"),
    [
        pytest.param(rung, wrong, id=f"{rung.id}-{name}")
        for rung in LADDER
        for name, wrong in wrong_launches(rung, "meta").items()
    ],
)
def test_a_wrong_launch_raises_and_launches_nothing(rung: Rung, wrong: Wrong) -> None:
    with aot.capture() as launches, pytest.raises(wrong.error, match=wrong.says):
        rung.launch(*wrong.operands, 1.0, 2.0, config=wrong.config, configs=wrong.configs)
    assert launches == []


def test_the_cpu_is_for_the_interpreter() -> None:
    a = torch.ones(32, 32)
    with pytest.raises(ValueError, match="on the CPU; move them to a CUDA device, or set TRITON_INTERPRET=1"):
        k04_grouped.launch(a, a, a.clone())


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU that is not here."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)

    @property
    def is_cuda(self) -> bool:
        return True


def on_cuda(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(64, 64, dtype=dtype).as_subclass(OnCuda)


def test_the_current_device_must_be_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"are on cuda:1, and the current device is cuda:0; launch inside"):
        k04_grouped.launch(on_cuda(), on_cuda(), on_cuda())


@pytest.mark.parametrize(
    ("config", "beta", "says"),
    [
        (GemmConfig(128, 256, 64, 8, 8, 5), 0.0, "needs 246016 bytes of shared memory, sm_90 has 232448"),
        (GemmConfig(128, 256, 64, 8, 4, 3), 0.0, "256 accumulators"),
        (GemmConfig(128, 256, 64, 8, 8, 3), 2.0, "128 accumulators"),
    ],
)
def test_a_config_must_fit_the_gpu(config: GemmConfig, beta: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(rung, "device_info", lambda _: device_of_capability((9, 0)))
    x = on_cuda(torch.float16)
    for given in ({"config": config}, {"configs": [rung.triton_config(config)]}):
        with pytest.raises(ValueError, match=f"k08_tensor_cores cannot take .*{says}"):
            k08_tensor_cores.launch(x, x, x, 1.0, beta, **given)
