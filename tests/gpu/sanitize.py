"""What compute-sanitizer watches: `python sanitize.py rungs|twins|mutant` launches each kernel on ragged sizes.

Operands are whole allocations, so that what lies outside them belongs to nobody.
"""

import sys
import tempfile
from pathlib import Path

import torch

from reference_cuda import TWINS, load
from tests.mutants import READS_OUTSIDE
from triton_gemm.device import device_info
from triton_gemm.ladder import LADDER, Rung

SIZES = [(127, 65, 33), (200, 270, 150), (1, 140, 70), (37, 20, 0), (128, 256, 64)]
TMA_SIZES = [(120, 72, 40), (200, 272, 152), (8, 136, 72), (128, 256, 64)]  # rows of whole 16 bytes
SCALARS = [(1.0, 0.0), (-0.5, 2.0)]


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


def mutant() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch_rung(READS_OUTSIDE.original, READS_OUTSIDE.load(Path(folder)).launch, SIZES)


if __name__ == "__main__":
    {"rungs": rungs, "twins": twins, "mutant": mutant}[sys.argv[1]]()
    print("done")
