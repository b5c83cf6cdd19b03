"""Modules in the place of layers that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triton_gemm.nn import GatedLinear, Linear


@pytest.mark.parametrize("bias", [True, False])
def test_it_shares_the_parameters_of_a_layer(bias: bool) -> None:
    layer = torch.nn.Linear(5, 3, bias, dtype=torch.float64).eval()
    layer.weight.requires_grad_(False)
    ours, x = Linear.from_torch(layer, activation="relu"), torch.randn(4, 5, dtype=torch.float64)
    assert ours.weight is layer.weight and ours.bias is layer.bias and not ours.training
    torch.testing.assert_close(ours(x), torch.relu(layer(x)))
    assert [*ours.state_dict()] == [*layer.state_dict()] and "in_features=5, out_features=3" in repr(ours)
    assert Linear.from_torch(ours).weight is layer.weight and Linear.from_torch(ours).activation is None


@pytest.mark.parametrize(
    ("module", "how", "kind", "says"),
    [
        (torch.nn.Bilinear(2, 2, 2), {}, TypeError, "argument 'module' must be Linear, not Bilinear"),
        (type("Lora", (torch.nn.Linear,), {"forward": print})(2, 2), {}, TypeError, "Lora has a forward of its own"),
        (torch.nn.Linear(2, 2), {"activation": "swiglu"}, ValueError, "swiglu takes a second weight"),
    ],
)
def test_what_it_cannot_replace(module: Any, how: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        Linear.from_torch(module, **how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gated_layer_shares_the_parameters_of_two(dtype: torch.dtype) -> None:
    up, gate = (torch.nn.Linear(32, 16, dtype=dtype) for _ in range(2))
    ours, x = GatedLinear.from_torch(up, gate), torch.randn(4, 32, dtype=dtype)
    assert ours.weight is up.weight and ours.gate_bias is gate.bias
    assert [*ours.state_dict()] == ["weight", "bias", "gate", "gate_bias"]
    torch.testing.assert_close(ours(x), torch.nn.functional.silu(gate(x)) * up(x), atol=0.02, rtol=0.02)
    ours(x).sum().backward()
    assert up.weight.grad is not None and gate.weight.grad is not None
    assert repr(ours) == "GatedLinear(in_features=32, out_features=16, bias=True, activation='swiglu')"


def test_a_gated_layer_of_its_own() -> None:
    torch.manual_seed(3)
    ours = GatedLinear(8, 6, bias=False, dtype=torch.float64, activation="reglu")
    torch.manual_seed(3)
    up, gate = (torch.nn.Linear(8, 6, bias=False, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), torch.relu(gate(x)) * up(x))


@pytest.mark.parametrize(
    ("up", "gate", "how", "kind", "says"),
    [
        ((2, 2), (2, 3), {}, ValueError, r"weights must be alike, not \[2, 2\]"),
        ((2, 2), (2, 2, False), {}, ValueError, "only one of the layers has a bias"),
        ((2, 2), (2, 2), {"activation": "silu"}, ValueError, 'must be "swiglu", the gate of silu'),
        ((2, 2), (2, 2), {"precision": "fast"}, ValueError, "precision must be one of ieee"),
    ],
)
def test_what_makes_no_gated_layer(up: Any, gate: Any, how: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        GatedLinear.from_torch(torch.nn.Linear(*up), torch.nn.Linear(*gate), **how)
    with pytest.raises(TypeError, match="argument 'gate' must be Linear, not Bilinear"):
        GatedLinear.from_torch(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2))  # type: ignore[arg-type]
