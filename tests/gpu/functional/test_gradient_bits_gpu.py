"""Results with gradients have the bits of those without, on a GPU: with split-K, few rows and clusters."""

from __future__ import annotations

import pytest
import torch

import triton_gemm
from tests.support.gradient_bits import KINDS, Layer, assert_compiled_has_the_same_bits, assert_same_bits
from triton_gemm.problem import ACTIVATIONS, GATES

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SIZES = {
    "one row": ((1,), 1024, 2048),
    "few rows, split-K": ((7,), 576, 7168),
    "split-K": ((256,), 320, 8192),
    "odd": ((65,), 333, 129),
    "a batch": ((3, 100), 512, 264),
    "clusters": ((4096,), 4096, 1024),
    "wide": ((2048,), 11008, 512),
}


@pytest.mark.parametrize("invariant", [None, True], ids=["default", "invariant"])
@pytest.mark.parametrize("activation", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_layers(size: str, activation: str | None, invariant: bool | None) -> None:
    rows, N, K = SIZES[size]
    for bias, residual in ((False, "none"), (True, "whole")):
        assert_same_bits(Layer(rows, N, K, BF16, activation, bias, residual, None, invariant), "cuda")
    assert_same_bits(Layer(rows, N, K, BF16, activation, True, "none", None, invariant, offset=1), "cuda")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(HALF, None), (DOUBLE, None), *((FLOAT, name) for name in (None, "tf32", "bf16x3", "bf16x9", "tf32x3"))],
    ids=str,
)
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "swiglu"])
def test_dtypes(activation: str, dtype: torch.dtype, precision: str | None) -> None:
    for rows, N, K in (((5,), 520, 4096), ((300,), 264, 200), ((1024,), 1024, 256)):
        for residual in ("none", "a row"):
            assert_same_bits(Layer(rows, N, K, dtype, activation, True, residual, precision), "cuda")


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
def test_groups(activation: str) -> None:
    x, w = torch.randn(700, 512, device="cuda").bfloat16(), torch.randn(4, 512, 384, device="cuda").bfloat16()
    offs = torch.tensor([100, 100, 301, 640], dtype=torch.int32, device="cuda")
    gate = {"gate": w.flip(0)} if activation in GATES else {}
    call = lambda x, w: triton_gemm.grouped_matmul(x, w, offs, activation=activation, **gate)  # type: ignore[arg-type]  # noqa: E731
    expected = call(x, w)
    for needed in ((True, True), (True, False), (False, True), (True, True)):
        own = [t.clone().requires_grad_(needs) for t, needs in zip((x, w), needed, strict=True)]
        found = call(*own)
        assert torch.equal(found, expected)
        found.sum().backward()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_compiled(activation: str) -> None:
    layer = Layer((300,), 512, 264, BF16, activation, True, "whole")
    assert_compiled_has_the_same_bits(layer, "cuda", "inductor", rtol=0.02, atol=0.02)
