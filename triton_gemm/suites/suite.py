"""A suite, and shapes that are drawn from its regime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .shapes import Shape, spaced


@dataclass(frozen=True)
class Suite:
    """Shapes of one regime, and why they are a group."""

    name: str
    reason: str
    shapes: tuple[Shape, ...]
    regime: Callable[[Shape], bool]  # whether a shape belongs
    draw: Callable[[Random], Shape]  # another that does
    # "graph" for kernel time, "host" for Python's time of a call, "queue" for a call's share of a queue.
    kind: str = "graph"
    unit: str = "TFLOPS"  # "TFLOPS", "GB/s" or "us"
    cold: float = 2.0  # by what factor operand sets exceed L2
    mode: str | None = None  # a key of operands.MODE_DTYPES, or None for 16 bits


def unseen(suite: Suite, seed: int, count: int) -> tuple[Shape, ...]:
    """`count` shapes of the suite's regime that it does not list, the same ones for the same seed."""
    random = Random(f"{suite.name} {seed}")
    known = {shape.key for shape in suite.shapes}
    found: dict[str, Shape] = {}
    while len(found) < count:
        shape = suite.draw(random)
        if shape.key not in known:
            found.setdefault(shape.key, shape)
    return tuple(found.values())


def chosen(suite: Suite, limit: int | None, seed: int | None) -> tuple[Shape, ...]:
    """The listed shapes, or as many unseen ones with a seed."""
    if seed is None:
        return spaced(suite.shapes, limit)
    return unseen(suite, seed, min(len(suite.shapes), limit or len(suite.shapes)))
