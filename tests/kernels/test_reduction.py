"""Sums of a cut K that a second launch adds up, without a GPU: the source of both runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.compiled_kernels import compile_launch
from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, circumstance, ids, of_bytes, reduced
from tests.support.simulated_plans import CPU, check, readable, summed
from tests.support.table_fakes import HOPPER
from tests.support.tiles_on_cpu import of_cluster, of_tile
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.kernels import reduction, warp_specialised
from triton_gemm.kernels.schedule import Schedule

CONFIGS = (*warp_specialised.CONFIGS[::3], *warp_specialised.FOR_LONG_SUMS, *warp_specialised.CLUSTERED[::4])


def is_legal(case: Case, config: TileConfig, schedule: Schedule) -> bool:
    return warp_specialised.illegal(readable(case), HOPPER, config, schedule) is None


@pytest.mark.few
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_every_kind_of_tile(kernel: SimpleNamespace, config: TileConfig) -> None:
    """C's edges inside of tiles; parts of unequal lengths."""
    m, n, k = of_cluster(config)
    orders = ("nn", "nt", "tn", "tt")[CONFIGS.index(config) % 4] + "n"
    cases = Case((m - 7, n + 8, 7 * k + 8), orders, integers=True), Case((m, max(n - 8, 8), 5 * k), orders)
    made = [(case, config, reduced(case, config, parts)) for case, parts in zip(cases, (3, 5), strict=True)]
    legal = [one for one in made if is_legal(*one)]
    if not legal:
        pytest.skip("it is for other products, or for a Triton that has clusters")
    for one in legal:
        check(*one, kernel)


@pytest.mark.few
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance(kernel: SimpleNamespace, name: str) -> None:
    """The epilogue is the second launch's, in C's own layout and dtype."""
    config = of_tile(64, 32, 128)
    case = circumstance(name, (73, 72, 600))
    check(case, config, reduced(case, config, 4), kernel)


@pytest.mark.parametrize("parts", [2, 17, 18, 33, 40])
def test_any_number_of_parts(kernel: SimpleNamespace, parts: int) -> None:
    """More than a thread reads at once, and one more or less."""
    config = of_tile(64, 16, 64)
    case = Case((40, 16, parts * 64 + 3), "ntn")
    check(case, config, reduced(case, config, parts), kernel, times=2)


@pytest.mark.parametrize("precision", ["tf32", *EMULATED])
def test_fp32(kernel: SimpleNamespace, precision: str) -> None:
    case = Case((70, 72, 520), "ntn", dtype=torch.float32, precision=precision, bias="n")
    planes = EMULATED.get(precision)
    of_dtype = warp_specialised.configs(torch.float32 if planes is None else planes.dtype)
    config = next(c for c in of_dtype if c.BLOCK_M == 64 and is_legal(case, c, reduced(case, c, 3)))
    check(case, config, reduced(case, config, 3), kernel)


def test_bytes(kernel: SimpleNamespace) -> None:
    """Scales of matrices and rows come in the second launch, those of blocks in the first; int8 has no partial sums."""
    config = warp_specialised.configs(torch.int8)[-1]
    ran = set()
    for turn in range(2):
        for case in of_bytes(config, turn):
            schedule = reduced(case, config, 3)
            if is_legal(case, config, schedule):
                check(case, config, schedule, kernel)
                ran.add(case.scales)
            else:
                assert case.dtype == torch.int8
    assert ran == {"blocks", "rows", "tensor"}


@pytest.mark.parametrize("swapped", [False, True], ids=["c", "c^T"])
def test_sums_are_those_of_owners_bit_for_bit(kernel: SimpleNamespace, swapped: bool) -> None:
    config = of_tile(64, 64, 128)
    case = Case((100, 136, 1500), "ntt" if swapped else "ntn", alpha=0.3, bias="n", activation="gelu")
    operands, second = Operands(case, CPU), reduced(case, config, 5)
    owners = replace(second, reduction=False)
    assert summed(operands, config, second, kernel).equal(summed(operands, config, owners, kernel))


def test_a_message_names_what_it_cannot_add() -> None:
    problem = Operands(Case((64, 64, 640), "ntn"), CPU).problem
    config = warp_specialised.CONFIGS[-1]

    def why(schedule: Schedule, **change: object) -> str:
        return warp_specialised.illegal(replace(problem, **change), HOPPER, config, schedule) or ""

    tiles = config.tiles(64, 64)
    whole = Schedule(2 * tiles, tiles, 2, reduction=True)
    assert why(whole) == ""
    assert "does not cut all" in why(Schedule(2 * tiles, tiles - 1, 2, reduction=True))
    assert "does not cut all" in why(Schedule(tiles, tiles, 1, reduction=True))
    assert "no integers" in why(whole, dtype=torch.int8, out_dtype=torch.int32, precision="int8")


@pytest.mark.few(shows=lambda name, parts: {parts})
@pytest.mark.parametrize("parts", [3, 40])
@pytest.mark.parametrize("name", ["batch", "c-odd", "c-column-major", "everything", "float32"])
def test_the_second_launch_reads_16_bytes_a_thread(name: str, parts: int) -> None:
    """Whatever C's layout and however many parts there are; and spills nothing."""
    problem = Operands(circumstance(name, (136, 264, 640)), CPU).problem
    dtypes = {"sums": torch.float32, "c": problem.out_dtype, "bias": problem.out_dtype}
    result = compile_launch(reduction.launch(problem, parts), dtypes)
    assert result.spills == 0
    loads = re.findall(r"ld\.global\.cg\.([\w.]+)", result.asm["ptx"])
    at_once = reduction.MOST_AT_ONCE if parts > 17 else reduction.MOST_AT_ONCE // 2
    assert loads == ["v4.b32"] * (1 + at_once)
