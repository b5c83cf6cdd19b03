"""What compute-sanitizer watches: `python sanitize.py rungs|twins|kernels|mutant` launches each on ragged sizes.

Operands are whole allocations, or end where theirs ends, so that what lies outside them belongs to nobody.
"""

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from reference_cuda import TWINS, load
from tests.mutants import READS_OUTSIDE
from triton_gemm.compat import CLUSTERS
from triton_gemm.device import device_info
from triton_gemm.kernels import gemv, portable, skinny, warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.plan import GemmPlan
from triton_gemm.problem import GemmProblem
from triton_gemm.select import Selection

SIZES = [(127, 65, 33), (200, 270, 150), (1, 140, 70), (37, 20, 0), (128, 256, 64)]
TMA_SIZES = [(120, 72, 40), (200, 272, 152), (8, 136, 72), (128, 256, 64)]  # rows of whole 16 bytes
SCALARS = [(1.0, 0.0), (-0.5, 2.0)]
ORDERS = {"skinny": ("ntn", "ntt"), "widths": ("ntn", "ttt")}  # where A, B and C do not lie alike


def operands(size: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype) -> list[torch.Tensor]:
    M, N, K = size
    sides = ((M, K, dtype), (K, N, dtype), (M, N, out_dtype))
    return [torch.ones(rows, columns, dtype=kind, device="cuda") for rows, columns, kind in sides]


def rungs() -> None:
    capability = torch.cuda.get_device_capability()
    for rung in LADDER:
        if capability in rung.capabilities:
            launch_rung(rung, rung.launch, TMA_SIZES if rung.descriptors else SIZES)


def launch_rung(rung: Rung, launch, sizes: list[tuple[int, int, int]]) -> None:
    config = rung.legal_configs(device_info(torch.device("cuda")), rung.dtypes[0])[-1]
    for size in sizes:
        for alpha, beta in SCALARS:
            a, b, c = operands(size, rung.dtypes[0], rung.dtypes[0])
            launch(a, b, c, alpha, beta, config=config)
            torch.cuda.synchronize()
    print(rung.name)


def twins() -> None:
    for stem, twin in TWINS.items():
        loaded = load(stem)
        for variant in twin.variants:
            for size in SIZES:
                for alpha, beta in ((1, 0), (2, -1)):
                    loaded.launch(*operands(size, variant.dtype, variant.out_dtype), alpha, beta, variant=variant.name)
        torch.cuda.synchronize()
        print(stem)


def ending(rows: int, columns: int, order: str, first: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A matrix whose last element is its allocation's last, and whose first is element `first`."""
    memory = torch.ones(first + rows * columns, dtype=dtype, device="cuda")[first:]
    return memory.view(rows, columns) if order == "n" else memory.view(columns, rows).T


def kernels() -> None:
    """What matmul launches, in one small configuration of each, whole and split, or as it is and turned."""
    device = torch.device("cuda", 0)
    ring = next(c for c in warp_specialised.CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 64))
    clustered = next(c for c in warp_specialised.CLUSTERED if (c.BLOCK_M, c.CLUSTER_M, c.CLUSTER_N) == (64, 4, 2))
    wide = warp_specialised.Config(64, 88, 64, 4, 8, 4, 1)
    tile = next(c for c in portable.CONFIGS["half"] if (c.BLOCK_M, c.BLOCK_N) == (64, 64))

    def by_gemv(problem: GemmProblem, split_k: int) -> Selection:
        return Selection("gemv", gemv.default(problem, device_info(device))[0], "watched", split_k=split_k)

    def by_portable(problem: GemmProblem, split_k: int) -> Selection:
        return Selection("portable", tile, "watched", split_k=split_k)

    def by_skinny(problem: GemmProblem, split_k: int) -> Selection:
        return Selection("skinny", skinny.CONFIGS[split_k], "watched", swap_ab=split_k > 1)

    def persistent(problem: GemmProblem, split_k: int, packed: tuple[str, ...] = ()) -> Selection:
        schedule = Schedule(3) if split_k == 1 else Schedule(5, split_tiles=1, split_k=split_k)
        return Selection("warp_specialised", ring, "watched", schedule, packed=packed)

    def in_clusters(problem: GemmProblem, split_k: int) -> Selection:
        return replace(persistent(problem, split_k), config=clustered)

    def by_two_launches(problem: GemmProblem, split_k: int) -> Selection:
        tiles = problem.batch * ring.tiles(problem.M, problem.N)
        parts = split_k + 1
        return replace(persistent(problem, 1), schedule=Schedule(tiles * parts, tiles, parts, reduction=True))

    def of_width(problem: GemmProblem, split_k: int) -> Selection:
        return replace(persistent(problem, split_k), config=wide)

    def repacking(problem: GemmProblem, split_k: int) -> Selection:
        return persistent(problem, split_k, ("a", "b"))

    any_layout = [((127, 65, 333), 0), ((200, 270, 1030), 1), ((64, 128, 512), 0)]  # (M, N, K), first element
    cases = {
        "portable": (by_portable, any_layout),
        "gemv": (by_gemv, [((1, 1037, 4099), 0), ((3, 130, 1001), 1), ((4, 256, 2048), 0)]),
        "skinny": (by_skinny, [((5, 1037, 4104), 0), ((130, 7, 1000), 0), ((16, 256, 2048), 0), ((3, 70, 72), 8)]),
    }
    if torch.cuda.get_device_capability() == (9, 0):
        cases["warp_specialised"] = (persistent, [((200, 136, 1032), 0), ((3, 8, 520), 0), ((264, 72, 1024), 0)])
        cases["reduction"] = (by_two_launches, cases["warp_specialised"][1])
        cases["repack"] = (repacking, any_layout)
        if CLUSTERS:
            cases["clusters"] = (in_clusters, cases["warp_specialised"][1])
            cases["widths"] = (of_width, cases["warp_specialised"][1])
    for name, (choose, sizes) in cases.items():
        for ((M, N, K), first), orders, split_k in itertools.product(sizes, ORDERS.get(name, ("nnn", "ttt")), (1, 3)):
            if name in ("warp_specialised", "reduction", "clusters", "widths") and orders == "ttt" and M % 8:
                continue  # TMA reads no such rows
            a, b, c = ending(M, K, orders[0], first), ending(K, N, orders[1], first), ending(M, N, orders[2], first)
            bias = None if split_k == 1 else ending(N, 1, "n", first)[:, 0]
            has_beta = bias is not None and name != "widths"  # where C is read, no `wgmma` spans any width
            epilogue = {} if bias is None else {"has_beta": has_beta, "bias": "n", "activation": "gelu"}
            problem = GemmProblem.of(a, b, c, **epilogue)
            auxiliary, beta = () if bias is None else (bias,), 0.5 * has_beta
            GemmPlan(problem, choose(problem, split_k), device).run(a, b, c, auxiliary, 1.0, beta)
            torch.cuda.synchronize()
        print(name)


def mutant() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch_rung(READS_OUTSIDE.original, READS_OUTSIDE.load(Path(folder)).launch, SIZES)


if __name__ == "__main__":
    {"rungs": rungs, "twins": twins, "kernels": kernels, "mutant": mutant}[sys.argv[1]]()
    print("done")
