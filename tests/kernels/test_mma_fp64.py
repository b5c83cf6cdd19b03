"""What the kernel of fp64's `mma` computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`), and its PTX by
the places that a lane's registers have in an instruction."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, blocks, circumstance, ids
from tests.support.simulated_plans import CPU, Launched
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import mma_fp64
from triton_gemm.kernels.launch import Launch
from triton_gemm.problem import GemmProblem

KERNEL = "mma_fp64"
DEVICE = device_of_capability((9, 0))
FP64 = {"dtype": torch.float64}
ORDERS = ("nn", "nt", "tn", "tt")
MAIN = mma_fp64.CONFIGS[0]


def check(case: Case, config: TileConfig, module: SimpleNamespace, *, swapped: bool = False) -> None:
    operands = Operands(case, CPU)

    def launches(problem: GemmProblem) -> tuple[Launch, ...]:
        assert mma_fp64.illegal(problem, DEVICE, mma_fp64.CONFIGS[-1]) is None
        return module.launches(problem, config)

    operands.check(Launched(operands.problem, launches, swapped))


@pytest.mark.few
@pytest.mark.parametrize("config", mma_fp64.CONFIGS, ids=ids)
def test_every_config(kernel: SimpleNamespace, config: TileConfig) -> None:
    """Layouts in turn, partial and whole tiles, less than a tile; 16 bytes at a time, 8, and no unit stride."""
    m, n, k = blocks(config)
    for turn, size in enumerate([(m + 9, 2 * n + 7, 9 * k + 3), (2 * m, n, 6 * k), (3, 5, 3 * k), (1, 1, 1)]):
        orders = ORDERS[turn % 4]
        check(Case(size, orders + "n", integers=True, **FP64), config, kernel)
        check(Case(size, orders + "n", pad=1, **FP64), config, kernel, swapped=turn % 2 == 1)
        check(Case(size, orders + "n", step=2, **FP64), config, kernel)


@pytest.mark.few
@pytest.mark.parametrize(
    "name", [name for name, change in CIRCUMSTANCES.items() if {"dtype", "out_dtype"}.isdisjoint(change)]
)
def test_every_circumstance(kernel: SimpleNamespace, name: str) -> None:
    case = circumstance(name, (70, 72, 67), **FP64)
    check(case, MAIN, kernel, swapped=case.orders[2] == "t")


# --- Registers ---


def held(layout: object, warp: int, lane: int) -> list[tuple[int, ...]]:
    """Where a lane's registers are in a tensor of that linear layout."""
    found = [(0,) * len(layout.shape)]
    bases = [*layout.lane_bases, *layout.warp_bases]
    for place, base in enumerate(bases):
        if (warp << 5 | lane) >> place & 1:
            found = [tuple(x ^ y for x, y in zip(found[0], base, strict=True))]
    for base in layout.reg_bases:
        found += [tuple(x ^ y for x, y in zip(one, base, strict=True)) for one in found]
    return found


@pytest.mark.parametrize("config", mma_fp64.CONFIGS, ids=ids)
def test_lanes_hold_what_an_instruction_takes(config: TileConfig) -> None:
    """PTX ISA, "Matrix Fragments for mma.m16n8k4 with .f64 floating point type"."""
    m, n, warps = config.BLOCK_M, config.BLOCK_N, config.num_warps
    along_m = mma_fp64.warps_along_m(m, n, warps)
    sums, count = mma_fp64.sums_layout(m, n, warps), mma_fp64.sums_of(m, n, warps)
    of_a = mma_fp64.fragment_layout(m, warps // along_m, along_m, 1)
    of_b = mma_fp64.fragment_layout(n, 1, warps // along_m, along_m)
    multiplied = []
    for warp in range(warps):
        places = [held(sums, warp, lane) for lane in range(32)]
        for lane in range(32):
            loaded = set(held(of_a, warp, lane)), set(held(of_b, warp, lane))
            for i, row, j, k, _ in places[lane]:  # which broadcasts from the same lane
                assert (8 * i + row, k) in loaded[0] and (8 * j + row, k) in loaded[1]
        for line in mma_fp64.mma_asm(m, n, warps).split("\n"):
            new, a, b, old = ([int(x) for x in re.findall(r"\$(\d+)", of)] for of in re.findall(r"{(.*?)}", line))
            assert old == [3 * count + x for x in new]
            first = places[0][new[0]]
            rows, columns = 8 * first[0], 8 * first[2]
            multiplied.append((rows, columns))
            for lane in range(32):
                group, k = divmod(lane, 4)
                at = places[lane]
                c = [(8 * i + row, 8 * j + 2 * q + h) for i, row, j, q, h in (at[x] for x in new)]
                assert c == [(rows + group + 8 * (e // 2), columns + 2 * k + e % 2) for e in range(4)]
                rows_of_a = [(8 * at[x - count][0] + at[x - count][1], at[x - count][3]) for x in a]
                assert rows_of_a == [(rows + group, k), (rows + group + 8, k)]
                assert [(8 * at[x - 2 * count][2] + at[x - 2 * count][1], at[x - 2 * count][3]) for x in b] == [
                    (columns + group, k)
                ]
    assert sorted(multiplied) == [(i, j) for i in range(0, m, 16) for j in range(0, n, 8)]


@pytest.mark.parametrize("config", mma_fp64.CONFIGS, ids=ids)
@pytest.mark.parametrize("vector", [1, 2])
@pytest.mark.parametrize("along_k", [False, True])
def test_shared_memory_has_no_bank_conflicts(config: TileConfig, along_k: bool, vector: int) -> None:
    """Of 8 bytes by half a warp, and of copies of 16 bytes by a quarter, which read one line of 128 bytes, or two."""
    m, k, warps = config.BLOCK_M, config.BLOCK_K, config.num_warps
    layout = mma_fp64.shared_layout(along_k, k)
    assert layout.vec == 4 and layout.order == ([1, 0] if along_k else [0, 1])

    def word(x: int, inside: int) -> int:
        """Of 8 bytes, of which 16 make all banks."""
        row, column, pitch = (x, inside, k) if along_k else (inside, x, m)
        return row * pitch + (column // 4 ^ row // layout.per_phase % layout.max_phase) * 4 + column % 4

    reads = [held(mma_fp64.fragment_layout(m, 1, 1, warps), 0, lane)[0] for lane in range(32)]
    for step in range(k // 4):
        for half in (reads[:16], reads[16:]):
            assert len({word(x, 4 * step + inside) % 16 for x, inside in half}) == 16
    copies = mma_fp64.copy_layout(m, k, warps, along_k, vector)
    places = [held(copies, warp, lane) for warp in range(warps) for lane in range(32)]
    assert len({place for lane in places for place in lane}) == m * k == sum(map(len, places))
    together = 16 // vector
    for first in range(0, 32, together):
        moved = [place for lane in places[first : first + together] for place in lane[:vector]]
        assert len({word(*place) % 16 for place in moved}) == 16
        assert len({(place[0] if along_k else place[1]) for place in moved}) <= 16 // min(k, 16)
