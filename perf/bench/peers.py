"""What else multiplies matrices, by name: each entry of PEERS makes a provider for a problem.

A peer that is a package becomes a line of PEERS: `"name": package("module", "function")`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from perf.measure import providers
from perf.measure.operands import Problem
from perf.measure.timer import Call, Provider
from triton_gemm.device import device_info

Factory = Callable[[Problem], Provider]

TUTORIAL = "tutorial"
INDUCTOR = "inductor"
COMPILED = "torch.compile"
TUTORIAL_TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4))
GROUP_M = 8  # rows of tiles that are worked on together, so that they share B in the L2 cache


def set_blocks(arguments: dict[str, Any]) -> None:
    """Gives the descriptors the tiles of the configuration that is tried."""
    m, n, k = (arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    arguments["a_desc"].block_shape = [m, k]
    arguments["b_desc"].block_shape = [n, k] if arguments["B_TRANSPOSED"] else [k, n]
    arguments["c_desc"].block_shape = [m, n]


@triton.autotune(
    configs=[
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages, pre_hook=set_blocks
        )
        for m, n, k, warps, stages in TUTORIAL_TILES
    ],
    key=["M", "N", "K", "B_TRANSPOSED"],
)
@triton.jit
def tutorial_kernel(  # type: ignore[no-untyped-def]
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A persistent loop over tiles whose operands come by TMA; nothing is done for waves that are not full."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * num_n
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        first_m = tile // in_group * GROUP
        height = min(num_m - first_m, GROUP)
        m = (first_m + tile % in_group % height) * BLOCK_M
        n = tile % in_group // height * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            b = b_desc.load([n, k]).T if B_TRANSPOSED else b_desc.load([k, n])
            acc = tl.dot(a_desc.load([m, k]), b, acc)
        c_desc.store([m, n], acc.to(c_desc.dtype))


def tutorial(problem: Problem) -> Provider:
    """A persistent kernel with TMA in the manner of Triton's tutorial 09, tuned over a few configurations."""
    row_major_a = problem.layout[0] == "n"
    plain = problem.plain and problem.batch is None and problem.mode in ("fp16", "bf16")
    pitches = [problem.pad + size for size in (problem.K, problem.N)] + [problem.offset]
    aligned = all(pitch % 8 == 0 for pitch in pitches)

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        if not (row_major_a and plain and aligned):
            raise NotImplementedError("takes one 16-bit product with a row-major A and aligned rows")
        transposed = problem.layout[1] == "t"
        descriptors = [TensorDescriptor.from_tensor(x, [1, 1]) for x in (a, b.mT if transposed else b, c)]
        programs = device_info(a.device).num_sms
        tutorial_kernel[(programs,)](*descriptors, *c.shape, a.shape[1], transposed, GROUP=GROUP_M)

    return Provider(TUTORIAL, call)


def compiled(problem: Problem) -> Provider:
    """torch.compile, as it is without options, on what torch does eagerly."""
    return Provider(COMPILED, _compiled(providers.fused_in_torch(problem)))


def inductor(problem: Problem) -> Provider:
    """torch.compile in the mode that tries Triton templates as well as cuBLAS."""
    mode = "max-autotune-no-cudagraphs"
    return Provider(INDUCTOR, _compiled(providers.fused_in_torch(problem), mode))


def _compiled(function: Call, mode: str | None = None) -> Call:
    """`function` compiled at its first call, for the shapes of that call alone."""

    @cache
    def made() -> Call:
        torch._dynamo.reset()  # else the shapes measured before count against the limit of recompilations
        return torch.compile(function, dynamic=False, mode=mode)

    def call(*arguments: torch.Tensor) -> object:
        try:
            return made()(*arguments)
        except (ImportError, torch._dynamo.exc.TorchDynamoException) as error:
            raise NotImplementedError(f"torch.compile: {error}".splitlines()[0]) from error

    return call


def package(module: str, function: str) -> Factory:
    """A peer that is a package: `function(a, b)` of `module` returns the product of 2-D operands."""

    def factory(problem: Problem) -> Provider:
        def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> object:
            if not problem.plain or problem.batch is not None:
                raise NotImplementedError("takes one product and nothing after it")
            return _function(module, function)(a, b)

        return Provider(f"{module}.{function}", call)

    return factory


@cache
def _function(module: str, function: str) -> Callable[..., object]:
    try:
        found: Callable[..., object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(str(error)) from None
    return found


PEERS: dict[str, Factory] = {
    providers.OURS: providers.ours,
    providers.CUBLAS: providers.cublas,
    TUTORIAL: tutorial,
    COMPILED: compiled,
    INDUCTOR: inductor,
}
