"""Products with few rows, in Triton's interpreter, against fp64."""

from dataclasses import replace

import pytest
import torch

from tests.support.interpreted_plans import Interpreted, run
from tests.support.kernel_cases import CIRCUMSTANCES, Operands, circumstance
from tests.support.numerics import mode_of, reference
from tests.support.product_checks import (
    RULES,
    SCALARS,
    VIEWS,
    Product,
    error_within_bound,
    integers_exact,
    operands,
)
from tests.support.table_fakes import HOPPER
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import INTERPRETER, DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import gemv
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime.workspace import COUNTERS

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNLIKE = [torch.float32, torch.bfloat16]  # fp16 takes no other way than fp32 in the interpreter

SIZES = {
    "ragged": (3, 65, 133),  # no size is a multiple of anything a program tiles by
    "ragged-long": (1, 20, 1100),  # several steps along K, the last of 76 elements
    "two-rows": (2, 70, 40),
    "aligned": (4, 64, 1024),  # whole tiles: no masks
    "k-one": (3, 66, 1),  # an outer product
    "k-zero": (2, 20, 0),  # an empty sum: C = beta C
    "one-column": (4, 1, 70),
    "one": (1, 1, 1),
}

# Small tiles of both forms.
TILES = {
    "along-k": gemv.Config(BLOCK_M=1, BLOCK_N=16, BLOCK_K=128, num_warps=1),
    "along-n": gemv.Config(BLOCK_M=1, BLOCK_N=32, BLOCK_K=32, num_warps=2, num_stages=3),
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    config: TileConfig | None = None,
    split_k: int | None = None,
) -> None:
    """c = alpha a @ b + beta c by `gemv`, in a workspace of NaN with nothing to spare."""
    if alpha == 0:
        a, b = a[..., :0], b[..., :0, :]
    problem = GemmProblem.of(a, b, c, has_beta=beta != 0)
    chosen, split = gemv.default(problem, INTERPRETER)
    if config is not None:
        chosen = replace(config, BLOCK_M=chosen.BLOCK_M)
    for launch in gemv.launches(problem, chosen, split_k or split):
        run(launch, {"a": a, "b": b, "c": c}, alpha=alpha, beta=beta)


def product(dtype: torch.dtype, out_dtype: torch.dtype | None = None, **options: object) -> Product:
    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
        multiply(a, b, c, alpha, beta, **options)

    return Product(call, dtype, mode_of("ieee" if dtype == torch.float32 else "half", dtype), out_dtype or dtype)


@pytest.mark.few(shows=lambda size, view, dtype: {size, (view, dtype)})
@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("view", ["nn", "nt"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sizes(size: tuple[int, int, int], view: str, dtype: torch.dtype) -> None:
    for alpha, beta in SCALARS:
        error_within_bound(product(dtype), size, VIEWS[view], alpha, beta)
    integers_exact(product(dtype), size, VIEWS[view], 3.0, -2.0)


@pytest.mark.few
@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, tile: TileConfig, dtype: torch.dtype) -> None:
    """Also through the form that its strides do not ask for."""
    error_within_bound(product(dtype, config=tile), SIZES["ragged"], VIEWS[view], 1.5, 0.5)
    integers_exact(product(dtype, config=tile, split_k=2), SIZES["ragged"], VIEWS[view])


@pytest.mark.few(shows=lambda rule, dtype, split_k: {(rule, split_k), dtype})
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str, dtype: torch.dtype, split_k: int) -> None:
    for tile in TILES.values():
        RULES[rule](product(dtype, config=tile, split_k=split_k), SIZES["ragged"])


@pytest.mark.few(shows=lambda config: {config.BLOCK_N})
@pytest.mark.parametrize(
    "config",
    [config for config in gemv.CONFIGS if config.BLOCK_M == 4],
    ids=lambda config: str(config).replace(" ", "-"),
)
def test_every_config(config: TileConfig) -> None:
    """Whole tiles, partial ones, and K split, on plain operands; other rows differ in nothing else."""
    for N, K, split_k in ((75, 1050, 1), (19, 5000, 2), (config.BLOCK_N, 2 * config.BLOCK_K, 1)):
        a, b, c = operands(product(torch.float16, torch.float32), (config.BLOCK_M, N, K), "integers")
        multiply(a, b.T.contiguous().T, c.fill_(NAN), config=config, split_k=split_k)
        assert torch.equal(c, reference(a, b).float())


@pytest.mark.few
@pytest.mark.parametrize("along", ["k", "n"])
@pytest.mark.parametrize("pitch", [136, 140, 142, 143])  # read in eights, fours, twos and ones
def test_rows_that_are_read_by_vectors(pitch: int, along: str) -> None:
    """Inside of wider matrices full of NaN, with the last vector at the end of a row and with rows that end in one."""
    for K, N in ((136, 136), (132, 134), (130, 129)):
        wide_a, wide_b = torch.full((3, pitch), NAN), torch.full((136, pitch), NAN)
        a, b = wide_a[:, :K].copy_(torch.randint(-4, 5, (3, K))), wide_b[:K, :N] if along == "n" else wide_b[:N, :K].T
        b.copy_(torch.randint(-4, 5, (K, N)))
        half_a = wide_a.half()[:, :K]
        half_b = wide_b.half()[:K, :N] if along == "n" else wide_b.half()[:N, :K].T
        for tile in TILES.values():
            c = torch.full((3, N), NAN)
            multiply(half_a, half_b, c, config=tile, split_k=2)
            assert torch.equal(c, reference(a, b).float())


@pytest.mark.few
@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_c_of_another_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    error_within_bound(product(dtype, out_dtype), SIZES["ragged"], VIEWS["nt"], -0.5, 2.0)
    integers_exact(product(dtype, out_dtype), SIZES["ragged"])


# --- Splitting K ---


@pytest.mark.few
@pytest.mark.parametrize("split_k", [2, 7, 12])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("K", [0, 1, 530])  # fewer steps than parts, and parts of different length
def test_any_split(K: int, tile: TileConfig, split_k: int) -> None:
    split = product(torch.float32, config=tile, split_k=split_k)
    error_within_bound(split, (3, 75, K), VIEWS["nt"], 1.5, 0.5)
    integers_exact(split, (3, 75, K), VIEWS["nn"])


def test_a_row_does_not_depend_on_the_others() -> None:
    """Rows are summed alike whether 3 or 4 of them share the tile."""
    a, b, c0 = operands(product(torch.float32), (4, 70, 1030))
    all_rows, three_rows = c0.clone(), c0[:3].clone()
    multiply(a, b, all_rows)
    multiply(a[:3], b, three_rows)
    assert torch.equal(all_rows[:3], three_rows)


# --- Epilogue and batches ---


@pytest.mark.few(shows=lambda name, dtype, split_k: {name, (dtype, split_k)})
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance(name: str, dtype: torch.dtype, split_k: int) -> None:
    for tile in TILES.values():
        operands = Operands(circumstance(name, (3, 65, 133), pad=1, dtype=dtype), torch.device("cpu"))
        config = replace(tile, BLOCK_M=gemv.default(operands.problem, INTERPRETER)[0].BLOCK_M)
        launches = gemv.launches(operands.problem, config, split_k)
        operands.check(Interpreted(operands.problem, launches), split_k)


# --- What is planned without tensors ---


def problem(M: int, N: int, K: int, layout: str, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> GemmProblem:
    b = Layout((K * N, 1, K) if layout == "nt" else (K * N, N, 1))
    return GemmProblem(batch, M, N, K, dtype, dtype, "half", Layout((M * K, K, 1)), b, Layout((M * N, N, 1)))


@pytest.mark.parametrize("size", [(0, 5, 7), (2, 0, 7), (0, 0, 0)])
def test_an_empty_result_is_no_launch(size: tuple[int, int, int]) -> None:
    empty = problem(*size, "nn")
    assert gemv.launches(empty, *gemv.default(empty, HOPPER)) == ()
    none = problem(2, 5, 7, "nn", batch=0)
    assert gemv.launches(none, *gemv.default(none, HOPPER)) == ()


@pytest.mark.parametrize("device", [HOPPER, INTERPRETER, device_of_capability((8, 9))], ids=lambda d: d.name)
def test_the_default_is_legal_and_never_splits_finer_than_k(device: DeviceInfo) -> None:
    for M in range(1, gemv.MAX_ROWS + 1):
        for N, K in ((1, 1), (7, 0), (256, 65536), (1023, 4097), (4096, 4096), (152064, 5120), (28672, 8192)):
            for layout in ("nn", "nt"):
                for dtype in DTYPES:
                    for batch in (1, 300):
                        requested = problem(M, N, K, layout, dtype, batch)
                        config, split_k = gemv.default(requested, device)
                        assert gemv.illegal(requested, device, config, split_k) is None
                        assert 1 <= split_k <= max(1, -(-K // config.BLOCK_K))
                        (launch,) = gemv.launches(requested, config, split_k)
                        assert launch.counters <= COUNTERS


def test_the_default_asks_for_enough_and_leaves_no_wave_nearly_empty() -> None:
    """As measured on an H100, whose SMs hold 7 programs of 4 x 1024 with four rows, and 8 of 2 x 2048."""

    def chosen(*size: int, layout: str) -> tuple[int | None, int | None, int]:
        config, split_k = gemv.default(problem(*size, layout), HOPPER)
        return config.BLOCK_N, config.BLOCK_K, split_k

    assert chosen(1, 4096, 4096, layout="nt") == (1, 2048, 1)
    assert chosen(1, 4096, 1024, layout="nt") == (2, 1024, 1)  # half of the lanes would idle
    assert chosen(2, 4096, 4096, layout="nt") == (2, 2048, 1)
    assert chosen(4, 14336, 4096, layout="nt") == (4, 1024, 1)  # 3.9 waves
    assert chosen(4, 4096, 14336, layout="nt") == (2, 2048, 1)  # 1.9 waves, not 1.1
    assert chosen(4, 152064, 5120, layout="nt") == (4, 1024, 1)  # not 2.5 steps
    assert chosen(1, 256, 65536, layout="nt") == (1, 2048, 4)  # 31 KiB on each SM
    assert chosen(1, 14336, 4096, layout="nn") == (64, 128, 2)
    assert chosen(1, 152064, 5120, layout="nn") == (64, 64, 1)  # 1.8 waves, not 2.3
    assert chosen(4, 4096, 4096, layout="nn") == (32, 64, 8)
    assert chosen(4, 28672, 8192, layout="nn") == (64, 128, 1)


def test_its_candidates_have_the_narrower_side_as_rows_and_k_in_parts_around_the_default() -> None:
    for M, N in ((1, 4096), (4, 576), (576, 3), (4096, 1)):
        requested = problem(M, N, 7168, "nt")
        found = list(gemv.candidates(requested, HOPPER))
        given = requested.swap_ab() if N < M else requested
        config, split_k = gemv.default(given, HOPPER)
        assert {one.problem for one in found} == {given}
        assert {one.algorithm._replace(work=1) for one in found} == {Algorithm("gemv", config, swap_ab=N < M)}
        assert {1, split_k} <= {one.algorithm.work for one in found}
    for none in (problem(5, 64, 64, "nn"), problem(1, 64, 64, "nn", torch.float64)):
        assert list(gemv.candidates(none, HOPPER)) == []


def test_more_of_anything_takes_longer() -> None:
    config, model = gemv.Config(1, 1, 2048), model_of(HOPPER)
    base = problem(1, 8192, 4096, "nt")
    for more in (problem(1, 16384, 4096, "nt"), problem(1, 8192, 8192, "nt"), problem(1, 8192, 4096, "nt", batch=3)):
        assert gemv.microseconds(more, config, 1, model) > 1.2 * gemv.microseconds(base, config, 1, model)


@pytest.mark.parametrize(
    ("requested", "config", "why"),
    [
        (problem(5, 64, 64, "nn"), gemv.Config(8, 64, 64), "5 rows are more than 4"),
        (problem(2, 64, 64, "nn", torch.float64), gemv.Config(2, 64, 64), "multiplies no torch.float64"),
        (problem(1, 64, 64, "nn"), gemv.Config(2, 64, 64), "2 rows for 1"),
        (replace(problem(1, 64, 64, "nn", torch.float32), precision="bf16x3"), gemv.Config(1, 64, 64), "not in bf16x3"),
        (problem(1, 64, 64, "nt"), gemv.Config(1, 64, 64), "64 elements along K"),
        (problem(1, 64, 64, "nn"), gemv.Config(1, 4, 1024), "4 columns"),
        (problem(2, 64, 64, "nn"), gemv.Config(2, 64, 64, num_stages=3), "2 x 64 elements of A"),
        (problem(1, 64, 65, "nt"), gemv.Config(1, 16, 1024), "less than 16 bytes at a time"),
        (problem(1, 64, 64, "nn", batch=70_000), gemv.Config(1, 64, 64), "70000 products"),
        (problem(1, 64, 64, "nt"), gemv.Config(1, 16, 4096, num_stages=3), "bytes of shared memory"),
    ],
)
def test_what_is_illegal_says_why(requested: GemmProblem, config: TileConfig, why: str) -> None:
    assert why in (gemv.illegal(requested, HOPPER, config) or "")


def test_what_a_launch_can_have_is_legal_and_no_more() -> None:
    """Counters for each tile of a split, the grid's axes, and sides that 32 bits count."""
    assert gemv.MAX_COUNTERS == COUNTERS
    config = gemv.Config(1, 64, 64, num_warps=4)
    most = problem(1, 64 * COUNTERS, 640, "nn")
    assert gemv.illegal(most, HOPPER, config, 2) is None
    assert gemv.launches(most, config, 2)[0].counters == COUNTERS
    more = problem(1, 64 * COUNTERS + 8, 640, "nn")
    assert gemv.illegal(more, HOPPER, config) is None
    assert "counters" in (gemv.illegal(more, HOPPER, config, 2) or "")
    assert "parts of K" in (gemv.illegal(most, HOPPER, config, 65_536) or "")
    assert "parts of K" in (gemv.illegal(most, HOPPER, config, 0) or "")
    assert "must not exceed" in (gemv.illegal(problem(1, 2**38, 64, "nn"), HOPPER, config) or "")
