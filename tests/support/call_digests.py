"""Random calls of every function, and digests of their results and gradients, to compare processes bit for bit.

    python -m tests.support.call_digests SEED COUNT PASSES

makes the same calls in each pass and prints a `Run` as JSON. The first pass plans and compiles. The environment decides
whether C++ launches the calls.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import triton_gemm
from tests.support.gradient_bits import KINDS, PRECISIONS, RESIDUALS, Layer
from tests.support.kernel_cases import Size, bits
from tests.support.random_products import LARGE, OPERATIONS, ROUTED, Limits, Memory, Prepared, Problem, draw_problem
from triton_gemm.compat import INTERPRETED
from triton_gemm.runtime import native, plan

Run = dict[str, Any]
LAYER = "layer"  # `linear` with a bias, an activation or a gate, and a residual
FUNCTIONS = (*OPERATIONS, LAYER, LAYER)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# M, N and K of half of the calls: one row, few rows with split-K, split-K, ragged, clusters, wide.
SIZES = ((1, 2048, 1024), (7, 576, 7168), (256, 320, 8192), (65, 333, 129), (4096, 4096, 1024), (2048, 5504, 512))


@dataclass(frozen=True)
class Call:
    """values, seed: what its operands are filled with. trained: which operands require grad: "" (none), "all", "a" or
    "b". routed: whether torch's function is called, under `use()`."""

    what: Problem | Layer
    values: str
    seed: int
    trained: str
    routed: bool = False


def drawn(seed: int, count: int, limits: Limits = LARGE, sizes: Sequence[Size] = SIZES) -> list[Call]:
    """`count` random calls, of each of FUNCTIONS in turn."""
    random = Random(seed)
    return [_drawn(random, FUNCTIONS[i % len(FUNCTIONS)], limits, sizes, 1000 * seed + i) for i in range(count)]


def _drawn(random: Random, function: str, limits: Limits, sizes: Sequence[Size], seed: int) -> Call:
    choose = random.choice
    size = choose(limits.sizes), choose(limits.sizes), choose(limits.depths)
    size = choose(sizes) if sizes and random.random() < 0.5 else size
    trained, (M, N, K) = choose(("", "", "", "all", "all", "a", "b")), size
    if function == LAYER:
        dtype = choose(DTYPES)
        how = choose(PRECISIONS.get(dtype, (None,))), choose((None, None, None, True)), choose((0, 0, 0, 1))
        layer = Layer((M,), N, K, dtype, choose(KINDS), choose((False, True)), choose([*RESIDUALS]), *how)
        return Call(layer, "normal", seed, trained)
    problem = draw_problem(lambda options: function if options is OPERATIONS else choose(options), limits)
    problem = replace(problem, size=size, candidate=None)
    trained = "" if problem.out or "8" in problem.dtype else trained
    in_torch = function in ROUTED and problem.dtype != "int8" and not (problem.out_dtype or problem.activation)
    in_torch = in_torch and not (function == "matmul" and problem.out)
    return Call(problem, choose(("integers", "normal", "wide")), seed, trained, choose((False, in_torch)))


def results(call: Call, memory: Memory) -> list[torch.Tensor | None]:
    """What the call returns, and the gradients of the operands that require grad."""
    with triton_gemm.use() if call.routed else nullcontext():
        if isinstance(call.what, Layer):
            operands = call.what.operands(memory.device)
            leaves = _leaves(operands, call.trained, {"a": ["input"], "b": ["weight"], "all": operands})
            c = call.what.call(operands)
        else:
            prepared = Prepared(call.what, memory)
            prepared.fill(call.values, call.seed)
            names = {"a": ["a"], "b": ["b"], "all": ["a", "b", "added", "gate"]}
            leaves = _leaves(vars(prepared), call.trained, names)
            prepared.call_through_torch() if call.routed else prepared.call()
            c = prepared.result
            if not prepared.ours:  # torch has computed it: its bits are not compared
                return []
        if not c.requires_grad:
            return [c]
        random = torch.Generator(c.device).manual_seed(call.seed)
        gradient = torch.randn(c.shape, generator=random, device=c.device).to(c.dtype)
        return [c, *torch.autograd.grad(c, leaves, gradient, allow_unused=True)]


def _leaves(operands: dict[str, Any], trained: str, names: Mapping[str, Iterable[str]]) -> list[torch.Tensor]:
    """Has the operands names[trained] require grad, and returns them."""
    found = {x: operands[x].detach().requires_grad_() for x in names.get(trained, ()) if operands[x] is not None}
    operands.update(found)
    return [*found.values()]


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """SHA-256 of their bytes, dtypes and shapes."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{None if x is None else (x.dtype, tuple(x.shape))}".encode())
        found.update(b"" if x is None else bits(x.detach().cpu().contiguous()).numpy().tobytes())
    return found.hexdigest()


def run_passes(calls: Sequence[Call], passes: int, device: str) -> Run:
    """The digest of every call in each pass, how many products Python launched in it, and why C++ launches none, if it
    launches none."""
    kind: Any = plan.InterpretedPlan if INTERPRETED else plan.GemmPlan
    run, launches, memory = kind.run, 0, Memory(device)
    found: Run = {"calls": [str(call) for call in calls], "digests": [], "launches": []}

    def counted(*arguments: Any) -> None:
        nonlocal launches
        launches += 1
        run(*arguments)

    kind.run = counted
    try:
        for _ in range(passes):
            found["digests"].append([]), found["launches"].append([])
            for call in calls:
                launches = 0
                try:
                    found["digests"][-1].append(digest(results(call, memory)))
                except Exception as error:
                    raise RuntimeError(f"{call}: {error}") from error
                found["launches"][-1].append(launches)
    finally:
        kind.run = run
    return found | {"not by C++": native.state()}


def difference(runs: Mapping[str, Run]) -> str | None:
    """Describes the first call whose digest differs from that of the first run's first pass, or returns None."""
    first, *_ = runs.values()
    for name, run in runs.items():
        for number, digests in enumerate(run["digests"], 1):
            for call, expected, found in zip(first["calls"], first["digests"][0], digests, strict=True):
                if found != expected:
                    return f"{name}, pass {number}: other bits in {call}"
    return None


if __name__ == "__main__":
    seed, count, passes = map(int, sys.argv[1:])
    print(json.dumps(run_passes(drawn(seed, count), passes, "cuda")))
