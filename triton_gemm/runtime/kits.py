"""The kits that this process uses (`kit`): the package's own, and a user's, which TRITON_GEMM_KIT names.

A kernel that no kit has is compiled. A kit that is damaged, or that the driver refuses, is warned of once and not used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from ..compat import MachineCode, compiles_anew
from ..kernels.launch import Launch
from . import kit
from .binaries import identity
from .native_file import open_safely, setting

VARIABLE = "TRITON_GEMM_KIT"
SHIPPED = kit.PACKAGE / "kits"
NAMES = {(9, 0): "sm_90a.kit"}  # by compute capability

log = logging.getLogger("triton_gemm")


@lru_cache(maxsize=8)
def used(capability: tuple[int, int]) -> list[kit.Kit]:
    """Those for GPUs of a compute capability: the user's first. None under TRITON_GEMM_KIT=0. One that turns out to be
    damaged is taken out."""
    given = setting(VARIABLE)
    if given == "0" or capability not in NAMES:
        return []
    found = [] if given == "1" else _opened(Path(given), checked=True)
    if (own := SHIPPED / NAMES[capability]).exists():
        found += _opened(own)
    return [x for x in found if x.capability == capability]


def _opened(file: Path, checked: bool = False) -> list[kit.Kit]:
    """The kit of a file, or an empty list if it cannot be used.

    checked: refuse a file that another user could have written. It is then read through its descriptor, which stays
    open, because another file may take its name.
    """
    try:
        return [kit.read(Path(f"/proc/self/fd/{open_safely(file)}") if checked else file)]
    except (OSError, ImportError, kit.DamagedError) as error:
        _warn(file, error)
        return []


def code_of(
    launch: Launch, operands: Mapping[str, torch.Tensor], capability: tuple[int, int]
) -> tuple[MachineCode, kit.Kit] | None:
    """A launch's machine code, and the kit that has it; None where it is to be compiled."""
    kits = used(capability)
    if not kits or compiles_anew():
        return None
    key = kit.key_of(identity(launch, operands))
    for of in list(kits):
        try:
            if (made := of.find(key)) is not None:
                return made, of
        except (OSError, ValueError, kit.DamagedError) as error:
            refuse(of, error)
    return None


def refuse(of: kit.Kit, error: Exception) -> None:
    """Has a kit not be used any more."""
    for kits in (used(capability) for capability in NAMES):
        with suppress(ValueError):  # another thread was first
            kits.remove(of)
            _warn(of.file, error)


def _warn(file: Path, error: Exception) -> None:
    log.warning("%s is not used, and its kernels are compiled: %s", file, error)
