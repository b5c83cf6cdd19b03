"""Calls like one before on a GPU: C++ gives the bits that Python gives, in graphs, on streams and on other devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

import triton_gemm
from tests.gpu.calls import captured
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.gpu.runtime.test_plan_gpu import random
from tests.support.kernel_cases import bits
from tests.support.threads import at_once
from triton_gemm.functional import api, fast_path, ops, routing
from triton_gemm.problem import ACTIVATIONS, GATES
from triton_gemm.runtime import native, native_build, native_file
from triton_gemm.selection import generation


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The extension, loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("TRITON_GEMM_NATIVE")
        native_file.setting.cache_clear()
        if (why := native.why_not()) is not None:
            pytest.skip(why)
        if native.module() is None:
            patch.setattr(native_build, "_begun", False)  # another test may have begun without a cache
            native.module()
            for thread in threading.enumerate():
                if thread.name == "triton_gemm native":
                    thread.join(300)
        assert native.module() is not None, native.state()
        yield


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call was made before."""
    monkeypatch.setattr(api, "_fast", fast_path.FastPath())
    routing._made_under.cache_clear()


class Spy:
    """A table that counts the calls that it launches."""

    def __init__(self, table: Any) -> None:
        self.table, self.launched = table, 0

    def take(self, *call: Any) -> torch.Tensor | None:
        c: torch.Tensor | None = self.table.take(*call)
        self.launched += c is not None
        return c

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def spy(fast: fast_path.FastPath) -> Spy:
    assert fast.table is not None, "no call is C++'s"
    fast.table = fast.table if isinstance(fast.table, Spy) else Spy(fast.table)
    return fast.table


def both(call: Callable[[], torch.Tensor], fast: Callable[[], fast_path.FastPath]) -> None:
    """Python's result and C++'s of one call have the same bits and the same layout."""
    call()  # planned and compiled
    by_python = call().clone(memory_format=torch.preserve_format)
    table = spy(fast())
    before = table.launched
    by_cpp = call()
    assert table.launched == before + 1
    assert torch.equal(bits(by_cpp), bits(by_python))
    assert (by_cpp.shape, by_cpp.dtype) == (by_python.shape, by_python.dtype)


SIZES = {
    "large": (1024, 1288, 264),
    "split": (96, 160, 8192),
    "one row": (1, 4096, 4096),
    "few rows": (8, 4096, 4096),
    "odd": (200, 111, 333),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_all_kernels_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    M, N, K = SIZES[name]
    a, b, weight, bias = (random(*shape, dtype=dtype) for shape in ((M, K), (K, N), (N, K), (N,)))
    out = torch.empty(M, N, dtype=dtype, device="cuda")
    added = random(M, N, dtype=dtype)
    for call in (
        lambda: triton_gemm.matmul(a, b),
        lambda: triton_gemm.matmul(a, b, out=out),
        lambda: triton_gemm.addmm(bias, a, b),
        lambda: triton_gemm.linear(a, weight, bias),
        lambda: triton_gemm.addmm(added, a, b, alpha=0.3),
        lambda: triton_gemm.addmm(added.mT.contiguous().mT, a, b, out=out),
        lambda: triton_gemm.linear(a, weight, residual=added),
        lambda: triton_gemm.linear(a, weight, bias, "gelu", residual=added),
    ):
        both(call, lambda: api._fast)
    exact = torch.addmm(added.double(), a.double(), b.double())
    assert (triton_gemm.addmm(added, a, b).double() - exact).norm() < 0.01 * exact.norm()


FLOAT = (torch.bfloat16, torch.float32)
TRAINED: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, weight, gate, bias: triton_gemm.linear(x, weight, bias),
    "matmul": lambda x, weight, gate, bias: triton_gemm.matmul(x, weight.T),
    "addmm": lambda x, weight, gate, bias: triton_gemm.addmm(bias, x, weight.T),
    **{
        name: lambda x, weight, gate, bias, name=name: triton_gemm.linear(
            x, weight, bias, name, gate=gate, gate_bias=bias
        )
        for name in GATES
    },
    "a gate without biases": lambda x, weight, gate, bias: triton_gemm.linear(x, weight, None, "swiglu", gate=gate),
    **{
        name: lambda x, weight, gate, bias, name=name: triton_gemm.linear(x, weight, bias, name) for name in ACTIVATIONS
    },
}


@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("size", ["large", "few rows", "odd"])
def test_derivatives_have_the_same_bits(
    size: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those by Python, in the backward's thread; and torch's values. Bits of a graph that is replayed, too."""
    monkeypatch.setattr(ops, "_fast", fast_path.FastPath(ops._show))
    M, N, K = SIZES[size]
    batch = (4, M // 4) if M % 4 == 0 else (M,)
    operands = [random(*shape, dtype=dtype) for shape in ((*batch, K), (N, K), (N, K), (N,))]
    operands = [x.flatten(0, -2) if name == "addmm" and x is operands[0] else x for x in operands]
    operands = [x.requires_grad_() for x in operands]
    grad = random(*operands[0].shape[:-1], N, dtype=dtype)

    def step() -> list[torch.Tensor | None]:
        c = TRAINED[name](*operands)
        return [c, *torch.autograd.grad(c, operands, grad, allow_unused=True)]

    with monkeypatch.context() as patch:
        patch.setattr(native, "module", lambda: None)
        for _ in range(2):
            by_python = step()
    for _ in range(4):
        by_cpp = step()
    c = by_cpp[0]
    is_gate = name in GATES or "gate" in name  # of which one kernel computes those of 16 bits
    by_python_s = is_gate and dtype == torch.float32
    node = "_Gemm" if by_python_s else "::ActivatedNode" if is_gate or name in ACTIVATIONS else "::GemmNode"
    assert c is not None and c.grad_fn is not None and node in c.grad_fn.name()
    # torch's nodes of leaves belong to the stream that made them, and live as long as a graph that ends in them. One of
    # the default stream would have a capture wait for that.
    c = None
    by_python, by_cpp = ([None if x is None else x.detach() for x in found] for found in (by_python, by_cpp))
    graph, of_graph = captured(step)
    graph.replay()
    for one, *others in zip(by_python, by_cpp, of_graph, strict=True):
        for other in others:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(bits(one), bits(other.detach())) and one.stride() == other.stride()
    if not by_python_s:
        monkeypatch.setattr(ops._fast, "take", lambda *_, **__: pytest.fail("Python was asked"))
        step()


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_graphs_are_launched_without_python(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: the same bits as without a compiler."""
    monkeypatch.setattr(ops, "_fast", fast_path.FastPath(ops._show))
    ops._by_cpp.unregister()
    ops._by_cpp.register(ops.KEYS, native.module())
    x, weight, bias = random(256, 264), random(1288, 264).requires_grad_(trained), random(1288)

    def call(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        product = function(x, weight, bias)
        return [product, *(torch.autograd.grad(product, weight, torch.ones_like(product)) if trained else ())]

    compiled = torch.compile(triton_gemm.linear, dynamic=False)
    expected = call(triton_gemm.linear)
    for _ in range(5):  # each product is planned, offered to C++, and shown to it
        call(compiled)
    ops._by_cpp.launched(True)
    found = call(compiled)
    assert sum(ops._by_cpp.launched(True).values()) == len(found)
    assert all(torch.equal(bits(x.detach()), bits(y.detach())) for x, y in zip(found, expected, strict=True))


def test_products_are_launched_without_python() -> None:
    """Forward, and backward in autograd's thread: the same bits as by Python, in every call from the third on."""
    x, y, weight, bias = random(256, 264), random(3, 264, 128), random(1288, 264), random(1288)
    weight.requires_grad_()

    def calls() -> list[torch.Tensor]:
        product = torch.nn.functional.linear(x, weight, bias)
        [gradient] = torch.autograd.grad(product.float().square().sum(), weight)
        with torch.no_grad():
            batched = torch.bmm(x.expand(3, -1, -1), y)
            written = torch.mm(x, weight.T, out=torch.empty_like(product))
        return [product, gradient, batched, written]

    routing._unregister()  # what was registered before there was an extension
    with triton_gemm.use():
        for _ in range(3):
            by_cpp = calls()
        routing._by_cpp.launched(True)
        triton_gemm.report_routing(reset=True)
        by_cpp = calls()
        assert routing._by_cpp.launched(False) == {"addmm": 1, "bmm": 1, "mm": 1, "mm.out": 1} | dict.fromkeys(
            ("addmm.out", "baddbmm", "baddbmm.out", "bmm.out"), 0
        )
        counts = {"addmm": 1, "bmm": 1, "mm": 2}
        assert triton_gemm.report_routing() == {(name, "triton_gemm"): count for name, count in counts.items()}
        routing._by_cpp.route(True, None)
        routing._rules[-1].fast.table = None
        by_python = calls()
    for one, other in zip(by_cpp, by_python, strict=True):
        assert torch.equal(bits(one), bits(other)) and one.stride() == other.stride()


@hopper
def test_fp8_and_groups_give_the_same_bits() -> None:
    a, b = random(256, 512).to(torch.float8_e4m3fn), random(768, 512).to(torch.float8_e4m3fn).T
    one = torch.ones((), device="cuda")
    from triton_gemm.functional import grouped, scaled

    both(lambda: triton_gemm.scaled_matmul(a, b, one, one), lambda: scaled._fast)
    ends = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    x, y = random(256, 512), random(2, 512, 768)
    both(lambda: triton_gemm.grouped_matmul(x, y, offs=ends), lambda: grouped._fast)


@pytest.mark.parametrize("name", ["large", "split"])
def test_graphs_and_streams(name: str) -> None:
    M, N, K = SIZES[name]
    a, b = random(M, K), random(K, N)
    for _ in range(3):
        expected = triton_gemm.matmul(a, b).clone()
    table = spy(api._fast)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        a.copy_(a)
        on_stream = triton_gemm.matmul(a, b)
    stream.synchronize()
    assert torch.equal(on_stream, expected)
    graph, out = captured(lambda: triton_gemm.matmul(a, b))
    assert table.launched == 2
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_threads_and_a_thread_without_a_context() -> None:
    a, b = random(1024, 264), random(264, 1288)
    for _ in range(3):
        expected = triton_gemm.matmul(a, b).clone()
    table = spy(api._fast)
    found = at_once(*8 * [lambda: [triton_gemm.matmul(a, b) for _ in range(50)]])
    torch.cuda.synchronize()
    assert table.launched == 400 and all(torch.equal(x, expected) for calls in found for x in calls)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    for device in ("cuda:0", "cuda:1"):
        a, b = random(1024, 264).to(device), random(264, 1288).to(device)
        for current in (0, 1):
            with torch.cuda.device(current):
                results = [triton_gemm.matmul(a, b) for _ in range(4)]
            assert all(torch.equal(x, results[0]) and x.device == a.device for x in results)
        table = spy(api._fast)
        before = table.launched
        triton_gemm.matmul(a, b)
        assert table.launched == before + 1


def test_hooks_and_new_states_are_python_s() -> None:
    a, b = random(1024, 264), random(264, 1288)
    for _ in range(3):
        triton_gemm.matmul(a, b)
    table, seen = spy(api._fast), []
    hook = triton.knobs.runtime.launch_enter_hook
    note = seen.append
    hook.add(note)
    try:
        triton_gemm.matmul(a, b)
    finally:
        hook.remove(note)
    assert len(seen) == 1 and table.launched == 0
    generation.advance()
    triton_gemm.matmul(a, b)
    assert table.launched == 0
    for _ in range(3):
        triton_gemm.matmul(a, b)
    assert table.launched > 0


def test_a_call_costs_the_host_less(record_property: Callable[[str, object], None]) -> None:
    a, b = random(64, 64), random(64, 64)
    for _ in range(3):
        triton_gemm.matmul(a, b)
    fast, costs = api._fast, {"C++": [], "Python": []}
    tables = {"C++": fast.table, "Python": None}
    for _ in range(5):
        for name, table in tables.items():
            fast.table = table
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(200):
                triton_gemm.matmul(a, b)
            costs[name].append((time.perf_counter() - begin) / 200 * 1e6)
    torch.cuda.synchronize()
    for name, found in costs.items():
        record_property(f"microseconds by {name}", min(found))
    assert min(costs["C++"]) < 0.7 * min(costs["Python"]), costs
