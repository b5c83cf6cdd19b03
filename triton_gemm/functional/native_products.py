"""Products of torch's dispatcher that the extension launches: kernels that run no Python for calls in a table.

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

    A call that is not in the table goes to Python's kernel, and all calls go to the kernel that was there before unless
    these are `route`d.

    Args:
        products: The operators, as "aten::mm.out": what their calls say to `FastPath.take`, and their arguments.
        python: For an operator the one whose kernel is Python's, for the same dispatch key and arguments.
        anew: Called when the kernel that was there before is gone, as another library has taken its own back.
    """

    def __init__(
        self,
        products: Mapping[str, tuple[str, Places]],
        python: Callable[[str], str] = lambda operator: operator,
        anew: Callable[[], object] | None = None,
    ) -> None:
        self._products, self._python, self._anew = products, python, anew
        self._extension: Any = None  # once they are registered
        self._group = -1

    @property
    def registered(self) -> bool:
        return self._extension is not None

    def register(self, keys: Sequence[str], extension: Any) -> None:
        """Registers the kernels for these dispatch keys, if there is an extension. No kernel of ours may be there that
        another thread is calling: torch replaces a kernel in several steps."""
        if extension is None:
            return
        if self._group < 0:
            self._group = extension.group(self._anew)
        try:
            for (operator, (op, places)), key in product(self._products.items(), keys):
                extension.register(self._group, operator, key, self._python(operator), op, SUM, places)
        except BaseException as error:
            extension.unregister(self._group)
            if not isinstance(error, (RuntimeError, ValueError)):  # of a signal's handler
                raise
            log.debug("products go on through Python: %s", error)
        else:
            self._extension = extension

    def unregister(self) -> None:
        """Takes the kernels back from torch's dispatcher. They stay in memory, as threads may be running them."""
        if self._extension is not None:
            self._extension.unregister(self._group)
            self._extension = None

    def route(self, active: bool, table: Any) -> None:
        """Whether calls are these kernels', and the table (`FastPath.table`) that they are looked up in; None: in none,
        so that all go to Python."""
        if self._extension is not None:
            self._extension.route(self._group, active, table)

    def launched(self, reset: bool) -> dict[str, int]:
        """How many calls of each product C++ has launched since the last reset, by what they say."""
        found: dict[str, int] = {}
        return found if self._extension is None else self._extension.launched(self._group, reset)
