"""Shared memory, barriers, TMA and `wgmma`, as `gluon_on_cpu` has them for kernels."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.gluon_threads import WARP, Accumulators, Machine, Memory, Tensor, here, load
from triton_gemm.kernels.launch import TensorMap

PANEL = 128  # bytes of a row of a tile that lie together, as TMA swizzles them; then come those of the next row


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, list(values.shape)

    def index(self, i: Any) -> Shared:
        i = int(i)
        assert 0 <= i < self.shape[0], "no such buffer"
        return Shared(self.values[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def reshape(self, shape: tuple[int, ...]) -> Shared:
        return Shared(self.values.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def load(self, layout: Any) -> Tensor:
        here.read.append(self.extent())
        return Tensor(self.values.clone())

    def extent(self) -> range:
        """Where it lies, from its first element to its last."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.values.stride(), strict=True))
        return range(self.values.data_ptr(), self.values.data_ptr() + (last + 1) * self.values.itemsize)

    def store(self, x: Tensor) -> None:
        assert tuple(x.shape) == tuple(self.shape)
        self.values.copy_(x.data)


def reinterpret(buffer: Shared, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    return Shared(buffer.values.view(dtype).view(tuple(shape)))


def async_load(into: Shared, pointers: Memory, mask: Any) -> None:
    place = into.extent()
    assert not any(place.start < read.stop and read.start < place.stop for read in here.read), "others may still read"
    loaded = load(pointers, mask).data
    assert loaded.shape == into.values.shape
    into.values.fill_(garbage(into.dtype))
    here.groups[-1].append(lambda: into.values.copy_(loaded))


def commit_group() -> None:
    here.groups.append([])


def wait_group(num_outstanding: int) -> None:
    while len(here.groups) > num_outstanding + 1:
        here.arrived += here.groups.pop(0)


def debug_barrier() -> None:
    for copy in here.arrived:
        copy()
    here.arrived, here.read = [], []


def mbarrier_arrive(barrier: Barrier, increment_count: bool) -> None:
    """Each thread of the warp arrives when its copies have; here at the last moment, and all at once."""
    assert not increment_count
    copies = here.groups.pop()
    here.groups.append([])

    def complete() -> int:
        for copy in copies:
            copy()
        return barrier.arrive(WARP)

    barrier.loads.append(complete)
    here.machine.changed()


@dataclass
class Barrier:
    """An mbarrier: `phase` turns when `count` have arrived and as many bytes as were announced."""

    count: int = 0
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    loads: list[Callable[[], int]] = field(default_factory=list)

    def arrive(self, count: int = 1) -> int:
        self.pending -= count
        assert self.pending >= 0, "more arrivals than were agreed on"
        return 0

    def turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            here.machine.changed()


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def arrive_later(barrier: Barrier) -> None:
    """An arrival from another CTA."""
    barrier.loads.append(barrier.arrive)
    here.machine.changed()


def arrive(barrier: Barrier, pred: Any = True) -> None:
    if pred:
        barrier.arrive()
        barrier.turn()


def expect(barrier: Barrier, nbytes: int) -> None:
    barrier.bytes += nbytes
    arrive(barrier)


def wait(barrier: Barrier, phase: Any) -> None:
    def passed() -> bool:
        while barrier.loads:
            barrier.bytes -= barrier.loads.pop(0)()
            barrier.turn()
        return barrier.phase != phase

    here.machine.wait_until(passed)


class Descriptor:
    """A tensor map."""

    def __init__(self, tensor_map: TensorMap, operand: torch.Tensor) -> None:
        self.operand = operand
        self.dtype, self.block_shape, self.layout = tensor_map.dtype, list(tensor_map.block), None
        self.shape, self.strides = tensor_map.shape, tensor_map.strides
        self.to_tf32, self.rows = tensor_map.to_tf32, tensor_map.rows
        self.block_type = SimpleNamespace(nbytes=math.prod(tensor_map.block) * tensor_map.dtype.itemsize)

    @property
    def box(self) -> list[int]:
        """What one copy in PTX moves: a panel of a tile, or of a slice of it."""
        matrices, outer, inner = self.block_shape
        return [matrices, self.rows or outer, min(inner, PANEL // self.dtype.itemsize)]

    def inside(
        self, corner: Sequence[Any], shape: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of a box, by default a block, that lies in the tensor, and where in the box it is."""
        corner = [int(x) for x in corner]
        begins = [max(0, x) for x in corner]
        ends = [x + size for x, size in zip(corner, shape or self.block_shape, strict=True)]
        sizes = [max(0, min(end, n) - x) for x, end, n in zip(begins, ends, self.shape, strict=True)]
        start = self.operand.storage_offset() + sum(map(operator.mul, begins, self.strides)) * all(sizes)
        inside = torch.as_strided(self.operand, sizes, self.strides, start)
        return inside, tuple(slice(y - x, y - x + size) for x, y, size in zip(corner, begins, sizes, strict=True))


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to nearest even in 11 bits, as TMA does."""
    bits = x.contiguous().view(torch.int32)
    return (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)


def tma_load(descriptor: Descriptor, corner: Sequence[Any], barrier: Barrier, into: Shared) -> None:
    assert into.shape == descriptor.block_shape and descriptor.rows is None
    start_load(descriptor, corner, barrier, into.values)


def start_load(descriptor: Descriptor, corner: Sequence[Any], barrier: Barrier, into: torch.Tensor) -> None:
    """Of a box of into's shape."""
    into.fill_(garbage(into.dtype))
    loaded, of_box = descriptor.inside(corner, into.shape)

    def complete() -> int:
        into.zero_()
        into[of_box] = to_tf32(loaded) if descriptor.to_tf32 else loaded
        return into.numel() * into.itemsize

    barrier.loads.append(complete)
    here.machine.changed()


def tma_store(descriptor: Descriptor, corner: Sequence[Any], source: Shared) -> None:
    assert source.shape == descriptor.block_shape
    stored, of_box = descriptor.inside(corner)
    here.stores.append(lambda: stored.copy_(source.values[of_box]))


def store_wait(pendings: int) -> None:
    while len(here.stores) > pendings:
        here.stores.pop(0)()


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    new: Any = Barriers(Barrier() for _ in range(shape[0]))
    if dtype is not torch.int64:
        new = Shared(torch.full(tuple(shape), garbage(dtype), dtype=dtype))
    here.program.memory.append(new)
    return new


def garbage(dtype: torch.dtype) -> float:
    """What memory holds that was not written."""
    return torch.nan if dtype.is_floating_point else 99


def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Of two dimensions, or of three, of which the first counts products apart."""
    return Tensor(acc.data + product(a.data, b.data))


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """What one instruction adds to the accumulator: int32 of integers, else an fp64 sum, nearly exact, rounded to fp32.
    BLAS sums fp32 in an order that depends on the width of the matrices; tensor cores do not."""
    if not left.is_floating_point():
        return left.int() @ right.int()
    return (left.double() @ right.double()).float()


def warpgroup_mma(
    a: Shared | Tensor, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
) -> Accumulators:
    assert is_async
    if b.dtype.itemsize != 2:
        assert b.values.stride(0) == 1, "wgmma reads all but 16 bits along K only"
        assert isinstance(a, Tensor) or a.values.stride(1) == 1, "wgmma reads all but 16 bits along K only"
    acc = Accumulators.of(acc if use_acc else Tensor(torch.zeros_like(acc.data)))
    step = 32 // b.dtype.itemsize  # along K, of one instruction
    start_products(
        [(acc.values, x, y) for x, y in zip(a.values.split(step, 1), b.values.split(step), strict=True)], acc
    )
    return acc


def start_products(products: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], *into: Accumulators) -> None:
    """Starts a group of instructions, given as (sums, left, right). They are computed when the group is waited for."""

    def complete() -> None:
        for sums, left, right in products:
            sums += product(left, right)
        for acc in into:
            acc.under_way -= 1

    for acc in into:
        acc.under_way += 1
    here.products.append(complete)


def warpgroup_mma_wait(num_outstanding: int, deps: tuple[Accumulators, ...]) -> Any:
    while len(here.products) > num_outstanding:
        here.products.pop(0)()
    return deps[0] if len(deps) == 1 else deps


def warp_specialize(partitions: Sequence[tuple[Any, ...]], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    machine: Machine = here.machine
    ended = []

    def worker(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
        def run() -> None:
            function(*arguments)
            ended.append(function)

        return run

    here.program.all_warps = -(-(here.program.warps + sum(warps)) // 4) * 4
    for (function, arguments), of_partition in zip(partitions[1:], warps, strict=True):
        machine.start(worker(function, arguments), here.program, of_partition)
    function, arguments = partitions[0]
    function(*arguments)
    machine.wait_until(lambda: len(ended) == len(partitions) - 1)
