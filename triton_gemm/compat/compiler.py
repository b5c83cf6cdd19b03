"""Triton's compiler: a kernel compiled by its arguments, several in threads at once, and compiling for a GPU that is
not here, whose driver is replaced by one that knows its compute capability only."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache as triton_cache
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction as JITFunction
from triton.runtime.jit import create_function_from_signature

from .locks import free_in_children

_Result = TypeVar("_Result")
_hashing = free_in_children(threading.RLock())
_hashing_in: set[int] = set()  # ids of the processes (parent, forked children) that have started the hashing thread


def compile_kernel(kernel: JITFunction[Any], arguments: dict[str, Any], capability: tuple[int, int]) -> Any:
    """Triton's compiled kernel for arguments by name, options among them, for a GPU that need not be here."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**arguments)
    options, signature, constexprs, attributes = kernel._pack_args(backend, arguments, bound, specialization, options)
    source_type = GluonASTSource if kernel.is_gluon() else triton.compiler.ASTSource
    source = source_type(kernel, signature, constexprs, attributes)
    return triton.compiler.compile(source, target=target, options=options.__dict__)


class Compiling:
    """Runs compilations, in any number of threads at once. One that fails while others run is run once more by itself,
    before its failure counts: Triton 3.7.1 has failed in one of two threads to compile what it compiled in one."""

    PATIENCE_S = 10.0  # with which one waits for others: a compiler may hang

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun = self.running = self.first = 0  # first: those that are to run by themselves, and go first

    def __call__(self, compile: Callable[[], _Result]) -> _Result:
        with self._turn(by_itself=False) as (begun, running):
            try:
                return compile()
            except Exception:
                if running == 1 and self.begun == begun:
                    raise
        with self._turn(by_itself=True):
            return compile()

    @contextmanager
    def _turn(self, by_itself: bool) -> Iterator[tuple[int, int]]:
        """How many have begun, and how many run, with this one."""
        with self.changed:
            self.first += by_itself
            self.changed.wait_for(lambda: not (self.running if by_itself else self.first), self.PATIENCE_S)
            self.begun += 1
            self.running += 1
            counts = self.begun, self.running
        try:
            yield counts
        finally:
            with self.changed:
                self.first -= by_itself
                self.running -= 1
                self.changed.notify_all()


compiling = Compiling()


class _NotCachedError(Exception):
    pass


class _FromCache:
    """Triton's mode of compiling in other threads, that runs a compilation only where Triton's cache on disk has its
    result. name: the kernel's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], None], *_: object) -> Any:
        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        found = folder.get_group(f"{self.name[:150]}.json")  # as Triton's own `compile` looks
        if found is None or triton.knobs.compilation.always_compile:
            raise _NotCachedError
        kernel = compile()
        finalize(kernel)
        return kernel


def from_cache(name: str, load: Callable[[], _Result]) -> _Result | None:
    """What a kernel's `warmup` gives where nothing is compiled for it: this process or Triton's cache on disk has
    the binary of the kernel of that name. None else, or where there can be no such cache."""
    token = active_mode.set(_FromCache(name))
    try:
        with suppress(_NotCachedError, OSError):
            return load()
    finally:
        active_mode.reset(token)
    return None


class _Elsewhere(GPUDriver):
    """Triton's driver of a GPU that is not here: what compiling asks a driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"sm_{self.target.arch}"  # kernels keep what they compiled by device: not for one that is here

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def cache_folder() -> Path:
    """Of Triton's cache. Triton reads the variable in UTF-8, and Python reads it in the encoding of the locale."""
    return Path(os.fsdecode(triton.knobs.cache.dir.encode("utf-8", "surrogateescape")))


@contextmanager
def caching_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, Triton's cache is in `folder`, by default where it is. Triton's own `scope` fails where a locale cannot
    spell the folder's name."""
    knobs = triton.knobs.cache
    before, variable = dict(vars(knobs)), os.environ.get("TRITON_CACHE_DIR")
    knobs.dir = str(folder or cache_folder())
    try:
        yield
    finally:
        vars(knobs).clear()
        vars(knobs).update(before)
        os.environ.pop("TRITON_CACHE_DIR", None)
        if variable is not None:
            os.environ["TRITON_CACHE_DIR"] = variable


@contextmanager
def without_lines() -> Iterator[None]:
    """Inside, kernels are compiled without line information, which contains paths of sources. The key of Triton's cache
    does not depend on this setting, so use a cache folder of its own."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


def compiles_anew() -> bool:
    """Whether Triton was told to compile, or to compile otherwise than it does by itself: with its settings for
    debugging, instrumentation, another IR, or ptxas."""
    knobs = triton.knobs
    settings = {
        knobs.runtime: ("debug",),
        knobs.compilation: ("always_compile", "override", "dump_ir", "enable_asan", "instrumentation_mode"),
        knobs.nvidia: ("disable_ptxas_opt", "ptxas_options", "mock_ptx_version", "dump_ptxas_log"),
    }
    return any(getattr(of, name, False) for of, names in settings.items() for name in names)


def compiled_by() -> dict[str, str]:
    """The versions of Triton and of the ptxas that it runs for Hopper."""
    return {"triton": triton.__version__, "ptxas": triton.knobs.nvidia.ptxas.version}


@contextmanager
def compiling_for(capability: tuple[int, int], cache: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Inside, `kernel.warmup` compiles for a GPU of that compute capability, here or not, as it would on that GPU, so
    that what it puts into Triton's cache is found there. cache: another folder for that cache.

    Triton has one driver for all threads: nothing may be launched meanwhile, and threads started inside compile for
    that GPU too.
    """
    driver = triton.runtime.driver
    before = driver._active
    with caching_in(cache):
        driver.set_active(_Elsewhere(capability))
        try:
            yield
        finally:
            driver.set_active(before)


def forget_compiled(kernels: Iterable[JITFunction[Any]]) -> None:
    """Has Triton look into its cache on disk for what these kernels were compiled to on the active driver's device. It
    keeps that in memory otherwise, whatever the folder of its cache is by now."""
    device = triton.runtime.driver.active.get_current_device()
    for kernel in kernels:
        kernel.device_caches.pop(device, None)


def hash_triton() -> tuple[str, str]:
    """Triton's version, and its hash of its own files, which is part of every key of its cache. The first call in a
    process reads half a gigabyte, which takes a second or two. Other threads wait for it."""
    with _hashing:
        return triton.__version__, triton_cache.triton_key()


def hash_triton_in_background() -> None:
    """Starts `hash_triton` in a background thread, once per process, so that the first product need not wait for it.
    Reading and hashing release the GIL."""

    def read() -> None:
        with suppress(Exception):  # the first compilation will raise it
            hash_triton()

    if os.getpid() not in _hashing_in:
        _hashing_in.add(os.getpid())
        with suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=read, name="triton_gemm hash", daemon=True).start()


def set_triton_hash(found: tuple[str, str]) -> None:
    """Makes `hash_triton` return another process's result, if that has the same version of Triton. Triton's own process
    pools do so too. Two builds of one version are not told apart."""
    version, key = found
    if version == triton.__version__:
        triton_cache.triton_key = lambda: key


@contextmanager
def compilations(note: Callable[[str, bool], None]) -> Iterator[None]:
    """Inside, `note(hash, found)` is called, in the thread that compiles, for each kernel that Triton makes or finds in
    its cache on disk. hash: of all that decides the binary."""

    def listener(*, metadata: Any, cache_hit: bool, **_: Any) -> None:
        note(metadata["hash"], cache_hit)

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listener
        yield
