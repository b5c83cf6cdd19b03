"""Routes torch's products to triton_gemm in processes that import torch alone, where TRITON_GEMM_USE=1 is set.

torch calls `autoload` at the end of `import torch`, as an entry point of the group `torch.backends`
(pytorch/pytorch#122468): also in processes that a serving engine or a launcher starts, in whose code nobody can write
`triton_gemm.enable()`. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off for all packages.

This is no part of the package, whose import takes seconds with Triton's: without the variable nothing is imported, and
with it nothing before CUDA is initialised, which workers that only load data never do. So the one private name that is
used is here and not in `triton_gemm.compat`.
"""

from __future__ import annotations

import os

VARIABLE = "TRITON_GEMM_USE"


def autoload() -> None:
    """Has `triton_gemm.enable()` called when this process initialises CUDA, if TRITON_GEMM_USE is 1. Never raises, as
    `import torch` would fail: what goes wrong is a RuntimeWarning."""
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    if value != "1":
        return _warn(f"{VARIABLE}={value} is neither 0 nor 1")
    try:
        import torch

        torch.cuda._lazy_call(_enable)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


def _enable() -> None:
    """Within torch's lock of CUDA's initialisation, which nothing here may take again, as `torch.manual_seed` does."""
    try:
        import triton_gemm

        triton_gemm.enable()
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


def _warn(why: str) -> None:
    import sys
    import warnings

    text = f"products stay torch's, as triton_gemm is not enabled: {why}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:  # warnings are errors here
        print(text, file=sys.stderr)
