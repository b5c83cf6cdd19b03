"""The figures of a DeviceModel as places in its entry, which a fit may change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ..arithmetic import ARITHMETICS
from ..kernels.candidate import Algorithm
from ..problem import GemmProblem

Figures = dict[str, Any]
Place = tuple[str, ...]
FIXED = ("source", "capability", "num_sms", "shared_memory_per_sm", "bandwidth")


def places(entry: Any, at: Place = ()) -> Iterator[Place]:
    """Where the figures that are fitted stand in a model's entry; all are positive."""
    for key in entry if isinstance(entry, Mapping) else map(str, range(len(entry))):
        value = _inside(entry, key)
        if key in FIXED:
            continue
        if isinstance(value, Mapping | list | tuple):
            yield from places(value, (*at, key))
        elif value > 0:
            yield (*at, key)


def _inside(entry: Any, key: str) -> Any:
    return entry[key] if isinstance(entry, Mapping) else entry[int(key)]


def value_at(entry: Figures, place: Place) -> float:
    found: Any = entry
    for key in place:
        found = _inside(found, key)
    return float(found)


def with_values(entry: Figures, values: Mapping[Place, float]) -> Figures:
    """A copy of a model's entry with other figures."""
    found: Figures = _lists(entry)
    for (*path, last), value in values.items():
        inner: Any = found
        for key in path:
            inner = _inside(inner, key)
        inner[last if isinstance(inner, dict) else int(last)] = float(value)
    return found


def _lists(entry: Any) -> Any:
    """A copy that can be changed."""
    if isinstance(entry, Mapping):
        return {key: _lists(value) for key, value in entry.items()}
    return [_lists(value) for value in entry] if isinstance(entry, list | tuple) else copy.copy(entry)


def rounded(entry: Figures) -> Figures:
    """A copy with four digits of each figure."""
    return with_values(entry, {place: float(f"{value_at(entry, place):.4g}") for place in places(entry)})


def concerns(place: Place, algorithm: Algorithm, problem: GemmProblem) -> bool:
    """Whether a figure may change the prediction of a candidate."""
    kernel = algorithm.kernel
    if place[0] in ("copy", "copied"):
        return bool(algorithm.packed)
    if place[0] != "kernels" or place[1] != "portable":
        return place[0] != "kernels" or place[1] == kernel
    if place[2] == "products":
        return kernel == "portable" and problem.precision == place[3]
    pace = {"fma": "ieee", "dmma": "fp64"}.get(ARITHMETICS[problem.precision].instruction, "tensor")
    return kernel == "portable" and pace == place[2]
