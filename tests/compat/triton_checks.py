"""Each use of what is private of Triton, tried."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from tests.support.fake_driver import sizes_in
from tests.support.patches import replace_all
from tests.support.processes import printed
from tests.support.table_fakes import HOPPER
from triton_gemm import compat
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.kernels import launch as kernel_launch
from triton_gemm.kernels.launch import TensorMap, materialise
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.aot import capture, compile_launch
from triton_gemm.runtime.binaries import operands_of
from triton_gemm.runtime.step import parameters_of
from triton_gemm.selection.select import launches, select

SCALARS = {"alpha": 1.0, "beta": 0.0}


def _interpreting() -> None:
    """A lock in the interpreter, whose tests hold it; here it is nothing."""
    with compat.interpreting, compat.interpreting:
        pass


def _watching() -> None:
    """Of a load; in the interpreter, where exercises count by it, their tests have the rest."""
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    values, seen = np.arange(4, dtype=np.float32), []
    builder, kind = InterpreterBuilder(), tl.pointer_type(tl.float32)
    builder.set_grid_dim(2, 1, 1)
    builder.set_grid_idx(1, 0, 0)
    pointers = TensorHandle(values.ctypes.data + 4 * np.arange(4, dtype=np.uint64), kind)
    mask = TensorHandle(np.array([True, True, True, False]), tl.int1)
    how = [None] * (len(inspect.signature(builder.create_masked_load).parameters) - 2)  # `other`, and hints
    with compat.watching(lambda *call: seen.append(call)):
        loaded = builder.create_masked_load(pointers, mask, *how)
        other_builder, places = InterpreterBuilder(), []
        other_builder.set_grid_dim(2, 3, 1)
        for x, y in itertools.product(range(2), range(3)):  # as the interpreter runs programs
            other_builder.set_grid_idx(x, y, 0)
            places.append(other_builder.grid_idx)
    assert places == [(x, y, 0) for y in range(3) for x in range(2)]  # as a GPU starts them
    builder.create_masked_load(pointers, mask, *how)
    assert loaded.data.tolist() == [0, 1, 2, 0]
    ((what, program, addresses, masked, other),) = seen
    assert (what, program, other) == ("load", (1, 0, 0), False)
    assert (addresses == pointers.data).all() and (masked == mask.data).all()
    square = TensorHandle(np.ones((2, 2), dtype=np.float32), tl.float32)
    precisions = ir.INPUT_PRECISION.TF32, ir.INPUT_PRECISION.IEEE
    with compat.watching(lambda *call: seen.append(call)):
        for precision in precisions:
            builder.create_dot(square, square, square, precision, 0)
    assert [call[::4] for call in seen[1:]] == [("dot", True), ("dot", False)]  # TF32 rounds operands of fp32


def compiled() -> Any:
    """A warp-specialised product with tensor maps, compiled for Hopper."""
    a, b, c = (torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta") for _ in range(3))
    problem = GemmProblem.of(a, b, c)
    (launch,) = launches(problem, select(problem, HOPPER))
    arguments = materialise(launch, {"a": a, "b": b, "c": c, "workspace": a, "counters": a}, SCALARS)
    return launch, compat.compile_kernel(launch.kernel, {**arguments, **launch.options}, (9, 0))


def _launching() -> None:
    """Launches here are what Triton's driver.c makes of them. Triton 3.6 has no such source of launches."""
    driver = compat.launching.driver
    assert driver.TMA_DTYPE_DEVICE_TO_HOST
    if not hasattr(driver, "annotate_arguments"):
        return
    source = Path(driver.dirname, "driver.c").read_text()
    assert "config.gridDimX = gridX * num_ctas;" in source and "config.blockDimX = 32 * num_warps;" in source
    assert "swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, fill);" in source
    assert "CU_TENSOR_MAP_INTERLEAVE_NONE" in source and ": CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;" in source
    # Parameters: the kernel's own, then two pointers.
    assert "int num_params = num_args + 2;" in source
    given = re.findall(r"\(params\[params_idx\+\+\], (\w+)\)", source)
    assert given == ["current_arg", "global_scratch_obj", "profile_scratch_obj"]


def hooks(*called: Callable[..., object]) -> Any:
    """Several as Triton has them."""
    chain = triton.knobs.HookChain()
    for hook in called:
        chain.add(hook)
    return chain


def _launch_hooks() -> None:
    """Chains with hooks, and functions that are assigned in their places."""
    seen: list[tuple[str, Any]] = []

    def noting(name: str) -> Callable[[Any], None]:
        return lambda about: seen.append((name, about.get()))

    a, b, c = map(noting, "abc")
    cases = (None, None, ""), (hooks(), hooks(), ""), (a, None, "a"), (None, b, "b"), (hooks(a, c), hooks(b), "acb")
    for enter, leave, expected in cases:
        with pytest.MonkeyPatch.context() as patch:
            replace_all(patch, triton.knobs.runtime, launch_enter_hook=enter, launch_exit_hook=leave)
            found = compat.launch_hooks()
        assert (found is None) == (expected == "")
        if found is not None:
            about = found.about("a_kernel", 5, 7)
            found.enter(about)
            found.leave(about)
        assert seen == [(name, {"name": "a_kernel", "function": 5, "stream": 7}) for name in expected]
        seen.clear()


def _load_hook() -> None:
    """Called as Triton calls it."""
    source = inspect.getsource(triton.compiler.CompiledKernel._init_handles)
    arguments = re.escape("(self.module, self.function, self.name, self.metadata_group, self.hash)")
    assert re.findall(rf"kernel_load_(\w+)_hook{arguments}", source) == ["start", "end"]
    seen: list[tuple[Any, ...]] = []
    note = lambda *given: seen.append(given)  # noqa: E731
    for hook, times in ((None, 0), (hooks(), 0), (note, 1), (hooks(note, lambda *given: note(*given)), 2)):
        for when, handles in (("start", (None, None)), ("end", (1, 2))):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(triton.knobs.runtime, f"kernel_load_{when}_hook", hook)
                compat.load_hook(when, *handles, "a_kernel", "a hash")
            assert seen == times * [(*handles, "a_kernel", {}, "a hash")]
            seen.clear()


def _compiles_anew() -> None:
    """Settings that change compilation count. Settings that print or cache do not."""
    runtime, compilation, nvidia = triton.knobs.runtime, triton.knobs.compilation, triton.knobs.nvidia
    names = ("always_compile", "override", "dump_ir", "enable_asan"), ("debug",), ("disable_ptxas_opt",)
    assert not compat.compiles_anew()
    for knobs, settings in zip((compilation, runtime, nvidia), names, strict=True):
        for name in settings:
            if hasattr(knobs, name):
                with knobs.scope():  # which takes back the environment variables, too
                    setattr(knobs, name, True)
                    assert compat.compiles_anew(), name
    with compilation.scope():
        compilation.instrumentation_mode = "gsan"
        assert compat.compiles_anew()
    assert not compat.compiles_anew()


def _extension() -> None:
    """Where headers are, and what is read at every call."""
    assert compat.native_refused() is None
    compiling, _ = compat.native_commands(["c++"], "made.so")
    folders = [Path(x.removeprefix("-I")) for x in compiling[0] if x.startswith("-I")]
    for header in ("torch/csrc/autograd/python_variable.h", "ATen/core/Tensor.h", "cuda.h", "Python.h"):
        assert any((folder / header).exists() for folder in folders), header
    assert compat.cxx_compiler() is None or len(compat.native_key()) == 32
    with pytest.raises(ImportError):
        compat.import_native(os.devnull)
    assert isinstance(torch._C._get_fp32_precision_getter("cuda", "matmul"), str)
    of_launches = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    assert all(isinstance(hook.calls, list) for hook in of_launches)


def _machine_code() -> None:
    """All that a launch needs, of a GPU that is not here."""
    launch, kernel = compiled()
    found, of = compat.machine_code(kernel), kernel.metadata
    assert (found.symbol, found.warps, found.ctas, found.shared) == (of.name, of.num_warps, of.num_ctas, of.shared)
    assert kernel.packed_metadata[:3] == (of.num_warps, of.num_ctas, of.shared)
    assert found.code == kernel.asm["cubin"] and found.code[:4] == b"\x7fELF" and not found.cooperative
    assert len(found.types) == len(kernel.src.fn.arg_names) and found.types.count("tensordesc") == len(found.boxes) >= 3
    assert {"*bf16", "i32", "fp32", "constexpr"} <= set(found.types)
    assert {(*box[:3], len(box[3])) for box in found.boxes} == {(3, 2, 9, 3)}, "128 bytes of 16 bits, of bf16"
    numbers = compat.launching.driver.TMA_DTYPE_DEVICE_TO_HOST
    elements = [numbers[x["elem_type"]] for x in of.tensordesc_meta]
    assert [box[2] for box in found.boxes] == elements and set(elements) <= set(range(11)), "as in CUDA's header"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_driver, "tensor_map", lambda *_: bytes(128))
        parameters = parameters_of(found, launch, dict.fromkeys(("a", "b", "c", "workspace", "counters"), 0))
    assert parameters.sizes == sizes_in(kernel.asm["ptx"])


def _without_lines() -> None:
    """The cubin then does not contain the path of the sources."""
    sources = str(Path(compat.__file__).parents[1]).encode()
    for inside, has in ((nullcontext, True), (compat.without_lines, False)):
        with tempfile.TemporaryDirectory() as cache, compat.caching_in(cache), inside():
            assert (sources in compiled()[1].asm["cubin"]) is has


def _compiled_by() -> None:
    found = compat.compiled_by()
    assert found["triton"] == triton.__version__ and re.fullmatch(r"\d+\.\d+(\.\d+)?", found["ptxas"]), found


def _clusters() -> None:
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert compat.CLUSTERS is (version >= (3, 9))


def _tensor_map_parameter() -> None:
    """Inline PTX names a tensor map by its parameter."""
    launch, kernel = compiled()
    found = re.findall(r"\.param \.align \d+ \.b8 (\w+)\[128\]", kernel.asm["ptx"])
    maps = [part for part in launch.arguments.values() if isinstance(part, TensorMap)]
    expected = [compat.tensor_map_parameter(launch.kernel.__name__, i, len(x.block)) for i, x in enumerate(maps)]
    assert found == expected, f"PTX calls the tensor maps {found}, not {expected}: clusters would load from others"


def _capture() -> None:
    launch, _ = compiled()
    operands = {name: torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta") for name in ("a", "b", "c")}
    with capture() as noted:
        launch.kernel[launch.grid](**materialise(launch, operands, SCALARS), **launch.options)
    assert compile_launch(noted[0], (9, 0)).instructions["HGMMA"] > 0


LATE = """
import os, triton_gemm
from triton.runtime.jit import JITFunction
os.environ["TRITON_INTERPRET"] = "1"  # for a kernel of the user's own
from triton_gemm import kernels
assert type(kernels.portable.portable_kernel) is JITFunction, kernels.portable.portable_kernel
assert os.environ["TRITON_INTERPRET"] == "1"
"""


def _decorating() -> None:
    """A kernel's module is imported at its first use, when TRITON_INTERPRET may have changed."""
    printed(LATE, TRITON_INTERPRET=None)


def _aggregate() -> None:
    """Fields by position and by name, plain values as constants, and types as annotated."""

    class Pair:
        left: gl.constexpr
        right: gl.constexpr

    made = compat.aggregate(Pair)
    pair = made(3, right="n")
    assert (pair.left, pair.right) == (3, "n") and isinstance(pair.left, gl.constexpr)
    assert [name for name, _ in pair.type.fields] == ["left", "right"]
    with pytest.raises(TypeError):
        made(3, right=gl.tuple([]))
    # The kernel passes aggregates to its partitions.
    _, kernel = compiled()
    assert "ttg.warp_specialize" in kernel.asm["ttgir"]


def _autotuner() -> None:
    """triton.autotune times a configuration by `_bench`, from which `trial` gets what it measures."""
    tuner, seen = object.__new__(compat.Autotuner), []
    assert "self._bench(*args, config=config, **kwargs)" in inspect.getsource(triton.runtime.Autotuner.run)
    parameters = list(inspect.signature(triton.runtime.Autotuner._bench).parameters.values())
    kinds = [(parameter.name, parameter.kind) for parameter in parameters]
    assert [kind for _, kind in kinds[1:]] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ]
    assert kinds[2][0] == "config"
    tuner.trial = lambda measure, config, meta: seen.append((config, meta)) or [1.0]
    config = triton.Config({})
    assert tuner._bench(config=config, M=3) == [1.0] and seen == [(config, {"M": 3})]
    # What is tried comes from `prune_configs`, once for each tuning.
    assert "= self.prune_configs(kwargs)" in inspect.getsource(triton.runtime.Autotuner.run)
    tuner.legal = lambda arguments: [arguments["M"]]
    assert tuner.prune_configs({"M": 3}) == [3] and tuner.configs_timings == {}


def small() -> Any:
    """A launch that compiles fast, and its operands."""
    problem = GemmProblem.of(*(torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in "abc"))
    (launch,) = launches(problem, select(problem, HOPPER))
    return launch, operands_of(problem, [launch])


def _elsewhere() -> None:
    launch, operands = small()
    seen: list[tuple[str, bool]] = []
    before = triton.runtime.driver._active
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            with compat.compiling_for((9, 0), cache), compat.compilations(lambda *found: seen.append(found)):
                compat.forget_compiled([launch.kernel])
                kernel = kernel_launch.compiled(launch, operands, SCALARS)
        assert list(Path(cache).rglob("*.cubin")), "in the folder that was named"
    with pytest.raises(KeyError), compat.compiling_for((9, 0)):
        raise KeyError
    assert kernel.metadata.target.arch == 90 and triton.runtime.driver._active is before
    assert seen == [(kernel.hash, False), (kernel.hash, True)]


def _from_cache() -> None:
    """Nothing is compiled for it, and what was is found: on disk, or in this process without looking there."""
    launch, operands = small()
    seen: list[bool] = []

    def found() -> Any:
        return kernel_launch.compiled_before(launch, operands, SCALARS)

    with tempfile.TemporaryDirectory() as cache:
        with compat.compiling_for((9, 0), cache), compat.compilations(lambda _, hit: seen.append(hit)):
            launch.kernel.device_caches.pop("sm_90", None)
            assert found() is None and seen == []
            made = kernel_launch.compiled(launch, operands, SCALARS)
            launch.kernel.device_caches.pop("sm_90")
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.always_compile = True
                assert found() is None
            loaded = found()
            assert loaded.hash == made.hash and seen == [False, True]
            assert found() is loaded and kernel_launch.compiled(launch, operands, SCALARS) is loaded
        launch.kernel.device_caches.pop("sm_90")
        os.chmod(cache, 0o500)
        with compat.compiling_for((9, 0), Path(cache, "read-only")):
            assert found() is None
        os.chmod(cache, 0o700)


def _caches() -> None:
    named, before = os.environ.get("TRITON_CACHE_DIR"), dict(vars(triton.knobs.cache))
    with compat.caching_in("there"):
        assert compat.cache_folder() == Path("there") and triton.knobs.cache.dir == "there"
    assert os.environ.get("TRITON_CACHE_DIR") == named and vars(triton.knobs.cache) == before
    here = compat.cache_folder()
    with compat.caching_in(None):
        assert compat.cache_folder() == here


def _hash_triton() -> None:
    """A compilation asks for the very hash."""
    key = triton.runtime.cache.triton_key
    key.cache_clear()
    compat.hash_triton_in_background()
    _, found = compat.hash_triton()  # waits for the thread, or the thread for this
    compiled()
    assert key.cache_info().misses == 1 and key.cache_info().hits > 0 and found == key()


def _set_triton_hash() -> None:
    """A compilation asks for what was taken, unless that is of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.cache, "triton_key", triton.runtime.cache.triton_key)
        before = compat.hash_triton(), compiled()[1].hash
        compat.set_triton_hash((f"{triton.__version__}0", "of another"))
        assert (compat.hash_triton(), compiled()[1].hash) == before
        compat.set_triton_hash((triton.__version__, "taken"))
        assert compat.hash_triton() == (triton.__version__, "taken") and compiled()[1].hash != before[1]
    assert (compat.hash_triton(), compiled()[1].hash) == before


def _build_driver_module() -> None:
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert compat.MODULE_NAMES_DRIVER is (version >= (3, 8))
    if compat.c_compiler() is None:
        return
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_LIBCUDA_PATH", cache)
        patch.setattr(compat.building.nvidia, "libcuda_dirs", compat.building.nvidia.libcuda_dirs.__wrapped__)
        assert compat.build_driver_module(cache=cache) is None
        assert list(Path(cache).rglob("cuda_utils*.so"))
