"""The candidates that have given configurations, which the kernels need not propose for a problem by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import kernels
from ..config import TileConfig
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Algorithm, Candidate, Work
from ..problem import GemmProblem
from .select import predicted_or_inf

OfKernel = tuple[str, TileConfig]  # a kernel's name and a configuration of its own kind


def of_configs(
    problem: GemmProblem, device: DeviceInfo, configs: Iterable[OfKernel]
) -> Iterator[list[tuple[float, Candidate]]]:
    """For each configuration (predicted microseconds, candidate), the fastest first, legal or not: swapped, packed and
    cut along K as the kernel's own candidates for the problem are. Infinite where the model knows nothing of it."""
    model = model_of(device)
    works: dict[str, dict[Any, dict[Work, None]]] = {}
    for kernel, config in configs:
        if kernel not in works:
            ways = works[kernel] = {}
            for given, (_, _, work, swap_ab, packed) in kernels.named(kernel).candidates(problem, device):
                ways.setdefault((given, swap_ab, packed), {})[work] = None
        found = [
            Candidate(given, Algorithm(kernel, config, work, swap_ab=swap_ab, packed=packed))
            for (given, swap_ab, packed), of_others in works[kernel].items()
            for work in _dealt_out(given, config, device, of_others)
        ]
        yield sorted(
            ((predicted_or_inf(problem, candidate, model), candidate) for candidate in found), key=lambda one: one[0]
        )


def _dealt_out(given: GemmProblem, config: TileConfig, device: DeviceInfo, of_others: Iterable[Work]) -> Iterable[Work]:
    """How the work of a configuration may be dealt out: a schedule is of its own tiles, other work as of others."""
    if not isinstance(config, kernels.warp_specialised.Config):
        return of_others
    return of_others if given.groups else kernels.warp_specialised.schedules(given, config, device)
