"""torch's products that the extension launches: kernels in the place of aten's, which run no Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..problem import SUM
from ..runtime import native


class NativeProducts:
    """Overrides overloads of aten's products by the extension, and says which table of calls it looks in.

    What is not in the table goes on to the kernel that was there, which must have been registered by the Python file
    `of`: another library's is not overridden.
    """

    def __init__(self, overloads: Sequence[str], of: str) -> None:
        self._overloads, self._of = overloads, of
        self._extension: Any = None  # once it has overridden them
        self.table: Any = None

    def show(self, table: Any, key: str, begin: bool) -> None:
        """Has calls of that dispatch key looked up in this table (`FastPath.table`); None: in none.

        begin: whether it may override them, if it has not yet: no other thread must be calling them meanwhile.
        """
        self.table = table
        extension = native.module() if self._extension is None and table is not None and begin else self._extension
        if extension is None:
            return
        if self._extension is None:
            self._extension = extension
            for overload in self._overloads:
                extension.override(overload, key, self._of, SUM)
        extension.route(table)

    def withdraw(self) -> None:
        """Takes the overrides back."""
        self.table = None
        if self._extension is not None:
            self._extension.route(None)
            self._extension.withdraw()
            self._extension = None

    def launched(self, reset: bool) -> dict[str, int]:
        """How many calls of each overload it has launched since the last reset."""
        extension = native.module() if native.state() is None else None
        found: dict[str, int] = {} if extension is None else extension.launched(reset)
        return found
