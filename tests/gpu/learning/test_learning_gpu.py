"""Learning in service on a GPU: what is learned keeps the bits, captures and memory are left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import triton_gemm
from tests.gpu.sharing import skip_if_shared
from tests.support import table_fakes
from triton_gemm import tables
from triton_gemm.learning import block, candidates, statistics, trial, tuner
from triton_gemm.runtime import background, turns

pytestmark = pytest.mark.usefixtures("alone", "learner")


@pytest.fixture(scope="module")
def alone() -> None:
    skip_if_shared()


@pytest.fixture
def learner(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuner.Tuner]:
    """It spends what it likes, loads as it likes, and races three kernels, which workers compile."""
    monkeypatch.setattr(statistics, "SHARE", 1.0)
    monkeypatch.setattr(trial, "LOADED_S", 0.0)
    monkeypatch.setattr(candidates, "MOST", 3)
    monkeypatch.setattr(background, "enabled", lambda: True)
    monkeypatch.setattr(background, "submit", lambda *_: None)  # a worker would know of eight
    found = tuner.Tuner()
    monkeypatch.setattr(turns, "_learner", found)
    with table_fakes.default_policy():
        table_fakes.own_folder(tmp_path, monkeypatch)
        yield found
    found.finish()
    found.broken = True  # or it goes on with the next test
    tables.reload()


def pair(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, K), (N, K)))
    return next(made), next(made)


def call_until(done: Callable[[], bool], x: torch.Tensor, weight: torch.Tensor, seconds: float = 60.0) -> torch.Tensor:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing was learned"
        for _ in range(200):
            c = torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()
    return c


@pytest.mark.parametrize("sizes", [(16, 4096, 4096), (300, 2048, 2048), (64, 512, 8192)], ids=str)
def test_what_is_learned_keeps_the_bits(learner: tuner.Tuner, sizes: tuple[int, int, int]) -> None:
    x, weight = pair(*sizes)
    turns.counts.clear()
    del_me = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    del del_me
    with triton_gemm.use():
        expected = torch.nn.functional.linear(x, weight)
    reserved = torch.cuda.memory_reserved()
    with triton_gemm.use(learn=True):
        c = call_until(lambda: turns.counts["GEMMs raced"] > 0 and not learner.trials, x, weight)
        assert torch.equal(c, expected)
        assert torch.equal(torch.nn.functional.linear(x, weight), expected) and not learner.broken
    turns.counts.clear()
    assert torch.cuda.memory_reserved() <= reserved + (4 << 20), "the driver is asked for no operands"


def test_a_graph_that_is_captured_amid_a_race_has_the_call_alone(learner: tuner.Tuner) -> None:
    x, weight = pair(64, 2048, 2048)
    del_me = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    del del_me
    with triton_gemm.use(learn=True):
        call_until(lambda: any(x.graphs for x in list(learner.trials.values())), x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(600):
                c = torch.nn.functional.linear(x, weight)
        graph.replay()
        expected = call_until(lambda: not learner.trials, x, weight)
    assert torch.equal(c, expected) and not learner.broken


def test_memory_is_taken_from_what_torch_has(learner: tuner.Tuner) -> None:
    torch.cuda.empty_cache()
    stream = torch.cuda.current_stream().cuda_stream
    assert not block.is_free(0, stream, 64 << 20)
    del_me = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    del del_me
    assert block.is_free(0, stream, 64 << 20)
    reserved = torch.cuda.memory_reserved()
    found = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == reserved
    assert not block.is_free(0, stream, 64 << 20), "what is left is too small"
    del found
