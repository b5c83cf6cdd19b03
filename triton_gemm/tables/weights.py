"""Entries that serve a range of rows: what was measured with M rows of an input is used with fewer, too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .. import kernels
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Algorithm, Candidate
from ..kernels.schedule import Schedule
from ..problem import GemmProblem
from ..selection.select import given, predicted_or_inf, select
from .records import Entry


def weight_of(problem: GemmProblem) -> GemmProblem | None:
    """What products have in common that differ in the number of rows M alone, as a problem with M = 0; None where rows
    are no layer's: of batches and groups, and where A or C is column-major."""
    by_rows = problem.batch == 1 and problem.groups is None and problem.a.strides[2] == problem.c.strides[2] == 1
    return replace(problem, M=0) if by_rows else None


def by_weight(entries: Mapping[GemmProblem, Entry]) -> dict[GemmProblem, list[GemmProblem]]:
    """The problems of entries that serve a range of rows, by weight, in the order of M."""
    found: dict[GemmProblem, list[GemmProblem]] = {}
    for problem in sorted((x for x, entry in entries.items() if entry.least_rows), key=lambda x: x.M):
        weight = weight_of(problem)
        if weight is not None:
            found.setdefault(weight, []).append(problem)
    return found


def serving(
    problem: GemmProblem, device: DeviceInfo, entries: Mapping[GemmProblem, Entry], of_weight: list[GemmProblem]
) -> Entry | None:
    """The entry whose range of M includes the problem's, with its schedule recomputed for this M. None if there is no
    such entry, or if the model's choice is expected to be faster.

    Measurement corrects the prediction. Let r(M) be the entry's predicted time over that of the model's choice. The
    entry is used if r(M) is at most r at the measured M times the measured speedup.
    """
    place = bisect_left(of_weight, problem.M, key=lambda x: x.M)
    measured = of_weight[place] if place < len(of_weight) else problem
    entry = entries.get(measured)
    if entry is None or not entry.least_rows <= problem.M < measured.M:
        return None
    algorithm = dealt_out_for(problem, entry.algorithm, device)
    if algorithm is None:
        return None
    lost = _lost(problem, algorithm, device)
    gain = entry.default_us / entry.us
    if lost > _lost(measured, entry.algorithm, device) * gain:
        return None
    return replace(entry, algorithm=algorithm, torch_us=0.0, torch="")  # torch was timed with the measured M alone


def dealt_out_for(problem: GemmProblem, algorithm: Algorithm, device: DeviceInfo) -> Algorithm | None:
    """An algorithm chosen for another M, with its schedule recomputed for this problem and the same split of K. None if
    `schedules` has no such schedule."""
    config, work = algorithm.config, algorithm.work
    if not isinstance(work, Schedule) or not isinstance(config, kernels.warp_specialised.Config):
        return algorithm
    of_work = work.split_k, work.reduction
    found: Iterable[Schedule] = kernels.warp_specialised.schedules(given(problem, algorithm), config, device)
    return next((algorithm._replace(work=x) for x in found if (x.split_k, x.reduction) == of_work), None)


def _lost(problem: GemmProblem, algorithm: Algorithm, device: DeviceInfo) -> float:
    """The predicted time of an algorithm, by that of the model's choice."""
    model = model_of(device)
    own, choice = (
        predicted_or_inf(problem, Candidate(given(problem, x), x), model)
        for x in (algorithm, select(problem, device).algorithm)
    )
    return own / choice
