"""Modules that run on this package: drop-ins for those of torch.nn."""

from __future__ import annotations

from typing import Any

import torch

from . import api, checks


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with `triton_gemm.linear` under it: the same parameters, initialisation and state dict.

    activation: None, or what follows the layer, "relu", "gelu" (erf), "gelu_tanh" or "silu", which is computed with
    it; precision: as in `triton_gemm.matmul`, of fp32 weights. Raises as `triton_gemm.linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        precision: str | None = None,
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
