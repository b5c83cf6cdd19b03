"""`native.cpp`, an extension of Python that calls torch's C++ and launches kernels: how it is built and loaded."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import lru_cache, partial
from importlib import machinery, util
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia

_SOURCES = [
    Path(__file__).with_name(name)
    for name in ("native.cpp", "native_derivatives.h", "native_calls.h", "native_entries.h")
]
_NAME = "triton_gemm_native"  # of the module, as its source has it


def cxx_compiler() -> str | None:
    """The command of the C++ compiler, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def native_command(compiler: str) -> list[str]:
    """What builds the extension but for `-o` and its file: with torch's headers and libraries, and cuda.h of Triton."""
    torchs = Path(torch.__file__).parent
    headers = [torchs / "include", torchs / "include" / "torch" / "csrc" / "api" / "include"]
    headers += [Path(nvidia.dirname, "include"), Path(sysconfig.get_paths()["include"])]
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    if (torchs / "lib" / "libtorch_cuda.so").exists():
        libraries += ["c10_cuda", "torch_cuda"]
    return [
        *(compiler, "-O2", "-fPIC", "-shared", "-std=c++20", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in headers),
        str(_SOURCES[0]),
        f"-L{torchs / 'lib'}",
        "-Wl,--no-as-needed",
        *(f"-l{library}" for library in libraries),
    ]


@lru_cache(maxsize=4)
def native_file(compiler: str) -> str:
    """The name of the extension's file, which says all that it depends on: its source, torch, Triton's headers, Python
    and the compiler. OSError and CalledProcessError where the compiler does not run."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    on = [torch.__version__, triton.__version__, sysconfig.get_config_var("SOABI"), *native_command(compiler)]
    text = b"".join([source.read_bytes() for source in _SOURCES]) + version + "\n".join(map(str, on)).encode()
    return f"{_NAME}-{hashlib.sha256(text).hexdigest()[:32]}.so"


def native_refused() -> str | None:
    """Why this Python, torch or Triton have no native path, or None."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python has no global lock, which it relies on"
    if not hasattr(nvidia, "annotate_arguments"):
        return f"Triton {triton.__version__} launches otherwise"
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return f"torch {torch.__version__} keeps the precision of fp32 elsewhere"
    return None


def load_native(path: Path, launch: int, error_string: int, *of_calls: object) -> Any:
    """The extension's module. launch, error_string: addresses of the driver's cuLaunchKernelEx and cuGetErrorString;
    of_calls: the module that has the number of the state, as a dictionary, the context's policy, what gives a
    backward's, and what makes a thread's context. ImportError where it cannot be loaded."""
    loader = machinery.ExtensionFileLoader(_NAME, str(path))
    spec = util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = util.module_from_spec(spec)
    *state, ensure_context = of_calls
    precision = partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    module.setup(launch, error_string, *state, precision, *hooks, ensure_context)
    return module
