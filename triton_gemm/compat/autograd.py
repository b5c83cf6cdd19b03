"""torch's autograd: functions of a single level, the tangents of forward differentiation, and the backward that a
thread runs a part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

SingleLevelFunction = torch.autograd.function._SingleLevelFunction
single_level_autograd = enable_single_level_autograd_function

# As torch.autograd.graph.increment_version, of several, without the Python around it.
increment_versions: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version


def grad_enabled() -> bool:
    """Whether autograd records here: not in inference mode, whatever `torch.enable_grad` says within. (Dynamo
    cannot trace a look at that mode.)"""
    return torch.is_grad_enabled() and (torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled())


def dual(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x without its tangent, and its tangent, if it has one: of torch's only level, whose number is 0."""
    primal, tangent = torch._VF._unpack_dual(x, level=0)
    return primal, tangent


def forward_grad_enabled() -> Any:
    """A context in which forward differentiation records again."""
    return forward_ad._set_fwd_grad_enabled(True)


backward_here = torch._C._current_graph_task_id  # the number of the one that this thread runs a part of, or -1


def context_of_backward() -> Context | None:
    """The context in which the backward was started that this thread runs a part of; None where it runs none."""
    key = "context"  # torch.autograd.graph._engine_run_backward keeps it there, for all of the backward's threads
    running = backward_here() >= 0
    found: Context | None = torch._C._get_obj_in_tls(key) if running and torch._C._is_key_in_tls(key) else None
    return found
