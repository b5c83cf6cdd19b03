"""GemmPlan: a problem made launchable, the cache of plans, and the one launch path.

The first call of a problem selects and compiles; every later one is a lookup and a direct launch. A plan holds for
operands of the same shapes, strides, dtypes and alignment on one device, whatever their addresses. All arguments but
addresses and factors are prepared once. A call copies them and fills in its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial
from typing import Any

import torch

from ..arithmetic import fp32_precision
from ..compat import (
    INTERPRETED,
    current_device,
    current_stream,
    free_in_children,
    is_wrapper,
)
from ..hardware.device import INTERPRETER, DeviceInfo, device_info
from ..hardware.driver import ensure_context
from ..problem import PRODUCT, SUM, GemmProblem, Request
from ..selection import generation
from ..selection.select import Selection, remembered
from . import background, kits, policies, turns
from .background import FirstCalls
from .binaries import SCALARS, launches_on, operands_of
from .interpreted_plan import InterpretedPlan as InterpretedPlan
from .interpreted_plan import PlanOfProblem
from .policies import in_backward, in_context
from .step import Step
from .turns import Turn
from .workspace import PER_THREAD, workspace

MAX_PLANS = 4096
_COMMON: dict[Request, object] = {PRODUCT: None, SUM: True}  # what stands for them in keys

selection_for = policies.choose


class UnallocatedError(RuntimeError):
    """An operand has elements and no memory, as FSDP frees parameters; in torch's words."""


class GemmPlan(PlanOfProblem):
    """A selection for one problem on one device, ready to be launched."""

    index: int
    calls: c_int64 | None = None  # of a stand-in those that C++ launches, by which kernels are compiled
    turn: Turn | None = None  # how the learner hears of its calls

    def __init__(
        self,
        problem: GemmProblem,
        selection: Selection,
        device: torch.device,
        first_calls: FirstCalls | None = None,
    ) -> None:
        super().__init__(problem, selection)
        self.device, self.index = device, device.index or 0
        info = device_info(device)
        made = launches_on(info, problem, selection)
        temporaries = [temporary for launch in made for temporary in launch.temporaries]
        self.temporaries = [
            allocator(x.shape, torch.empty(x.shape, device="meta").stride(), x.dtype, device) for x in temporaries
        ]
        self.workspace = max((launch.workspace for launch in made), default=0)
        self.shares = any(launch.counters for launch in made)
        self.allocates = bool(self.shares or self.temporaries)
        self.names = (
            *("a", "b", "c", *problem.auxiliary),
            *(("workspace", "counters") if self.shares else ()),
            *(temporary.name for temporary in temporaries),
        )
        foreign = selection.kit and bool(kits.others(info.capability))
        names = *SCALARS, *self.names
        self.steps = [Step(launch, names, self.index, info.capability, foreign) for launch in made]
        self.first_calls = first_calls  # until its kernels are loaded; without it the first call compiles them
        self.out_dtype = problem.out_dtype

    def compile(self, *operands: torch.Tensor) -> None:
        """Compiles for a, b, c and the auxiliary operands, or for any that the problem may have, on the current device,
        without a launch. Threads may do so at once.
        """
        named = self._named(operands)
        for step in self.steps:
            step.compile(named)
        self._is_compiled()

    def load(self, *operands: torch.Tensor, cached: bool = True) -> bool:
        """As `compile`, where kits or Triton's cache have all kernels and no thread compiles them; whether so. cached:
        look into Triton's cache, too, which takes a second the first time."""
        named = self._named(operands)
        if not all(step.load(named, cached) for step in self.steps):
            return False
        self._is_compiled()
        return True

    def _named(self, operands: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the plan is compiled for, by name: those given, and else as `operands_of` has them."""
        ensure_context(self.index)  # this thread may have used no CUDA before
        return operands_of(self.problem, [x.launch for x in self.steps]) | dict(zip(self.names, operands, strict=False))

    def _is_compiled(self) -> None:
        first_calls, self.compiled, self.first_calls = self.first_calls, True, None
        if first_calls is not None:
            first_calls.available.add(first_calls.device, self.problem, self.selection)

    def like(self, selection: Selection) -> GemmPlan:
        """The plan of another selection for the same problem."""
        return GemmPlan(self.problem, selection, self.device)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...] = (),
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Launches on the current stream of the operands' device. auxiliary: those that GemmProblem.auxiliary names."""
        if self.index != current_device():
            with torch.cuda.device(self.index):
                return self.run(a, b, c, auxiliary, alpha, beta)
        if not self.compiled:
            first_calls = self.first_calls
            operands = (a, b, c, *auxiliary)
            stand_in = first_calls.instead_of(self, operands) if first_calls is not None else None
            if stand_in is not None:
                return stand_in.run(a, b, c, auxiliary, alpha, beta)
            self.compile(*operands)
        stream = current_stream(self.index)
        if self.allocates:
            auxiliary += self._allocate(stream)  # lives until all is launched
        values = (alpha, beta, a.data_ptr(), b.data_ptr(), c.data_ptr(), *[x.data_ptr() for x in auxiliary])
        for step in self.steps:
            step.call(stream, values)  # type: ignore[misc]  # they are compiled
        if self.temporaries and stream == PER_THREAD and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()  # or torch's allocator gives them to any thread's stream
        if self.turn is not None:
            turns.count(self.turn, self.index, stream)
            if self.turn.own[1]:
                self.report_call(b, stream)

    def report_call(self, b: torch.Tensor, stream: int) -> None:
        """Has the learner hear of a call that was launched, by C++ or by `run`."""
        turns.report_call(self, b, stream)

    def _allocate(self, stream: int) -> tuple[torch.Tensor, ...]:
        """Memory that this call needs, after its operands in the order of `names`."""
        shared = workspace(self.index, stream, self.workspace) if self.shares else ()
        return (*shared, *[make() for make in self.temporaries])


Plan = GemmPlan | InterpretedPlan
PLANS: dict[tuple[Any, ...], Plan] = {}
_planning = free_in_children(threading.RLock())  # reentered by a tuner that multiplies


def _free_steps() -> None:
    """In a forked child: a thread of the parent may be compiling one of the plans."""
    for found in PLANS.values():
        for step in getattr(found, "steps", ()):
            step.compiling = threading.RLock()
        if getattr(found, "first_calls", None) is not None:
            found.first_calls = None  # type: ignore[union-attr]
    turns.forget()


os.register_at_fork(after_in_child=_free_steps)


def selection_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, request: Request = PRODUCT) -> Selection:
    """What `multiply` of the same operands would run; c may be on the `meta` device."""
    return selection_for(request.problem(a, b, c), info_of(a.device), invariant=request.batch_invariant)


def info_of(device: torch.device) -> DeviceInfo:
    """The GPU that kernels are chosen for where operands lie on a device."""
    return INTERPRETER if INTERPRETED else device_info(device)


def remembering(request: Request) -> Request:
    """A request that says by itself what the policy here says of batch invariance, to be followed elsewhere."""
    if request.batch_invariant is None and policies.current_policy().batch_invariant:
        return request._replace(batch_invariant=True)
    return request


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    request: Request = PRODUCT,
    auxiliary: tuple[torch.Tensor, ...] = (),
) -> Plan:
    """c = activation(alpha a @ b + beta c + bias) on the operands' device and its current stream, without waiting. The
    plan that computes it is returned. Operands are taken for checked.

    a is [(batch,) M, K], b [(batch,) K, N], c [(batch,) M, N]. `auxiliary` has the other operands that the request
    speaks of, in this order:

    - the bias, contiguous, one value for each row or column of c
    - A's and B's scales, contiguous fp32: one each, or M and N, or for "blocks" [K / 128 rounded up, M] and [N / 128
      rounded up, K / 128 rounded up], as torch._scaled_mm lays them out
    - where groups end, int32 [groups], ascending
    """
    found = plan_for(a, b, c, request, auxiliary)
    found.run(a, b, c, auxiliary, request.alpha, request.beta)
    return found


def key_of(
    request: Request,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    auxiliary: tuple[torch.Tensor, ...] = (),
) -> tuple[Any, ...]:
    """The key of every cache of plans: what calls have in common that launch the same. That is the state that choices
    depend on, the request, without factors' values but for 0, and of every operand all but its address, of which
    alignment is left. c: None where it is made by the call. Operands are not to be negated on the way.

    RuntimeError for a layout without strides or storage, UnallocatedError for elements without memory.
    """
    if request is not PRODUCT and (request.alpha != 1 or request.beta not in (0, 1)):
        request = request._replace(alpha=float(request.alpha != 0), beta=float(request.beta != 0))
    dtype = a.dtype
    setting = fp32_precision() if dtype is torch.float32 and request.precision is None else None
    # Most are one of these, and the hash of a request is a tenth of the key's time.
    request_key = None if request is PRODUCT else True if request is SUM else _COMMON.get(request, request)
    policy = in_context() or (generation.contexts and in_backward())
    key: tuple[Any, ...]  # made at every call, so in one piece where that is cheap
    if c is None:
        key = (
            policy, generation.number, request_key, setting, a.shape, b.shape, a.stride(), b.stride(), dtype,
            b.dtype, a.get_device(), b.get_device(),
            p & 15 == 0 if (p := a.data_ptr()) and a.untyped_storage().data_ptr() else _empty(a),
            p & 15 == 0 if (p := b.data_ptr()) and b.untyped_storage().data_ptr() else _empty(b),
        )  # fmt: skip
    else:
        key = (
            policy, generation.number, request_key, setting, a.shape, b.shape, c.shape, a.stride(), b.stride(),
            c.stride(), dtype, b.dtype, c.dtype, a.get_device(), b.get_device(), c.get_device(),
            p & 15 == 0 if (p := a.data_ptr()) and a.untyped_storage().data_ptr() else _empty(a),
            p & 15 == 0 if (p := b.data_ptr()) and b.untyped_storage().data_ptr() else _empty(b),
            p & 15 == 0 if (p := c.data_ptr()) and c.untyped_storage().data_ptr() else _empty(c),
        )  # fmt: skip
    for x in auxiliary:
        aligned = p & 15 == 0 if (p := x.data_ptr()) and x.untyped_storage().data_ptr() else _empty(x)
        key += (x.shape, x.stride(), x.dtype, x.get_device(), aligned)
    return key


def _empty(x: torch.Tensor) -> bool | None:
    """What a key has for the alignment of a tensor without elements, or without data. UnallocatedError where its memory
    was freed: a view's address is then its offset, which need not be null."""
    if x.numel() and not x.is_meta and not is_wrapper(x):
        raise UnallocatedError("The tensor has a non-zero number of elements, but its data is not allocated yet.")
    return None


def plan_for(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    request: Request = PRODUCT,
    auxiliary: tuple[torch.Tensor, ...] = (),
) -> Plan:
    """The cached plan for such operands."""
    key = key_of(request, a, b, c, auxiliary)
    found = PLANS.get(key)
    if found is not None:
        while found.instead is not None:
            found = found.instead
        return found
    problem = request.problem(a, b, c)
    with _planning:  # threads that come with the same new problem share one plan, which is compiled once
        found = PLANS.get(key)
        if found is None:
            found = _new_plan(problem, a.device, request.batch_invariant)
            if lasts(found):
                if isinstance(found, GemmPlan):
                    turns.give(found)
                keep(PLANS, key, found, MAX_PLANS)
    return found


def lasts(plan: Plan) -> bool:
    """Whether later calls like that of `plan` run it too, and not what a tuner finds."""
    return not policies.tunes() or plan.selection.source != "model"


def keep(cache: dict[Any, Any], key: object, value: object, limit: int) -> None:
    """Adds to a cache that holds at most `limit`, and gives up what was added first; threads may do so at once."""
    while len(cache) >= limit:
        try:
            cache.pop(next(iter(cache)), None)
        except (RuntimeError, StopIteration):  # another thread changed it meanwhile
            continue
    cache[key] = value


def _new_plan(problem: GemmProblem, device: torch.device, invariant: bool | None) -> Plan:
    info = info_of(device)
    selection = selection_for(problem, info, may_tune=True, invariant=invariant)
    if INTERPRETED:
        return InterpretedPlan(problem, selection)
    if selection.kit and kits.others(info.capability):  # loaded now, as the installed Triton may not compile it
        plan = GemmPlan(problem, selection, device)
        if plan.load():
            return plan
        selection = remembered(problem.to_choose_for(), info)  # the driver refused the kit
    return GemmPlan(problem, selection, device, FirstCalls(info) if background.enabled() else None)


def allocator(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """`torch.empty_strided` of these, which releases the GIL. Inductor's faster function does not: where memory has to
    be freed first it waits for CUDA, whose host functions may wait for the GIL."""
    return partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)
