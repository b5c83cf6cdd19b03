"""All candidates of a GEMM that are worth comparing, with what is predicted and known of each: what `explain` does
not say. Nothing is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .. import kernels, tables
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of, origin
from ..kernels.candidate import Algorithm, Candidate
from ..kernels.launch import materialise
from ..problem import GemmProblem
from ..runtime import kits, plan, policies
from ..runtime.aot import CapturedLaunch, Compiled, compile_launch
from ..runtime.binaries import SCALARS, launches_on, operands_of
from ..runtime.policies import Policy
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, about, credible, illegal, predicted_or_inf, ranked
from ..tables import records


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate, with what is known of it."""

    selection: Selection  # the kernel, its configuration, and how the work is dealt out
    predicted_us: float | None  # microseconds by the cost model; None where it knows nothing of such a configuration
    known_us: float | None  # microseconds by a table, or None
    table: str | None  # which table that is
    bits: str  # its class of bits
    chosen: bool  # whether it is what runs
    compiled: tuple[Compiled, ...] = ()  # its launches as the compiler made them, where that was wanted


@dataclass(frozen=True)
class Comparison:
    """What there is to choose from for a problem on a device, and the choice."""

    problem: GemmProblem
    device: DeviceInfo
    chosen: Selection  # what runs; its source says who chose
    policy: Policy  # under which it was chosen
    model: str  # origin of the cost model's figures
    # The legal ones that are predicted to be fastest, in that order. What runs and what tables have are there in any
    # case.
    fastest: tuple[RankedCandidate, ...]
    candidates: int  # how many were compared
    refused: int  # how many of those the device cannot run


def compare(problem: GemmProblem, device: DeviceInfo, *, limit: int = 10, compiled: int = 0) -> Comparison:
    """The `limit` fastest candidates of `problem` on `device`, as predicted, and what runs under the present policy.

    compiled: how many of the first candidates are compiled, for their registers and shared memory. That takes seconds
    each. Raises RuntimeError where no kernel can compute it, or the policy is "error" and no table has it.
    """
    chosen = plan.selection_for(problem, device)
    chosen = replace(chosen, kit=kits.serves(problem, device, chosen))
    model = model_of(device)
    every = ranked(problem, device)
    legal: dict[Algorithm, tuple[float, Selection]] = {}
    refused = 0
    for time, candidate in every:
        if illegal(problem, device, candidate) is None:
            legal.setdefault(candidate.algorithm, (time, Selection.of(candidate, about(time, problem, device))))
        else:
            refused += 1
    known: dict[Algorithm, tuple[float, str]] = {}
    by_model = policies.by_model(problem, device)
    offered = [chosen]  # which is no candidate of everyone's under batch invariance
    for source, entry in tables.known(problem, device):
        if records.illegal(problem, device, entry.algorithm) is None:
            known.setdefault(entry.algorithm, (entry.us, source))
            if records.named(by_model) == entry.default:  # and not what the model chose before a calibration
                known.setdefault(by_model.algorithm, (entry.default_us, source))
            offered.append(entry.selection(problem, source))
    for selection in offered:
        time = predicted_or_inf(problem, _candidate(problem, selection.algorithm), model)
        legal.setdefault(selection.algorithm, (time, selection))
    order = sorted(legal, key=lambda algorithm: legal[algorithm][0])
    fastest = []
    for rank, algorithm in enumerate(
        x for i, x in enumerate(order) if i < limit or x == chosen.algorithm or x in known
    ):
        time, selection = legal[algorithm]
        us, table = known.get(algorithm, (None, None))
        one = RankedCandidate(
            selection=selection,
            predicted_us=None if time == math.inf else credible(time, problem, device),
            known_us=us,
            table=table,
            bits=bit_class(problem, selection),
            chosen=algorithm == chosen.algorithm,
            compiled=_compiled(problem, selection, device) if rank < compiled else (),
        )
        fastest.append(one)
    return Comparison(
        problem=problem,
        device=device,
        chosen=chosen,
        policy=policies.current_policy(),
        model=origin(device),
        fastest=tuple(fastest),
        candidates=len(every),
        refused=refused,
    )


def _candidate(problem: GemmProblem, algorithm: Algorithm) -> Candidate:
    given = kernels.repack.repacked(problem, algorithm.packed)
    return Candidate(given.swap_ab() if algorithm.swap_ab else given, algorithm)


def _compiled(problem: GemmProblem, selection: Selection, device: DeviceInfo) -> tuple[Compiled, ...]:
    """What the compiler makes of a selection's launches."""
    made = launches_on(device, problem, selection)
    operands = operands_of(problem, made)
    launches = (CapturedLaunch(x.kernel, {**materialise(x, operands, SCALARS), **x.options}) for x in made)
    return tuple(compile_launch(launch, device.capability) for launch in launches)
