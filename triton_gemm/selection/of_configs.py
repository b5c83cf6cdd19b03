"""The candidates that have given configurations, which the kernels need not propose for a problem by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import kernels
from ..config import TileConfig
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Algorithm, Candidate, Work, parts_of
from ..problem import GemmProblem
from .select import predicted_or_inf

OfKernel = tuple[str, TileConfig]  # a kernel's name and a configuration of its own kind


def of_configs(
    problem: GemmProblem, device: DeviceInfo, configs: Iterable[OfKernel], parts: int | None = None
) -> Iterator[list[tuple[float, Candidate]]]:
    """For each configuration (predicted microseconds, candidate), the fastest first, legal or not: swapped, packed and
    cut along K as the kernel's own candidates for the problem are. Infinite where the model knows nothing of it.
    parts: only those with K in so many."""
    model = model_of(device)
    variants: dict[str, dict[Any, dict[Work, None]]] = {}
    for kernel, config in configs:
        if kernel not in variants:
            variants[kernel] = _variants(kernel, problem, device)
        found = [
            Candidate(given, Algorithm(kernel, config, work, swap_ab=swap_ab, packed=packed))
            for (given, swap_ab, packed), works in variants[kernel].items()
            for work in _works(config, given, device, works, parts)
        ]
        yield sorted(
            ((predicted_or_inf(problem, candidate, model), candidate) for candidate in found), key=lambda one: one[0]
        )


def _works(
    config: TileConfig, given: GemmProblem, device: DeviceInfo, of_others: Iterable[Work], parts: int | None
) -> Iterable[Work]:
    """How a configuration's work may be dealt out: a schedule depends on its own tiles, other work does not."""
    if isinstance(config, kernels.warp_specialised.Config):
        return kernels.warp_specialised.schedules(given, config, device, parts=parts)
    return [work for work in of_others if parts in (None, parts_of(work))]


def _variants(kernel: str, problem: GemmProblem, device: DeviceInfo) -> dict[Any, dict[Work, None]]:
    """(the problem as the kernel is given it, swapped or not, packed operands), and for each how work is dealt out.
    Empty where that depends on a configuration's own tiles."""
    if kernel == "warp_specialised":
        return {variant: {} for variant in kernels.warp_specialised.given_as(problem, device)}
    found: dict[Any, dict[Work, None]] = {}
    for given, (_, _, work, swap_ab, packed) in kernels.named(kernel).candidates(problem, device):
        found.setdefault((given, swap_ab, packed), {})[work] = None
    return found
