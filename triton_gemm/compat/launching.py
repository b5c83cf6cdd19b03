"""What Triton has compiled, as machine code that the CUDA driver takes, and Triton's hooks on loads and launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia import driver
from triton.compiler.compiler import LazyDict

from .locks import free_in_children

# Held while a binary is loaded, which disturbs a capture. Triton's hooks on that and handlers of signals may load, too.
loading = free_in_children(threading.RLock())


class MachineCode(NamedTuple):
    """A compiled kernel, and all that a launch needs to know of it."""

    symbol: str  # the function's name
    warps: int  # of a CTA
    ctas: int  # of a program
    shared: int  # bytes of a CTA
    cooperative: bool  # whether it is a cooperative launch
    pdl: bool  # whether it is a programmatic one, which may be set up while the launch before runs out
    types: tuple[str, ...]  # of the parameters in their order, as Triton names them, or "tensordesc"
    # Of each "tensordesc" the swizzle, bytes of an element, the driver's number of its type, and the box's sides.
    boxes: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    code: bytes  # a cubin


def machine_code(compiled: Any) -> MachineCode:
    """The record of a compiled kernel. No GPU is needed. ValueError for a kernel that needs Triton's scratch memory,
    which launches here do not pass."""
    of, elements = compiled.metadata, driver.TMA_DTYPE_DEVICE_TO_HOST
    if of.global_scratch_size or of.profile_scratch_size:
        raise ValueError(f"{of.name} wants scratch memory")
    warps, ctas, shared = compiled.packed_metadata
    boxes = (
        (x["swizzle"], x["elem_size"], elements[x["elem_type"]], tuple(x["block_size"]))
        for x in of.tensordesc_meta or ()
    )
    how = bool(of.launch_cooperative_grid), bool(of.launch_pdl)
    types = tuple("tensordesc" if str(x).startswith("tensordesc") else str(x) for x in compiled.src.signature.values())
    return MachineCode(of.name, warps, ctas, shared, *how, types, tuple(boxes), compiled.asm["cubin"])


def load_hook(when: str, module: int | None, function: int | None, name: str, hash: str) -> None:
    """Calls the hook that is set on loads of Triton's kernels: when is "start", without handles, or "end"."""
    hook = _set(getattr(triton.knobs.runtime, f"kernel_load_{when}_hook"))
    if hook is not None:
        hook(module, function, name, {}, hash)


class _LaunchHooks(NamedTuple):
    """Of Triton's launches; each does nothing where it is not set."""

    enter: Callable[[Any], Any]
    leave: Callable[[Any], Any]

    def about(self, name: str, function: int, stream: int) -> Any:
        """What hooks are told of a launch."""
        return LazyDict({"name": name, "function": function, "stream": stream})


def launch_hooks() -> _LaunchHooks | None:
    """Those that are set now (by profilers), or None."""
    runtime = triton.knobs.runtime  # hooks may be added or replaced at any time
    enter, leave = _set(runtime.launch_enter_hook), _set(runtime.launch_exit_hook)
    return _LaunchHooks(enter or _nothing, leave or _nothing) if enter or leave else None


def _set(hook: Any) -> Any:
    """A chain with hooks, or what a user has assigned in its place; else None."""
    return hook if getattr(hook, "calls", hook) else None


def _nothing(_: object) -> None:
    pass
