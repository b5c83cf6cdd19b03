"""What several processes compute together, against the same on one device: products of DTensors and parallel models.

Shared by the tests on CPUs, with gloo, and on GPUs, with NCCL. Values are small integers, whose sums are exact in every
dtype and every order; only models and activations are compared with a tolerance.
"""

from __future__ import annotations

import copy
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import triton_gemm
from triton_gemm.functional import ops, routing
from triton_gemm.problem import Request

Function = Callable[..., torch.Tensor]
Case = Callable[[DeviceMesh, torch.dtype], None]

SECONDS = 200  # for all cases of a group; a collective that waits longer than a quarter of it fails


def launch(group: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, folder: Path) -> None:
    """Runs the cases of a group in as many processes as a mesh of `shape` has. AssertionError with what failed."""
    arguments = (group, shape, device, dtype, str(folder))
    context = mp.spawn(_process, arguments, nprocs=torch.Size(shape).numel(), join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{group} takes more than {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    failures = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert len(failures) == len(context.processes)
    assert not any(failures), "\n".join(f"{case}: {why}" for failed in failures for case, why in failed.items())


def _process(rank: int, group: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=torch.Size(shape).numel(),
        timeout=timedelta(seconds=SECONDS / 4),
    )
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    failures = {}
    for name, case in GROUPS[group].items():
        try:
            case(mesh, dtype)
        except Exception:
            failures[name] = traceback.format_exc()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()
    # Without Python's own end: threads of gloo outlive the group, and one that releases a tensor then needs Python, and
    # aborts the process ("terminate called without an active exception", seen once under load with torch 2.13).
    os._exit(0)


# --- Products ---

S0, S1, R = Shard(0), Shard(1), Replicate()


# What is called, the shapes of its operands, and how each is placed: sharded along a dimension, replicated (-), or
# partial (+). The first placements of each go together, the last have to be changed first.
PRODUCTS: dict[str, tuple[Function, list[tuple[int, ...]], str]] = {
    "mm": (triton_gemm.mm, [(5, 7), (7, 3)], "-- 0- -1 10 01 00 11 1- -0 +-"),
    "mv": (triton_gemm.mv, [(5, 7), (7,)], "0- 10 -0 00"),
    "dot": (triton_gemm.matmul, [(7,), (7,)], "00 0- +0"),
    "bmm": (triton_gemm.bmm, [(3, 5, 7), (3, 7, 4)], "00 1- -2 21 11"),
    "one weight": (triton_gemm.matmul, [(3, 5, 7), (7, 4)], "0- 1- -1 20"),
    "each with each": (triton_gemm.matmul, [(2, 1, 5, 7), (3, 7, 4)], "0- -0 2- -2 31"),
    "addmm": (
        lambda *x: triton_gemm.addmm(*x, alpha=2, beta=-1), [(5, 3), (5, 7), (7, 3)], "00- 1-1 +10 -10 010",
    ),
    "addmm row": (triton_gemm.addmm, [(3,), (5, 7), (7, 3)], "-0- 0-1 +10 -10"),
    "addmm column": (triton_gemm.addmm, [(5, 1), (5, 7), (7, 3)], "00- --1 -10"),
    "addmm of zero": (lambda *x: triton_gemm.addmm(*x, beta=0), [(3,), (5, 7), (7, 3)], "-10"),
    "baddbmm": (triton_gemm.baddbmm, [(3, 1, 4), (3, 5, 7), (3, 7, 4)], "000 -1- 2-2 +21 -21"),
    "linear": (triton_gemm.linear, [(2, 5, 7), (3, 7), (3,)], "0-- 1-- -00 21+ 21- +--"),
    "linear relu": (lambda *x: triton_gemm.linear(*x, "relu"), [(4, 7), (3, 7), (3,)], "0-- -00 11-"),
    "fused relu": (lambda *x: ops.gemm(*x, Request(2.0, 1.0, "relu")), [(4, 7), (7, 3), (3,)], "0-- -10 10-"),
}  # fmt: skip


def integers(mesh: DeviceMesh, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(mesh.device_type, dtype)


def placed(x: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """x as a leaf with its own gradient; all of a partial sum is the first process's."""
    if placements == (Partial(),):
        return DTensor.from_local(x if mesh.get_rank() == 0 else torch.zeros_like(x), mesh, placements).detach()
    return distribute_tensor(x.detach().clone(), mesh, placements).detach()


@dataclass(frozen=True)
class Alone:
    """What one device makes of whole operands, and their gradients by `grad` if there are any."""

    operands: list[torch.Tensor]
    result: torch.Tensor
    grad: torch.Tensor | None
    gradients: list[torch.Tensor | None]


def alone(mesh: DeviceMesh, function: Function, operands: list[torch.Tensor], backward: bool = True) -> Alone:
    leaves = [x.detach().clone().requires_grad_(backward) for x in operands]
    result = function(*leaves)
    grad = integers(mesh, result.dtype, *result.shape, seed=1) if backward else None
    if backward:
        result.backward(grad)
    return Alone(operands, result.detach(), grad, [x.grad for x in leaves])


def compare(mesh: DeviceMesh, function: Function, expected: Alone, placements: list[tuple[Placement, ...]]) -> None:
    """The same bits from shards as from whole operands, gradients' too."""
    exact = {"rtol": 0, "atol": 0}
    backward = expected.grad is not None
    shards = [placed(x, mesh, *p).requires_grad_(backward) for x, p in zip(expected.operands, placements, strict=True)]
    result = function(*shards)
    assert isinstance(result, DTensor)
    torch.testing.assert_close(result.full_tensor(), expected.result, **exact)
    if expected.grad is None:
        return
    result.backward(placed(expected.grad, mesh, *(R,) * mesh.ndim))
    for x, gradient in zip(shards, expected.gradients, strict=True):
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), gradient, **exact)


@cache
def product_alone(name: str, mesh: DeviceMesh, dtype: torch.dtype) -> Alone:
    function, shapes, _ = PRODUCTS[name]
    return alone(mesh, function, [integers(mesh, dtype, *shape, seed=i) for i, shape in enumerate(shapes)])


def _product(name: str, placements: str) -> Case:
    meaning = {"-": R, "+": Partial()}

    def case(mesh: DeviceMesh, dtype: torch.dtype) -> None:
        how = [(meaning.get(p) or Shard(int(p)),) for p in placements]
        compare(mesh, PRODUCTS[name][0], product_alone(name, mesh, dtype), how)

    return case


def activation_after_none(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """The same operands with an activation are not placed as they were without one, nor the other way round."""
    operands = [integers(mesh, dtype, *shape) for shape in ((6, 8), (8, 4))]
    for activation in (None, "relu", None):
        precision = "ieee" if dtype == torch.float32 else None
        call = partial(ops.gemm, request=Request(activation=activation, precision=precision))
        compare(mesh, call, alone(mesh, call, operands, backward=False), [(S1,), (S0,)])


def without_gradients(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    operands = [integers(mesh, dtype, *shape) for shape in ((2, 6, 8), (4, 8), (4,))]
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            expected = alone(mesh, triton_gemm.linear, operands, backward=False)
            compare(mesh, triton_gemm.linear, expected, [(S0,), (R,), (R,)])


def other_dtypes(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    eights = [integers(mesh, torch.int8, *shape) for shape in ((24, 32), (32, 16))]
    widened = partial(triton_gemm.mm, out_dtype=torch.float32)
    from_eights = alone(mesh, triton_gemm.mm, eights, backward=False)
    from_halves = alone(mesh, widened, [x.half() for x in eights])
    for placements in ([(S1,), (S0,)], [(S0,), (R,)]):
        compare(mesh, triton_gemm.mm, from_eights, placements)
        compare(mesh, widened, from_halves, placements)


def out(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """A DTensor is filled, however it is placed, and a tensor refused in torch's words."""
    a, b = integers(mesh, dtype, 6, 8), integers(mesh, dtype, 8, 4)
    shards = placed(a, mesh, S1), placed(b, mesh, S0)
    for placement in (R, S0, S1):
        c = placed(torch.full_like(a[:, :4], torch.nan), mesh, placement)
        assert triton_gemm.mm(*shards, out=c) is c and c.placements == (placement,)
        torch.testing.assert_close(c.full_tensor(), a @ b)
    for call in (lambda: triton_gemm.mm(*shards, out=torch.empty_like(a[:, :4])), lambda: triton_gemm.mm(shards[0], b)):
        try:
            call()
        except RuntimeError as error:
            assert "mixed torch.Tensor and DTensor" in str(error)
        else:
            raise AssertionError("tensors and DTensors are mixed")


def routed(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """torch's own products of DTensors are ours, of the shards."""
    a, b, input = (integers(mesh, dtype, *shape) for shape in ((3, 6, 8), (3, 8, 4), (4,)))
    calls: list[tuple[Function, list[torch.Tensor], list[tuple[Placement, ...]]]] = [
        (torch.mm, [a[0], b[0]], [(S1,), (S0,)]),
        (torch.addmm, [input, a[0], b[0]], [(R,), (S0,), (R,)]),
        (torch.bmm, [a, b], [(S0,), (S0,)]),
        (torch.nn.functional.linear, [a[0], b[0].T, input], [(R,), (S0,), (S0,)]),
    ]
    with triton_gemm.use():
        triton_gemm.report_routing(reset=True)
        for function, operands, placements in calls:
            compare(mesh, function, alone(mesh, function, operands), placements)
        found = triton_gemm.report_routing()
    assert {where for _, where in found} == {routing.OURS} and {name for name, _ in found} == {"mm", "addmm", "bmm"}


def compiled(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    operands = [integers(mesh, dtype, *shape) for shape in ((2, 6, 8), (4, 8), (4,))]
    call = torch.compile(lambda *x: triton_gemm.linear(*x, "relu"), fullgraph=True, backend="aot_eager")
    expected = alone(mesh, lambda *x: triton_gemm.linear(*x, "relu"), operands)
    compare(mesh, call, expected, [(R,), (S0,), (S0,)])


# --- Models ---


def trained(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model makes of x after two steps of training on it. Parameter by parameter: with partial gradients, as
    a replicated LayerNorm has them, torch 2.11's steps over many tensors at once differ by 1 %, its own layers' too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


def same(mesh: DeviceMesh, dtype: torch.dtype, modules: list[torch.nn.Module], parallel: Function, **how: Any) -> None:
    """A model of these trains in parallel as it does on one device. parallel(model): makes it so; split: the dimension
    along which `over` divides its input and output, given as DTensors if `whole`."""
    over, split, whole = how.get("over", mesh), how.get("split"), how.get("whole", False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*modules).to(mesh.device_type, dtype)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    single = copy.deepcopy(model)
    parallel(model)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(mesh.device_type, dtype)
    own = x if split is None else x.chunk(over.size(), split)[over.get_local_rank()]
    expected = trained(single, x)
    found = trained(model, DTensor.from_local(own, over, [Shard(split)]) if whole else own)
    if whole:
        found, split = found.full_tensor(), None
    eps = torch.finfo(dtype).eps  # parallel sums are rounded once more
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": eps, "atol": eps}
    own_expected = expected if split is None else expected.chunk(over.size(), split)[over.get_local_rank()]
    torch.testing.assert_close(found, own_expected, **near)
    for x, y in zip(model.parameters(), single.parameters(), strict=True):
        assert isinstance(x, DTensor)
        torch.testing.assert_close(x.full_tensor(), y.data, **near)


def layers(kind: Any = triton_gemm.nn.Linear, **how: Any) -> list[torch.nn.Module]:
    return [kind(8, 16, **({"activation": "gelu"} if kind is triton_gemm.nn.Linear else {})), kind(16, 8, **how)]


def tensor_parallel(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    for how in ({}, {"bias": False}, {"activation": "silu"}):
        same(mesh, dtype, layers(**how), lambda model: parallelize_module(model, mesh, plan))


def tensor_parallel_routed(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    with triton_gemm.use():
        same(mesh, dtype, layers(torch.nn.Linear), lambda model: parallelize_module(model, mesh, plan))


def sequence_parallel(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=S1),
        "2": RowwiseParallel(output_layouts=S1, use_local_output=False),
    }
    modules = [torch.nn.LayerNorm(8), *layers()]
    same(mesh, dtype, modules, lambda model: parallelize_module(model, mesh, plan), split=1, whole=True)


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def data_parallel(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    same(mesh, dtype, layers(), lambda model: shard(model, mesh), split=0)


# --- Of two dimensions ---


def products_on_a_grid(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    a, b, input = integers(mesh, dtype, 6, 9), integers(mesh, dtype, 9, 5), integers(mesh, dtype, 5)
    expected = alone(mesh, triton_gemm.addmm, [input, a, b])
    for placements in (
        [(R, R), (S0, S1), (R, S0)],
        [(R, S0), (S0, R), (R, S1)],
        [(R, R), (S1, S1), (S0, S0)],
        [(R, R), (S0, S0), (R, R)],
        [(S0, R), (S0, S1), (S1, S0)],
    ):
        compare(mesh, triton_gemm.addmm, expected, placements)
    x, weight = integers(mesh, dtype, 4, 6, 8), integers(mesh, dtype, 4, 8)
    compare(mesh, triton_gemm.linear, alone(mesh, triton_gemm.linear, [x, weight]), [(S0, S1), (R, R)])
    compare(mesh, triton_gemm.bmm, alone(mesh, triton_gemm.bmm, [x, x.mT]), [(S0, Shard(2)), (S0, S1)])


def both_parallel(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    def parallel(model: torch.nn.Module) -> None:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard(model, mesh["data"])

    same(mesh, dtype, layers(), parallel, over=mesh["data"], split=0)


CALLS = (activation_after_none, without_gradients, other_dtypes, out, routed, compiled)
MODELS = (tensor_parallel, tensor_parallel_routed, sequence_parallel, data_parallel)
GROUPS: dict[str, dict[str, Case]] = {
    "line": {f"{name} {how}": _product(name, how) for name, (*_, cases) in PRODUCTS.items() for how in cases.split()}
    | {f.__name__: f for f in (*CALLS, *MODELS)},
    "grid": {f.__name__: f for f in (products_on_a_grid, both_parallel)},
}
