"""Tuning a weight for a range of rows: which numbers of rows are measured, and what is timed for each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from .. import tables
from ..hardware.device import DeviceInfo
from ..kernels.candidate import Algorithm
from ..problem import GemmProblem
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, select
from ..tables.files import Bits
from ..tables.records import illegal
from ..tables.weights import dealt_out_for, weight_of

# Steps of M: the largest M of each step is measured. As fine as tiles are, and from 128 on 8 to a doubling.
STEPS = sorted({1, 2, 4, 8, *range(16, 129, 16), *(2**i * eighths for i in range(4, 18) for eighths in range(9, 17))})
FEW = 12  # candidates from the top of the model's ranking; the choices and winners of neighbouring M join them
NEAR = 4  # winners for the nearest numbers of rows
SAMPLE = 100  # numbers of rows of a weight by which `served` counts


def grid(rows: Collection[int]) -> dict[int, int]:
    """The numbers of rows to measure, of those given, and for each the fewest that it stands for; 0 for itself."""
    found: dict[int, tuple[int, int]] = {}
    for M in sorted(rows):
        step = next(x for x in STEPS if x >= M)
        found[step] = found.get(step, (M, M))[0], M
    return {most: fewest if fewest < most else 0 for fewest, most in found.values()}


def of_weights(calls: Mapping[GemmProblem, int], rows: Collection[int]) -> dict[GemmProblem, tuple[int, int]]:
    """(calls, fewest rows) of each product to measure: of the weights that products have, whatever their M, the most
    called first. ValueError where a product is no layer's."""
    weights: dict[GemmProblem, int] = {}
    for problem, count in calls.items():
        weight = weight_of(problem)
        if weight is None:
            raise ValueError(f"tune(): with rows, products are those of single row-major matrices, not {problem}")
        weights[weight] = weights.get(weight, 0) + count
    measured = grid(rows)
    return {replace(weight, M=M): (count, measured[M]) for weight, count in weights.items() for M in measured}


def candidates_of_rows(
    problem: GemmProblem,
    device: DeviceInfo,
    bits: Bits,
    fewest: int,
    winners: Sequence[Algorithm],
    ranked: Sequence[Selection],
) -> list[Selection]:
    """A few candidates that may win for a range of rows. Of `ranked` it is the model's choice and what it ranks next.
    Others are the model's choices for fewer rows of the range, and the last of `winners` for other numbers of rows."""
    choice = ranked[0]
    others = (select(replace(problem, M=M), device).algorithm for M in (fewest, (fewest + problem.M) // 2) if M)

    def fitting(algorithms: Iterable[Algorithm]) -> Iterator[Selection]:
        for algorithm in dict.fromkeys(dealt_out_for(problem, x, device) for x in algorithms):
            if algorithm is None or algorithm == choice.algorithm or illegal(problem, device, algorithm) is not None:
                continue
            selection = Selection(algorithm, "", choice.precision, "tuner")
            if bits == "any" or bit_class(problem, selection) == bit_class(problem, choice):
                yield selection

    found = {x.algorithm: x for x in (choice, *islice(fitting(reversed(winners)), NEAR), *fitting(others))}
    return list((found | {x.algorithm: x for x in ranked[1:FEW] if x.algorithm not in found}).values())


def served(problems: Iterable[GemmProblem], rows: Collection[int], device: DeviceInfo, bits: Bits) -> float:
    """The share of numbers of rows for which tables have what is used, over the weights of problems."""
    ordered = sorted(rows)
    some = ordered[:: -(-len(ordered) // SAMPLE)]
    needed = [replace(weight, M=M) for weight in dict.fromkeys(map(weight_of, problems)) if weight for M in some]
    only = None if bits == "any" else lambda problem, device: bit_class(problem, select(problem, device))
    return sum(tables.lookup(x, device, bits, only) is not None for x in needed) / len(needed)
