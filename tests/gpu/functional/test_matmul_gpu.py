"""triton_gemm.matmul on a GPU: right everywhere, as accurate as torch, never tuning, at home in graphs and threads."""

from collections.abc import Iterator

import pytest
import torch

import triton_gemm
from tests.gpu.calls import captured, launched
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.support import awkward_sizes
from tests.support.numerics import error_bound, mode_of, reference
from tests.support.product_checks import (
    VIEWS,
    Product,
    View,
    battery,
    error_within_bound,
    fp32_precision,
    integers_exact,
)
from triton_gemm.ladder.rung import Autotuner

MODES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def never_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Autotuner, "run", lambda *_, **__: pytest.fail("matmul tuned"))


@pytest.fixture(params=MODES)
def product(request: pytest.FixtureRequest) -> Iterator[Product]:
    """matmul in each of its precisions, with torch set to the same."""
    dtype = MODES[request.param]
    precision = "tf32" if request.param == "tf32" else "ieee"
    mode = precision if dtype == torch.float32 else mode_of("half", dtype)

    def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
        assert triton_gemm.matmul(a, b, out=c) is c

    with fp32_precision(precision):
        yield Product(multiply, dtype, mode, dtype, "cuda", scaled=False)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def test_what_every_product_must_do(product: Product) -> None:
    for check in battery(product, {**awkward_sizes.SMALL, **awkward_sizes.LARGE}).values():
        check()


@pytest.mark.parametrize("size", awkward_sizes.LARGE.values(), ids=awkward_sizes.LARGE)
def test_large_views(product: Product, size: awkward_sizes.Size) -> None:
    for view in (
        *(VIEWS["tt"], VIEWS["steps"], VIEWS["expanded"], View("ntt", offset=3), View(gap=8), View(gap=8, offset=8)),
    ):
        error_within_bound(product, size, view, kind="wide")
        integers_exact(product, size, view)


@pytest.mark.parametrize("size", [(1021, 509, 767), (2048, 1024, 4096), (1, 4096, 4096)], ids=str)
def test_error_is_at_most_twice_that_of_torch(product: Product, size: awkward_sizes.Size) -> None:
    M, N, K = size
    if M == 1 and product.dtype == torch.float32:
        pytest.skip("torch gives one row to a GEMV: IEEE whatever is set, and summed as a tree")
    a, b = random(M, K, dtype=product.dtype), random(K, N, dtype=product.dtype)
    truth = reference(a, b)
    ours, theirs = (float((c.double() - truth).norm()) for c in (triton_gemm.matmul(a, b), a @ b))
    assert ours <= 2 * theirs, f"{ours / theirs:.2f} times torch's error"


@pytest.mark.parametrize("size", awkward_sizes.EMPTY.values(), ids=awkward_sizes.EMPTY)
def test_empty(size: awkward_sizes.Size) -> None:
    M, N, K = size
    assert triton_gemm.matmul(random(M, K), random(K, N)).shape == (M, N)
    torch.cuda.synchronize()


def test_fp32_precision_switches_the_kernel_and_a_mode_overrules_it() -> None:
    a, b = random(1024, 1024, dtype=torch.float32), random(1024, 1024, dtype=torch.float32)
    large = "warp_specialised" if torch.cuda.get_device_capability() == (9, 0) else "portable"
    by_mode = {mode: triton_gemm.matmul(a, b, precision=mode) for mode in ("ieee", "tf32")}
    assert not torch.equal(*by_mode.values())
    for precision, kernel in (("ieee", "fma"), ("tf32", large)):
        with fp32_precision(precision):
            assert triton_gemm.explain(a, b).kernel == kernel
            result = triton_gemm.matmul(a, b)
            for mode, expected in by_mode.items():
                assert torch.equal(triton_gemm.matmul(a, b, precision=mode), expected)
        assert torch.equal(result, by_mode[precision])
        bound = error_bound(a, b, None, 1.0, 0.0, precision, torch.float32)
        assert ((result.double() - reference(a, b)).abs() <= bound).all()


@hopper
@pytest.mark.parametrize(
    ("size", "kernel", "packed"),
    [
        pytest.param((1024, 768, 512), "warp_specialised", (), id="large"),
        pytest.param((1021, 1509, 767), "warp_specialised", ("a", "b"), id="large-and-odd"),
        pytest.param((1021, 509, 767), "warp_specialised", ("a", "b"), id="middling-and-odd"),
        pytest.param((37, 29, 65), "portable", (), id="small-and-odd"),
        pytest.param((1, 4096, 4096), "gemv", (), id="one-row"),
        pytest.param((1024, 1, 4096), "gemv", (), id="one-column"),
        pytest.param((4096, 1, 4096), "skinny", (), id="one-column-of-a-wave"),
    ],
)
def test_what_is_explained_is_what_runs(size: awkward_sizes.Size, kernel: str, packed: tuple[str, ...]) -> None:
    M, N, K = size
    a, b = random(M, K), random(K, N)
    choice = triton_gemm.explain(a, b)
    assert (choice.kernel, choice.packed) == (kernel, packed) and choice.reason
    assert choice.device == torch.cuda.get_device_name() and choice == triton_gemm.explain(M=M, N=N, K=K, dtype=a.dtype)
    names = [name for name in launched(lambda: triton_gemm.matmul(a, b)) if name.endswith("_kernel")]
    assert names == ["repack_kernel"] * len(packed) + [f"{kernel}_kernel"]


def test_a_graph_captures_it_after_one_call(product: Product) -> None:
    a, b = random(264, 328, dtype=product.dtype), random(328, 136, dtype=product.dtype)
    triton_gemm.matmul(a, b)
    graph, out = captured(lambda: triton_gemm.matmul(a, b))
    b.copy_(random(328, 136, dtype=product.dtype))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, triton_gemm.matmul(a, b))


def test_cpu_tensors_name_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        triton_gemm.matmul(torch.ones(2, 3), torch.ones(3, 4))
