"""Modules that run on this package, in place of those of torch.nn."""

from __future__ import annotations

from typing import Any

import torch

from . import arguments
from .arithmetic import Precision
from .functional import api, rules
from .problem import Activation, Gate


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` computed by `triton_gemm.linear`, with the same parameters, initialisation and state dict.

    It maps input [.., in_features] to [.., out_features]. Parameters and input are fp32, fp16, bf16 or fp64. A call
    raises what `triton_gemm.linear` raises.

    Args:
        in_features, out_features, bias, device, dtype: As in `torch.nn.Linear`.
        activation: None, "relu", "gelu" (with erf), "gelu_tanh" or "silu", in the same kernel. `GatedLinear`
            takes a gate, and only `triton_gemm.linear` a residual.
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
        _plain(module, "module")
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
        return super().extra_repr() + _of_calls(self)


class GatedLinear(torch.nn.Module):
    """Two linear layers of one input in one kernel: f(input @ gate.T + gate_bias) * (input @ weight.T + bias).

    It maps input [.., in_features] to [.., out_features] by `triton_gemm.linear` with a gate, and raises what that
    raises. `weight` and `gate` are [out_features, in_features], `bias` and `gate_bias` [out_features] or None. They are
    fp32, fp16, bf16 or fp64, and are initialised as `torch.nn.Linear`'s.

    Args:
        in_features, out_features, bias, device, dtype: As in `torch.nn.Linear`.
        activation: f: silu for "swiglu", gelu for "geglu" and "geglu_tanh", relu for "reglu".
        precision, batch_invariant: As in `Linear`.

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
        activation: Gate = "swiglu",
        precision: Precision | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__()
        up, gate = (torch.nn.Linear(in_features, out_features, bias, device, dtype) for _ in range(2))
        self._take(up, gate, activation, precision, batch_invariant)

    def _take(
        self,
        up: torch.nn.Linear,
        gate: torch.nn.Linear,
        activation: Gate,
        precision: Precision | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        rules.gate_name("GatedLinear", activation)
        rules.precision("GatedLinear", precision, up.weight.dtype)
        arguments.flag("GatedLinear", "batch_invariant", batch_invariant, or_none=True)
        self.in_features, self.out_features = up.in_features, up.out_features
        self.weight, self.bias, self.gate, self.gate_bias = up.weight, up.bias, gate.weight, gate.bias
        self.activation, self.precision, self.batch_invariant = activation, precision, batch_invariant

    @classmethod
    def from_torch(cls, up: torch.nn.Linear, gate: torch.nn.Linear, **how: Any) -> GatedLinear:
        """One with the parameters of two layers, which they share, as `up_proj` and `gate_proj` of Llama's MLP.

        Args:
            up, gate: Layers of equal sizes, of which the second's result is given to the activation.
            how: `activation`, `precision` and `batch_invariant`.

        Raises:
            TypeError: Other modules, or one whose class has a `forward` of its own.
            ValueError: Layers of which only one has a bias, or of other sizes or dtypes; an activation or a precision
                that does not fit.
        """
        for name, module in (("up", up), ("gate", gate)):
            _plain(module, name)
        if up.weight.shape != gate.weight.shape or up.weight.dtype != gate.weight.dtype:
            one, other = (f"{list(x.weight.shape)} of {x.weight.dtype}" for x in (up, gate))
            raise ValueError(f"from_torch(): weights must be alike, not {one} and {other}")
        if (up.bias is None) != (gate.bias is None):
            raise ValueError("from_torch(): only one of the layers has a bias")
        found = cls.__new__(cls)
        torch.nn.Module.__init__(found)
        found._take(up, gate, **{"activation": "swiglu", **how})
        return found.train(up.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return api.linear(
            *(input, self.weight, self.bias, self.activation),
            gate=self.gate,
            gate_bias=self.gate_bias,
            precision=self.precision,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return sizes + _of_calls(self)


def _of_calls(module: Linear | GatedLinear) -> str:
    """What a module's calls say beside its parameters, for its repr."""
    names = "activation", "precision", "batch_invariant"
    return "".join(f", {name}={value!r}" for name in names if (value := getattr(module, name)) is not None)


def _plain(module: torch.nn.Module, name: str) -> None:
    """Refuses for `from_torch` what is no `torch.nn.Linear`, or computes something else."""
    arguments.instance("from_torch", name, module, torch.nn.Linear)
    if type(module).forward not in (torch.nn.Linear.forward, Linear.forward):
        raise TypeError(f"from_torch(): {type(module).__name__} has a forward of its own")
