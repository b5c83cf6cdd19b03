"""What the portable kernel computes of int8 and fp8 with scales, in Triton's interpreter, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.interpreter.kernels.test_portable import SMALL_TILES, check, multiply
from tests.support import awkward_sizes
from tests.support.interpreted_plans import Interpreted, run
from tests.support.kernel_cases import Case, Operands
from tests.support.product_checks import NAN
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import portable
from triton_gemm.kernels.portable import host
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection, launches

# --- 8 bits: int8, fp8, and their scales ---


TILES_8 = replace(SMALL_TILES, BLOCK_K=64)  # half a block of scales
KINDS_8 = {
    "int8": {"dtype": torch.int8, "out_dtype": torch.int32},
    "int8-tensor": {"dtype": torch.int8, "out_dtype": torch.float32, "scales": "tensor"},
    "int8-rows": {"dtype": torch.int8, "scales": "rows"},
    "fp8-tensor": {"dtype": torch.float8_e4m3fn, "scales": "tensor"},
    "fp8-rows": {"dtype": torch.float8_e5m2, "out_dtype": torch.float32, "scales": "rows"},
    "fp8-blocks": {"dtype": torch.float8_e4m3fn, "out_dtype": torch.float32, "scales": "blocks"},
    "fp8-fast": {"dtype": torch.float8_e5m2, "scales": "tensor", "precision": "fp8 fast"},
}
SIZES_8 = {
    **{
        name: awkward_sizes.SMALL[name]
        for name in ("ragged", "k-tail-of-one", "k-zero", "one-row", "one-column", "one")
    },
    **{"blocks": (60, 140, 300), "whole-blocks": (64, 256, 256)},
}


def of_8_bits(kind: str, size: tuple[int, int, int], orders: str = "nnn", **changes: object) -> Case:
    return Case(size, orders, **{"out_dtype": torch.bfloat16, **KINDS_8[kind], **changes})


@pytest.mark.few(shows=lambda kind, split_k, size: {(kind, split_k), size})
@pytest.mark.parametrize("size", SIZES_8.values(), ids=SIZES_8)
@pytest.mark.parametrize("split_k", [1, 3], ids=["whole", "split"])
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits(kind: str, split_k: int, size: tuple[int, int, int]) -> None:
    check(of_8_bits(kind, size), TILES_8, split_k)


VIEWS_8 = {
    **{orders: {"orders": orders} for orders in ("ntn", "tnn", "ttn", "nnt")},
    "steps": {"orders": "tnt", "step": 2, "pad": 1, "gap": 3},
    "unaligned": {"offset": 1, "c_offset": 1},
    "words": {"pad": 4, "orders": "ntn"},
}


@pytest.mark.few
@pytest.mark.parametrize("view", VIEWS_8)
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits_in_any_layout(kind: str, view: str) -> None:
    check(of_8_bits(kind, (45, 70, 260), **VIEWS_8[view]), TILES_8)


@pytest.mark.few
@pytest.mark.parametrize("split_k", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS_8 if kind != "int8"])
def test_scales_come_before_the_epilogue(kind: str, split_k: int) -> None:
    for axis, activation, beta in (("n", None, 0.0), ("m", "gelu", 0.0), ("n", "relu", -2.0)):
        how = {"bias": axis, "activation": activation, "alpha": 0.5, "beta": beta}
        check(of_8_bits(kind, (45, 70, 260), **how), TILES_8, split_k)


@pytest.mark.few(shows=lambda kind, orders: {kind, orders})
@pytest.mark.parametrize("orders", ["nnn", "ttn", "tnt"])
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits_that_are_copied_first(kind: str, orders: str) -> None:
    """Operands that are not K-major, on GPUs whose tensor cores have only `mma`."""
    operands = Operands(of_8_bits(kind, (45, 70, 260), orders), torch.device("cpu"))
    device = device_of_capability((8, 9))
    candidates = [one for one in portable.candidates(operands.problem, device) if one.algorithm.packed]
    assert candidates and all(host.along_k(one.problem) == ("a", "b") for one in candidates)
    made = launches(operands.problem, Selection.of(candidates[-1], ""))
    operands.check(Interpreted(operands.problem, made), candidates[-1].algorithm.work)


def test_int8_is_exact_up_to_the_ends_of_int32_and_wraps_beyond() -> None:
    tiles = replace(TILES_8, BLOCK_K=4096)
    for K, split_k in ((2**17 - 1, 1), (2**17 - 1, 3), (2**17, 1), (2**17 + 70, 2)):
        a, b = torch.full((3, K), -128, dtype=torch.int8), torch.full((K, 2), -128, dtype=torch.int8)
        c = torch.zeros(3, 2, dtype=torch.int32)
        multiply(a, b, c, config=tiles, split_k=split_k)
        assert (c == (K * 2**14 + 2**31) % 2**32 - 2**31).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_there_is(dtype: torch.dtype) -> None:
    """Subnormals, infinities and NaN."""
    b, c = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 256), torch.empty(1, 256)
    multiply(torch.ones(1, 1).to(dtype), b, c, config=TILES_8)
    assert torch.equal(c.nan_to_num(9e9), b.float().nan_to_num(9e9))


@pytest.mark.skipif(not hasattr(InterpreterBuilder, "create_dot_scaled"), reason="the interpreter has it from 3.9 on")
@pytest.mark.parametrize("kind", [kind for kind in KINDS_8 if kind.startswith("fp8")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_block_scales_of_one_give_the_same_bits_as_none(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensor cores of 12.0 multiply fp8: all products of two numbers, and sums that no order rounds. Triton 3.9's
    interpreter makes zeros of e5m2's subnormals for scales of blocks; these are left out."""
    how, bits = KINDS_8[kind], torch.arange(256, dtype=torch.uint8)
    every = (bits if dtype == torch.float8_e4m3fn else torch.where(bits & 0x7C > 0, bits, 0)).view(dtype)
    integers = (torch.randint(-8, 9, size).to(dtype) for size in ((130, 260), (260, 140)))
    for a, b in ((every.view(256, 1), every.view(1, 256)), tuple(integers)):
        problem = GemmProblem.of(
            a, b, torch.empty(len(a), b.shape[1]), precision=how.get("precision"), scales=how["scales"]
        )
        found = []
        for block_scaled in (False, True):
            monkeypatch.setattr(portable.kernel, "multiplies_block_scaled", lambda made=block_scaled: made)
            operands = {"a": a, "b": b, "c": torch.full((len(a), b.shape[1]), NAN)}
            operands |= {"a_scale": torch.ones(len(a), 3), "b_scale": torch.ones(3, b.shape[1])}
            for launch in portable.launches(problem, TILES_8):
                run(launch, operands, alpha=1.0, beta=0.0)
            found.append(operands["c"])
        assert torch.equal(found[0].isnan(), found[1].isnan())
        assert torch.equal(*(c.nan_to_num(9e9).view(torch.int32) for c in found))
