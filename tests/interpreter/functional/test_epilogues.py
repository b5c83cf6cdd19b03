"""What is added to a product and applied to it: rows, columns, matrices, activations, residuals, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.interpreter.functional.test_surface import poisoned_outputs as poisoned_outputs
from tests.support.epilogue_truth import activated
from tests.support.patches import noted
from tests.support.product_checks import NAN
from tests.support.product_views import (
    assert_gradients_as_near_as_torchs,
    assert_product,
    draw,
    torchs_gated,
    torchs_linear,
    traced,
)
from tests.support.wrong_products import ones
from triton_gemm.problem import ACTIVATIONS, GATES
from triton_gemm.runtime import plan
from triton_gemm.runtime.plan import InterpretedPlan

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


def test_a_residual_of_vectors() -> None:
    x, w, residual = draw(3, 20, 33), draw(9, 33), draw(3, 20, 9)
    one = triton_gemm.linear(x[0, 0], w, residual=residual[0, 0])
    torch.testing.assert_close(one, torch.nn.functional.linear(x[0, 0], w) + residual[0, 0])
    column = triton_gemm.linear(x, w[0], activation="relu", residual=residual[..., 0])
    torch.testing.assert_close(column, torch.nn.functional.linear(x, w[0]).relu() + residual[..., 0])


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


F = torch.nn.functional
ROUNDOFF = {HALF: 2.0**-11, BF16: 2.0**-8, FLOAT: 2.0**-20, DOUBLE: 2.0**-45}


# --- Gates ---


def wide(*operands: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.double() for x in operands]


@pytest.mark.parametrize("biases", ["none", "up", "gate", "both"])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT, DOUBLE], ids=str)
def test_every_gate(dtype: torch.dtype, name: str, biases: str) -> None:
    for shape in ((2, 5, 33), (33,), (40, 33), (0, 33)):
        x, up, gate = draw(*shape, dtype=dtype), draw(24, 33, dtype=dtype, seed=1), draw(24, 33, dtype=dtype, seed=2)
        bias = draw(24, dtype=dtype, seed=3) if biases in ("up", "both") else None
        gate_bias = draw(24, dtype=dtype, seed=4) if biases in ("gate", "both") else None
        c = triton_gemm.linear(x, up, bias, name, gate=gate, gate_bias=gate_bias)
        x64, up64, bias64, gate64, gate_bias64 = wide(x, up, bias, gate, gate_bias)
        truth = torchs_gated(x64, up64, bias64, name, gate64, gate_bias64)
        assert c.shape == truth.shape and c.dtype == dtype
        products = F.linear(x64.abs(), up64.abs()) + F.linear(x64.abs(), gate64.abs()) + 2
        roundings = ROUNDOFF[dtype] * truth.abs() * (1 if dtype.itemsize == 2 else 8)
        assert ((c.double() - truth).abs() <= roundings + 2.0**-19 * products**2 * (dtype != DOUBLE) + 1e-12).all()


def test_one_launch_for_a_pair_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of one weight, weights whose strides differ, transposed ones, and one that is expanded."""
    packed, x = draw(48, 32, dtype=BF16), draw(3, 5, 32, dtype=BF16)
    seen = noted(monkeypatch, plan, "multiply", lambda *xs: xs[3].gate)
    pairs = {
        "halves": (packed[24:], packed[:24]),
        "strides": (packed[24:], draw(24, 64, dtype=BF16)[:, ::2]),
        "transposed": (draw(32, 24, dtype=BF16).t(), draw(32, 24, dtype=BF16, seed=1).t()),
        "expanded": (packed[:1].expand(24, 32), packed[:24]),
        "not aligned": (packed.flatten()[1 : 1 + 24 * 32].view(24, 32), packed[:24]),
    }
    for kind, (up, gate) in pairs.items():
        c = triton_gemm.linear(x, up, activation="swiglu", gate=gate)
        truth = torchs_gated(x.double(), up.double(), None, "swiglu", gate.double(), None)
        assert ((c.double() - truth).abs() <= 2.0**-8 * truth.abs() + 2.0**-10).all(), kind
    assert seen == [True] * len(pairs)


def test_gradients_of_16_bits_are_as_torchs() -> None:
    shapes = ((40, 64), (48, 64), (48,), (48, 64), (48,))
    assert_gradients_as_near_as_torchs(
        lambda x, up, b, g, gb: triton_gemm.linear(x, up, b, "swiglu", gate=g, gate_bias=gb),
        lambda x, up, b, g, gb: torchs_gated(x, up, b, "swiglu", g, gb),
        [draw(*shape, dtype=BF16, seed=i) for i, shape in enumerate(shapes)],
    )


def test_only_the_gradients_asked_for_and_no_product_again() -> None:
    x, up, gate = draw(20, 8, dtype=BF16), draw(6, 8, dtype=BF16), draw(6, 8, dtype=BF16)
    c = triton_gemm.linear(x, up.requires_grad_(), activation="geglu", gate=gate)
    with FlopCounterMode(display=False) as flops:
        c.sum().backward()
    assert flops.get_total_flops() == 2 * 20 * 8 * 6  # the gradient of one weight
    assert up.grad is not None and gate.grad is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_operands_alone(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run one kernel, and run it again backwards."""
    x, up, gate = draw(20, 8, dtype=BF16), draw(6, 8, dtype=BF16), draw(6, 8, dtype=BF16)
    gated_ones = noted(monkeypatch, InterpretedPlan, "run", lambda self, *_: self.problem.gate)

    def layer(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return triton_gemm.linear(x, up, activation="swiglu", gate=gate)

    operands = [t.requires_grad_() for t in (x, up, gate)]
    expected = torch.autograd.grad(layer(*operands).float().sum(), operands)
    gated_ones.clear()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        c = checkpoint(layer, *operands, use_reentrant=reentrant)
    assert {t.numel() for t in kept} <= {t.numel() for t in operands}
    assert gated_ones == [True]
    gated_ones.clear()
    c.float().sum().backward()
    assert gated_ones == [True, *[False] * 4]
    torch.testing.assert_close([t.grad for t in operands], list(expected), rtol=0, atol=0)


# Shapes of x, a weight and its bias, a gate and its bias, and a residual; None where vmap has one for all.
OPERANDS = (5, 8), (6, 8), (6,), (6, 8), (6,), (5, 6)
N = None
IN_DIMS = [(0, N, N, N, N, N), (N, 0, N, N, N, N), (N, N, 0, N, N, N), (N, 1, N, 0, N, N), (N, N, N, N, 0, N)]
IN_DIMS += [(N, N, N, N, N, 0), (1, N, N, N, N, 2), (0, N, 1, N, N, N), (0, 1, 1, N, 0, N), (0, 0, 0, 0, 0, 0)]


def layers(activation: Any, residual: bool) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Ours and torch's, of six operands."""
    is_gated = activation in GATES

    def ours(x: Any, w: Any, b: Any, g: Any, gb: Any, r: Any) -> torch.Tensor:
        gates = {"gate": g, "gate_bias": gb} if is_gated else {}
        return triton_gemm.linear(x, w, b, activation, residual=r if residual else None, **gates)

    def theirs(x: Any, w: Any, b: Any, g: Any, gb: Any, r: Any) -> torch.Tensor:
        c = torchs_gated(x, w, b, activation, g, gb) if is_gated else torchs_linear(x, w, b, activation)
        return c + r if residual else c

    return ours, theirs


@pytest.mark.few
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize(
    ("activation", "residual"), [(None, False), ("silu", False), ("silu", True), ("swiglu", False), ("swiglu", True)]
)
def test_vmap_also_of_gradients(activation: str | None, residual: bool, in_dims: tuple[int | None, ...]) -> None:
    operands = [
        draw(*shape, seed=i) if dim is None else torch.stack([draw(*shape, seed=i), draw(*shape, seed=i + 9)], dim)
        for i, (shape, dim) in enumerate(zip(OPERANDS, in_dims, strict=True))
    ]

    def both(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        gradients = torch.func.grad(lambda *xs: function(*xs).sin().sum(), tuple(range(6)))
        return torch.vmap(lambda *xs: (function(*xs), *gradients(*xs)), in_dims)(*operands)

    torch.testing.assert_close(*map(both, layers(activation, residual)), rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (4,), (5,), (1, 5), (0, 3)], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu"])
def test_tangents_of_some_operands(activation: str, which: tuple[int, ...]) -> None:
    operands = [draw(*shape, seed=i, dtype=DOUBLE) for i, shape in enumerate(OPERANDS)]
    some = tuple(operands[i] for i in which)

    def tangents(layer: Callable[..., torch.Tensor]) -> Any:
        of_some = lambda *xs: layer(*(xs[which.index(i)] if i in which else x for i, x in enumerate(operands)))  # noqa: E731
        return torch.func.jvp(of_some, some, tuple(map(torch.ones_like, some)))

    torch.testing.assert_close(*map(tangents, layers(activation, residual=True)))


def test_the_operator_checks_what_it_is_given() -> None:
    a, b, gate = (draw(*shape, dtype=BF16) for shape in ((3, 8), (8, 16), (8, 16)))
    for how in ({"gate": gate[:, :8]}, {"gate": gate, "activation": None}, {"gate": gate, "alpha": 2}):
        with pytest.raises(RuntimeError, match="a gate has b's shape and an activation, and no factors"):
            torch.ops.triton_gemm.gemm(a, b, **{"activation": "silu", **how})


def test_compiled_it_is_one_operator() -> None:
    x, up, gate = draw(20, 32, dtype=BF16), draw(24, 32, dtype=BF16), draw(24, 32, dtype=BF16, seed=1)
    found, named = traced(lambda x: triton_gemm.linear(x, up, activation="swiglu", gate=gate), x)
    assert torch.equal(found, triton_gemm.linear(x, up, activation="swiglu", gate=gate))
    assert [name for name in named if "gemm" in name] == ["triton_gemm.gemm.default"]


def test_batch_invariance_and_a_residual() -> None:
    x, up, gate = draw(40, 64, dtype=BF16), draw(48, 64, dtype=BF16), draw(48, 64, dtype=BF16, seed=1)
    residual = draw(40, 48, dtype=BF16, seed=2)
    c = triton_gemm.linear(x, up, activation="swiglu", gate=gate, batch_invariant=True)
    assert torch.equal(triton_gemm.linear(x[:3], up, activation="swiglu", gate=gate, batch_invariant=True), c[:3])
    plain = triton_gemm.linear(x, up, activation="swiglu", gate=gate)
    added = triton_gemm.linear(x, up, activation="swiglu", gate=gate, residual=residual)
    assert torch.equal(added, plain + residual)
    with torch.autocast("cpu", BF16):
        cast = triton_gemm.linear(x.float(), up.float(), activation="swiglu", gate=gate.float())
    assert torch.equal(cast, plain)


X, UP = torch.ones(4, 8), torch.ones(6, 8)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no gate": ({"gate": None}, ValueError, "weight and gate, and gate is missing"),
    "no gate but its bias": (
        *({"gate": None, "activation": None, "gate_bias": X[0]}, ValueError),
        "gate_bias is given without gate",
    ),
    "no activation": (
        *({"activation": None}, ValueError),
        "activation must be one of swiglu, geglu, geglu_tanh, reglu, not None",
    ),
    "another activation": ({"activation": "silu"}, ValueError, 'activation must be "swiglu", the gate of silu'),
    "other rows": (
        *({"gate": UP[:5]}, RuntimeError),
        r"weight and gate \[N, K\]; got \[4, 8\] with weight \[6, 8\] and gate \[5, 8\]",
    ),
    "another length": ({"gate": UP[:, :7]}, RuntimeError, r"with weight \[6, 8\] and gate \[6, 7\]"),
    "a vector": ({"weight": UP[0], "gate": UP[0]}, RuntimeError, r"gate \[8\]"),
    "a bias": ({"bias": X[0]}, RuntimeError, r"bias must be \[N\] = \[6\] with a gate, not \[8\]"),
    "the gate's bias": ({"gate_bias": X[0]}, RuntimeError, r"gate_bias must be \[N\] = \[6\]"),
    "dtypes": (
        *({"gate": UP.half()}, RuntimeError),
        r"of one dtype, got torch.float16, torch.float32; \[4, 8\] with weight \[6, 8\] and gate \[6, 8\]",
    ),
    "int8": (
        *({"input": X.to(torch.int8), "weight": UP.to(torch.int8), "gate": UP.to(torch.int8)}, NotImplementedError),
        r"linear is not implemented for torch\.int8",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    how, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        triton_gemm.linear(**{"input": X, "weight": UP, "activation": "swiglu", "gate": UP, **how})


def test_the_vmap_rule_needs_no_trailing_defaults() -> None:
    a, b, gate = draw(2, 5, 8), draw(8, 6), draw(8, 6, seed=1)
    found = torch.vmap(lambda a: torch.ops.triton_gemm.gemm(a, b, activation="silu", gate=gate))(a)
    torch.testing.assert_close(found, torch.nn.functional.silu(a @ gate) * (a @ b), rtol=1e-5, atol=1e-5)
