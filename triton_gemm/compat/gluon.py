"""Gluon, which some kernels are written in: its names, which Triton 3.8 and 3.9 changed, and what 3.9 alone has."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed Gluon's asynchronous copies, and what gives shared memory another shape.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_shared: Any = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
# Triton 3.9 gives inline PTX the addresses of shared memory, which clusters need.
CLUSTERS: bool = hasattr(gl, "inline_asm")


@triton.constexpr_function
def tensor_map_parameter(kernel: str, number: int, dimensions: int) -> str:
    """What PTX calls a kernel's tensor map of that number. Its tensor maps are its first parameters, all of so many
    dimensions, and each is followed by its shape and strides."""
    return f"{kernel}_param_{number * (1 + 2 * dimensions)}"


tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def _aggregate(cls: type) -> Any:
    """`gluon.aggregate` before Triton 3.8: a record of values and constants that kernels pass on as one argument. It is
    made of its fields, by position or by name, and fields that are plain numbers or strings become constants."""
    fields = typing.get_type_hints(cls)

    def init(self: Any, *values: Any, **named: Any) -> None:
        for name, value in (dict(zip(fields, values, strict=False)) | named).items():
            setattr(self, name, value if isinstance(value, gl.base_value) else gl.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__annotations__ = fields
    cls.__init__ = init  # type: ignore[misc]
    return tl.core._aggregate(cls)


if TYPE_CHECKING:
    from dataclasses import dataclass as aggregate  # which type checkers know
else:
    aggregate = getattr(gluon, "aggregate", None) or _aggregate
