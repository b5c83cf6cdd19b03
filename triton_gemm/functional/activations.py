"""torch's own activations, by the names of `activation=`."""

from __future__ import annotations

from typing import Any

import torch

ACTIVATIONS: dict[str, Any] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
