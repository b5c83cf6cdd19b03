"""Compares the selected tiles and split-K with nvidia-matmul-heuristics: python -m perf.heuristics [GPU ...]

That package, installed by hand, runs on the CPU and recommends a Triton configuration for a GEMM on a GPU that need not
be present. This command prints a Markdown table for each GPU: 20 bf16 products in layout nt, with the tile, split-K
and predicted time of both. It names what differs by more than a factor of two. Nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from perf.common import formats
from triton_gemm.hardware.gpus import named_device
from triton_gemm.reporting.candidates import compare
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape

GPUS = {"a100": "A100_SXM_80GB", "l40s": "L40S", "rtx4090": "RTX_4090", "rtx5090": "RTX_5090", "b200": "B200"}
PRODUCTS = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
    *((rows, 4096, 4096) for rows in (16, 64, 128, 256, 512, 2048)),
    *((rows, 14336, 4096) for rows in (16, 128, 512, 4096)),
    *((rows, 4096, 14336) for rows in (16, 128, 512)),
    *((512, 512, 16384), (64, 256, 8192)),
)


class Choice(NamedTuple):
    """A kernel's name, or "", its tile in elements, split-K, and predicted microseconds."""

    kernel: str
    tile: tuple[int, int, int]
    split_k: int
    us: float

    def __str__(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.tile))} / {self.split_k}, {formats.number(self.us)} us".strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.heuristics", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"of {', '.join(GPUS)}; by default all")
    given = parser.parse_args(arguments)
    unknown = set(given.gpus) - set(GPUS)
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))} among {', '.join(GPUS)}")
    try:
        heuristics = import_module("nvMatmulHeuristics")
    except ImportError:
        parser.error("pip install nvidia-matmul-heuristics")
    for gpu in given.gpus or GPUS:
        theirs = Heuristic(heuristics, GPUS[gpu])
        rows = []
        for product in PRODUCTS:
            one, other = ours(gpu, *product), theirs.choice(*product)
            tiles = one.tile[0] * one.tile[1] / (other.tile[0] * other.tile[1])
            ratios = {"tile": tiles, "split": one.split_k / other.split_k}
            differs = [name for name, ratio in ratios.items() if not 0.5 <= ratio <= 2]
            rows.append([" x ".join(map(str, product)), str(one), str(other), ", ".join(differs)])
        theirs.close()
        print(f"\n{gpu}\n\n{formats.table(['M x N x K', 'ours', 'theirs', 'differs'], rows)}")
    return 0


def ours(gpu: str, M: int, N: int, K: int) -> Choice:
    compared = compare(gemm_problem(Shape(M, N, K, layout="nt")), named_device(gpu), limit=1)
    found = compared.chosen
    m, n, k = found.config.BLOCK_M, found.config.BLOCK_N, found.config.BLOCK_K
    us = next(way.predicted_us for way in compared.ways if way.chosen)
    return Choice(found.kernel, (n, m, k) if found.swap_ab else (m, n, k), found.split_k, us or 0.0)


class Heuristic:
    """nvidia-matmul-heuristics for one GPU.

    heuristics: its module; gpu: the GPU's name there.
    """

    def __init__(self, heuristics: Any, gpu: str) -> None:
        flags = heuristics.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING
        target = heuristics.NvMatmulHeuristicsTarget.TRITON
        self._interface = heuristics.NvMatmulHeuristicsInterface(target, precision="TST", flags=flags)  # bf16
        self._device = self._interface.createHardwareDescriptor()
        self._interface.setHardwarePredefinedGpu(self._device, heuristics.NvMatmulHeuristicsNvidiaGpu[gpu])
        self._layout = heuristics.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR

    def choice(self, M: int, N: int, K: int) -> Choice:
        found = self._interface.get_with_mnk(M, N, K, self._layout, 8, self._device)
        best = min(found, key=lambda one: float(one["runtime"]))
        kernel = best["kernel"]
        tile = kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k
        return Choice("", tile, kernel.split_k, 1e6 * best["runtime"])

    def close(self) -> None:
        self._interface.handle = None  # 0.1.0.27 crashes when it destroys one


if __name__ == "__main__":
    sys.exit(main())
