"""The differences between the Tritons this package runs on (3.6 to 3.9) and their interpreter, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Whether kernels made from here on run in Triton's interpreter; it is read when triton.jit decorates.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot_operand(x):
    """x, or in the interpreter the fp32 value of bf16 or fp8: NumPy has neither, multiplies bf16's bits
    (triton#11584), and casts from them flush subnormals and lose the NaN of float8_e4m3fn."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif _INTERPRETED and x.dtype == tl.float8e5:  # the upper half of an fp16
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif _INTERPRETED and x.dtype == tl.float8e4nv:  # an fp16 without the last bits, and with another bias
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    else:
        return x


@triton.jit
def number(x, dtype: tl.constexpr):
    """A launch's scalar in dtype; in the interpreter it is Python's, which any dtype goes with."""
    if _INTERPRETED:
        return x
    else:
        return tl.cast(x, dtype)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x rounded to nearest even in dtype; the interpreter's own cast to bf16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)  # a NaN must not carry into the exponent
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def reciprocal(x):
    """1 / x of fp32 to 1 ulp, for x between 1 and 2^126: one instruction, and none for the ends of fp32's range."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x):
    """2^x of fp32 to 2 ulp, 0 where that would be subnormal: one instruction."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(pointers):
    """Asks for the sectors of global memory around the pointers to be fetched into L2. Nothing in the interpreter."""
    if not _INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1)


# Triton 3.9 renamed Gluon's asynchronous copies, and what gives shared memory another shape.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_shared: Any = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, Sequence[Any]], None]:
    """`launch(stream, arguments)` of a compiled kernel: Triton's own C function, without the Python around it.

    arguments: all of the kernel's parameters in order; pointers as integers, and for each descriptor its tensor map,
    shape and strides one after another. The current device must be the one it was compiled on. Hooks that are set on
    launches (profilers) are called.
    """
    compiled._init_handles()  # `run` alone may find another thread half way through loading the binary
    run = compiled.run
    assert run.global_scratch_size == 0 and run.profile_scratch_size == 0
    launch = run.launch
    if launch.__name__ == "inner":  # Triton wraps kernels with descriptors in a slow encoding of their tensor maps
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, packed = compiled.function, compiled.packed_metadata
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl

    def hooks(stream: int, arguments: Sequence[Any]) -> tuple[Any, Any, Any]:
        if not (enter.calls or leave.calls):
            return None, None, None
        return compiled.launch_metadata(grid, stream, *arguments), enter, leave

    if not hasattr(run, "arg_annotations"):  # Triton 3.6

        def call_3_6(stream: int, arguments: Sequence[Any]) -> None:
            launch(*grid, stream, function, cooperative, pdl, None, None, packed, *hooks(stream, arguments), *arguments)

        return call_3_6
    annotations, signature = run.arg_annotations, run.kernel_signature

    def call(stream: int, arguments: Sequence[Any]) -> None:
        launch(
            *(*grid, stream, function, cooperative, pdl, packed, *hooks(stream, arguments)),
            *(None, None, annotations, signature, arguments),
        )

    return call


TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: TMA rounds fp32 to tf32 on its way (as CUTLASS has it do)


def tensor_maps(compiled: Any) -> list[Callable[[int, Sequence[int], Sequence[int], bool], Any]]:
    """For each descriptor among a compiled kernel's parameters, `encode(address, shape, strides, to_tf32)`: its tensor
    map."""
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor

    def encoder(meta: dict[str, Any]) -> Callable[[int, Sequence[int], Sequence[int], bool], Any]:
        element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        return lambda address, shape, strides, to_tf32: fill(
            *(address, meta["swizzle"], meta["elem_size"], TFLOAT32 if to_tf32 else element),
            *(meta["block_size"], shape, strides, 0),
        )

    return [encoder(meta) for meta in compiled.metadata.tensordesc_meta or ()]
