"""One product's shape, and how shapes are drawn at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import TypeVar

_Item = TypeVar("_Item")

ITEMSIZE = 2  # bytes of fp16 and bf16, which all suites are measured in


@dataclass(frozen=True)
class Shape:
    """The sizes of one GEMM, how its operands lie, and how it is called."""

    M: int
    N: int
    K: int
    _: KW_ONLY
    name: str = ""  # where it comes from
    batch: int | None = None  # how many GEMMs, or None for 2-D operands
    layout: str = "nn"  # how A and B lie: "n" row-major, "t" column-major; a weight of torch.nn.Linear makes "nt"
    pad: int = 0  # elements by which rows are further apart than they are long
    offset: int = 0  # elements of storage before the first
    bias: str | None = None  # one value a column ("n"), a row ("m") or None
    activation: str | None = None  # of the epilogue, or None
    # None, or the operands' scales as `triton_gemm.scaled_matmul` takes them: "tensor", "rows" or "blocks".
    scales: str | None = None
    given_out: bool = True  # whether C is handed over or allocated by the call
    weights: int = 0  # layers, each with its own B, that calls cycle through, with all results kept; 0 repeats one GEMM
    trained: bool = False  # whether B requires grad
    grouped: bool = False  # whether the batch is one grouped GEMM, with M rows in each group

    @property
    def key(self) -> str:
        """What tells it from every other shape of a suite, for people too."""
        batch = "" if self.batch is None else f"{self.batch} x "
        words = [f"{batch}{self.M}x{self.N}x{self.K}", self.layout]
        words += [f"{name} {value}" for name, value in (("pad", self.pad), ("offset", self.offset)) if value]
        words += [f"bias {self.bias}"] if self.bias else []
        words += [self.activation] if self.activation else []
        words += [f"scales {self.scales}"] if self.scales else []
        words += ["grouped"] if self.grouped else []
        words += [f"{self.weights} weights"] if self.weights else []
        words += ["trained"] if self.trained else []
        words += [] if self.given_out or self.weights else ["no out"]
        return " ".join(words)


def cube(n: int, layout: str = "nn", pad: int = 0, offset: int = 0, given_out: bool = True) -> Shape:
    """M = N = K = n."""
    return Shape(n, n, n, layout=layout, pad=pad, offset=offset, given_out=given_out)


def box(random: Random, least: int, most: int, multiple: int = 1) -> Shape:
    """M, N and K each drawn as `between` draws."""
    M, N, K = (between(random, least, most, multiple) for _ in range(3))
    return Shape(M, N, K)


def between(random: Random, least: int, most: int, multiple: int = 1) -> int:
    """A multiple of `multiple` from least to most, small ones as often as large ones (log-uniform)."""
    value = math.exp(random.uniform(math.log(least), math.log(most)))
    return min(most // multiple, max(-(-least // multiple), round(value / multiple))) * multiple


def spaced(shapes: Sequence[_Item], limit: int | None) -> tuple[_Item, ...]:
    """At most `limit` of the shapes, evenly spaced, the first and the last among them."""
    if limit is None or limit >= len(shapes):
        return tuple(shapes)
    if limit == 1:
        return (shapes[len(shapes) // 2],)
    return tuple(shapes[round(i * (len(shapes) - 1) / (limit - 1))] for i in range(limit))
