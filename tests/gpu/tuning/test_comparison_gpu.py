"""A comparison with torch on a GPU: its ratio is that of another timer, and torch has every product that it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton

import triton_gemm
from tests.gpu.sharing import shared_gpu
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.tuning import truth
from triton_gemm.tuning.of_torch import torchs_product
from triton_gemm.tuning.operands import BETA, operands

CUDA = torch.device("cuda")


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(shape, device="cuda")
    return (20 * x).to(dtype) if dtype == torch.int8 else x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_the_ratio_is_that_of_another_timer(dtype: torch.dtype) -> None:
    """Large enough that operands in L2, as that timer has them, matter little."""
    M, N, K = 2048, 2048, 4096
    report = triton_gemm.compare([(M, N, K)], dtype=dtype, layout="nt", budget=20)
    (one,) = report.products
    print(f"\n{report}")
    assert one.measured, one.why
    a, b = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype).T
    c = torch.empty(M, N, device="cuda", dtype=one.problem.out_dtype)
    product, _ = torchs_product(one.problem)
    assert product is not None
    triton_gemm.matmul(a, b, out=c)
    triton_gemm.wait_until_compiled()
    calls: list[Callable[[], object]] = [lambda: product(a, b, c), lambda: triton_gemm.matmul(a, b, out=c)]
    torchs, ours = (triton.testing.do_bench_cudagraph(call, rep=100, return_mode="median") for call in calls)
    assert one.ratio == pytest.approx(torchs / ours, rel=0.15)
    assert one.ours_error <= 2 * one.torch_error or one.ours_error < 1e-6


def test_what_is_timed_on_a_shared_gpu_is_refused() -> None:
    with shared_gpu():
        (one,) = triton_gemm.compare([(1024, 1024, 1024)], budget=10).products
    assert one.outcome == "refused" and one.why


def problems() -> dict[str, GemmProblem]:
    """What the CPU's torch has not."""
    half, eight = torch.bfloat16, torch.float8_e4m3fn
    a, b = torch.empty(256, 512, dtype=half, device="meta"), torch.empty(384, 512, dtype=half, device="meta").T
    c, full = torch.empty(256, 384, dtype=half, device="meta"), torch.empty(256, 384, device="meta")
    bias = Request(bias="n")
    found = {
        "fp32 of bf16": Request().problem(a, b, full),
        "fp32 of bf16, bias": bias.problem(a, b, full),
        "fp32 of bf16, added to": Request(beta=BETA).problem(a, b, full),
        "tf32": Request(precision="tf32").problem(a.float(), b.float(), full),
        "bias and gelu": Request(bias="n", activation="gelu").problem(a, b, c),
        "bias of rows": Request(bias="m").problem(a, b, c),
        "groups": Request(groups="m").problem(a, b.expand(4, 512, 384).contiguous(), c),
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        scaled = Request(precision="fp8", scales="tensor")
        found["fp8"] = scaled.problem(a.to(eight), b.to(eight), c)
        found["fp8, bias"] = scaled._replace(bias="n").problem(a.to(eight), b.to(eight), c)
    if torch.cuda.get_device_capability() == (9, 0):
        for scales in ("rows", "blocks"):
            found[f"fp8 {scales}"] = Request(precision="fp8", scales=scales).problem(a.to(eight), b.to(eight), c)
    return found


def test_torch_has_what_it_is_said_to_have() -> None:
    for name, problem in problems().items():
        (of,) = operands(problem, 1, CUDA)
        c0 = of[2].clone() if problem.has_beta else None
        product, why = torchs_product(problem)
        assert product is not None, why
        found = product(*of, beta=BETA if problem.has_beta else 0.0)
        (error,) = truth.relative_errors(problem, of, c0, [found])
        assert error < 0.005, f"{name}: {error}"


def test_what_a_program_ran_is_compared(tmp_path: Path) -> None:
    layer = torch.nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    x = drawn(64, 512)
    with triton_gemm.record_shapes(tmp_path / "shapes.json"), triton_gemm.use(), torch.no_grad():
        layer(x), layer(x)
    with triton_gemm.use():
        report = triton_gemm.compare(tmp_path / "shapes.json", budget=20)
    (one,) = report.products
    assert one.calls == 2 and one.outcome in ("measured", "refused"), one.why
    assert one.outcome == "refused" or "a step of your model, as recorded (2 calls)" in str(report)
