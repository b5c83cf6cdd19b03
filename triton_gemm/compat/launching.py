"""Launching compiled kernels: Triton's own C functions that launch, and that encode tensor maps, without the Python
that Triton puts around them. They differ in their arguments from version to version."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia import driver

from .locks import free_in_children

# Held while a binary is loaded, which disturbs a capture. Triton's hooks on that and handlers of signals may load, too.
loading = free_in_children(threading.RLock())


def launcher(compiled: Any, grid: tuple[int, int, int], cluster: int = 1) -> Callable[[int, Sequence[Any]], None]:
    """`launch(stream, arguments)` of a compiled kernel: Triton's own C function, without the Python around it.

    arguments: all of the kernel's parameters in order, but those `left_out`; pointers as integers, and for each
    descriptor its tensor map, shape and strides one after another. The current device must be the one it was compiled
    on. Hooks that are set on launches (profilers) are called. cluster: programs of a cluster, which Triton launches for
    kernels of several CTAs a program, and no less for those of one.
    """
    with loading:  # Triton shows a binary as loaded before all of its handles are set
        compiled._init_handles()
    run = compiled.run
    assert run.global_scratch_size == 0 and run.profile_scratch_size == 0
    launch = run.launch
    if launch.__name__ == "inner":  # Triton wraps kernels with descriptors in a slow encoding of their tensor maps
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, packed = compiled.function, compiled.packed_metadata
    if cluster > 1:
        num_warps, _, shared = packed
        packed, grid = (num_warps, cluster, shared), (grid[0] // cluster, *grid[1:])
    runtime = triton.knobs.runtime  # whose hooks may be added to, and replaced, at any time
    x, y, z, cooperative, pdl = *grid, run.launch_cooperative_grid, run.launch_pdl

    def hooks(stream: int) -> tuple[Any, Any, Any]:
        enter, leave = _chain(runtime.launch_enter_hook), _chain(runtime.launch_exit_hook)
        data = compiled.launch_metadata(grid, stream) if enter or leave else None
        return data, enter, leave

    if not hasattr(run, "arg_annotations"):  # Triton 3.6

        def call_3_6(stream: int, arguments: Sequence[Any]) -> None:
            launch(x, y, z, stream, function, cooperative, pdl, None, None, packed, *hooks(stream), *arguments)

        return call_3_6
    signature = run.kernel_signature
    annotations = (driver.PyKernelArg(nested_tuple=None, type=driver.ARG_KERNEL),) * len(signature)

    def call(stream: int, arguments: Sequence[Any]) -> None:
        launch(
            x, y, z, stream, function, cooperative, pdl, packed, *hooks(stream), None, None,
            annotations, signature, arguments,
        )  # fmt: skip

    return call


def _chain(hook: Any) -> Any:
    """What Triton's launcher is to call: a chain with hooks, or what a user has assigned in its place; else None."""
    return hook if getattr(hook, "calls", hook) else None


def left_out(compiled: Any) -> set[str]:
    """Names of a compiled kernel's parameters that `launcher` does not take: what the compiler knew, which no launch
    reads. Triton 3.6 has all of them given."""
    if not hasattr(driver, "annotate_arguments"):
        return set()
    return {name for name, type in compiled.src.signature.items() if type == "constexpr"}


TENSOR_MAP = 128  # bytes of the driver's CUtensorMap
TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: TMA rounds fp32 to tf32 on its way (as CUTLASS has it do)


def tensor_maps(compiled: Any) -> list[Callable[..., Any]]:
    """For each descriptor among a compiled kernel's parameters, `encode(address, shape, strides, to_tf32, rows)`: its
    tensor map; rows: along the last dimension but one that one copy moves, where those are not the kernel's box's."""
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor

    def encoder(meta: dict[str, Any]) -> Callable[..., Any]:
        element = driver.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]

        def encode(
            address: int, shape: Sequence[int], strides: Sequence[int], to_tf32: bool = False, rows: int | None = None
        ) -> Any:
            *outer, box_rows, columns = meta["block_size"]
            return fill(
                *(address, meta["swizzle"], meta["elem_size"], TFLOAT32 if to_tf32 else element),
                *([*outer, rows or box_rows, columns], shape, strides, 0),
            )

        return encode

    return [encoder(meta) for meta in compiled.metadata.tensordesc_meta or ()]


class MachineCode(NamedTuple):
    """A compiled kernel, and all that a launch needs to know of it.

    symbol: the function's name; warps: of a CTA; ctas: of a program; shared: bytes of a CTA; cooperative, pdl: how it
    is launched; types: of the parameters in their order, as Triton names them, or "tensordesc"; boxes: of each of these
    swizzle, bytes of an element, Triton's number of its type, and the box's sides; code: a cubin.
    """

    symbol: str
    warps: int
    ctas: int
    shared: int
    cooperative: bool
    pdl: bool
    types: tuple[str, ...]
    boxes: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    code: bytes


def machine_code(compiled: Any) -> MachineCode:
    """The record of a compiled kernel. No GPU is needed. ValueError for a kernel that needs Triton's scratch memory,
    which launches here do not pass."""
    of = compiled.metadata
    if of.global_scratch_size or of.profile_scratch_size:
        raise ValueError(f"{of.name} wants scratch memory")
    warps, ctas, shared = compiled.packed_metadata
    boxes = ((x["swizzle"], x["elem_size"], x["elem_type"], tuple(x["block_size"])) for x in of.tensordesc_meta or ())
    how = bool(of.launch_cooperative_grid), bool(of.launch_pdl)
    types = tuple("tensordesc" if str(x).startswith("tensordesc") else str(x) for x in compiled.src.signature.values())
    return MachineCode(of.name, warps, ctas, shared, *how, types, tuple(boxes), compiled.asm["cubin"])


class _DriverLaunch(NamedTuple):
    """What `launcher` has the driver launch. grid: in programs, of which `cluster` are a cluster; shared: bytes."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    cooperative: bool
    pdl: bool


def driver_launch(compiled: Any, grid: tuple[int, int, int], cluster: int = 1) -> _DriverLaunch:
    """Of a compiled kernel for which `launcher` was called with the same grid and cluster."""
    num_warps, num_ctas, shared = compiled.packed_metadata
    x, y, z = grid
    if cluster > 1:
        x, num_ctas = x // cluster, cluster
    run = compiled.run
    cooperative, pdl = bool(run.launch_cooperative_grid), bool(run.launch_pdl)
    return _DriverLaunch(compiled.function, (x * num_ctas, y, z), 32 * num_warps, shared, num_ctas, cooperative, pdl)


def takes(compiled: Any, types: Sequence[str]) -> bool:
    """Whether these are what `launcher` has a compiled kernel launched with, as Triton names types of parameters."""
    described = triton.runtime.driver.active.utils.build_signature_metadata(list(types))
    return bool(described == compiled.run.kernel_signature)


def bytes_of(tensor_map: Any) -> bytes:
    """Those of a tensor map that Triton has encoded: it keeps them at the end of its object, by their alignment."""
    return ctypes.string_at(id(tensor_map) + type(tensor_map).__basicsize__ - TENSOR_MAP, TENSOR_MAP)
