"""torch's own products through triton_gemm on the GPU: the first call and those like it, which take the short way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from perf.measure.numerics import rounded
from tests.gpu.calls import captured, launches_ours
from tests.gpu.runtime.test_plan_gpu import random as draw
from tests.support.numerics import error_bound, reference, scaled
from tests.support.processes import python
from tests.support.product_views import assert_product
from triton_gemm.functional import routing

OURS = "triton_gemm"


def ours() -> AbstractContextManager[None]:
    """All products but those that say what is right."""
    return triton_gemm.use(exclude=[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_calls_like_one_before_launch_the_same(dtype: torch.dtype) -> None:
    with ours():
        triton_gemm.report_routing(reset=True)
        before = len(routing._rules[-1].fast.calls)
        for _ in range(3):
            a, b, bias = draw(200, 136, dtype=dtype), draw(136, 72, dtype=dtype), draw(72, dtype=dtype)
            assert_product(torch.mm(a, b), a, b)
            assert_product(torch.addmm(bias, a, b), a, b, bias.double())
            assert_product(torch.nn.functional.linear(a, b.mT.contiguous(), bias), a, b, bias.double())
            out = torch.full((200, 72), torch.nan, dtype=dtype, device="cuda")
            assert torch.addmm(bias, a, b, out=out) is out
            assert_product(out, a, b, bias.double())
        assert len(routing._rules[-1].fast.calls) == before + 4
        counts = triton_gemm.report_routing()
    assert {call: count for call, count in counts.items() if call[1] == OURS} == {("addmm", OURS): 9, ("mm", OURS): 3}


def test_what_differs_is_not_taken_for_the_same() -> None:
    """Factors, strides, alignment, an `out` that overlaps, rules: each changes what is right."""
    a, b, bias = draw(128, 64), draw(64, 96), draw(96)
    with ours():
        for _ in range(2):
            assert_product(torch.addmm(bias, a, b), a, b, bias.double())
            assert_product(torch.addmm(bias, a, b, alpha=2), 2 * a, b, bias.double())
            assert_product(torch.addmm(bias, a, b, beta=3), a, b, 3 * bias.double())
            assert_product(torch.addmm(bias, a, b, alpha=0, beta=1), 0 * a, b, bias.double())
            column = draw(128, 1)
            assert_product(torch.addmm(column, a, b), a, b, column.double())
            assert_product(torch.mm(a.mT.contiguous().mT, b), a, b)
            odd = torch.cat([draw(1), a.flatten()])[1:].view(128, 64)
            assert_product(torch.mm(odd, b), a, b)
            buffer = torch.zeros(128 * 96 + 96, dtype=torch.bfloat16, device="cuda")
            out, over = buffer[: 128 * 96].view(128, 96), buffer[64:160].copy_(bias)
            expected = over.double()
            assert_product(torch.addmm(over, a, b, out=out), a, b, expected)
        with triton_gemm.use(exclude=["mm"]):
            triton_gemm.report_routing(reset=True)
            torch.mm(a, b)
            assert ("mm", OURS) not in triton_gemm.report_routing()
        torch.mm(a, b)
        assert triton_gemm.report_routing()["mm", OURS] == 1


# --- Compiled models: docs/routing.md has the table ---

LAYER = (768, 512)


def products(call: Callable[[], object]) -> tuple[int, bool]:
    """How many products `call` sends to these kernels, and whether one of them runs, launched by a graph or not."""
    triton_gemm.report_routing(reset=True)
    is_ours = launches_ours(call)
    return sum(n for (_, where), n in triton_gemm.report_routing().items() if where == OURS), is_ours


def compiled_layer(**how: object) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """A call of a compiled layer, and what holds it to fp64. Inductor may round the product before it adds the bias."""
    torch._dynamo.reset()
    x, layer = draw(1024, LAYER[0]), torch.nn.Linear(*LAYER, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: layer(x).relu(), **how)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return compiled(x).clone()

    def check() -> None:
        w, bias = layer.weight.detach().mT, layer.bias.detach().double()
        truth = reference(x, w) + bias
        bound = rounded(error_bound(x, w, None, 1.0, 0.0, "bf16", x.dtype), truth, x.dtype)
        assert ((call().double() - truth.relu()).abs() <= bound).all()

    return call, check


@pytest.fixture
def partial_sums_in_fp32() -> Iterator[None]:
    """Of cuBLAS, which else may round them to bf16."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction = before


@pytest.mark.slow
@pytest.mark.usefixtures("partial_sums_in_fp32")
def test_compiled_by_default_it_is_decided_at_each_call() -> None:
    call, check = compiled_layer(fullgraph=True)
    check()
    with ours():
        assert products(call) == (1, True)
        check()
    assert products(call) == (0, False)


@pytest.mark.slow
def test_a_cuda_graph_of_reduce_overhead_keeps_what_it_captured() -> None:
    call, check = compiled_layer(mode="reduce-overhead")
    with ours():
        for _ in range(3):  # warms up, captures, replays
            check()
        assert products(call) == (0, True)
    assert products(call) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("backends, routed", [("ATEN", 1), ("TRITON", 0)])
def test_max_autotune_may_choose_a_template_of_its_own(
    backends: str, routed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config, "max_autotune_gemm_backends", backends)
    with ours():
        call, check = compiled_layer(mode="max-autotune-no-cudagraphs")
        check()
        assert products(call) == (routed, bool(routed))


# Packages that AOTInductor compiles and loads: torch's alone, or counted inside of use().
AOT_INDUCTOR = """
import sys, torch
counted = sys.argv[1] == "counted"
if counted:
    import triton_gemm
    from tests.support.product_views import assert_product
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
modules = [torch.nn.Linear, *([triton_gemm.nn.Linear] if counted else [])]
for i, module in enumerate(modules):
    model, x = module(768, 768, device="cuda", dtype=torch.bfloat16), torch.randn(1024, 768, device="cuda").bfloat16()
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{sys.argv[2]}/{i}.pt2")
        loaded = torch._inductor.aoti_load_package(path)
        loaded(x)
        if counted:
            with triton_gemm.use():
                triton_gemm.report_routing(reset=True)
                y = loaded(x)
                assert triton_gemm.report_routing() == {}, triton_gemm.report_routing()
            assert_product(y, x, model.weight.mT, model.bias)
print("done")
"""


@pytest.mark.slow
def test_aot_inductor_calls_cublas_past_the_dispatcher(tmp_path: Path) -> None:
    found = python("-c", AOT_INDUCTOR, "counted", tmp_path)
    if found.returncode < 0 and python("-c", AOT_INDUCTOR, "alone", tmp_path).returncode < 0:
        pytest.skip(f"torch {torch.__version__} crashes here as it loads a package of its own")
    assert "done" in found.stdout, found.stderr[-3000:]


def test_a_captured_graph_replays() -> None:
    x, w, b = draw(16, 256), draw(512, 256), draw(512)
    with ours():
        torch.nn.functional.linear(x, w, b)
        graph, y = captured(lambda: torch.nn.functional.linear(x, w, b))
    x.copy_(draw(16, 256))
    graph.replay()
    assert_product(y, x, w.mT, b.double())


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda")


def eighths(*shape: int) -> torch.Tensor:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("multiplies no fp8")
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def of_groups() -> tuple[object, ...]:
    ends = torch.tensor([32, 32, 96], dtype=torch.int32, device="cuda")
    return draw(96, 128), draw(3, 128, 64), ends


OTHERS: dict[str, Callable[[], tuple[object, ...]]] = {
    "_int_mm": lambda: (whole(64, 128), whole(96, 128).t()),
    "_int_mm of rows": lambda: (whole(64, 128), whole(128, 96)),
    "_grouped_mm": of_groups,
    "_scaled_mm": lambda: (
        *(eighths(64, 128), eighths(96, 128).t()),
        *(0.5 + torch.rand((), device="cuda") for _ in range(2)),
        *(None, None, torch.bfloat16, True),
    ),
}


def factors_of(name: str, a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> list[Any]:
    """The matrices that one of OTHERS multiplies, one pair after another along C's rows."""
    if name == "_grouped_mm":
        ends = others[0].tolist()
        return [(a[begin:end], one) for begin, end, one in zip([0, *ends], ends, b, strict=False)]
    return [(scaled(a, others[0]), scaled(b, others[1]))] if others else [(a, b)]


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_8_bits_and_of_groups(name: str) -> None:
    """Right at the first call, at those like it, in a compiled function, and in a CUDA graph."""
    operator, arguments = getattr(torch, name.split()[0]), OTHERS[name]()
    triton_gemm.report_routing(reset=True)
    with triton_gemm.use():
        found = [operator(*arguments) for _ in range(3)]
        found.append(torch.compile(lambda: operator(*arguments))())
        graph, out = captured(lambda: operator(*arguments))
        graph.replay()
        found.append(out)
    if name == "_scaled_mm" and torch.cuda.get_device_capability() != (9, 0):
        assert ("_scaled_mm", OURS) not in triton_gemm.report_routing(reset=True), "no record has other GPUs"
    else:
        assert triton_gemm.report_routing(reset=True)[name.split()[0], OURS] >= 4
    pairs = factors_of(name, *arguments)
    mode = {"_grouped_mm": "bf16", "_scaled_mm": "fp8 fast"}.get(name, "int8")
    for c in found:
        truth = torch.cat([reference(*pair) for pair in pairs])
        bound = torch.cat([error_bound(*pair, None, 1.0, 0.0, mode, c.dtype) for pair in pairs])
        assert c.shape == truth.shape and ((c.double() - truth).abs() <= bound).all()
