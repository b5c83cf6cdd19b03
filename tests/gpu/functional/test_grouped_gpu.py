"""triton_gemm.grouped_matmul on the GPU: every kind of groups, without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import triton_gemm
from tests.gpu.calls import captured
from tests.support.group_truth import KINDS, assert_right, assert_right_as_torchs, draw
from triton_gemm.hardware.device import current_device_info
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime import plan
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, ranked

ENDS = ([100, 100, 333], [0, 0, 400], [0, 0, 0], [400, 400, 400], [400], list(range(5, 400, 6)), [1, 399])


def int32(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: f"{len(ends)}-to-{ends[-1]}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_kind_and_layout(dtype: torch.dtype, kind: str, ends: list[int]) -> None:
    for i, (rows, columns) in enumerate(((512, 264), (250, 131))):
        a, b = draw(kind, 400, len(ends), rows, columns, dtype, "cuda")
        for turn_a, turn_b in ((False, False), (i == 0, True)):
            x, y = (z.mT.contiguous().mT if turn else z for z, turn in ((a, turn_a), (b, turn_b)))
            results = [triton_gemm.grouped_matmul(x, y, int32(ends)) for _ in range(2)]
            assert torch.equal(*results)
            assert_right(x, y, int32(ends), results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_like_one_before_is_of_its_own_operands(kind: str) -> None:
    for ends in ([100, 100, 333], [1, 2, 3], [0, 400, 400]):
        a, b = draw(kind, 400, 3, 512, 264, torch.bfloat16, "cuda")
        assert_right(a, b, int32(ends), triton_gemm.grouped_matmul(a, b, int32(ends)))
        wide = int32([x for end in ends for x in (end, 0)])[::2]  # copied at each call
        assert_right(a, b, wide, triton_gemm.grouped_matmul(a, b, wide))


@pytest.mark.parametrize("tokens", [16, 300, 5000])
def test_a_layer_of_experts(tokens: int) -> None:
    """Groups of random sizes through the persistent kernel where there is one, and its gradients."""
    torch.manual_seed(tokens)
    ends = torch.randint(0, 8, (tokens,), device="cuda").bincount(minlength=8).cumsum(0).int()
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = triton_gemm.grouped_matmul(x, w.mT, ends)
    assert_right(x.detach(), w.detach().mT, ends, y.detach())
    grad = torch.randn_like(y)
    for found in (
        plan.selection_of(x.detach(), w.detach().mT, y.detach(), Request(groups="m")),
        plan.selection_of(grad.mT, x.detach(), w.detach(), Request(groups="k")),
    ):
        assert found.kernel == ("warp_specialised" if torch.cuda.get_device_capability() == (9, 0) else "portable")
    y.backward(grad)
    assert_right(grad, w.detach(), ends, x.grad)
    assert_right(grad.mT, x.detach(), ends, w.grad)


def test_gradients_of_weights_read_their_own_rows_alone() -> None:
    """In tiles of every width, with an empty group, and groups shorter than a k-tile; all have the same bits."""
    bounds = (0, 0, 3, 136, 200, 201, 400)
    a = torch.randn(440, 520, device="cuda", dtype=torch.bfloat16).mT
    b = torch.randn(440, 392, device="cuda", dtype=torch.bfloat16)
    offs, first = int32(list(bounds[1:])), {}
    for group, (begin, end) in enumerate(pairwise(bounds)):
        x, y = torch.full_like(a.mT, torch.nan).mT, torch.full_like(b, torch.inf)
        x[:, begin:end], y[begin:end] = a[:, begin:end], b[begin:end]
        c = torch.empty(len(offs), 520, 392, device="cuda", dtype=torch.bfloat16)
        problem, info = GemmProblem.of(x, y, c, groups="k"), current_device_info()
        for _, candidate in ranked(problem, info):
            if illegal(problem, info, candidate) is None:
                GemmPlan(problem, Selection.of(candidate, ""), c.device).run(x, y, c, (offs,))
                assert_right(x[:, begin:end], y[begin:end], int32([end - begin]), c[group : group + 1])
                same = first.setdefault((group, bit_class(problem, candidate)), c[group].clone())
                assert torch.equal(c[group], same)


def without_a_wait(
    product: Callable[[], torch.Tensor], offs: torch.Tensor, check: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Runs a grouped GEMM of 640 rows without a synchronisation. Captures it once, and replays it with other offs."""
    product()
    triton_gemm.wait_until_compiled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = product()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, c = captured(product)
    for ends in ([0, 0, 640, 640], [1, 2, 3, 4], [200, 400, 600, 630]):
        offs.copy_(int32(ends))
        graph.replay()
        check(c)
    return found


def test_the_host_does_not_wait() -> None:
    a, b = draw("rows", 640, 4, 256, 512, torch.bfloat16, "cuda")
    offs = int32([100, 200, 300, 640])
    without_a_wait(lambda: triton_gemm.grouped_matmul(a, b, offs), offs, lambda c: assert_right(a, b, offs, c))


def test_as_torch() -> None:
    for kind in KINDS:
        assert_right_as_torchs(kind, 640, 256, 512, int32([160, 160, 640]))
