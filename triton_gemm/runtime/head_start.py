"""What `enable` has compiled before the first call, while a model is being loaded.

Most models begin with linear layers in 16 bits. Their first calls need the same few kernels, whatever the sizes: the
stand-ins of `background`, and those of few rows.
"""

from __future__ import annotations

import logging
import threading

import torch

from ..compat import when_cuda_begins
from ..hardware.device import device_info
from ..problem import PRODUCT
from . import background, policies

M, N, K = 512, 4096, 4096  # of the layer whose kernels are compiled
log = logging.getLogger("triton_gemm")
_begun = False


def begin() -> None:
    """Once CUDA is initialised, has workers compile the kernels of a layer, in a thread that never raises. It does so
    once in a process, and not where nothing is compiled in the background."""
    global _begun
    if not _begun and background.enabled():
        _begun = True
        when_cuda_begins(threading.Thread(target=_compile, name="triton_gemm head start", daemon=True).start)


def _compile() -> None:
    dtype = torch.get_default_dtype()
    if dtype.itemsize != 2:
        dtype = torch.bfloat16  # which most weights have

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    try:
        gpu = torch.device("cuda", torch.cuda.current_device())
        device = device_info(gpu)
        problem = PRODUCT.problem(matrix(M, K), matrix(N, K).T, matrix(M, N))
        background.compile_ahead(problem, policies.choose(problem, device), gpu, device)
    except Exception as error:  # in no call's way
        log.debug("nothing is compiled before the first call: %s", error)
