"""linear with a gate, and with a residual, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

import triton_gemm
from tests.gpu.calls import captured
from tests.support.epilogue_truth import activated
from tests.support.product_views import assert_gradients_as_near_as_torchs, torchs_gated
from triton_gemm.hardware.device import device_info
from triton_gemm.kernels import portable, warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED, GATED_CLUSTERED
from triton_gemm.problem import ACTIVATIONS, GATES, GemmProblem
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.select import Selection, illegal, ranked

CUDA = torch.device("cuda")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def assert_gated(c: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, activation: str) -> None:
    """up, gate: products in fp64."""
    truth = activated(gate, activation) * up
    error = 2.0 ** -(8 if c.dtype == torch.bfloat16 else 11) * truth.abs() + 2.0**-12 * (1 + up.abs() + gate.abs())
    wrong = ~((c.double() - truth).abs() <= error)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


def every_result(
    problem: GemmProblem, algorithms: Iterable[Algorithm], run: Callable[[GemmPlan, torch.Tensor], None]
) -> Iterator[torch.Tensor]:
    """C by each ranked candidate, by `algorithms`, and by every tile of the portable kernel. Each runs twice, with the
    same bits, and leaves the NaN around C."""
    info, around = device_info(CUDA), torch.empty(problem.M * problem.N + 2048, dtype=problem.out_dtype, device="cuda")
    tiles = (*portable.configs("half", info.capability), *portable.host.GATED)
    more = [Algorithm("portable", tile) for tile in tiles if portable.illegal(problem, info, tile) is None]
    found = [Selection.of(x, "a test") for _, x in ranked(problem, info) if illegal(problem, info, x) is None]
    found += [Selection(how, "a test") for how in (*algorithms, *more)]
    assert found
    for selection in dict.fromkeys(found):
        plan, c, results = GemmPlan(problem, selection, torch.device("cuda", 0)), around[1024:-1024], []
        for _ in range(2):
            around.fill_(torch.nan)
            run(plan, c.view(problem.M, problem.N))
            results.append(c.clone())
        assert torch.equal(*results), selection
        assert around[:1024].isnan().all() and around[-1024:].isnan().all(), selection
        yield results[0].view(problem.M, problem.N)


@pytest.mark.parametrize("size", [(300, 520, 712), (1, 264, 1064), (2048, 1024, 512)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_every_candidate(size: tuple[int, int, int], biased: bool) -> None:
    """Results are compared with fp64."""
    M, N, K = size
    info = device_info(CUDA)
    a, up, gate = draw(M, K), draw(N, K, seed=1), draw(N, K, seed=2)
    bias, gate_bias = draw(N, seed=3), draw(N, seed=4)
    products = [a.double() @ x.double().T + biased * y.double() for x, y in ((up, bias), (gate, gate_bias))]
    axis = "n" if biased else None
    problem = GemmProblem.of(a, up.mT, a.new_empty(M, N), activation="silu", bias=axis, gate=True)
    auxiliary = (bias, gate.mT, gate_bias) if biased else (gate.mT,)
    tiles = (*GATED, *GATED_CLUSTERED) if info.capability == (9, 0) else ()
    legal = [tile for tile in tiles if warp_specialised.illegal(problem, info, tile) is None]
    more = [Algorithm("warp_specialised", tile, Schedule(3)) for tile in legal]
    for c in every_result(problem, more, lambda plan, c: plan.run(a, up.mT, c, auxiliary)):
        assert_gated(c, *products, "silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 100, 2048])
@pytest.mark.parametrize("name", GATES)
def test_every_gate(name: str, rows: int, dtype: torch.dtype) -> None:
    x, up, gate = (draw(*s, dtype=dtype, seed=i) / 8 for i, s in enumerate(((rows, 1024), (2816, 1024), (2816, 1024))))
    triton_gemm.linear(x, up, activation=name, gate=gate)
    triton_gemm.wait_until_compiled()
    c = triton_gemm.linear(x, up, activation=name, gate=gate)
    assert_gated(c, x.double() @ up.double().T, x.double() @ gate.double().T, GATES[name])


@pytest.mark.parametrize("biased", [False, True])
def test_gradients(biased: bool) -> None:
    shapes = ((3, 200, 512), (1408, 512), (1408, 512), (1408,), (1408,))
    operands = [draw(*shape, seed=i) / (8 if i else 1) for i, shape in enumerate(shapes)]
    assert_gradients_as_near_as_torchs(
        lambda x, up, gate, b=None, gb=None: triton_gemm.linear(x, up, b, "swiglu", gate=gate, gate_bias=gb),
        lambda x, up, gate, b=None, gb=None: torchs_gated(x, up, b, "swiglu", gate, gb),
        operands if biased else operands[:3],
    )


def test_compiled_and_captured() -> None:
    x, up, gate = draw(64, 1024), draw(2816, 1024, seed=1), draw(2816, 1024, seed=2)
    c = triton_gemm.linear(x, up, activation="swiglu", gate=gate)
    triton_gemm.wait_until_compiled()
    c = triton_gemm.linear(x, up, activation="swiglu", gate=gate)
    compiled = torch.compile(lambda x: triton_gemm.linear(x, up, activation="swiglu", gate=gate), fullgraph=True)
    assert torch.equal(compiled(x), c)
    graph, again = captured(lambda: triton_gemm.linear(x, up, activation="swiglu", gate=gate))
    again.fill_(torch.nan)
    graph.replay()
    assert torch.equal(again, c)


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [1, 16, 300, 2048])
def test_a_residual(rows: int, name: str | None) -> None:
    x, w, bias, residual = draw(rows, 1024), draw(1000, 1024, seed=1) / 16, draw(1000, seed=2), draw(rows, 1000, seed=3)
    c = triton_gemm.linear(x, w, bias, name, residual=residual)
    truth = activated(x.double() @ w.double().T + bias.double(), name) + residual.double()
    assert ((c.double() - truth).abs() <= 2.0**-8 * truth.abs() + 2.0**-12).all()
