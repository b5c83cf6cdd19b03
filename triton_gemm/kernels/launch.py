"""What a kernel asks to be launched, before there are tensors: the one form in which kernels are planned, compiled
ahead of time and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as Descriptor

from ..compat import compiling, from_cache, hash_triton
from ..config import OPTIONS

MAX_SIZE = 2**31 - 512  # of M, N, K and of the grid: kernels count tiles in 32 bits
_is_warm = False
FP8 = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


@dataclass(frozen=True)
class Pointer:
    """The address of an operand: "a", "b", "c", "bias", "a_scale", "b_scale", "workspace", or a temporary's name."""

    operand: str


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor of an operand."""

    operand: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements, the last 1
    block: tuple[int, ...]  # elements: the box that one copy moves
    to_tf32: bool = False  # whether loads round fp32 to tf32
    rows: int | None = None  # that one copy moves along the second dimension, where those are not the box's


@dataclass(frozen=True)
class Scalar:
    """A number given at the call: "alpha" or "beta"."""

    name: str


@dataclass(frozen=True)
class Temporary:
    """A buffer that lives for one call: its shape, contiguous, and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, int, int]
    # All of the kernel's parameters by name, in its order: Pointer, TensorMap, Scalar, or a value.
    arguments: Mapping[str, Any]
    options: Mapping[str, int]  # num_warps, num_stages, maxnreg, and those of every launch, which need not be given
    temporaries: tuple[Temporary, ...] = ()  # what it writes that it or a later launch of the same call reads
    workspace: int = 0  # bytes that it needs of the stream's workspace
    counters: int = 0  # int32 that it needs there, zero before and after it
    # Programs that run at the same time and reach one another's shared memory: so many after one another of the grid's
    # first dimension.
    cluster: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {**OPTIONS, **self.options})

    def programmatic(self) -> Launch:
        """The same launch, as one that may be set up while the one before runs out, where its kernel can be: by a
        constant PDL. For compute capability 9.0 and later."""
        if "PDL" not in self.arguments:
            return self
        options = {**self.options, "launch_pdl": True}
        return replace(self, arguments={**self.arguments, "PDL": True}, options=options)

    def renamed(self, names: Mapping[str, str]) -> Launch:
        """The same launch on other operands, by their names before and after."""
        if not names:
            return self

        def rename(argument: Any) -> Any:
            if isinstance(argument, Pointer | TensorMap) and argument.operand in names:
                return replace(argument, operand=names[argument.operand])
            return argument

        return replace(self, arguments={name: rename(value) for name, value in self.arguments.items()})


def materialise(
    launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The launch's arguments with tensors for its pointers and tensor maps and numbers for its scalars.

    `launch.kernel[launch.grid](**materialise(...), **launch.options)` runs it; on meta tensors it can be captured.
    operands: by name, the launch's temporaries included; KeyError for what is missing.
    """

    found = {}
    for name, argument in launch.arguments.items():
        kind = type(argument)
        if kind is Pointer:
            argument = operands[argument.operand]
        elif kind is Scalar:
            argument = (scalars or {})[argument.name]
        elif kind is TensorMap:
            argument = _descriptor(launch, argument, operands[argument.operand])
        found[name] = argument
    return found


def _descriptor(launch: Launch, argument: TensorMap, x: torch.Tensor) -> Any:
    """The tensor map of x, for Gluon or for Triton."""
    shape, strides, block = [*argument.shape], [*argument.strides], [*argument.block]
    if not getattr(launch.kernel, "is_gluon", bool)():  # which an interpreted kernel does not have
        return Descriptor(x, shape, strides, block)
    element = FP8.get(argument.dtype) or getattr(gl, str(argument.dtype).removeprefix("torch."))
    return TensorDescriptor(x, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, element))


def compiled(launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float] | None = None) -> Any:
    """Triton's compiled kernel of a launch for operands like these, for the active driver's GPU, from its cache where
    that has it; as `materialise`. Threads may compile at once."""
    return compiling(_warmup(launch, operands, scalars))


def compiled_before(
    launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float] | None = None
) -> Any:
    """As `compiled`, where nothing need be compiled for it; else None."""
    return from_cache(launch.kernel.__name__, _warmup(launch, operands, scalars))


def _warmup(
    launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float] | None
) -> Callable[[], Any]:
    hash_triton()  # waits for the background thread instead of hashing a second time
    arguments, options = materialise(launch, operands, scalars), launch.options
    if triton.knobs.runtime.debug and operands["a"].dtype == torch.int8:
        options = {**options, "sanitize_overflow": False}  # sums wrap, and TRITON_DEBUG=1 would assert that they do not

    def warmup() -> Any:
        global _is_warm
        try:
            return launch.kernel.warmup(*arguments.values(), grid=launch.grid, **options)
        finally:
            _is_warm = True

    return warmup


def is_warm() -> bool:
    """Whether Triton was asked for a kernel before. The first time takes up to a second, even for one in its cache:
    Triton hashes its own files and asks ptxas for its version."""
    return _is_warm
