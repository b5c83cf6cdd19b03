"""What the compiler makes of a kernel, found without a GPU: capture a launch, compile it for any target, read the SASS.

Nothing here runs on the way of a product; tests and the report use it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from ..compat import JITFunction, compile_kernel
from ..operands import operands_of_sizes


@dataclass(frozen=True)
class CapturedLaunch:
    """One kernel launch that was asked for and not made: the kernel and its arguments by name."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel on one target."""

    name: str
    target: str
    registers: int  # of a thread
    shared: int  # bytes of a block
    spills: int  # SASS loads and stores to local memory
    # SASS opcodes in the kernel's text, not executed. `HGMMA.64x128x16.F32` counts under `HGMMA`.
    instructions: Counter[str]
    asm: dict[str, str] = field(repr=False)  # Triton's stages by name (`ttir`, `ttgir`, `llir`, `ptx`) and `sass`


@contextmanager
def capture() -> Iterator[list[CapturedLaunch]]:
    """Inside, kernels are noted in the list instead of launched, so `meta` tensors will do for operands."""
    launches: list[CapturedLaunch] = []

    def note(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        launches.append(CapturedLaunch(self, {**dict(zip(self.arg_names, args, strict=False)), **kwargs}))

    original = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = original


def compile_launch(launch: CapturedLaunch, capability: tuple[int, int]) -> Compiled:
    """Compiles a captured launch for a compute capability; raises whatever the compiler raises."""
    compiled = compile_kernel(launch.kernel, launch.arguments, capability)
    sass, usage = _disassemble(compiled.asm["cubin"])
    instructions = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass, re.MULTILINE))
    return Compiled(
        name=compiled.metadata.name,
        target=f"sm_{10 * capability[0] + capability[1]}",
        registers=int(usage["REG"]),
        shared=compiled.metadata.shared,
        spills=instructions["STL"] + instructions["LDL"],
        instructions=instructions,
        asm={**{stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}, "sass": sass},
    )


def compile_call(
    call: Callable[..., object],
    shapes: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    out_dtype: torch.dtype | None = None,
    layout: str = "nn",
    **options: Any,
) -> list[Compiled]:
    """Compiles every kernel that `call(a, b, c, **options)` would launch on (M, N, K) operands that do not exist.

    `layout` gives A's and B's: n row-major, t column-major. The call must be told its config.
    """
    with capture() as launches:
        call(*operands(shapes, dtype, layout, out_dtype), **options)
    return [compile_launch(launch, capability) for launch in launches]


def operands(
    shapes: tuple[int, int, int], dtype: torch.dtype, layout: str = "nn", out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [M, K], b [K, N] and row-major c [M, N] on `meta`; layout as in `compile_call`."""
    M, N, K = shapes
    c = torch.empty(M, N, dtype=out_dtype or dtype, device="meta")
    return *operands_of_sizes(M, N, K, dtype, layout), c


@lru_cache(maxsize=64)
def _disassemble(cubin: bytes) -> tuple[str, dict[str, str]]:
    """The SASS and the resource usage (REG, STACK, SHARED, ...) of a cubin, by the cuobjdump in Triton's wheel."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def run(flag: str) -> str:
            return subprocess.run([cuobjdump, flag, path], capture_output=True, text=True, check=True).stdout

        sass, usage = run("-sass"), run("-res-usage")
    return sass, dict(re.findall(r"(\w+):(\d+)", usage))
