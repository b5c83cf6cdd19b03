"""Concurrent launches on several streams, threads and graphs, on a GPU that other kernels keep busy. Each result must
be bit-identical to that of the same product launched alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import triton_gemm
from tests.gpu.kernels.test_kernels_gpu import DEVICE, counters_are_zero, gpu, persistent
from tests.gpu.runtime.test_plan_gpu import PLAIN, SPLIT
from tests.support.kernel_cases import bits
from tests.support.threads import at_once
from triton_gemm.compat import CLUSTERS
from triton_gemm.kernels import fma, portable, warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.select import Selection

LAUNCHES = 100_000
STREAMS = 8


@dataclass
class Job:
    """A product into c on the current stream, and its result when nothing else runs."""

    name: str
    run: Callable[[torch.Tensor], object]
    truth: torch.Tensor

    @classmethod
    def of(cls, name: str, run: Callable[[torch.Tensor], object], c: torch.Tensor) -> Job:
        run(c.fill_(torch.nan))
        torch.cuda.synchronize()
        assert not c.isnan().any()
        return cls(name, run, c.clone())

    def place(self) -> torch.Tensor:
        """Memory for a result, of the current stream."""
        return torch.full_like(self.truth, torch.nan)

    def is_right(self, c: torch.Tensor) -> bool:
        return torch.equal(bits(c), bits(self.truth))


def chosen(size: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, order: str = "n") -> Job:
    """A product as `matmul` launches it. order: b's."""
    M, N, K = size
    a = torch.randn(M, K, device=DEVICE).to(dtype)
    b = torch.randn((K, N) if order == "n" else (N, K), device=DEVICE).to(dtype)
    b = b if order == "n" else b.mT
    c = torch.empty(M, N, dtype=dtype, device=DEVICE)
    return Job.of(f"{size} {dtype}", lambda c: triton_gemm.matmul(a, b, out=c), c)


def given(config: warp_specialised.Config, kind: str) -> Job | None:
    """A product of Hopper's kernel in a configuration; kind: "whole", "split" or "reduced". None where it has no such
    schedule."""
    M, N, K = 200, 264, 8200
    a = torch.randn(M, K, device=DEVICE).bfloat16()
    b = torch.randn(N, K, device=DEVICE).bfloat16().mT
    c = torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE)
    problem = GemmProblem.of(a, b, c)
    for schedule in warp_specialised.schedules(problem, config, gpu()):
        if kind_of(schedule) == kind and warp_specialised.illegal(problem, gpu(), config, schedule) is None:
            plan = GemmPlan(problem, persistent(config, schedule), DEVICE)
            return Job.of(f"{config}, {schedule}", partial(plan.run, a, b), c)
    return None


def shared_sums(algorithm: Algorithm, dtype: torch.dtype) -> Job:
    """A product of a kernel on pointers whose programs add up one another's sums."""
    a, b = (torch.randn(rows, 4104, device=DEVICE).to(dtype)[:, :4100] for rows in (700, 520))
    c = torch.empty(700, 520, dtype=dtype, device=DEVICE)
    problem = GemmProblem.of(a, b.mT, c, precision="ieee" if dtype == torch.float32 else None)
    plan = GemmPlan(problem, Selection(algorithm, "by a test", problem.precision), DEVICE)
    return Job.of(str(algorithm), partial(plan.run, a, b.mT), c)


def kind_of(schedule: Schedule) -> str:
    return "reduced" if schedule.reduction else "split" if schedule.split_tiles else "whole"


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Products of every kernel, some with sums that programs share; on Hopper also with second launches, and where
    Triton has them in clusters."""
    found = [
        *(chosen((1, 4096, 4096)), chosen((8, 2048, 1024), order="t"), chosen(SPLIT), chosen(PLAIN)),
        *(chosen((300, 257, 129)), chosen((64, 96, 16384), order="t"), chosen((256, 320, 512), torch.float32)),
        chosen((130, 70, 4100), torch.float16),
        shared_sums(Algorithm("portable", portable.CONFIGS["half"][0], 4), torch.bfloat16),
        shared_sums(Algorithm("fma", fma.CONFIGS[-1], 5, packed=("a", "b")), torch.float32),
    ]
    if is_hopper():
        alone = [config for config in warp_specialised.CONFIGS if (config.BLOCK_M, config.BLOCK_N) == (64, 64)]
        clustered = [*warp_specialised.CLUSTERED[2:7:2], *warp_specialised.FOR_LONG_SUMS[3:8:2]] if CLUSTERS else []
        kinds = set()
        for config in (*alone, *clustered):
            for kind in ("whole", "split", "reduced"):
                job = given(config, kind)
                if job is not None:
                    found.append(job)
                    kinds.add((kind, config.ctas > 1))
        assert {kind for kind, _ in kinds} == {"whole", "split", "reduced"}
        assert not CLUSTERS or kinds >= {("whole", True), ("reduced", True)}
    return found


@contextmanager
def in_the_background(work: Callable[[], object]) -> Iterator[None]:
    """Inside, another thread does that again and again, on a stream of its own, of which it waits for the end."""
    stop, wrong = threading.Event(), []

    def repeat() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    work()
                    stream.synchronize()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert wrong == [], wrong


def copies() -> Callable[[], None]:
    """What keeps memory busy for some milliseconds."""
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    torch.cuda.synchronize()

    def copy() -> None:
        for _ in range(16):
            target.copy_(source)

    return copy


@pytest.mark.parametrize("how", ["equal", "distinct"])
def test_eight_streams_at_once(jobs: list[Job], how: str) -> None:
    """Of the same product, and of different ones."""
    streams, results = [torch.cuda.Stream() for _ in range(STREAMS)], []
    torch.cuda.synchronize()
    for turn in range(4 * len(jobs)):
        for i, stream in enumerate(streams):
            job = jobs[(turn + (i if how == "distinct" else 0)) % len(jobs)]
            with torch.cuda.stream(stream):
                c = job.place()
                job.run(c)
                results.append((job, c))
    torch.cuda.synchronize()
    assert [job.name for job, c in results if not job.is_right(c)] == []
    assert counters_are_zero()


def test_graphs_are_captured_while_another_thread_launches(jobs: list[Job]) -> None:
    """And replayed while it goes on, which allocates, has workspaces of its own, and waits for its stream."""
    at = 0

    def launch() -> None:
        nonlocal at
        launched = [(job, job.place()) for job in (jobs[(at + i) % len(jobs)] for i in range(5))]
        at += 5
        for job, c in launched:
            job.run(c)
        assert all(job.is_right(c) for job, c in launched)

    stream = torch.cuda.Stream()
    with in_the_background(launch):
        graphs = []
        for job in jobs:
            graph, outs = torch.cuda.CUDAGraph(), [job.place() for _ in range(3)]
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for c in outs:
                    job.run(c)
            graphs.append((job, graph, outs))
        wrong = set()
        with torch.cuda.stream(stream):
            for _ in range(20):
                for _, graph, outs in graphs:
                    for c in outs:
                        c.fill_(torch.nan)
                    graph.replay()
                stream.synchronize()
                wrong |= {job.name for job, _, outs in graphs if not all(map(job.is_right, outs))}
    assert wrong == set()
    assert counters_are_zero()


def test_launch_after_launch_under_load(jobs: list[Job]) -> None:
    """100,000, from eight threads on a stream each, while memory is busy. Of each the bits that differ are gathered on
    the GPU; a launch that stores nothing leaves NaN."""
    differences: list[torch.Tensor] = []
    launched = [0] * STREAMS
    torch.cuda.synchronize()

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            places = [job.place() for job in jobs]
            words = [(bits(c), bits(job.truth)) for job, c in zip(jobs, places, strict=True)]
            flips = [(torch.empty_like(truth), torch.zeros_like(truth)) for _, truth in words]
            differences.extend([flipped for _, flipped in flips])
            for step in range(LAUNCHES // STREAMS):
                which = (3 * thread + step) % len(jobs)
                (got, truth), (now, flipped) = words[which], flips[which]
                jobs[which].run(places[which].fill_(torch.nan))
                torch.bitwise_xor(got, truth, out=now)
                flipped.bitwise_or_(now)
                launched[thread] += 1

    with in_the_background(copies()):
        at_once(*(partial(work, thread) for thread in range(STREAMS)))
        torch.cuda.synchronize()
    assert sum(launched) == LAUNCHES
    of_job = [torch.stack([flipped.any() for flipped in differences[i :: len(jobs)]]).any() for i in range(len(jobs))]
    differ = torch.stack(of_job).tolist()
    assert [job.name for job, differs in zip(jobs, differ, strict=True) if differs] == []
    assert counters_are_zero()
