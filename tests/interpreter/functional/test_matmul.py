"""triton_gemm.matmul in Triton's interpreter: right on any operands, and torch.mm's words for mistakes."""

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import triton_gemm
from tests.support.awkward_sizes import EMPTY, SMALL
from tests.support.epilogue_truth import expected
from tests.support.numerics import error_bound, mode_of, reference
from tests.support.product_checks import NAN, Product, battery, fp32_precision
from tests.support.wrong_products import ones, words
from triton_gemm.arithmetic import MODES, default_arithmetic
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import k03_blocked
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import plan

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_right(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, precision: str = "ieee") -> None:
    assert c.shape == (a.shape[0], b.shape[1]) and c.dtype == a.dtype and c.device == a.device
    mode = precision if a.dtype == torch.float32 else mode_of(default_arithmetic(a.dtype).name, a.dtype)
    error = (c.double() - reference(a, b)).abs()
    assert (error <= error_bound(a, b, None, 1.0, 0.0, mode, c.dtype)).all()


# --- Right on any operands ---


@pytest.mark.few(shows=lambda dtype: {dtype == torch.float32})
@BY_DTYPE
def test_what_every_product_must_do(dtype: torch.dtype) -> None:
    mode = "ieee" if dtype == torch.float32 else mode_of(default_arithmetic(dtype).name, dtype)
    multiply = lambda a, b, c, alpha, beta: triton_gemm.matmul(a, b, out=c)  # noqa: E731
    product = Product(multiply, dtype, mode, dtype, scaled=False)
    for check in battery(product, SMALL).values():
        check()


@pytest.mark.parametrize("precision", MODES)
def test_a_precision_overrules_torchs(precision: str) -> None:
    a, b = torch.randn(40, 50), torch.randn(50, 30)
    with fp32_precision("ieee" if precision == "tf32" else "tf32"):
        choice = triton_gemm.explain(a, b, precision=precision)
        assert choice.precision == precision and f", {precision}" in str(choice)
        result = triton_gemm.matmul(a, b, precision=precision)
    assert_right(a, b, result, precision)
    if precision in ("ieee", "tf32"):
        with fp32_precision(precision):
            assert torch.equal(triton_gemm.matmul(a, b), result)


def test_modes_of_planes_differ_from_one_another_and_from_ieee() -> None:
    a, b = torch.randn(40, 500), torch.randn(500, 30)
    errors = {}
    for precision in MODES:
        result = triton_gemm.matmul(a, b, precision=precision)
        errors[precision] = float((result.double() - reference(a, b)).norm())
    assert 4 * errors["bf16x3"] < errors["tf32"]
    assert 4 * max(errors[precision] for precision in ("bf16x6", "bf16x9", "tf32x3")) < errors["bf16x3"]


def test_precisions_that_are_none_here_are_named() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for call in (triton_gemm.matmul, triton_gemm.explain):
        with pytest.raises(ValueError, match="precision must be one of ieee, tf32, bf16x3, bf16x6, bf16x9, tf32x3 or"):
            call(a, b, precision="fp64")
        with pytest.raises(ValueError, match="precision says how fp32 is multiplied, and operands are torch"):
            call(a.half(), b.half(), precision="tf32")
    assert torch.equal(triton_gemm.matmul(a[:, :0], b[:0], precision="bf16x6"), torch.zeros(8, 8))


@pytest.mark.parametrize("size", [*SMALL.values(), *EMPTY.values()], ids=[*SMALL, *EMPTY])
def test_int8_gives_int32_exactly(size: tuple[int, int, int]) -> None:
    M, N, K = size
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((M, K), (K, N)))
    truth = (a.long() @ b.long()).int()
    for right in (b, b.T.contiguous().T):
        result = triton_gemm.matmul(a, right)
        assert result.dtype == torch.int32 and torch.equal(result, truth)
    assert torch.equal(triton_gemm.bmm(a[None], b[None])[0], truth)
    assert not N or torch.equal(triton_gemm.mv(a, b[:, 0]), truth[:, 0])
    out = torch.full((M, N), 7, dtype=torch.int32)
    assert torch.equal(triton_gemm.matmul(a, b, out=out), truth)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype int, but got signed char instead"):
        triton_gemm.matmul(a, b, out=out.to(torch.int8))


@pytest.mark.parametrize(("dtype", "precision"), [(torch.int8, "int8"), (torch.float64, "fp64")], ids=str)
def test_explain_names_what_the_dtype_is_multiplied_in(dtype: torch.dtype, precision: str) -> None:
    for M, N, K in ((64, 80, 72), (1, 80, 72), (80, 2, 72), (64, 80, 0)):
        choice = triton_gemm.explain(torch.zeros(M, K, dtype=dtype), torch.zeros(K, N, dtype=dtype))
        assert (choice.kernel, choice.precision) == ("portable", precision) and f", {precision}" in str(choice)


@pytest.mark.parametrize(
    ("size", "orders", "kernel"),
    [
        pytest.param((64, 80, 72), "nn", "portable", id="rows and columns"),
        pytest.param((1, 80, 2048), "nt", "gemv", id="one row"),
        pytest.param((80, 1, 2048), "nn", "gemv", id="one column"),
        pytest.param((4, 80, 2048), "nt", "gemv", id="few rows, weights along k"),
        pytest.param((4, 80, 72), "nn", "portable", id="few rows, weights along n"),
    ],
)
def test_explain_names_kernel_config_and_reason(size: tuple[int, int, int], orders: str, kernel: str) -> None:
    M, N, K = size
    a, b = torch.randn(M, K).half(), torch.randn(K, N).half()
    choice = triton_gemm.explain(a, b if orders == "nn" else b.T.contiguous().T)
    assert choice.kernel == kernel and choice.reason
    assert choice.bits and str(choice).startswith(f"{kernel} {choice.config}")
    assert f": {choice.reason}; bits: {choice.bits}; chosen by the model" in str(choice)


def test_explain_says_which_operand_tma_cannot_take() -> None:
    a, b = torch.randn(64, 72).half(), torch.randn(72, 80).half()
    assert "TMA" not in triton_gemm.explain(a, b).reason
    assert "b (72, 79): its rows" in triton_gemm.explain(a, b[:, :79].contiguous()).reason


# --- Copies of operands ---


def draw(order: str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    return x if order == "n" else x.mT.contiguous().mT


@pytest.mark.parametrize("packed", [("a",), ("b",), ("a", "b")], ids="-".join)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_selection_may_copy_operands_first(packed: tuple[str, ...], swapped: bool) -> None:
    """Hopper's kernel needs it, which is not here; any kernel must read the copies instead."""
    a, b, c = draw("t", 50, 67)[1:], draw("n", 67, 41)[:, 1:], torch.full((49, 40), NAN).half()
    problem = GemmProblem.of(a, b, c)
    choice = plan.selection_of(a, b, c)
    assert choice.kernel == "portable" and not choice.packed
    algorithm = choice.algorithm._replace(packed=packed, swap_ab=swapped)
    made = plan.InterpretedPlan(problem, replace(choice, algorithm=algorithm))
    assert len(made.launches) == len(packed) + 1
    made.run(a, b, c)
    truth, bound = expected(a, b, None, mode="fp16", out_dtype=c.dtype)
    assert ((c.double() - truth).abs() <= bound).all()


# --- out= ---


def square(seed: int = 0) -> torch.Tensor:
    return torch.randn(48, 48, generator=torch.Generator().manual_seed(seed))


def shared(array: np.ndarray, start: int) -> torch.Tensor:
    """A matrix in the array's memory whose storage begins where the matrix does."""
    return torch.from_numpy(array[start : start + 48 * 48]).view(48, 48)


@pytest.mark.parametrize("which", ["a", "b", "a-transposed", "overlapping", "other-storage"])
def test_out_may_alias_an_operand(which: str) -> None:
    a, b = square(0), square(1)
    if which == "a":
        out = a
    elif which == "b":
        out = b
    elif which == "a-transposed":
        out = a.T
    elif which == "overlapping":
        buffer = torch.randn(60, 48)
        a, out = buffer[:48], buffer[12:]
    else:
        array = np.random.default_rng(0).standard_normal(49 * 48, dtype=np.float32)
        a, out = shared(array, 0), shared(array, 48)
    kept_a, kept_b = a.clone(), b.clone()
    triton_gemm.matmul(a, b, out=out)
    assert_right(kept_a, kept_b, out)


@pytest.mark.parametrize(("torchs", "shapes"), [(torch.mm, ((4, 5), (5, 6))), (torch.matmul, ((2, 4, 5), (5,)))])
def test_out_of_another_shape_is_resized_with_torchs_warning(
    torchs: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    a, b = map(torch.randn, shapes)
    warned = []
    for multiply in (torchs, triton_gemm.matmul):
        out = torch.empty(3, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            multiply(a, b, out=out)
        assert out.shape == torchs(a, b).shape
        warned.append([(w.category, str(w.message).partition(" (Triggered")[0]) for w in caught])
    assert len(warned[0]) == 1 and warned[1][0][0] is warned[0][0][0] is UserWarning
    assert {w.filename for w in caught} == {__file__}, "it points at the line that calls"
    assert warned[1][0][1].split("This behavior")[0] == warned[0][0][1].split("This behavior")[0]


def test_an_empty_out_is_resized_without_a_warning() -> None:
    out = torch.empty(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton_gemm.matmul(torch.ones(4, 5), torch.ones(5, 6), out=out)
    assert (out == 5).all() and out.shape == (4, 6)


# --- Mistakes ---


def test_both_shapes_are_in_the_text() -> None:
    for a, b in ((ones(2, 3), ones(4, 5)), (ones(3), ones(4, 5)), (ones(), ones(4, 5))):
        text = words(lambda a=a, b=b: triton_gemm.mm(a, b))[1]
        assert f"input float32{list(a.shape)}, mat2 float32[4, 5]" in text


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_named(dtype: torch.dtype) -> None:
    a, b = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"{dtype}.*2x3 and 3x5.*torch.float32"):
        triton_gemm.matmul(a, b)


def test_devices_differ() -> None:
    with pytest.raises(RuntimeError, match=r"same device.*cpu.*meta"):
        triton_gemm.matmul(ones(2, 3), ones(3, 5).to("meta"))
    with pytest.raises(RuntimeError, match=r"device.*cpu.*meta"):
        triton_gemm.matmul(ones(2, 3), ones(3, 5), out=ones(2, 5).to("meta"))
    with pytest.raises(RuntimeError, match="two devices, meta and cpu"):
        triton_gemm.mm(ones(3, 4).to("meta"), ones(4, 5).half())


def test_sparse_operands_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="strided"):
        triton_gemm.matmul(ones(2, 3).to_sparse(), ones(3, 5))


def test_the_default_device_is_for_other_tensors() -> None:
    """Copies of operands, partial sums and counters are where operands are."""
    for M, N, K in ((5, 7, 300), (1, 33, 4096), (33, 1, 4096)):
        a, b, row = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
        with torch.device("meta"):
            c, added = triton_gemm.matmul(a, b), triton_gemm.addmm(row, a, b)
        assert_right(a, b, c)
        torch.testing.assert_close(added, torch.addmm(row, a, b), rtol=1e-4, atol=1e-3)


def by_rung(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k03_blocked.launch(a, b, c := torch.empty(a.shape[0], b.shape[1]), config=GemmConfig(32, 32, 32))
    return c


def test_threads_multiply_at_once() -> None:
    """The interpreter is one for all threads, whether `matmul` or a rung of the ladder is interpreted."""
    pairs = [(torch.randint(-4, 5, (40 + i, 70)).float(), torch.randint(-4, 5, (70, 90)).float()) for i in range(16)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [triton_gemm.mm, by_rung] * 8
            found = list(pool.map(lambda call, pair: call(*pair), calls, pairs))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(c, a @ b) for c, (a, b) in zip(found, pairs, strict=True))
