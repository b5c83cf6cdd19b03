"""GemmPlan: a problem made launchable, the cache of plans, and the one launch path.

The first call of a problem selects, compiles and prepares; every later one is a lookup and a direct launch. A plan
holds for operands of the same shapes, strides, dtypes and alignment on one device, whatever their addresses: what
depends on those is prepared again for new ones and kept, so an address that is reused means nothing by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .arithmetic import fp32_precision
from .compat import INTERPRETED, current_device, current_stream, launcher, tensor_maps
from .device import INTERPRETER, device_info
from .driver import ensure_context
from .kernels.launch import Launch, Pointer, Scalar, TensorMap, materialise
from .problem import GemmProblem, Layout
from .select import Selection, launches, select
from .workspace import workspace

MAX_PLANS = 4096
MAX_BOUND = 128  # sets of addresses that a plan keeps prepared
MAX_TENSOR_MAPS = 16384

# The launches of a plan with the arguments for one set of addresses.
Bound = list[tuple[Callable[[int, tuple[Any, ...]], None], tuple[Any, ...]]]

selection_for = lru_cache(maxsize=MAX_PLANS)(select)


class Scales(NamedTuple):
    """What multiplies A and B: GemmProblem's word for it, and A's and B's as the kernels read them, contiguous fp32:
    "tensor" one number each; "rows" M and N; "blocks" [K / 128 rounded up, M] and [N / 128 rounded up, K / 128 rounded
    up], which is how torch._scaled_mm wants them laid out."""

    kind: str
    a: torch.Tensor
    b: torch.Tensor


class Groups(NamedTuple):
    """Where groups end: GemmProblem's word for the dimension that they cut, and int32 [groups], ascending."""

    kind: str
    ends: torch.Tensor


class Step:
    """One launch of a plan on one device: compiled at its first call, then launched by addresses."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.call: Callable[[int, tuple[Any, ...]], None] | None = None
        self.compiling = threading.Lock()  # threads that call a new plan at once wait for one of them

    def compile(self, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Compiles for operands like these, on the current device."""
        launch = self.launch
        arguments = materialise(launch, operands, scalars)
        compiled = launch.kernel.warmup(*arguments.values(), grid=launch.grid, **launch.options)
        encoders = iter(tensor_maps(compiled))
        self.parts = [
            (part, lru_cache(MAX_TENSOR_MAPS)(next(encoders)) if isinstance(part, TensorMap) else None)
            for part in launch.arguments.values()
        ]
        self.call = launcher(compiled, launch.grid)

    def bind(
        self, operands: Mapping[str, torch.Tensor], addresses: Mapping[str, int], scalars: Mapping[str, float]
    ) -> tuple[Callable[[int, tuple[Any, ...]], None], tuple[Any, ...]]:
        """The compiled kernel and its arguments for operands at `addresses`."""
        with self.compiling:
            if self.call is None:
                self.compile(operands, scalars)
        assert self.call is not None
        arguments: list[Any] = []
        for part, encode in self.parts:
            if isinstance(part, Pointer):
                arguments.append(addresses[part.operand])
            elif isinstance(part, Scalar):
                arguments.append(scalars[part.name])
            elif isinstance(part, TensorMap):
                assert encode is not None
                arguments.append(encode(addresses[part.operand], part.shape, part.strides, part.to_tf32))
                arguments += part.shape
                arguments += part.strides
            else:
                arguments.append(part)
        return self.call, tuple(arguments)


class GemmPlan:
    """A selection for one problem on one device, ready to be launched."""

    def __init__(self, problem: GemmProblem, selection: Selection, device: torch.device) -> None:
        self.selection, self.device, self.index = selection, device, device.index or 0
        made = launches(problem, selection)
        if device_info(device).capability >= (9, 0):
            made = tuple(launch.programmatic() for launch in made)
        self.steps = [Step(launch) for launch in made]
        self.temporaries = [temporary for step in self.steps for temporary in step.launch.temporaries]
        self.workspace = max((step.launch.workspace for step in self.steps), default=0)
        self.shares = any(step.launch.counters for step in self.steps)
        self.bound: dict[tuple[Any, ...], Bound] = {}
        self.out_dtype = problem.out_dtype
        self.beside = _beside(problem)
        self.needs_more = bool(problem.bias or self.beside or self.shares or self.temporaries)
        self.extents = tuple(
            _extent(problem.batch, *shape, layout) * dtype.itemsize
            for shape, layout, dtype in (
                ((problem.M, problem.K), problem.a, problem.dtype),
                ((problem.K, problem.N), problem.b, problem.dtype),
                ((problem.M, problem.N), problem.c, problem.out_dtype),
            )
        )

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
        bias: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        beside: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Launches on the current stream of the operands' device. beside: scales, or where groups end."""
        if self.index != current_device():
            with torch.cuda.device(self.index):
                return self.run(a, b, c, bias, alpha, beta, beside)
        stream = current_stream(self.index)
        key: tuple[Any, ...] = (a.data_ptr(), b.data_ptr(), c.data_ptr(), alpha, beta)
        extra: tuple[torch.Tensor, ...] = ()
        if self.needs_more:
            extra = self._extra(bias, beside, stream)
            key += tuple(x.data_ptr() for x in extra)
        bound = self.bound.get(key)
        if bound is None:
            bound = self._bind(key, a, b, c, bias is not None, extra, {"alpha": float(alpha), "beta": float(beta)})
        for call, arguments in bound:
            call(stream, arguments)

    def _extra(
        self, bias: torch.Tensor | None, beside: tuple[torch.Tensor, ...], stream: int
    ) -> tuple[torch.Tensor, ...]:
        """What a call needs beside its operands, in the order of `_names`."""
        extra = [*([] if bias is None else [bias]), *beside]
        if self.shares:
            extra += workspace(self.index, stream, self.workspace)
        extra += [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in self.temporaries]
        return tuple(extra)

    def _names(self, has_bias: bool) -> list[str]:
        return [
            *(["bias"] if has_bias else []),
            *self.beside,
            *(["workspace", "counters"] if self.shares else []),
            *(t.name for t in self.temporaries),
        ]

    def _bind(
        self,
        key: tuple[Any, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        has_bias: bool,
        extra: tuple[torch.Tensor, ...],
        scalars: Mapping[str, float],
    ) -> Bound:
        ensure_context(self.index)  # this thread may have used no CUDA before
        operands = {"a": a, "b": b, "c": c, **dict(zip(self._names(has_bias), extra, strict=True))}
        addresses = {name: x.data_ptr() for name, x in operands.items()}
        bound = [step.bind(operands, addresses, scalars) for step in self.steps]
        keep(self.bound, key, bound, MAX_BOUND)
        return bound


class InterpretedPlan:
    """A plan that Triton's interpreter runs, launch by launch."""

    def __init__(self, problem: GemmProblem, selection: Selection) -> None:
        self.selection, self.launches, self.beside = selection, launches(problem, selection), _beside(problem)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        bias: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        beside: tuple[torch.Tensor, ...] = (),
    ) -> None:
        operands = {"a": a, "b": b, "c": c} | ({} if bias is None else {"bias": bias})
        operands |= zip(self.beside, beside, strict=True)
        for launch in self.launches:
            operands |= {t.name: torch.empty(t.shape, dtype=t.dtype) for t in launch.temporaries}
            operands["workspace"] = torch.empty(launch.workspace // 4, dtype=torch.float32)
            operands["counters"] = torch.zeros(launch.counters, dtype=torch.int32)
            arguments = materialise(launch, operands, {"alpha": float(alpha), "beta": float(beta)})
            launch.kernel[launch.grid](**arguments, **launch.options)


Plan = GemmPlan | InterpretedPlan
PLANS: dict[tuple[Any, ...], Plan] = {}
_planning = threading.Lock()


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    activation: str | None = None,
    precision: str | None = None,
    scales: str | None = None,
    groups: str | None = None,
) -> Selection:
    """What `multiply` of the same operands would run, with scales or groups of that kind; c may be on the `meta`
    device."""
    axis = None if bias is None else bias_axis
    how = {"activation": activation, "precision": precision, "scales": scales, "groups": groups}
    problem = GemmProblem.of(a, b, c, has_beta=beta != 0, bias=axis, **how)
    return selection_for(problem, INTERPRETER if INTERPRETED else device_info(a.device))


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    activation: str | None = None,
    precision: str | None = None,
    scales: Scales | None = None,
    groups: Groups | None = None,
) -> None:
    """c = activation(alpha a @ b + beta c + bias) on the operands' device and its current stream, without waiting.

    a [(batch,) M, K], b [(batch,) K, N], c [(batch,) M, N]; bias: contiguous, one value for each row ("m") or column
    ("n") of c; precision: of fp32, by default what torch is set to. Operands are taken for checked. As in BLAS alpha
    = 0 reads neither a nor b, beta = 0 does not read c.
    """
    kinds = scales.kind if scales else None, groups.kind if groups else None
    plan_for(a, b, c, alpha == 0, beta != 0, bias, bias_axis, activation, precision, *kinds).run(
        a, b, c, bias, alpha, beta, (*(scales or ())[1:], *(groups or ())[1:])
    )


def key_of(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    no_product: bool = False,
    has_beta: bool = False,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    activation: str | None = None,
    precision: str | None = None,
    scales: str | None = None,
    groups: str | None = None,
) -> tuple[Any, ...]:
    """What operands have in common that share a plan."""
    epilogue = None
    if has_beta or no_product or bias is not None or activation is not None:
        bias_key = None if bias is None else (bias_axis, bias.dtype, not bias.data_ptr() & 15)
        epilogue = (has_beta, no_product, bias_key, activation)
    return (
        *(a.shape, b.shape, c.shape, a.stride(), b.stride(), c.stride(), a.dtype, c.dtype, a.get_device(), epilogue),
        *(not a.data_ptr() & 15, not b.data_ptr() & 15, not c.data_ptr() & 15),
        (precision or fp32_precision()) if a.dtype is torch.float32 else precision,
        *(scales, groups),
    )


def plan_for(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    no_product: bool = False,
    has_beta: bool = False,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    activation: str | None = None,
    precision: str | None = None,
    scales: str | None = None,
    groups: str | None = None,
) -> Plan:
    """The cached plan for such operands."""
    key = key_of(a, b, c, no_product, has_beta, bias, bias_axis, activation, precision, scales, groups)
    found = PLANS.get(key)
    if found is not None:
        return found
    axis = None if bias is None else bias_axis
    how = {"activation": activation, "precision": precision, "scales": scales, "groups": groups}
    problem = GemmProblem.of(a, b, c, has_beta=has_beta, bias=axis, **how)
    if no_product:
        problem = replace(problem, K=0)
    with _planning:  # threads that come with the same new problem share one plan, which is compiled once
        found = PLANS.get(key)
        if found is None:
            found = _new_plan(problem, a.device)
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


def _new_plan(problem: GemmProblem, device: torch.device) -> Plan:
    selection = selection_for(problem, INTERPRETER if INTERPRETED else device_info(device))
    return InterpretedPlan(problem, selection) if INTERPRETED else GemmPlan(problem, selection, device)


def _beside(problem: GemmProblem) -> tuple[str, ...]:
    """What kernels read beside operands and bias."""
    return ("a_scale", "b_scale") * (problem.scales is not None) + ("ends",) * (problem.groups is not None)


def _extent(batch: int, rows: int, columns: int, layout: Layout) -> int:
    """Elements from the first of a layout to the end of the last."""
    steps = zip((batch, rows, columns), layout.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
