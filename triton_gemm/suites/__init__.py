"""The suites: shapes that are measured together, with a name and a reason. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from .few_rows import DECODE, ROUTER
from .shapes import Shape, between, box, cube
from .suite import Suite, chosen, unseen

__all__ = ["ALL", "LARGE_M", "LARGE_WEIGHT_BYTES", "PRECISION", "PROJECTIONS", "SUITES", "Suite", "chosen", "unseen"]

LARGE_M = 1024  # from here on a projection is bound by arithmetic
LARGE_WEIGHT_BYTES = 100e6  # a weight of more never fits an L2 cache


# ---- square ----

SQUARES = (512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384)
SQUARE = Suite(
    "square",
    "M = N = K, in powers of two and between them, where the last wave of tiles is not full",
    tuple(cube(n) for n in SQUARES),
    lambda s: s.M == s.N == s.K and 512 <= s.M <= 16384,
    lambda random: cube(between(random, 512, 16384, 64)),
)

# ---- llm: [out features, in features] of the projections, from each model's config.json ----

PROJECTIONS: dict[str, dict[str, tuple[int, int]]] = {
    "Llama-3 8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "Llama-3 70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "Qwen3 8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "Qwen3 32B": {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600)},
    "DeepSeek-V3": {
        "q_a": (1536, 7168),
        "kv_a": (576, 7168),
        "q_b": (24576, 1536),
        "kv_b": (32768, 512),
        "o": (7168, 16384),
        "gate_up": (36864, 7168),
        "down": (7168, 18432),
        "shared gate_up": (4096, 7168),
        "shared down": (7168, 2048),
    },
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)


def weights() -> dict[tuple[int, int], str]:
    """Every (N, K) once, with the first projection that has it."""
    found: dict[tuple[int, int], str] = {}
    for model, projections in PROJECTIONS.items():
        for name, size in projections.items():
            found.setdefault(size, f"{model} {name}")
    return found


def projections(tokens: Sequence[int]) -> tuple[Shape, ...]:
    """The projections at each number of tokens; weights lie as torch.nn.Linear keeps them."""
    return tuple(Shape(m, n, k, name=name, layout="nt") for (n, k), name in weights().items() for m in tokens)


def is_projection(s: Shape) -> bool:
    return s.layout == "nt" and s.M <= 8192 and 512 <= s.N <= 57344 and 512 <= s.K <= 28672


def draw_projection(random: Random, least: int) -> Shape:
    m = between(random, least, 8192)
    return Shape(m, between(random, 512, 57344, 64), between(random, 512, 28672, 64), layout="nt")


LLM = Suite(
    "llm",
    "projections of Llama-3, Qwen3 and DeepSeek-V3 at 1 to 8192 tokens; weights as torch.nn.Linear keeps them",
    projections(TOKENS),
    is_projection,
    lambda random: draw_projection(random, 1),
)
LLM_LARGE = Suite(
    "llm-large",
    f"the same projections at {LARGE_M} tokens or more: prefill and training",
    projections([m for m in TOKENS if m >= LARGE_M]),
    lambda s: is_projection(s) and s.M >= LARGE_M,
    lambda random: draw_projection(random, LARGE_M),
)

# ---- mid ----

MID = Suite(
    "mid",
    "a few waves of tiles or less than one: M from 128 to 1024, N and K from 1000 to 8000",
    tuple(
        Shape(m, n, k, layout=layout)
        for (n, k), layout in zip(
            (
                (1024, 1024),
                (2048, 2048),
                (1536, 4096),
                (4096, 1000),
                (4096, 4096),
                (5000, 3000),
                (7168, 2048),
                (8000, 8000),
            ),
            ("nn", "nt") * 4,
            strict=True,
        )
        for m in (128, 256, 384, 640, 1024)
    ),
    lambda s: 128 <= s.M <= 1024 and 1000 <= s.N <= 8000 and 1000 <= s.K <= 8000,
    lambda random: Shape(
        between(random, 128, 1024),
        between(random, 1000, 8000, 8),
        between(random, 1000, 8000, 8),
        layout=random.choice(("nn", "nt")),
    ),
)

# ---- prefill ----

PREFILL_TOKENS = range(100, 1001)


def prefill_tokens(count: int) -> tuple[int, ...]:
    """Numbers of tokens as chunks of prompts and batches of requests have them: small ones as often as large ones."""
    random = Random("tokens of prefill")
    return tuple(between(random, PREFILL_TOKENS[0], PREFILL_TOKENS[-1]) for _ in range(count))


PREFILL = Suite(
    "prefill",
    "projections of Llama-3, Qwen3 and DeepSeek-V3 at 100 to 1000 tokens, any number: chunked prefill, batched serving",
    tuple(
        Shape(m, n, k, name=name, layout="nt")
        for m, ((n, k), name) in zip(prefill_tokens(2 * len(weights())), 2 * tuple(weights().items()), strict=True)
    ),
    lambda s: s.layout == "nt" and s.M in PREFILL_TOKENS and (s.N, s.K) in weights(),
    lambda random: Shape(
        between(random, PREFILL_TOKENS[0], PREFILL_TOKENS[-1]), *random.choice(tuple(weights())), layout="nt"
    ),
)

# ---- shortk ----

SHORTK = Suite(
    "shortk",
    "K from 256 to 1024 under large M and N: prologue and epilogue are a large share of a tile",
    tuple(
        Shape(m, n, k, layout=layout)
        for (m, n, layout) in ((4096, 4096, "nn"), (8192, 8192, "nt"), (4096, 16384, "nt"), (6144, 6144, "nn"))
        for k in (256, 384, 512, 768, 1024)
    ),
    lambda s: 256 <= s.K <= 1024 and s.M >= 4096 and s.N >= 4096,
    lambda random: Shape(
        between(random, 4096, 16384, 64),
        between(random, 4096, 16384, 64),
        between(random, 256, 1024, 64),
        layout=random.choice(("nn", "nt")),
    ),
)

# ---- bigk ----

BIGK = Suite(
    "bigk",
    "M and N up to 512 and K from 16384: too few tiles for the SMs unless K is split; tn is the gradient of a weight",
    tuple(
        Shape(m, n, k, layout=layout)
        for (m, n, layout) in ((64, 64, "nt"), (128, 128, "nn"), (256, 256, "tn"), (512, 512, "tn"), (128, 512, "nt"))
        for k in (16384, 32768, 65536, 131072)
    ),
    lambda s: s.M <= 512 and s.N <= 512 and s.K >= 16384,
    lambda random: Shape(
        between(random, 64, 512, 8),
        between(random, 64, 512, 8),
        between(random, 16384, 131072, 64),
        layout=random.choice(("nn", "nt", "tn")),
    ),
    unit="GB/s",
)

# ---- odd ----


def draw_odd(random: Random) -> Shape:
    """Of odd sizes, or of even ones that an odd leading dimension or an offset of one element puts out of step."""
    layout = random.choice(("nn", "nt"))
    if random.random() < 0.5:
        half = box(random, 500, 2049)
        return Shape(2 * half.M + 1, 2 * half.N + 1, 2 * half.K + 1, layout=layout)
    pad, offset = random.choice(((1, 0), (0, 1), (1, 1)))
    return replace(box(random, 1000, 4100, 8), layout=layout, pad=pad, offset=offset)


ODD = Suite(
    "odd",
    "rows that do not begin on 16 bytes: odd K and N, odd leading dimensions, storage that begins one element late",
    (
        *(cube(n, layout) for n in (1001, 2047, 3001, 4095, 4097) for layout in ("nn", "nt")),
        *(Shape(n, n, n + 1) for n in (1000, 2048, 4096)),
        *(cube(n, "nt", pad=1) for n in (1024, 2048, 4096)),
        *(cube(n, offset=1) for n in (1024, 2048, 4096)),
        *(Shape(1000, 4099, 2050, pad=1), Shape(4096, 1031, 4093, layout="nt"), Shape(2053, 4096, 1027)),
    ),
    lambda s: (
        all(1000 <= size <= 4100 for size in (s.M, s.N, s.K)) and bool(s.K % 2 or s.N % 2 or s.pad % 2 or s.offset % 2)
    ),
    draw_odd,
)

# ---- batched ----

BATCHED = Suite(
    "batched",
    "3-D operands: queries with keys and probabilities with values, experts, and many small products",
    (
        *(Shape(n, n, 128, name="Q K^T", batch=b, layout="nt") for b, n in ((64, 1024), (32, 2048), (16, 4096))),
        *(Shape(n, 128, n, name="P V", batch=b) for b, n in ((64, 1024), (32, 2048), (16, 4096))),
        *(Shape(n, n, 64, name="Q K^T", batch=96, layout="nt") for n in (512, 1024)),
        *(Shape(n, 64, n, name="P V", batch=96) for n in (512, 1024)),
        *(Shape(m, 4096, 2048, name="experts", batch=8, layout="nt") for m in (128, 1024)),
        *(
            Shape(n, n, n, name="small", batch=b)
            for b, n in ((4096, 32), (2048, 64), (512, 128), (128, 256), (32, 512))
        ),
    ),
    lambda s: s.batch is not None and 2 <= s.batch <= 4096,
    lambda random: Shape(
        between(random, 32, 2048, 16),
        between(random, 32, 2048, 16),
        between(random, 32, 2048, 16),
        batch=between(random, 4, 128),
        layout=random.choice(("nn", "nt")),
    ),
)

# ---- layouts ----

LAYOUTS = Suite(
    "layouts",
    "the same products in all four layouts: nn, nt (a weight), tn (its gradient), tt",
    tuple(
        Shape(m, n, k, layout=layout)
        for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 2048), (3072, 9216, 4096))
        for layout in ("nn", "nt", "tn", "tt")
    ),
    lambda s: min(s.M, s.N, s.K) >= 2048,
    lambda random: replace(box(random, 2048, 12288, 64), layout=random.choice(("nn", "nt", "tn", "tt"))),
)

# ---- epilogue ----

ACTIVATED = (None, "relu", "gelu", "gelu_tanh", "silu")
EPILOGUE = Suite(
    "epilogue",
    "a linear layer with bias and activation, against torch's functions for it, eager and compiled",
    (
        *(Shape(4096, 14336, 4096, layout="nt", bias="n", activation=name) for name in ACTIVATED),
        *(Shape(m, 16384, 4096, layout="nt", bias="n", activation="gelu") for m in (512, 2048, 8192)),
        *(Shape(m, 8192, 2048, layout="nt", bias="n", activation="silu") for m in (1024, 8192)),
        *(Shape(m, 12288, 3072, layout="nt", bias="n", activation="gelu_tanh") for m in (2048, 8192)),
    ),
    lambda s: s.N >= 8192 and (s.bias is not None or s.activation is not None),
    lambda random: Shape(
        between(random, 512, 8192, 64),
        between(random, 8192, 16384, 64),
        between(random, 1024, 8192, 64),
        layout="nt",
        bias="n",
        activation=random.choice(ACTIVATED),
    ),
)

# ---- host, small ----

_LAYER = Shape(17, 512, 256, layout="nt", given_out=False)
HOST = Suite(
    "host",
    "Python's time for one call, and for one of many linear layers, on operands so small that the GPU does not limit",
    (
        *(cube(n, given_out=given) for n in (16, 64, 128, 256) for given in (False, True)),
        *(replace(_LAYER, weights=n, bias=bias) for n in (1, 8, 32, 128, 512) for bias in (None, "n")),
        replace(_LAYER, weights=32, bias="n", trained=True),
        replace(_LAYER, M=16, batch=8, weights=32, grouped=True),
    ),
    lambda s: max(s.M, s.N, s.K) <= 512,
    lambda random: replace(box(random, 16, 256, 8), given_out=random.random() < 0.5),
    kind="host",
    unit="us",
)
HOST_FP8 = Suite(
    "host-fp8",
    "Python's time for one of many scaled fp8 layers, on operands so small that the GPU does not limit",
    tuple(
        replace(_LAYER, M=128, N=1024, K=1024, weights=n, scales=scales)
        for n in (1, 32)
        for scales in ("tensor", "rows", "blocks")
    ),
    lambda s: max(s.M, s.N, s.K) <= 1024,
    lambda random: replace(box(random, 16, 256, 16), layout="nt", given_out=False, scales="tensor"),
    kind="host",
    unit="us",
    mode="fp8",
)
SMALL = Suite(
    "small",
    "GEMMs that end sooner than Python can launch the next: a queue of calls, until the GPU is done",
    (
        *(cube(n) for n in (512, 640, 768, 896, 1024)),
        *(Shape(m, n, k, layout="nt") for m, n, k in ((512, 1024, 512), (1024, 512, 1024), (768, 1024, 640))),
    ),
    lambda s: all(512 <= size <= 1024 for size in (s.M, s.N, s.K)),
    lambda random: box(random, 512, 1024, 8),
    kind="queue",
    unit="us",
)

# ---- precision: how fp32 may be multiplied, and everything that is not 16 bits ----


def _of_mode(
    mode: str,
    reason: str,
    least: int,
    layouts: Sequence[str] = ("nn", "nt", "tn", "tt"),
    scales: str | None = None,
) -> Suite:
    """Squares and projections in `layouts`; of what is scaled one number each, unless `scales` says otherwise."""
    sizes = tuple(n for n in (1024, 2048, 4096, 8192) if n >= least)
    projections = tuple(
        Shape(m, *PROJECTIONS["Llama-3 8B"][name], layout=layout, scales=scales)
        for m, name in ((1024, "qkv"), (4096, "down"))
        for layout in layouts
        if least < 4096
    )
    return Suite(
        "-".join([*mode.split(), *([scales] if scales not in (None, "tensor") else [])]),
        reason,
        (*(replace(cube(n, layout), scales=scales) for n in sizes for layout in layouts), *projections),
        lambda s: min(s.M, s.N, s.K) >= least,
        lambda random: replace(box(random, least, 8192, 128), layout=random.choice(layouts), scales=scales),
        mode=mode,
    )


PRECISION_SUITES = (
    _of_mode("tf32", "fp32 rounded to tf32, against cuBLAS's tf32, in all four layouts", 1024),
    _of_mode("ieee", "fp32 on CUDA cores, against cuBLAS's SGEMM", 1024, ("nn", "nt")),
    _of_mode("tf32x3", "fp32 as two terms of tf32, against cuBLAS's SGEMM", 1024, ("nn",)),
    _of_mode("bf16x3", "fp32 as two terms of bf16, against cuBLAS's SGEMM", 1024, ("nn",)),
    _of_mode("bf16x6", "fp32 as three terms of bf16, without the smallest products, against cuBLAS's SGEMM", 4096),
    _of_mode("bf16x9", "fp32 as three terms of bf16, against cuBLAS's SGEMM", 4096),
    _of_mode("fp8", "e4m3 with one scale each, against torch._scaled_mm", 1024, ("nt",), "tensor"),
    _of_mode("fp8 fast", "e4m3 with one scale each, fast accumulation", 1024, ("nt",), "tensor"),
    _of_mode("fp8", "e4m3 with a scale for each row and column, against torch._scaled_mm", 1024, ("nt",), "rows"),
    _of_mode("fp8 fast", "e4m3 with a scale for each row and column, fast accumulation", 1024, ("nt",), "rows"),
    _of_mode("fp8", "e4m3 with scales of 1x128 and 128x128, against torch._scaled_mm", 1024, ("nt",), "blocks"),
    _of_mode("int8", "int8 summed in int32, against torch._int_mm", 1024, ("nn", "nt")),
    _of_mode("fp64", "fp64, against cuBLAS's DGEMM", 1024, ("nn", "nt")),
)
# What `precision` stands for.
PRECISION = tuple(suite.name for suite in PRECISION_SUITES)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        SQUARE,
        LLM,
        LLM_LARGE,
        MID,
        PREFILL,
        DECODE,
        ROUTER,
        SHORTK,
        BIGK,
        ODD,
        BATCHED,
        LAYOUTS,
        EPILOGUE,
        HOST,
        HOST_FP8,
        SMALL,
        *PRECISION_SUITES,
    )
}
# What `all` stands for: every shape once.
ALL = tuple(name for name in SUITES if name != LLM_LARGE.name)
