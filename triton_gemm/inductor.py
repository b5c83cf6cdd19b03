"""`matmul` as a candidate of torch.compile's autotuning: `register`, `unregister`.

    import triton_gemm.inductor
    triton_gemm.inductor.register()
    fast = torch.compile(model, mode="max-autotune-no-cudagraphs")

Inductor then times this package's products, next to torch's own and to its templates, and compiles the fastest in. No
other function of the package needs this module, which is imported by itself: Inductor takes seconds to import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import __version__
from .arithmetic import FLOATING
from .compat import INTERPRETED, free_in_children, offer_to_inductor
from .functional import matrices
from .hardware.device import device_info
from .problem import Request
from .runtime.background import first_calls

DEVICE = "cpu" if INTERPRETED else "cuda"
TAG = f"[triton_gemm {__version__}]"  # in the keys of torch's caches of compiled graphs

_lock = free_in_children(threading.RLock())  # a handler of signals may register, too
_take_back: Callable[[], None] | None = None


def register() -> None:
    """Offers the package's mm, addmm, bmm and baddbmm to Inductor's autotuning (`mode="max-autotune"` and the like).

    It does so wherever Inductor times torch's own: for floating dtypes that matmul takes, on CUDA from compute
    capability 8.0 on, in graphs that Python runs. Call it before the first compiled call; a second call does nothing.

    It adds to `torch.compiler.config.cache_key_tag`, so that compiled graphs are cached apart from those for which
    nothing was offered. Another process that registers finds these graphs, and does not tune again. Newer versions of
    torch keep their settings for each thread: register in each thread that compiles.

    Raises:
        RuntimeError: torch's Inductor is not as expected.
    """
    global _take_back
    with _lock:
        if _take_back is None:
            take_back = offer_to_inductor(KERNELS, TAG, _takes)
            if _take_back is not None:  # a handler of signals has registered while Inductor was imported
                take_back(), _take_back()
                take_back = offer_to_inductor(KERNELS, TAG, _takes)
            _take_back = take_back
        tag = torch.compiler.config.cache_key_tag
        if TAG not in tag:
            torch.compiler.config.cache_key_tag = tag + TAG


def unregister() -> None:
    """Undoes `register`. Compiled functions stay as they are."""
    global _take_back
    with _lock:
        take_back, _take_back = _take_back, None
        if take_back is not None:
            take_back()
        torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(TAG, "")


def _takes(operands: Sequence[Any], layout: Any, scalars: Mapping[str, Any]) -> bool:
    """Whether the product can be computed here: Inductor's operands, the layout of the result, and alpha and beta."""
    device, dtype = layout.device, layout.dtype
    if device.type != DEVICE or dtype not in FLOATING or device_info(device).capability < (8, 0):
        return False
    if any(x.get_device() != device or x.get_dtype() != dtype for x in operands):
        return False
    return all(type(value) in (int, float) for value in scalars.values())


def _product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """out = a @ b, as compiled code calls it: what torch checks was checked when that was traced. On the product's own
    kernel from the first call on, as Inductor times it."""
    with first_calls("own kernel"):
        matrices.compute_into(out, matrices.Operands(a, b), Request())
    return out


def _sum(
    input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, alpha: float = 1, beta: float = 1
) -> torch.Tensor:
    """out = beta input + alpha a @ b."""
    if input.dim() == 2 and input.stride(0) == 0:
        input = input[0]  # a bias that Inductor has expanded
    with first_calls("own kernel"):
        matrices.compute_into(out, matrices.Operands(a, b, input), Request(float(alpha), float(beta)))
    return out


# By the name of torch's own.
KERNELS: dict[str, Callable[..., torch.Tensor]] = {"mm": _product, "bmm": _product, "addmm": _sum, "baddbmm": _sum}
