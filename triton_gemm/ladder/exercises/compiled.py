"""Whether Triton compiles what an exercise's file launches: its interpreter takes Python that the compiler refuses.

A process of its own compiles, since the interpreter stays in one for as long as it lives. No GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

HOPPER = (9, 0)
LIMIT_S = 120
REFUSES = "Triton's compiler refuses"


def refused(path: Path, *calls: Sequence[Any], where: str = "interpreter") -> str | None:
    """The compiler's error about the kernels that the file's `run` launches for such arguments, or None. Errors that
    name no line of a kernel, as of a full disk or of no `ptxas`, do not count. where: what ran them."""
    kinds = [
        [[*x.shape, str(x.dtype).rpartition(".")[2]] if isinstance(x, torch.Tensor) else x for x in given]
        for given in calls
    ]
    with suppress(OSError, subprocess.TimeoutExpired), TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_GEMM_USE": "0", "PYTHONWARNINGS": "ignore"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", __name__, str(path), json.dumps(kinds)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        text = ended.stdout.strip().rpartition("\n")[2]  # the file may print, too
        if text.startswith(REFUSES):
            return f"C is right in the {where}, but {text}"
        if (found := re.search(rf"{re.escape(str(path))}:(\d+):\d+: error: (.*)", ended.stderr)) is not None:  # of MLIR
            line = path.read_text("utf-8").splitlines()[int(found[1]) - 1].strip()
            phase = ": a phase is an int32, as `.to(gl.int32)` makes of a condition" * ("wait_barrier" in found[2])
            return f"C is right in the {where}, but {REFUSES} `{line}`: {found[2]}{phase}."
    return None


def main(path: str, kinds: str) -> None:
    import triton.runtime.jit as jit

    from ...compat import compile_kernel

    launches: list[tuple[Any, dict[str, Any]]] = []

    def record(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel, {**dict(zip(kernel.arg_names, given, strict=False)), **options}))

    jit.JITFunction.run = record
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for given in json.loads(kinds):
        module.run(*(torch.empty(x[:-1], dtype=getattr(torch, x[-1])) if isinstance(x, list) else x for x in given))
    for kernel, arguments in launches:
        try:
            compile_kernel(kernel, arguments, HOPPER)
        except Exception as error:
            print(_sentence(error) or "")
            return


def _sentence(error: BaseException) -> str | None:
    """The innermost error, with the line of the kernel that it is about; None where there is no such line."""
    line = ""
    while True:
        source, node = getattr(error, "src", None), getattr(error, "node", None)
        if source and node is not None:
            line = source.splitlines()[node.lineno - 1].strip()
        if error.__cause__ is None:
            break
        error = error.__cause__
    text: str = getattr(error, "error_message", None) or str(error)
    if "Did you forget to add @triton" in text:  # a function of Triton that runs outside of kernels
        called = re.search(r"\btriton\.(\w+)\(", line)
        text = f"in a kernel it is `tl.{called[1]}`." if called else "it calls a function that runs outside of kernels."
    return f"{REFUSES} `{line}`: {' '.join(text.split())}" if line else None


if __name__ == "__main__":
    main(*sys.argv[1:])
