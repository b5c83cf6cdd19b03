"""What nvcc says of a twin's kernels without a GPU: registers, shared memory, spills."""

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .toolchain import NVCC_FLAGS, SOURCES, TwinUnavailable, find_nvcc, tail

_REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'(?s:.*?)"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?s:.*?)Used (?P<registers>\d+) registers(?:.*?, (?P<shared>\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Resources:
    """What one thread (registers; spills and stack in bytes) and one block (shared memory in bytes) take."""

    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int


def readable(mangled: str) -> str:
    """`_Z6kernelIfLi32ELb1EEv...` as `kernel<float, 32, true>`; twins have no other template arguments."""
    length = re.match(r"_Z(\d+)", mangled)
    if length is None:
        return mangled
    end = length.end() + int(length[1])
    name, rest = mangled[length.end() : end], mangled[end:]
    arguments = re.match(r"I((?:[if]|L[ib]\d+E)+)E", rest)
    if arguments is None:
        return name
    words = {"i": "int", "f": "float", "Lb0E": "false", "Lb1E": "true"}
    tokens = re.findall(r"L[ib]\d+E|[if]", arguments[1])
    return f"{name}<{', '.join(words.get(token, token[2:-1]) for token in tokens)}>"


@functools.cache
def _compile(stem: str, arch: str, nvcc: str) -> str:
    """Compile for one architecture and return what ptxas says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-cubin", f"-arch={arch}", *NVCC_FLAGS, "-Xptxas=-v", f"{stem}.cu"]
        result = subprocess.run(
            [*command, "-o", str(Path(folder, "kernel.cubin"))], cwd=SOURCES, capture_output=True, text=True
        )
    if result.returncode:
        raise TwinUnavailable(f"nvcc cannot compile {stem}.cu for {arch}:\n{tail(result.stderr)}")
    return result.stderr


def resources(stem: str, arch: str = "sm_90", nvcc: str | None = None) -> dict[str, Resources]:
    """The resources of every kernel of a twin, by readable name."""
    report = _compile(stem, arch, nvcc or find_nvcc())
    return {
        readable(match["kernel"]): Resources(
            registers=int(match["registers"]),
            shared=int(match["shared"] or 0),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
            stack=int(match["stack"]),
        )
        for match in _REPORT.finditer(report)
    }
