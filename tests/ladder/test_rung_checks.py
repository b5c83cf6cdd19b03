"""Wrong launches of rungs raise where kernels are compiled; what `aot.capture` notes is checked as well."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis
import pytest
import torch
import triton
from hypothesis import strategies as st

from tests.support.wrong_launches import Wrong, cases
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.ladder import LADDER, Rung, k03_blocked, k04_grouped, k08_tensor_cores, launch_checks, record
from triton_gemm.runtime import aot


@cases(LADDER, "meta", own=True)
def test_a_wrong_launch_raises_and_launches_nothing(rung: Rung, wrong: Wrong) -> None:
    with aot.capture() as launches, pytest.raises(wrong.error, match=wrong.text):
        wrong.launch(rung)
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
    ("config", "beta", "text"),
    [
        (GemmConfig(128, 256, 64, 8, 8, 5), 0.0, "cannot take .*needs 246016 bytes of shared memory, sm_90 has 232448"),
        (GemmConfig(128, 256, 64, 8, 4, 3), 0.0, "does not take .*: would spill: 256 accumulators are more than half"),
        (GemmConfig(128, 256, 64, 8, 8, 3), 2.0, "not take .*: would spill: 128 accumulators are more than a quarter"),
    ],
)
def test_a_config_must_fit_the_gpu(config: GemmConfig, beta: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(launch_checks, "device_info", lambda _: device_of_capability((9, 0)))
    x = on_cuda(torch.float16)
    for given in ({"config": config}, {"configs": [record.triton_config(config)]}):
        with pytest.raises(ValueError, match=f"k08_tensor_cores .*{text}"):
            k08_tensor_cores.launch(x, x, on_cuda(torch.float16), 1.0, beta, **given)


@hypothesis.given(st.tuples(*[st.integers(0, 5)] * 2), st.tuples(*[st.integers(0, 9)] * 2))
def test_elements_in_one_place(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    x = torch.zeros(100).as_strided(shape, strides)
    places = torch.arange(100).as_strided(shape, strides).flatten()
    assert launch_checks._folded(x) == (places.unique().numel() < places.numel())


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.id)
def test_all_arguments_are_in_the_signature(rung: Rung) -> None:
    names = list(inspect.signature(rung.launch).parameters)
    own = ["round_operands"] if rung.id == "k07" else []
    assert names == ["a", "b", "c", "alpha", "beta", "config", "configs", *own]


@pytest.mark.parametrize("given", LADDER, ids=lambda rung: rung.id)
def test_no_kernel_is_given_the_negative_bit(given: Rung) -> None:
    """k11's among them, which no interpreter runs."""
    a, b, c = (torch._neg_view(torch.empty(64, 64, dtype=given.dtypes[0], device="meta")) for _ in "abc")
    with aot.capture() as launches:
        given.launch(a, b, c, config=given.configs[0])
    tensors = [getattr(x, "base", x) for launch in launches for x in launch.arguments.values()]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    assert len(tensors) >= 3 and not any(x.is_neg() for x in tensors)


def test_a_grid_of_too_many_columns_of_tiles() -> None:
    """k03's second axis; k04 has but one."""
    config = GemmConfig(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)

    def launch(columns: int) -> None:
        a, b, c = (torch.empty(16, n, device="meta") for n in (16, 16 * columns, 16 * columns))
        k03_blocked.launch(a, b, c, config=config)

    with noting_grids() as grids:
        launch(65_535)
        assert grids == [(1, 65_535)]
        with pytest.raises(ValueError, match="65536 columns of tiles; a grid's second axis takes 65535: take k04"):
            launch(65_536)


@contextmanager
def noting_grids() -> Iterator[list[tuple[int, ...]]]:
    """Launches only compute their grids, which are noted."""
    grids: list[tuple[int, ...]] = []

    def note(*_: object, grid: Callable[[object], tuple[int, ...]], **given: object) -> None:
        grids.append(grid(given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", note)
        yield grids


@pytest.mark.parametrize(
    ("rung", "config", "most"),
    [
        *((LADDER[number], config, 1024) for number, config in [
            (0, GemmConfig(BLOCK_M=1024, num_warps=32)),
            (3, GemmConfig(BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, num_warps=32)),
            (9, GemmConfig(BLOCK_M=128, BLOCK_N=8, BLOCK_K=16, GROUP_M=8, num_warps=32)),
        ]),
        (LADDER[10], GemmConfig(BLOCK_M=256, BLOCK_N=8, BLOCK_K=16, GROUP_M=8, num_warps=16, num_stages=2), 640),
        (LADDER[10], GemmConfig(BLOCK_M=64, BLOCK_N=256, BLOCK_K=16, GROUP_M=8, num_warps=4, num_stages=2), 256),
    ],
    ids=lambda value: value.id if isinstance(value, Rung) else str(value).replace(" ", "-"),
)  # fmt: skip
def test_what_is_just_allowed_compiles(rung: Rung, config: GemmConfig, most: int) -> None:
    """The smallest and largest values that `least` and `most` allow; k11's load partition adds a warpgroup."""
    gemm = aot.compile_call(rung.launch, (512, 1536, 1024), rung.dtypes[0], (9, 0), config=config)[-1]
    assert re.findall(r"\.reqntid (\d+)", gemm.asm["ptx"]) == [str(most)]
