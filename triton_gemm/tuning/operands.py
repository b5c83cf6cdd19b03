"""Operands of a problem, made from what it says: sizes, strides, dtypes, alignment, scales, bias, groups."""

from __future__ import annotations

import torch

from ..problem import GemmProblem, Layout
from .timing import MEMORY_SHARE, draw, set_count

BETA = 0.5  # of a C that is read: the same launch again and again neither overflows nor dies out
Operands = tuple[torch.Tensor, ...]  # a, b, c, then what GemmProblem.auxiliary names


def shapes_of(problem: GemmProblem) -> dict[str, tuple[int, ...]]:
    """Of a, b and c, with their batch, and of what the problem's `auxiliary` names."""
    M, N, K, batch = problem.M, problem.N, problem.K, problem.batch
    k_blocks, n_blocks = -(-K // 128), -(-N // 128)
    of_scales: dict[str | None, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((1,), (1,)),
        "rows": ((M,), (N,)),
        "blocks": ((k_blocks, M), (n_blocks, k_blocks)),
    }
    a_scale, b_scale = of_scales.get(problem.scales, ((), ()))
    shapes = {
        "a": (1 if problem.groups else batch, M, K),
        "b": (1 if problem.groups == "k" else batch, K, N),
        "c": (1 if problem.groups == "m" else batch, M, N),
        "bias": (M,) if problem.bias == "m" else (N,),
        "a_scale": a_scale,
        "b_scale": b_scale,
        "ends": (batch,),
        "gate_bias": (N,),
    }
    shapes |= {"gate": shapes["b"], "preactivation": shapes["c"], "ungated": shapes["c"]}
    return {name: shapes[name] for name in ("a", "b", "c", *problem.auxiliary)}


def dtypes_of(problem: GemmProblem) -> dict[str, torch.dtype]:
    """Of the same. A bias is taken to have C's."""
    dtypes = {"a": problem.dtype, "b": problem.dtype, "c": problem.out_dtype, "bias": problem.out_dtype}
    dtypes |= {"a_scale": torch.float32, "b_scale": torch.float32, "ends": torch.int32}
    dtypes |= {"gate": problem.dtype, **dict.fromkeys(("gate_bias", "preactivation", "ungated"), problem.out_dtype)}
    return {name: dtypes[name] for name in ("a", "b", "c", *problem.auxiliary)}


def nbytes(problem: GemmProblem) -> int:
    """Of the memory that a, b and c span, and a gate."""
    shapes, layouts = shapes_of(problem), (problem.a, problem.b, problem.c)
    of_gate = extent(shapes["b"], problem.b) * problem.dtype.itemsize * problem.gate
    itemsizes = (problem.dtype.itemsize, problem.dtype.itemsize, problem.out_dtype.itemsize)
    return of_gate + sum(
        extent(shapes[name], layout) * itemsize
        for name, layout, itemsize in zip("abc", layouts, itemsizes, strict=True)
    )


def extent(shape: tuple[int, ...], layout: Layout) -> int:
    """Elements from the first of a batch of matrices that lie so to the end of the last."""
    return max(1, 1 + sum((size - 1) * stride for size, stride in zip(shape, layout.strides, strict=True)))


def sets_of(problem: GemmProblem, l2: int, free: int) -> int:
    """How many sets of operands together exceed an L2 cache of that size. torch.OutOfMemoryError where one alone takes
    too much of `free` bytes of memory."""
    size = nbytes(problem)
    if size > MEMORY_SHARE * free:
        raise torch.OutOfMemoryError(f"operands of {size >> 20} MiB are too much for {free >> 20} MiB of free memory")
    return set_count(size, l2, free)


def operands(problem: GemmProblem, count: int, device: torch.device, seed: int = 0) -> list[Operands]:
    """`count` sets of random operands that lie in memory as the problem says, with one bias, and one pair of scales,
    for all. No value is NaN or infinite; groups are of one size."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes, dtypes = shapes_of(problem), dtypes_of(problem)
    of_groups = {"m": "b", "k": "c"}.get(problem.groups or "")  # a batch of them, be it of one

    def matrix(name: str, layout: Layout) -> torch.Tensor:
        shape, past = shapes[name], 0 if layout.aligned else 1
        storage = draw((past + extent(shape, layout),), dtypes[name], generator)
        found = storage.as_strided(shape, layout.strides, past)
        return found if name == of_groups or shape[0] > 1 else found[0]

    def other(name: str) -> torch.Tensor:
        if name == "ends":
            size = problem.M if problem.groups == "m" else problem.K
            ends = [size * (i + 1) // problem.batch for i in range(problem.batch)]
            return torch.tensor(ends, dtype=torch.int32, device=device)
        if name == "gate":
            return matrix("b", problem.b)
        if name in ("preactivation", "ungated"):
            return matrix("c", problem.c)
        if name in ("bias", "gate_bias"):
            return draw(shapes[name], dtypes[name], generator)
        return 0.5 + torch.rand(shapes[name], device=device, generator=generator)

    shared = [other(name) for name in problem.auxiliary]
    return [(matrix("a", problem.a), matrix("b", problem.b), matrix("c", problem.c), *shared) for _ in range(count)]
