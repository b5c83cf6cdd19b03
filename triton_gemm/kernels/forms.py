"""Which forms kernels have: those that the installed Triton compiles, or those of kits, which Triton 3.9 compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..compat import CLUSTERS

_of_kits: ContextVar[bool] = ContextVar("triton_gemm_forms_of_kits", default=False)


def clusters() -> bool:
    """Whether kernels may use what Triton 3.9 added: clusters, tiles copied in part, and wgmma of any width."""
    return CLUSTERS or _of_kits.get()


@contextmanager
def of_kits() -> Iterator[None]:
    """A block in which kernels have the forms of kits, whichever Triton is installed."""
    token = _of_kits.set(True)
    try:
        yield
    finally:
        _of_kits.reset(token)
