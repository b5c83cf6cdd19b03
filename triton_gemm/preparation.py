"""Preparation: compiling the kernels of linear layers ahead of time, for any number of rows of their inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from . import arguments, nn
from .arithmetic import DTYPES, FLOATING, result_dtype
from .compat import INTERPRETED, override_functions
from .functional import rules
from .hardware.device import DeviceInfo, current_device_info
from .hardware.gpus import named_device
from .operands import matrix_without_memory
from .problem import GemmProblem, Request
from .runtime import native_build
from .runtime.precompile import Precompiled, precompile

Weight = torch.Tensor | tuple[int, int]


def prepare(
    model_or_weights: torch.nn.Module | Iterable[Weight],
    rows: int | Iterable[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    device: DeviceInfo | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Precompiled:
    """Compiles what linear layers run on with these numbers of rows into Triton's cache, without launching anything.

    A model, or sizes of weights::

        triton_gemm.prepare(model, range(1, 513))
        triton_gemm.prepare([(28672, 4096), (4096, 14336)], [1, 8, 2048], device="h200", cache="/opt/triton-cache")

    These are the GEMMs of forward passes, by `triton_gemm.linear`, `triton_gemm.nn.Linear`, and torch's linear under
    `use()`: of contiguous inputs [.., K] that are not 1-D and have the weights' dtype, under the policy that counts
    here. For layers with an activation they are those without gradients. Where they run, addresses of weights and
    biases are multiples of 16 bytes, as torch's allocations are. Nothing may be launched meanwhile.

    Args:
        model_or_weights: A module, each torch.nn.Linear of which counts, with its weight's dtype and its bias; or
            weights, each a tensor [N, K] or a pair (N, K). Tensors and parameters may be on any device, `meta` too.
            Layers of a module that no kernel here takes, as quantized ones, are left out, and named in `failures`.
        rows: Numbers of rows M of the inputs, all leading dimensions together; or one such number.
        dtype: Of the weights that are pairs.
        bias: Whether the layers of weights that are no module's have a bias.
        device: The GPU to compile for, which need not be here: a `DeviceInfo`, or a name, as "h200" or "sm_90". None:
            the current one.
        cache: The folder that TRITON_CACHE_DIR will name. None: Triton's own.
        workers: How many threads compile. None: one for each core.
        progress: Called with (done, total, "selected") for GEMMs whose kernels are chosen, ten times a second at most,
            then with (done, total, "compiled") for each kernel.

    Returns:
        How many kernels there are and how many of them were compiled; `failures` has a sentence for each that was not.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no layer or no number of rows, a number is not positive, one of several weights is not 2-D,
            or no GPU has that name.
        NotImplementedError: No kernel multiplies the dtype of one of several weights.
        RuntimeError: There is no GPU and none is named, or Triton interprets kernels.
    """
    arguments.callback("prepare", "progress", progress, "done", "total", "what")
    if workers is not None:
        arguments.count("workers", workers, 1)
    cache = None if cache is None else os.fspath(cache)
    left_out: list[str] = []
    problems = problems_of(model_or_weights, rows, dtype, bias, left_out)
    told = progress or (lambda done, total, what: None)
    made = precompile(
        list(problems),
        [_device(device)],
        cache=cache,
        workers=workers,
        progress=lambda done, total: told(done, total, "compiled"),
        selecting=lambda done, total: told(done, total, "selected"),
        invariants=problems,
    )
    native_build.ahead()  # so that the first process has it; where there is none, calls say so
    return replace(made, failures=(*left_out, *made.failures))


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
        b = torch.empty_strided(layer.shape, layer.strides, dtype=layer.dtype, device="meta").t()
        for M in counts:
            a = matrix_without_memory((M, b.shape[0]), "n", layer.dtype)
            c = matrix_without_memory((M, b.shape[1]), "n", result_dtype(layer.dtype))
            found.setdefault(layer.request.problem(a, b, c), set()).add(layer.request.batch_invariant)
    return found


class _Layer(NamedTuple):
    """What linear layers have in common that run on the same kernels. shape, strides: of the weight [N, K]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    request: Request


def _of_model(model: torch.nn.Module, left_out: list[str]) -> Iterator[_Layer]:
    """The linear layers of a module that launch anything."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            try:
                yield from _of_module(module)
            except Exception as error:  # whatever a library has made of it, the others are prepared
                why = str(error).removeprefix("prepare(): ")
                left_out.append(f"{name or type(module).__name__!r} is left out: {why}")


def _of_module(module: torch.nn.Linear) -> Iterator[_Layer]:
    weight, bias = module.weight, module.bias  # once: a parametrization computes them
    if override_functions(weight, bias):
        raise NotImplementedError(f"its weight, of {type(weight).__name__}, or its bias has a linear of its own")
    request = Request(bias=None if bias is None else "n")
    if isinstance(module, nn.Linear):
        request = request._replace(
            activation=module.activation, precision=module.precision, batch_invariant=module.batch_invariant
        )
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


def _device(device: object) -> DeviceInfo:
    """The GPU to compile for."""
    if isinstance(device, str):
        return named_device(device)
    arguments.instance("prepare", "device", device, DeviceInfo, or_none=True)
    if device is None and not (INTERPRETED or torch.cuda.is_available()):
        raise RuntimeError('prepare(): there is no GPU to compile for; name one, as in device="h200"')
    return device or current_device_info()  # type: ignore[return-value]  # which it is
