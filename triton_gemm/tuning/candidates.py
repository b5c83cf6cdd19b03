"""What is worth timing for a problem: the model's choice, then what it predicts to be fast, then users' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from .. import kernels
from ..config import TileConfig
from ..hardware.device import DeviceInfo
from ..kernels.candidate import Algorithm, Candidate
from ..kernels.schedule import Schedule
from ..problem import GemmProblem
from ..selection.bit_classes import bit_class
from ..selection.of_configs import OfKernel, of_configs
from ..selection.select import Selection, ranked
from ..tables.files import Bits
from ..tables.records import illegal, nonsense

KEEP = 24  # candidates, the fastest as predicted, of all kernels
LEAST = 3  # at least so many of each kernel
MOST = 3  # and at most so many of one configuration, which differ in how the work is dealt out


def candidates(
    problem: GemmProblem, device: DeviceInfo, choice: Selection, bits: Bits = "same", configs: Sequence[Any] = ()
) -> list[Selection]:
    """`choice`, the model's, and then others that `device` can run: users' own, those without a prediction, and the
    rest in the model's order.

    bits: "same" leaves out what would give other bits than the choice. configs: users' own, as `tune` takes them.
    ValueError for one of these that is no kernel's.
    """
    own = [pair for config in configs for pair in kernels_of(config)]
    same = bit_class(problem, choice)
    found = {choice.algorithm: choice}
    kept: Counter[Any] = Counter()
    given: set[Any] = {(kernel, config) for kernel, config in own}
    predicted = (candidate for _, candidate in ranked(problem, device, bits == "any"))
    for candidate in (*_own(problem, device, own), *kernels.portable.unpredicted(problem, device), *predicted):
        algorithm = candidate.algorithm
        kernel, config, _, swap_ab, packed = algorithm
        theirs = (kernel, config) in given
        of_config = (kernel, config, swap_ab, packed)
        enough = len(found) >= KEEP and kept[kernel] >= LEAST
        if algorithm in found or kept[of_config] >= MOST or (enough and not theirs):
            continue
        selection = Selection.of(candidate, "", "tuner")
        if bits == "same" and not _gives(same, problem, selection):
            continue
        if illegal(problem, device, algorithm) is None:
            found[algorithm] = selection
            kept.update((kernel, of_config))
    return list(found.values())


def refused(
    problem: GemmProblem, device: DeviceInfo, found: Sequence[Selection], bits: Bits, configs: Sequence[Any]
) -> list[tuple[str, str]]:
    """Users' own configurations that none of the candidates `found` has, and what the kernels that they are for say."""
    have = {(selection.kernel, selection.config) for selection in found}
    return [
        (str(config), "; ".join(f"{kernel}: {_refusal(problem, device, kernel, own, bits)}" for kernel, own in pairs))
        for config, pairs in ((config, kernels_of(config)) for config in configs)
        if have.isdisjoint(pairs)
    ]


def _refusal(problem: GemmProblem, device: DeviceInfo, kernel: str, config: TileConfig, bits: Bits) -> str:
    """Why a kernel's configuration is no candidate, in the forms in which the kernel would run it or a plain one."""
    whys = [illegal(problem, device, own.algorithm) for own in _own(problem, device, [(kernel, config)])]
    if None in whys:
        return f"its bits are not those of the model's choice, and bits={bits!r} needs them"
    work = Schedule(1) if isinstance(config, kernels.warp_specialised.Config) else 1
    whys.append(illegal(problem, device, Algorithm(kernel, config, work)))
    return whys[0] or "it is not for such a product"


def kernels_of(config: Any) -> list[tuple[str, TileConfig]]:
    """The kernels that a user's configuration is for, and their own form of it: that of a kernel's Config is one, and a
    triton.Config is for every kernel that has all of its parameters. ValueError where it is for none."""
    named = {name: kernels.named(name).Config for name in kernels.KERNELS}
    if isinstance(config, TileConfig):
        found = [(name, config) for name, kind in named.items() if type(config) is kind]
    else:
        figures = dict(getattr(config, "kwargs", None) or {})
        figures |= {name: getattr(config, name, None) for name in ("num_warps", "num_stages")}
        sizes = {"BLOCK_M", "BLOCK_N", "BLOCK_K"}
        found = [
            (name, kind(**figures))
            for name, kind in named.items()
            if sizes <= figures.keys() <= {field.name for field in fields(kind)} and None not in figures.values()
        ]
    found = [(name, own) for name, own in found if nonsense(Algorithm(name, own)) is None]
    if not found:
        raise ValueError(
            "configs must be Configs of kernels, or triton.Config with BLOCK_M, BLOCK_N, BLOCK_K and what else a "
            f"kernel has (GROUP_M, CLUSTER_M, CLUSTER_N), in sizes that tiles can have, not {config}"
        )
    return found


def _own(problem: GemmProblem, device: DeviceInfo, own: Iterable[OfKernel]) -> Iterator[Candidate]:
    """Users' configurations, the fastest candidate of each first."""
    for found in of_configs(problem, device, own):
        yield from (candidate for _, candidate in found)


def _gives(same: str, problem: GemmProblem, selection: Selection) -> bool:
    try:
        return bit_class(problem, selection) == same
    except Exception:  # a user's configuration, of which no kernel can say in which order it sums
        return False
