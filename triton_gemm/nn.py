"""Modules that run on this package, in place of those of torch.nn."""

from __future__ import annotations

from typing import Any

import torch

from . import arguments
from .arithmetic import Precision
from .functional import api, rules
from .problem import Activation


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` computed by `triton_gemm.linear`, with the same parameters, initialisation and state dict.

    It maps input [.., in_features] to [.., out_features]. Parameters and input are fp32, fp16, bf16 or fp64. A call
    raises what `triton_gemm.linear` raises.

    Args:
        in_features, out_features, bias, device, dtype: As in `torch.nn.Linear`.
        activation: None, "relu", "gelu" (with erf), "gelu_tanh" or "silu", in the same kernel. Only
            `triton_gemm.linear` takes a gate or a residual.
        precision: As in `triton_gemm.matmul`, for fp32 parameters only.
        batch_invariant: As in `triton_gemm.matmul`. Rows are all leading dimensions of the input together.

    Raises:
        ValueError: An activation or a precision that does not fit.
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
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        rules.activation("Linear", activation)
        rules.precision("Linear", precision, self.weight.dtype)
        arguments.flag("Linear", "batch_invariant", batch_invariant, or_none=True)
        self.activation, self.precision, self.batch_invariant = activation, precision, batch_invariant

    @classmethod
    def from_torch(cls, module: torch.nn.Linear, **how: Any) -> Linear:
        """One with the parameters of a `torch.nn.Linear`, which they share. Hooks and parametrizations stay behind.

        Args:
            module: The layer that it takes the place of.
            how: `activation`, `precision` and `batch_invariant`.

        Raises:
            TypeError: Another module, or one whose class has a `forward` of its own.
            ValueError: An activation or a precision that does not fit.
        """
        arguments.instance("from_torch", "module", module, torch.nn.Linear)
        if type(module).forward not in (torch.nn.Linear.forward, cls.forward):
            raise TypeError(f"from_torch(): {type(module).__name__} has a forward of its own")
        bias, dtype = module.bias is not None, module.weight.dtype
        found = cls(module.in_features, module.out_features, bias, "meta", dtype, **how)
        found.weight, found.bias = module.weight, module.bias
        return found.train(module.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        precision, invariant = self.precision, self.batch_invariant
        return api.linear(
            input, self.weight, self.bias, self.activation, precision=precision, batch_invariant=invariant
        )

    def extra_repr(self) -> str:
        more = [
            f", {name}={value!r}"
            for name in ("activation", "precision", "batch_invariant")
            if (value := getattr(self, name)) is not None
        ]
        return super().extra_repr() + "".join(more)
