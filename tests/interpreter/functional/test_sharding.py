"""Products of DTensors: what the sharding rule offers, where shards stay, and processes that compute together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import triton_gemm
from tests.support.patches import noted
from tests.support.sharded_processes import launch
from triton_gemm.functional import ops, sharding
from triton_gemm.runtime import plan

RANKS = 2
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()

# --- The rule ---

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matrices": ((4, 6), (6, 8)),
    "a row": ((4, 6), (6, 8), (8,)),
    "a column": ((4, 6), (6, 8), (4, 1)),
    "a value": ((4, 6), (6, 8), ()),
    "a matrix": ((4, 6), (6, 8), (4, 8)),
    "batches": ((2, 4, 6), (2, 6, 8), (2, 1, 8)),
    "one weight": ((2, 4, 6), (6, 8), (8,)),
    "many weights": ((4, 6), (2, 6, 8), (4, 8)),
    "each with each": ((2, 1, 4, 6), (4, 6, 8), (4, 1, 1)),
    "batches of one": ((1, 4, 6), (2, 6, 8), (1, 4, 8)),
}


def pieces(x: torch.Tensor, placement: Placement) -> list[torch.Tensor]:
    """What each rank has of x."""
    if isinstance(placement, Shard):
        return list(x.chunk(RANKS, placement.dim))
    return [x / RANKS if isinstance(placement, Partial) else x] * RANKS


def joined(shards: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(shards, placement.dim)
    return sum(shards, torch.zeros(())) if isinstance(placement, Partial) else shards[0]


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_offered_is_right(name: str, activation: str | None) -> None:
    """The pieces of the operands give the pieces of the product, for all that the rule offers; and it offers all
    dimensions of the product, and K."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randint(-2, 3, shape, generator=generator).double() for shape in SHAPES[name]]

    def compute(a: torch.Tensor, b: torch.Tensor, *input: torch.Tensor) -> torch.Tensor:
        c = a @ b + (input[0] if input else 0)
        return c if activation is None else c.relu()

    expected = compute(*operands)
    offered = sharding.acceptable(*(x.shape for x in (*operands, None)[:3] if x is not None), activation=activation)
    for output, inputs in offered:
        placed = [pieces(x, p) for x, p in zip(operands, inputs, strict=False) if p is not None]
        assert len(placed) == len(operands)
        shards = [compute(*shard) for shard in zip(*placed, strict=True)]
        torch.testing.assert_close(joined(shards, output), expected, rtol=0, atol=0)
    outputs = [output for output, _ in offered]
    assert outputs == [R, *map(Shard, range(expected.dim())), *([P] if activation is None else [])]


# --- Where shards stay ---


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of processes that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


STAYS: dict[str, tuple[list[tuple[tuple[int, ...], Placement]], Placement]] = {
    "rows": ([((4, 6), S0), ((6, 8), R)], S0),
    "columns": ([((4, 6), R), ((6, 8), S1)], S1),
    "inner": ([((4, 6), S1), ((6, 8), S0)], P),
    "inner and bias": ([((4, 6), S1), ((6, 8), S0), ((8,), P)], P),
    "column and bias": ([((4, 6), R), ((6, 8), S1), ((8,), S0)], S1),
    "batches": ([((2, 4, 6), S0), ((2, 6, 8), S0), ((2, 4, 8), S0)], S0),
    "sequences": ([((2, 4, 6), S1), ((6, 8), R)], S1),
    "one batch": ([((2, 1, 4, 6), S0), ((4, 6, 8), R)], S0),
}


def laid(mesh: DeviceMesh, shape: tuple[int, ...], placement: Placement) -> DTensor:
    return DTensor.from_local(pieces(torch.ones(shape), placement)[0], mesh, [placement], run_check=False)


@pytest.mark.parametrize("name", STAYS)
def test_shards_that_go_together_stay_where_they_are(name: str, mesh: DeviceMesh) -> None:
    operands, placement = STAYS[name]
    leaves = [laid(mesh, *operand).requires_grad_() for operand in operands]
    with CommDebugMode() as communication:
        c = ops.gemm(*leaves)
        gradients = torch.autograd.grad(c, leaves[:2], torch.ones_like(c) if placement != P else laid(mesh, c.shape, R))
    assert isinstance(c, DTensor) and c.placements == (placement,)
    assert communication.get_total_counts() == 0
    assert all(isinstance(x, DTensor) for x in gradients)


def test_an_activation_is_not_applied_to_partial_sums(mesh: DeviceMesh) -> None:
    a, b = laid(mesh, (4, 6), S1), laid(mesh, (6, 8), S0)
    for activation, partial in ((None, True), ("relu", False), (None, True)):
        for more in ((), (None, "ieee")):  # trailing defaults are not there for DTensor
            c = torch.ops.triton_gemm.gemm(a, b, None, 1.0, 1.0, activation, *more)
            assert c.placements[0].is_partial() is partial


def test_batch_invariance_goes_to_every_shard(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an argument in the backward, too, and in a block."""
    requested = noted(monkeypatch, plan, "selection_for", lambda *_, invariant, **how: invariant)
    monkeypatch.setattr(plan, "PLANS", {})
    a, b = laid(mesh, (4, 6), S0).requires_grad_(), laid(mesh, (6, 14), R)
    triton_gemm.matmul(a, b, batch_invariant=True).sum().backward()
    assert requested == [True, True]
    with triton_gemm.batch_invariant():
        c = triton_gemm.matmul(a, laid(mesh, (6, 15), R))
    requested.clear()
    c.sum().backward()
    assert requested == [True], "what the forward was told"


def test_what_cannot_be_sharded_is_replicated(mesh: DeviceMesh) -> None:
    c = triton_gemm.matmul(laid(mesh, (1, 6), R), laid(mesh, (6, 1), R))
    assert c.placements == (R,)


@pytest.mark.parametrize("call", ["operator", "function", "function in inference_mode"])
def test_the_first_call_registers_the_rule(call: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    sharding.register()
    propagator = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.delitem(propagator.op_strategy_funcs, torch.ops.triton_gemm.gemm.default)
    monkeypatch.setattr(sharding, "_registered", None)
    columns = 10 + len(call)  # a shape that no other test has: decisions are remembered
    a, b = laid(mesh, (4, 6), S1), laid(mesh, (6, columns), S0)
    with torch.inference_mode("inference" in call):
        c = torch.ops.triton_gemm.gemm(a, b) if call == "operator" else triton_gemm.matmul(a, b)
    assert c.placements[0].is_partial()


# --- Processes ---


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("group", "shape"), [("line", (RANKS,)), ("grid", (RANKS, RANKS))])
def test_processes_compute_what_one_does(group: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    launch(group, shape, "cpu", torch.float32, tmp_path)
