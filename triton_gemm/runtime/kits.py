"""The kits that this process uses (`kit`): the package's own, and a user's, which TRITON_GEMM_KIT names.

A kernel that no kit has is compiled. A kit that is damaged, or that the driver refuses, is warned of once and not used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from ..compat import INTERPRETED, MachineCode, compiles_anew
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels import forms
from ..kernels.candidate import Candidate
from ..kernels.launch import Launch
from ..problem import GemmProblem
from ..selection import generation
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, about, given, illegal, predicted, remembered, within
from ..tables.files import TRITON
from . import kit
from .binaries import identities, identity
from .native_file import open_safely, setting

VARIABLE = "TRITON_GEMM_KIT"
SHIPPED = kit.PACKAGE / "kits"
NAMES = {(9, 0): "sm_90a.kit"}  # by compute capability
TIES = 1.02  # of the least predicted time, to which a kernel that a kit has is chosen: the model's error is more
ANOTHER = 1.1  # likewise with a Triton that is not the kits', of the time of what that would take seconds to compile

log = logging.getLogger("triton_gemm")


@lru_cache(maxsize=8)
def used(capability: tuple[int, int]) -> list[kit.Kit]:
    """Those for GPUs of a compute capability: the user's first. None under TRITON_GEMM_KIT=0, and in Triton's
    interpreter. A user's kit of another Triton is left out where the package's is of the installed one, whose kernels
    it would replace. One that turns out to be damaged is taken out."""
    if INTERPRETED or capability not in NAMES or (named := setting(VARIABLE)) == "0":
        return []
    found = [] if named == "1" else _opened(Path(named), checked=True)
    shipped = _opened(own) if (own := SHIPPED / NAMES[capability]).exists() else []
    for of, why in [(x, why) for x in found if (why := left_out(x, shipped))]:
        found.remove(of)
        _warn(of.name, ValueError(why))
    return [x for x in found + shipped if x.capability == capability]


def left_out(of: kit.Kit, shipped: Sequence[kit.Kit]) -> str | None:
    """Why a user's kit is not used beside the package's, or None."""
    if triton_of(of) == TRITON or all((triton_of(x), x.capability) != (TRITON, of.capability) for x in shipped):
        return None
    return f"Triton {triton_of(of)} has built it, and this is {TRITON}, as is the package's kit"


def exist() -> bool:
    """Whether this process may use kits, on a GPU that they are for."""
    named = setting(VARIABLE)
    return named != "0" and (named != "1" or any((SHIPPED / name).exists() for name in NAMES.values()))


def _opened(file: Path, checked: bool = False) -> list[kit.Kit]:
    """The kit of a file, or an empty list if it cannot be used.

    checked: refuse a file that another user could have written. It is then read through its descriptor, which stays
    open, because another file may take its name.
    """
    try:
        return [kit.read(Path(f"/proc/self/fd/{open_safely(file)}") if checked else file, file)]
    except (OSError, ImportError, kit.DamagedError) as error:
        _warn(file, error)
        return []


def code_of(
    launch: Launch, operands: Mapping[str, torch.Tensor], capability: tuple[int, int], foreign: bool = False
) -> tuple[MachineCode, kit.Kit] | None:
    """A launch's machine code, and the kit of `made` that has it; None where it is to be compiled."""
    kits = made(capability, foreign)
    if not kits or compiles_anew():
        return None
    key = kit.key_of(identity(launch, operands))
    for of in kits:
        try:
            if (code := of.find(key)) is not None:
                return code, of
        except (OSError, ValueError, kit.DamagedError) as error:
            refuse(of, error)
    return None


def made(capability: tuple[int, int], foreign: bool = False) -> list[kit.Kit]:
    """The kits in use that the installed Triton has made, or those of another. What is not chosen from the latter runs
    machine code of the former alone, as nobody has compared the bits of two versions in every kernel."""
    return [x for x in used(capability) if (triton_of(x) != TRITON) == foreign]


def others(capability: tuple[int, int]) -> list[str]:
    """The minor versions of Triton that compiled the kits in use, but for the installed one."""
    return [*dict.fromkeys(map(triton_of, made(capability, True)))]


def triton_of(of: kit.Kit) -> str:
    """The minor version of Triton that compiled a kit."""
    return ".".join(of.made_by.get("triton", "").split(".")[:2])


def contents(capability: tuple[int, int]) -> str:
    """Of all kits in use a hash each: equal where they hold the same machine code of the same sources."""
    if compiles_anew():
        return "none"
    return ", ".join(of.digest for of in used(capability)) or "none"


@generation.of_models(4096)
def choice(problem: GemmProblem, device: DeviceInfo) -> Selection | None:
    """The model's choice in the forms of kits (`forms`), or the first of its `ties`, of which kits hold all kernels.
    Where the installed Triton is not the kits', it may take ANOTHER times as long as what that would compile."""
    if not used(device.capability):
        return None
    alone = problem.to_choose_for()
    try:
        by_model, foreign = remembered(alone, device, True), bool(others(device.capability))
        limit_us = ANOTHER * _predicted(alone, device, remembered(alone, device)) if foreign else 0.0
    except RuntimeError:  # there is none
        return None
    with forms.of_kits():
        found = ties(problem, device, by_model, limit_us)
        return next((x for x in found if holds(problem, device, x, foreign)), None)


def ties(problem: GemmProblem, device: DeviceInfo, by_model: Selection, limit_us: float = 0.0) -> Iterator[Selection]:
    """The model's choice, then legal candidates of its class of bits that are predicted to take at most TIES times as
    long, or `limit_us`, the fastest first. All are marked as a kit's."""
    yield replace(by_model, kit=True)
    wanted = bit_class(problem, by_model)
    limit_us = max(limit_us, TIES * _predicted(problem.to_choose_for(), device, by_model))
    for time_us, candidate in ranked_within(problem, device, limit_us):
        other = candidate.algorithm != by_model.algorithm and bit_class(problem, candidate) == wanted
        if other and illegal(problem, device, candidate) is None:
            yield replace(Selection.of(candidate, about(time_us, problem, device)), kit=True)


def ranked_within(problem: GemmProblem, device: DeviceInfo, limit_us: float) -> Iterator[tuple[float, Candidate]]:
    """`within`, of a problem that may store what its activation is applied to, which no choice depends on."""
    for time_us, (_, algorithm) in within(problem.to_choose_for(), device, limit_us):
        yield time_us, Candidate(given(problem, algorithm), algorithm)


def _predicted(problem: GemmProblem, device: DeviceInfo, selection: Selection) -> float:
    own = Candidate(given(problem, selection.algorithm), selection.algorithm)
    return predicted(problem, own, model_of(device))


def holds(problem: GemmProblem, device: DeviceInfo, selection: Selection, foreign: bool = False) -> bool:
    """Whether kits of `made` have all kernels of a selection, from the sources of now."""
    kits = made(device.capability, foreign)
    if not kits or compiles_anew():
        return False
    keys = [kit.key_of(x) for x in identities(device, problem, selection)]
    return all(any(key in of.kernels and of.is_current(key) for of in kits) for key in keys)


def serves(problem: GemmProblem, device: DeviceInfo, selection: Selection) -> bool:
    """Whether a selection runs machine code of kits alone."""
    return selection.kit or holds(problem, device, selection)


def refuse(of: kit.Kit, error: Exception) -> None:
    """Has a kit not be used any more."""
    for kits in (used(capability) for capability in NAMES):
        with suppress(ValueError):  # another thread was first
            kits.remove(of)
            generation.advance_models()  # choices depended on it
            _warn(of.name, error)


def _warn(file: Path, error: Exception) -> None:
    log.warning("%s is not used, and its kernels are compiled: %s", file, error)
