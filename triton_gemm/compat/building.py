"""What Triton builds with a C compiler to ask the driver, built where there is neither a GPU nor its driver, so that a
machine that has them needs no compiler. Versions of Triton differ in how it is found again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

from .compiler import caching_in


def c_compiler() -> str | None:
    """The command of the C compiler that Triton builds its driver module with, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


# Up to Triton 3.7 what is built with a C compiler is found by its source alone; later also by the folders it was linked
# in, of which one is the GPU driver's.
MODULE_NAMES_DRIVER: bool = hasattr(build, "compile_so_from_file")


def build_driver_module(cache: str | os.PathLike[str] | None = None) -> str | None:
    """Builds the module by which Triton asks the driver, and which it wants even to compile, into its cache: with a C
    compiler but without a GPU's driver, so that a machine with a GPU needs no compiler. Why it cannot be built, or None
    once it is there.

    cache: another folder for Triton's cache.
    """
    compiler = c_compiler()
    if compiler is None:
        return "there is no C compiler: set CC, or install gcc"
    try:
        folders = nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        if MODULE_NAMES_DRIVER:
            return "set TRITON_LIBCUDA_PATH, here and where the GPU is, to the folder that has libcuda.so.1 there"
        folders = []
    link: dict[str, Any] = {
        "library_dirs": [nvidia.libdevice_dir, *folders],
        "include_dirs": nvidia.include_dirs,
        "libraries": nvidia.libraries,
    }
    source = Path(nvidia.dirname, "driver.c")
    with tempfile.TemporaryDirectory() as folder, caching_in(cache), _linking_in(folder):
        try:
            _make_stand_in(compiler, folder, source.read_text())
            if MODULE_NAMES_DRIVER:
                build.compile_so_from_file(str(source), "cuda_utils", **link)
            else:
                _build_unloaded("cuda_utils", source.read_text(), link)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip()
            return f"{compiler}: {words.splitlines()[-1]}"
    return None


def _make_stand_in(compiler: str, folder: str, source: str) -> None:
    """Makes a libcuda.so.1 with the functions that a source calls, and nothing in them: what a linker looks for."""
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", source)))
    Path(folder, "stand_in.c").write_text("\n".join(f"void {name}(void) {{}}" for name in names))
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", f"{folder}/stand_in.c"]
    subprocess.run([compiler, *options], check=True, capture_output=True, text=True)


@contextmanager
def _linking_in(folder: str) -> Iterator[None]:
    """Inside, compilers look for libraries in `folder` last: GCC and Clang do so in LIBRARY_PATH."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = folder if before is None else f"{before}:{folder}"
    try:
        yield
    finally:
        os.environ.pop("LIBRARY_PATH")
        if before is not None:
            os.environ["LIBRARY_PATH"] = before


def _build_unloaded(name: str, source: str, link: dict[str, Any]) -> None:
    """Builds a module of C into Triton's cache up to Triton 3.7, which would also import it."""
    load = build._load_module_from_path
    build._load_module_from_path = lambda *_: None
    try:
        build.compile_module_from_src(source, name, **link)
    finally:
        build._load_module_from_path = load
