"""triton_gemm.explain without a GPU and without the interpreter, and what the public functions say of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
import torch

import triton_gemm
from triton_gemm.arithmetic import EMULATED, MODES
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.problem import ACTIVATIONS, Gate

BF16 = torch.bfloat16
SQUARE = {"M": 4096, "N": 4096, "K": 4096, "dtype": BF16}


@pytest.mark.parametrize("capability", [c for c in SHARED_MEMORY if c >= (8, 0)], ids=str)
def test_any_gpu_can_be_asked_about(capability: tuple[int, int]) -> None:
    name = f"sm_{capability[0]}{capability[1]}"
    answer = triton_gemm.explain(**SQUARE, layout="nt", device=name)
    assert answer.kernel == ("warp_specialised" if capability == (9, 0) else "portable")
    assert answer.device == name and f", on {name}: {answer.reason}" in str(answer)
    assert isinstance(answer, triton_gemm.Selection) and f"; bits: {answer.bits}; chosen by" in str(answer)


def test_a_device_may_be_described() -> None:
    info = triton_gemm.DeviceInfo("half a Hopper", (9, 0), 66, SHARED_MEMORY[9, 0])
    half = triton_gemm.explain(**SQUARE, device=info)
    whole = triton_gemm.explain(**SQUARE, device=device_of_capability((9, 0)))
    assert half.device == "half a Hopper" and whole.device == "sm_90"
    programs = 132 // whole.config.ctas  # of a cluster each, from Triton 3.9 on
    assert (half.schedule.programs, whole.schedule.programs) == (programs // 2, programs)


def test_tensors_of_another_machine_can_be_asked_about() -> None:
    """On the CPU, or without data: sizes, strides and alignment are what counts."""
    a, b = torch.ones(4096, 256, dtype=BF16), torch.ones(256, 4100, dtype=BF16)[:, 2:4098]
    on_cpu = triton_gemm.explain(a, b, device="sm_90")
    assert "b" in on_cpu.packed or "TMA cannot take b" in on_cpu.reason
    sizes = {"M": 4096, "N": 4096, "K": 256, "dtype": BF16}
    assert triton_gemm.explain(a, b.contiguous(), device="sm_90") == triton_gemm.explain(**sizes, device="sm_90")
    meta = triton_gemm.explain(a.to("meta"), b.contiguous().to("meta"), device="sm_90")
    assert meta == triton_gemm.explain(**sizes, device="sm_90")


def test_the_default_device_need_not_be_there() -> None:
    """As where a process for GPUs is tried without one. Groups of columns are turned."""
    expected = triton_gemm.explain(**SQUARE, groups=8, device="sm_90")
    with torch.device("cuda:7"):
        assert str(triton_gemm.explain(**SQUARE, groups=8, device="sm_90")) == str(expected)
    turned = triton_gemm.explain(**SQUARE, groups=8, group_dim="N", layout="tn", device="sm_90")
    assert turned.swap_ab and not expected.swap_ab and turned.bits.endswith("one sum along K")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to choose for")
def test_without_a_gpu_one_must_be_named() -> None:
    for how in ({}, {"device": "cuda"}, {"device": "meta"}):
        with pytest.raises(RuntimeError, match='there is no GPU to choose for; name one, as in device="sm_90"'):
            triton_gemm.explain(**SQUARE, **how)


FUNCTIONS = [f for f in map(triton_gemm.__dict__.get, triton_gemm.__all__) if inspect.isfunction(f)]


def test_names_of_modes_are_types() -> None:
    assert get_args(triton_gemm.Precision) == MODES and set(EMULATED) == set(MODES) - {"ieee", "tf32"}
    assert get_args(triton_gemm.Activation) == ACTIVATIONS
    for function in (*FUNCTIONS, triton_gemm.nn.Linear.__init__):
        hints = get_type_hints(function)
        for name, kind in (("precision", triton_gemm.Precision), ("activation", triton_gemm.Activation)):
            gated = name == "activation" and function in (triton_gemm.linear, triton_gemm.grouped_matmul)
            expected = kind | Gate | None if gated else kind | None
            assert hints.get(name, expected) == expected, function


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_docstring_stands_alone(function: Callable[..., object]) -> None:
    """It has a word on every parameter; a product's also on shapes, dtypes and what it raises."""
    text = inspect.getdoc(function) or ""
    assert [name for name in inspect.signature(function).parameters if name not in text] == []
    if get_type_hints(function)["return"] is torch.Tensor:
        assert all(word in text for word in ("K]", "fp16", "GPU", "Raises", "RuntimeError", "TypeError"))


def test_docstrings_say_what_int8_gives_and_what_a_selection_has() -> None:
    for function in (triton_gemm.matmul, triton_gemm.mm, triton_gemm.bmm, triton_gemm.mv):
        assert "int32" in (function.__doc__ or "")
    text = triton_gemm.Selection.__doc__ or ""
    assert [name for name in triton_gemm.Selection.__dataclass_fields__ if f"{name}:" not in text] == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"use_fast_accum": True, "device": "sm_90"}, ValueError, "use_fast_accum goes with scales"),
        ({"layout": "nt", "device": "sm_90"}, TypeError, "tensors have their own"),
        ({"batch": 7, "device": "sm_90"}, TypeError, "tensors have their own"),
        ({"group_dim": "K", "device": "sm_90"}, TypeError, "tensors have their own"),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_what_would_be_ignored_is_refused(given: dict[str, object], error: type[Exception], words: str) -> None:
    a = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(error, match=words):
        triton_gemm.explain(a, a, **given)
