"""Compiled and exported graphs call what is routed when they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triton_gemm
from tests.interpreter.functional.test_routing import draw, ours
from tests.interpreter.functional.test_routing import fresh as fresh
from tests.support.tiers import one

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@pytest.mark.few(shows=one)
@BACKENDS
def test_compiled_graphs_call_what_is_routed(backend: str) -> None:
    """When they run: the same graph is torch's again outside, and need not be compiled for it."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(7, 4)
    compiled = torch.compile(lambda x: layer(x).relu().square().sum(), fullgraph=True, backend=backend)
    compiled(draw(6, 7)).backward()
    assert ours() == {}
    with torch.compiler.set_stance("fail_on_recompile"):
        with triton_gemm.use():
            compiled(draw(6, 7)).backward()
        assert ours() == {"addmm": 1, "mm": 1}
        compiled(draw(6, 7)).backward()
    assert ours() == {"addmm": 1, "mm": 1}


@BACKENDS
def test_it_may_begin_and_end_within_a_compiled_function(backend: str) -> None:
    """Which breaks its graph there; Dynamo must not follow torch's product into the kernel that took its place."""
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with triton_gemm.use():
            z = torch.mm(x, y)
        return torch.mm(2 * z, y)

    x, y = draw(6, 7), draw(7, 7)
    torch.testing.assert_close(function(x, y), 2 * (x @ y) @ y)
    assert ours() == {"mm": 1}


def test_it_cannot_begin_within_one_graph() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        with triton_gemm.use():
            return x @ x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="put it around the compiled function's call"):
        function(draw(3, 3))


@BACKENDS
def test_a_graph_may_break_within_it(backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.mm(x, y)
        torch._dynamo.graph_break()
        return torch.addmm(y[0], z, y)

    x, y = draw(6, 7), draw(7, 7)
    with triton_gemm.use():
        found = function(x, y)
    torch.testing.assert_close(found, y[0] + x @ y @ y)
    assert ours() == {"mm": 1, "addmm": 1}


def test_an_exported_program_asks_at_each_call() -> None:
    layer, x = torch.nn.Linear(7, 4), draw(6, 7)
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        program(x)
        assert ours() == {}
        with triton_gemm.use():
            torch.testing.assert_close(program(x), layer(x))
        assert ours() == {"addmm": 2}


@pytest.mark.full
@pytest.mark.slow
def test_aot_inductor_calls_past_the_dispatcher(tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(16, 8), draw(4, 16)
    with torch.no_grad(), triton_gemm.use():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(layer, (x,)), package_path=str(tmp_path / "layer.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        triton_gemm.report_routing(reset=True)
        found = loaded(x)
        assert triton_gemm.report_routing() == {}
        torch.testing.assert_close(found, layer(x))
