"""A rule of `use` or `enable`: which of torch's products are routed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import torch

from .. import arguments
from .fast_path import FastPath
from .other_products import PRODUCTS

# By aten's name: where a and b are among the arguments.
ROUTED = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
Wanted = Callable[[str, torch.Tensor, torch.Tensor], bool]
FirstCalls = Literal["same bits", "torch"]
Kind = str | torch.dtype  # one of the names in ROUTED and PRODUCTS, or operands' dtype


@dataclass(frozen=True, eq=False)  # two blocks with equal rules have one each
class Rule:
    """What is routed: names of ROUTED and dtypes, all but those of `exclude`; where `predicate(op, a, b)`, if given.
    first_calls: what computes while kernels are compiled. learn: whether kernels are timed in service. fast: the calls
    that were made under equal rules. owner: the package that called `enable`, or None for a block's."""

    only: frozenset[str | torch.dtype]
    exclude: frozenset[str | torch.dtype]
    predicate: Wanted | None
    first_calls: FirstCalls
    learn: bool = False
    fast: FastPath = field(default_factory=FastPath)
    owner: str | None = None

    def refuses(self, name: str, a: torch.Tensor, b: torch.Tensor) -> str | None:
        """Why this call stays torch's, or None."""
        for kind in (name, a.dtype):
            same = {x for x in self.only if isinstance(x, type(kind))}
            if kind in self.exclude:
                return f"{kind} is excluded"
            if same and kind not in same:
                return f"{kind} is not in only="
        if self.predicate is None:
            return None
        try:
            wanted = self.predicate(name, a, b)
        except Exception as error:  # a TypeError would make Python say that tensors have no @
            raise RuntimeError(f"use(): the predicate raised {type(error).__name__}: {error}") from error
        return None if wanted else "the predicate says no"


def kinds_of(function: str, name: str, given: Kind | Collection[Kind]) -> frozenset[Kind]:
    """What `only` or `exclude`, which `name` says, names: one, or several."""
    if isinstance(given, (str, torch.dtype)):
        given = (given,)
    arguments.several(function, name, given)
    several = tuple(given)
    names = *ROUTED, *PRODUCTS
    unknown = [x for x in several if not (isinstance(x, torch.dtype) or (isinstance(x, str) and x in names))]
    if unknown:
        wrong = ", ".join(map(str, unknown))
        raise ValueError(f"{function}(): {name} must have dtypes or names of {', '.join(names)}, not {wrong}")
    return frozenset(several)
