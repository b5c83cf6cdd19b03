"""Compile a twin on first use and launch it on torch's tensors.

Each build lives in a folder named after everything that goes into it, so a library that exists is current
and is imported without asking ninja. A library appears there by rename, finished or not at all.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .toolchain import NVCC_FLAGS, SOURCES, TwinUnavailable, tail
from .twins import TWINS, Twin, Variant

CXX_FLAGS = ("-O2", "-std=c++17", "-fvisibility=hidden")
PATIENCE_S = 600.0  # how long to wait for another process that is building the same twin
MAX_SIZE = 2**31 - 4096  # the kernels round sizes up to their tiles in 32 bits


@dataclass(frozen=True)
class LoadedTwin:
    """A compiled twin."""

    twin: Twin
    module: ModuleType

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        variant: str | None = None,
    ) -> None:
        """`c = alpha a b + beta c` on the current stream of the tensors' device.

        All three are contiguous, and without torch's negative bit. beta = 0 does not read c; alpha = 0 does not read a
        and b.
        """
        chosen = self.twin.variant(variant)
        _check(a, b, c, alpha, beta, chosen)
        (m, k), n = a.shape, b.shape[1]
        if m == 0 or n == 0:
            return
        with torch.cuda.device(a.device):
            stream = torch.cuda.current_stream().cuda_stream
            pointers = a.data_ptr(), b.data_ptr(), c.data_ptr()
            try:
                self.module.launch(chosen.name, *pointers, m, n, k, alpha, beta, stream)
            except RuntimeError as error:
                raise RuntimeError(f"{self.twin.stem} {chosen.name}, M={m} N={n} K={k}: {error}") from None


def _check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float, variant: Variant) -> None:
    shapes = f"a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}"
    matrices = a.dim() == b.dim() == c.dim() == 2
    if not (matrices and a.shape[1] == b.shape[0] and c.shape == (a.shape[0], b.shape[1])):
        raise ValueError(f"shapes must be (M, K), (K, N), (M, N), got {shapes}")
    if max(*a.shape, *b.shape) > MAX_SIZE:
        raise ValueError(f"a size is beyond {MAX_SIZE}: {shapes}")
    if not (a.dtype == b.dtype == variant.dtype and c.dtype == variant.out_dtype):
        raise TypeError(
            f"variant {variant.name} takes {variant.dtype} operands and a {variant.out_dtype} result, "
            f"got a {a.dtype}, b {b.dtype}, c {c.dtype}"
        )
    if not (a.is_contiguous() and b.is_contiguous() and c.is_contiguous()):
        strides = f"a {a.stride()}, b {b.stride()}, c {c.stride()}"
        raise ValueError(f"twins take contiguous tensors (call .contiguous()), got strides {strides}: {shapes}")
    if a.is_neg() or b.is_neg() or c.is_neg():
        raise ValueError("twins read memory as it lies, without torch's negative bit (call .resolve_neg())")
    if variant.dtype == torch.int32 and not (float(alpha).is_integer() and float(beta).is_integer()):
        raise ValueError(f"alpha and beta of an int32 product must be whole numbers, got {alpha}, {beta}")
    if not (a.is_cuda and a.device == b.device == c.device):
        raise ValueError(f"all tensors must be on one CUDA device, got {a.device}, {b.device}, {c.device}")


def load(stem: str) -> LoadedTwin:
    """Compile a twin for the current GPU, or import it where that was done before."""
    if stem not in TWINS:
        raise ValueError(f"no twin {stem!r}; there are {', '.join(TWINS)}")
    return _load(TWINS[stem], _capability())


def load_all(
    progress: Callable[[str, LoadedTwin | TwinUnavailable], None] | None = None,
) -> dict[str, LoadedTwin | TwinUnavailable]:
    """Load every twin, building in parallel; `progress` hears of each as it ends, in this thread.

    A twin that cannot be had is there as its error, so that a caller can go on without it and say so.
    """
    jobs = os.environ.get("MAX_JOBS", "")
    workers = int(jobs) if jobs.isdigit() and int(jobs) else os.cpu_count()

    def attempt(twin: Twin) -> LoadedTwin | TwinUnavailable:
        try:
            return _load(twin, capability)
        except TwinUnavailable as error:
            return error

    results: dict[str, LoadedTwin | TwinUnavailable] = {}
    try:
        capability = _capability()
    except TwinUnavailable as error:
        return dict.fromkeys(TWINS, error)
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(attempt, twin): stem for stem, twin in TWINS.items()}
        for future in as_completed(futures):
            stem = futures[future]
            results[stem] = future.result()
            if progress is not None:
                progress(stem, results[stem])
    return {stem: results[stem] for stem in TWINS}


def _capability() -> tuple[int, int]:
    if torch.version.cuda is None:
        raise TwinUnavailable(f"torch {torch.__version__} is built without CUDA: install a CUDA build (pytorch.org)")
    if not torch.cuda.is_available():
        raise TwinUnavailable("no CUDA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return torch.cuda.get_device_capability()


@functools.cache
def _load(twin: Twin, capability: tuple[int, int]) -> LoadedTwin:
    if capability < twin.min_capability:
        need, have = (".".join(map(str, version)) for version in (twin.min_capability, capability))
        raise TwinUnavailable(f"{twin.stem} needs a GPU of compute capability {need} or newer, this one has {have}")
    arch = "sm_{}{}".format(*capability)
    name = f"{twin.stem}_{content_hash(twin.stem, arch)}"
    try:
        folder = _cache_root() / name
        library = folder / f"{name}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder / "owner.lock"):
                if not library.exists():
                    os.replace(_build(twin.stem, arch, name, folder / "build"), library)
        return LoadedTwin(twin, _import(name, library))
    except (OSError, ImportError) as error:
        raise TwinUnavailable(
            f"{twin.stem} cannot be cached ({error}): set TORCH_EXTENSIONS_DIR to a writable local folder"
        ) from error


def content_hash(stem: str, arch: str) -> str:
    """Of all that a build depends on: sources with every header, flags, architecture, versions."""
    digest = hashlib.sha256()
    headers = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cuh"))
    for path in (SOURCES / f"{stem}.cu", SOURCES / "binding.cpp", *headers):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((arch, NVCC_FLAGS, CXX_FLAGS, torch.__version__, torch.version.cuda, sys.version)).encode())
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root) / "reference_cuda"
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root()) / "reference_cuda"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Keep other builders out. The system drops the lock with its owner, so a killed build leaves none."""
    with path.open("w") as file:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TwinUnavailable(
                        f"another build has held {path} for {PATIENCE_S:.0f} s: end it or remove its folder"
                    ) from None
                time.sleep(0.1)
        yield


def _build(stem: str, arch: str, name: str, folder: Path) -> Path:
    """Run load_inline in a folder that only we use, and return the library."""
    _require_tools()
    from torch.utils import cpp_extension

    folder.mkdir(exist_ok=True)
    # load_inline would wait for ever on the lock file of a killed build, and skip a build that failed before.
    (folder / "lock").unlink(missing_ok=True)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    try:
        cpp_extension.load_inline(
            name,
            # Including the files, rather than pasting them, keeps their names and lines in errors.
            cpp_sources='#include "binding.cpp"\n',
            cuda_sources=f'#include "{stem}.cu"\n',
            extra_cflags=list(CXX_FLAGS),
            # With an architecture here torch does not look at TORCH_CUDA_ARCH_LIST.
            extra_cuda_cflags=[*NVCC_FLAGS, f"-arch={arch}", "-Xcompiler=-fvisibility=hidden"],
            extra_include_paths=[str(SOURCES)],
            build_directory=str(folder),
            no_implicit_headers=True,
            is_python_module=False,  # imported once, from where it ends up
        )
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise TwinUnavailable(f"{stem} does not build for {arch}:\n{tail(str(error))}") from error
    return folder / f"{name}.so"


def _require_tools() -> None:
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise TwinUnavailable(f"torch cannot build extensions ({error}): pip install setuptools") from error
    home = cpp_extension.CUDA_HOME
    if home is None or shutil.which(str(Path(home, "bin", "nvcc"))) is None:
        raise TwinUnavailable(
            f"nvcc not found (CUDA_HOME is {home}): install the CUDA {torch.version.cuda} toolkit and, "
            "before Python starts, put its bin folder on PATH or set CUDA_HOME to its root"
        )
    # An environment whose python was started without activating it has its ninja beside python, off PATH.
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] += os.pathsep + scripts
    if not cpp_extension.is_ninja_available():
        raise TwinUnavailable("ninja not found: pip install ninja")


def _import(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
