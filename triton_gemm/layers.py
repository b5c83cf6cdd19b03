"""The GEMMs of linear layers: of a model, or of sizes of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from . import arguments, nn
from .arithmetic import DTYPES, FLOATING, result_dtype
from .compat import override_functions
from .functional import matrices, rules
from .operands import matrix_without_memory
from .problem import GATES, GemmProblem, Request

Weight = torch.Tensor | tuple[int, int]


def problems_of(
    model_or_weights: torch.nn.Module | Iterable[Weight],
    rows: int | Iterable[int],
    dtype: torch.dtype,
    bias: bool,
    left_out: list[str] | None = None,
) -> dict[GemmProblem, set[bool | None]]:
    """The GEMMs of `prepare`, and what their layers say of batch invariance; with its errors. left_out: gets a sentence
    for each layer of a module that is left out."""
    left_out = [] if left_out is None else left_out
    counts = arguments.counts("prepare", "rows", rows)
    arguments.flag("prepare", "bias", bias)
    arguments.dtype(dtype, "dtype")
    if isinstance(model_or_weights, torch.nn.Module):
        layers = dict.fromkeys(_of_model(model_or_weights, left_out))
    else:
        layers = dict.fromkeys(_of_weights(model_or_weights, dtype, bias))
    if not (layers or left_out):
        raise ValueError(f"prepare(): there are no linear layers in this {type(model_or_weights).__name__}")
    found: dict[GemmProblem, set[bool | None]] = {}
    for layer in layers:
        for M in counts:
            found.setdefault(layer.problem(M), set()).add(layer.request.batch_invariant)
    return found


def used_by(model: torch.nn.Module, left_out: list[str]) -> dict[GemmProblem, int]:
    """The GEMMs of a module's linear layers for one row, and how many layers each is of. left_out: as in
    `problems_of`."""
    return Counter(layer.problem(1) for layer in _of_model(model, left_out))


class _Layer(NamedTuple):
    """What linear layers have in common that run on the same kernels."""

    shape: tuple[int, ...]  # of the weight [N, K]
    strides: tuple[int, ...]  # of the weight, in elements
    dtype: torch.dtype
    request: Request

    def problem(self, M: int) -> GemmProblem:
        b = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta").t()
        a = matrix_without_memory((M, b.shape[0]), "n", self.dtype)
        return self.request.problem(a, b, matrix_without_memory((M, b.shape[1]), "n", result_dtype(self.dtype)))


def _of_model(model: torch.nn.Module, left_out: list[str]) -> Iterator[_Layer]:
    """The linear layers of a module that launch anything."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, nn.GatedLinear)):
            try:
                yield from _of_module(module)
            except Exception as error:  # whatever a library has made of it, the others are prepared
                why = str(error).removeprefix("prepare(): ")
                left_out.append(f"{name or type(module).__name__!r} is left out: {why}")


def _of_module(module: torch.nn.Linear | nn.GatedLinear) -> Iterator[_Layer]:
    weight, bias = module.weight, module.bias  # once: a parametrization computes them
    if override_functions(weight, bias):
        raise NotImplementedError(f"its weight, of {type(weight).__name__}, or its bias has a linear of its own")
    request = Request(bias=None if bias is None else "n")
    if isinstance(module, nn.Linear):
        request = request._replace(activation=module.activation)
    if isinstance(module, (nn.Linear, nn.GatedLinear)):
        request = request._replace(precision=module.precision, batch_invariant=module.batch_invariant)
    if isinstance(module, nn.GatedLinear) and matrices.gates_in_one_kernel(weight.dtype, request):
        request = request._replace(gate=True, activation=GATES[module.activation])
    yield from _of_tensor("its weight", weight, request)


def _of_weights(weights: object, dtype: torch.dtype, bias: bool) -> Iterator[_Layer]:
    """The layers of tensors and pairs."""
    if isinstance(weights, torch.Tensor):
        raise TypeError("prepare(): argument 'model_or_weights' must be a Module or several weights, not one Tensor")
    arguments.several("prepare", "model_or_weights", weights)
    request = Request(bias="n" if bias else None)
    for number, weight in enumerate(weights):  # type: ignore[arg-type, var-annotated]  # which can be gone through
        if isinstance(weight, (tuple, list)) and len(weight) == 2:
            for name, size in zip("NK", weight, strict=True):
                arguments.count(name, size, 1)
            weight = matrix_without_memory((int(weight[0]), int(weight[1])), "n", dtype)
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"prepare(): weight {number} must be a Tensor [N, K] or a pair (N, K), not {weight!r}")
        yield from _of_tensor(f"weight {number}", weight, request)


def _of_tensor(what: str, weight: torch.Tensor, request: Request) -> Iterator[_Layer]:
    """The layer of a weight, which `what` names; nothing where it launches nothing."""
    if weight.dim() != 2:
        raise ValueError(f"prepare(): {what} must be 2-D, [N, K], not {weight.dim()}-D")
    rules.strided("prepare", weight)
    dtypes = DTYPES if request.bias is request.activation is None else FLOATING
    if weight.dtype not in dtypes:
        raise NotImplementedError(f"prepare(): {what} is {weight.dtype}; linear takes {rules.names(dtypes)} here")
    rules.precision("prepare", request.precision, weight.dtype)
    if weight.shape[0]:
        yield _Layer(tuple(weight.shape), weight.stride(), weight.dtype, request)
