"""`nn.Linear` in the place of a layer that is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triton_gemm.nn import Linear


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
