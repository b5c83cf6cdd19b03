"""Launches of rungs that must raise before anything is read or written, wherever they run.

All rungs share one check. So each wrong launch is made on one rung, in turn, and on every rung only what its own record
refuses: `OWN`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton

from triton_gemm.config import GemmConfig
from triton_gemm.ladder import Rung

M, N, K = 48, 32, 64
# What a rung's dtypes, fields, least and most refuse.
OWN = {"other-dtype", "two-dtypes", "c-half", "zero", "too-many-warps", "group", "no-group", "no-k", "short-k"}
OWN |= {"narrow-n", "narrow-m", "wide-n", "32-warps", "one-slot", "half-a-warpgroup", "too-few-rows"}


@dataclass(frozen=True)
class Wrong:
    """What is passed, the exception that it must raise, and a pattern of its text."""

    operands: tuple[Any, Any, Any]
    error: type[Exception]
    text: str
    config: Any = None
    configs: Any = None
    alpha: Any = 1.0
    beta: Any = 2.0

    def launch(self, rung: Rung) -> None:
        rung.launch(*self.operands, self.alpha, self.beta, config=self.config, configs=self.configs)


def right_operands(rung: Rung, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = (torch.ones(shape, dtype=rung.dtypes[0], device=device) for shape in ((M, K), (K, N), (M, N)))
    return a, b, c


def wrong_operands(rung: Rung, device: str) -> dict[str, Wrong]:
    """Operands that `rung` must refuse, on `device`, by what is wrong with them."""
    dtype = rung.dtypes[0]
    other = torch.float16 if dtype == torch.float32 else torch.float32

    empty = partial(torch.ones, dtype=dtype, device=device)
    a, b, c = right_operands(rung, device)
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
        "other-dtype": Wrong((a.to(other), b.to(other), c.to(other)), TypeError, "a is float"),
        "b-other-dtype": Wrong((a, b.to(other), c), TypeError, "b is float.*pass"),
        "integers": Wrong((a.to(torch.int32), b.to(torch.int32), c), TypeError, "a is int32; pass float"),
        "c-integer": Wrong((a, b, c.to(torch.int32)), TypeError, "c is int32; pass"),
        "c-fp64": Wrong((a, b, c.double()), TypeError, "c is float64; pass"),
        "a-list": Wrong(([[1.0]], b, c), TypeError, "a is of type list; pass a torch.Tensor"),
        "c-none": Wrong((a, b, None), TypeError, "c is of type NoneType"),
        "sparse": Wrong((torch.eye(K, dtype=dtype).to_sparse(), b, empty(K, N)), TypeError, "to_dense"),
    }
    if dtype != torch.float32:
        found["two-dtypes"] = Wrong((a, b.bfloat16(), c), TypeError, "a is float16 and b bfloat16; convert")
    else:
        found["c-half"] = Wrong((a, b, c.half()), TypeError, "c is float16; pass float32")
    return found


def wrong_configs(rung: Rung, device: str) -> dict[str, Wrong]:
    """Configurations that `rung` must refuse."""
    a, b, c = right_operands(rung, device)
    right = rung.configs[0]
    size = "BLOCK_N" if right.BLOCK_M is None else "BLOCK_M"
    configs: dict[str, tuple[Any, str]] = {
        "nothing": (GemmConfig(), f"lacks {size}"),
        "not-a-power": (replace(right, **{size: 48}), f"{size} is 48, not a power of two"),
        "zero": (replace(right, **{size: 0}), f"{size} is 0, not a whole number from {rung.least.get(size, 1)} "),
        "negative-stages": (replace(right, num_stages=-1), "num_stages is -1"),
        "three-warps": (replace(right, num_warps=6), "num_warps is 6, not a power of two"),
        "text": (replace(right, **{size: "64"}), f"{size} is '64'"),
    }
    if right.GROUP_M is None:
        configs["group"] = (replace(right, GROUP_M=8), "this kernel has no GROUP_M")
    else:
        configs["no-group"] = (replace(right, GROUP_M=None), "lacks GROUP_M")
    if right.BLOCK_K is not None:
        configs["no-k"] = (replace(right, BLOCK_K=None), "lacks BLOCK_K")
        configs["short-k"] = (replace(right, BLOCK_K=8), "BLOCK_K is 8, not a whole number from 16")
    most = rung.most.get("num_warps", 32)
    configs["too-many-warps"] = (replace(right, num_warps=64), f"num_warps is 64, and this kernel takes {most} at most")
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
    found = {
        name: Wrong((a, b, c), ValueError, f"{rung.name} cannot take.*{text}.*--list", config)
        for name, (config, text) in configs.items()
    }
    found["tuple"] = Wrong((a, b, c), TypeError, "config is of type tuple; pass a triton_gemm", (64, 64, 16))
    return found


def wrong_lists(rung: Rung, device: str) -> dict[str, Wrong]:
    """Lists of configurations that `rung` must refuse."""
    a, b, c = right_operands(rung, device)
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
    found = {name: Wrong((a, b, c), error, text, configs=configs) for name, (configs, error, text) in lists.items()}
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
        f"{name}-{kind}": Wrong(right_operands(rung, device), error, f"{rung.name}: {name} {text}", **{name: value})
        for name in ("alpha", "beta")
        for kind, (value, error, text) in values.items()
    }


def wrong_launches(rung: Rung, device: str) -> dict[str, Wrong]:
    kinds = (wrong_operands, wrong_configs, wrong_lists, wrong_numbers)
    return {name: wrong for kind in kinds for name, wrong in kind(rung, device).items()}


def cases(rungs: Iterable[Rung], device: str, *, own: bool) -> pytest.MarkDecorator:
    """A test's `rung` and `wrong`. own: whether those of `OWN` are among them. What raises other words is another."""
    found: dict[Hashable, list[Any]] = {}
    for rung in rungs:
        for name, wrong in wrong_launches(rung, device).items():
            key = (rung.id, name) if name in OWN else (name, wrong.text.replace(rung.name, ""))
            if own or name not in OWN:
                found.setdefault(key, []).append(pytest.param(rung, wrong, id=f"{rung.id}-{name}"))
    chosen = [those[turn % len(those)] for turn, those in enumerate(found.values())]
    return pytest.mark.parametrize(("rung", "wrong"), chosen)
