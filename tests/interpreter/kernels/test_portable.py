"""What the portable kernel and the repacking one compute, in Triton's interpreter, against fp64."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support import awkward_sizes
from tests.support.epilogue_truth import activated
from tests.support.interpreted_plans import Interpreted, run
from tests.support.kernel_cases import CIRCUMSTANCES, DTYPES, Case, Operands, circumstance
from tests.support.kernel_mutants import kernels_with
from tests.support.numerics import error_bound, mode_of, reference
from tests.support.product_checks import NAN, VIEWS, Product, battery, integers_exact, nearest_tf32, same_bits
from triton_gemm import kernels
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.kernels import portable
from triton_gemm.problem import ACTIVATIONS, GemmProblem

TILES = portable.Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2)
SMALL_TILES = portable.Config(BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, GROUP_M=2, num_warps=4, num_stages=2)


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    config: TileConfig = SMALL_TILES,
    precision: str | None = None,
    split_k: int = 1,
    activation: str | None = None,
) -> None:
    """c = activation(alpha a @ b + beta c)."""
    problem = GemmProblem.of(a, b, c, has_beta=beta != 0, activation=activation)
    if precision is not None:
        problem = replace(problem, precision=precision)
    if alpha == 0:
        problem = replace(problem, K=0)
    for launch in portable.launches(problem, config, split_k):
        run(launch, {"a": a, "b": b, "c": c}, alpha=alpha, beta=beta)


def check(case: Case, config: TileConfig = SMALL_TILES, split_k: int = 1) -> None:
    operands = Operands(case, torch.device("cpu"))
    operands.check(Interpreted(operands.problem, portable.launches(operands.problem, config, split_k)), split_k)


def product(precision: str, dtype: torch.dtype, out_dtype: torch.dtype | None = None, **options) -> Product:
    def call(a, b, c, alpha, beta):
        multiply(a, b, c, alpha, beta, precision=precision, **options)

    return Product(call, dtype, mode_of(precision, dtype), out_dtype or dtype)


KINDS = {
    "fp16": ("half", torch.float16),
    "bf16": ("half", torch.bfloat16),
    "ieee": ("ieee", torch.float32),
    "tf32": ("tf32", torch.float32),
    "fp64": ("fp64", torch.float64),
    **{mode: (mode, torch.float32) for mode in EMULATED},
}


def sizes(kind: str, split_k: int) -> dict[str, tuple[int, int, int]]:
    """Splitting, and planes, meet the edges of K; those of M and N are as without."""
    if split_k == 1 and kind not in EMULATED:
        return awkward_sizes.SMALL
    return {name: awkward_sizes.SMALL[name] for name in ("ragged", "k-tail-of-one", "k-below-block", "k-zero", "one")}


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "split_k", "check"),
    [
        pytest.param(kind, split_k, check, id=f"{kind}-split-{split_k}-{check}".replace(" ", "-"))
        for kind in KINDS
        for split_k in (1, 3)
        for check in battery(product(*KINDS[kind]), sizes(kind, split_k))
    ],
)
def test_battery(kind: str, split_k: int, check: str) -> None:
    battery(product(*KINDS[kind], split_k=split_k, config=TILES), sizes(kind, split_k))[check]()


@pytest.mark.few(shows=lambda precision, config: {precision, *enumerate((config.BLOCK_M, config.BLOCK_N))})
@pytest.mark.parametrize(
    ("precision", "config"),
    [
        pytest.param(precision, config, id=f"{precision}-{config}".replace(" ", "-"))
        for precision, configs in portable.CONFIGS.items()
        for config in configs
    ],
)
def test_every_config(precision: str, config: TileConfig) -> None:
    dtype = DTYPES.get(precision, torch.float32)
    size = (config.BLOCK_M + 7, 2 * config.BLOCK_N + 3, 2 * config.BLOCK_K + 5)
    if dtype.itemsize == 1:
        out_dtype = torch.int32 if dtype == torch.int8 else torch.float32
        how = {"dtype": dtype, "out_dtype": out_dtype, "precision": precision, "integers": True}
        check(Case(size, "ntn", **how), config)
        return check(Case(size, "tnn", **how), config, split_k=2)
    integers_exact(product(precision, dtype, config=config), size, VIEWS["nt"], 1.0, -1.0)
    integers_exact(product(precision, dtype, config=config, split_k=2), size, VIEWS["tn"])


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_c_of_another_dtype(out_dtype: torch.dtype) -> None:
    mixed = product("half", torch.float16, out_dtype, config=TILES)
    for name, check in battery(mixed, {"ragged": awkward_sizes.SMALL["ragged"]}).items():
        if name != "copies_are_exact" or out_dtype == torch.float32:  # fp16's largest and least are not bf16's
            check()


def test_an_empty_result_is_no_launch() -> None:
    for M, N, K in awkward_sizes.EMPTY.values():
        a, b, c = torch.empty(M, K), torch.empty(K, N), torch.empty(M, N)
        assert portable.launches(GemmProblem.of(a, b, c), SMALL_TILES) == ()
    empty_batch = GemmProblem.of(torch.empty(0, 3, 4), torch.empty(0, 4, 5), torch.empty(0, 3, 5))
    assert portable.launches(empty_batch, SMALL_TILES) == ()


def test_tf32_rounds_operands_to_nearest() -> None:
    """Products of numbers of ten bits of mantissa are exact in fp32: any other rounding shows."""
    a, b = torch.randn(40, 1), torch.randn(1, 50)
    c = torch.empty(40, 50)
    multiply(a, b, c, precision="tf32")
    assert torch.equal(c, nearest_tf32(a) * nearest_tf32(b))


# --- fp64 ---


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_fp64_loses_nothing_to_fp32(activation: str | None) -> None:
    """Neither of alpha and beta, which no fp32 is, nor in the epilogue or the workspace."""
    for split_k, axis in ((1, "m"), (3, "n")):
        how = {"alpha": 0.1, "beta": -0.3, "bias": axis, "activation": activation, "dtype": torch.float64}
        check(Case((45, 70, 100), "ntn", **how), split_k=split_k)


# --- Planes ---


@pytest.mark.parametrize("mode", EMULATED)
def test_planes_at_the_ends_of_fp32s_range(mode: str) -> None:
    """As docs/precision.md has it, whichever kernel multiplies."""
    largest = torch.finfo(torch.float32).max
    a = torch.tensor([[torch.inf], [NAN], [largest], [-largest], [2.0**-130]])
    c = torch.empty(5, 2)
    multiply(a, torch.tensor([[1.0, -1.0]]), c, precision=mode)
    assert c[:2].isnan().all()
    exact = mode in ("bf16x6", "bf16x9")
    assert torch.equal(c[2:4, 0], torch.tensor([largest, -largest]) if exact else torch.tensor([torch.inf, -torch.inf]))
    assert c[4, 0] == 2.0**-130


@pytest.mark.parametrize("mode", EMULATED)
def test_planes_hold_the_bits_that_they_are_said_to(mode: str) -> None:
    """Against one, products are the sums of an operand's planes."""
    a, c = torch.randn(300, 1), torch.empty(300, 1)
    multiply(a, torch.ones(1, 1), c, precision=mode)
    error = ((c.double() - a.double()) / a.double()).abs().max()
    bits = {"bf16x3": 16, "bf16x6": 24, "bf16x9": 24, "tf32x3": 22}[mode]
    assert error <= 2.0**-bits and (error > 2.0 ** -(bits + 4) or error == 0)


# --- By TMA ---

TMA_CASES = {
    **{orders: Case((150, 136, 197), orders) for orders in ("nnn", "ntn", "tnn", "ttn")},  # 9 tiles, of 4 programs
    "one k-tile": Case((40, 72, 24), alpha=-0.5, bias="m", out_dtype=torch.float32),
    "epilogue": Case((150, 136, 197), alpha=0.5, beta=-2.0, bias="n", activation="relu", dtype=torch.float16),
}
TMA_BUGS = {
    "another row of tiles": ("m = pid_m * BLOCK_M", "m = pid_n * BLOCK_M"),
    "the last k-tile only": ("dot_operand(b), acc)\n        offs_m", "dot_operand(b), acc * 0)\n        offs_m"),
}


@pytest.mark.parametrize("name", TMA_CASES)
def test_tma(name: str, package: ModuleType = kernels) -> None:
    """What it computes, and that pointers give the same bits."""
    module, launch = (import_module(f"{package.__name__}.{part}") for part in ("portable", "launch"))
    operands, config, found = Operands(TMA_CASES[name], torch.device("cpu")), module.TMA_CONFIGS[9][-1], []
    for work in (module.host.Schedule(4), 1):
        made = module.launches(operands.problem, config, work)
        operands.check(Interpreted(operands.problem, made, launch.materialise))
        found.append((operands.c.tolist(), module.order_of_sums(operands.problem, config, work)))
    assert found[0] == found[1]


@pytest.mark.parametrize("bug", TMA_BUGS)
def test_a_bug_by_tma_is_found(bug: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        test_tma("nnn", kernels_with([TMA_BUGS[bug]], tmp_path))


# --- Splitting along K ---


@pytest.mark.parametrize("split_k", [2, 3, 7, 20])
def test_splitting_gives_the_same_bits_every_time(split_k: int) -> None:
    """Ten k-tiles: even and uneven shares, empty ones, and more programs than k-tiles."""
    a, b = torch.randn(40, 155), torch.randn(155, 45)
    results = []
    for _ in range(2):
        results.append(torch.full((40, 45), NAN))
        multiply(a, b, results[-1], split_k=split_k)
    assert same_bits(*results)
    assert ((results[0].double() - reference(a, b)).abs() <= error_bound(a, b, None, 1, 0, "ieee", torch.float32)).all()


def test_a_share_is_summed_as_a_product_of_its_own() -> None:
    a, b = torch.randn(40, 96), torch.randn(96, 40)
    whole, *parts = (torch.empty(40, 40) for _ in range(4))
    multiply(a, b, whole, split_k=3)
    for i, part in enumerate(parts):
        multiply(a[:, 32 * i : 32 * (i + 1)], b[32 * i : 32 * (i + 1)], part)
    assert torch.equal(whole, (parts[0] + parts[1]) + parts[2])


# --- Epilogue ---


@pytest.mark.few(shows=lambda split_k, name: {split_k, name})
@pytest.mark.parametrize("name", CIRCUMSTANCES)
@pytest.mark.parametrize("split_k", [1, 3], ids=["whole", "split"])
def test_every_circumstance(split_k: int, name: str) -> None:
    """Epilogues, batches, and C of any dtype and order."""
    check(circumstance(name, (75, 70, 100), pad=1), TILES, split_k)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what overflows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_infinities_is_torchs(activation: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([-torch.inf, -most, -40.0, most, torch.inf, NAN], dtype=dtype)[:, None]
    c = torch.empty(6, 1, dtype=dtype)
    multiply(x, torch.ones(1, 1, dtype=dtype), c, activation=activation)
    torch.testing.assert_close(c, activated(x.double(), activation).to(dtype), equal_nan=True)
