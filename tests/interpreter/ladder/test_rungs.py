"""What each rung's kernel computes, in Triton's interpreter, against fp64."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from tests.support import awkward_sizes
from tests.support.product_checks import (
    RULES,
    SCALARS,
    VIEWS,
    Product,
    error_within_bound,
    integers_exact,
    nearest_tf32,
    of_rung,
    same_bits,
    tf32_edges,
    views,
)
from triton_gemm import compat
from triton_gemm.config import GemmConfig
from triton_gemm.kernels.schedule import grouped_tile
from triton_gemm.ladder import LADDER, Rung, k07_tf32, k10_tma
from triton_gemm.ladder.k04_grouped import grouped_pid
from triton_gemm.ladder.k05_register_tiled import repack_kernel, repacked

RUNGS = {rung.id: rung for rung in LADDER if rung.interpretable}


def sizes_of(rung: Rung) -> dict[str, awkward_sizes.Size]:
    """k01's strips lie along M and k02's along N; both compute results one by one, slowly."""
    if rung.id == "k01":
        return awkward_sizes.STRIPS
    if rung.id == "k02":
        return {name: (N, M, K) for name, (M, N, K) in awkward_sizes.STRIPS.items()}
    return awkward_sizes.SMALL


def some_configs(rung: Rung) -> dict[str, GemmConfig]:
    """A configuration for each tile: num_warps and num_stages are nothing to the interpreter."""
    return {"x".join(map(str, config.meta().values())): config for config in reversed(rung.configs)}


def cases(names_of):
    """A pytest.param (product, name) for every rung, dtype and what names_of(rung, product) gives."""
    found = []
    for rung in RUNGS.values():
        for dtype in rung.dtypes:
            product = of_rung(rung, dtype, rung.configs[0])
            kind = str(dtype).removeprefix("torch.")
            for name in names_of(rung, product):
                found.append(pytest.param(rung, product, name, id=f"{rung.id}-{kind}-{name}"))
    return found


@pytest.mark.few(shows=lambda rung, product, size: {(rung.id, product.dtype), (rung.id < "k03", size)})
@pytest.mark.parametrize(("rung", "product", "size"), cases(lambda rung, _: sizes_of(rung)))
def test_sizes(rung: Rung, product: Product, size: str) -> None:
    for alpha, beta in SCALARS:
        error_within_bound(product, sizes_of(rung)[size], VIEWS["nn"], alpha, beta)
    integers_exact(product, sizes_of(rung)[size], VIEWS["nn"], 3.0, -2.0)


@pytest.mark.few(shows=lambda rung, product, view: {(rung.id, product.dtype), (rung.descriptors, view)})
@pytest.mark.parametrize(("rung", "product", "view"), cases(lambda _, product: views(product)))
def test_views(rung: Rung, product: Product, view: str) -> None:
    size = sizes_of(rung)["ragged"]
    error_within_bound(product, size, VIEWS[view], 1.5, 0.5)
    integers_exact(product, size, VIEWS[view])


@pytest.mark.parametrize(("rung", "product", "rule"), cases(lambda *_: RULES))
def test_rules(rung: Rung, product: Product, rule: str) -> None:
    RULES[rule](product, sizes_of(rung)["ragged"])


@pytest.mark.parametrize(("rung", "product", "kind"), cases(lambda *_: ["wide"]))
def test_rows_of_different_scale(rung: Rung, product: Product, kind: str) -> None:
    error_within_bound(product, sizes_of(rung)["ragged"], kind=kind)


@pytest.mark.few(shows=lambda rung, config: {rung.id, (rung.id, config.BLOCK_M > config.BLOCK_N)})
@pytest.mark.parametrize(
    ("rung", "config"),
    [
        pytest.param(rung, config, id=f"{rung.id}-{name}")
        for rung in RUNGS.values()
        if rung.id >= "k03"
        for name, config in some_configs(rung).items()
    ],
)
def test_every_tile(rung: Rung, config: GemmConfig) -> None:
    product = of_rung(rung, rung.dtypes[-1], config)
    integers_exact(product, awkward_sizes.SMALL["ragged-many-tiles"], VIEWS["nt"], 1.0, -1.0)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rung", [rung for rung in RUNGS.values() if rung.precision == "half"], ids=lambda r: r.id)
def test_c_of_another_dtype(rung: Rung, out_dtype: torch.dtype) -> None:
    product = of_rung(rung, torch.float16, rung.configs[-1], out_dtype=out_dtype)
    error_within_bound(product, awkward_sizes.SMALL["ragged"], VIEWS["nn"], -0.5, 2.0)
    integers_exact(product, awkward_sizes.SMALL["ragged"])


@pytest.mark.parametrize("size", awkward_sizes.EMPTY.values(), ids=awkward_sizes.EMPTY)
@pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
def test_an_empty_result_is_no_launch(rung: Rung, size: awkward_sizes.Size, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one of no program, which Triton does not launch. k07 may round the operand that has elements."""
    programs: list[int] = []

    def run(kernel: Any, *operands: object, grid: Any, **named: object) -> None:
        if kernel.fn is not repack_kernel.fn:
            programs.append(math.prod(grid(named) if callable(grid) else grid))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    M, N, K = size
    a, b, c = (torch.empty(shape, dtype=rung.dtypes[0]) for shape in ((M, K), (K, N), (M, N)))
    rung.launch(a, b, c)
    assert not any(programs)


# --- k04: the order of tiles ---


@triton.jit
def pids_kernel(out_ptr, num_m, num_n, GROUP_M: tl.constexpr):
    for tile_id in range(num_m * num_n):
        pid_m, pid_n = grouped_pid(tile_id, num_m, num_n, GROUP_M)
        tl.store(out_ptr + 4 * tile_id, pid_m)
        tl.store(out_ptr + 4 * tile_id + 1, pid_n)
        pid_m, pid_n = grouped_tile(tile_id, num_m, num_n, GROUP_M)  # the kernels' own
        tl.store(out_ptr + 4 * tile_id + 2, pid_m)
        tl.store(out_ptr + 4 * tile_id + 3, pid_n)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))
def test_grouped_order_visits_every_tile_once_band_by_band(num_m: int, num_n: int, group: int) -> None:
    out = torch.full((num_m * num_n, 4), -1, dtype=torch.int32)
    pids_kernel[(1,)](out, num_m, num_n, GROUP_M=group)
    expected = [
        (m, n)
        for first in range(0, num_m, group)
        for n in range(num_n)
        for m in range(first, min(first + group, num_m))
    ]
    assert [tuple(pids) for pids in out.tolist()] == [pid + pid for pid in expected]


# --- k07: rounding ---


@pytest.mark.parametrize("round_tf32", [k07_tf32.round_tf32, compat.round_tf32], ids=["k07", "kernels"])
def test_rounding_to_tf32_is_that_of_the_instruction(round_tf32: Any) -> None:
    x = tf32_edges()
    out = repacked(x.view(2, -1), round_tf32)[:, : x.numel() // 2]
    assert same_bits(out.reshape(-1), nearest_tf32(x))


def test_rounded_copy_is_padded_with_zeros() -> None:
    x = torch.randn(70, 97).T
    out = repacked(x, k07_tf32.round_tf32)
    assert out.shape == (97, 96) and out.stride() == (96, 1)
    assert torch.equal(out[:, :70], nearest_tf32(x)) and (out[:, 70:] == 0).all()


# --- k10: what TMA cannot take ---


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("a", "b", "c", "why"),
    [
        pytest.param(half(16, 65)[:, 1:], half(64, 8), half(16, 8), r"a \(16, 64\).*aligned", id="base"),
        pytest.param(half(16, 65)[:, :64], half(64, 8), half(16, 8), r"a .*130 bytes apart", id="gapped"),
        pytest.param(half(16, 128)[:, ::2], half(64, 8), half(16, 8), r"a .*\(128, 2\) is 1", id="no-unit-stride"),
        pytest.param(half(1, 64).expand(16, 64), half(64, 8), half(16, 8), "a .* 0 bytes apart", id="expanded"),
        pytest.param(half(64, 12).T, half(64, 8), half(12, 8), r"a \(12, 64\).*24 bytes", id="transpose"),
        pytest.param(half(16, 64), half(64, 9), half(16, 9), r"b \(64, 9\).*18 bytes", id="b"),
        pytest.param(half(16, 64), half(64, 8), half(8, 16).T, r"c \(16, 8\).*column-major", id="c-column-major"),
        pytest.param(half(16, 64), half(64, 8), half(16, 12)[:, :8], "c .*24 bytes", id="c-gapped"),
    ],
)
def test_what_tma_cannot_take_is_refused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=f"TMA cannot take {why}"):
        k10_tma.launch(a, b, c)
