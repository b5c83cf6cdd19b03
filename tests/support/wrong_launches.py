"""Launches of rungs that must raise before anything is read or written, wherever they run.

All rungs share one check. So each wrong launch is made on one rung, in turn (`in_turn`), and on every rung what its own
record refuses: dtypes, fields, least and most (`of_each`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton

from triton_gemm.config import GemmConfig
from triton_gemm.ladder import Rung

M, N, K = 48, 32, 64


@dataclass(frozen=True)
class Wrong:
    """What is passed, the exception that it must raise, and a pattern of its text."""

    operands: tuple[Any, Any, Any]
    error: type[Exception]
    says: str
    config: Any = None
    configs: Any = None
    alpha: Any = 1.0
    beta: Any = 2.0

    def launch(self, rung: Rung) -> None:
        rung.launch(*self.operands, self.alpha, self.beta, config=self.config, configs=self.configs)


def other_dtype(rung: Rung) -> torch.dtype:
    """One that it does not take."""
    return torch.float16 if rung.dtypes[0] == torch.float32 else torch.float32


def matrices(rung: Rung, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands that it takes."""
    a, b, c = (torch.empty(x, dtype=rung.dtypes[0], device=device).fill_(1) for x in ((M, K), (K, N), (M, N)))
    return a, b, c


def cannot_take(rung: Rung, device: str, configs: dict[str, tuple[Any, str]]) -> dict[str, Wrong]:
    return {
        name: Wrong(matrices(rung, device), ValueError, f"{rung.name} cannot take.*{says}.*--list", config)
        for name, (config, says) in configs.items()
    }


def largest(rung: Rung) -> str:
    """The side of its tiles that every rung has."""
    return "BLOCK_N" if rung.configs[0].BLOCK_M is None else "BLOCK_M"


def wrong_operands(rung: Rung, device: str) -> dict[str, Wrong]:
    """Operands that `rung` must refuse, on `device`, by what is wrong with them."""
    dtype = rung.dtypes[0]
    other = other_dtype(rung)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).fill_(1)

    a, b, c = empty(M, K), empty(K, N), empty(M, N)
    found = {
        "a-1d": Wrong((empty(K), b, c), ValueError, r"a has shape \(64,\)"),
        "b-3d": Wrong((a, empty(1, K, N), c), ValueError, r"b has shape \(1, 64, 32\)"),
        "c-1d": Wrong((a, b, empty(M * N)), ValueError, "c has shape"),
        "inner-sizes": Wrong((a, empty(K + 16, N), c), ValueError, "b wants 64 rows"),
        "c-too-small": Wrong((a, b, empty(M, 16)), ValueError, r"c has shape \(48, 16\).*wants \(48, 32\)"),
        "c-too-large": Wrong((a, b, empty(M + 16, N)), ValueError, r"wants \(48, 32\)"),
        "c-transposed": Wrong((a, b, empty(N, M)), ValueError, r"wants \(48, 32\)"),
        "c-expanded": Wrong((a, b, empty(1, N).expand(M, N)), ValueError, "c is expanded.*contiguous"),
        "c-in-itself": Wrong((a, b, empty(M + N).as_strided((M, N), (1, 1))), ValueError, "c is expanded.*contiguous"),
        "c-of-long-rows": Wrong((a, b, empty(M * N).as_strided((M, N), (N - 1, 1))), ValueError, "share memory"),
        "b-other-dtype": Wrong((a, b.to(other), c), TypeError, "b is float.*pass"),
        "integers": Wrong((a.to(torch.int32), b.to(torch.int32), c), TypeError, "a is int32; pass float"),
        "c-integer": Wrong((a, b, c.to(torch.int32)), TypeError, "c is int32; pass"),
        "c-fp64": Wrong((a, b, c.double()), TypeError, "c is float64; pass"),
        "a-list": Wrong(([[1.0]], b, c), TypeError, "a is of type list; pass a torch.Tensor"),
        "c-none": Wrong((a, b, None), TypeError, "c is of type NoneType"),
        "sparse": Wrong((torch.eye(K, dtype=dtype).to_sparse(), b, empty(K, N)), TypeError, "to_dense"),
    }
    return found


def wrong_configs(rung: Rung, device: str) -> dict[str, Wrong]:
    """Configurations that no rung takes."""
    right, size = rung.configs[0], largest(rung)
    found = cannot_take(
        rung,
        device,
        {
            "nothing": (GemmConfig(), f"lacks {size}"),
            "not-a-power": (replace(right, **{size: 48}), f"{size} is 48, not a power of two"),
            "negative-stages": (replace(right, num_stages=-1), "num_stages is -1"),
            "three-warps": (replace(right, num_warps=6), "num_warps is 6, not a power of two"),
            "text": (replace(right, **{size: "64"}), f"{size} is '64'"),
        },
    )
    says = "config is of type tuple; pass a triton_gemm"
    return {**found, "tuple": Wrong(matrices(rung, device), TypeError, says, (64, 64, 16))}


def beyond_its_record(rung: Rung, device: str) -> dict[str, Wrong]:
    """Dtypes and configurations that this rung does not take, though others may."""
    right, size, (a, b, c) = rung.configs[0], largest(rung), matrices(rung, device)
    least, most = rung.least.get(size, 1), rung.most.get("num_warps", 32)
    configs: dict[str, tuple[Any, str]] = {
        "zero": (replace(right, **{size: 0}), f"{size} is 0, not a whole number from {least}"),
        "too-many-warps": (replace(right, num_warps=64), f"num_warps is 64, and this kernel takes {most} at most"),
    }
    if right.GROUP_M is None:
        configs["group"] = (replace(right, GROUP_M=8), "this kernel has no GROUP_M")
    else:
        configs["no-group"] = (replace(right, GROUP_M=None), "lacks GROUP_M")
    if right.BLOCK_K is not None:
        configs["no-k"] = (replace(right, BLOCK_K=None), "lacks BLOCK_K")
        configs["short-k"] = (replace(right, BLOCK_K=8), "BLOCK_K is 8, not a whole number from 16")
    if rung.descriptors:
        configs["narrow-n"] = (replace(right, BLOCK_N=4), "BLOCK_N is 4, not a whole number from 8")
    if rung.id == "k10":
        configs["narrow-m"] = (replace(right, BLOCK_M=4), "BLOCK_M is 4, not a whole number from 8")
    if rung.id == "k11":
        configs["wide-n"] = (replace(right, BLOCK_N=512), "BLOCK_N is 512, and this kernel takes 256 at most")
        configs["32-warps"] = (replace(right, BLOCK_M=512, num_warps=32), "num_warps is 32, .* takes 16 at most")
        configs["one-slot"] = (replace(right, num_stages=1), "num_stages is 1, not a whole number from 2")  # a deadlock
        configs["half-a-warpgroup"] = (replace(right, num_warps=2), "num_warps is 2, not a whole number from 4")
        configs["too-few-rows"] = (replace(right, BLOCK_M=64), "8 warps of this kernel want 128 rows")
    found = cannot_take(rung, device, configs)
    other = (x.to(other_dtype(rung)) for x in (a, b, c))
    found["other-dtype"] = Wrong(tuple(other), TypeError, "a is float")  # type: ignore[arg-type]
    if rung.dtypes[0] != torch.float32:
        found["two-dtypes"] = Wrong((a, b.bfloat16(), c), TypeError, "a is float16 and b bfloat16; convert")
    else:
        found["c-half"] = Wrong((a, b, c.half()), TypeError, "c is float16; pass float32")
    return found


def wrong_lists(rung: Rung, device: str) -> dict[str, Wrong]:
    """Lists of configurations that `rung` must refuse."""
    a, b, c = matrices(rung, device)
    right = rung.configs[0]
    if len(rung.configs) == 1:
        return {"no-tuner": Wrong((a, b, c), ValueError, "has no tuner; pass one configuration", configs=[right])}
    meta, launch = right.meta(), {"num_warps": right.num_warps, "num_stages": right.num_stages}
    clusters = triton.Config(meta, **launch, num_ctas=2)
    lists: dict[str, tuple[Any, type[Exception], str]] = {
        "empty-list": ([], ValueError, "configs is empty"),
        "list-of-tuples": ([right, (64, 64, 16)], TypeError, "configs has a tuple; pass triton.Config or GemmConfig"),
        "list-foreign": ([triton.Config({**meta, "SPLIT_K": 2}, **launch)], ValueError, "this kernel has no SPLIT_K"),
        "list-lacking": ([right, triton.Config({"BLOCK_M": 64}, **launch)], ValueError, "lacks BLOCK_N and BLOCK_K"),
        "list-odd-tile": ([triton.Config({**meta, "BLOCK_M": 96}, **launch)], ValueError, "BLOCK_M is 96, not a power"),
        "list-many-warps": ([triton.Config(meta, num_warps=64)], ValueError, "num_warps is 64, and this kernel takes"),
        "list-number": (5, TypeError, "configs is of type int; pass a list of triton.Config or GemmConfig"),
        "list-none": ([None], TypeError, "configs has a NoneType; pass triton.Config"),
        "list-one": (right, TypeError, "configs is of type GemmConfig; pass a list"),
        "list-text": ("64x64", TypeError, "configs is of type str; pass a list"),
        "list-fields": (meta, TypeError, "configs is of type dict; pass a list"),
        "list-clusters": ([clusters], ValueError, "num_ctas is 2, and rungs run without clusters"),
    }
    found = {name: Wrong((a, b, c), error, says, configs=configs) for name, (configs, error, says) in lists.items()}
    found["one-and-a-list"] = Wrong((a, b, c), ValueError, "config is one.*configs are several", right, [right])
    return found


def wrong_numbers(rung: Rung, device: str) -> dict[str, Wrong]:
    """alpha and beta that `rung` must refuse."""
    values: dict[str, tuple[Any, type[Exception], str]] = {
        "tensor": (torch.tensor(2.0), TypeError, r"is a torch.Tensor; pass a number, as (alpha|beta).item\(\)"),
        "vector": (torch.ones(2), TypeError, "is a torch.Tensor; pass a number"),
        "text": ("2", TypeError, "is of type str; pass a real number"),
        "none": (None, TypeError, "is of type NoneType; pass a real number"),
        "complex": (1j, TypeError, "is of type complex; pass a real number"),
        "too-large": (10**400, ValueError, "is a whole number beyond those of a float"),
    }
    return {
        f"{name}-{kind}": Wrong(matrices(rung, device), error, f"{rung.name}: {name} {says}", **{name: value})
        for name in ("alpha", "beta")
        for kind, (value, error, says) in values.items()
    }


Kind = Callable[[Rung, str], dict[str, Wrong]]


def of_each(rungs: Iterable[Rung], device: str, *kinds: Kind) -> list[tuple[str, Rung, Wrong]]:
    return [(name, rung, x) for rung in rungs for kind in kinds for name, x in kind(rung, device).items()]


def in_turn(rungs: Iterable[Rung], device: str) -> list[tuple[str, Rung, Wrong]]:
    """Each of the wrong launches on one of the rungs that have it; in other words it is another."""
    found: dict[tuple[str, str], list[tuple[str, Rung, Wrong]]] = {}
    for one in of_each(rungs, device, wrong_operands, wrong_configs, wrong_lists, wrong_numbers):
        found.setdefault((one[0], one[2].says.replace(one[1].name, "")), []).append(one)
    return [those[turn % len(those)] for turn, those in enumerate(found.values())]


def cases(found: Iterable[tuple[str, Rung, Wrong]]) -> pytest.MarkDecorator:
    """A test's `rung` and `wrong`."""
    sets = [pytest.param(rung, wrong, id=f"{rung.id}-{name}") for name, rung, wrong in found]
    return pytest.mark.parametrize(("rung", "wrong"), sets)
