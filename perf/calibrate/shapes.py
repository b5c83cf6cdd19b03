"""Which shapes are measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.shapes import Shape, spaced

# Suites that a shape may belong to, the narrow regimes first: it counts for the first.
REGIMES = ("batched", "bigk", "shortk", "square", "mid", "decode", "prefill", "llm", "layouts")
OTHER = "other"
LISTED, DRAWN, SEED = 9, 6, 1  # shapes of each suite: from its list, and others of its regime
# Of more regimes more: nearly all of mid's have rows that begin inside of lines, some of them inside of sectors.
DRAWN_MORE = {"mid": 30, "prefill": 18, "llm": 18, "decode": 18}

# Where kernels compete: few rows on weights, tiny and odd matrices, and what tensor cores do not multiply. The columns
# and the length of the sum of weights:
WEIGHTS = (
    *((1024, 1024), (4096, 4096), (14336, 4096), (28672, 8192), (8192, 28672), (576, 7168)),
    *((32768, 512), (512, 16384)),
)
SMALL = ((64, 64, 64), (128, 128, 1024), (256, 256, 256), (512, 512, 512), (777, 333, 999), (1024, 1024, 1024))
OWN: tuple[tuple[str, tuple[Shape, ...]], ...] = (
    ("bf16", tuple(Shape(m, n, k, layout="nt") for n, k in WEIGHTS for m in (1, 2, 4, 8, 16, 24))),
    ("bf16", tuple(Shape(m, n, k) for n, k in WEIGHTS for m in (3, 12, 32))),
    ("bf16", tuple(Shape(*size, layout="nt") for size in ((16, 250, 4096), (7, 1000, 900), (2, 64, 65536)))),
    ("bf16", tuple(Shape(m, n, k, batch=512, layout="nt") for m, n, k in ((32, 32, 64), (4, 256, 128), (64, 64, 128)))),
    ("bf16", (*(Shape(*size) for size in SMALL), Shape(64, 28672, 8192), Shape(2047, 2049, 1023), Shape(63, 65, 127))),
    ("ieee", tuple(Shape(*size, layout=layout) for size in SMALL for layout in ("nn", "nt"))),
    ("ieee", tuple(Shape(m, 4096, 4096, layout="nt") for m in (1, 2, 4, 8, 32, 128, 4096))),
    ("fp64", (*(Shape(*size) for size in SMALL), Shape(16, 4096, 4096), Shape(2048, 2048, 2048))),
    ("tf32", tuple(Shape(m, 4096, 4096, layout="nt") for m in (1, 2, 4, 16, 64, 2048))),
)
SCALED = ("fp8-rows", "fp8-fast", "fp8-blocks", "int8", "tf32", "bf16x6")  # suites of which a few shapes are measured


def shapes_to_measure(
    limit: int | None, seed: int | None = None, suites: Sequence[str] | None = None
) -> tuple[tuple[Shape, str], ...]:
    """Some of each suite's shapes, others of its regime, and OWN, each once, with modes; with a seed only others of
    each regime, more of them; of some suites without OWN."""
    found: dict[tuple[str, str], tuple[Shape, str]] = {}
    for name in suites or (*REGIMES, *SCALED):
        suite = SUITES[name]
        drawn = DRAWN_MORE.get(name, DRAWN)
        listed = spaced(suite.shapes, LISTED) if seed is None else ()
        others = unseen(suite, SEED, drawn) if seed is None else unseen(suite, seed, 2 * drawn)
        for shape in (*listed, *others):
            mode = suite.mode or "bf16"
            found.setdefault((shape.key, mode), (shape, mode))
    for mode, shapes in OWN if seed is None and suites is None else ():
        found |= {(shape.key, mode): (shape, mode) for shape in shapes}
    every = tuple(found.values())
    evenly = np.linspace(0, len(every) - 1, min(limit or len(every), len(every)))
    return tuple(every[round(i)] for i in evenly)
