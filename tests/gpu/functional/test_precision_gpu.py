"""fp32 in every precision: as every product, beside SGEMM, rounding, the ends of the range."""

from __future__ import annotations

import pytest
import torch

import triton_gemm
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.support.awkward_sizes import SMALL
from tests.support.numerics import reference
from tests.support.product_checks import Product, battery, fp32_precision
from triton_gemm.arithmetic import EMULATED, MODES

pytestmark = hopper
INF, MAX, TINY = float("inf"), torch.finfo().max, torch.finfo().smallest_normal
N = 640


def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(), device="cuda")


def powers(least: int, most: int, *shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(least, most, shape, generator=generator(), device="cuda")


def graded(toward: int) -> torch.Tensor:
    return 2.0 ** (toward * torch.arange(N, device="cuda") / 32)


INPUTS = {
    "random": lambda: (normal(N, N), normal(N, N).flip(0)),
    "positive": lambda: (normal(N, N).abs(), normal(N, N).abs().flip(1)),
    "wide-range": lambda: (normal(N, N) * powers(-20, 20, N, N), normal(N, N) * powers(-20, 20, N, N).flip(0)),
    "graded": lambda: (normal(N, N) * graded(-1), normal(N, N) * graded(1)[:, None]),
}


@pytest.mark.parametrize("precision", EMULATED)
def test_battery(precision: str) -> None:
    """Sizes, layouts, views, permutations, NaN: as every product. `test_matmul_gpu.py` has the other precisions."""
    product = Product(
        lambda a, b, c, alpha, beta: triton_gemm.matmul(a, b, out=c, precision=precision),
        *(torch.float32, precision, torch.float32, "cuda"),
        scaled=False,
    )
    for check in battery(product, SMALL).values():
        check()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("precision", ["bf16x6", "bf16x9"])
def test_six_and_nine_products_are_at_least_as_accurate_as_sgemm(precision: str, inputs: str) -> None:
    """In the norm and in the worst element; SGEMM adds K products one after another, each time rounding."""
    a, b = (torch.cat([x] * 4, dim) for x, dim in zip(INPUTS[inputs](), (1, 0), strict=True))
    truth, size = reference(a, b), a.double().abs() @ b.double().abs()
    with fp32_precision("ieee"):
        theirs = (torch.mm(a, b).double() - truth).abs()
    ours = (triton_gemm.matmul(a, b, precision=precision).double() - truth).abs()
    assert ours.norm() <= theirs.norm()
    assert (ours / size).max() <= (theirs / size).max()


HALFWAY = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-12, 1 - 2.0**-12, MAX, TINY / 8])


def test_tma_rounds_to_tf32_with_ties_to_even() -> None:
    a, b = torch.zeros(384, 64, device="cuda"), torch.zeros(64, 256, device="cuda")
    a[:, 0], b[0] = HALFWAY.repeat(64), 1
    assert triton_gemm.explain(a, b, precision="tf32").kernel == "warp_specialised"
    found = triton_gemm.matmul(a, b, precision="tf32")[:6, 0]
    assert torch.equal(found.cpu(), torch.tensor([1, 1 + 2.0**-9, 1, 1, INF, TINY / 8]))


def test_the_portable_kernel_rounds_to_tf32_with_ties_away_from_zero() -> None:
    a, b = HALFWAY[:, None].cuda(), torch.ones(1, 8, device="cuda")
    assert triton_gemm.explain(a, b, precision="tf32").kernel == "portable"
    found = triton_gemm.matmul(a, b, precision="tf32")[:, 0]
    assert torch.equal(found.cpu(), torch.tensor([1 + 2.0**-10, 1 + 2.0**-9, 1, 1, INF, TINY / 8]))


ENDS = {  # times 1: exactly, but where a mode says otherwise
    "infinity": (INF, {**dict.fromkeys(EMULATED, float("nan"))}),
    "largest": (MAX, {"tf32": INF, "tf32x3": INF, "bf16x3": INF}),
    "negative": (-1.5, {}),
    "zero": (0.0, {}),
    "not-a-number": (float("nan"), {}),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("precision", MODES)
def test_ends_of_the_range(precision: str, end: str) -> None:
    value, others = ENDS[end]
    a = torch.full((16, 1), value, device="cuda")
    found = triton_gemm.matmul(a, torch.ones(1, 16, device="cuda"), precision=precision)
    expected = torch.full_like(found, others.get(precision, value))
    assert torch.equal(found.nan_to_num(nan=7.0, posinf=INF, neginf=-INF), expected.nan_to_num(7.0, INF, -INF))


@pytest.mark.parametrize("precision", EMULATED)
def test_what_lies_below_planes_is_lost(precision: str) -> None:
    """2^-134 of bf16's, whose smallest number is 2^-133; tf32's planes are fp32."""
    a = TINY * torch.rand(64, 64, generator=generator(), device="cuda") * powers(-6, 6, 64, 64)
    found = triton_gemm.matmul(a, torch.eye(64, device="cuda"), precision=precision)
    relative = {"bf16x3": 2.0**-16, "bf16x6": 2.0**-23, "bf16x9": 2.0**-23, "tf32x3": 2.0**-21}[precision]
    lost = 2.0**-134 if "bf16" in precision else 2.0**-136
    assert ((found - a).abs() <= relative * a + 3 * lost).all()
