"""What is added to a product and applied to it: values of rows, columns and matrices, activations and residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import triton_gemm
from tests.interpreter.functional.test_surface import poisoned_outputs as poisoned_outputs
from tests.support.epilogue_truth import activated
from tests.support.product_checks import NAN
from tests.support.product_views import assert_product, draw
from tests.support.wrong_products import ones
from triton_gemm.problem import ACTIVATIONS

HALF, BF16, FLOAT, DOUBLE, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8
ADDED = {"number": (), "one": (1, 1), "row": (9,), "row of a matrix": (1, 9), "column": (20, 1), "matrix": (20, 9)}


SCALARS = [(1, 1), (0.5, -2), (2, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize("shape", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("dtype", [FLOAT, BF16, DOUBLE], ids=str)
def test_addmm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b, input = draw(20, 33, dtype=dtype), draw(33, 9, dtype=dtype), draw(*shape, dtype=dtype)
    for alpha, beta in SCALARS:
        c = triton_gemm.addmm(input, a, b, alpha=alpha, beta=beta)
        assert_product(c, a, b, input, alpha=alpha, beta=beta)


@pytest.mark.parametrize("shape", [(), (9,), (20, 1), (3, 1, 1), (20, 9), (3, 20, 1), (3, 1, 9), (3, 20, 9)], ids=str)
def test_baddbmm(shape: tuple[int, ...]) -> None:
    a, b, input = draw(3, 20, 33), draw(3, 33, 9), draw(*shape)
    for alpha, beta in SCALARS[:3]:
        c = triton_gemm.baddbmm(input, a, b, alpha=alpha, beta=beta)
        assert_product(c, a, b, input, alpha=alpha, beta=beta)


def test_neither_beta_nor_alpha_zero_reads() -> None:
    a, b, nothing = draw(20, 33), draw(33, 9), torch.full((20, 9), NAN)
    for input in (nothing, nothing[0], nothing[:, :1]):
        assert_product(triton_gemm.addmm(input, a, b, beta=0), a, b)
    assert_product(triton_gemm.addmm(a[:, :9], a, b, beta=np.float32(2)), a, b, a[:, :9], beta=2)
    c = triton_gemm.addmm(b[:1, :9], nothing[:, :1].expand(20, 33), nothing[:1].expand(33, 9), alpha=0)
    assert torch.equal(c, b[:1].expand(20, 9))


@pytest.mark.parametrize(
    ("input", "weight", "bias"),
    [
        *(((20, 33), (9, 33), (9,)), ((33,), (9, 33), (9,)), ((2, 5, 33), (9, 33), (9,))),
        *(((2, 5, 33), (9, 33), None), ((2, 5, 33), (9, 33), ()), ((2, 5, 33), (9, 33), (5, 1))),
        *(((2, 5, 33), (9, 33), (2, 1, 9)), ((2, 5, 33), (33,), None), ((2, 5, 33), (33,), ())),
        *(((33,), (33,), None), ((0, 33), (9, 33), (9,)), ((20, 0), (9, 0), (9,))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_linear(
    input: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    x, w = draw(*input, dtype=dtype), draw(*weight, dtype=dtype)
    b = None if bias is None else draw(*bias, dtype=dtype)
    c = triton_gemm.linear(x, w, b)
    assert_product(c, x, w.t(), b)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_comes_before_the_one_rounding(name: str) -> None:
    x, w, bias = draw(2, 20, 33, dtype=BF16), draw(9, 33, dtype=BF16), draw(9, dtype=BF16)
    c = triton_gemm.linear(x, w, bias, name)
    truth = activated(x.double() @ w.double().T + bias.double(), name)
    assert ((c.double() - truth).abs() <= 2.0**-8 * truth.abs() + 2.0**-16).all()


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias", [None, (9,), (20, 1), (2, 1, 9)], ids=str)
def test_a_residual_is_added_last(bias: tuple[int, ...] | None, name: str | None) -> None:
    """After the activation and before the one rounding, where there is one kernel for it; of any shape that broadcasts;
    the residual stays as it is."""
    x, w = draw(2, 20, 33, dtype=BF16), draw(9, 33, dtype=BF16)
    b = None if bias is None else draw(*bias, dtype=BF16)
    before = x.double() @ w.double().T + (0 if b is None else b.double())
    for shape in ((2, 20, 9), (20, 1), ()):
        residual = draw(*shape, dtype=BF16, seed=3)
        kept, c = residual.clone(), triton_gemm.linear(x, w, b, name, residual=residual)
        truth = activated(before, name) + residual.double()
        roundings = 1 if b is None or b.dim() == 1 else 2
        size = activated(before, name).abs() + truth.abs() if roundings == 2 else truth.abs()
        assert c.shape == truth.shape and torch.equal(residual, kept)
        assert ((c.double() - truth).abs() <= 2.0**-8 * roundings * size + 2.0**-14).all()


def test_a_residual_of_vectors_and_of_batches() -> None:
    x, w, residual = draw(3, 20, 33), draw(9, 33), draw(3, 20, 9)
    one = triton_gemm.linear(x[0, 0], w, residual=residual[0, 0])
    torch.testing.assert_close(one, torch.nn.functional.linear(x[0, 0], w) + residual[0, 0])
    column = triton_gemm.linear(x, w[0], activation="relu", residual=residual[..., 0])
    torch.testing.assert_close(column, torch.nn.functional.linear(x, w[0]).relu() + residual[..., 0])
    for in_dims in ((0, None, None), (None, None, 0), (1, 0, 2)):
        operands = [draw(*shape) for shape in ((20, 33), (9, 33), (20, 9))]
        operands = [x if dim is None else torch.stack([x, -x], dim) for x, dim in zip(operands, in_dims, strict=True)]
        ours, theirs = (
            torch.vmap(lambda x, w, r, of=of: of(x, w, r), in_dims)(*operands)
            for of in (
                lambda x, w, r: triton_gemm.linear(x, w, None, "silu", residual=r),
                lambda x, w, r: activated(x @ w.T, "silu") + r,
            )
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_residual_that_does_not_fit_is_named() -> None:
    x, w = ones(2, 3), ones(5, 3)
    for residual in (ones(3), ones(2, 5, dtype=HALF), ones(4, 2, 5)):
        with pytest.raises(
            RuntimeError, match=r"residual must be of torch.float32 and broadcast to the result \[2, 5\]"
        ):
            triton_gemm.linear(x, w, residual=residual)
    with pytest.raises(NotImplementedError, match=r"linear is not implemented for torch\.int8"):
        triton_gemm.linear(x.to(INT8), w.to(INT8), residual=ones(2, 5).to(INT8))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_what_is_added(name: str) -> None:
    """Of a row, a column and a matrix, with factors, in what `out` holds, and with gradients."""
    a, b = draw(3, 20, 33, dtype=BF16), draw(3, 33, 9, dtype=BF16)
    for shape in ((9,), (20, 1), (20, 9)):
        input = draw(*shape, dtype=BF16)
        for alpha, beta in SCALARS[:3]:
            how: dict[str, Any] = {"alpha": alpha, "beta": beta, "activation": name}
            truth = activated(alpha * (a.double() @ b.double()) + beta * input.double(), name)
            bound = 2.0**-8 * truth.abs() + 2.0**-14
            one, out = triton_gemm.addmm(input, a[0], b[0], **how), torch.empty(20, 9, dtype=BF16)
            triton_gemm.addmm(input, a[0], b[0], out=out, **how)
            assert torch.equal(out, one) and ((one.double() - truth[0]).abs() <= bound[0]).all()
            assert ((triton_gemm.baddbmm(input, a, b, **how).double() - truth).abs() <= bound).all()
    wide = [x.double().requires_grad_() for x in (input[:3, :2], a[0, :3, :4], b[0, :4, :2])]
    assert torch.autograd.gradcheck(lambda *xs: triton_gemm.addmm(*xs, activation=name), wide, fast_mode=True)
