"""Layers with gradients and without, whose results are to have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import triton_gemm
from triton_gemm.problem import ACTIVATIONS, GATES

PRECISIONS = {torch.float32: (None, "tf32", "bf16x3", "tf32x3")}
RESIDUALS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda _: None,
    "whole": lambda c: c,
    "a row": lambda c: c[..., :1, :].clone(),
    "a column": lambda c: c[..., :1].clone(),
}


class Layer(NamedTuple):
    """A call of `linear`: sizes, dtype, what is added and applied, and how it is computed."""

    rows: tuple[int, ...]
    N: int
    K: int
    dtype: torch.dtype
    activation: str | None = None
    bias: bool = False
    residual: str = "none"
    precision: str | None = None
    batch_invariant: bool | None = None
    offset: int = 0  # elements before the input's first

    @property
    def gate(self) -> bool:
        return self.activation in GATES

    def operands(self, device: str) -> dict[str, Any]:
        generator = torch.Generator(device=device).manual_seed(hash(self.rows) % 1000)

        def draw(*shape: int, offset: int = 0) -> torch.Tensor:
            count = torch.Size(shape).numel()
            values = torch.randn(count + offset, device=device, generator=generator).to(self.dtype)
            return values[offset:].view(shape)

        biases = {"bias": draw(self.N)} if self.bias else {}
        gates = {"gate": draw(self.N, self.K)} if self.gate else {}
        gates |= {"gate_bias": draw(self.N)} if self.gate and self.bias else {}
        residual = RESIDUALS[self.residual](draw(*self.rows, self.N))
        added = {} if residual is None else {"residual": residual}
        return {
            "input": draw(*self.rows, self.K, offset=self.offset),
            "weight": draw(self.N, self.K) / max(self.K, 1) ** 0.5,
            **biases,
            **gates,
            **added,
        }

    def call(self, operands: dict[str, torch.Tensor]) -> torch.Tensor:
        how = {"activation": self.activation, "precision": self.precision, "batch_invariant": self.batch_invariant}
        return triton_gemm.linear(**operands, **how)


def assert_same_bits(layer: Layer, device: str) -> None:
    """Without gradients, with gradients of all operands and of each alone, in first calls and later ones."""
    operands = layer.operands(device)
    with torch.no_grad():
        expected = layer.call(operands)
    for needed in (list(operands), list(operands), *([name] for name in operands)):
        own = {name: x.detach().requires_grad_(name in needed) for name, x in operands.items()}
        found = layer.call(own)
        assert found.requires_grad and torch.equal(found, expected), (layer, needed)
    found.backward(torch.ones_like(found))
    with torch.no_grad():
        assert torch.equal(layer.call(operands), expected)


def assert_compiled_has_the_same_bits(layer: Layer, device: str, backend: str, **near: float) -> None:
    """The result has an eager call's bits with gradients and without; gradients differ by `near` at most."""
    operands = layer.operands(device)
    expected = layer.call(operands)
    torch._dynamo.reset()
    compiled = torch.compile(layer.call, fullgraph=True, backend=backend)
    assert torch.equal(compiled(operands), expected)
    own, eager = ({name: x.clone().requires_grad_() for name, x in operands.items()} for _ in range(2))
    for call, given in ((compiled, own), (layer.call, eager)):
        found = call(given)
        assert torch.equal(found, expected)
        found.float().sum().backward()
    for name in operands:
        torch.testing.assert_close(own[name].grad, eager[name].grad, **near)


KINDS = [None, *ACTIVATIONS, *GATES]
