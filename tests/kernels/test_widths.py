"""Widths of tiles that fill waves, as arithmetic: each can run, and fills the waves for which it was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support import compiled_kernels
from tests.support.table_fakes import HOPPER
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY
from triton_gemm.kernels import forms, warp_specialised
from triton_gemm.kernels.schedule import clusters_at_once
from triton_gemm.kernels.warp_specialised import Config, cluster, host, widths
from triton_gemm.kernels.warp_specialised.configs import FEW_ROWS, LONG
from triton_gemm.problem import ACTIVATIONS, GemmProblem
from triton_gemm.selection.select import select

SMS = (132, 114, 78, 66, 1)
SIZES = st.integers(1, 3000).map(lambda i: 8 * i)


@pytest.fixture(scope="module", autouse=True)
def clusters() -> Iterator[None]:
    """As with a Triton that has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "CLUSTERS", True)
        yield


def product(M: int, N: int, K: int, orders: str = "ntn", *, gap: int = 0, **how: Any) -> GemmProblem:
    return compiled_kernels.product((M, N, K), orders, gaps=(0, 0, gap), **how)


@st.composite
def problems(draw: st.DrawFn) -> GemmProblem:
    """Products whose tiles may be of any width."""
    how = {
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])),
        "bias": draw(st.sampled_from([None, "m", "n"])),
        "activation": draw(st.sampled_from([None, *ACTIVATIONS])),
        "batch": draw(st.sampled_from([1, 1, 1, 2, 7, 64])),
    }
    if draw(st.booleans()):
        how["out_dtype"] = torch.float32
    return product(draw(SIZES), draw(SIZES), draw(SIZES), draw(st.sampled_from(["ntn", "ttn", "ntt", "ttt"])), **how)


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(SMS))
def test_every_width_can_run_and_fills_its_waves(problem: GemmProblem, num_sms: int) -> None:
    """There are never more clusters than run in those waves, and would be with tiles narrower by 8; or where there
    are more waves anyway, or a long sum's parts fill them, no more columns. The pipeline has as many stages as fit in
    shared memory next to C's staging buffer, which is fp32 for a long sum."""
    device = replace(HOPPER, num_sms=num_sms)
    assume(host.unsuited(problem, device) is None)
    long = LONG * max(problem.M, problem.N) <= problem.K
    for config in widths.widths(problem, num_sms):
        assert warp_specialised.illegal(problem, device, config) is None
        few = (config.BLOCK_M, config.ctas) == (64, 1)
        narrowest = widths.NARROWEST_OF_FEW if few else widths.NARROWEST
        assert config.BLOCK_N % 8 == 0 and narrowest <= config.BLOCK_N <= widths.WIDEST
        assert problem.M <= FEW_ROWS or not few
        assert config.BLOCK_K == 64 or (few and config.num_stages >= 4)
        narrower = replace(config, BLOCK_N=config.BLOCK_N - 8)
        tiles, more = (problem.batch * one.tiles(problem.M, problem.N) for one in (config, narrower))
        columns, more_columns = (one.tiles(config.BLOCK_M, problem.N) for one in (config, narrower))
        at_once = clusters_at_once(config.ctas, num_sms)
        if not any(tiles <= waves * at_once < more for waves in widths.WAVES):
            form = config.CLUSTER_M, config.CLUSTER_N
            assert (config.BLOCK_M, *form) in widths.FOR_MANY_WAVES or (
                long and form in widths.SPANNING[config.BLOCK_M]
            )
            assert columns <= widths.COLUMNS and columns < more_columns
        deeper = replace(config, num_stages=config.num_stages + 1)
        if config.num_stages < widths.MOST_STAGES:
            stored = 4 if long else problem.out_dtype.itemsize
            assert host.wide_memory(deeper, stored) > SHARED_MEMORY[9, 0]
        assert config.accumulators() <= widths.MOST_SUMS[config.num_warps] < MAX_REGISTERS_PER_THREAD


def test_middle_sizes_have_widths_in_every_height_and_form() -> None:
    found = {config for n in range(512, 8192, 64) for config in widths.widths(product(2048, n, 4096), 132)}
    forms = {(c.BLOCK_M, (c.CLUSTER_M, c.CLUSTER_N)) for c in found}
    every = {(m, form) for m, of_height in widths.FORMS.items() for form in of_height}
    assert forms == every - {(64, (1, 1))}
    assert {config.BLOCK_N for config in found} >= {*range(64, 200, 8)}


def test_few_rows_have_widths_that_give_every_multiprocessor_as_much() -> None:
    """6144 columns are 128 tiles 48 wide, and 96 of 64; 28672 are 128 of 224, and 256 of 112. They are 128 deep where a
    ring has four stages of that."""
    found = {n: set(widths.widths(product(16, n, 4096), 132)) for n in (6144, 28672)}
    assert Config(64, 48, 128, 4, 7) in found[6144]
    assert {Config(64, 224, 64, 4, 5), Config(64, 112, 128, 4, 4)} <= found[28672]
    alone = {config for config in found[6144] if config.ctas == 1 and config.BLOCK_M == 64}
    assert not alone & set(widths.widths(product(65, 6144, 4096), 132))


def test_a_width_that_fills_the_gpu() -> None:
    """1216 rows are 10 tiles of clusters of two; of 66 of those that leaves 6 for 1264 columns, 216 each."""
    found = widths.widths(product(1216, 1264, 4096), 132)
    assert Config(64, 216, 64, 4, 5, 2, 1) in found


def test_of_many_waves_widths_divide_c_evenly() -> None:
    """263 columns are two of 136, where 160 would compute 57 columns beyond C."""
    found = set(widths.widths(product(57344, 263, 8192, "ntt"), 132))
    assert {Config(128, 136, 64, 8, 5), Config(128, 136, 64, 8, 5, 2, 1)} <= found
    assert {config.BLOCK_N for config in found} == {136, 88, 72}


def test_of_long_sums_few_columns_span_c() -> None:
    """All of C [224, 216] is one cluster's, or one row of two; the second launch's parts leave it less of a ring."""
    of_long, of_short = (set(widths.widths(product(224, 216, K), 132)) for K in (8 * 224, 8 * 224 - 8))
    assert {Config(64, 112, 64, 4, 9, 4, 2), Config(64, 112, 64, 4, 9, 2, 2)} <= of_long - of_short
    assert of_short < of_long and len(of_long) == len(list(widths.widths(product(224, 216, 8 * 224), 132)))


# --- How a width leaves ---

EVERY_TILE = [
    Config(m, n, 64, 8 if m == 256 else m // 16, 3, *form)
    for m, forms in widths.FORMS.items()
    for form in forms
    for n in range(24, 257, 8)
]


def test_stores_cover_every_width_exactly() -> None:
    """Wide ones first, which do not cross from the main part to the tail; each narrow one begins at a multiple of its
    width; and a tail without any is stored whole."""
    for config in EVERY_TILE:
        if config.accumulators() > MAX_REGISTERS_PER_THREAD:
            continue
        wide, narrow = host.wide_columns(config)
        assert 8 <= wide <= 64 and wide & wide - 1 == 0 and config.main_n % wide == 0
        rest = config.BLOCK_N % wide
        if narrow:
            assert rest % narrow == 0 and 8 <= narrow < wide and narrow & narrow - 1 == 0
            assert (config.BLOCK_N - rest - config.main_n) % narrow == 0
        else:
            assert rest == 0 and config.tail_n == config.BLOCK_N - config.main_n


def test_the_two_parts_hold_every_width() -> None:
    for config in EVERY_TILE:
        main, tail = config.main_n, config.tail_n
        assert main & main - 1 == 0 and tail & tail - 1 == 0 and tail < config.BLOCK_N <= main + tail
        assert main <= config.BLOCK_N < 2 * main and (tail == 0) == (main == config.BLOCK_N)
        assert tail == 0 or tail // 2 < config.BLOCK_N - main


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_slices_cover_b(group: int) -> None:
    """In blocks of 8, as few as may be and for each CTA as many; the last slice ends with B."""
    for n in range(64, 257, 8):
        rows, count = cluster.slice_rows(n, group), cluster.slices(n, group)
        assert rows % 8 == 0 and count <= group and (count - 1) * rows < n <= count * rows
        assert (rows - 8) * group < n, "slices could be smaller"
        assert cluster.blocks_of_b(True, n) * 8 == n >= rows
        assert cluster.loaded_rows(n, group) == count * rows


def test_a_message_names_what_no_thread_can_hold() -> None:
    problem, tile = product(4096, 4096, 4096), Config(256, 224, 64, 8, 3)
    assert host.illegal(problem, HOPPER, tile) == "256 accumulators are more registers than a thread has"
    assert host.illegal(problem, HOPPER, replace(tile, BLOCK_N=192)) is None


# --- Where there are none ---


def names(config: TileConfig) -> tuple[int | None, ...]:
    return config.BLOCK_M, config.BLOCK_N


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(product(2048, 2048, 2048, has_beta=True), id="beta"),
        pytest.param(product(2048, 2044, 2048), id="rows of C end inside of 16 bytes"),
        pytest.param(product(2048, 2048, 2048, gap=1), id="pointers to C"),
        pytest.param(product(2048, 2048, 2048, "nnn"), id="B across"),
        pytest.param(product(2048, 2048, 2048, dtype=torch.float32, precision="tf32"), id="fp32"),
        pytest.param(product(2048, 2048, 2048, dtype=torch.int8, out_dtype=torch.int32, precision="int8"), id="int8"),
        pytest.param(product(2048, 2048, 2048, precision="bf16x3"), id="planes"),
        pytest.param(replace(product(2048, 2048, 2048, batch=4), groups="m"), id="groups"),
    ],
)
def test_products_that_wgmma_cannot_span_have_none(problem: GemmProblem) -> None:
    assert list(widths.widths(product(2048, 2048, 2048), 132))
    assert not list(widths.widths(problem, 132))


def test_older_tritons_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "CLUSTERS", False)
    problem = product(1216, 1264, 4096)
    assert not list(widths.widths(problem, 132))
    assert host.illegal(problem, HOPPER, Config(64, 88, 64, 4, 4)) is not None
    listed = {names(config) for config in warp_specialised.CONFIGS}
    for M, N, K in ((1216, 1264, 4096), (712, 1264, 4976), (2048, 2816, 4096), (4000, 4000, 4000)):
        chosen = select(product(M, N, K), HOPPER)
        assert chosen.kernel != "warp_specialised" or names(chosen.config) in listed
        given = [c for c in warp_specialised.candidates(product(M, N, K), HOPPER)]
        assert {names(c.algorithm.config) for c in given} <= listed


def test_newer_tritons_compare_them() -> None:
    problem = product(1216, 1264, 4096)
    compared = {candidate.algorithm.config for candidate in warp_specialised.candidates(problem, HOPPER)}
    assert compared >= set(widths.widths(problem, HOPPER.num_sms)) != set()
