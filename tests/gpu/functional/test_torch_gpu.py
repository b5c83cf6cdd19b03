"""torch's products at home on a GPU: values, words, gradients, autocast, compile, graphs, streams, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triton_gemm
from perf.measure import numerics
from tests.gpu.calls import launched
from tests.support import epilogue_truth
from tests.support.epilogue_truth import activated
from tests.support.product_views import (
    BATCHES,
    EXPANDED,
    VIEWS,
    assert_autocast_casts_as_torch,
    assert_gradients_as_near_as_torchs,
    assert_product,
    assert_views_with_the_sign_turned,
    draw,
    torchs_linear,
)
from tests.support.wrong_products import WITH_MISTAKES, assert_mistake_is_torchs, assert_same_words, torchs
from triton_gemm.compat import stream_of_graph_trees
from triton_gemm.problem import ACTIVATIONS
from triton_gemm.runtime import plan, workspace

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = [FLOAT, HALF, BF16]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return draw(*shape, dtype=dtype, seed=seed).cuda()


# --- Values and words ---


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("view", [*VIEWS, *EXPANDED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_of_batches_and_strides(
    dtype: torch.dtype, view: str, batches: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    lay = (VIEWS | EXPANDED)[view]
    for M, N, K in ((65, 40, 33), (128, 256, 64), (1, 64, 512)):
        a, b = lay(random(*batches[0], M, K, dtype=dtype)), lay(random(*batches[1], K, N, dtype=dtype, seed=1))
        for _ in range(2):  # the second without checks
            assert_product(triton_gemm.matmul(a, b), a, b)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_infinities_is_torchs(activation: Any, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    ends = torch.tensor([-torch.inf, -most, -40.0, most, torch.inf, torch.nan], dtype=dtype, device="cuda")
    expected = activated(ends.double(), activation).to(dtype).repeat(64)
    for M in (1, 8, 256):
        x, weight = torch.zeros(M, 128, dtype=dtype, device="cuda"), random(384, 128, dtype=dtype)
        c = triton_gemm.linear(x, weight, ends.repeat(64), activation)
        torch.testing.assert_close(c, expected.expand(M, 384), equal_nan=True)


def test_views_with_the_sign_turned() -> None:
    assert_views_with_the_sign_turned("cuda")


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_out_dtype_is_torchs(dtype: torch.dtype) -> None:
    a, b = random(3, 200, 330, dtype=dtype), random(3, 330, 90, dtype=dtype)
    for input_dtype in (dtype, FLOAT):
        input = random(3, 200, 90, dtype=input_dtype)
        calls: list[tuple[str, tuple[torch.Tensor, ...]]] = [
            *(("mm", (a[0], b[0])), ("bmm", (a, b)), ("addmm", (input[0], a[0], b[0])), ("baddbmm", (input, a, b)))
        ]
        for name, arguments in calls:
            ours, theirs = (f(*arguments, out_dtype=FLOAT) for f in (getattr(triton_gemm, name), torchs(name)))
            assert ours.dtype == theirs.dtype == FLOAT
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@WITH_MISTAKES
def test_a_mistake_raises_what_torch_raises(name: str, arguments: tuple[Any, ...], out: torch.Tensor | None) -> None:
    assert_mistake_is_torchs(name, arguments, out, "cuda")


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_mistaken_out_dtype_raises_what_torch_raises(name: str) -> None:
    batch = (2,) if "bmm" in name else ()
    a, b = random(*batch, 8, 16), random(*batch, 16, 8)
    added = (random(8),) if "add" in name else ()
    for x, y, out_dtype in ((a, b, HALF), (a.float(), b.float(), BF16), (a, b, torch.float64)):
        assert_same_words(
            lambda x=x, y=y, to=out_dtype: torchs(name)(*(z.to(x.dtype) for z in added), x, y, out_dtype=to),
            lambda x=x, y=y, to=out_dtype: getattr(triton_gemm, name)(*(z.to(x.dtype) for z in added), x, y, to),
        )


# --- Gradients ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_are_as_good_as_torchs(activation: str | None, dtype: torch.dtype) -> None:
    values = [random(*shape, dtype=dtype) for shape in ((4, 250, 520), (390, 520), (390,))]
    assert_gradients_as_near_as_torchs(
        lambda *x: triton_gemm.linear(*x, activation), lambda *x: torchs_linear(*x, activation), values
    )


# --- Autocast ---


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_autocast_casts_as_torch(dtype: torch.dtype) -> None:
    assert_autocast_casts_as_torch(dtype, "cuda")


# --- Compile, graphs, streams, profilers ---


class Block(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.up = triton_gemm.nn.Linear(256, 512, activation="gelu", dtype=dtype, device="cuda")
        self.down = triton_gemm.nn.Linear(512, 256, dtype=dtype, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


def assert_block(y: torch.Tensor, block: Block, x: torch.Tensor) -> None:
    """y is block(x) in fp64, as near as its roundings allow: those of both layers and of their sum with x."""
    up, down = block.up, block.down
    how: dict[str, Any] = {"bias": up.bias, "activation": "gelu", "mode": "bf16", "out_dtype": x.dtype}
    h, of_h = epilogue_truth.expected(x, up.weight.mT, None, **how)
    layer = numerics.reference(h, down.weight.mT) + down.bias.double()
    w = down.weight.double().mT.abs()
    summed = numerics.accumulation_error(len(w), "bf16") * ((h.abs() + of_h) @ w + down.bias.double().abs())
    bound = numerics.rounded(of_h @ w + summed, layer, x.dtype)
    truth = layer + x.double()
    assert ((y.double() - truth).abs() <= numerics.rounded(bound, truth, x.dtype)).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode: str) -> None:
    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):
        x = random(4, 128, 256)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).sum().backward()
        gradients = [p.grad.clone() for p in block.parameters() if p.grad is not None]
        block.zero_grad()
        block(x).sum().backward()
        for mine, reference in zip(gradients, block.parameters(), strict=True):
            assert reference.grad is not None
            assert (mine - reference.grad).norm() <= 2e-2 * reference.grad.norm()
        block.zero_grad()
        with torch.no_grad():
            assert_block(compiled(x), block, x)


@pytest.mark.slow
def test_inductors_graphs_of_products_that_share_memory() -> None:
    """Partial sums of two graphs in one pool, each warmed up, captured and replayed between the other's; Inductor
    raises where something of the pool is kept, and overwrites it."""
    torch._dynamo.reset()
    sizes = ((128, 16384), (16384, 128), (128,))
    a, b, row = (random(*size, dtype=torch.float32, seed=seed) for seed, size in enumerate(sizes))
    triton_gemm.matmul(a, b)
    assert any(getattr(found, "shares", False) for found in plan.PLANS.values()), "the product has partial sums"
    before = set(workspace._workspaces)

    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return triton_gemm.matmul(a, b).relu() + 1

    def two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return triton_gemm.addmm(row, a, b) @ triton_gemm.addmm(row, a.neg(), b)

    with torch.no_grad():
        graphs = {f: torch.compile(f, fullgraph=True, mode="reduce-overhead") for f in (one, two)}
        for turn in range(6):
            for function, graph in graphs.items():
                x = random(128, 16384, dtype=torch.float32, seed=turn)
                torch.compiler.cudagraph_mark_step_begin()
                found = graph(x, b).clone()
                junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
                alone = function(x, b)
                assert (found - alone).norm() <= 1e-4 * alone.norm()
                del junk
    trees = stream_of_graph_trees(torch.cuda.current_device())
    assert trees is not None and all(key[1] != trees for key in set(workspace._workspaces) - before)


def test_a_graph_of_a_training_step() -> None:
    block, x = Block(), random(4, 128, 256).requires_grad_()
    grad = random(4, 128, 256, seed=1)

    def step(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        y = module(leaf)
        return [y.detach().clone(), *torch.autograd.grad(y, (leaf, *block.parameters()), grad)]

    expected = step(block, x)
    graphed = torch.cuda.make_graphed_callables(block, (x.detach().clone().requires_grad_(),))
    for _ in range(2):
        for mine, reference in zip(step(graphed, x), expected, strict=True):
            assert torch.equal(mine, reference), "the same bits"


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    block, x = Block(), random(4, 128, 256)
    block(x).sum().backward()
    expected = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        block(late).sum().backward()
    torch.cuda.synchronize()
    assert all(torch.equal(p.grad, e) for p, e in zip(block.parameters(), expected, strict=True))


def test_a_layer_is_one_kernel() -> None:
    layer, x = triton_gemm.nn.Linear(512, 1024, activation="gelu", dtype=BF16, device="cuda"), random(4, 250, 512)
    with torch.no_grad():
        for view in (x, x[:, ::2], x[:, 1:]):
            layer(view)
            names = launched(lambda view=view: layer(view))
            assert len(names) == 1 and names[0].endswith("_kernel"), names


def test_the_operator_is_named_in_profiles() -> None:
    layer, x = triton_gemm.nn.Linear(512, 1024, dtype=BF16, device="cuda"), random(64, 512)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x)
        layer(x).sum().backward()
    names = {event.name for event in profile.events()}
    assert "triton_gemm::gemm" in names and "_GemmBackward" in names
