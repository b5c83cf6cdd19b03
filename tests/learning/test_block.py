"""A race's private operands: where they are, what they hold, and how results are compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import learning_fakes
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER, problem_of
from tests.support.threads import at_once
from triton_gemm.learning import block
from triton_gemm.learning.block import Layout, Operands, is_free
from triton_gemm.problem import GemmProblem
from triton_gemm.problem import Layout as Strides
from triton_gemm.runtime.binaries import launches_on
from triton_gemm.selection.select import select

L2 = 1 << 20
MIB = 2**20


def plan_of(problem: GemmProblem) -> Any:
    made = launches_on(HOPPER, problem, select(problem, HOPPER))
    temporaries = [x.name for launch in made for x in launch.temporaries]
    names = ("a", "b", "c", *problem.auxiliary, "workspace", "counters", *temporaries)
    workspace = max(launch.workspace for launch in made)
    return SimpleNamespace(steps=[SimpleNamespace(launch=x) for x in made], names=names, workspace=workspace)


ODD = Strides((0, 523, 1), aligned=False)
PROBLEMS = {
    "plain": problem_of(96, 256, 512),
    "split": problem_of(64, 256, 8192),
    "odd": replace(problem_of(33, 200, 333), a=ODD, b=ODD),
    "beta": replace(problem_of(96, 256, 512), has_beta=True),
    "bias": replace(problem_of(96, 256, 512), bias="n", activation="gelu"),
    "batch": replace(problem_of(32, 64, 128), batch=3, a=Strides((4096, 128, 1)), b=Strides((8192, 64, 1))),
    "int8": replace(problem_of(96, 256, 512, torch.int8), out_dtype=torch.int32, precision="int8"),
}


def operands(problem: GemmProblem) -> Operands:
    layout = Layout.of(problem, [plan_of(problem)], L2)
    assert layout is not None
    own = 4096 if layout.own else None
    made = Operands(problem, layout, torch.full((layout.nbytes,), 77, dtype=torch.uint8), own)
    before = torch.get_rng_state()
    made.fill(0)
    assert torch.equal(torch.get_rng_state(), before), "the application's numbers are its own"
    return made


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's, by the host."""
    replace_all(monkeypatch, block, copy=learning_fakes.copy, synchronize=lambda _: None)


def part(made: Operands, key: Any, dtype: torch.dtype) -> torch.Tensor:
    at, nbytes = made.layout.places[key]
    return made.memory[at : at + nbytes].view(dtype)


@pytest.mark.parametrize("name", PROBLEMS)
def test_parts_lie_apart_and_hold_numbers(name: str) -> None:
    problem, plan = PROBLEMS[name], plan_of(PROBLEMS[name])
    made = operands(problem)
    places = sorted(made.layout.places.values())
    assert all(at + nbytes <= after for (at, nbytes), (after, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] <= made.layout.nbytes <= block.LIMIT
    a = part(made, ("a", 0), problem.dtype).float()
    assert a.isfinite().all() and a.unique().numel() > 100
    assert abs(a.mean()) < 0.1 * a.std() and (a != 77).any()
    assert not part(made, "counters", torch.int32).any()
    values = {number: made.values(plan, number) for number in range(block.LAUNCHES)}
    begin = made.memory.data_ptr()
    for of in values.values():
        assert of[:2] == (1.0, 0.5 if problem.has_beta else 0.0) and len(of) == 2 + len(plan.names)
        of_call = made.own_address
        assert all(x == of_call or begin <= x < begin + made.layout.nbytes for x in of[2:])
        aligned = problem.a.aligned, problem.b.aligned, problem.c.aligned
        assert of_call or tuple(address % 16 == begin % 16 for address in of[2:5]) == aligned
    assert len({of[2] for of in values.values()}) == made.layout.sets
    assert made.values(plan, 0, "expected")[4] not in {of[4] for of in values.values()}


@pytest.mark.parametrize("piece", [1000, block.PIECE])
@pytest.mark.parametrize("name", ["plain", "beta", "odd", "int8"])
def test_one_bit_anywhere_is_a_difference(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "PIECE", piece)
    made = operands(PROBLEMS[name])

    def differs(at: int | None) -> bool:
        for key in ("expected", ("c", 0)):
            made.prepare(key, 0)
        if at is not None:
            part(made, ("c", 0), torch.uint8)[at] ^= 1
        return not made.is_as_expected(("c", 0), 0)

    size = made.layout.places["expected"][1]
    assert not differs(None)
    for at in (0, 7, size // 2 + 5, size - 1):
        assert differs(at)
        assert not differs(None), "it is asked anew each time"


def test_a_result_is_first_what_no_kernel_stores_and_with_beta_what_is_read() -> None:
    for name, dtype in (("plain", torch.bfloat16), ("beta", torch.bfloat16), ("int8", torch.int32)):
        made = operands(PROBLEMS[name])
        made.prepare(("c", 0), 0)
        c = part(made, ("c", 0), dtype)
        assert c.isnan().all() if name == "plain" else c.unique().numel() > 100 if name == "beta" else (c < 0).all()


def test_torch_has_no_threads_for_operands() -> None:
    """They would spin on all cores, and calls wait for one."""
    problem, count = problem_of(512, 512, 1024), torch.get_num_threads()
    assert problem.M * problem.N * 2 > 2 * block.PIECE

    def threads_begun() -> int:
        torch.set_num_threads(4)
        block._pattern.cache_clear()
        made = Operands(problem, layout, memory, None)
        before = set(Path("/proc/self/task").iterdir())
        made.fill(0)
        for key in ("expected", ("c", 0)):
            made.prepare(key, 0)
        assert made.is_as_expected(("c", 0), 0)
        return len(set(Path("/proc/self/task").iterdir()) - before)

    layout = Layout.of(problem, [plan_of(problem)], MIB)
    assert layout is not None
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    begun = at_once(threads_begun)
    torch.set_num_threads(count)
    assert begun == [0]


def test_sets_go_past_the_cache_and_fit() -> None:
    def of(M: int, N: int, K: int) -> Layout | None:
        return Layout.of(problem_of(M, N, K), [plan_of(problem_of(M, N, K))], 60 * MIB)

    small, large, huge = of(16, 2048, 8192), of(16, 7168, 7168), of(16, 28672, 4096)
    assert small is not None and (small.sets, small.own) == (4, False)
    assert large is not None and (large.sets, large.own) == (2, False)
    assert huge is not None and huge.own and ("b", 0) not in huge.places and huge.nbytes < 16 * MIB
    made = Operands(problem_of(16, 28672, 4096), huge, torch.zeros(huge.nbytes, dtype=torch.uint8), 4096)
    values = [made.values(plan_of(problem_of(16, 28672, 4096)), n) for n in range(4)]
    assert {of_b for _, _, _, of_b, *_ in values} == {4096}, "a large weight is the call's"
    assert of(8192, 28672, 8192) is None and of(8192, 7168, 7168) is None


def test_memory_is_torchs_own_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"size": 300 * MIB, "state": "inactive"}
    segment = {"device": 0, "stream": 7, "segment_type": "large", "segment_pool_id": (0, 0), "blocks": [one]}
    monkeypatch.setattr(block, "memory_segments", lambda: [segment])
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    unused, free = [300 * MIB], [80 << 30]
    replace_all(monkeypatch, torch.cuda, memory_allocated=lambda _: 1000 * MIB, mem_get_info=lambda _: (free[0], 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000 * MIB + unused[0])
    assert is_free(0, 7, 256 * MIB)
    unused[0] = 200 * MIB
    assert not is_free(0, 7, 256 * MIB), "no snapshot is asked for"
    unused[0] = 400 * MIB
    assert not is_free(0, 7, 301 * MIB) and not is_free(1, 7, MIB) and not is_free(0, 8, MIB)
    for name, value in (("segment_pool_id", (0, 1)), ("segment_type", "small")):
        with monkeypatch.context() as patch:
            patch.setitem(segment, name, value)
            assert not is_free(0, 7, MIB)
    one["state"] = "active_allocated"
    assert not is_free(0, 7, MIB)
    one["state"], free[0] = "inactive", 700 * MIB
    assert is_free(0, 7, 200 * MIB) and not is_free(0, 7, 256 * MIB), "torch may want as much again"
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not is_free(0, 7, MIB)
