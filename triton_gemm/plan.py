"""The one launch path: from checked operands to the rung that multiplies them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch

from .compat import INTERPRETED
from .device import INTERPRETER, device_info
from .problem import GemmProblem
from .select import RUNGS, Selection, select

selection_for = lru_cache(maxsize=4096)(select)


def plan(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Selection:
    """What `multiply(a, b, c)` would run."""
    return selection_for(GemmProblem.of(a, b, c), INTERPRETER if INTERPRETED else device_info(a.device))


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """c = a @ b on the tensors' device and its current stream, without tuning and without waiting."""
    selection = plan(a, b, c)
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        RUNGS[selection.kernel].launch(a, b, c, config=selection.config)
