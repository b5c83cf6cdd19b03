"""Everything private of torch and Triton that this package touches, and what differs between their versions.

torch 2.11 to 2.15 and Triton 3.6 to 3.9. No other module names what is private; `tests/test_compat.py` tries each use
by itself, so that a version which breaks one is told apart from all else that then fails.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

try:
    import triton
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ModuleNotFoundError(
        "TRITON_INTERPRET=1 asks for Triton's interpreter, which needs NumPy: pip install numpy", name="numpy"
    ) from error
import triton.language as tl
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler.compiler import make_backend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import build
from triton.runtime.jit import JITFunction as JITFunction
from triton.runtime.jit import create_function_from_signature

# The oldest and the newest versions, (major, minor), that the tests are run with.
TESTED = {"torch": ((2, 11), (2, 15)), "Triton": ((3, 6), (3, 9))}

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Lock = TypeVar("_Lock")


def free_in_children(lock: _Lock) -> _Lock:
    """`lock`, which a forked child finds free: the thread that may have held it lives in the parent alone. For locks of
    modules, as Python's own modules do it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


# Whether kernels made from here on run in Triton's interpreter; it is read when triton.jit decorates.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED and triton.__version__.startswith("3.6."):
    _numpy = tuple(map(int, metadata.version("numpy").split(".")[:2]))
    if _numpy >= (2, 4):
        raise ImportError("Triton 3.6's interpreter does not run on NumPy 2.4 or newer: pip install 'numpy<2.4'")

# Device functions take it as a default. Were it a global of theirs, a kernel's key in Triton's cache would depend on
# which kernel came first in the process: Triton adds a function's globals to those callers alone that are hashed after
# it.
_INTERPRETED = tl.constexpr(INTERPRETED)


@contextmanager
def decorating() -> Iterator[None]:
    """Inside, kernels are decorated for the interpreter or the compiler as those before, whatever TRITON_INTERPRET says
    by now."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = INTERPRETED
        yield


@triton.jit
def dot_operand(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """x, or in the interpreter the fp32 value of bf16 or fp8: NumPy has neither, multiplies bf16's bits
    (triton#11584), and casts from them flush subnormals and lose the NaN of float8_e4m3fn."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e5:  # the upper half of an fp16
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif INTERPRETED and x.dtype == tl.float8e4nv:  # an fp16 without the last bits, and with another bias
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    else:
        return x


@triton.jit
def number(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """A launch's scalar in dtype; in the interpreter it is Python's, which any dtype goes with."""
    if INTERPRETED:
        return x
    else:
        return tl.cast(x, dtype)


@triton.jit
def multiply_add(x, y, z, INTERPRETED: tl.constexpr = _INTERPRETED):
    """x y + z, rounded once; in the interpreter, where x may be a `number`, twice."""
    if INTERPRETED:
        return x * y + z
    else:
        return tl.fma(x, y, z)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """fp32 x rounded to nearest even in dtype; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)  # a NaN must not carry into the exponent
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def reciprocal(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """1 / x of fp32 to 1 ulp, for x between 1 and 2^126: one instruction, and none for the ends of fp32's range."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """2^x of fp32 to 2 ulp, 0 where that would be subnormal: one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(pointers, INTERPRETED: tl.constexpr = _INTERPRETED):
    """Asks for the sectors of global memory around the pointers to be fetched into L2. Nothing in the interpreter."""
    if not INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1)


# Triton 3.9 renamed Gluon's asynchronous copies, and what gives shared memory another shape.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_shared: Any = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
# Triton 3.9 gives inline PTX the addresses of shared memory, which clusters need.
CLUSTERS: bool = hasattr(gl, "inline_asm")


@triton.constexpr_function
def tensor_map_parameter(kernel: str, number: int, dimensions: int) -> str:
    """What PTX calls a kernel's tensor map of that number. Its tensor maps are its first parameters, all of so many
    dimensions, and each is followed by its shape and strides."""
    return f"{kernel}_param_{number * (1 + 2 * dimensions)}"


tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def _aggregate(cls: type) -> Any:
    """`gluon.aggregate` before Triton 3.8: a record of values and constants that kernels pass on as one argument. It is
    made of its fields, by position or by name, and fields that are plain numbers or strings become constants."""
    fields = typing.get_type_hints(cls)

    def init(self: Any, *values: Any, **named: Any) -> None:
        for name, value in (dict(zip(fields, values, strict=False)) | named).items():
            setattr(self, name, value if isinstance(value, gl.base_value) else gl.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__annotations__ = fields
    cls.__init__ = init  # type: ignore[misc]
    return tl.core._aggregate(cls)


if TYPE_CHECKING:
    from dataclasses import dataclass as aggregate  # which type checkers know
else:
    aggregate = getattr(gluon, "aggregate", None) or _aggregate


loading = free_in_children(threading.Lock())  # held while a binary is loaded, which disturbs a capture


def launcher(compiled: Any, grid: tuple[int, int, int], cluster: int = 1) -> Callable[[int, Sequence[Any]], None]:
    """`launch(stream, arguments)` of a compiled kernel: Triton's own C function, without the Python around it.

    arguments: all of the kernel's parameters in order; pointers as integers, and for each descriptor its tensor map,
    shape and strides one after another. The current device must be the one it was compiled on. Hooks that are set on
    launches (profilers) are called. cluster: programs of a cluster, which Triton launches for kernels of several CTAs a
    program, and no less for those of one.
    """
    with loading:  # Triton shows a binary as loaded before all of its handles are set
        compiled._init_handles()
    run = compiled.run
    assert run.global_scratch_size == 0 and run.profile_scratch_size == 0
    launch = run.launch
    if launch.__name__ == "inner":  # Triton wraps kernels with descriptors in a slow encoding of their tensor maps
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, packed = compiled.function, compiled.packed_metadata
    if cluster > 1:
        num_warps, _, shared = packed
        packed, grid = (num_warps, cluster, shared), (grid[0] // cluster, *grid[1:])
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl

    def hooks(stream: int, arguments: Sequence[Any]) -> tuple[Any, Any, Any]:
        if not (enter.calls or leave.calls):
            return None, None, None
        return compiled.launch_metadata(grid, stream, *arguments), enter, leave

    if not hasattr(run, "arg_annotations"):  # Triton 3.6

        def call_3_6(stream: int, arguments: Sequence[Any]) -> None:
            launch(*grid, stream, function, cooperative, pdl, None, None, packed, *hooks(stream, arguments), *arguments)

        return call_3_6
    annotations, signature = run.arg_annotations, run.kernel_signature

    def call(stream: int, arguments: Sequence[Any]) -> None:
        launch(
            *(*grid, stream, function, cooperative, pdl, packed, *hooks(stream, arguments)),
            *(None, None, annotations, signature, arguments),
        )

    return call


TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: TMA rounds fp32 to tf32 on its way (as CUTLASS has it do)


def tensor_maps(compiled: Any) -> list[Callable[..., Any]]:
    """For each descriptor among a compiled kernel's parameters, `encode(address, shape, strides, to_tf32, rows)`: its
    tensor map; rows: along the last dimension but one that one copy moves, where those are not the kernel's box's."""
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor

    def encoder(meta: dict[str, Any]) -> Callable[..., Any]:
        element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]

        def encode(
            address: int, shape: Sequence[int], strides: Sequence[int], to_tf32: bool = False, rows: int | None = None
        ) -> Any:
            *outer, box_rows, columns = meta["block_size"]
            return fill(
                *(address, meta["swizzle"], meta["elem_size"], TFLOAT32 if to_tf32 else element),
                *([*outer, rows or box_rows, columns], shape, strides, 0),
            )

        return encode

    return [encoder(meta) for meta in compiled.metadata.tensordesc_meta or ()]


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


# --- Triton: compiling where there is no GPU ---


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


@contextmanager
def compiling_for(capability: tuple[int, int], cache: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Inside, `kernel.warmup` compiles for a GPU of that compute capability, here or not, as it would on that GPU, so
    that what it puts into Triton's cache is found there. cache: another folder for that cache.

    Triton has one driver for all threads: nothing may be launched meanwhile, and threads started inside compile for
    that GPU too.
    """
    driver = triton.runtime.driver
    before = driver._active
    with triton.knobs.cache.scope():
        if cache is not None:
            triton.knobs.cache.dir = str(cache)
        driver.set_active(_Elsewhere(capability))
        try:
            yield
        finally:
            driver.set_active(before)


@contextmanager
def compilations(note: Callable[[str, bool], None]) -> Iterator[None]:
    """Inside, `note(hash, found)` is called, in the thread that compiles, for each kernel that Triton makes or finds in
    its cache on disk. hash: of all that decides the binary."""

    def listener(*, metadata: Any, cache_hit: bool, **_: Any) -> None:
        note(metadata["hash"], cache_hit)

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listener
        yield


def c_compiler() -> str | None:
    """The command of the C compiler that Triton builds its launcher with, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


# Up to Triton 3.7 what is built with a C compiler is found by its source alone; later also by the folders it was linked
# in, of which one is the GPU driver's.
LAUNCHER_NAMES_DRIVER: bool = hasattr(build, "compile_so_from_file")
# Triton 3.6 also builds a launcher for each kernel.
LAUNCHERS_OF_KERNELS: bool = hasattr(nvidia, "make_launcher")


def build_launcher(kernels: Sequence[Any] = (), cache: str | os.PathLike[str] | None = None) -> str | None:
    """Builds what Triton loads to launch kernels into its cache, with a C compiler but without a GPU's driver, so that
    a machine with a GPU needs no compiler; why it cannot be built, or None once it is there.

    kernels: that were compiled; Triton 3.6 builds a launcher for each. cache: another folder for Triton's cache.
    """
    compiler = c_compiler()
    if compiler is None:
        return "there is no C compiler: set CC, or install gcc"
    try:
        folders = nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        if LAUNCHER_NAMES_DRIVER:
            return "set TRITON_LIBCUDA_PATH, here and where the GPU is, to the folder that has libcuda.so.1 there"
        folders = []
    link: dict[str, Any] = {
        "library_dirs": [nvidia.libdevice_dir, *folders],
        "include_dirs": nvidia.include_dirs,
        "libraries": nvidia.libraries,
    }
    source = Path(nvidia.dirname, "driver.c")
    launchers = [_launcher_source(kernel) for kernel in kernels] if LAUNCHERS_OF_KERNELS else []
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), _linking_in(folder):
        try:
            _make_stand_in(compiler, folder, [source.read_text(), *launchers[:1]])
            if cache is not None:
                triton.knobs.cache.dir = str(cache)
            if LAUNCHER_NAMES_DRIVER:
                build.compile_so_from_file(str(source), "cuda_utils", **link)
            else:
                _build_unloaded("cuda_utils", source.read_text(), link)
            for launcher in launchers:
                _build_unloaded("__triton_launcher", launcher, link)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip()
            return f"{compiler}: {words.splitlines()[-1]}"
    return None


def _make_stand_in(compiler: str, folder: str, sources: Sequence[str]) -> None:
    """Makes a libcuda.so.1 with the functions that the sources call, and nothing in them: what a linker looks for."""
    names = sorted({name for source in sources for name in re.findall(r"\bcu[A-Z]\w*", source)})
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


def _launcher_source(kernel: Any) -> str:
    """Of a compiled kernel's launcher, in Triton 3.6."""
    source = kernel.src
    numbers = {(source.fn.arg_names.index(x),) if isinstance(x, str) else x: v for x, v in source.constants.items()}
    return nvidia.make_launcher(numbers, dict(source.signature), getattr(kernel.metadata, "tensordesc_meta", None))


# --- Triton: its tuner ---


class Autotuner(triton.runtime.Autotuner):
    """`triton.autotune`'s tuner, with a method around each of its measurements, and one that says what is tried."""

    configs_timings: dict[triton.Config, list[float]]  # of the last tuning: median, p20 and p80 in milliseconds

    def legal(self, arguments: dict[str, Any]) -> list[triton.Config]:
        """What a tuning tries, given the kernel's arguments by name."""
        return list(self.configs)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        self.configs_timings = {}  # Triton 3.9 leaves those of another shape there if it has one configuration to try
        return self.legal(kwargs)

    def trial(self, measure: Callable[[], list[float]], config: triton.Config, meta: dict[str, Any]) -> list[float]:
        """What `measure()` gives: milliseconds, the median and two quantiles. meta: the kernel's arguments by name."""
        return measure()

    def _bench(self, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        measure = super()._bench
        return self.trial(lambda: measure(*args, config=config, **meta), config, meta)


# --- torch: devices and streams ---

# The current device's index, and the handle of its current stream; missing where torch was built without CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


# Keeps the current stream busy for so many clocks of a multiprocessor.
occupy: Callable[[int], None] = torch.cuda._sleep


def stream_of_graph_trees(device: int) -> int | None:
    """The handle of the stream on which Inductor's trees of CUDA graphs (`mode="reduce-overhead"`) warm up and capture
    what this thread compiles; None where there are none."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    key = "tree_manager_containers"  # it is there once for each thread, and handed to those of a backward
    if trees is None or not (hasattr(trees.local, key) or torch._C._is_key_in_tls(key)):
        return None
    manager = trees.get_manager(device, create_if_none_exists=False)
    return None if manager is None else int(manager.stream.cuda_stream)


# --- torch: the dispatcher ---

# Dispatch keys of tensors that hold others, or nothing.
_WRAPPED = 0
for _name in ("Python", "Functionalize", "Batched", "FuncTorchBatched", "FuncTorchGradWrapper", "ZeroTensor"):
    _WRAPPED |= torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_name)).raw_repr()  # type: ignore[arg-type]

_is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiles: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_tracing_state: Callable[[], object] = torch._C._get_tracing_state

below_autograd = torch._C._AutoDispatchBelowAutograd


def must_dispatch() -> object:
    """Whether a compiler, a dispatch mode, a tracer, a profiler or forward differentiation is active: it sees only what
    goes through the dispatcher."""
    return _is_compiling() or _dispatch_modes() or _tracing_state() or _profiles() or forward_ad._current_level >= 0


# Whether one of torch.func's transforms is active.
in_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def differ(x: int | torch.SymInt, y: int | torch.SymInt) -> bool:
    """Whether sizes are known to differ; a compiler may know a size only when its code runs."""
    unequal = x != y
    if not _is_compiling() and not isinstance(unequal, torch.SymBool):  # to Dynamo it is a bool
        return bool(unequal)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(unequal)


def may_differ(x: int | torch.SymInt, y: int | torch.SymInt) -> bool:
    """Whether sizes differ, or are not known to be the same."""
    unequal = x != y
    if not _is_compiling() and not isinstance(unequal, torch.SymBool):
        return bool(unequal)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(unequal)


def is_wrapper(x: torch.Tensor) -> bool:
    """Whether x holds other tensors (a subclass, functionalization, vmap, torch.func) or no data at all."""
    return bool(torch._C._dispatch_keys(x).raw_repr() & _WRAPPED)


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements of x share memory, as far as torch can tell from its strides."""
    return torch._debug_has_internal_overlap(x) == 1


def withdraw(library: torch.library.Library) -> None:
    """Takes back all that `library` registered; what was there before it is there again."""
    library._destroy()


# --- torch: autograd ---

SingleLevelFunction = torch.autograd.function._SingleLevelFunction
single_level_autograd = enable_single_level_autograd_function


def differentiates_forward(*tensors: torch.Tensor | None) -> bool:
    """Whether a level of forward differentiation is open, as a call with these tensors sees it."""
    if forward_ad._current_level >= 0:
        return True
    if _is_compiling():
        return False
    # What Dynamo has traced opens levels past torch's Python, which does not know of them then.
    transform = in_transform()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Jvp:
        return True
    if not _dispatch_modes():
        return False
    with forward_grad_enabled(), torch._C._DisableTorchDispatch():  # or those modes would see it
        return any(x is not None and dual(x)[1] is not None for x in tensors)


def dual(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x without its tangent, and its tangent, if it has one: of torch's only level, whose number is 0."""
    primal, tangent = torch._VF._unpack_dual(x, level=0)
    return primal, tangent


def forward_grad_enabled() -> Any:
    """A context in which forward differentiation records again."""
    return forward_ad._set_fwd_grad_enabled(True)


backward_here = torch._C._current_graph_task_id  # the number of the one that this thread runs a part of, or -1


def context_of_backward() -> Context | None:
    """The context in which the backward was started that this thread runs a part of; None where it runs none."""
    key = "context"  # torch.autograd.graph._engine_run_backward keeps it there, for all of the backward's threads
    running = backward_here() >= 0
    found: Context | None = torch._C._get_obj_in_tls(key) if running and torch._C._is_key_in_tls(key) else None
    return found


# --- torch: Dynamo ---

_eval_frame = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def hide_from_dynamo(function: _Function) -> _Function:
    """`function`, run as it is, with all that it calls, when a compiled function or a graph break comes to it.

    As torch.compiler.disable, but at no cost for a call, and without the second that importing Dynamo takes.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


# --- torch: DTensor ---


def share_sharding_decisions(operator: Any, first_static: int) -> None:
    """Has DTensor tell apart calls of `operator` by its arguments from number `first_static` on when it looks up how an
    earlier one was sharded; register_sharding by itself counts from the first integer on."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    schema_info = RuntimeSchemaInfo(static_argnum=first_static, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = schema_info


# --- torch: Inductor ---


@cache
def _inductor_choices(kernels: tuple[tuple[str, Callable[..., object]], ...], state: str) -> dict[str, Any]:
    """Inductor's candidates by the names of torch's kernels: each is called kernel(*operands, out=out, **scalars).

    They stay in Inductor's namespace of kernels, where generated code looks for them, from a cache or not. state: what
    their times depend on, because Inductor keeps times on disk.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice, extern_kernels

    class Choice(ExternKernelChoice):
        def hash_key(self) -> str:  # type: ignore[override]
            return f"{super().hash_key()} {state}"

    missing = [name for name, _ in kernels if not hasattr(extern_kernels, name)]
    if missing:
        raise AttributeError(f"it has no kernel {missing[0]}")
    return {name: Choice(kernel, name=f"triton_gemm_{name}") for name, kernel in kernels}


def offer_to_inductor(
    kernels: Mapping[str, Callable[..., object]],
    tag: str,
    takes: Callable[[Sequence[Any], Any, Mapping[str, Any]], bool],
) -> Callable[[], None]:
    """Has Inductor's autotuning time kernels[name] wherever it times torch's kernel of that name and `takes(operands,
    layout, scalars)` is true; what it returns takes that back. RuntimeError where Inductor is not as expected.

    Candidates are offered only while `tag` is in torch.compiler.config.cache_key_tag, which is in the keys of all
    caches of compiled graphs: a graph that may call them is found only by a process that has them.
    """
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.kernel import bmm, mm  # noqa: F401 (they make torch's own candidates)
        from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice
        from torch._inductor.virtualized import V

        wanted = ("input_nodes", "layout", "kwargs")
        if not set(wanted) <= set(inspect.signature(ExternKernelChoice.bind).parameters):
            raise AttributeError(f"ExternKernelChoice.bind does not take {', '.join(wanted)}")
        found = InductorChoices.get_template_configs
        choices = _inductor_choices(tuple(kernels.items()), tag)
        assert isinstance(config.max_autotune, bool) and isinstance(torch.compiler.config.cache_key_tag, str)
    except (ImportError, AttributeError, AssertionError, TypeError) as error:
        raise RuntimeError(f"the Inductor of torch {torch.__version__} is not as expected: {error}") from error

    def twin(caller: Any) -> Any:
        """Our candidate for what a candidate of torch's computes, or None."""
        choice = choices.get(caller.choice.name) if isinstance(caller, ExternKernelCaller) else None
        if choice is None or not takes(caller.input_nodes, caller.layout, caller.kwargs):
            return None
        return choice.bind(caller.input_nodes, caller.layout, **caller.kwargs)

    @wraps(found)
    def get_template_configs(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        callers: list[Any] = found(self, *arguments, **named)
        tunes = config.max_autotune or config.max_autotune_gemm
        if not tunes or V.graph.cpp_wrapper or tag not in torch.compiler.config.cache_key_tag:
            return callers  # where nothing is timed, or where C++ would have to call Python
        return [*callers, *filter(None, map(twin, callers))]

    InductorChoices.get_template_configs = get_template_configs  # type: ignore[method-assign]

    def take_back() -> None:
        if InductorChoices.get_template_configs is get_template_configs:
            InductorChoices.get_template_configs = found  # type: ignore[method-assign]

    return take_back
