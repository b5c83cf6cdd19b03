"""What the portable kernel and the repacking one compute, in Triton's interpreter, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from tests.support import awkward_sizes
from tests.support.epilogue_truth import activated, expected
from tests.support.kernel_cases import Case, Operands
from tests.support.kernel_mutants import kernels_with
from tests.support.numerics import error_bound, mode_of, reference
from tests.support.product_checks import NAN, VIEWS, Product, battery, integers_exact, nearest_tf32, same_bits
from triton_gemm import kernels
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import INTERPRETER, device_of_capability
from triton_gemm.kernels import portable, repack, tiles
from triton_gemm.kernels.launch import Launch, materialise
from triton_gemm.kernels.portable import host
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout
from triton_gemm.selection.select import Selection, launches

TILES = portable.Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2)
SMALL_TILES = portable.Config(BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, GROUP_M=2, num_warps=4, num_stages=2)


def run(launch: Launch, operands: dict[str, torch.Tensor], **scalars: float) -> None:
    """Runs one launch on a workspace full of NaN; its counters must be zero again."""
    counters = torch.zeros(launch.counters, dtype=torch.int32)
    workspace = torch.full((launch.workspace // 4,), NAN)
    operands = {**operands, "workspace": workspace, "counters": counters}
    launch.kernel[launch.grid](**materialise(launch, operands, scalars), **launch.options)
    assert not counters.any(), "counters are not zero afterwards"


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
    bias: torch.Tensor | None = None,
    axis: str | None = None,
    activation: str | None = None,
) -> None:
    """c = activation(alpha a @ b + beta c + bias)."""
    problem = GemmProblem.of(a, b, c, has_beta=beta != 0, bias=axis, activation=activation)
    if precision is not None:
        problem = replace(problem, precision=precision)
    if alpha == 0:
        problem = replace(problem, K=0)
    stride = 1 if bias is None else bias.stride(0)
    operands = {"a": a, "b": b, "c": c} | ({} if bias is None else {"bias": bias})
    for launch in portable.launches(problem, config, split_k, stride_bias=stride):
        run(launch, operands, alpha=alpha, beta=beta)


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


DTYPES = {
    **{"half": torch.bfloat16, "fp64": torch.float64, "int8": torch.int8},
    **{"fp8": torch.float8_e4m3fn, "fp8 fast": torch.float8_e5m2},
}


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


# --- 8 bits: int8, fp8, and their scales ---


class Launches:
    """Launches in a plan's place."""

    def __init__(self, problem: GemmProblem, launches: tuple[Launch, ...]) -> None:
        self.launches, self.names = launches, ("a", "b", "c", *problem.auxiliary)

    def run(self, a, b, c, auxiliary=(), alpha=1.0, beta=0.0) -> None:
        operands = dict(zip(self.names, (a, b, c, *auxiliary), strict=True))
        for launch in self.launches:
            operands |= {x.name: torch.full(x.shape, NAN).to(x.dtype) for x in launch.temporaries}
            run(launch, operands, alpha=alpha, beta=beta)


def check(case: Case, config: TileConfig = SMALL_TILES, split_k: int = 1) -> None:
    operands = Operands(case, torch.device("cpu"))
    operands.check(Launches(operands.problem, portable.launches(operands.problem, config, split_k)), split_k)


TILES_8 = replace(SMALL_TILES, BLOCK_K=64)  # half a block of scales
KINDS_8 = {
    "int8": {"dtype": torch.int8, "out_dtype": torch.int32},
    "int8-tensor": {"dtype": torch.int8, "out_dtype": torch.float32, "scales": "tensor"},
    "int8-rows": {"dtype": torch.int8, "scales": "rows"},
    "fp8-tensor": {"dtype": torch.float8_e4m3fn, "scales": "tensor"},
    "fp8-rows": {"dtype": torch.float8_e5m2, "out_dtype": torch.float32, "scales": "rows"},
    "fp8-blocks": {"dtype": torch.float8_e4m3fn, "out_dtype": torch.float32, "scales": "blocks"},
    "fp8-fast": {"dtype": torch.float8_e5m2, "scales": "tensor", "precision": "fp8 fast"},
}
SIZES_8 = {
    **{
        name: awkward_sizes.SMALL[name]
        for name in ("ragged", "k-tail-of-one", "k-zero", "one-row", "one-column", "one")
    },
    **{"blocks": (60, 140, 300), "whole-blocks": (64, 256, 256)},
}


def of_8_bits(kind: str, size: tuple[int, int, int], orders: str = "nnn", **changes: object) -> Case:
    return Case(size, orders, **{"out_dtype": torch.bfloat16, **KINDS_8[kind], **changes})


@pytest.mark.few(shows=lambda kind, split_k, size: {(kind, split_k), size})
@pytest.mark.parametrize("size", SIZES_8.values(), ids=SIZES_8)
@pytest.mark.parametrize("split_k", [1, 3], ids=["whole", "split"])
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits(kind: str, split_k: int, size: tuple[int, int, int]) -> None:
    check(of_8_bits(kind, size), TILES_8, split_k)


VIEWS_8 = {
    **{orders: {"orders": orders} for orders in ("ntn", "tnn", "ttn", "nnt")},
    "steps": {"orders": "tnt", "step": 2, "pad": 1, "gap": 3},
    "unaligned": {"offset": 1, "c_offset": 1},
    "words": {"pad": 4, "orders": "ntn"},
}


@pytest.mark.few
@pytest.mark.parametrize("view", VIEWS_8)
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits_in_any_layout(kind: str, view: str) -> None:
    check(of_8_bits(kind, (45, 70, 260), **VIEWS_8[view]), TILES_8)


@pytest.mark.few
@pytest.mark.parametrize("split_k", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS_8 if kind != "int8"])
def test_scales_come_before_the_epilogue(kind: str, split_k: int) -> None:
    for axis, activation, beta in (("n", None, 0.0), ("m", "gelu", 0.0), ("n", "relu", -2.0)):
        how = {"bias": axis, "activation": activation, "alpha": 0.5, "beta": beta}
        check(of_8_bits(kind, (45, 70, 260), **how), TILES_8, split_k)


@pytest.mark.few(shows=lambda kind, orders: {kind, orders})
@pytest.mark.parametrize("orders", ["nnn", "ttn", "tnt"])
@pytest.mark.parametrize("kind", KINDS_8)
def test_8_bits_that_are_copied_first(kind: str, orders: str) -> None:
    """Operands that are not K-major, on GPUs whose tensor cores have only `mma`."""
    operands = Operands(of_8_bits(kind, (45, 70, 260), orders), torch.device("cpu"))
    device = device_of_capability((8, 9))
    ways = [way for way in portable.candidates(operands.problem, device) if way.algorithm.packed]
    assert ways and all(host.along_k(way.problem) == ("a", "b") for way in ways)
    made = launches(operands.problem, Selection.of(ways[-1], ""))
    operands.check(Launches(operands.problem, made), ways[-1].algorithm.work)


def test_int8_is_exact_up_to_the_ends_of_int32_and_wraps_beyond() -> None:
    tiles = replace(TILES_8, BLOCK_K=4096)
    for K, split_k in ((2**17 - 1, 1), (2**17 - 1, 3), (2**17, 1), (2**17 + 70, 2)):
        a, b = torch.full((3, K), -128, dtype=torch.int8), torch.full((K, 2), -128, dtype=torch.int8)
        c = torch.zeros(3, 2, dtype=torch.int32)
        multiply(a, b, c, config=tiles, split_k=split_k)
        assert (c == (K * 2**14 + 2**31) % 2**32 - 2**31).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_there_is(dtype: torch.dtype) -> None:
    """Subnormals, infinities and NaN."""
    b, c = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 256), torch.empty(1, 256)
    multiply(torch.ones(1, 1).to(dtype), b, c, config=TILES_8)
    assert torch.equal(c.nan_to_num(9e9), b.float().nan_to_num(9e9))


@pytest.mark.skipif(not hasattr(InterpreterBuilder, "create_dot_scaled"), reason="the interpreter has it from 3.9 on")
@pytest.mark.parametrize("kind", [kind for kind in KINDS_8 if kind.startswith("fp8")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_block_scales_of_one_give_the_same_bits_as_none(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensor cores of 12.0 multiply fp8: all products of two numbers, and sums that no order rounds. Triton 3.9's
    interpreter makes zeros of e5m2's subnormals for scales of blocks; these are left out."""
    how, bits = KINDS_8[kind], torch.arange(256, dtype=torch.uint8)
    every = (bits if dtype == torch.float8_e4m3fn else torch.where(bits & 0x7C > 0, bits, 0)).view(dtype)
    integers = (torch.randint(-8, 9, size).to(dtype) for size in ((130, 260), (260, 140)))
    for a, b in ((every.view(256, 1), every.view(1, 256)), tuple(integers)):
        problem = GemmProblem.of(
            a, b, torch.empty(len(a), b.shape[1]), precision=how.get("precision"), scales=how["scales"]
        )
        found = []
        for block_scaled in (False, True):
            monkeypatch.setattr(portable.kernel, "multiplies_block_scaled", lambda made=block_scaled: made)
            operands = {"a": a, "b": b, "c": torch.full((len(a), b.shape[1]), NAN)}
            operands |= {"a_scale": torch.ones(len(a), 3), "b_scale": torch.ones(3, b.shape[1])}
            for launch in portable.launches(problem, TILES_8):
                run(launch, operands, alpha=1.0, beta=0.0)
            found.append(operands["c"])
        assert torch.equal(found[0].isnan(), found[1].isnan())
        assert torch.equal(*(c.nan_to_num(9e9).view(torch.int32) for c in found))


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
        (made,) = module.launches(operands.problem, config, work)

        def run(a, b, c, auxiliary, alpha, beta, made=made):
            tensors = dict(zip(("a", "b", "c", "bias"), (a, b, c, *auxiliary), strict=False))
            made.kernel[made.grid](**launch.materialise(made, tensors, {"alpha": alpha, "beta": beta}), **made.options)

        operands.check(SimpleNamespace(run=run))
        found.append((operands.c.tolist(), module.order_of_sums(operands.problem, config, work)))
    assert found[0] == found[1]


@pytest.mark.parametrize("bug", TMA_BUGS)
def test_a_bug_by_tma_is_found(bug: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        test_tma("nnn", kernels_with([TMA_BUGS[bug]], tmp_path))


# --- Batches ---


def batches(order: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [3, 50, 40], b [3, 40, 70] and an empty c [3, 50, 70] that lie in memory as `order` says."""
    a, b = torch.randn(3, 50, 40).to(dtype), torch.randn(3, 40, 70).to(dtype)
    c = torch.full((3, 50, 70), NAN, dtype=dtype)
    if order == "transposed":
        a, b, c = a.mT.contiguous().mT, b.mT.contiguous().mT, c.mT.contiguous().mT
    elif order == "strided":
        a = torch.full((3, 2, 50, 43), NAN, dtype=dtype)[:, 1, :, :40].copy_(a)
        b = torch.full((40, 3, 140), NAN, dtype=dtype).transpose(0, 1)[..., ::2].copy_(b)
        c = c.transpose(0, 1).contiguous().transpose(0, 1)
    elif order == "expanded":
        a, b = a[:1].expand(3, 50, 40), b[1:2].expand(3, 40, 70)
    elif order == "a-is-one":
        a = a[:1].expand(3, 50, 40)
    return a, b, c


@pytest.mark.few(shows=lambda kind, split_k, order: {kind, (split_k, order)})
@pytest.mark.parametrize("order", ["contiguous", "transposed", "strided", "expanded", "a-is-one"])
@pytest.mark.parametrize("split_k", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str, split_k: int, order: str) -> None:
    precision, dtype = KINDS[kind]
    a, b, c = batches(order, dtype)
    multiply(a, b, c, precision=precision, split_k=split_k)
    for i in range(3):
        bound = error_bound(a[i], b[i], None, 1.0, 0.0, mode_of(precision, dtype), dtype)
        assert ((c[i].double() - reference(a[i], b[i])).abs() <= bound).all(), f"matrix {i}"


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


@pytest.mark.few(shows=lambda split_k, axis, activation: {split_k, (axis, activation)})
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("axis", [None, "m", "n"])
@pytest.mark.parametrize("split_k", [1, 3], ids=["whole", "split"])
def test_epilogue(split_k: int, axis: str | None, activation: str | None) -> None:
    M, N, K = 45, 70, 100
    for dtype, out_dtype, alpha, beta in [
        (torch.float16, torch.float16, 0.25, 0.0),
        (torch.bfloat16, torch.float32, -0.5, 2.0),
    ]:
        a, b, c0 = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype), torch.randn(M, N).to(out_dtype)
        c = c0.clone() if beta else torch.full_like(c0, NAN)
        bias = None if axis is None else torch.full((2 * (M if axis == "m" else N),), NAN)[::2].normal_()
        multiply(a, b, c, alpha, beta, split_k=split_k, bias=bias, axis=axis, activation=activation)

        epilogue = (bias, axis or "n", activation)
        truth, bound = expected(a, b, c0, alpha, beta, *epilogue, mode="ieee", out_dtype=out_dtype, parts=split_k)
        assert ((c.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_an_empty_sum_is_beta_c_and_bias(activation: str | None) -> None:
    c0, bias = torch.randn(20, 37), torch.randn(37).half()
    c = c0.clone()
    multiply(torch.empty(20, 0), torch.empty(0, 37), c, 1.0, 2.0, bias=bias, axis="n", activation=activation)
    torch.testing.assert_close(c, activated(2 * c0 + bias.float(), activation), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what overflows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_infinities_is_torchs(activation: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([-torch.inf, -most, -40.0, most, torch.inf, NAN], dtype=dtype)[:, None]
    c = torch.empty(6, 1, dtype=dtype)
    multiply(x, torch.ones(1, 1, dtype=dtype), c, activation=activation)
    torch.testing.assert_close(c, activated(x.double(), activation).to(dtype), equal_nan=True)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_a_nan_stays_one(activation: str) -> None:
    a, b, c = torch.randn(20, 30), torch.randn(30, 40), torch.empty(20, 40)
    a[3, 7] = NAN
    multiply(a, b, c, activation=activation)
    assert c[3].isnan().all() and int(c.isnan().sum()) == 40


# --- Addresses ---


@contextmanager
def touched() -> Iterator[set[int]]:
    """The addresses that kernels read and write inside, those that a mask excludes left out."""
    addresses: set[int] = set()
    originals = {name: getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store")}

    def noting(original):
        def note(self, pointers, *rest):
            mask = rest[0] if original.__name__ == "create_masked_load" else rest[1]
            addresses.update(np.broadcast_to(pointers.data, mask.data.shape)[mask.data].tolist())
            return original(self, pointers, *rest)

        return note

    for name, original in originals.items():
        setattr(InterpreterBuilder, name, noting(original))
    try:
        yield addresses
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


def elements(x: torch.Tensor) -> set[int]:
    """The addresses of x's elements."""
    offsets = torch.zeros(x.shape, dtype=torch.int64)
    for dimension, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        along = [1] * x.dim()
        along[dimension] = size
        offsets += (stride * torch.arange(size)).view(along)
    return {x.data_ptr() + x.itemsize * offset for offset in offsets.flatten().tolist()}


def matrix(draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype, *, written: bool = False) -> torch.Tensor:
    """A matrix of small integers inside a buffer of NaN: any order, gap, step and offset; read ones may be expanded."""
    outer, inner = (rows, columns) if draw(st.booleans()) else (columns, rows)
    transposed = (outer, inner) != (rows, columns) or (rows == columns and draw(st.booleans()))
    step = draw(st.sampled_from([1, 1, 1, 2]))
    pitch = inner * step + draw(st.sampled_from([0, 0, 1, 4, 8]))
    if not written and draw(st.integers(0, 9)) == 0:
        pitch = 0
    offset = draw(st.sampled_from([0, 0, 1, 8]))
    buffer = torch.full((offset + outer * max(pitch, inner * step),), NAN, dtype=dtype)
    x = buffer.as_strided((outer, inner), (pitch, step), offset)
    if pitch:
        x.copy_(torch.randint(-6, 7, (outer, inner)))
    else:
        x[0] = torch.randint(-6, 7, (inner,))
    return x.T if transposed else x


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_strides(data: st.DataObject) -> None:
    """Integers are exact, and no address is touched but those of elements."""
    draw = data.draw
    M, N, K = (draw(st.sampled_from([1, 2, 8, 15, 16, 31, 32, 33, 64, 70])) for _ in range(3))
    dtype = draw(st.sampled_from([torch.float16, torch.float32]))
    split_k, beta = draw(st.sampled_from([1, 1, 2, 5])), draw(st.sampled_from([0.0, 1.0]))
    a, b = matrix(draw, M, K, dtype), matrix(draw, K, N, dtype)
    c = matrix(draw, M, N, torch.float32, written=True)
    expected = reference(a, b, c, 1.0, beta)
    (launch,) = portable.launches(GemmProblem.of(a, b, c, has_beta=beta != 0), SMALL_TILES, split_k)
    operands = {
        **{"a": a, "b": b, "c": c},
        "workspace": torch.full((launch.workspace // 4,), NAN),
        "counters": torch.zeros(launch.counters, dtype=torch.int32),
    }
    with touched() as addresses:
        launch.kernel[launch.grid](**materialise(launch, operands, {"alpha": 1.0, "beta": beta}), **launch.options)
    assert torch.equal(c.double(), expected)
    assert not operands["counters"].any()
    assert addresses <= set().union(*map(elements, operands.values())), "touched what is no operand's"


@pytest.mark.parametrize(
    ("strides", "shape", "aligned", "expected"),
    [
        pytest.param((0, 64, 1), (9, 64), True, (1, 8), id="row-major"),
        pytest.param((0, 1, 64), (64, 9), True, (0, 8), id="column-major"),
        pytest.param((0, 64, 1), (9, 64), False, (1, 1), id="unaligned"),
        pytest.param((0, 100, 1), (9, 100), True, (1, 4), id="pitch"),
        pytest.param((0, 104, 1), (9, 102), True, (1, 2), id="a row's end"),
        pytest.param((30, 64, 1), (9, 64), True, (1, 2), id="batch stride"),
        pytest.param((0, 0, 1), (9, 64), True, (1, 8), id="expanded rows"),
        pytest.param((0, 64, 2), (9, 32), True, (None, 1), id="no unit stride"),
        pytest.param((0, 0, 0), (9, 32), True, (None, 1), id="one element"),
    ],
)
def test_vectors(strides, shape, aligned: bool, expected: tuple[int | None, int]) -> None:
    assert tiles.vector(Layout(strides, aligned), shape, torch.bfloat16) == expected


def test_every_problem_has_a_legal_config() -> None:
    """The least favourable: nothing aligned, everything in the epilogue."""
    for precision in portable.CONFIGS:
        dtype = DTYPES.get(precision, torch.float32)
        a, b = torch.empty(9, 66, dtype=dtype)[:, ::2], torch.empty(66, 9, dtype=dtype)[::2]
        c = torch.empty(9, 9, dtype=torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32)
        problem = GemmProblem.of(a, b.T.contiguous().T, c, has_beta=True, bias="m", activation="gelu")
        problem = replace(problem, precision=precision, scales="rows" if dtype.itemsize == 1 else None)
        assert any(portable.illegal(problem, INTERPRETER, c, 2) is None for c in portable.CONFIGS[precision])


# --- Repacking ---


def repacked(x: torch.Tensor, column_major: bool | None) -> torch.Tensor:
    """A view of the copy of x [batch, rows, columns], made on poisoned memory by touching nothing but x."""
    launch, layout = repack.launch("x", "out", Layout.of(x), tuple(x.shape), x.dtype, column_major=column_major)
    (temporary,) = launch.temporaries
    out = torch.full(temporary.shape, NAN).to(temporary.dtype)
    with touched() as addresses:
        run(launch, {"x": x, "out": out})
    assert addresses <= elements(x) | elements(out)
    assert layout.tma_illegal(x.itemsize) is None
    if column_major is not None:
        assert layout.column_major == column_major or 1 in x.shape[1:]
    return out.as_strided(tuple(x.shape), layout.strides)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, 16, 70, 130]), st.sampled_from([1, 3, 8, 65, 600])),
    st.sampled_from(["rows", "columns"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
@example(torch.bfloat16, (2, 70, 65), "rows", None, 1, 1, True)
def test_repacking_copies_every_element(dtype, size, order, column_major, offset, step, expanded) -> None:
    batch, rows, columns = size
    if order == "columns":
        rows, columns = columns, rows
    count = (1 if expanded else batch) * rows * columns
    buffer = torch.full((offset + count * step,), NAN).to(dtype)
    buffer[offset::step] = torch.arange(count).remainder(251).to(dtype)
    x = buffer[offset::step].view(-1, rows, columns).expand(batch, rows, columns)
    if order == "columns":
        x = x.mT
    copy = repacked(x, column_major)
    assert torch.equal(copy, x)


@pytest.mark.parametrize("order", ["n", "t"])
@pytest.mark.parametrize("mode", EMULATED)
def test_planes_add_up(mode: str, order: str) -> None:
    """To all of fp32's bits with three planes of bf16; each plane is what rounding leaves over."""
    planes = EMULATED[mode]
    x = torch.randn(3, 37, 50) * 2.0 ** torch.randint(-60, 100, (3, 37, 50))
    x[0, 0, :4] = torch.tensor([torch.finfo().max, -torch.finfo().max, 0.0, -0.0])
    x[1, :4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    x = x if order == "n" else x.mT.contiguous().mT
    launch, layout = repack.launch("x", "out", Layout.of(x), tuple(x.shape), x.dtype, column_major=False, planes=planes)
    (out,) = launch.temporaries
    assert (out.shape[:3], out.dtype) == ((3, planes.count, 37), planes.dtype)
    assert layout.strides == (planes.count * 37 * out.shape[3], out.shape[3], 1)
    found = torch.full(out.shape, torch.nan, dtype=out.dtype)
    launch.kernel[launch.grid](**materialise(launch, {"x": x, "out": found}), **launch.options)
    found = found[..., :50].double()
    ends = ~x.isfinite()
    assert torch.equal(found[:, 0].isnan(), x.isnan()) and torch.equal(found[:, 0][x.isinf()], x[x.isinf()].double())
    assert not found[:, 1:][ends[:, None].expand_as(found[:, 1:])].any(), "infinity less infinity"
    assert found[~ends[:, None].expand_as(found)].isfinite().all()
    error = (found.sum(1) - x.double())[~ends].abs()
    bits = {"bf16x3": 16, "bf16x6": 24, "bf16x9": 24, "tf32x3": 22}[mode]
    assert (error <= 2.0**-bits * x[~ends].double().abs()).all()
    normal = (x.abs() > 0) & (x.abs() < 1e38)
    assert (found[:, 1][normal].abs() <= 2.0 ** (-bits // planes.count) * found[:, 0][normal].abs()).all()


def test_repacking_keeps_bits() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).view(1, 256, 256)[:, :, :255]
    for column_major in (False, True):
        copy = repacked(x, column_major).contiguous()
        assert torch.equal(copy.view(torch.int16), x.contiguous().view(torch.int16))


def test_one_matrix_is_copied_once_for_a_whole_batch() -> None:
    x = torch.randn(1, 33, 9).expand(5, 33, 9)
    launch, layout = repack.launch("x", "out", Layout.of(x), (5, 33, 9), x.dtype)
    assert launch.temporaries[0].shape[0] == 1 and layout.strides[0] == 0
