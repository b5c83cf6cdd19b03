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

    def begin(self, key: str, extension: Any) -> None:
        """Overrides them for that dispatch key, if there is an extension: no other thread must be calling them."""
        if self._extension is None and extension is not None:
            self._extension = extension
            for overload in self._overloads:
                extension.override(overload, key, self._of, SUM)

    def show(self, table: Any) -> None:
        """Has calls looked up in this table (`FastPath.table`), once they are overridden; None: in none."""
        self.table = table
        if self._extension is not None:
            self._extension.route(table)

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
