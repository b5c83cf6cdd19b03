"""Where the sources are, how nvcc is called, and the error that says what is missing."""

import os
import shutil
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
NVCC_FLAGS = ("-O3", "-std=c++17")


class TwinUnavailable(RuntimeError):  # noqa: N818 - a state of the machine rather than a mistake
    """A twin cannot be built or run here; the text says what to install or set."""


def find_nvcc() -> str:
    """nvcc from CUDA_HOME or CUDA_PATH, else from PATH, else from the usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [str(Path(home, "bin", "nvcc")) for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise TwinUnavailable(
        "nvcc not found: install the CUDA toolkit and put its bin folder on PATH or set CUDA_HOME to its root"
        + (f" (now {homes[0]})" if homes else "")
    )


def tail(output: str, lines: int = 20) -> str:
    """The end of a compiler's output, where the first error that stopped it is."""
    return "\n".join(output.strip().splitlines()[-lines:])
