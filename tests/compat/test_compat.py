"""What is private of torch and Triton, use by use: a version that breaks one fails here, by its name."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon import language as gl

from tests.support.fake_driver import sizes_in
from tests.support.processes import printed
from tests.support.table_fakes import HOPPER
from triton_gemm import compat
from triton_gemm.functional import ops, sharding
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.kernels import launch as kernel_launch
from triton_gemm.kernels.launch import TensorMap, materialise
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.aot import capture, compile_launch
from triton_gemm.runtime.binaries import operands_of
from triton_gemm.runtime.step import parameters_of
from triton_gemm.selection.select import launches, select

ROOM = Path(compat.__file__).parent
PACKAGE = ROOM.parent
VERSIONS = f"torch {torch.__version__} and Triton {triton.__version__}"
SCALARS = {"alpha": 1.0, "beta": 0.0}


def _must_dispatch() -> None:
    assert not compat.must_dispatch()
    with TorchDispatchMode():
        assert compat.must_dispatch()
    with torch.profiler.profile():
        assert compat.must_dispatch()
    with torch.autograd.forward_ad.dual_level():
        assert compat.must_dispatch()
    seen: list[object] = []
    torch.jit.trace(lambda x: seen.append(compat.must_dispatch()) or x + 1, torch.ones(1), check_trace=False)
    assert seen == [seen[0]] and seen[0]


def _override_functions() -> None:
    class Plain(torch.Tensor):
        pass

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: Any, **named: Any) -> Any:
            return super().__torch_function__(*arguments, **named)

    class Disabled(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    x = torch.ones(2)
    assert not compat.override_functions(x, None, torch.nn.Parameter(x), x.as_subclass(Plain), x.as_subclass(Disabled))
    assert compat.override_functions(x, x.as_subclass(Own))


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


def _grad_enabled() -> None:
    assert compat.grad_enabled()
    with torch.no_grad():
        assert not compat.grad_enabled()
    with torch.inference_mode(), torch.enable_grad():
        assert not compat.grad_enabled()
    assert torch.compile(lambda x: x + compat.grad_enabled(), fullgraph=True, backend="eager")(torch.ones(1)) == 2


def _is_wrapper() -> None:
    assert not compat.is_wrapper(torch.ones(2))
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(compat.is_wrapper(x)) or x)(torch.ones(2))
    torch.func.grad(lambda x: seen.append(compat.is_wrapper(x)) or x)(torch.tensor(1.0))
    torch.func.functionalize(lambda x: seen.append(compat.is_wrapper(x)) or x)(torch.ones(2))
    assert seen == [True, True, True]
    assert compat.is_wrapper(torch._efficientzerotensor(2))


def _overlaps_itself() -> None:
    assert compat.overlaps_itself(torch.ones(1).expand(3))
    assert not compat.overlaps_itself(torch.ones(3))


def _free_in_children() -> None:
    for kind in (threading.Lock, threading.RLock):
        lock, end = compat.free_in_children(kind()), threading.Event()
        holder = threading.Thread(target=lambda lock=lock, end=end: lock.acquire() and end.wait() and lock.release())
        holder.start()
        while lock.acquire(blocking=False):
            lock.release()
        child = os.fork()
        if child == 0:
            os._exit(not lock.acquire(blocking=False))
        end.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _withdraw() -> None:
    x, library = torch.ones(2, 2), torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: a, "CPU", allow_override=True)
    assert torch.equal(torch.mm(x, x), x)
    compat.withdraw(library)
    assert torch.equal(torch.mm(x, x), 2 * x)


def _library_of() -> None:
    """Of an operator that no module has; a second one takes the first one's place."""
    withdrawn: list[bool] = []
    ones, call = torch.ones(1), lambda x: torch.ops.triton_gemm.compat_test(x)
    try:
        for factor in (2, 3):
            library = compat.library_of("compat_test")
            library.define("compat_test(Tensor x) -> Tensor")
            library.impl("compat_test", lambda x, factor=factor: factor * x, "CPU")
            compat.before_withdrawal("compat_test", lambda factor=factor: withdrawn.append(call(ones) == factor))
            assert call(ones) == factor and withdrawn == [True] * (factor - 2)
    finally:
        compat.withdraw(vars(torch.ops.triton_gemm)["_libraries"].pop("compat_test")[0])
    assert not hasattr(torch.ops.triton_gemm, "compat_test")


def _single_level() -> None:
    class Cube(compat.SingleLevelFunction):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3 * ctx.saved_tensors[0] ** 2

    x = torch.tensor(2.0, requires_grad=True)
    with compat.single_level_autograd():
        Cube.apply(x).backward()
    assert x.grad == 12


def _in_transform() -> None:
    seen = []
    torch.func.vmap(lambda x: seen.append(bool(compat.in_transform())) or x)(torch.ones(2))
    assert seen == [True] and not compat.in_transform()


def _sizes() -> None:
    seen = []

    def watch(mask: torch.Tensor) -> torch.Tensor:
        rows = mask.nonzero().shape[0]
        seen.append((compat.may_differ(rows, 1), compat.differ(rows, 1), compat.differ(rows, rows)))
        return mask

    for differ in (compat.differ, compat.may_differ):
        assert differ(2, 1) and not differ(1, 1)
    make_fx(watch, tracing_mode="symbolic")(torch.ones(2))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(watch, backend="eager", fullgraph=True)(torch.ones(2))
    assert seen == [(True, False, False)] * 2


def _is_profiling() -> None:
    assert not compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        seen: list[bool] = []
        other = threading.Thread(target=lambda: seen.append(compat.is_profiling()))
        other.start()
        other.join()
        assert seen == [True] and compat.is_profiling()
    assert not compat.is_profiling()


def _fills_what_is_empty() -> None:
    assert not compat.fills_what_is_empty()
    torch.use_deterministic_algorithms(True)
    try:
        assert compat.fills_what_is_empty() and torch.empty(3).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def _memory_segments() -> None:
    """It takes what it asks for, and gives nothing where a history is recorded."""
    asked: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "memory_snapshot", lambda **how: asked.append(how) or [{"device": 0}])
        assert compat.memory_segments() == [{"device": 0}] and asked[0].keys() <= {"include_traces"}
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
        assert compat.memory_segments() == [] and len(asked) == 1


def _stream_of_graph_trees() -> None:
    from torch._inductor import cudagraph_trees

    assert compat.stream_of_graph_trees(0) is None
    container = cudagraph_trees.get_container(0)
    assert container.tree_manager is None and "self.stream" in inspect.getsource(cudagraph_trees.CUDAGraphTreeManager)
    container.tree_manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7))  # type: ignore[assignment]
    seen: list[int | None] = []
    other = threading.Thread(target=lambda: seen.append(compat.stream_of_graph_trees(0)))
    try:
        seen.append(compat.stream_of_graph_trees(0))
        other.start()
        other.join()
    finally:
        container.tree_manager = None
    assert seen == [7, None]


def _below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with compat.below_autograd():
        assert (x + 1).grad_fn is None


def _forward() -> None:
    assert not compat.differentiates_forward()
    with torch.autograd.forward_ad.dual_level():
        assert compat.differentiates_forward()
        with torch.no_grad(), compat.forward_grad_enabled():
            one = torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1))
            primal, tangent = compat.dual(one + one)
            assert tangent == 2 and compat.dual(primal) == (2, None)
    seen = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.differentiates_forward(x))
        return x

    torch.func.jvp(watch, (torch.ones(1),), (torch.ones(1),))
    torch.func.vmap(watch)(torch.ones(1))
    # As in a graph that Dynamo has traced: torch's Python knows of no level.
    level = torch._C._enter_dual_level()
    try:
        x = torch._VF._make_dual(torch.ones(1), torch.ones(1), level=level)  # type: ignore[attr-defined]
        without = torch.ones(1)
        with TorchDispatchMode():
            watch(x)
            watch(without)
    finally:
        torch._C._exit_dual_level(level)
    assert seen == [True, False, True, False]


VARIABLE: ContextVar[str] = ContextVar("variable")


def _backward() -> None:
    """Of the thread that started it; and not kept afterwards."""
    seen: list[object] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(compat.context_of_backward()[VARIABLE]))
    token = VARIABLE.set("started")
    try:
        y.backward()
        assert compat.context_of_backward() is None
    finally:
        VARIABLE.reset(token)
    assert seen == ["started"]


def _increment_versions() -> None:
    """Of several tensors, as autograd.graph.increment_version counts."""
    x, y = torch.ones(1), torch.ones(1)
    compat.increment_versions((x, y))
    compat.increment_versions((x,))
    assert (x._version, y._version) == (2, 1)


HIDDEN = """
import sys, torch
from triton_gemm.compat import hide_from_dynamo
seen = []
def callee(x):
    seen.append(torch.compiler.is_dynamo_compiling())
    return x + 1
@hide_from_dynamo
def hidden(x):
    return callee(x)
assert "torch._dynamo" not in sys.modules, "importing Dynamo takes a second"
traced = []
def backend(graph, _):
    traced.append(graph)
    return graph.forward
assert torch.compile(lambda x: hidden(2 * x) * 3, backend=backend)(torch.ones(1)) == 9
assert seen == [False] and len(traced) == 2, (seen, traced)
"""


def _hide_from_dynamo() -> None:
    printed(HIDDEN)


def _share_sharding_decisions() -> None:
    import torch.distributed.tensor

    sharding.register()
    found = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[ops._op]
    assert found.static_argnum == sharding.ACTIVATION


def _devices() -> None:
    built = torch.backends.cuda.is_built()
    assert callable(compat.current_device) is callable(compat.current_stream) is built
    assert list(inspect.signature(compat.occupy).parameters) == ["cycles"]


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
            patch.setattr(triton.knobs.runtime, "launch_enter_hook", enter)
            patch.setattr(triton.knobs.runtime, "launch_exit_hook", leave)
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


OFFER = """
import torch
from triton_gemm.compat import offer_to_inductor
timed = []
def mm(a, b, *, out):
    timed.append(out.shape)
    return torch.mm(a, b, out=out)
def addmm(input, a, b, *, out, alpha, beta):
    timed.append((alpha, beta))
    return torch.addmm(input, a, b, out=out, alpha=alpha, beta=beta)
seen = []
def takes(operands, layout, scalars):
    seen.append(([list(map(int, x.get_size())) for x in operands], layout.device.type, layout.dtype, scalars))
    return True
take_back = offer_to_inductor({"mm": mm, "addmm": addmm}, "a tag", takes)
def compiled():
    torch._dynamo.reset()
    seen.clear(), timed.clear()
    function = torch.compile(lambda a, b, bias: (a @ b, torch.addmm(bias, a, b, alpha=2)), mode="max-autotune")
    a, b, bias = torch.randn(24, 40), torch.randn(40, 16), torch.randn(16)
    product, total = function(a, b, bias)
    torch.testing.assert_close(product, a @ b)
    torch.testing.assert_close(total, 2 * a @ b + bias)
torch._inductor.config.max_autotune_gemm_backends = "ATEN"
torch._inductor.config.force_disable_caches = True
compiled()
assert not seen, "offered without the tag"
torch.compiler.config.cache_key_tag = "other, a tag"
compiled()
(a, b), (bias, *_) = (x[0] for x in sorted(seen, key=lambda x: len(x[0])))
assert (a, b) == ([24, 40], [40, 16]) and bias[-1] == 16, seen
assert {x[1:3] for x in seen} == {("cpu", torch.float32)}, seen
assert torch.Size([24, 16]) in timed and (2, 1) in timed, timed
from torch._inductor.choices import InductorChoices
assert hasattr(InductorChoices.get_template_configs, "__wrapped__")
take_back()
assert not hasattr(InductorChoices.get_template_configs, "__wrapped__")
compiled()
assert not seen
"""


def _offer_to_inductor() -> None:
    printed(OFFER)


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
    tuner.trial = lambda measure, config, meta: seen.append((config, meta)) or [1.0]  # type: ignore[method-assign]
    config = triton.Config({})
    assert tuner._bench(config=config, M=3) == [1.0] and seen == [(config, {"M": 3})]
    # What is tried comes from `prune_configs`, once for each tuning.
    assert "= self.prune_configs(kwargs)" in inspect.getsource(triton.runtime.Autotuner.run)
    tuner.legal = lambda arguments: [arguments["M"]]  # type: ignore[method-assign]
    assert tuner.prune_configs({"M": 3}) == [3] and tuner.configs_timings == {}


def _elsewhere() -> None:
    problem = GemmProblem.of(*(torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in "abc"))
    (launch,) = launches(problem, select(problem, HOPPER))
    seen: list[tuple[str, bool]] = []
    before = triton.runtime.driver._active
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            with compat.compiling_for((9, 0), cache), compat.compilations(lambda *found: seen.append(found)):
                compat.forget_compiled([launch.kernel])
                kernel = kernel_launch.compiled(launch, operands_of(problem, [launch]), SCALARS)
        assert list(Path(cache).rglob("*.cubin")), "in the folder that was named"
    assert kernel.metadata.target.arch == 90 and triton.runtime.driver._active is before
    assert seen == [(kernel.hash, False), (kernel.hash, True)]


def _from_cache() -> None:
    """Nothing is compiled for it, and what was is found: on disk, or in this process without looking there."""
    problem = GemmProblem.of(*(torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in "abc"))
    (launch,) = launches(problem, select(problem, HOPPER))
    operands = operands_of(problem, [launch])
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
        compat.building.nvidia.libcuda_dirs.cache_clear()
        try:
            assert compat.build_driver_module(cache=cache) is None
        finally:
            compat.building.nvidia.libcuda_dirs.cache_clear()
        assert list(Path(cache).rglob("cuda_utils*.so"))


def _tested() -> None:
    for name, version in (("torch", torch.__version__), ("Triton", triton.__version__)):
        oldest, newest = compat.TESTED[name]
        assert oldest <= tuple(map(int, version.split(".")[:2])) <= newest


def _products() -> None:
    """Those of 8 bits into a tensor that is given."""
    a, b = torch.arange(32 * 64).reshape(32, 64) % 7 - 3, torch.arange(64 * 16).reshape(16, 64).T % 5 - 2
    c = torch.empty(32, 16, dtype=torch.int32)
    assert compat.int_mm(a.to(torch.int8), b.to(torch.int8), out=c) is c and torch.equal(c, (a @ b).int())
    eight, one, out = torch.float8_e4m3fn, torch.ones(1), torch.empty(32, 16, dtype=torch.bfloat16)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": False, "out": out}
    assert compat.scaled_mm(a.to(eight), b.to(eight), one, one, **how) is out
    assert torch.equal(out, (a @ b).bfloat16())


# The names of `compat` that a check tests, where they are not the check's own name.
TESTED_NAMES = {
    "_library_of": "library_of before_withdrawal",
    "_autotuner": "Autotuner",
    "_clusters": "CLUSTERS",
    "_tested": "TESTED",
    "_build_driver_module": "build_driver_module c_compiler MODULE_NAMES_DRIVER",
    "_caches": "cache_folder caching_in",
    "_elsewhere": "compilations compiling_for Compiling compiling forget_compiled",
    "_capture": "JITFunction compile_kernel",
    "_single_level": "SingleLevelFunction single_level_autograd",
    "_devices": "current_device current_stream occupy",
    "_sizes": "differ may_differ",
    "_forward": "differentiates_forward dual forward_grad_enabled",
    "_backward": "context_of_backward backward_here",
    "_hash_triton": "hash_triton hash_triton_in_background",
    "_products": "int_mm scaled_mm",
    "_launching": "loading",
    "_machine_code": "MachineCode machine_code",
    "_extension": "cxx_compiler import_native native_commands native_key native_refused set_up_native",
}
CHECKS = {name: check for name, check in globals().items() if name[0] == "_" and inspect.isfunction(check)}
USES = {use for name in CHECKS for use in TESTED_NAMES.get(name, name[1:]).split()}
# Public names of Gluon that 3.9 changed, and device functions: every kernel's tests use them.
PUBLIC = {
    *("INTERPRETED", "async_load", "reinterpret", "tma_load", "tma_store"),
    *(
        *("dot_operand", "multiplies_block_scaled", "multiply_add", "number", "power_of_two", "prefetch"),
        *("reciprocal", "round_tf32", "round_to"),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_each_use_works(name: str) -> None:
    try:
        CHECKS[name]()
    except Exception as error:
        uses = TESTED_NAMES.get(name, name[1:])
        pytest.fail(f"compat.{uses} does not work with {VERSIONS}: {type(error).__name__}: {error}")


def test_each_use_is_tried() -> None:
    defined = set()
    for node in (node for path in ROOM.glob("*.py") for node in ast.parse(path.read_text()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert {name for name in defined if not name.startswith("_")} | {"JITFunction", "aggregate"} == {*USES, *PUBLIC}
    assert set(compat.__all__) == {*USES, *PUBLIC}


def test_no_module_of_the_room_has_the_name_of_what_it_offers() -> None:
    assert {path.stem for path in ROOM.glob("*.py")}.isdisjoint(compat.__all__)


def private(source: str) -> Iterator[str]:
    """The private names of torch and Triton in a module: with an underscore in front, or imported from below Triton's
    compiler, backends and JIT."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith(("torch.", "triton.", "tl.", "gl.")) and re.match("_[^_]", node.attr):
                yield dotted
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "triton")):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            internal = (node.module or "").startswith(("triton.backends", "triton.compiler", "triton.runtime"))
            if internal or any(word.startswith("_") for word in words):
                yield f"{node.module}: {', '.join(alias.name for alias in node.names)}"


def test_private_names_are_found() -> None:
    source = "import torch\ntorch._C._x()\nfrom triton.runtime.jit import JITFunction\ntorch.mm(a, torch.__version__)"
    assert sorted(private(source)) == ["torch._C", "torch._C._x", "triton.runtime.jit: JITFunction"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_names_what_is_private(path: Path) -> None:
    if path.parent != ROOM:
        assert list(private(path.read_text())) == []
