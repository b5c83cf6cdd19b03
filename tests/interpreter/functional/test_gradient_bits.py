"""Results with gradients have the bits of those without, on drawn layers; and what is stored for the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import triton_gemm
from tests.support.gradient_bits import (
    KINDS,
    PRECISIONS,
    RESIDUALS,
    Layer,
    assert_compiled_has_the_same_bits,
    assert_same_bits,
)

ROWS = st.sampled_from([(1,), (3,), (2, 5), (17,), (40,), (70,), ()])
SIZE = st.sampled_from([1, 8, 17, 40, 64, 200])


@st.composite
def layers(draw: Any) -> Layer:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    return Layer(
        draw(ROWS),
        draw(SIZE),
        draw(SIZE),
        dtype,
        draw(st.sampled_from(KINDS)),
        draw(st.booleans()),
        draw(st.sampled_from(list(RESIDUALS))),
        draw(st.sampled_from(PRECISIONS.get(dtype, (None,)))),
        draw(st.sampled_from([None, True])),
        draw(st.sampled_from([0, 1])),
    )


@pytest.mark.full
@settings(max_examples=60, deadline=None, derandomize=True)
@example(Layer((40,), 64, 64, torch.bfloat16, "gelu", True))
@example(Layer((40,), 64, 64, torch.bfloat16, "swiglu", True))
@example(Layer((40,), 64, 64, torch.bfloat16, None, True, "whole"))
@given(layers())
def test_gradients_change_no_bit(layer: Layer) -> None:
    if not layer.rows and layer.residual in ("a row", "a column"):
        layer = layer._replace(residual="whole")
    if layer.gate and not layer.rows:
        layer = layer._replace(rows=(1,))
    assert_same_bits(layer, "cpu")


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_nothing_is_kept_for_a_residual_alone(activation: str) -> None:
    layer = Layer((20,), 24, 32, torch.bfloat16, activation, True, "a row")
    operands = layer.operands("cpu")
    operands["residual"].requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        found = layer.call(operands)
    assert not kept
    found.backward(torch.ones_like(found))
    assert torch.equal(operands["residual"].grad, torch.full((1, 24), 20.0).bfloat16())


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_a_compiled_layer_has_the_bits_of_an_eager_one(activation: str) -> None:
    layer = Layer((20,), 24, 32, torch.bfloat16, activation, True, "whole")
    assert_compiled_has_the_same_bits(layer, "cpu", "aot_eager", rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activation_arguments_of_products(activation: str) -> None:
    """addmm, baddbmm and grouped products, too."""
    a, b = torch.randn(2, 20, 32).bfloat16(), torch.randn(2, 32, 24).bfloat16()
    offs = torch.tensor([7, 20], dtype=torch.int32)
    if activation == "gelu":
        calls = {
            "addmm": lambda a, b: triton_gemm.addmm(b[0, 0], a[0], b[0], activation="gelu", alpha=0.5),
            "a matrix": lambda a, b: triton_gemm.addmm(a[0, :, :24], a[0], b[0], activation="gelu"),
            "baddbmm": lambda a, b: triton_gemm.baddbmm(b[:, :1], a, b, activation="gelu", beta=2),
            "groups": lambda a, b: triton_gemm.grouped_matmul(a[0], b, offs, activation="gelu"),
        }
    else:
        calls = {
            "groups": lambda a, b: triton_gemm.grouped_matmul(a[0], b, offs, activation="swiglu", gate=b.flip(0)),
            "a batch": lambda a, b: triton_gemm.grouped_matmul(a, b, activation="swiglu", gate=b.flip(0)),
        }
    for name, call in calls.items():
        found = call(a.clone().requires_grad_(), b.clone().requires_grad_())
        assert torch.equal(found, call(a, b)), name
        found.float().sum().backward()
