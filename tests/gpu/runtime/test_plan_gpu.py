"""Plans on a GPU: in graphs, on streams, in threads; on reused addresses; without waiting, copying or growing."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import triton_gemm
from tests.gpu.calls import captured
from tests.gpu.kernels.test_kernels_gpu import counters_are_zero, hopper
from tests.support.epilogue_truth import expected
from tests.support.processes import printed
from tests.support.threads import at_once
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import plan, workspace
from triton_gemm.selection.select import Selection

SPLIT = (96, 160, 8192)  # so few tiles that K is split, on any GPU
PLAIN = (1024, 1288, 264)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def pair(size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K = size
    return random(M, K), random(K, N)


def assert_right(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    truth, bound = expected(a, b, None, mode="bf16", out_dtype=c.dtype, parts=32)
    assert ((c.double() - truth).abs() <= bound).all()


def is_split(a: torch.Tensor, b: torch.Tensor) -> bool:
    choice = triton_gemm.explain(a, b)
    return choice.split_k > 1 or (choice.schedule is not None and choice.schedule.split_tiles > 0)


def busy(milliseconds: float = 20) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(1.5e6 * milliseconds))


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    assert counters_are_zero()


def test_the_sizes_here_are_split_and_not() -> None:
    assert is_split(*pair(SPLIT)) and not is_split(*pair(PLAIN))


# --- Graphs ---

FIRST = """
import torch, triton_gemm
graphs = []
for M, N, K in ((96, 160, 8192), (1024, 1288, 264), (1, 512, 512), (60, 63, 65)):
    a, b = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((M, K), (K, N)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_gemm.matmul(a, b)
    graphs.append((graph, a, b, out))
for graph, a, b, out in graphs:
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, triton_gemm.matmul(a, b))
"""


def test_a_graph_captures_a_first_call() -> None:
    """Which selects, compiles and loads kernels while the stream is capturing."""
    printed(FIRST)


def test_a_graph_replays_beside_eager_calls_that_split_too() -> None:
    """Their partial sums and counters must not meet."""
    a, b = pair(SPLIT)
    truth = triton_gemm.matmul(a, b)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph, outs = captured(lambda: [triton_gemm.matmul(a, b) for _ in range(20)])
    torch.cuda.synchronize()
    for _ in range(10):
        graph.replay()
        eager = []
        for stream in streams:
            with torch.cuda.stream(stream):
                eager += [triton_gemm.matmul(a, b) for _ in range(10)]
        eager += [triton_gemm.matmul(a, b)]  # and on the stream that the graph runs on
        torch.cuda.synchronize()
        assert all(torch.equal(c, truth) for c in outs + eager)


def test_several_graphs_replay_beside_one_another() -> None:
    pairs = [pair((96 + 8 * i, 160, 8192)) for i in range(6)]
    truths = [triton_gemm.matmul(a, b) for a, b in pairs]
    graphs = [captured(lambda a=a, b=b: [triton_gemm.matmul(a, b) for _ in range(5)]) for a, b in pairs]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for truth, (_, results) in zip(truths, graphs, strict=True):
            assert all(torch.equal(c, truth) for c in results)


def test_a_graph_may_fork_into_streams() -> None:
    a, b = pair(SPLIT)
    truth = triton_gemm.matmul(a, b)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = [triton_gemm.matmul(a, b) for _ in range(5)]
        here = [triton_gemm.matmul(a, b) for _ in range(5)]
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(10):
        for c in there + here:
            c.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(c, truth) for c in there + here)


def test_a_graph_outlives_the_workspaces_that_came_after_it() -> None:
    """Only so many are kept, and its own is given up before it is replayed."""
    a, b = pair(SPLIT)
    truth = triton_gemm.matmul(a, b)
    graphs = [captured(lambda: triton_gemm.matmul(a, b)) for _ in range(workspace.MAX_WORKSPACES + 4)]
    assert len(workspace._workspaces) <= workspace.MAX_WORKSPACES
    litter = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]  # where its memory may have been
    for graph, out in graphs:
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, truth)
    assert all(bool(x.isnan().all()) for x in litter), "a graph wrote to memory that is no longer its own"


# --- Streams and threads ---


def test_streams_split_at_once() -> None:
    a, b = pair(SPLIT)
    truth = triton_gemm.matmul(a, b)
    streams = [torch.cuda.Stream() for _ in range(workspace.MAX_WORKSPACES + 8)]  # more than keep a workspace
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(triton_gemm.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(c, truth) for c in results)
    assert len(workspace._workspaces) <= workspace.MAX_WORKSPACES


@hopper
def test_a_larger_workspace_takes_the_place_of_one_in_use() -> None:
    """What an earlier launch on the stream still reads and writes stays its own."""
    config = next(c for c in warp_specialised.CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 128))
    device = torch.device("cuda", 0)
    a, b = pair((1024, 1024, 2048))
    c = torch.empty(1024, 1024, device="cuda", dtype=a.dtype)
    problem = GemmProblem.of(a, b, c)
    algorithms = [Algorithm("warp_specialised", config, Schedule(128, split, 3)) for split in (10, 42)]
    plans = [plan.GemmPlan(problem, Selection(algorithm, "by a test"), device) for algorithm in algorithms]
    assert plans[0].workspace < workspace.MINIMUM < plans[1].workspace

    def launch(which: int) -> torch.Tensor:
        plans[which].run(a, b, c.fill_(torch.nan))
        return c.clone()

    truths = [launch(0), launch(1)]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        busy()
        results = [launch(i % 2) for i in range(4)]
        litter = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(32)]
        results += [launch(i % 2) for i in range(4)]
    torch.cuda.synchronize()
    assert all(torch.equal(result, truths[i % 2]) for i, result in enumerate(results))
    assert all(bool(x.isnan().all()) for x in litter)


PRIORITIES = """
import torch
from triton_gemm.hardware.device import device_info
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection

device = torch.device("cuda", 0)
programs = device_info(device).num_sms
rows = programs // 3  # tiles: as many owners that wait as a launch can have
config = next(c for c in warp_specialised.CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 128))
schedule = Schedule(programs, split_tiles=rows, split_k=3)
choice = Selection(Algorithm("warp_specialised", config, schedule), "by a test")
jobs = []
for priority in (0, -1):
    a, b = (torch.randn(shape, device=device).to(torch.bfloat16) for shape in ((128 * rows, 768), (768, 128)))
    c = torch.empty(128 * rows, 128, device=device, dtype=torch.bfloat16)
    plan = GemmPlan(GemmProblem.of(a, b, c), choice, device)
    plan.run(a, b, c)
    jobs.append((plan, a, b, c, c.clone(), torch.cuda.Stream(priority=priority)))
torch.cuda.synchronize()
filler = torch.cuda.Stream()
for i in range(300):
    with torch.cuda.stream(filler):
        torch.cuda._sleep(20_000)
    for plan, a, b, c, _, stream in jobs if i % 2 else jobs[::-1]:
        with torch.cuda.stream(stream):
            plan.run(a, b, c)
torch.cuda.synchronize()
assert all(torch.equal(c, truth) for _, _, _, c, truth, _ in jobs)
"""


@hopper
def test_programs_that_wait_do_not_keep_out_those_they_wait_for() -> None:
    """Two launches of persistent programs on streams of different priority, which may share the multiprocessors."""
    printed(PRIORITIES)


def test_threads_share_a_stream() -> None:
    a, b = pair(SPLIT)
    truth = triton_gemm.matmul(a, b)
    results = at_once(*8 * [lambda: [triton_gemm.matmul(a, b) for _ in range(50)]])
    assert all(torch.equal(c, truth) for calls in results for c in calls)


# --- Devices and processes ---


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("size", [SPLIT, PLAIN], ids=["split", "plain"])
def test_on_the_tensors_own_device(size: tuple[int, int, int]) -> None:
    a, b = (x.to("cuda:1") for x in pair(size))
    here = triton_gemm.matmul(a.to("cuda:0"), b.to("cuda:0"))
    for _ in range(3):
        c = triton_gemm.matmul(a, b)
        assert c.device == a.device and torch.cuda.current_device() == 0
        assert torch.equal(c.to("cuda:0"), here)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        assert torch.equal(triton_gemm.matmul(a, b).to("cuda:0"), here)


FORK = """
import os, torch, triton_gemm
from tests.support.product_views import assert_product
def multiply():
    a, b = (torch.randn(256, 256, device="cuda").half() for _ in range(2))
    assert_product(triton_gemm.matmul(a, b), a, b)
child = os.fork()
if child == 0:
    multiply()
    os._exit(0)
multiply()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_process_may_fork_before_it_uses_the_gpu() -> None:
    printed(FORK)


WRAPPING = """
import os
os.environ["TRITON_DEBUG"] = "1"
import torch, triton_gemm
for M, N in ((1, 48), (64, 48), (512, 768)):
    a, b = (torch.full((rows, 2**17 + 64), -128, dtype=torch.int8, device="cuda") for rows in (M, N))
    assert (triton_gemm.matmul(a, b.T) == 2**20 - 2**31).all()
"""


def test_sums_of_int8_wrap_under_triton_debug() -> None:
    """Where Triton asserts that other additions do not."""
    printed(WRAPPING)


# --- Addresses ---


def test_an_address_that_is_used_again_with_other_strides() -> None:
    """The allocator gives freed memory to the next tensor; what is kept for an address is not that of another view."""
    buffer = random(1 << 20)
    views: list[Callable[[], tuple[torch.Tensor, torch.Tensor]]] = [
        lambda: (buffer[: 512 * 264].view(512, 264), buffer[: 264 * 128].view(264, 128)),
        lambda: (buffer[: 512 * 264].view(264, 512).T, buffer[: 264 * 128].view(264, 128)),
        lambda: (buffer[: 512 * 264].view(512, 264), buffer[: 264 * 128].view(128, 264).T),
        lambda: (buffer[: 512 * 272].view(512, 272)[:, :264], buffer[: 264 * 136].view(264, 136)[:, :128]),
        lambda: (buffer[: 1024 * 264].view(512, 528)[:, :264], buffer[:264, None].expand(264, 128)),
    ]
    for _ in range(3):
        for view in views:
            a, b = view()
            assert_right(a, b, triton_gemm.matmul(a, b))


def resident() -> int:
    """Bytes of memory that this process has; 0 where that cannot be told."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def test_memory_stays_bounded_over_many_addresses() -> None:
    buffer = random(8 * 100_000 + 64 * 64)
    b, out = random(64, 64), random(64, 64)
    grown = []
    for part in range(4):
        start = resident()
        for i in range(10_000):
            a = buffer.as_strided((64, 64), (64, 1), 8 * (10_000 * part + i))
            triton_gemm.matmul(a, b, out=out)
        torch.cuda.synchronize()
        grown.append(resident() - start)
    assert min(grown[2:]) < 2 << 20, f"bytes more for each 10,000 addresses: {grown}"
    assert_right(a, b, out)


# --- Without waiting, copying or growing ---

WARM = {"split": SPLIT, "plain": PLAIN, "gemv": (1, 1024, 4096), "skinny": (4096, 1, 4096), "portable": (60, 63, 65)}


@pytest.mark.parametrize("size", WARM.values(), ids=WARM)
def test_a_warm_call_does_not_wait_for_the_gpu(size: tuple[int, int, int]) -> None:
    a, b = pair(size)
    truth = triton_gemm.matmul(a, b)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(300)
        start = time.perf_counter()
        c = triton_gemm.matmul(a, b)
        took = time.perf_counter() - start
        still_busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert still_busy, f"the GPU was done when the call came back, after {took:.3f} s"
    assert torch.equal(c, truth)


@pytest.mark.parametrize("size", WARM.values(), ids=WARM)
def test_a_warm_call_allocates_its_output_and_nothing_else(size: tuple[int, int, int]) -> None:
    """But sums for a second launch, which are given back: memory of another call's would be a race (`sums_of`)."""
    a, b = pair(size)
    out = triton_gemm.matmul(a, b)
    triton_gemm.matmul(a, b, out=out)
    temporaries = [x for step in getattr(plan.plan_for(a, b, out), "steps", ()) for x in step.launch.temporaries]
    sums = sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in temporaries)

    def allocations() -> tuple[int, int]:
        statistics = torch.cuda.memory_stats()
        return statistics["allocation.all.allocated"], statistics["allocated_bytes.all.allocated"]

    count, size_before = allocations()
    kept = [triton_gemm.matmul(a, b) for _ in range(5)]
    assert allocations()[0] - count == 5 * (1 + len(temporaries))
    # torch's allocator leaves up to 1 MiB of a block with its tensor (CUDACachingAllocator, kSmallSize).
    most = out.numel() * out.itemsize + sums + (1 + len(temporaries) << 20)
    assert allocations()[1] - size_before <= 5 * most
    before, live = allocations()[0], torch.cuda.memory_allocated()
    for _ in range(5):
        triton_gemm.matmul(a, b, out=out)
    assert allocations()[0] - before == 5 * len(temporaries) and torch.cuda.memory_allocated() == live
    assert all(torch.equal(c, out) for c in kept)


def test_copies_that_tma_needs_are_given_back() -> None:
    a, b = random(1500, 1601)[:, 1:], random(1600, 1400)
    assert not triton_gemm.explain(a, b).packed or torch.cuda.get_device_capability() == (9, 0)
    out = triton_gemm.matmul(a, b)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        triton_gemm.matmul(a, b, out=out)
    assert torch.cuda.memory_allocated() == before
    assert_right(a, b, out)
