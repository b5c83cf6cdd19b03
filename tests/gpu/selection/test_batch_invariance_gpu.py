"""Rows have the same bits whatever is multiplied with them, on a GPU: in every dtype, for 1 to 8192 of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import triton_gemm
from tests.gpu.calls import captured
from tests.support import row_bits
from tests.support.kernel_cases import bits
from tests.support.numerics import scale_shapes

DEVICE = torch.device("cuda", 0)
MOST = 8192
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 65, 100, 128, 129, 200, 256, 300, 384, 511, 512, 1024, 4096)
SHAPES = [(256, 7168), (1536, 512)]  # few columns of long sums, which are cut, and more
ODD = (1000, 1064)
LONG = (1536, 7168)
UNEVEN = (384, 3200)  # 25 k-tiles of 128, in six parts
CUT = ("bf16", "gelu", "residual", "bf16 to fp32", "tf32", "bf16x6", "fp8 tensor", "fp8 rows", "fp8 blocks", "fp8 fast")

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FP8, SCALE = torch.float8_e4m3fn, 0.5


def scaled(kind: str, **how: object) -> Product:
    """scaled_matmul, with scales of which each row has its own."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes = scale_shapes(kind, len(a), b.shape[1], a.shape[1])
        scale_a, scale_b = (torch.full(shape, SCALE, device=DEVICE) for shape in shapes)
        return triton_gemm.scaled_matmul(a, b, scale_a, scale_b, **how)  # type: ignore[arg-type]

    return product


def added(activation: str | None = None) -> Product:
    """linear, with a bias that is the same for all numbers of rows."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        bias = torch.linspace(-1, 1, b.shape[1], device=DEVICE).to(a.dtype)
        return triton_gemm.linear(a, b.t(), bias, activation)  # type: ignore[arg-type]

    return product


def residual(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """addmm of a matrix, scaled."""
    c = torch.linspace(-1, 1, b.shape[1], device=DEVICE).to(a.dtype).expand(len(a), -1).contiguous()
    return triton_gemm.addmm(c, a, b, alpha=0.7, beta=0.3)


def precisely(precision: str) -> Product:
    return lambda a, b: triton_gemm.matmul(a, b, precision=precision)  # type: ignore[arg-type]


KINDS: dict[str, tuple[torch.dtype, Product]] = {
    "bf16": (torch.bfloat16, triton_gemm.matmul),
    "fp16": (torch.float16, triton_gemm.matmul),
    "bf16 to fp32": (torch.bfloat16, lambda a, b: triton_gemm.mm(a, b, torch.float32)),
    "bias": (torch.bfloat16, added()),
    "gelu": (torch.bfloat16, added("gelu")),
    "silu": (torch.float16, added("silu")),
    "residual": (torch.bfloat16, residual),
    **{x: (torch.float32, precisely(x)) for x in ("ieee", "tf32", "bf16x3", "bf16x6", "bf16x9", "tf32x3")},
    "fp64": (torch.float64, triton_gemm.matmul),
    "int8": (torch.int8, triton_gemm.matmul),
    "int8 rows": (torch.int8, scaled("rows")),
    **{f"fp8 {kind}": (FP8, scaled(kind)) for kind in ("tensor", "rows", "blocks")},
    "fp8 fast": (FP8, scaled("tensor", use_fast_accum=True)),
}


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE)
    x = x * torch.exp2(torch.randint(-4, 3, shape, generator=generator, device=DEVICE))
    return (x * 20).clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


@pytest.mark.parametrize(
    ("kind", "N", "K"),
    [
        *(pytest.param(kind, *size, id=f"{kind}-{size[0]}x{size[1]}") for kind in KINDS for size in SHAPES),
        *(pytest.param(kind, *LONG, id=f"{kind}-long") for kind in CUT),
        *(pytest.param(kind, *UNEVEN, id=f"{kind}-uneven") for kind in CUT),
        *(pytest.param(kind, *ODD, id=f"{kind}-odd") for kind in ("bf16", "residual", "ieee", "tf32", "fp8 rows")),
    ],
)
def test_rows_do_not_depend_on_their_number(kind: str, N: int, K: int) -> None:
    """From the first row on, and from any other; weights lie as torch.nn.Linear keeps them."""
    dtype, product = KINDS[kind]
    if dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("there is no such product on this GPU")
    K = -(-K // 128) * 128 if kind == "fp8 blocks" else K
    a, b = draw(MOST, K, dtype=dtype, seed=1), draw(N, K, dtype=dtype, seed=2).t()
    with triton_gemm.batch_invariant():
        whole = bits(product(a, b))
        for M in ROWS:
            for begin in (0, 16 * (M % 7 + 1)):
                wrong = int((bits(product(a[begin : begin + M], b)) != whole[begin : begin + M]).sum())
                assert wrong == 0, f"{wrong} elements of {M} rows from row {begin} on are others"


@pytest.mark.parametrize("kind", ["bf16", "fp16", "ieee", "tf32", "bf16x6", "fp64", "int8", "fp8 rows", "fp8 blocks"])
def test_every_number_of_rows_up_to_512(kind: str) -> None:
    """The first of 600 rows, of few columns, whose sums are cut on Hopper (but for fp64's, which are not, and int8's,
    which are exact): of fp8 from 4096 on, of IEEE fp32 not yet at 4096."""
    dtype, product = KINDS[kind]
    if dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("there is no such product on this GPU")
    K = {"fp8 rows": 4096, "fp8 blocks": 4096, "ieee": 7168}.get(kind, 2048)
    a, b = draw(600, K, dtype=dtype, seed=1), draw(256, K, dtype=dtype, seed=2).t()
    with triton_gemm.batch_invariant():
        whole = bits(product(a, b))
        wrong = [M for M in range(1, 513) if not torch.equal(bits(product(a[:M], b)), whole[:M])]
    assert not wrong, f"other bits at {wrong} rows"


def test_many_rows_while_few_share_tiles() -> None:
    """Programs that sum parts in turn wait for nobody; owners of tiles wait for programs that have started before them,
    also while another stream's run."""
    a, b = draw(MOST, 7168, dtype=torch.bfloat16, seed=1), draw(256, 7168, dtype=torch.bfloat16, seed=2).t()
    other = torch.cuda.Stream()
    with triton_gemm.batch_invariant():
        whole = bits(triton_gemm.matmul(a, b))
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(other):
                concurrent = triton_gemm.matmul(a[:64], b)
            again = triton_gemm.matmul(a, b)
            assert torch.equal(bits(again), whole)
        torch.cuda.synchronize()
    assert torch.equal(bits(concurrent), whole[:64])


def test_batches_and_what_lies_anywhere() -> None:
    a, b = draw(60, 1064, dtype=torch.bfloat16, seed=1), draw(256, 1064, dtype=torch.bfloat16, seed=2).t()
    with triton_gemm.batch_invariant():
        row_bits.assert_lie_anywhere(a, b, 12)


@pytest.mark.parametrize("scenario", ["linear", "use", "compile", "use and compile"])
def test_layers_and_their_backwards(scenario: str) -> None:
    """Which torch runs in threads of its own."""
    weight, bias = draw(256, 1024, dtype=torch.bfloat16, seed=1), draw(256, dtype=torch.bfloat16, seed=2)
    x, upstream = draw(200, 1024, dtype=torch.bfloat16, seed=3), draw(200, 256, dtype=torch.bfloat16, seed=4)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias) if "use" in scenario else triton_gemm.linear(x, weight, bias)

    forward = torch.compile(layer, dynamic=True) if "compile" in scenario else layer

    def rows(*sizes: int) -> torch.Tensor:
        return row_bits.of_layer(forward, x, upstream, *sizes)

    with triton_gemm.batch_invariant():
        if "use" in scenario:
            with triton_gemm.use():
                fewest = 2 if "compile" in scenario else 1  # of one row Inductor may make no product at all
                whole, cut = rows(200), rows(fewest, 3, 13, 56, 128 - fewest)
        else:
            whole, cut = rows(200), rows(1, 2, 13, 56, 128)
    assert torch.equal(whole, cut)


def test_graphs_and_groups() -> None:
    a, b = draw(300, 512, dtype=torch.bfloat16, seed=1), draw(3, 512, 256, dtype=torch.bfloat16, seed=2)
    with triton_gemm.batch_invariant():
        whole = bits(triton_gemm.matmul(a, b[0]))
        few = a[:3].clone()
        triton_gemm.matmul(few, b[0])
        graph, c = captured(lambda: triton_gemm.matmul(few, b[0]))
        graph.replay()
        assert torch.equal(bits(c), whole[:3])
        row_bits.assert_groups_are_alike(a, b, [100, 200, 300], [2, 202, 300])
