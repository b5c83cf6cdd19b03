"""Threads, tensors in registers, and pointers, as `gluon_on_cpu` has them for kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

WARP = 32


class DeadlockError(Exception):
    """Every thread waits for another."""


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
    descriptors: dict[str, Any]  # tensor maps
    cluster: list[Program]
    memory: list[Any] = field(default_factory=list)
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
        barriers = [barrier for buffer in self.memory if isinstance(buffer, list) for barrier in buffer]
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


_operators()


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
