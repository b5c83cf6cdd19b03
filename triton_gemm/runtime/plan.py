"""GemmPlan: a problem made launchable, the cache of plans, and the one launch path.

The first call of a problem selects, compiles and prepares; every later one is a lookup and a direct launch. A plan
holds for operands of the same shapes, strides, dtypes and alignment on one device, whatever their addresses: what
depends on those is prepared again for new ones and kept, so an address that is reused means nothing by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from ..arithmetic import fp32_precision
from ..compat import INTERPRETED, current_device, current_stream, free_in_children, launcher, tensor_maps
from ..hardware.device import INTERPRETER, DeviceInfo, device_info
from ..hardware.driver import ensure_context
from ..kernels.launch import Launch, Pointer, Scalar, TensorMap, compiled, materialise
from ..problem import PRODUCT, GemmProblem, Layout, Request
from ..selection import generation
from ..selection.select import Selection, launches
from . import policies
from .policies import in_backward, in_context
from .workspace import workspace

MAX_PLANS = 4096
MAX_BOUND = 128  # sets of addresses that a plan keeps prepared
MAX_TENSOR_MAPS = 16384

# The launches of a plan with the arguments for one set of addresses.
Bound = list[tuple[Callable[[int, tuple[Any, ...]], None], tuple[Any, ...]]]

selection_for = policies.choose


class Step:
    """One launch of a plan on one device: compiled at its first call, then launched by addresses."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.call: Callable[[int, tuple[Any, ...]], None] | None = None
        self.compiling = threading.Lock()  # threads that call a new plan at once wait for one of them

    def compile(self, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Compiles for operands like these, on the current device."""
        launch = self.launch
        kernel = compiled(launch, operands, scalars)
        encoders = iter(tensor_maps(kernel))
        self.parts = [
            (part, lru_cache(MAX_TENSOR_MAPS)(next(encoders)) if isinstance(part, TensorMap) else None)
            for part in launch.arguments.values()
        ]
        self.call = launcher(kernel, launch.grid, launch.cluster)

    def prepare(
        self, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
    ) -> Callable[[int, tuple[Any, ...]], None]:
        """The compiled kernel, compiled by the first thread that comes."""
        with self.compiling:
            if self.call is None:
                self.compile(operands, scalars)
        assert self.call is not None
        return self.call

    def bind(
        self, operands: Mapping[str, torch.Tensor], addresses: Mapping[str, int], scalars: Mapping[str, float]
    ) -> tuple[Callable[[int, tuple[Any, ...]], None], tuple[Any, ...]]:
        """The compiled kernel and its arguments for operands at `addresses`."""
        call = self.prepare(operands, scalars)
        arguments: list[Any] = []
        for part, encode in self.parts:
            if isinstance(part, Pointer):
                arguments.append(addresses[part.operand])
            elif isinstance(part, Scalar):
                arguments.append(scalars[part.name])
            elif isinstance(part, TensorMap):
                assert encode is not None
                arguments.append(encode(addresses[part.operand], part.shape, part.strides, part.to_tf32, part.rows))
                arguments += part.shape
                arguments += part.strides
            else:
                arguments.append(part)
        return call, tuple(arguments)


def launches_on(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> tuple[Launch, ...]:
    """What a plan launches: on Hopper and later programmatically, where the kernel can be."""
    made = launches(problem, selection)
    return tuple(launch.programmatic() for launch in made) if device.capability >= (9, 0) else made


class GemmPlan:
    """A selection for one problem on one device, ready to be launched."""

    def __init__(self, problem: GemmProblem, selection: Selection, device: torch.device) -> None:
        self.problem, self.selection, self.device, self.index = problem, selection, device, device.index or 0
        self.steps = [Step(launch) for launch in launches_on(device_info(device), problem, selection)]
        self.temporaries = [temporary for step in self.steps for temporary in step.launch.temporaries]
        self.workspace = max((step.launch.workspace for step in self.steps), default=0)
        self.shares = any(step.launch.counters for step in self.steps)
        self.allocates = bool(self.shares or self.temporaries)
        self.names = (
            *("a", "b", "c", *problem.auxiliary),
            *(("workspace", "counters") if self.shares else ()),
            *(temporary.name for temporary in self.temporaries),
        )
        self.bound: dict[tuple[Any, ...], Bound] = {}
        self.out_dtype = problem.out_dtype
        self.extents = tuple(
            _extent(problem.batch, *shape, layout) * dtype.itemsize
            for shape, layout, dtype in (
                ((problem.M, problem.K), problem.a, problem.dtype),
                ((problem.K, problem.N), problem.b, problem.dtype),
                ((problem.M, problem.N), problem.c, problem.out_dtype),
            )
        )

    def compile(self, *operands: torch.Tensor) -> None:
        """Compiles for operands like these, a, b, c and the auxiliary ones, on the current device, without a launch. Of
        the operands only dtypes and alignment count, so a few elements of each will do. Threads may do so at once.
        """
        ensure_context(self.index)
        dtypes = {"workspace": torch.float32, "counters": torch.int32}
        dtypes |= {temporary.name: temporary.dtype for temporary in self.temporaries}
        more = (stand_in(dtypes[name], self.device) for name in self.names[len(operands) :])
        named = dict(zip(self.names, (*operands, *more), strict=True))
        for step in self.steps:
            step.prepare(named, {"alpha": 1.0, "beta": 0.0})

    def overlap(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
        """Whether the memory that c spans overlaps that of a or of b."""
        a_bytes, b_bytes, c_bytes = self.extents
        begin, first, second = c.data_ptr(), a.data_ptr(), b.data_ptr()
        end = begin + c_bytes
        return (begin < first + a_bytes and first < end) or (begin < second + b_bytes and second < end)

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
        stream = current_stream(self.index)
        key: tuple[Any, ...] = (a.data_ptr(), b.data_ptr(), c.data_ptr(), alpha, beta)
        if self.allocates:
            auxiliary += self._allocate(stream)
        if auxiliary:
            key += tuple([x.data_ptr() for x in auxiliary])
        bound = self.bound.get(key)
        if bound is None:
            bound = self._bind(key, (a, b, c, *auxiliary), {"alpha": float(alpha), "beta": float(beta)})
        for call, arguments in bound:
            call(stream, arguments)

    def _allocate(self, stream: int) -> tuple[torch.Tensor, ...]:
        """Memory that this call needs, after its operands in the order of `names`."""
        shared = workspace(self.index, stream, self.workspace) if self.shares else ()
        return (*shared, *(torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in self.temporaries))

    def _bind(self, key: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], scalars: Mapping[str, float]) -> Bound:
        ensure_context(self.index)  # this thread may have used no CUDA before
        operands = dict(zip(self.names, tensors, strict=True))
        addresses = {name: x.data_ptr() for name, x in operands.items()}
        bound = [step.bind(operands, addresses, scalars) for step in self.steps]
        keep(self.bound, key, bound, MAX_BOUND)
        return bound


class InterpretedPlan:
    """A plan that Triton's interpreter runs, launch by launch."""

    def __init__(self, problem: GemmProblem, selection: Selection) -> None:
        self.problem, self.selection, self.launches = problem, selection, launches(problem, selection)
        self.names = ("a", "b", "c", *problem.auxiliary)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...] = (),
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        operands = dict(zip(self.names, (a, b, c, *auxiliary), strict=True))
        for launch in self.launches:
            operands |= {t.name: torch.empty(t.shape, dtype=t.dtype, device=c.device) for t in launch.temporaries}
            operands["workspace"] = torch.empty(launch.workspace // 4, dtype=torch.float32, device=c.device)
            operands["counters"] = torch.zeros(launch.counters, dtype=torch.int32, device=c.device)
            arguments = materialise(launch, operands, {"alpha": float(alpha), "beta": float(beta)})
            launch.kernel[launch.grid](**arguments, **launch.options)


Plan = GemmPlan | InterpretedPlan
PLANS: dict[tuple[Any, ...], Plan] = {}
_planning = free_in_children(threading.RLock())  # reentered by a tuner that multiplies


def _free_steps() -> None:
    """In a forked child: a thread of the parent may be compiling one of the plans."""
    for found in PLANS.values():
        for step in getattr(found, "steps", ()):
            step.compiling = threading.Lock()


os.register_at_fork(after_in_child=_free_steps)


@lru_cache(maxsize=256)
def stand_in(dtype: torch.dtype, device: torch.device, aligned: bool = True) -> torch.Tensor:
    """A few elements, to compile for operands of that dtype whose addresses are multiples of 16 bytes, or are not."""
    return torch.empty(65, dtype=dtype, device=device)[0 if aligned else 1 :]


def selection_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, request: Request = PRODUCT) -> Selection:
    """What `multiply` of the same operands would run; c may be on the `meta` device."""
    device = INTERPRETER if INTERPRETED else device_info(a.device)
    return selection_for(request.problem(a, b, c), device, invariant=request.batch_invariant)


def remembering(request: Request) -> Request:
    """A request that says by itself what the policy here says of batch invariance, to be followed elsewhere."""
    if request.batch_invariant is None and policies.current().batch_invariant:
        return request._replace(batch_invariant=True)
    return request


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    request: Request = PRODUCT,
    auxiliary: tuple[torch.Tensor, ...] = (),
) -> None:
    """c = activation(alpha a @ b + beta c + bias) on the operands' device and its current stream, without waiting.

    a [(batch,) M, K], b [(batch,) K, N], c [(batch,) M, N]. auxiliary: the other operands that the request speaks of,
    in this order: the bias, contiguous, one value for each row or column of c; A's and B's scales, contiguous fp32, one
    each, or M and N, or for "blocks" [K / 128 rounded up, M] and [N / 128 rounded up, K / 128 rounded up], as
    torch._scaled_mm lays them out; where groups end, int32 [groups], ascending. Operands are taken for checked.
    """
    plan_for(a, b, c, request, auxiliary).run(a, b, c, auxiliary, request.alpha, request.beta)


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

    RuntimeError for a layout without strides or storage.
    """
    if request is not PRODUCT and (request.alpha != 1 or request.beta not in (0, 1)):
        request = request._replace(alpha=float(request.alpha != 0), beta=float(request.beta != 0))
    dtype = a.dtype
    setting = fp32_precision() if dtype is torch.float32 and request.precision is None else None
    said = None if request is PRODUCT else request  # most are that one, and its hash is a tenth of the key's time
    policy = in_context() or (generation.contexts and in_backward())
    key: tuple[Any, ...]  # made at every call, so in one piece where that is cheap
    if c is None:
        key = (
            policy, generation.number, said, setting, a.shape, b.shape, a.stride(), b.stride(), dtype,
            b.dtype, a.get_device(), b.get_device(), not a.data_ptr() & 15, not b.data_ptr() & 15,
        )  # fmt: skip
    else:
        key = (
            policy, generation.number, said, setting, a.shape, b.shape, c.shape, a.stride(), b.stride(),
            c.stride(), dtype, b.dtype, c.dtype, a.get_device(), b.get_device(), c.get_device(),
            not a.data_ptr() & 15, not b.data_ptr() & 15, not c.data_ptr() & 15,
        )  # fmt: skip
    for x in auxiliary:
        key += (x.shape, x.stride(), x.dtype, x.get_device(), not x.data_ptr() & 15)
    return key


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
        return found
    problem = request.problem(a, b, c)
    with _planning:  # threads that come with the same new problem share one plan, which is compiled once
        found = PLANS.get(key)
        if found is None:
            found = _new_plan(problem, a.device, request.batch_invariant)
            if not policies.tunes() or found.selection.source != "model":  # else a later call may be tuned
                keep(PLANS, key, found, MAX_PLANS)
    return found


def keep(cache: dict[Any, Any], key: object, value: object, limit: int) -> None:
    """Adds to a cache that holds at most `limit`, and gives up what was added first; threads may do so at once."""
    while len(cache) >= limit:
        try:
            cache.pop(next(iter(cache)), None)
        except (RuntimeError, StopIteration):  # another thread changed it meanwhile
            continue
    cache[key] = value


def _new_plan(problem: GemmProblem, device: torch.device, invariant: bool | None) -> Plan:
    info = INTERPRETER if INTERPRETED else device_info(device)
    selection = selection_for(problem, info, may_tune=True, invariant=invariant)
    return InterpretedPlan(problem, selection) if INTERPRETED else GemmPlan(problem, selection, device)


def _extent(batch: int, rows: int, columns: int, layout: Layout) -> int:
    """Elements from the first of a layout to the end of the last."""
    steps = zip((batch, rows, columns), layout.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
