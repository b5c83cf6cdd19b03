"""Kernels compiled for GPUs that are not here, of products that have no memory.

nvdisasm takes 0.8 s before its first line, as long as a small kernel takes to compile. So it runs only where a test
reads the text, and for a kernel with an opcode that opcodes.json does not name. Since Volta the lowest 12 of an
instruction's 128 bits are its opcode (Jia, Maggioni, Staiger and Scarpazza, Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking, 2018). Four others tell UTCHMMA from UTCQMMA, and FADD from FHADD.

python -m tests.support.compiled_kernels FOLDER adds the opcodes of the cubins below it, Triton's cache, to the file.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from triton_gemm.arithmetic import default_arithmetic
from triton_gemm.compat import compile_kernel
from triton_gemm.kernels.launch import Launch, materialise
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime import aot, binaries

Capability = tuple[int, int]
Three = tuple[int, int, int]

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (8, 0), (8, 9), (10, 0), (12, 0))


def product(
    size: Three,
    orders: str = "nnn",
    *,
    steps: Three = (1, 1, 1),
    gaps: Three = (0, 0, 0),
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    **epilogue: object,
) -> GemmProblem:
    """Of a, b and c: `n` row-major, `t` column-major; the distance of neighbours in memory; unused elements after each
    row, or column."""
    M, N, K = size

    def layout(rows: int, columns: int, order: str, step: int, gap: int) -> Layout:
        pitch = (columns if order == "n" else rows) * step + gap
        return Layout((2 * rows * columns if batch > 1 else 0, *((pitch, step) if order == "n" else (step, pitch))))

    layouts = map(layout, (M, K, M), (K, N, N), orders, steps, gaps)
    precision = precision or default_arithmetic(dtype).name
    return GemmProblem(batch, M, N, K, dtype, out_dtype or dtype, precision, *layouts, **epilogue)  # type: ignore[arg-type]


def compile_launch(
    launch: Launch, dtypes: dict[str, torch.dtype], capability: Capability = HOPPER, *, programmatic: bool | None = None
) -> aot.Compiled:
    """As a plan launches it, programmatically from Hopper on, unless told otherwise."""
    return _compiled(
        launch,
        {name: torch.empty(1, dtype=dtype, device="meta") for name, dtype in dtypes.items()},
        capability,
        capability >= HOPPER if programmatic is None else programmatic,
    )


def compiled(
    problem: GemmProblem, made: Sequence[Launch], capability: Capability = HOPPER, *, programmatic: bool | None = None
) -> aot.Compiled:
    """The last of a problem's launches."""
    operands = binaries.operands_of(problem, made)
    return _compiled(made[-1], operands, capability, capability >= HOPPER if programmatic is None else programmatic)


def _compiled(
    launch: Launch, operands: dict[str, torch.Tensor], capability: Capability, programmatic: bool
) -> aot.Compiled:
    launch = launch.programmatic() if programmatic else launch
    arguments = materialise(launch, operands, binaries.SCALARS)
    return compile_captured(aot.CapturedLaunch(launch.kernel, {**arguments, **launch.options}), capability)


def compile_call(
    call: Callable[..., object],
    shapes: Three,
    dtype: torch.dtype,
    capability: Capability,
    *,
    out_dtype: torch.dtype | None = None,
    layout: str = "nn",
    **options: object,
) -> list[aot.Compiled]:
    """As `aot.compile_call`."""
    with aot.capture() as launches:
        call(*aot.operands(shapes, dtype, layout, out_dtype), **options)
    return [compile_captured(launch, capability) for launch in launches]


def compile_captured(launch: aot.CapturedLaunch, capability: Capability) -> aot.Compiled:
    """As `aot.compile_launch`."""
    made = compile_kernel(launch.kernel, launch.arguments, capability)
    cubin, target = made.asm["cubin"], f"sm_{10 * capability[0] + capability[1]}"
    stages, found = Stages(target, made.asm), [(target, opcode) for opcode in opcodes(cubin)]
    known = all(instruction in NAMES for instruction in found)
    instructions = Counter(NAMES[instruction] for instruction in found) if known else named(target, stages["sass"])
    return aot.Compiled(
        name=made.metadata.name,
        target=target,
        registers=int(re.findall(r"REG:(\d+)", cuobjdump(cubin, "-res-usage"))[-1]),
        shared=made.metadata.shared,
        spills=instructions["STL"] + instructions["LDL"],
        instructions=instructions,
        asm=stages,
    )


class Stages(dict[str, str]):
    """Triton's stages by name, and `sass`, in which no opcode may have another name than the one known."""

    def __init__(self, target: str, stages: Mapping[str, Any]) -> None:
        super().__init__(stages)
        self.target = target

    def __missing__(self, stage: str) -> str:
        assert stage == "sass", stage
        self[stage] = cuobjdump(self["cubin"], "-sass")  # type: ignore[arg-type]
        named(self.target, self[stage])
        return self[stage]


OPCODES = Path(__file__).with_name("opcodes.json")  # by target and name
NAMES: dict[tuple[str, int], str] = {
    (target, opcode): name
    for target, names in json.loads(OPCODES.read_text()).items()
    for name, opcodes in names.items()
    for opcode in opcodes
}
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+).*/\* 0x(\w{16}) \*/\n\s+/\* 0x(\w{16}) \*/", re.MULTILINE
)


def named(target: str, sass: str) -> Counter[str]:
    """How many instructions of each name; from now on their opcodes are known."""
    found = INSTRUCTION.findall(sass)
    for name, low, high in found:
        known = NAMES.setdefault((target, opcode_of(int(low, 16), int(high, 16))), name)
        assert known == name, f"{known} and {name} have the same opcode"
    return Counter(name for name, _, _ in found)


def opcodes(cubin: bytes) -> Iterator[int]:
    """Of all instructions in the sections `.text.*` of an ELF file of 64 bits."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, begin, length in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            yield from (opcode_of(*halves) for halves in struct.iter_unpack("<2Q", cubin[begin : begin + length]))


def opcode_of(low: int, high: int) -> int:
    """Of an instruction's halves: its bits 0 to 11, 72, 73, 81 and 82."""
    return low & 0xFFF | (high >> 8 & 3) << 12 | (high >> 17 & 3) << 14


def cuobjdump(cubin: bytes, flag: str) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, flag, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    for path in sorted(Path(sys.argv[1]).rglob("*.cubin")):
        cubin = path.read_bytes()
        target = json.loads(path.with_suffix(".json").read_text())["target"]
        if any((f"sm_{target['arch']}", opcode) not in NAMES for opcode in opcodes(cubin)):
            named(f"sm_{target['arch']}", cuobjdump(cubin, "-sass"))
    table: dict[str, dict[str, list[int]]] = {}
    for (target, opcode), name in sorted(NAMES.items()):
        table.setdefault(target, {}).setdefault(name, []).append(opcode)
    OPCODES.write_text(
        "{\n" + ",\n".join(f'"{x}": {json.dumps(of, sort_keys=True)}' for x, of in table.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
