"""torch's own activations, by the names of `activation=`, and their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..problem import Request

ACTIVATIONS: dict[str | None, Any] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def derivative(activation: str | None, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad times the activation's derivative, by torch's own kernels. x: what the activation is applied to, of "relu"
    its result, too."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    if activation != "silu":
        return aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if not torch.is_grad_enabled():
        return aten.silu_backward(grad, x)
    gate = x.sigmoid()  # what can be differentiated again, as torch has it
    return grad * (gate * (1 + x * (1 - gate)))


def for_gradients(request: Request, is_alone: bool) -> Request:
    """A request with what a backward needs to know: preactivations, but of "relu" if that is all that comes after a
    product (`is_alone`), whose result tells enough."""
    return request._replace(preactivation=request.activation not in ((None, "relu") if is_alone else (None,)))


def through_activation(
    activation: str | None,
    grad: torch.Tensor | None,
    c: torch.Tensor | None,
    before: Sequence[torch.Tensor | None],
    of_before: Sequence[torch.Tensor | None],
    gated: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a @ b + input and of a @ gate + gate_bias. c: of "relu" the result, where nothing else tells
    what that was applied to; before: preactivations, and of_before their gradients."""
    if activation is None:
        return grad, None
    first, second = before
    by_first = by_second = None
    if grad is not None and gated:
        assert first is not None and second is not None
        by_first = derivative(activation, grad * second, first)
        by_second = grad * ACTIVATIONS[activation](first)
    elif grad is not None:
        x = c if first is None else first
        assert x is not None
        by_first = derivative(activation, grad, x)
    by_first, by_second = (
        y if x is None else x if y is None else x + y
        for x, y in zip((by_first, by_second), (*of_before, None, None), strict=False)
    )
    return (by_second, by_first) if gated else (by_first, None)
