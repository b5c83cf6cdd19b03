"""What else multiplies matrices, by name: each entry of PEERS makes a provider for a problem."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from perf.bench.scores import COMPILED, INDUCTOR, TUNED
from perf.measure import providers
from perf.measure.operands import Problem
from perf.measure.timer import Call, Provider
from triton_gemm.hardware.device import device_info

Factory = Callable[[Problem], Provider]

TUTORIAL = "tutorial"
TUTORIAL_TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4))
GROUP_M = 8  # rows of tiles that are worked on together, so that they share B in the L2 cache
COMPILE_S = 120  # for torch.compile to make one problem's function; its templates are compiled within


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
    return _compiled(COMPILED, problem)


def inductor(problem: Problem) -> Provider:
    """torch.compile in the mode that times Triton templates as well as cuBLAS, and takes the fastest."""
    return _compiled(INDUCTOR, problem, "max-autotune-no-cudagraphs")


def _compiled(name: str, problem: Problem, mode: str | None = None) -> Provider:
    """The problem in torch's words, compiled at its first call, for the shapes of that call alone. The details say how
    long that took; more than COMPILE_S, and it is absent, because Inductor leaves out what was not ready by then."""
    made: list[tuple[Call, float]] = []

    def first(*arguments: torch.Tensor) -> Call:
        torch._dynamo.reset()  # else the shapes measured before count against the limit of recompilations
        function: Call = torch.compile(providers.in_torch(problem), dynamic=False, mode=mode)
        begin = time.perf_counter()
        with torch._inductor.config.patch(precompilation_timeout_seconds=COMPILE_S):
            function(*arguments)
        made.append((function, time.perf_counter() - begin))
        return function

    def call(*arguments: torch.Tensor) -> object:
        try:
            function = made[0][0] if made else first(*arguments)
        except (ImportError, torch._dynamo.exc.TorchDynamoException) as error:
            raise NotImplementedError(f"torch.compile: {error}".splitlines()[0]) from error
        if made[0][1] > COMPILE_S:
            raise NotImplementedError(f"torch.compile took {made[0][1]:.0f} s, more than {COMPILE_S} s")
        return function(*arguments)

    return Provider(name, call, details=lambda *_: {"compile_s": round(made[0][1], 1)})


def cublaslt_tuned(problem: Problem) -> Provider:
    """torch's own product by the fastest of the candidates that cuBLASLt's heuristic names: TunableOp, with
    cuBLASLt as torch's preferred library. It tunes at the first call; the details say what it chose."""
    torchs = providers.cublas(problem).call
    chosen: list[str] = []

    def call(*arguments: torch.Tensor) -> object:
        if not hasattr(torch.cuda.tunable, "set_cublaslt_requested_algo_count"):
            raise NotImplementedError(f"TunableOp of torch {torch.__version__} has no candidates on CUDA")
        with _tunable_op():
            if chosen:
                return torchs(*arguments)
            before = _results()
            result = torchs(*arguments)
            found = _results() - before
        key = (problem.mode, problem.scales, *((x.shape, x.stride(), x.dtype) for x in arguments))
        if found:
            _chosen[key] = ", ".join(sorted(solution for _, _, solution in found))
        if key not in _chosen:
            raise NotImplementedError("TunableOp does not tune this product")
        chosen.append(_chosen[key])
        return result

    return Provider(TUNED, call, details=lambda *_: {"config": chosen[0]})


_chosen: dict[tuple[object, ...], str] = {}  # by TunableOp, which tunes equal products once


def _results() -> set[tuple[str, str, str]]:
    """Operator, parameters and solution of all that TunableOp has tuned."""
    found: Any = torch.cuda.tunable.get_results()
    return {result[:3] for result in found}


@contextmanager
def _tunable_op() -> Iterator[None]:
    """TunableOp on, here and nowhere else: no other provider is to be measured with what it tuned."""
    library = torch.backends.cuda.preferred_blas_library()
    _prepare_tunable_op()
    torch.cuda.tunable.enable(True)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.cuda.tunable.enable(False)
        torch.backends.cuda.preferred_blas_library(library)


@cache
def _prepare_tunable_op() -> None:
    """Has TunableOp forget what it knew, and time on operands that the L2 cache does not hold, as the bench does."""
    folder = tempfile.mkdtemp(prefix="tunableop-")  # it writes a file as it goes, and reads an earlier one
    torch.cuda.tunable.set_filename(f"{folder}/results.csv")
    torch.cuda.tunable.set_rotating_buffer_size(-1)  # as large as L2
    torch.cuda.tunable.tuning_enable(True)


PEERS: dict[str, Factory] = {
    providers.OURS: providers.ours,
    providers.CUBLAS: providers.cublas,
    providers.ROUTED: providers.routed,
    TUTORIAL: tutorial,
    COMPILED: compiled,
    TUNED: cublaslt_tuned,
    INDUCTOR: inductor,
}
