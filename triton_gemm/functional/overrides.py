"""Kernels in the place of torch's own, for some overloads of aten: registered once in a process, and never freed.

torch frees a kernel that is taken back, and any thread may be running it. It also replaces one in several steps, and a
thread that multiplies meanwhile may take a part of each: so none of ours is put before another of ours.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ..compat import before_withdrawal, free_in_children, hide_from_dynamo, library_of, withdraw
from ..runtime import native
from .native_products import NativeProducts, Places

Kernel = Callable[..., torch.Tensor | None]  # a result, or None for what is torch's
_lock = free_in_children(threading.RLock())
GONE = "has been invalidated"  # torch's words where the kernel that is called was taken back


class Overrides:
    """Overrides of overloads of aten, as "mm.out", for one dispatch key.

    Args:
        key: The dispatch key.
        kernels: Python's, by overload.
        places: Of those that C++ may launch: where their operands are.
        counted: Of those that are always torch's: what C++ counts them as (`NativeProducts.left`).
        changed: Called after they were registered.
    """

    def __init__(
        self,
        key: str,
        kernels: Mapping[str, Kernel],
        places: Mapping[str, Places],
        counted: Mapping[str, str],
        changed: Callable[[], object],
    ) -> None:
        self._key, self._kernels, self._counted, self._changed = key, kernels, counted, changed
        self._registering = False
        self._torchs: dict[str, Any] = {}  # the kernels that were there before
        self._alive: list[Any] = []
        self.libraries: list[torch.library.Library] = []  # what is registered now
        self.by_cpp = NativeProducts(
            {f"aten::{overload}": (counted.get(overload, overload), places.get(overload)) for overload in kernels}
        )
        self._required = list(places)  # the others are missing in some versions of torch, or for some devices
        library_of("_routed")  # takes back what an earlier one has, where a module is loaded again
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

    def _by_torch(self, overload: str, keys: torch.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
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
        before. C++ need not do so."""
        with _lock:
            self.unregister()
            self._register()

    def _register(self) -> None:
        torchs = {}
        for overload in self._kernels:
            with nullcontext() if overload in self._required else suppress(RuntimeError):
                torchs[overload] = torch.library.get_kernel(f"aten::{overload}", self._key)
        self._torchs.update(torchs)
        python = {f"aten::{x}": None if x in self._counted else self._kernels[x] for x in torchs}
        self.by_cpp.register((self._key,), native.built(), python)
        library = torch.library.Library("aten", "IMPL")
        for overload in () if self.by_cpp.registered else torchs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of every override
                library.impl(overload, self._of_dispatcher(overload), self._key, with_keyset=True)
            self._alive.append(torch.library.get_kernel(f"aten::{overload}", self._key))
        self.libraries.append(library)
        self._changed()

    def _of_dispatcher(self, overload: str) -> Callable[..., Any]:
        """Python's kernel as torch's dispatcher calls it, where C++ does not."""
        decide = self._kernels[overload]

        @hide_from_dynamo
        def kernel(keys: torch.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
            result = decide(*arguments, **named)
            return self._by_torch(overload, keys, *arguments, **named) if result is None else result

        return kernel
