"""What is tuned: products that are listed, and products that no one has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triton_gemm.problem import GemmProblem
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import spaced
from triton_gemm.tables.files import Bits

MODE = "bf16"
LISTED = ("llm", "prefill", "decode")
# Products that are drawn of each suite's regime; of those that are many in practice more.
DRAWN = {
    **{"mid": 40, "prefill": 36, "decode": 50, "bigk": 24, "small": 16},
    **{"shortk": 10, "odd": 8, "batched": 6, "layouts": 5, "square": 5},
}
TWICE = 60  # of those drawn
SEED = 1


@dataclass(frozen=True)
class Run:
    """A tuning that is measured. what: in words, for a table; problems(seed): products, in the order in which they are
    tuned; bits, repeat: as `tune` takes them; seconds: of a race, compiling not included."""

    name: str
    what: str
    problems: Callable[[int], list[GemmProblem]]
    bits: Bits
    repeat: int = 1
    seconds: float = 2.0
    drawn: bool = True


def listed(_: int = SEED) -> list[GemmProblem]:
    """The listed products of language models, each once."""
    return list(dict.fromkeys(gemm_problem(shape, MODE) for name in LISTED for shape in SUITES[name].shapes))


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


RUNS = {
    run.name: run
    for run in (
        Run("listed", "of language models", listed, "same", drawn=False),
        Run("unseen", "drawn in all regimes", drawn, "any"),
        Run("twice", "drawn in all regimes, each raced twice", twice, "same", 2),
    )
}
