"""Gluon kernels on the CPU: their source run as it stands, with torch in the place of the GPU.

Gluon has no interpreter. Here each partition of each program is a thread, of which one runs at a time, until it waits.
What is asynchronous on a GPU happens as late as it may: a TMA load when its barrier is waited for, until when the tile
holds NaN; a `wgmma` and a TMA store when their end is waited for; a copy by `cp.async` at the barrier of a program's
threads after its end was waited for; an arrival from another CTA of a cluster when the barrier is waited for. So a wait
that is missing, a slot filled too early and a buffer used again too early give wrong results; accesses outside of
operands, accesses to the shared memory of a program that has ended or not begun, and programs that wait for one another
for ever raise. How threads hold a tensor is not modelled: layouts are the compiler's affair. What clusters do in PTX is
interpreted, instruction by instruction.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import itertools
import math
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

import triton_gemm.kernels
from triton_gemm.compat import tensor_map_parameter
from triton_gemm.kernels.launch import Launch, Scalar, TensorMap
from triton_gemm.kernels.launch import Pointer as Address

KERNELS = Path(triton_gemm.kernels.__file__ or "").parent
WARP = 32
# Modules and packages of triton_gemm.kernels that run here.
SIMULATED = ("epilogue", "fma", "groups", "portable", "programmatic", "reduction", "schedule", "skinny", "splitk")
SIMULATED += ("mma_fp64", "tiles", "warp_specialised")


class DeadlockError(Exception):
    """Every thread waits for another."""


# ---- threads ----


class Machine:
    """Threads that take turns: who runs holds `turn`."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.alive = 0
        self.version = 0  # of everything that somebody may wait for
        self.waiting: dict[int, int] = {}  # by thread, the version in which it found nothing to go on with
        self.error: BaseException | None = None

    def changed(self) -> None:
        self.version += 1
        self.turn.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        me = threading.get_ident()
        while not ready():
            self.waiting[me] = self.version
            if len(self.waiting) == self.alive and set(self.waiting.values()) == {self.version}:
                self.error = self.error or DeadlockError("all threads wait")
                self.changed()
            if self.error is None:
                self.turn.wait()
            if self.error is not None:
                raise self.error
        self.waiting.pop(me, None)

    def start(self, run: Callable[[], None], program: Program, warps: int) -> threading.Thread:
        def body() -> None:
            with self.turn:
                here.machine, here.program, here.warps = self, program, warps
                here.products, here.stores, here.polled = [], [], -1
                here.groups, here.arrived, here.read = [[]], [], []
                try:
                    if self.error is None:
                        run()
                        assert here.groups == [[]], "copies go on after the end"
                except BaseException as error:
                    self.error = self.error or error
                self.alive -= 1
                self.waiting.pop(threading.get_ident(), None)
                self.changed()

        self.alive += 1
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread


@dataclass(eq=False)
class Program:
    """One of a grid: its numbers, how many there are, and of how many warps it is first; tensor maps by the name of
    their parameter in PTX; the CTAs of its cluster by rank, and what they see of it: the buffers of its shared memory
    as they were allocated, all its warps, and how many have joined the cluster."""

    id: tuple[int, ...]
    grid: tuple[int, ...]
    warps: int
    descriptors: dict[str, Descriptor]
    cluster: list[Program]
    memory: list[Shared | Barriers] = field(default_factory=list)
    all_warps: int = 0  # of all partitions, in whole warpgroups
    published: bool = False
    joined: int = 0  # warps that are at the barrier of the cluster, or were
    ended: bool = False

    @property
    def rank(self) -> int:
        return self.cluster.index(self)

    def peer(self, rank: int) -> Program:
        """A CTA of the cluster whose shared memory is reached."""
        peer = self.cluster[rank]
        assert self.all_joined() and peer.published, "reaches a CTA whose barriers may not be there"
        assert not peer.ended, "reaches a CTA that has ended"
        return peer

    def all_joined(self) -> bool:
        return all(0 < cta.all_warps <= cta.joined for cta in self.cluster)

    def end(self) -> None:
        self.ended = True
        barriers = [barrier for buffer in self.memory if isinstance(buffer, Barriers) for barrier in buffer]
        assert not any(barrier.loads for barrier in barriers), "something is on its way to a program that has ended"


# Of each thread: machine, program, how many warps it stands for, products and stores under way, polled; copies that
# were asked for, in groups, and those that were waited for; what was read of shared memory since the last barrier.
here = threading.local()


# ---- tensors ----


def raw(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def whole(x: Any) -> torch.Tensor:
    """A number as a tensor, too: a whole one of 32 bits if they hold it, as in Triton."""
    x = raw(x)
    if type(x) is int:
        return torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    return torch.as_tensor(x)


def wide(x: torch.Tensor, other: Any) -> Any:
    """x, of 64 bits where another tensor of whole numbers is: torch asks only those that have dimensions."""
    is_wide = isinstance(other, torch.Tensor) and other.dtype == torch.int64
    return x.to(torch.int64) if is_wide and x.dtype == torch.int32 else x


class Tensor:
    """A tensor, or a number, in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: Any) -> None:
        self.values = whole(data)

    @property
    def data(self) -> torch.Tensor:
        return self.values

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.data.permute(order))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.data[..., 0]), Tensor(self.data[..., 1])

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __format__(self, spec: str) -> str:
        return format(self.data.item(), spec)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data)

    __hash__ = None  # type: ignore[assignment]


def _operators() -> None:
    for name in [
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "rshift", "lt", "le", "gt", "ge"),
        *("eq", "ne"),
    ]:
        method = f"__{name}__"

        def forward(self: Tensor, other: Any, method: str = method) -> Any:
            if isinstance(other, Memory):
                return NotImplemented
            x, y = self.data, raw(other)
            if isinstance(y, torch.Tensor):
                x, y = wide(x, y), wide(y, x)
            return Tensor(getattr(x, method)(y))

        setattr(Tensor, method, forward)
        if hasattr(torch.Tensor, f"__r{name}__"):

            def backward(self: Tensor, other: Any, method: str = method) -> Tensor:
                of_self = self.data.is_floating_point() or not isinstance(other, float)
                x = torch.as_tensor(other, dtype=self.data.dtype if of_self else None)
                return Tensor(getattr(x, method)(self.data))

            setattr(Tensor, f"__r{name}__", backward)


class Accumulators(Tensor):
    """The result of products that may still be under way."""

    under_way = 0

    @property
    def data(self) -> torch.Tensor:
        assert self.under_way == 0, "accumulators are used before their products were waited for"
        return self.values

    @classmethod
    def of(cls, x: Tensor) -> Accumulators:
        return x if isinstance(x, Accumulators) else cls(x.data.clone())


class Memory:
    """Pointers into an operand: offsets in elements from its first."""

    def __init__(self, storage: torch.Tensor, offsets: Any = 0) -> None:
        self.storage, self.offsets = storage, whole(offsets).to(torch.int64)
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, other: Any) -> Memory:
        return Memory(self.storage, self.offsets + whole(other).to(torch.int64))

    def __sub__(self, other: int) -> Memory:
        return self + -other

    def chosen(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Which elements an access touches, and where; fails outside of the operand."""
        offsets, where = torch.broadcast_tensors(self.offsets, whole(True if mask is None else mask))
        touched = offsets[where]
        assert touched.numel() == 0 or (touched.min() >= 0 and touched.max() < self.storage.numel()), "out of bounds"
        return where, touched


def load(
    pointers: Memory, mask: Any = None, other: Any = 0.0, cache_modifier: str = "", eviction_policy: str = ""
) -> Tensor:
    where, touched = pointers.chosen(mask)
    values = torch.full(where.shape, other, dtype=pointers.storage.dtype)
    values[where] = pointers.storage[touched]
    return Tensor(values)


def prefetch(pointers: Memory) -> None:
    """Changes nothing, but asks for elements of the operand only: around them there is NaN."""
    assert not load(pointers).data.isnan().any(), "out of bounds"


def store(pointers: Memory, value: Any, mask: Any = None, cache_modifier: str = "") -> None:
    where, touched = pointers.chosen(mask)
    values = whole(value).to(pointers.storage.dtype).expand(where.shape)
    pointers.storage[touched] = values[where]
    here.machine.changed()


def atomic_add(pointer: Memory, value: int, sem: str = "", scope: str = "") -> Tensor:
    """One at a time by nature; who adds 0 polls, and lets others go first if nothing has changed since."""
    machine = here.machine
    if value == 0:
        seen = here.polled
        machine.wait_until(lambda: machine.version > seen)
        here.polled = machine.version
    old = load(pointer)
    if value:
        store(pointer, old + value)
    return old


# ---- shared memory, barriers, TMA ----


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
        barrier.pending -= WARP
        assert barrier.pending >= 0, "more arrivals than were agreed on"
        return 0

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

    def complete() -> int:
        barrier.pending -= 1
        assert barrier.pending >= 0, "more arrivals than were agreed on"
        return 0

    barrier.loads.append(complete)
    here.machine.changed()


def arrive(barrier: Barrier, pred: Any = True) -> None:
    if pred:
        barrier.pending -= 1
        assert barrier.pending >= 0, "more arrivals than were agreed on"
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


# ---- PTX ----

# Where another CTA's shared memory is: its rank, the number of a buffer, and bytes in it.
CTA, BUFFER = 1 << 32, 1 << 24
PANEL = 128  # bytes of a row of a tile that lie together, as TMA swizzles them; then come those of the next row
COPY = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov.u32", "mov.b32", "mov.b64", "cvta.param.u64", "cvt.u16.u32"), lambda x: x),
    **{"add.s32": np.add, "sub.s32": np.subtract, "mul.lo.s32": np.multiply, "min.s32": np.minimum},
    "and.b32": np.bitwise_and,
    **{"shl.b32": np.left_shift, "shr.u32": np.right_shift},
    **{
        "setp.ge.s32": np.greater_equal,
        "setp.ne.b32": np.not_equal,
        "setp.lt.and.s32": lambda x, y, also: (x < y) & also,
    },
    **{"mad.lo.s32": lambda x, y, z: x * y + z, "mapa.shared::cluster.u32": lambda x, rank: x % CTA + rank * CTA},
}
LANES, EVERY_LANE = np.arange(WARP), np.ones(WARP, dtype=bool)


def inline_asm(asm: str, constraints: str = "", arguments: Sequence[Any] = (), results: Sequence[Any] = ()) -> Any:
    """Runs PTX in each warp of a partition, whose registers hold a value for each lane."""
    if results:
        sums, threads = sum(x.values.numel() for x in arguments[:2]), WARP * here.warps
        assert constraints.count("=f") * threads == sums, "not as many registers as there are sums"
        return wide_products(asm, *arguments)
    given: dict[str, Any] = {f"${i}": address_of(x) for i, x in enumerate(arguments)}
    given |= {"%laneid": LANES, "%cluster_ctarank": here.program.rank}
    given |= {name: i for i, name in enumerate(here.program.descriptors)}
    effects = []

    def value(operand: str) -> Any:
        return given[operand] if operand in given else int(operand)

    for predicate, opcode, operands in statements(asm):
        active = given[predicate] & EVERY_LANE if predicate else EVERY_LANE
        if opcode in ARITHMETIC:
            into, *others = operands
            result = ARITHMETIC[opcode](*(value(x) for x in others))
            given[into] = np.where(active, result, given.get(into, 0)) if predicate else result
        elif opcode == "elect.sync":
            given[operands[0].removeprefix("_|")] = LANES == 0
        else:
            columns = [np.broadcast_to(value(x), WARP) for x in operands if x != "_"]
            effects += [
                (EFFECTS[opcode], [int(column[lane]) for column in columns])
                for lane in (active.nonzero()[0] if columns else (0,))
            ]
    for effect, numbers in effects:
        for _ in range(here.warps):
            effect(*numbers)


@cache
def statements(asm: str) -> list[tuple[str, str, list[str]]]:
    """(predicate, opcode, operands) of each instruction."""
    found = []
    for text in re.split(r"[;\n]+", asm.strip("{} \n")):
        words = text.split(maxsplit=1)
        if words and words[0] != ".reg":
            predicate, opcode, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) ?(.*)", text.strip()).groups()  # type: ignore[union-attr]
            found.append((predicate or "", opcode, re.findall(r"[^\s,{}\[\]]+", rest)))
    return found


def address_of(x: Any) -> int:
    """Of a tile or barrier in the shared memory of a cluster's first CTA, as Triton gives them; or a number."""
    if not isinstance(x, Shared | Barrier):
        return int(x)
    for number, buffer in enumerate(here.program.memory):
        if isinstance(x, Barrier) and isinstance(buffer, Barriers) and any(x is one for one in buffer):
            return number * BUFFER + 8 * [x is one for one in buffer].index(True)
        if isinstance(x, Shared) and isinstance(buffer, Shared):
            start = x.values.data_ptr() - buffer.values.data_ptr()
            if 0 <= start < buffer.values.numel() * buffer.values.itemsize:
                return number * BUFFER + start
    raise AssertionError("no shared memory of this program")


def barrier_at(program: Program, address: int) -> Barrier:
    buffer = program.memory[address // BUFFER]
    assert isinstance(buffer, Barriers) and address % 8 == 0
    return buffer[address % BUFFER // 8]


def arrive_at(address: int) -> None:
    arrive_later(barrier_at(here.program.peer(address // CTA), address % CTA))


def multicast(into: int, number: int, x: int, y: int, z: int, full: int, peers: int) -> None:
    """A copy of one box to the same place in the shared memory of several CTAs, whose barriers count it."""
    assert 0 < peers < 1 << len(here.program.cluster)
    for rank in range(len(here.program.cluster)):
        if peers >> rank & 1:
            copy(into, number, x, y, z, full, here.program.peer(rank))


def copy(into: int, number: int, x: int, y: int, z: int, full: int, peer: Program | None = None) -> None:
    """A copy of one box to this CTA's own shared memory, or the same place in a peer's."""
    descriptor = list(here.program.descriptors.values())[number]
    _, rows, columns = descriptor.box
    assert into // CTA == full // CTA == here.program.rank
    peer = peer or here.program
    tiles = peer.memory[into % CTA // BUFFER]
    assert isinstance(tiles, Shared) and tiles.shape[1:] == descriptor.block_shape
    *_, outer, inner = tiles.shape
    width = min(inner, PANEL // descriptor.dtype.itemsize) * descriptor.dtype.itemsize
    row, within = divmod(into % BUFFER, width)
    assert within == 0 and row % 8 == 0, "not where a box may lie"
    if rows > outer:  # blocks of it after one another
        box = tiles.values.view(1, -1, PANEL // descriptor.dtype.itemsize)[:, row : row + rows]
        assert box.shape[1] == rows, "not where a box may lie"
    else:
        panel, row = divmod(row, outer)
        tile, panel = divmod(panel, inner // columns)
        assert row + rows <= outer, "not where a box may lie"
        box = tiles.values[tile][:, row : row + rows, panel * columns : (panel + 1) * columns]
    start_load(descriptor, (z, y, x), barrier_at(peer, full % CTA), box)


def rows_of(x: Shared) -> torch.Tensor:
    """All rows of 128 bytes from x to the end of its buffer."""
    buffer, within = divmod(address_of(x), BUFFER)
    memory = here.program.memory[buffer]
    assert isinstance(memory, Shared) and within % PANEL == 0
    return memory.values.view(-1, PANEL // memory.values.itemsize)[within // PANEL :]


def wide_products(asm: str, acc: Tensor, tail: Tensor, a: Shared, b: Shared) -> tuple[Accumulators, Accumulators]:
    """The products of one k-tile in PTX: the addresses of A and of B move in steps of 16 bytes; registers are given in
    eights of columns, four for 64 rows, those of acc before those of tail."""
    tensors = Accumulators.of(acc), Accumulators.of(tail)
    eights = [
        (x, row, column) for x in tensors for row in range(0, x.shape[0], 64) for column in range(0, x.shape[1], 8)
    ]
    steps = r"add.s64 a_k, a, (\d+);\nadd.s64 b_k, b, (\d+);\n"
    product = r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.b?f16.b?f16 {(.*)}, a_k, b_k, add, 1, 1, ([01]), 0;"
    found = re.findall(steps + product, asm)
    assert len(found) == asm.count("wgmma.mma_async") and asm.count("wgmma.commit_group") == 1
    left, right, products = a.values[0], rows_of(b), []
    for of_a, of_b, width, registers, transposed in found:
        (row, k), (column, of_k) = divmod(16 * int(of_a), PANEL), divmod(16 * int(of_b), PANEL)
        panel, row = divmod(row, left.shape[0])
        k += panel * PANEL
        first = left[row : row + 64, k // 2 : k // 2 + 16]
        if int(transposed):  # panels of 64 of its columns
            first = left[row : row + 16, 64 * panel : 64 * panel + 64].T
        second = right[column : column + int(width), of_k // 2 : of_k // 2 + 16].T
        numbers = [int(x) for x in re.findall(r"\$(\d+)", registers)]
        assert len(numbers) == int(width) // 2 and first.shape[0] == 64 and second.shape[1] == int(width)
        assert all(n % 4 == 0 and numbers[i : i + 4] == [*range(n, n + 4)] for i, n in [*enumerate(numbers)][::4]), (
            "registers of different columns"
        )
        used = [eights[n // 4] for n in numbers[::4]]
        for x in tensors:
            mine = [i for i, (tensor, _, _) in enumerate(used) if tensor is x]
            if mine:
                _, row, column = used[mine[0]]
                assert mine == [*range(mine[0], mine[0] + len(mine))], "columns of B that do not follow one another"
                assert [used[i] for i in mine] == [(x, row, column + 8 * i) for i in range(len(mine))]
                sums = x.values[row : row + 64, column : column + 8 * len(mine)]
                products.append((sums, first, second[:, 8 * mine[0] : 8 * mine[-1] + 8]))
    start_products(products, *tensors)
    return tensors


def publish() -> None:
    here.program.published = True


def join() -> None:
    here.program.joined += 1
    here.machine.changed()


def wait_for_all() -> None:
    here.machine.wait_until(here.program.all_joined)


EFFECTS: dict[str, Callable[..., None]] = {
    COPY: copy,
    f"{COPY}.multicast::cluster": multicast,
    "mbarrier.arrive.shared::cluster.b64": arrive_at,
    "fence.mbarrier_init.release.cluster": publish,
    "barrier.cluster.arrive.relaxed.aligned": join,
    "barrier.cluster.wait.acquire.aligned": wait_for_all,
}


PTX = {"fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(), "mul.rn.f32": lambda a, b: a * b}


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: torch.dtype, is_pure: bool, pack: int
) -> Tensor:
    if asm.startswith("mma"):
        return mma_by_element(*(x.data for x in args))
    operands = torch.broadcast_tensors(*(whole(x) for x in args))
    return Tensor(PTX[opcode_of(asm, len(args), pack)](*operands))


def mma_by_element(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> Tensor:
    """`mma_fp64`'s products, whose registers `test_mma_fp64` follows: fragments [m / 8, 8, 1, k, 1] and
    [1, 8, n / 8, k, 1] of operands, and sums [m / 8, 8, n / 8, 4, 2]."""
    products = torch.einsum("irk,cjk->irjc", a[:, :, 0, :, 0], b[0, ..., 0])
    return Tensor(acc + products.reshape(acc.shape))


@cache
def opcode_of(asm: str, inputs: int, pack: int) -> str:
    """The one instruction of which `asm` makes each of `pack` elements, out of the inputs' elements of that number."""
    opcodes, made = set(), []
    for line in asm.split("\n"):
        opcode, rest = line.split(maxsplit=1)
        result, *others = map(int, re.findall(r"\$(\d+)", rest))
        assert others == [result + pack * (1 + i) for i in range(inputs)], "an element out of others"
        opcodes.add(opcode)
        made.append(result)
    assert sorted(made) == list(range(pack)) and len(opcodes) == 1
    return opcodes.pop()


# ---- the modules that kernels import ----


def counted(*bounds: Any) -> Iterator[Tensor]:
    """`range`, whose numbers are as good as other tensors."""
    return map(Tensor, range(*(int(bound) for bound in bounds)))


def decorator(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda function: function


def nothing(*arguments: Any, **options: Any) -> None:
    return None


def language() -> SimpleNamespace:
    types = {
        name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64")
    }
    layouts = ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout")
    layouts += ("DistributedLinearLayout", "SwizzledSharedLayout")
    return SimpleNamespace(
        **types,
        **dict.fromkeys(layouts, nothing),
        constexpr=lambda value: value,
        program_id=lambda axis: Tensor(here.program.id[axis]),
        num_programs=lambda axis: Tensor(here.program.grid[axis]),
        num_warps=lambda: here.program.warps,
        arange=lambda start, end, layout=None: Tensor(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(shape, dtype=dtype)),
        where=lambda condition, x, y: Tensor(torch.where(*(whole(value) for value in (condition, x, y)))),
        minimum=lambda x, y: Tensor(torch.minimum(*torch.broadcast_tensors(whole(x), whole(y)))),
        maximum=lambda x, y: Tensor(torch.maximum(*torch.broadcast_tensors(whole(x), whole(y)))),
        cdiv=lambda x, y: (x + (y - 1)) // y,
        to_tensor=lambda x: Tensor(whole(x)),
        abs=lambda x: Tensor(x.data.abs()),
        exp=lambda x: Tensor(x.data.exp()),
        erf=lambda x: Tensor(x.data.erf()),
        sum=lambda x, axis: Tensor(x.data.sum(axis)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        join=lambda x, y: Tensor(torch.stack((x.data, y.data), -1)),
        **named(load, store, atomic_add, debug_barrier, inline_asm, inline_asm_elementwise),
        **named(allocate_shared_memory, warp_specialize),
        static_assert=nothing,
        static_range=range,
    )


def named(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The functions by their names."""
    return {function.__name__: function for function in functions}


def hopper() -> SimpleNamespace:
    barriers = {"init": init, "arrive": arrive, "expect": expect, "wait": wait, "MBarrierLayout": nothing}
    return SimpleNamespace(
        fence_async_shared=nothing,
        mbarrier=SimpleNamespace(**barriers),
        tma=SimpleNamespace(store_wait=store_wait),
        **named(warpgroup_mma, warpgroup_mma_wait),
    )


_operators()
LANGUAGE = language()
TRITON = SimpleNamespace(
    jit=decorator,
    constexpr_function=decorator,
    language=LANGUAGE,
    cdiv=triton.cdiv,
    next_power_of_2=triton.next_power_of_2,
)
MODULES: dict[str, Any] = {
    "triton": TRITON,
    "triton.language": TRITON,  # as `import a.b` means it
    "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=decorator)),
    "triton.experimental.gluon": SimpleNamespace(language=LANGUAGE),
    "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(
        async_copy=SimpleNamespace(**named(mbarrier_arrive)), mma_v2=mma_v2
    ),
    "triton.experimental.gluon.language.nvidia.hopper": hopper(),
    "triton.experimental.gluon.language.nvidia.ampere.async_copy": SimpleNamespace(**named(commit_group, wait_group)),
    "triton.language.extra.cuda.gdc": SimpleNamespace(gdc_launch_dependents=nothing, gdc_wait=nothing),
    "triton_gemm.compat": SimpleNamespace(
        **named(async_load, reinterpret, tma_load, tma_store, prefetch, tensor_map_parameter),
        dot_operand=lambda x: x,
        round_to=lambda x, dtype: x.to(dtype),
        number=lambda x, dtype: x,
        multiply_add=lambda x, y, z: x * y + z,
        reciprocal=lambda x: Tensor(1.0 / x.data),
        power_of_two=lambda x: Tensor(torch.exp2(x.data)),
        aggregate=dataclass(frozen=True),
    ),
    "triton_gemm.kernels.forms": SimpleNamespace(clusters=lambda: True),
}


class Numbers(ast.NodeTransformer):
    """A kernel's variables that begin as a whole number, or count, are tensors, as in Triton."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for function in node.body:
            decorators = getattr(function, "decorator_list", [])
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in decorators):
                self.generic_visit(function)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            node.value = ast.Call(ast.Name("Number", ast.Load()), [node.value], [])
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("Counted", node.ctx) if node.id == "range" else node


def sources() -> dict[str, str]:
    """The source of every simulated module by its name in triton_gemm.kernels, those of packages included."""
    found = {}
    for name in SIMULATED:
        package = KERNELS / name
        files = package.glob("*.py") if package.is_dir() else [KERNELS / f"{name}.py"]
        for file in files:
            module = ".".join(file.relative_to(KERNELS).with_suffix("").parts).removesuffix(".__init__")
            found[module] = file.read_text()
    return found


def simulated(name: str, changes: Sequence[tuple[str, str]] = ()) -> SimpleNamespace:
    """A module of triton_gemm.kernels whose kernels run here, with pieces of the source replaced that it or what it
    imports has."""
    texts = sources()
    for old, new in changes:
        assert any(old in source for source in texts.values()), f"no kernel has {old!r}"
        texts = {module: source.replace(old, new) for module, source in texts.items()}
    return module(name, texts, {})


def module(name: str, sources: Mapping[str, str], loaded: dict[str, SimpleNamespace]) -> SimpleNamespace:
    """The module of that name in `sources`, as if of triton_gemm.kernels; `loaded` holds those imported already."""
    is_package = any(one.startswith(f"{name}.") for one in sources)
    full_name = f"triton_gemm.kernels.{name}"
    package = full_name if is_package else full_name.rpartition(".")[0]

    def imported(wanted: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0) -> Any:
        absolute = importlib.util.resolve_name("." * level + wanted, package) if level else wanted
        inner = absolute.removeprefix("triton_gemm.kernels.")
        if inner in sources:
            if inner not in loaded:
                loaded[inner] = module(inner, sources, loaded)
            return loaded[inner]
        return MODULES.get(absolute) or builtins.__import__(wanted, globals_, locals_, names, level)

    namespace = {
        "__name__": full_name,  # where dataclasses look for what they are made of
        "__package__": package,
        "__builtins__": {**vars(builtins), "__import__": imported, "Counted": counted, "Number": Tensor},
    }
    path = KERNELS.joinpath(*name.split("."), "__init__") if is_package else KERNELS.joinpath(*name.split("."))
    tree = ast.fix_missing_locations(Numbers().visit(ast.parse(sources[name])))
    exec(compile(tree, f"{path}.py", "exec", dont_inherit=True), namespace)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def extent(x: torch.Tensor) -> int:
    """Elements from x's first to its last; up to whole 16 bytes, as vectors are read, where its memory has them."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    vector = 16 // x.itemsize
    return min((last + vector) // vector * vector, x.untyped_storage().nbytes() // x.itemsize - x.storage_offset())


def run(launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
    """One launch of a simulated module's kernel; raises what a thread raised, DeadlockError among it.

    operands: by name, the workspace and counters that the launch asks for included.
    """
    kinds = launch.kernel.__annotations__

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, Address):
            x = operands[value.operand]
            return Memory(torch.as_strided(x, (extent(x),), (1,), x.storage_offset()))
        if isinstance(value, TensorMap):
            return Descriptor(value, operands[value.operand])
        if isinstance(value, Scalar):
            return Tensor(torch.tensor(scalars[value.name], dtype=torch.float32))
        if value is None or "constexpr" in kinds.get(name, ""):
            return value
        return Tensor(torch.tensor(value)) if "int64" in kinds.get(name, "") else Tensor(value)

    arguments = [argument(name, value) for name, value in launch.arguments.items()]
    maps = [argument for argument in arguments if isinstance(argument, Descriptor)]  # the first parameters
    named = {tensor_map_parameter(launch.kernel.__name__, i, len(one.block_shape)): one for i, one in enumerate(maps)}
    machine, ids = Machine(), itertools.product(*(range(size) for size in reversed(launch.grid)))
    warps = launch.options["num_warps"]
    programs: list[Program] = []
    for numbers in ids:  # of which the last counts fastest, a program's first
        cluster = programs[-1].cluster if len(programs) % launch.cluster else []
        programs.append(Program(numbers[::-1], launch.grid, warps, named, cluster))
        cluster.append(programs[-1])

    def whole_program(program: Program) -> Callable[[], None]:
        def run() -> None:
            launch.kernel(*arguments)
            program.end()

        return run

    with machine.turn:
        threads = [machine.start(whole_program(program), program, warps) for program in programs]
    for thread in threads:
        thread.join()
    if machine.error is not None:
        raise machine.error
