"""Preparation: compiling the kernels of linear layers ahead of time, for any number of rows of their inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from . import arguments
from .compat import INTERPRETED
from .hardware.device import DeviceInfo, current_device_info
from .hardware.gpus import named_device
from .layers import Weight, problems_of
from .runtime import native_build
from .runtime.precompile import Precompiled, precompile


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

    It also builds the C++ extension that launches repeated calls, unless it is there, into the user's own cache folder
    (docs/use.md), as `triton-gemm build` does. `cache` does not move it, and TRITON_GEMM_NATIVE=0 leaves it out.

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
        `extension` says why there is no C++ extension, or is None.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no layer or no number of rows, a number is not positive, one of several weights is not 2-D,
            no GPU has that name, or `cache` is empty.
        NotImplementedError: No kernel multiplies the dtype of one of several weights.
        RuntimeError: There is no GPU and none is named, or Triton interprets kernels.
    """
    arguments.callback("prepare", "progress", progress, "done", "total", "what")
    if workers is not None:
        arguments.count("workers", workers, 1)
    cache = None if cache is None else os.fspath(cache)
    if cache == "":
        raise ValueError("prepare(): cache is empty; leave it out for Triton's own folder")
    left_out: list[str] = []
    problems = problems_of(model_or_weights, rows, dtype, bias, left_out)
    report = progress or (lambda done, total, what: None)
    made = precompile(
        list(problems),
        [_device(device)],
        cache=cache,
        workers=workers,
        progress=lambda done, total: report(done, total, "compiled"),
        selecting=lambda done, total: report(done, total, "selected"),
        invariants=problems,
    )
    return replace(made, failures=(*left_out, *made.failures), extension=native_build.ahead())


def _device(device: object) -> DeviceInfo:
    """The GPU to compile for."""
    if isinstance(device, str):
        return named_device(device)
    arguments.instance("prepare", "device", device, DeviceInfo, or_none=True)
    if device is None and not (INTERPRETED or torch.cuda.is_available()):
        raise RuntimeError('prepare(): there is no GPU to compile for; name one, as in device="h200"')
    return device or current_device_info()  # type: ignore[return-value]  # which it is
