"""Errors against fp64: a model of the same weights in double precision, and norms of differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from perf.models import zoo
from perf.models.zoo import Model

PIECE = 1 << 26  # elements that are compared at a time, since a model's experts are gigabytes
Gradients = dict[str, torch.Tensor]


def twin(model: Model, built: nn.Module, *, tiny: bool, device: str) -> nn.Module:
    """The same weights in fp64. What transformers computes in fp32 whatever the dtype, norms and angles, stays so.
    Experts are multiplied one by one."""
    made = zoo.build(model, tiny=tiny, device=device, dtype=torch.float64, experts="eager")
    made.load_state_dict(built.state_dict())
    return made


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The Frobenius norm of the difference over that of the truth."""
    return error_of_pairs([(found, truth)])


def error_of_gradients(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    """Of all parameters as one vector. A parameter that only one of both has a gradient of makes it infinite."""
    if found.keys() != truth.keys():
        return math.inf
    return error_of_pairs((found[name], truth[name]) for name in truth)


def error_of_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    differences = norms = 0.0
    for found, truth in pairs:
        for a, b in zip(found.reshape(-1).split(PIECE), truth.reshape(-1).split(PIECE), strict=True):
            differences += float((a.float() - b.float()).double().square().sum())
            norms += float(b.double().square().sum())
    return math.sqrt(differences / norms) if norms else math.inf


def gradients(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Gradients:
    """Of the loss, by parameter, in fp32. Each leaves its model at once, so that only one is there in fp64."""
    found: Gradients = {}

    def keep(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        found[name] = parameter.grad.float()
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: keep(name, p))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    model(**inputs).loss.backward()
    for handle in handles:
        handle.remove()
    return found
