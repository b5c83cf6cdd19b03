"""Calls like one that Python has planned, which C++ launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import fake_driver
from triton_gemm.functional import fast_path
from triton_gemm.problem import SUM, Request
from triton_gemm.runtime import plan
from triton_gemm.selection.select import select

CALL = ("operation", "a", "b", "auxiliary", "request", "out", "dispatched")


@dataclass
class Call:
    """Calls like one that was planned, by Python and then by C++. copies: whether the last of `auxiliary` is a matrix,
    which is copied into the result first."""

    driver: fake_driver.Driver
    a: torch.Tensor
    b: torch.Tensor
    auxiliary: tuple[torch.Tensor, ...] = ()
    request: Request = SUM
    out: torch.Tensor | None = None
    operation: Any = "mm"
    dispatched: bool = True
    copies: bool = False
    fast: fast_path.FastPath = field(default_factory=fast_path.FastPath)

    def given(self, **others: Any) -> dict[str, Any]:
        """Arguments of the call, with these in the place of the first one's."""
        return {name: others.get(name, getattr(self, name)) for name in CALL}

    def take(self, **others: Any) -> torch.Tensor | None:
        return self.fast.take(**self.given(**others))[1]

    @property
    def made(self) -> torch.Tensor:
        """Its result, or one like it."""
        return self.a.new_empty((*self.a.shape[:-1], self.b.shape[-1])) if self.out is None else self.out

    def new_plan(self) -> plan.GemmPlan:
        bias = "n" if len(self.auxiliary) > self.copies else None
        problem = Request(self.request.alpha, self.copies, bias=bias).problem(self.a, self.b, self.made)
        return plan.GemmPlan(problem, select(problem, fake_driver.HOPPER), self.a.device)

    def plan(self, found: plan.GemmPlan | None = None) -> plan.GemmPlan:
        """Plans and compiles it, and calls it once, by Python."""
        key, c = self.fast.take(**self.given())
        assert c is None
        made, found = self.made, found or self.new_plan()
        found.compile(self.a, self.b, made, *self.auxiliary[: len(self.auxiliary) - self.copies])
        self.fast.keep(key, fast_path.known(found, made, (self.a, self.a), (self.b, self.b), copies=self.copies))
        self.driver.by_python.clear()
        self.take()
        return found

    def planned(self) -> Call:
        self.plan()
        return self

    def by_python(self, **others: Any) -> tuple[torch.Tensor, list[tuple[bytes, ...]]]:
        """The result of a call that Python makes, and the parameters of its launches."""
        self.driver.by_python.clear()
        table, self.fast.table = self.fast.table, None
        c = self.take(**others)
        self.fast.table = table
        return c, [x.parameters for x in self.driver.by_python]

    def by(self, who: str, **others: Any) -> torch.Tensor | None:
        """The result of a call that Python or C++ makes."""
        return self.by_python(**others)[0] if who == "Python" else self.by_cpp(**others)

    def by_cpp(self, **others: Any) -> torch.Tensor | None:
        """The result of a call that C++ makes; None where it leaves it to Python."""
        self.driver.by_python.clear()
        self.driver.seen.clear()
        c = self.take(**others)
        assert not (self.driver.seen and self.driver.by_python)
        return c if self.driver.seen else None
