"""Each use of what is private of torch, tried."""

from __future__ import annotations

import inspect
import os
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.processes import printed
from tests.support.threads import at_once
from triton_gemm import compat
from triton_gemm.functional import ops, sharding


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
        assert at_once(compat.is_profiling) == [True] and compat.is_profiling()
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
    requests: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "memory_snapshot", lambda **how: requests.append(how) or [{"device": 0}])
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)  # 2.15's asks the driver
        assert compat.memory_segments() == [{"device": 0}] and requests[0].keys() <= {"include_traces"}
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
        assert compat.memory_segments() == [] and len(requests) == 1


def _stream_of_graph_trees() -> None:
    from torch._inductor import cudagraph_trees

    assert compat.stream_of_graph_trees(0) is None
    container = cudagraph_trees.get_container(0)
    assert container.tree_manager is None and "self.stream" in inspect.getsource(cudagraph_trees.CUDAGraphTreeManager)
    container.tree_manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7))
    try:
        seen = [compat.stream_of_graph_trees(0), *at_once(lambda: compat.stream_of_graph_trees(0))]
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
        x = torch._VF._make_dual(torch.ones(1), torch.ones(1), level=level)
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


def _products() -> None:
    """Those of 8 bits into a tensor that is given."""
    a, b = torch.arange(32 * 64).reshape(32, 64) % 7 - 3, torch.arange(64 * 16).reshape(16, 64).T % 5 - 2
    c = torch.empty(32, 16, dtype=torch.int32)
    assert compat.int_mm(a.to(torch.int8), b.to(torch.int8), out=c) is c and torch.equal(c, (a @ b).int())
    eight, one, out = torch.float8_e4m3fn, torch.ones(1), torch.empty(32, 16, dtype=torch.bfloat16)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": False, "out": out}
    assert compat.scaled_mm(a.to(eight), b.to(eight), one, one, **how) is out
    assert torch.equal(out, (a @ b).bfloat16())
