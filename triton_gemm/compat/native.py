"""The extension of Python that calls torch's C++ and launches kernels: how its sources are built, and loaded."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib import machinery, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia

_NAME = "triton_gemm_native"  # the module's name, as its source has it
_SOURCES = sorted(Path(__file__).with_name("cpp").glob("*.cpp"))
_HEADERS = sorted(Path(__file__).with_name("cpp").glob("*.h"))
_TORCH = Path(torch.__file__).parent
_FLAGS = [
    "-O2",
    "-fPIC",
    "-std=c++20",
    "-w",
    "-fvisibility=hidden",
    "-DAT_PER_OPERATOR_HEADERS",  # or torch's headers include those of all operators
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
]
_LIBRARIES = ["c10", "torch_cpu", "torch", "torch_python"]
if (_TORCH / "lib" / "libtorch_cuda.so").exists():
    _LIBRARIES += ["c10_cuda", "torch_cuda"]


def cxx_compiler() -> list[str] | None:
    """The C++ compiler and its arguments, or None. RuntimeError where CXX names none."""
    given = os.environ.get("CXX", "")
    try:
        found = shlex.split(given)
    except ValueError as error:
        raise RuntimeError(f"CXX is {given!r}: {error}") from None
    if found and shutil.which(found[0]) is None:
        raise RuntimeError(f"CXX is {given!r}, and there is no such command")
    path = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return found or (None if path is None else [path])


def native_commands(compiler: Sequence[str], file: str) -> tuple[list[list[str]], list[str]]:
    """What builds the extension into that file of the working folder: commands that compile a source each, which may
    run at once, and the one that links them. They need headers and libraries of torch, and cuda.h of Triton."""
    headers = [_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include"]
    headers += [Path(nvidia.dirname, "include"), Path(sysconfig.get_paths()["include"])]
    compiling = [*compiler, *_FLAGS, *(f"-I{folder}" for folder in headers), "-c"]
    objects = [f"{source.stem}.o" for source in _SOURCES]
    libraries = [f"-L{_TORCH / 'lib'}", "-Wl,--no-as-needed", *(f"-l{library}" for library in _LIBRARIES)]
    return (
        [[*compiling, str(source), "-o", made] for source, made in zip(_SOURCES, objects, strict=True)],
        [*compiler, *_FLAGS, "-shared", *objects, *libraries, "-o", file],
    )


@cache
def native_key() -> str:
    """What the built extension depends on, as a hash: its sources, torch, Python and the machine. Of Triton's headers
    it needs cuda.h alone, whose structures are the driver's interface and do not change. The compiler is left out, so
    that an extension is found where there is none."""
    on = [torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), platform.machine()]
    text = b"".join(source.read_bytes() for source in (*_SOURCES, *_HEADERS))
    return hashlib.sha256(text + "\n".join(map(str, [*on, *_FLAGS, *_LIBRARIES])).encode()).hexdigest()[:32]


def native_refused() -> str | None:
    """Why this Python or torch have no native path, or None."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python has no global lock, which it relies on"
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return f"torch {torch.__version__} keeps the precision of fp32 elsewhere"
    return None


def import_native(path: str) -> Any:
    """The extension's module, not set up yet. ImportError where it cannot be loaded."""
    spec = util.spec_from_loader(_NAME, machinery.ExtensionFileLoader(_NAME, path))
    assert spec is not None
    return util.module_from_spec(spec)


def set_up_native(extension: Any, context: object, in_backward: object, make_context: object) -> None:
    """Gives the extension what it calls of Python. context: the ContextVar of the policy. in_backward: a function that
    returns the policy of the backward that this thread runs, or None. make_context: a function that makes a device's
    CUDA context current in this thread.

    NotImplementedError if `triton.knobs.runtime.launch_enter_hook` or `launch_exit_hook` is no HookChain, as after a
    program has assigned a function to one."""
    hooks = triton.knobs.runtime
    about = {"context": context, "in_backward": in_backward, "make_context": make_context, "hooks": hooks}
    try:
        extension.setup(SimpleNamespace(**about))
    except (AttributeError, RuntimeError) as error:
        raise NotImplementedError(f"Triton's hooks on launches are others: {error}") from error
