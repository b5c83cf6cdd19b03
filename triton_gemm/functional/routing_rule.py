"""A rule of `use` or `enable`: which of torch's products are routed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch

from .. import arguments
from ..arithmetic import FLOATING
from .fast_path import FastPath
from .other_products import PRODUCTS

# By aten's name: where a and b are among the arguments.
ROUTED = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
Wanted = Callable[[str, torch.Tensor, torch.Tensor], bool]
FirstCalls = Literal["same bits", "torch"]
Kind = str | torch.dtype  # one of the names in ROUTED and PRODUCTS, or operands' dtype
Kinds = frozenset[Kind]


@dataclass(frozen=True, eq=False)  # two blocks with equal rules have one each
class Rule:
    """What is routed: names of ROUTED and dtypes, all but those of `exclude`; where `predicate(op, a, b)`, if given.
    only: empty for all. first_calls: what computes while kernels are compiled. learn: whether kernels are timed in
    service. fast: the calls that were made under equal rules. owner: the package that called `enable`, or None for a
    block's. off: why nothing is routed, whatever the rest says."""

    only: Kinds
    exclude: Kinds
    predicate: Wanted | None
    first_calls: FirstCalls
    learn: bool = False
    fast: FastPath = field(default_factory=FastPath)
    owner: str | None = None
    off: str | None = None

    def refuses(self, name: str, a: torch.Tensor, b: torch.Tensor) -> str | None:
        """Why this call stays torch's, or None."""
        if why := self.off or _left_out(name, a.dtype, self.only, self.exclude):
            return why
        if self.predicate is None:
            return None
        try:
            wanted = self.predicate(name, a, b)
        except Exception as error:  # a TypeError would make Python say that tensors have no @
            raise RuntimeError(f"use(): the predicate raised {type(error).__name__}: {error}") from error
        if type(wanted).__name__ not in ("bool", "bool_", "SymBool"):  # Python's, NumPy's, and of a traced size
            raise RuntimeError(f"use(): the predicate must return a bool, not {type(wanted).__name__}")
        return None if wanted else "the predicate says no"


def _left_out(name: str, dtype: torch.dtype, only: Kinds, exclude: Kinds) -> str | None:
    """Why that operator is not routed for operands of that dtype, or None."""
    for kind in (name, dtype):
        same = {x for x in only if isinstance(x, type(kind))}
        if kind in exclude:
            return f"{kind} is excluded"
        if same and kind not in same:
            return f"{kind} is not in only="
    return None


@lru_cache(64)  # a training loop may enter an equal rule at every step
def _routes_any(only: Kinds, exclude: Kinds) -> bool:
    """Whether some operator is routed for a dtype that it computes."""
    computed = {**dict.fromkeys(ROUTED, FLOATING), **{name: x.dtypes for name, x in PRODUCTS.items()}}
    return any(_left_out(name, x, only, exclude) is None for name, dtypes in computed.items() for x in dtypes)


def kinds_of(
    function: str, only: Kind | Collection[Kind] | None, exclude: Kind | Collection[Kind]
) -> tuple[Kinds, Kinds]:
    """`only`, where empty means all, and `exclude` of a rule. ValueError where they have unknown names, or route
    nothing."""
    found = _kinds(function, "only", () if only is None else only), _kinds(function, "exclude", exclude)
    if only is not None and not found[0]:
        raise ValueError(f"{function}(): nothing is routed, as only is empty; leave it out to route everything")
    if not _routes_any(*found):
        given = zip(("only", "exclude"), found, strict=True)
        words = " and ".join(f"{name} of {', '.join(sorted(map(str, x)))}" for name, x in given if x)
        raise ValueError(f"{function}(): nothing is routed, as {words} leaves no operator with a dtype it computes")
    return found


def _kinds(function: str, name: str, given: Kind | Collection[Kind]) -> Kinds:
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
