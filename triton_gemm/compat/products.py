"""torch's products of 8-bit matrices, which have private names."""

from __future__ import annotations

from collections.abc import Callable

import torch

int_mm: Callable[..., torch.Tensor] = torch._int_mm
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
