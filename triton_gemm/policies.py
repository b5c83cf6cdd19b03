"""Policies: whether the model, a table or a tuner chooses what a product runs on.

- "model": the model's choice, as `select` has it.
- "cached": a table's, where one has the problem, else the model's. The default.
- "tune": a table's, else that of the tuner; where nothing may be timed (a graph is captured, a compiler traces), the
  model's.
- "error": a table's, else an error.

A choice is made when a product is planned, at its first call, so that a table is asked about the sizes that are run and
not about those that a compiler has traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch

from . import generation, tables
from .compat import hide_from_dynamo, must_dispatch
from .device import DeviceInfo
from .problem import GemmProblem
from .select import Selection, select
from .tables.files import BITS, Bits

PolicyName = Literal["model", "cached", "tune", "error"]
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

# What times candidates on a device and says which is best; it may call `tables.store` to keep that.
Tuner = Callable[[GemmProblem, DeviceInfo], Selection]


class Policy(NamedTuple):
    """name: one of NAMES; bits: which tables are asked, as in `tables.lookup`."""

    name: PolicyName = "cached"
    bits: Bits = "same"


_context: ContextVar[Policy | None] = ContextVar("triton_gemm_policy", default=None)
in_context = _context.get  # the policy of this thread's or task's context; None: the process's
_process: Policy | None = None
_tuner: Tuner | None = None

by_model = lru_cache(maxsize=4096)(select)


def current() -> Policy:
    """The policy that counts here: the context's, or the process's. ValueError where TRITON_GEMM_POLICY or
    TRITON_GEMM_BITS hold what is none."""
    return in_context() or _process or _of_environment()


def tunes() -> bool:
    """Whether what no table has is tuned here, where it can be."""
    return current().name == "tune"


def _policy(name: str, bits: str, of: str) -> Policy:
    if name not in NAMES or bits not in BITS:
        allowed, found = (NAMES, name) if name not in NAMES else (BITS, bits)
        raise ValueError(f"{of} must be one of {', '.join(allowed)}, not {found!r}")
    return Policy(name, bits)


@lru_cache(maxsize=1)
def _of_environment() -> Policy:
    name, bits = os.environ.get("TRITON_GEMM_POLICY", "cached"), os.environ.get("TRITON_GEMM_BITS", "same")
    return _policy(name, bits, "TRITON_GEMM_POLICY, and TRITON_GEMM_BITS,")


@hide_from_dynamo
def set_policy(name: PolicyName, *, bits: Bits = "same") -> None:
    """Sets the policy of the process, in all threads, wherever no `with policy(...)` is open: what chooses the kernel
    and configuration of each product. Before it is called, the environment's TRITON_GEMM_POLICY counts, or "cached".

    name: "model", the cost model; "cached", a table of what was measured, and the model for what no table has; "tune",
    a table, and a tuner for what none has, but the model while a CUDA graph is captured or torch.compile traces;
    "error", a table, and RuntimeError for what none has. bits: "same" asks tables whose entries give the bits that the
    model's choice gives; "any" asks also those of the fastest, whatever their bits. The environment has
    TRITON_GEMM_BITS for it.

    Raises ValueError for another name. Products that were planned before are planned again.
    """
    global _process
    _process = _policy(name, bits, "set_policy(): name and bits")
    generation.advance()


@contextmanager
def policy(name: PolicyName, *, bits: Bits = "same") -> Iterator[None]:
    """`set_policy` for a block, in this thread or asyncio task alone: `with triton_gemm.policy("error"):`.

    name, bits: as in `set_policy`, with its errors. torch runs backwards on CUDA in threads of its own, where the
    process's policy counts.
    """
    token = _context.set(_policy(name, bits, "policy(): name and bits"))
    try:
        yield
    finally:
        _context.reset(token)


def set_tuner(tuner: Tuner | None) -> None:
    """What the policy "tune" asks about a problem that no table has; None: nothing, which is an error then.

    It is called while a product is planned, by one thread at a time, never while a graph is captured or a compiler
    traces; products that it runs itself in that thread are the model's choice, and the bits that are asked for those of
    the policy there. `import triton_gemm` sets `tuning`'s.
    """
    global _tuner
    _tuner = tuner
    generation.advance()


def choose(problem: GemmProblem, device: DeviceInfo, *, may_tune: bool = False) -> Selection:
    """What `problem` runs on, by the policy that counts here. may_tune: whether it is about to run.

    RuntimeError where the policy is "error" and no table has it, or "tune" and there is no tuner; as `select` else.
    """
    name, bits = current()
    found = None if name == "model" else tables.lookup(problem, device, bits)
    if found is not None:
        return found
    if name == "error":
        raise RuntimeError(
            f'no table has {_said(problem)} on {device.name}, and the policy is "error": tune it, or "cached"'
        )
    if name != "tune" or not may_tune or not _may_time():
        return by_model(problem, device)
    if _tuner is None:
        raise RuntimeError(f'no table has {_said(problem)}, the policy is "tune", and there is no tuner: set "cached"')
    with policy("model", bits=bits):
        return replace(_tuner(problem, device), source="tuner")


def _may_time() -> bool:
    """Whether launches may be waited for here, and are no one's to record."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not (capturing or torch.compiler.is_compiling() or must_dispatch())


def _said(problem: GemmProblem) -> str:
    batch = f"{problem.batch} x " if problem.batch != 1 else ""
    return f"{batch}{problem.M} x {problem.N} x {problem.K} in {str(problem.dtype).removeprefix('torch.')}"
