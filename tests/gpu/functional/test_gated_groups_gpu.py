"""grouped_matmul with a gate on a GPU: every candidate, every gate, gradients, graphs."""

from __future__ import annotations

import pytest
import torch

import triton_gemm
from tests.gpu.functional.test_gated_gpu import draw, every_result
from tests.gpu.functional.test_grouped_gpu import int32, without_a_wait
from tests.support.group_truth import assert_gated, gated
from tests.support.product_views import assert_gradients_as_near_as_torchs
from triton_gemm.hardware.device import device_info
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED
from triton_gemm.problem import GATES, GemmProblem, Request
from triton_gemm.runtime import plan

BF16, HALF = torch.bfloat16, torch.float16


def experts(
    M: int, N: int, K: int, groups: int, dtype: torch.dtype = BF16, fused: bool = True
) -> tuple[torch.Tensor, ...]:
    """Rows, up and gate, as halves of one weight [G, 2 N, K] or as two weights."""
    x, both = draw(M, K, dtype=dtype), draw(groups, 2 * N, K, dtype=dtype, seed=1) / K**0.5
    gate, up = both.mT.chunk(2, -1)
    return (x, up, gate) if fused else (x, up.mT.contiguous().mT, gate.mT.contiguous().mT)


@pytest.mark.parametrize("size", [(300, 520, 712), (40, 264, 1064), (290, 131, 250)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_every_candidate(size: tuple[int, int, int], activation: str) -> None:
    """Results are compared with fp64. Some groups are empty or have one row, and some rows are in no group."""
    M, N, K = size
    info, offs = device_info(torch.device("cuda")), int32([0, 1, M // 2, M // 2, M - 7])
    x, up, gate = experts(M, N, K, 5)
    problem = GemmProblem.of(x, up, x.new_empty(M, N), activation=activation, groups="m", gate=True)
    legal = [tile for tile in GATED if warp_specialised.illegal(problem, info, tile) is None]
    assert legal or K % 8 or info.capability != (9, 0)
    more = [Algorithm("warp_specialised", tile, Schedule(3, group_m=2)) for tile in legal]
    for c in every_result(problem, more, lambda plan, c: plan.run(x, up, c, (gate, offs))):
        assert_gated(x, up, gate, offs, activation, c)


@pytest.mark.parametrize("fused", [True, False], ids=["one weight", "two weights"])
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 300, 5000])
@pytest.mark.parametrize("name", GATES)
def test_every_gate(name: str, tokens: int, dtype: torch.dtype, fused: bool) -> None:
    """Of groups of random sizes; the gate of sums in fp32."""
    torch.manual_seed(tokens)
    ends = torch.randint(0, 8, (tokens,), device="cuda").bincount(minlength=8).cumsum(0).int()
    x, up, gate = experts(tokens, 1408, 1024, 8, dtype, fused)
    for _ in range(2):
        c = triton_gemm.grouped_matmul(x, up, ends, activation=name, gate=gate)
        triton_gemm.wait_until_compiled()
    assert_gated(x, up, gate, ends, GATES[name], c)
    request = Request(activation=GATES[name], groups="m", gate=True)
    chosen = plan.selection_of(x, up, c, request)
    assert chosen.kernel == "portable" or torch.cuda.get_device_capability() == (9, 0)
    if name == "reglu":
        before, of_up = (triton_gemm.grouped_matmul(x, y, ends, out_dtype=torch.float32) for y in (gate, up))
        if plan.selection_of(x, up, of_up, Request(groups="m")).kernel == chosen.kernel == "warp_specialised":
            assert torch.equal(c, (before.relu() * of_up).to(dtype)), "the bits of both products in fp32"


def test_a_mixture_of_experts_by_its_kernel() -> None:
    x, up, _ = experts(4096, 1408, 2048, 8)
    c = x.new_empty(4096, 1408)
    chosen = plan.selection_of(x, up, c, Request(activation="silu", groups="m", gate=True))
    assert chosen.kernel == ("warp_specialised" if torch.cuda.get_device_capability() == (9, 0) else "portable")


@pytest.mark.parametrize("tokens", [16, 700])
def test_gradients(tokens: int) -> None:
    offs = int32([0, 1, tokens // 2, tokens - 3])
    assert_gradients_as_near_as_torchs(
        lambda x, up, gate: triton_gemm.grouped_matmul(x, up, offs, activation="swiglu", gate=gate),
        lambda x, up, gate: gated(x, up, gate, offs, "silu")[0],
        experts(tokens, 704, 512, 4),
    )


def test_the_host_does_not_wait_and_compiled_it_is_the_same() -> None:
    """Sizes change under a CUDA graph that was captured once."""
    (x, up, gate), offs = experts(640, 512, 256, 4), int32([100, 200, 300, 640])
    product = lambda: triton_gemm.grouped_matmul(x, up, offs, activation="swiglu", gate=gate)  # noqa: E731
    c = without_a_wait(product, offs, lambda c: assert_gated(x, up, gate, offs, "silu", c))
    offs.copy_(int32([100, 200, 300, 640]))
    assert torch.equal(torch.compile(product, fullgraph=True)(), c)


def test_batches() -> None:
    x, up, gate = draw(4, 100, 512), *experts(1, 264, 512, 4)[1:]
    c = triton_gemm.grouped_matmul(x, up, activation="swiglu", gate=gate)
    rows = torch.arange(100, 401, 100, dtype=torch.int32, device="cuda")
    assert_gated(x.reshape(400, 512), up, gate, rows, "silu", c.reshape(400, 264))
