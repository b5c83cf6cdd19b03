"""The fast path of calls like one before: one lookup and one launch, without checks and views.

A call is like another where its key is equal: function, request, and of every operand all but its address
(`plan.key_of`). What the first of them launched on its own operands, the others launch on theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..compat import (
    INTERPRETED,
    current_device,
    free_in_children,
    in_transform,
    increment_versions,
    must_dispatch,
)
from ..problem import GATES, PRODUCT, SUM, Request
from ..runtime import native, plan, stand_ins

# By operation: the derivative that C++ gives its results, of a @ b (1) or a @ b.T (2), with a bias or without.
DERIVATIVES: dict[Hashable, int] = {"matmul": 1, "mm": 1, "addmm": 1, "triton_gemm::gemm": 1, "linear": 2}
# Of `matrices.function_of`: a linear layer with a gate, without biases or with both.
GATED: tuple[Hashable, ...] = tuple(("linear", no_bias, True, False, no_bias) for no_bias in (False, True))
DERIVATIVES |= dict.fromkeys(GATED, 2)
# By requests whose activation has a derivative in C++: its number there.
_NUMBERS = {name: i for i, name in enumerate(("relu", "gelu", "gelu_tanh", "silu"), 1)}
ACTIVATED = {Request(beta=1, activation=name): _NUMBERS[GATES.get(name, name)] for name in (*_NUMBERS, *GATES)}
PLAIN = (torch.Tensor, torch.nn.Parameter)  # what a subclass does with its data is its own affair
Key = tuple[object, ...]
# What making an entry may raise. A signal's handler may raise others.
EXPECTED = (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
_autocasts = partial(torch.is_autocast_enabled, "cpu") if INTERPRETED else torch.is_autocast_enabled
log = logging.getLogger("triton_gemm")


@dataclass(slots=True)
class Known:
    """What a call launches, and what makes its result where no `out` is given: of `like`, a shape, strides and a dtype.

    copies: whether the launch adds to the result, which is a copy of the last auxiliary operand first. preactivations:
    how many it also stores, after the auxiliary operands. offered: whether `native` was asked to launch it on the
    plan's own kernels; asked: the number of `stand_ins.changes` when it was last asked to do so on a stand-in.
    """

    plan: plan.Plan | None
    empty: Callable[[], torch.Tensor]
    like: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
    copies: bool = False
    preactivations: int = 0
    offered: bool = False
    decided_at: int = -1


SLOW = Known(None, lambda: torch.empty(0))  # a call that takes more than one launch on its own operands


def known(
    found: plan.Plan | None, c: torch.Tensor, *operands: tuple[torch.Tensor, torch.Tensor], copies: bool = False
) -> Known | None:
    """What calls like that of `found` launch, which has made c; None where that may change. operands: of the call and
    as they were launched. copies: as in `Known`."""
    if found is None or not plan.lasts(found):
        return None
    if not all(given.data_ptr() == launched.data_ptr() != 0 for given, launched in operands):
        return SLOW
    like = tuple(c.shape), c.stride(), c.dtype
    return Known(found, plan.allocator(*like, c.device), like, copies)


class FastPath:
    """The calls that were made before. Threads may share it.

    by_torch: of calls that torch computes, why. table: of `native`, the calls that it launches. on_table: called with
    the extension and a new table.
    """

    def __init__(self, on_table: Callable[[Any, Any], None] | None = None) -> None:
        self._on_table = on_table
        self._making = free_in_children(threading.RLock())
        self.calls: dict[Key, Known] = {}
        self.by_torch: dict[Key | None, str] = {}
        self.table: Any = None

    def take(
        self,
        operation: Hashable,
        a: torch.Tensor,
        b: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...] = (),
        request: Request = SUM,
        out: torch.Tensor | None = None,
        dispatched: bool = False,
    ) -> tuple[Key | None, torch.Tensor | None]:
        """(the key to `keep` the call by, or None where more than it says counts; the result, if one is kept by it).

        operation: the function, with what `request` lacks. The rest may be anything that a user gave. dispatched:
        whether torch's dispatcher calls, after autograd and autocast, with tensors that are no negative views.
        """
        if not dispatched and (must_dispatch() or _autocasts()):
            return None, None
        if self.table is not None:
            c = self.table.take(operation, a, b, auxiliary, request, out, dispatched)
            if c is not None:
                return None, c
        needs_grad = False
        if not dispatched:
            grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            for x in (a, b, *auxiliary) if out is None else (a, b, out, *auxiliary):
                if type(x) not in PLAIN or x.is_neg():
                    return None, None
                needs_grad = needs_grad or (grad and x.requires_grad)
        if auxiliary and request.beta != 1:
            return None, None
        try:
            if needs_grad and (out is not None or not may_differentiate(operation, a, b, auxiliary, request)):
                return None, None
            key = operation, plan.key_of(request, a, b, out, auxiliary), needs_grad
            found = self.calls.get(key)
        except plan.UnallocatedError:
            raise
        except (RuntimeError, TypeError):  # a layout without strides or storage; an argument without a hash
            return None, None
        if found is None:
            return key, None
        made = found.plan
        if made is None:
            return None, None
        if made.instead is not None:
            made = found.plan = made.instead
            found.offered = False
        given = out
        if out is None:
            if made.index is not None and made.index != current_device():
                with torch.cuda.device(made.index):
                    return self.take(operation, a, b, auxiliary, request, out, dispatched)
            if needs_grad:  # the fast path has derivatives in C++ alone
                if not found.offered:
                    self._offer(key, found, (operation, a, b, auxiliary, request, out, dispatched))
                return None, None
            out = found.empty()
        elif made.overlap(a, b, out) or any(same_storage(x, out) for x in auxiliary):
            return None, None
        elif not dispatched:
            if out.is_inference():
                return None, None
            increment_versions((out,))
        if found.copies:
            out.copy_(auxiliary[-1])
            made.run(a, b, out, auxiliary[:-1], request.alpha, 1.0)
        else:
            made.run(a, b, out, auxiliary, request.alpha)
        if not found.offered:
            self._offer(key, found, (operation, a, b, auxiliary, request, given, dispatched))
        return key, out

    def _offer(self, key: Key, found: Known, call: tuple[Any, ...]) -> None:
        """Has `native` launch calls like this one from now on, if it can, or once it can."""
        extension = native.module()
        if extension is None:
            found.offered = not native.possible()
            return
        if found.like is None or not isinstance(found.plan, plan.GemmPlan):
            return
        like, made, first_calls = found.like, found.plan, found.plan.first_calls
        decided = found.decided_at if first_calls is None else first_calls.seen
        if made.compiled:
            found.offered = True
        else:
            stand_in = None if first_calls is None or decided == found.decided_at else first_calls.decided(decided)
            if stand_in is None:
                return
            made, found.decided_at = stand_in, decided

        def keep(table: Any) -> None:
            derivative = 0 if found.copies else derivative_of(call[0], call[4])
            how = found.copies, found.preactivations, ACTIVATED.get(call[4], 0)
            table.keep(call, native.entry_of(made, *like, derivative, *how))
            if made is not found.plan and decided != stand_ins.changes:  # another thread may have kept its own kernels
                extension.forget_stand_ins()
                found.offered = False

        self.add_to_table(extension, key, call, keep)

    def add_to_table(self, extension: Any, key: Key, call: tuple[Any, ...], add: Callable[[Any], None]) -> None:
        """Has `add` add calls like this one, of that key, to the table of the extension, if it can."""
        try:
            add(table := self._table(extension))
        except EXPECTED as error:  # the call itself was computed
            log.debug("calls like %s are left to Python: %s", key, error)
            return
        operation, a, b, auxiliary, request, out, _ = call
        if key[:2] != (operation, plan.key_of(request, a, b, out, auxiliary)):  # another thread has changed what counts
            table.forget()

    def _table(self, extension: Any) -> Any:
        with self._making:
            if self.table is None:
                self.table = native.table(extension, plan.MAX_PLANS)
                if self._on_table is not None:
                    self._on_table(extension, self.table)
            return self.table

    def run(
        self,
        operation: Hashable,
        a: torch.Tensor,
        b: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...],
        launch: Callable[[], tuple[torch.Tensor, Known | None]],
        request: Request = SUM,
    ) -> torch.Tensor:
        """The result of a call by torch's dispatcher, of plain tensors: as of one before, or by `launch`, which also
        says what calls like it launch."""
        key, c = None, None
        if not any(x.is_neg() for x in (a, b, *auxiliary)):
            key, c = self.take(operation, a, b, auxiliary, request, dispatched=True)
        if c is None:
            c, found = launch()
            self.keep(key, found)
        return c

    def keep(self, key: Key | None, found: Known | None) -> None:
        """Keeps what calls of that key launch, unless one of both is None."""
        if key is not None and found is not None:
            plan.keep(self.calls, key, found, plan.MAX_PLANS)


def derivative_of(operation: Hashable, request: Request) -> int:
    """The derivative that C++ gives the result of such a call here, as in DERIVATIVES; 0: it has none. Its backward
    follows the policy of its own time, so none where the policy now is to be remembered."""
    if (request not in (SUM, PRODUCT) and request not in ACTIVATED) or plan.remembering(request) is not request:
        return 0
    return DERIVATIVES.get(operation, 0)


def may_differentiate(
    operation: Hashable, a: torch.Tensor, b: torch.Tensor, auxiliary: tuple[torch.Tensor, ...], request: Request
) -> bool:
    """Whether C++ may give the result of such a call a derivative, once the call is known."""
    if operation not in DERIVATIVES or b.dim() != 2 or a.dim() < 2:
        return False
    columns = b.shape[0 if DERIVATIVES[operation] == 2 else 1]
    gate = auxiliary[len(auxiliary) // 2] if operation in GATED else None  # between biases
    if any(x.shape != b.shape if x is gate else x.numel() != columns for x in auxiliary):
        return False
    return derivative_of(operation, request) != 0 and native.possible() and not in_transform()


def same_storage(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
