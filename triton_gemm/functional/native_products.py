"""Products that the extension launches: kernels in the place of torch's dispatcher's, which run no Python."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..compat import free_in_children
from ..problem import SUM
from ..runtime import native

# Threads that multiply nothing, by how their names begin: this package's, and the reader of Inductor's workers.
IDLE = ("triton_gemm ", "InductorSubproc")
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
    """Overrides kernels of torch's dispatcher by the extension, and says which table of calls it looks in.

    A call that is not in the table goes on to the kernel that was there. Another library's kernel is not overridden.

    Args:
        products: The operators, as "aten::mm.out": what their calls say to `FastPath.take`, and their arguments.
        of: The Python file that has registered the kernels.
    """

    def __init__(self, products: Mapping[str, tuple[str, Places]], of: str) -> None:
        self._products, self._of = products, of
        self._extension: Any = None  # once it has overridden them
        self._group = -1
        self._asked, self._looked = 0, False
        self._lock = free_in_children(threading.Lock())
        self.table: Any = None

    @property
    def begun(self) -> bool:
        """Whether they are overridden."""
        return self._extension is not None

    def begin(self, keys: Sequence[str], extension: Any) -> None:
        """Overrides them for these dispatch keys, if there is an extension: no other thread must be calling them."""
        if self._extension is not None or extension is None:
            return
        if self._group < 0:
            self._group = extension.group()
        try:
            for (operator, (said, places)), key in product(self._products.items(), keys):
                extension.override(self._group, operator, key, self._of, said, SUM, places)
        except Exception as error:  # in no call's way
            extension.withdraw(self._group)
            log.debug("products go on through Python: %s", error)
        else:
            self._extension = extension

    def begin_built(self, keys: Sequence[str]) -> None:
        """Begins with an extension that was built before, if no other thread can be calling them. It is looked for
        once."""
        if not self._looked and alone():
            self._looked = True
            self.begin(keys, native.built())

    def begin_alone(self, keys: Sequence[str], extension: Any, table: Any) -> None:
        """Shows the table, and begins if no other thread can be calling them. That takes long to tell, so of calls that
        ask again one in 2^n does."""
        with self._lock:
            self._asked += 1
            if self._asked & (self._asked - 1) == 0 and alone():
                self.begin(keys, extension)
            self.show(table)

    def show(self, table: Any) -> None:
        """Has calls looked up in this table (`FastPath.table`), once they are overridden; None: in none."""
        self.table = table
        if self._extension is not None:
            self._extension.route(self._group, table)

    def withdraw(self) -> None:
        """Takes the overrides back."""
        self.table = None
        if self._extension is not None:
            self._extension.route(self._group, None)
            self._extension.withdraw(self._group)
            self._extension = None

    def launched(self, reset: bool) -> dict[str, int]:
        """How many calls of each product C++ has launched since the last reset, by what they say."""
        extension = native.module() if native.state() is None else None
        found: dict[str, int] = {}
        return found if extension is None or self._group < 0 else extension.launched(self._group, reset)


def alone() -> bool:
    """Whether no other thread may be calling torch's products."""
    here = threading.get_ident()
    return all(x.ident == here or x.name.startswith(IDLE) for x in threading.enumerate())
