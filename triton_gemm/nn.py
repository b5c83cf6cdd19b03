"""Modules that run on this package: drop-ins for those of torch.nn."""

from __future__ import annotations

from typing import Any

import torch

from . import api, checks
from .arithmetic import Precision
from .problem import Activation


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` computed by `triton_gemm.linear`, input [.., in_features] to [.., out_features], with the same
    parameters, initialisation and state dict, and two more arguments:

    activation: None, or what is applied to the result in the same kernel (with gradients: after it), "relu", "gelu"
    (with erf), "gelu_tanh" or "silu".
    precision: how fp32 is multiplied, "ieee", "tf32", "bf16x3", "bf16x6", "bf16x9" or "tf32x3"; by default as torch is
    set. For fp32 parameters only.

    Parameters and input are fp32, fp16, bf16 or fp64. Raises ValueError for an activation or a precision that does not
    fit; called, what `triton_gemm.linear` raises.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        checks.activation("Linear", activation)
        checks.precision("Linear", precision, self.weight.dtype)
        self.activation, self.precision = activation, precision

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return api.linear(input, self.weight, self.bias, self.activation, precision=self.precision)

    def extra_repr(self) -> str:
        more = [
            f", {name}={value!r}"
            for name, value in (("activation", self.activation), ("precision", self.precision))
            if value is not None
        ]
        return super().extra_repr() + "".join(more)
