"""Products of torch's dispatcher that the extension launches, or leaves to torch: no Python runs for calls in a table.

They are registered once in a process, and never withdrawn or freed: torch frees what is withdrawn, and any thread may
be running it, also one that Python did not start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..problem import SUM

log = logging.getLogger("triton_gemm")


class Places(NamedTuple):
    """Where a product has its operands and factors among its arguments; -1: it has none."""

    a: int
    b: int
    input: int = -1
    alpha: int = -1
    beta: int = -1
    out: int = -1


class NativeProducts:
    """Kernels of the extension for some operators, which look their calls up in one table.

    Python decides a call that is not in the table, or the kernel that was registered before. All calls go to that
    kernel unless these are `route`d.

    Args:
        products: The operators, as "aten::mm.out": what the table has their calls by (`FastPath.take`), and where their
            operands are. None: the table has none of them.
    """

    def __init__(self, products: Mapping[str, tuple[str, Places | None]]) -> None:
        self._products = products
        self._group = -1
        self.extension: Any = None  # while they are registered
        self._counts: Callable[[int, bool, bool], dict[str, int]] = lambda *_: {}  # then the extension's

    @property
    def registered(self) -> bool:
        return self.extension is not None

    def register(
        self, keys: Sequence[str], extension: Any, python: Mapping[str, Callable[..., Any] | None] | None = None
    ) -> None:
        """Registers a C++ kernel for each operator and dispatch key. If one cannot be registered, none is: `registered`
        is then False, and calls go on through Python. Nothing is done without an extension.

        No other thread may be calling a kernel of ours under these keys: torch replaces a kernel in several steps.

        Args:
            keys: Dispatch keys, as "CUDA".
            python: The operators to register, by default all. Each comes with what decides a call without a table
                entry: a Python function, or None, which passes all such calls on to the kernel that was registered
                before. An operator with neither a function nor Places is always passed on. Its calls are counted in
                `left` by the name that `products` has for it.
        """
        if extension is None:
            return
        if self._group < 0:
            self._group = extension.group()
        python = dict.fromkeys(self._products) if python is None else python
        self.extension, self._counts = extension, extension.counted
        try:
            for operator, key in product(python, keys):
                op, places = self._products[operator]
                extension.register(self._group, operator, key, python[operator], op, SUM, places)
        except BaseException as error:
            self.unregister()
            if not isinstance(error, (RuntimeError, ValueError)):  # of a signal's handler
                raise
            log.debug("products go on through Python: %s", error)

    def unregister(self) -> None:
        """Takes the kernels back from torch's dispatcher. They stay in memory, as threads may be running them."""
        if self.extension is not None:
            self.extension.unregister(self._group)
            self.extension = None

    def route(self, active: bool, table: Any) -> None:
        """Whether calls are these kernels', and the table (`FastPath.table`) that they are looked up in; None: in none,
        so that Python decides all."""
        if self.extension is not None:
            self.extension.route(self._group, active, table)

    def change(self, rules: list[Any], function: Callable[..., Any], *arguments: Any) -> Any:
        """What function(*arguments) returns, which changes the list of rules. From then on calls are routed as its last
        rule has it: by `rule.fast.table`, or by Python where `rule.predicate` is one. No signal's handler and no other
        thread runs in between, so that this list and C++ never differ."""
        if self.extension is None:
            return function(*arguments)
        return self.extension.change(self._group, rules, function, arguments)

    def leave(self, table: Any, call: tuple[Any, ...], name: str) -> None:
        """Has calls like this one (the arguments of `FastPath.table.take`) be torch's under that table, and counted by
        this name."""
        self.extension.leave(self._group, table, call, name)

    def launched(self, reset: bool) -> dict[str, int]:
        """How many calls of each product C++ has launched since the last reset, by what the table has them by."""
        return self._counts(self._group, False, reset)

    def left(self, reset: bool) -> dict[str, int]:
        """How many calls C++ has left to torch since the last reset, by the names of `leave` and those that it counts
        alone."""
        return self._counts(self._group, True, reset)
