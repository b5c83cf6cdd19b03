"""Fingerprints of what would be chosen, for ranks of a distributed program to compare before they diverge."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

import torch

from .. import arguments, tables
from ..compat import INTERPRETED
from ..functional.routing import first_calls
from ..hardware.device import INTERPRETER, DeviceInfo
from ..hardware.device_model import model_of, origin
from ..hardware.gpus import given_device
from ..kernels import forms
from ..runtime import kits, policies

MAY_DIFFER = "learned, of the same bits"  # the part that ranks may differ in


@overload
def selection_fingerprint(device: DeviceInfo | str | None = None, *, parts: Literal[False] = False) -> str: ...


@overload
def selection_fingerprint(device: DeviceInfo | str | None = None, *, parts: Literal[True]) -> dict[str, str]: ...


def selection_fingerprint(device: DeviceInfo | str | None = None, *, parts: bool = False) -> str | dict[str, str]:
    """A short hash of everything that decides which kernel runs, to compare processes by.

    Equal fingerprints give equal choices: the policy, the first calls that `use` set, the tuner's name, the tables and
    kits for this GPU, its GPU key and cost model, versions and this package's sources. A choice also depends on the
    GEMM itself and on torch's setting of fp32's precision, which the hash does not contain. Nor does it contain what
    was learned in service, which changes no bit.

    Args:
        device: The GPU, or its name, as "h200"; None: the current one. Without a GPU, None is Triton's interpreter, and
            the part "device" says that there is no GPU.
        parts: Whether to return the hash's parts by name instead, and what was learned.
    """
    arguments.flag("selection_fingerprint", "parts", parts)
    device = given_device("selection_fingerprint", device)
    no_gpu = "no GPU here, so that of " if device == INTERPRETER and not INTERPRETED else ""
    name, bits, invariant = policies.current_policy()
    found = {
        "policy": (name if name == "model" else f"{name}, bits {bits}") + ", batch-invariant" * invariant,
        "first calls": first_calls(),
        "tuner": policies.tuner_name() if name == "tune" else "not asked",
        "tables": "not asked" if name == "model" else _tables(device, bits),
        "kits": kits.contents(device.capability),
        "device": f"{no_gpu}{device.name}, {tables.GpuKey.of(device)}",
        "device model": f"{origin(device)}, {_model(device)}",
        "versions": tables.versions(),
        "sources": _sources(),
    }
    alike = _hash(repr(found))
    found[MAY_DIFFER] = "not asked" if name == "model" else _tables(device, bits, learned=True)
    return found if parts else alike


def check_ranks(group: torch.distributed.ProcessGroup | None = None, device: DeviceInfo | str | None = None) -> None:
    """Raises on every rank of a group if ranks would choose differently, and says in what they differ.

    Such ranks may compute other bits or take other times. Every rank of the group must call it. Ranks are named by
    their numbers among all ranks.

    Args:
        group: Of torch.distributed; None: all ranks.
        device: As in `selection_fingerprint`.

    Raises:
        RuntimeError: Ranks differ. torch.distributed raises its own errors if there is no such group.
    """
    dist = torch.distributed
    mine = selection_fingerprint(device, parts=True)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    differ = []
    for part in (x for x in mine if x != MAY_DIFFER):
        by_value: dict[str, list[int]] = {}  # ranks of the group
        for rank, parts in enumerate(ranks):
            by_value.setdefault(parts[part], []).append(rank)
        if len(by_value) > 1:
            numbers = dist.get_process_group_ranks(group)  # as all of the program count them
            values = "; ".join(
                f"ranks {', '.join(str(numbers[rank]) for rank in which)}: {value}" for value, which in by_value.items()
            )
            differ.append(f"{part} ({values})")
    if differ:
        raise RuntimeError(f"ranks would choose differently, because they differ in {' and in '.join(differ)}")


def _tables(device: DeviceInfo, bits: tables.files.Bits, learned: bool = False) -> str:
    """Of those of the installed Triton, and of the Triton of each kit in use."""
    found = [tables.contents(device, bits, learned=learned)]
    for triton in kits.others(device.capability):
        with forms.of_kits():
            found.append(tables.contents(device, bits, triton, learned))
    return found[0][:16] if len(found) == 1 else _hash("".join(found))


def _model(device: DeviceInfo) -> str:
    """Of the figures that decide choices, and not of where they come from."""
    figures = {name: value for name, value in model_of(device).as_dict().items() if name != "source"}
    return _hash(repr(sorted(figures.items())))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """Of this package, where they are files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))  # all of the package
    return _hash("".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files))
