"""What is tuned: products that are listed, products that no one has seen, and the weights of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from triton_gemm.problem import GemmProblem
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape, between, spaced
from triton_gemm.tables.files import Bits

MODE = "bf16"
LISTED = ("llm", "prefill", "decode")
# Products that are drawn of each suite's regime; of those that are many in practice more.
DRAWN = {
    **{"mid": 40, "prefill": 36, "decode": 50, "bigk": 24, "small": 16},
    **{"shortk": 10, "odd": 8, "batched": 6, "layouts": 5, "square": 5},
}
TWICE = 60  # of those drawn
LAYERS = 24  # of 100 to 1000 tokens
SEED = 1
# (N, K) of linear layers, each by itself and merged as serving engines do, from models' config.json on Hugging Face. Of
# DeepSeek V3 those of one of eight GPUs with tensor parallelism, but its experts, which are grouped products.
MODELS = {
    "llama-3-8b": ((4096, 4096), (1024, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336)),
    "qwen-3-32b": (
        *((8192, 5120), (1024, 5120), (10240, 5120), (5120, 8192)),
        *((25600, 5120), (51200, 5120), (5120, 25600)),
    ),
    "deepseek-v3-tp8": (
        *((1536, 7168), (576, 7168), (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048)),
        *((4608, 7168), (7168, 2304), (512, 7168), (7168, 256), (256, 7168)),
    ),
}
ROWS = range(1, 4097)
NUMBERS = 40  # of rows that are drawn for a model's weights


@dataclass(frozen=True)
class Run:
    """A tuning that is measured. what: in words, for a table; problems(seed): products, in the order in which they are
    tuned; bits, repeat, rows: as `tune` takes them; seconds: of a trial, compiling not included."""

    name: str
    what: str
    problems: Callable[[int], list[GemmProblem]]
    bits: Bits
    repeat: int = 1
    seconds: float = 2.0
    drawn: bool = True
    rows: range | None = None


def listed(_: int = SEED) -> list[GemmProblem]:
    """The listed products of language models, each once."""
    return list(dict.fromkeys(gemm_problem(shape, MODE) for name in LISTED for shape in SUITES[name].shapes))


def suites(_: int = SEED) -> list[GemmProblem]:
    """The distinct GEMMs of all bf16 suites that have no epilogue and no padding."""
    shapes = [shape for suite in SUITES.values() if suite.mode is None for shape in suite.shapes]
    plain = [x for x in shapes if x == Shape(x.M, x.N, x.K, name=x.name, batch=x.batch, layout=x.layout)]
    return list(dict.fromkeys(gemm_problem(shape, MODE) for shape in plain))


def drawn(seed: int) -> list[GemmProblem]:
    """Products of every regime, none of them listed; regimes alternate, so that a run that is cut short has of all."""
    places = [
        ((i + 0.5) / count, gemm_problem(shape, MODE))
        for name, count in DRAWN.items()
        for i, shape in enumerate(unseen(SUITES[name], seed, count))
    ]
    return list(dict.fromkeys(problem for _, problem in sorted(places, key=lambda place: place[0])))


def twice(seed: int) -> list[GemmProblem]:
    """Some of the same."""
    return list(spaced(drawn(seed), TWICE))


def layers(seed: int) -> list[GemmProblem]:
    """Projections of language models at 100 to 1000 tokens, none of them listed."""
    return [gemm_problem(shape, MODE) for shape in unseen(SUITES["prefill"], seed, LAYERS)]


def weights(model: str, _: int = SEED) -> list[GemmProblem]:
    """Those of a model, as products of one row."""
    return [gemm_problem(Shape(1, N, K, layout="nt"), MODE) for N, K in MODELS[model]]


def at_any_rows(model: str, seed: int) -> list[GemmProblem]:
    """Each weight of a model in turn, with numbers of rows that are drawn, as many below 100 as from 100 to 4096."""
    random, of = Random(seed), weights(model)
    found = [
        replace(of[i % len(of)], M=between(random, *((1, 99), (100, 4096))[i // len(of) % 2])) for i in range(NUMBERS)
    ]
    return list(dict.fromkeys(found))


RUNS = {
    run.name: run
    for run in (
        Run("listed", "of language models", listed, "same", drawn=False),
        Run("suites", "of every suite in bf16", suites, "same", seconds=1.0, drawn=False),
        Run("unseen", "drawn in all regimes", drawn, "any"),
        Run("layers", "projections at 100 to 1000 tokens that are drawn", layers, "any"),
        Run("twice", "drawn in all regimes, each tuned twice", twice, "same", 2),
        *(
            Run(x, f"of {x}'s weights, each for a range of rows", partial(weights, x), "same", 1, 1.2, False, ROWS)
            for x in MODELS
        ),
        *(
            Run(f"{model}-rows", f"of {model}'s weights with rows that are drawn", partial(at_any_rows, model), "same")
            for model in MODELS
        ),
    )
}
