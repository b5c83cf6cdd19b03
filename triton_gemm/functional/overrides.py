"""Kernels in the place of torch's own, for some overloads of aten: registered once in a process, and never freed.

torch frees a kernel that is taken back, and any thread may be running it. It also replaces one in several steps, and a
thread that multiplies meanwhile may take a part of each: so none of ours is put before another of ours.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ..compat import before_withdrawal, free_in_children, library_of, withdraw
from ..runtime import native
from .native_products import NativeProducts, Places

Kernel = Callable[..., Any]
_lock = free_in_children(threading.RLock())
GONE = "has been invalidated"  # torch's words where the kernel that is called was taken back


class Overrides:
    """Overrides of overloads of aten, as "mm.out", for one dispatch key.

    Args:
        key: The dispatch key.
        kernels: Makes the kernels in Python, when they are registered first: those that C++ is put before, where there
            is an extension, and others. Each is given the set of dispatch keys first.
        places: Of the former: where their operands are.
        changed: Called after they were registered anew.
    """

    def __init__(
        self,
        key: str,
        kernels: Callable[[], tuple[Mapping[str, Kernel], Mapping[str, Kernel]]],
        places: Mapping[str, Places],
        changed: Callable[[], object],
    ) -> None:
        self._key, self._make, self._changed = key, kernels, changed
        self._registering = False
        self._kernels: tuple[Mapping[str, Kernel], Mapping[str, Kernel]] | None = None
        self._torchs: dict[str, Any] = {}  # the kernels that were there before
        self._alive: list[Any] = []
        self._has_operators = False
        self.libraries: list[torch.library.Library] = []  # what is registered now
        self.by_cpp = NativeProducts(
            {f"aten::{overload}": (overload, place) for overload, place in places.items()},
            lambda operator: operator.replace("aten::", "triton_gemm::_routed_"),
            self._register_anew,
        )
        self._private = library_of("_routed")  # takes back what an earlier one has, where a module is loaded again
        before_withdrawal("_routed", self.unregister)

    def register(self) -> bool:
        """Registers all, or none where one cannot be overridden; whether that was to do. A signal's handler may come
        here meanwhile."""
        with _lock:
            if self.libraries or self._registering:
                return False
            self._registering = True
            try:
                self._register()
            except BaseException:  # as of a signal's handler: what is registered must be all, or nothing
                self.unregister()
                raise
            finally:
                self._registering = False
        return True

    def unregister(self) -> None:
        """Takes all back from torch's dispatcher, as if nothing had ever been overridden. The kernels stay in memory.
        No other thread may be calling them."""
        with _lock:
            for library in self.libraries:
                withdraw(library)
            self.libraries.clear()
            self.by_cpp.route(False, None)
            self.by_cpp.unregister()

    def by_torch(self, overload: str, keys: torch.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        """What the kernel gives that was there before."""
        kernel = self._torchs[overload]
        try:
            return kernel.call_boxed(keys, *arguments, **named)
        except RuntimeError as error:
            if GONE not in str(error):
                raise
        with _lock:
            if self._torchs[overload] is kernel:  # no other thread was here
                self._register_anew()
        return self._torchs[overload].call_boxed(keys, *arguments, **named)

    def _register_anew(self) -> None:
        """Registers all once more, over what is there now: another library has taken back a kernel that was there
        before."""
        with _lock:
            self.unregister()
            self._register()
        self._changed()

    def _register(self) -> None:
        if self._kernels is None:
            self._kernels = self._make()
        products, others = self._kernels
        torchs = {overload: torch.library.get_kernel(f"aten::{overload}", self._key) for overload in products}
        for overload in others:
            with suppress(RuntimeError):  # this torch has none for the device
                torchs[overload] = torch.library.get_kernel(f"aten::{overload}", self._key)
        self._torchs.update(torchs)
        extension = native.built()
        if extension is not None:
            self._make_operators(products)
            self.by_cpp.register((self._key,), extension)
        library = torch.library.Library("aten", "IMPL")
        for overload, kernel in {**({} if self.by_cpp.registered else products), **others}.items():
            if overload in torchs:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of every override
                    library.impl(overload, kernel, self._key, with_keyset=True)
                self._alive.append(torch.library.get_kernel(f"aten::{overload}", self._key))
        self.libraries.append(library)

    def _make_operators(self, kernels: Mapping[str, Kernel]) -> None:
        """Makes Python's kernels those of operators of their own, which C++ calls."""
        if self._has_operators:
            return
        for overload, kernel in kernels.items():
            name, _, rest = overload.partition(".")
            schema = getattr(getattr(torch.ops.aten, name), rest or "default")._schema
            self._private.define(str(schema).replace("aten::", "_routed_", 1))
            self._private.impl(f"_routed_{overload}", kernel, self._key, with_keyset=True)
        self._has_operators = True
