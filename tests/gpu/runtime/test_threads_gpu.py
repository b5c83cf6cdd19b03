"""Threads and processes in which this package is the first to use CUDA: nothing has made a context current there.

A thread of its own does nothing but the call under test: whatever allocates, synchronizes or loads a kernel would make
one. So problems are known, operands and results are allocated before, and addresses are new, so that tensor maps have
to be changed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import triton_gemm
from tests.gpu.runtime.test_plan_gpu import PLAIN, SPLIT, assert_right, pair, random
from tests.support.epilogue_truth import expected
from tests.support.processes import printed
from tests.support.threads import at_once
from triton_gemm.hardware.device import device_info
from triton_gemm.kernels import portable
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.ladder import LADDER
from triton_gemm.runtime import plan, step, workspace
from triton_gemm.selection import generation
from triton_gemm.selection.select import Selection

two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


def in_fresh_threads(*calls: Callable[[], object]) -> list[Any]:
    """Makes each call in a new thread. Returns the results, once the GPU has computed them."""
    found = at_once(*calls)
    torch.cuda.synchronize()
    return found


def empty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)


def into_nan(size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = pair(size)
    return a, b, empty(a, b)


@pytest.mark.parametrize("size", [PLAIN, SPLIT, (1, 4096, 4096), (300, 257, 129)], ids=str)
def test_a_known_shape_at_a_new_address(size: tuple[int, int, int]) -> None:
    known, (a, b, c) = into_nan(size), into_nan(size)
    triton_gemm.matmul(*known[:2], out=known[2])
    in_fresh_threads(lambda: triton_gemm.matmul(a, b, out=c))
    assert_right(a, b, c)


def test_new_shapes_in_sixteen_threads() -> None:
    """Whose kernels are loaded for others already."""
    products = [into_nan((256 + 8 * i, 512 + 16 * i, 320 + 8 * i)) for i in range(16)]
    for a, b, c in products:
        triton_gemm.matmul(a, b, out=c)
    generation.advance()
    in_fresh_threads(*(partial(triton_gemm.matmul, a, b, out=c) for a, b, c in products))
    for product in products:
        assert_right(*product)


@pytest.mark.parametrize("problems", [1, 16])
def test_sixteen_threads_compile_each_problem_once(problems: int) -> None:
    """At the first use of one problem, or of one each, of other layouts, dtypes and sizes."""
    generation.advance()
    plan.PLANS.clear()
    operands = []
    for i in range(16):
        kind = i % problems
        M, N, K = 272 + 16 * problems + kind // 8, 1112 + kind // 8, 536 + kind // 8
        dtype = torch.float16 if kind // 4 % 2 else torch.bfloat16
        a = random(M, K, dtype=dtype) if kind % 2 else random(K, M, dtype=dtype).mT
        b = random(K, N, dtype=dtype) if kind // 2 % 2 else random(N, K, dtype=dtype).mT
        operands.append((a, b, empty(a, b)))
    compiled: list[object] = []

    def noted(launch: Any, *rest: Any) -> Any:
        compiled.append(launch)
        return compile_launch(launch, *rest)

    compile_launch = step.compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.kits, "code_of", lambda *_: None)
        patch.setattr(step, "compiled", noted)
        in_fresh_threads(*(partial(triton_gemm.matmul, a, b, out=c) for a, b, c in operands))
    plans = list(plan.PLANS.values())
    assert len(plans) == problems
    assert len(compiled) == sum(len(made.steps) for made in plans if isinstance(made, plan.GemmPlan))
    for a, b, c in operands:
        assert torch.equal(c, triton_gemm.matmul(a, b, out=empty(a, b)))
        assert_right(a, b, c)


def test_a_pool_of_threads() -> None:
    products = [into_nan((96 + 8 * (i % 8), 160, 4096)) for i in range(64)]
    for a, b, _ in products[:8]:
        triton_gemm.matmul(a, b, out=empty(a, b))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda product: triton_gemm.matmul(*product[:2], out=product[2]), products))
    torch.cuda.synchronize()
    for product in products:
        assert_right(*product)


def test_a_workspace_that_does_not_fit() -> None:
    """torch's error comes through, and the next call has the bits of the one before."""
    a, b, c = into_nan(SPLIT)
    shared = Selection(Algorithm("portable", portable.CONFIGS["half"][0], 3), "by a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "selection_for", lambda *_, **__: shared)
        generation.advance()
        first = triton_gemm.matmul(a, b)
        workspace._workspaces.clear()
        with pytest.MonkeyPatch.context() as too_large:
            too_large.setattr(workspace, "MINIMUM", 1 << 50)  # more than any GPU has
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    triton_gemm.matmul(a, b, out=c)
        assert not workspace._workspaces
        triton_gemm.matmul(a, b, out=c)
    generation.advance()
    assert torch.equal(c, first)


def test_an_interruption_while_it_compiles() -> None:
    """The next call compiles again, in whatever thread."""
    a, b, c = into_nan((648, 1096, 520))
    generation.advance()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.kits, "code_of", lambda *_: None)
        patch.setattr(step, "compiled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            triton_gemm.matmul(a, b, out=c)
    in_fresh_threads(*[lambda: triton_gemm.matmul(a, b, out=c)] * 4)
    assert_right(a, b, c)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_routed_products() -> None:
    (a, b, c), (x, y, z) = into_nan((520, 264, 136)), into_nan((528, 264, 136))
    with triton_gemm.use():
        torch.mm(*pair((520, 264, 136)))
        in_fresh_threads(lambda: torch.mm(a, b, out=c), lambda: torch.mm(x, y, out=z))
    assert_right(a, b, c)
    assert_right(x, y, z)


def test_groups_and_scales() -> None:
    a, b, offs = random(512, 256), random(3, 256, 128), torch.tensor([100, 300, 512], dtype=torch.int32, device="cuda")
    eights = [random(256, 128).to(torch.float8_e4m3fn), random(64, 128).to(torch.float8_e4m3fn).T]
    one = torch.ones((), device="cuda")
    grouped, scaled = in_fresh_threads(
        lambda: triton_gemm.grouped_matmul(a, b, offs), lambda: triton_gemm.scaled_matmul(*eights, one, one)
    )
    assert_right(a[100:300], b[1], grouped[100:300])
    truth, bound = expected(*(x.double() for x in eights), None, mode="fp8", out_dtype=scaled.dtype)
    assert ((scaled.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("rung", [rung for rung in LADDER if rung.precision == "half"], ids=lambda rung: rung.id)
def test_rungs(rung: Any) -> None:
    if torch.cuda.get_device_capability() not in rung.capabilities:
        pytest.skip("does not run on this GPU")
    config = rung.legal_configs(device_info(torch.device("cuda")), torch.bfloat16)[0]
    rung.launch(*(operands := pair((512, 512, 512))), empty(*operands), config=config)
    a, b, c = into_nan((512, 512, 512))
    in_fresh_threads(lambda: rung.launch(a, b, c, config=config))
    assert_right(a, b, c)


FIRST_CAPTURE = """
import threading, torch, triton_gemm
a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
c, graph, wrong = torch.empty_like(a), torch.cuda.CUDAGraph(), []
def capture():
    try:
        with torch.cuda.graph(graph):
            triton_gemm.matmul(a, b, out=c)
    except BaseException as error:
        wrong.append(error)
thread = threading.Thread(target=capture)
thread.start()
thread.join()
assert wrong == [], wrong
c.fill_(torch.nan)
graph.replay()
assert torch.equal(c, triton_gemm.matmul(a, b))
"""


def test_the_first_call_is_captured_in_a_fresh_thread() -> None:
    printed(FIRST_CAPTURE)


@two_gpus
def test_a_thread_that_only_ever_used_another_gpu() -> None:
    sizes = (PLAIN, SPLIT)
    here = [pair(size) for size in sizes]
    there = [tuple(x.to("cuda:1") for x in operands) for operands in here]
    outs = [empty(*operands) for operands in there]
    back = [empty(*operands) for operands in here]

    def on_the_other() -> int:
        torch.cuda.set_device(1)
        for (a, b), c in zip(there, outs, strict=True):
            triton_gemm.matmul(a, b, out=c)
        for (a, b), c in zip(here, back, strict=True):
            triton_gemm.matmul(a, b, out=c)
        torch.cuda.synchronize()
        return torch.cuda.current_device()

    assert in_fresh_threads(on_the_other) == [1]
    for (a, b), c, other in zip(here, back, outs, strict=True):
        assert_right(a, b, c)
        assert torch.equal(c, other.to("cuda:0"))


@two_gpus
def test_operands_on_another_gpu_than_the_fresh_threads_own() -> None:
    a, b = (x.to("cuda:1") for x in pair(PLAIN))
    c = empty(a, b)
    in_fresh_threads(lambda: triton_gemm.matmul(a, b, out=c))
    torch.cuda.synchronize(1)
    assert_right(a, b, c)


class Products(torch.utils.data.Dataset[torch.Tensor]):
    """Each item a product on the GPU of whichever process asks for it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((64, 64), float(i), device="cuda", dtype=torch.bfloat16)
        return triton_gemm.matmul(x, torch.eye(64, device="cuda", dtype=torch.bfloat16)).cpu()


def test_spawned_workers_multiply() -> None:
    loader = torch.utils.data.DataLoader(
        Products(), batch_size=None, num_workers=2, multiprocessing_context=multiprocessing.get_context("spawn")
    )
    for i, product in enumerate(loader):
        assert torch.equal(product, torch.full((64, 64), float(i), dtype=torch.bfloat16))


FORKED = """
import os, torch, triton_gemm
a, b = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
c = triton_gemm.matmul(a, b)
for call in (lambda: triton_gemm.matmul(a, b), lambda: triton_gemm.matmul(a, b, out=c)):
    child = os.fork()
    if child == 0:
        try:
            call()
        except RuntimeError as error:
            os._exit(0 if "CUDA" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_worker_gets_torchs_error() -> None:
    """CUDA cannot be used on after a fork; torch says so, and so do we: no crash, and no wrong result."""
    printed(FORKED)
