"""Suites of few rows: a weight is read once, and its bytes, or the launch, are what counts."""

from __future__ import annotations

from .shapes import ITEMSIZE, Shape, between
from .suite import Suite

DECODE = Suite(
    "decode",
    "up to 64 tokens on a weight that comes from memory: bytes a second are what counts",
    tuple(
        Shape(m, n, k, name=f"weight of {ITEMSIZE * n * k / 1e6:.0f} MB", layout="nt")
        for n, k in (
            *((1024, 1024), (1536, 7168), (4096, 4096), (6144, 4096), (7168, 8192)),
            *((4096, 14336), (28672, 4096), (8192, 28672), (57344, 8192)),
        )
        for m in (1, 4, 16, 32, 64)
    ),
    lambda s: s.M <= 64 and s.layout == "nt",
    lambda random: Shape(
        between(random, 1, 64), between(random, 1024, 57344, 64), between(random, 1024, 16384, 64), layout="nt"
    ),
    unit="GB/s",
    cold=4.0,
)

# [out features, in features], from each model's config.json.
NARROW = {
    "rank 64": (64, 7168),
    "Qwen3 235B router": (128, 4096),
    "DeepSeek-V3 router": (256, 7168),
    "DeepSeek-V3 kv_a": (576, 7168),
    "Llama-3 8B k": (1024, 4096),
    "Llama-3 70B k": (1024, 8192),
    "DeepSeek-V3 q_a": (1536, 7168),
    "DeepSeek-V3 q_a and kv_a": (2112, 7168),
    "Llama-3 70B qkv on one of 4 GPUs": (2560, 8192),
}
ROUTER = Suite(
    "router",
    "N from 64 to 2560 and K from 4096 at up to 32 tokens: few tiles unless K is split, and bytes of a few launches",
    tuple(Shape(m, n, k, name=name, layout="nt") for name, (n, k) in NARROW.items() for m in (1, 4, 16, 32)),
    lambda s: s.M <= 32 and 64 <= s.N <= 2560 and s.K >= 4096 and s.layout == "nt",
    lambda random: Shape(
        between(random, 1, 32), between(random, 64, 2560, 64), between(random, 4096, 16384, 64), layout="nt"
    ),
    unit="GB/s",
    cold=4.0,
)
