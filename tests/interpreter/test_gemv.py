"""Products with few rows, in Triton's interpreter, against fp64."""

import pytest
import torch

from tests.checks import RULES, SCALARS, SENTINEL, VIEWS, Product, error_within_bound, integers_exact, operands
from tests.numerics import error_bound, mode_of, reference
from triton_gemm.config import GemmConfig
from triton_gemm.device import INTERPRETER, DeviceInfo, device_of_capability
from triton_gemm.kernels import gemv
from triton_gemm.kernels.launch import materialise
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout

NAN = float("nan")
HOPPER = device_of_capability((9, 0))
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
    "along-k": GemmConfig(BLOCK_N=16, BLOCK_K=128, num_warps=1),
    "along-n": GemmConfig(BLOCK_N=32, BLOCK_K=32, num_warps=2, num_stages=3),
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(M: int) -> int:
    return 1 << (M - 1).bit_length()


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    config: GemmConfig | None = None,
    split_k: int | None = None,
    bias: torch.Tensor | None = None,
    along: str | None = None,
    activation: str | None = None,
) -> None:
    """c = activation(alpha a @ b + beta c + bias) by `gemv`, in a workspace of NaN with nothing to spare."""
    if alpha == 0:
        a, b = a[..., :0], b[..., :0, :]
    problem = GemmProblem.of(a, b, c, has_beta=beta != 0, bias=along, activation=activation)
    chosen, split = gemv.default(problem, INTERPRETER)
    if config is not None:
        chosen = GemmConfig(chosen.BLOCK_M, config.BLOCK_N, config.BLOCK_K, None, config.num_warps, config.num_stages)
    for launch in gemv.launches(problem, chosen, split_k or split):
        workspace = torch.full((launch.workspace // 4 + 16,), NAN)
        workspace[launch.workspace // 4 :] = SENTINEL
        counters = torch.zeros(launch.counters, dtype=torch.int32)
        tensors = {"a": a, "b": b, "c": c, "workspace": workspace, "counters": counters}
        if bias is not None:
            tensors["bias"] = bias
        arguments = materialise(launch, tensors, {"alpha": alpha, "beta": beta})
        launch.kernel[launch.grid](**arguments, **launch.options)
        assert (counters == 0).all(), "a counter was left"
        assert (workspace[launch.workspace // 4 :] == SENTINEL).all(), "wrote past the workspace"


def product(dtype: torch.dtype, out_dtype: torch.dtype | None = None, **options: object) -> Product:
    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
        multiply(a, b, c, alpha, beta, **options)

    return Product(call, dtype, mode_of("ieee" if dtype == torch.float32 else "half", dtype), out_dtype or dtype)


@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("view", ["nn", "nt"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sizes(size: tuple[int, int, int], view: str, dtype: torch.dtype) -> None:
    for alpha, beta in SCALARS:
        error_within_bound(product(dtype), size, VIEWS[view], alpha, beta)
    integers_exact(product(dtype), size, VIEWS[view], 3.0, -2.0)


@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, tile: GemmConfig, dtype: torch.dtype) -> None:
    """Also through the form that its strides do not ask for."""
    error_within_bound(product(dtype, config=tile), SIZES["ragged"], VIEWS[view], 1.5, 0.5)
    integers_exact(product(dtype, config=tile, split_k=2), SIZES["ragged"], VIEWS[view])


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str, dtype: torch.dtype, split_k: int) -> None:
    for tile in TILES.values():
        RULES[rule](product(dtype, config=tile, split_k=split_k), SIZES["ragged"])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rows_of_different_scale(dtype: torch.dtype) -> None:
    error_within_bound(product(dtype), SIZES["ragged"], kind="wide")


@pytest.mark.parametrize(
    "config",
    [config for config in gemv.CONFIGS if config.BLOCK_M == 4],
    ids=lambda config: str(config).replace(" ", "-"),
)
def test_every_config(config: GemmConfig) -> None:
    """Whole tiles, partial ones, and K split, on plain operands; other rows differ in nothing else."""
    for N, K, split_k in ((75, 1050, 1), (19, 5000, 2), (config.BLOCK_N, 2 * config.BLOCK_K, 1)):
        a, b, c = operands(product(torch.float16, torch.float32), (config.BLOCK_M, N, K), "integers")
        multiply(a, b.T.contiguous().T, c.fill_(NAN), config=config, split_k=split_k)
        assert torch.equal(c, reference(a, b).float())


@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_c_of_another_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    error_within_bound(product(dtype, out_dtype), SIZES["ragged"], VIEWS["nt"], -0.5, 2.0)
    integers_exact(product(dtype, out_dtype), SIZES["ragged"])


# --- Splitting K ---


@pytest.mark.parametrize("split_k", [2, 7, 12])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("K", [0, 1, 530])  # fewer steps than parts, and parts of different length
def test_any_split(K: int, tile: GemmConfig, split_k: int) -> None:
    split = product(torch.float32, config=tile, split_k=split_k)
    error_within_bound(split, (3, 75, K), VIEWS["nt"], 1.5, 0.5)
    integers_exact(split, (3, 75, K), VIEWS["nn"])


def test_the_same_bits_every_time() -> None:
    a, b, c0 = operands(product(torch.float32), (3, 70, 1030))
    results = []
    for _ in range(2):
        c = c0.clone()
        multiply(a, b, c, config=TILES["along-n"], split_k=5)
        results.append(c)
    assert torch.equal(*results)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Rows are summed alike whether 3 or 4 of them share the tile."""
    a, b, c0 = operands(product(torch.float32), (4, 70, 1030))
    all_rows, three_rows = c0.clone(), c0[:3].clone()
    multiply(a, b, all_rows)
    multiply(a[:3], b, three_rows)
    assert torch.equal(all_rows[:3], three_rows)


# --- Epilogue and batches ---


def check(a, b, c0, alpha, beta, bias, along, activation, **options) -> None:  # type: ignore[no-untyped-def]
    """One call against fp64. No activation is steeper than 1.13, so errors before it grow by that at most; its own
    are a few roundings of fp32."""
    c = c0.clone() if beta else torch.full_like(c0, NAN)
    multiply(a, b, c, alpha, beta, bias=bias, along=along, activation=activation, **options)
    mode = mode_of("ieee" if a.dtype == torch.float32 else "half", a.dtype)
    addend = {"m": lambda: bias.double()[:, None], "n": lambda: bias.double()[None, :]}.get(along, lambda: 0.0)()
    functions = {
        None: lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    for z in range(c0.shape[0]) if c0.dim() == 3 else [...]:
        before = reference(a[z], b[z], c0[z], alpha, beta) + addend
        expected = functions[activation](before)
        bound = 1.13 * error_bound(a[z], b[z], c0[z], alpha, beta, mode, torch.float32)
        bound = bound + 2.0**-20 * before.abs() + error_bound(expected * 0, b[z] * 0, expected, 0, 1, mode, c0.dtype)
        assert ((c[z].double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("along", ["m", "n", None])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_bias_and_activation(activation: str | None, along: str | None, dtype: torch.dtype) -> None:
    a, b, c0 = operands(product(dtype), SIZES["ragged"])
    for bias_dtype in (torch.float32, dtype):
        bias = torch.randn(c0.shape["mn".index(along)]).to(bias_dtype) if along else None
        check(a, b, c0, 0.25, 0.0, bias, along, activation)
        check(a, b, c0, 0.25, 0.5, bias, along, activation, config=TILES["along-n"], split_k=3)


def test_an_activation_keeps_nan_and_its_place() -> None:
    a, b, c0 = operands(product(torch.float32), SIZES["ragged"])
    b[5, 7] = NAN
    multiply(a, b, c0, activation="relu", split_k=2)
    assert c0[:, 7].isnan().all() and int(c0.isnan().sum()) == c0.shape[0]


@pytest.mark.parametrize("dtype", UNLIKE, ids=name)
@pytest.mark.parametrize("split_k", [1, 3])
def test_batches(split_k: int, dtype: torch.dtype) -> None:
    M, N, K = 2, 45, 300
    a, b = torch.randn(3, M, K).to(dtype), torch.randn(3, N, K).to(dtype).mT
    c0 = torch.randn(M, 3, N).to(dtype).transpose(0, 1)  # a batch's rows lie between another's
    bias = torch.randn(N)
    for operand in (b, b.contiguous(), b[:1].expand(3, K, N)):
        check(a, operand, c0, 1.5, 0.5, bias, "n", "silu", config=TILES["along-k"], split_k=split_k)
        check(a, operand, c0, 1.0, 0.0, None, None, None, config=TILES["along-n"], split_k=split_k)


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
                        asked = problem(M, N, K, layout, dtype, batch)
                        config, split_k = gemv.default(asked, device)
                        assert gemv.illegal(asked, device, config) is None
                        assert 1 <= split_k <= max(1, -(-K // config.BLOCK_K))


@pytest.mark.parametrize(
    ("asked", "config", "why"),
    [
        (problem(5, 64, 64, "nn"), GemmConfig(8, 64, 64), "5 rows are more than 4"),
        (problem(2, 64, 64, "nn", torch.float64), GemmConfig(2, 64, 64), "multiplies no torch.float64"),
        (problem(1, 64, 64, "nn"), GemmConfig(2, 64, 64), "2 rows for 1"),
        (problem(1, 64, 64, "nt"), GemmConfig(1, 64, 64), "64 elements along K"),
        (problem(1, 64, 64, "nn"), GemmConfig(1, 4, 1024), "4 columns"),
        (problem(2, 64, 64, "nn"), GemmConfig(2, 64, 64, num_stages=3), "2 x 64 elements of A"),
        (problem(1, 64, 65, "nt"), GemmConfig(1, 16, 1024), "one by one"),
        (problem(1, 64, 64, "nn", batch=70_000), GemmConfig(1, 64, 64), "70000 products"),
        (problem(1, 64, 64, "nt"), GemmConfig(1, 16, 4096, num_stages=3), "bytes of shared memory"),
    ],
)
def test_what_is_illegal_says_why(asked: GemmProblem, config: GemmConfig, why: str) -> None:
    assert why in (gemv.illegal(asked, HOPPER, config) or "")
