"""What kernels read and write, by address alone: their source runs in Triton's interpreter, or as `gluon_on_cpu` runs
it, on operands that have shapes and strides but no memory, so that these may span more than 2^31 elements.

Every address of a load or store whose mask is true must be that of an element. Each element of a result is stored once,
and read only before that and where the kernel may; what programs hand on is read after it was stored; an operand is
only read, and all of it. Integers are as wide as on a GPU, and one that overflows is an error. What is loaded is 0,
but of operands that have values: addresses depend on those.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from tests.support import gluon_memory, gluon_on_cpu, gluon_threads
from tests.support.gluon_threads import Memory
from triton_gemm.kernels.launch import Launch
from triton_gemm.problem import GemmProblem
from triton_gemm.tuning.operands import shapes_of

REGION = 56  # bits of an address within one operand; those above number operands
MOST = 64  # programs of a grid that run, so many along its first axis; of more a few
SMALL = 1 << 22  # elements, up to which it is noted which of an operand are read

# What may happen to an operand.
READ = "is read"
RESULT = "is stored once"
READ_FIRST = "is read, and then stored once"
HANDED_ON = "is stored once, and then read"
COUNTED = "is counted up"
ANYHOW = "is read or stored"


@dataclass(eq=False)
class Operand:
    """Where a tensor on `meta`, or one with values, would be. use: what may happen to it."""

    name: str
    tensor: Tensor
    use: str
    region: int
    values: np.ndarray | None = None
    seen: np.ndarray | None = None
    stored: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes, strides = self.tensor.shape, self.tensor.stride()
        numbers = np.cumprod([1, *reversed(sizes[1:])])[::-1] if sizes else []
        dimensions = zip(sizes, strides, numbers, strict=True)
        # Those along which addresses change, from the longest steps to the shortest.
        self.dimensions = sorted((d for d in dimensions if d[0] > 1 and d[1]), key=lambda d: -d[1])
        if self.tensor.device.type != "meta":
            self.values = self.tensor.numpy().reshape(-1)
        if self.use == READ and self.numel <= SMALL:
            self.seen = np.zeros(self.numel, bool)
            self.seen[self.reached_by_strides_of_0()] = True

    @property
    def numel(self) -> int:
        return prod(self.tensor.shape)

    def reached_by_strides_of_0(self) -> np.ndarray:
        """Elements that lie where another does, which stands for them."""
        index = np.indices(self.tensor.shape).reshape(self.tensor.dim(), self.numel)
        repeated = [i for i, stride in enumerate(self.tensor.stride()) if stride == 0]
        return (index[repeated] > 0).any(0)

    def address(self, tensor: Tensor) -> int:
        """Of a view of the operand's own memory."""
        return (self.region << REGION) + tensor.storage_offset() * tensor.itemsize

    def elements(self, addresses: np.ndarray) -> np.ndarray:
        """Their numbers; fails where there is none."""
        offsets = addresses.astype(np.int64) - self.address(self.tensor)
        assert not (offsets % self.tensor.itemsize).any(), f"{self.name}: an address inside of an element"
        rest = offsets // self.tensor.itemsize
        numbers = np.zeros_like(rest)
        for size, stride, number in self.dimensions:
            place = np.clip(rest // stride, 0, size - 1)
            rest = rest - place * stride
            numbers += place * int(number)
        wrong = rest != 0
        assert not wrong.any(), (
            f"{self.name} {tuple(self.tensor.shape)}, strides {self.tensor.stride()}: {int(wrong.sum())} of "
            f"{wrong.size} addresses are of no element, one {offsets[wrong][0] // self.tensor.itemsize} elements on"
        )
        return numbers

    def were_stored(self, numbers: np.ndarray) -> np.ndarray:
        return np.isin(numbers, np.concatenate(self.stored)) if self.stored else np.zeros(numbers.shape, bool)

    def read(self, numbers: np.ndarray) -> None:
        assert self.use != RESULT, f"{self.name} is read"
        if self.use == HANDED_ON:
            assert self.were_stored(numbers).all(), f"{self.name} is read before it is stored"
        elif self.use == READ_FIRST:
            assert not self.were_stored(numbers).any(), f"{self.name} is read after it is stored"
        elif self.seen is not None:
            self.seen[numbers] = True

    def store(self, numbers: np.ndarray) -> None:
        assert self.use != READ, f"{self.name} is stored into"
        if self.use not in (COUNTED, ANYHOW):
            assert len(np.unique(numbers)) == numbers.size, f"{self.name}: an element is stored twice at once"
            assert not self.were_stored(numbers).any(), f"{self.name}: an element is stored again"
            self.stored.append(numbers)

    def check(self) -> None:
        """After all programs of all launches have run."""
        if self.seen is not None:
            assert self.seen.all(), f"{self.name}: {int((~self.seen).sum())} elements are never read"
        if self.use in (RESULT, READ_FIRST):
            count = sum(map(len, self.stored))
            assert count == self.numel, f"{self.name}: {self.numel - count} elements are never stored"
        if self.use == COUNTED:
            assert not self.tensor.any(), f"{self.name} is not zero again"


class Recorder:
    """Runs launches, and checks the addresses of each. whole: whether every program of all launches ran."""

    def __init__(self) -> None:
        self.operands: list[Operand] = []
        self.whole = True

    def add(self, name: str, tensor: Tensor, use: str) -> Tensor:
        self.operands.append(Operand(name, tensor, use, len(self.operands) + 1))
        return tensor

    def check(self) -> None:
        for operand in self.operands * self.whole:
            operand.check()

    def of(self, tensor: Tensor) -> Operand:
        """What a tensor is, or is a view of; if nothing that is known, it is what one launch hands on to the next."""
        memory = tensor.untyped_storage()._cdata
        for operand in self.operands:
            if operand.tensor.untyped_storage()._cdata == memory:
                return operand
        whole = tensor if tensor._base is None else tensor._base
        self.add("what a launch makes", whole, HANDED_ON)
        return self.operands[-1]

    # ---- What the interpreter calls ----

    def run(self, kernel: Any, *given: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        function = kernel.rewrite()
        options = {name: value for name, value in options.items() if name in kernel.arg_names}
        named = inspect.getcallargs(function, *given, **options)
        types = {name: str(function.__annotations__.get(name, "")) for name in named}
        arguments = {name: self.argument(value, types[name]) for name, value in named.items()}
        grid = grid(named) if callable(grid) else grid
        grid = (*grid, 1, 1)[:3]
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        for place in product(self.some(grid[0]), range(grid[1]), range(grid[2])):
            builder.set_grid_idx(*place)
            function(**arguments)

    def some(self, count: int) -> Sequence[int]:
        if count <= MOST:
            return range(count)
        self.whole = False
        return (0, 1, count // 3, count // 2, count - 2, count - 1)

    def argument(self, value: Any, kind: str) -> Any:
        """As a GPU gets it: integers are 64 bits wide where they are declared so or do not fit 32."""
        if "constexpr" in kind:
            return value
        if isinstance(value, Tensor):
            return pointer(self.of(value).address(value), value.dtype)
        if type(value) is int and "int64" in kind:
            return tl.tensor(TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)
        assert "int32" not in kind or -(2**31) <= value < 2**31, f"{value} is not what 32 bits hold"
        return interpreter._implicit_cvt(value)

    def touched(self, addresses: np.ndarray, mask: np.ndarray) -> tuple[Operand | None, np.ndarray, np.ndarray]:
        """(operand, its elements that an access touches, where)."""
        addresses, where = np.broadcast_arrays(addresses, mask.astype(bool))
        chosen = addresses[where]
        if chosen.size == 0:
            return None, chosen, where
        numbers = np.unique(chosen >> np.uint64(REGION))
        assert numbers.size == 1 and 1 <= numbers[0] <= len(self.operands), "addresses of no operand"
        operand = self.operands[int(numbers[0]) - 1]
        return operand, operand.elements(chosen), where

    def load(self, builder: Any, pointers: Any, mask: Any, other: Any, *_: Any) -> Any:
        element = pointers.get_element_ty()
        operand, numbers, where = self.touched(pointers.data, mask.data)
        values = np.zeros(where.shape, interpreter._get_np_dtype(element))
        if other is not None:
            values[...] = other.data
        if operand is not None:
            operand.read(numbers)
            values[where] = 0 if operand.values is None else operand.values[numbers]
        return TensorHandle(values, element)

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        operand, numbers, where = self.touched(pointers.data, mask.data)
        if operand is not None:
            operand.store(numbers)
            if operand.values is not None:
                operand.values[numbers] = np.broadcast_to(value.data, where.shape)[where]

    def atomic(self, builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> Any:
        operand, numbers, _ = self.touched(pointers.data, mask.data)
        assert operand is not None and operand.use == COUNTED and operand.values is not None
        before = operand.values[numbers]
        operand.values[numbers] += value.data
        return TensorHandle(before, value.dtype)

    # ---- What `gluon_on_cpu` calls ----

    def simulated_load(self, pointers: Memory, mask: Any = None, other: Any = 0.0, **how: Any) -> Any:
        if not pointers.storage.is_meta:
            return LOAD(pointers, mask, other, **how)
        operand, numbers, where = self.simulated_touch(pointers, mask)
        operand.read(numbers)
        return gluon_threads.Tensor(torch.zeros(where, dtype=pointers.storage.dtype))

    def simulated_store(self, pointers: Memory, value: Any, mask: Any = None, **how: Any) -> None:
        if not pointers.storage.is_meta:
            return STORE(pointers, value, mask, **how)
        operand, numbers, _ = self.simulated_touch(pointers, mask)
        operand.store(numbers)

    def simulated_touch(self, pointers: Memory, mask: Any) -> tuple[Operand, np.ndarray, torch.Size]:
        """(operand, its elements that an access touches, the access' shape)."""
        operand = self.of(pointers.storage)
        mask = gluon_threads.whole(True if mask is None else mask)
        offsets, where = torch.broadcast_tensors(pointers.offsets, mask)
        touched = offsets[where].numpy() * pointers.storage.itemsize
        return operand, operand.elements(operand.address(pointers.storage) + touched), where.shape


def pointer(address: int, dtype: torch.dtype) -> Any:
    kind = tl.pointer_type(NAMES.get(dtype) or getattr(tl, str(dtype).removeprefix("torch.")))
    return tl.tensor(TensorHandle(np.array([address], np.uint64), kind), kind)


LOAD, STORE = gluon_threads.load, gluon_threads.store
NAMES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Inside, launches of Triton's interpreter run on addresses, and sums of products are not computed."""
    recorder = Recorder()
    known = interpreter._patch_lang(forms_of_triton)
    with pytest.MonkeyPatch.context() as patch:
        replace: Callable[..., None] = partial(patch.setattr, InterpreterBuilder)
        patch.setattr(InterpretedFunction, "run", lambda kernel, *given, **named: recorder.run(kernel, *given, **named))
        # A kernel's call of another function, which would change Triton's language each time.
        patch.setattr(
            InterpretedFunction, "__call__", lambda kernel, *given, **named: kernel.rewrite()(*given, **named)
        )
        # Only then it asserts that no integer overflows.
        options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        replace("create_masked_load", lambda builder, *given: recorder.load(builder, *given))
        replace("create_masked_store", lambda builder, *given: recorder.store(builder, *given))
        replace("create_atomic_rmw", lambda builder, *given: recorder.atomic(builder, *given))
        replace("create_dot", lambda builder, a, b, acc, *_: acc)
        try:
            yield recorder
        finally:
            known.restore()


@contextmanager
def simulated() -> Iterator[Recorder]:
    """Inside, `gluon_on_cpu.run` runs launches on addresses, and products are not computed."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        for module in (gluon_threads, gluon_memory, gluon_on_cpu.LANGUAGE):
            patch.setattr(module, "load", recorder.simulated_load)
        for module in (gluon_threads, gluon_on_cpu.LANGUAGE):
            patch.setattr(module, "store", recorder.simulated_store)
        patch.setattr(gluon_on_cpu, "extent", lambda x: x.untyped_storage().nbytes() // x.itemsize - x.storage_offset())
        yield recorder


def forms_of_triton() -> Any:
    """A function whose module has Triton's language, in both forms, which the interpreter changes to run one."""
    return tl, core


# ---- Operands ----

NEAR, FAR = 1 << 28, 1 << 32  # elements: strides of which 32 bits hold a few, and none
LONGEST = 2**31 - 600  # of a side that is as long as kernels take


class Draw(random.Random):
    """Sizes and strides, always the same for a seed."""

    def near(self, block: int, most: int = 3) -> int:
        """A size around a block's multiples: one less, one more, far less, or the block itself."""
        return self.choice([1, self.randint(1, block), block - 1, block, block + 1, self.randint(block, most * block)])

    def side(self, block: int) -> int:
        """Of a matrix, now and then the longest that there may be."""
        return self.near(block) if self.random() < 0.9 else LONGEST

    def matrices(
        self, batch: int | None, rows: int, columns: int, dtype: torch.dtype, *, result: bool = False, order: str = ""
    ) -> Tensor:
        """[(batch,) rows, columns] on meta: row- or column-major or with no stride of 1, rows after one another or far
        apart, on a boundary of 16 bytes or not, matrices between one another's rows or all the same one. order: "n"
        row-major, "t" column-major, and then all begin on boundaries of 16 bytes; "" any."""
        column_major = order == "t" if order else self.random() < 0.5
        outer, inner = (columns, rows) if column_major else (rows, columns)
        step = 1 if order else self.choice([1, 1, 1, 1, 2, 3, NEAR + 1, FAR + 1])
        wide = 16 // dtype.itemsize
        length = (inner - 1) * step + 1
        apart = self.choice([length, length + 1, *[-(-length // wide) * wide + wide] * 2])
        pitch = self.choice([apart, apart, NEAR + 64, NEAR + 65, FAR + 64, FAR + 65])
        if order:
            pitch = -(-inner // wide) * wide + self.choice([0, wide, 3 * wide, NEAR // 4])
        if max(rows, columns) > 1 << 20:  # what addresses have bits for
            step, pitch = 1, inner + self.choice([0, 1, wide])
            length = inner
        pitch = max(pitch, length)
        strides = (step, pitch) if column_major else (pitch, step)
        shape: tuple[int, ...] = (rows, columns)
        if batch is not None:
            matrix = (outer - 1) * pitch + length
            forms = [(matrix, 1), (-(-matrix // wide) * wide + 2 * wide, 1), (1 << (36 if order else 44), 1)]
            forms.append((pitch, batch))
            if not result:
                forms.append((0, 1))
            between, times = self.choice(forms[1:3] if order else forms)
            if matrix > 1 << 44:
                between, times = matrix + 16, 1
            strides = (step, pitch * times) if column_major else (pitch * times, step)
            shape, strides = (batch, *shape), (between, *strides)
        offset = self.choice([0, wide] if order else [0, 0, 0, wide, 1, 3])
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return torch.empty(offset + size, dtype=dtype, device="meta").as_strided(shape, strides, offset)

    def product(
        self, dtype: torch.dtype, sizes: tuple[int, int, int], out_dtype: torch.dtype | None = None, orders: str = ""
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(a, b, c) of a product. orders: of a and b."""
        M, N, K = sizes
        batch = None if max(sizes) > 1 << 20 else self.choice([None, None, 2, 3])
        a = self.matrices(batch, M, K, dtype, order=orders[:1])
        b = self.matrices(batch, K, N, dtype, order=orders[1:])
        return a, b, self.matrices(batch, M, N, out_dtype or dtype, result=True)


def vector(length: int, dtype: torch.dtype, stride: int = 1) -> Tensor:
    return torch.empty(1 + (length - 1) * stride, dtype=dtype, device="meta").as_strided((length,), (stride,))


def operands_of(
    recorder: Recorder, problem: GemmProblem, a: Tensor, b: Tensor, c: Tensor, step: int = 1
) -> dict[str, Tensor]:
    """A product's operands. step: from a value of the bias to the next."""
    shapes = shapes_of(problem)
    found = {"a": recorder.add("a", a, READ), "b": recorder.add("b", b, READ)}
    found["c"] = recorder.add("c", c, READ_FIRST if problem.has_beta else RESULT)
    if problem.bias:
        found["bias"] = recorder.add("bias", vector(*shapes["bias"], problem.out_dtype, step), READ)
    for name in ("a_scale", "b_scale") if problem.scales else ():
        found[name] = recorder.add(name, torch.empty(shapes[name], device="meta"), READ)
    return found


def handed_on(recorder: Recorder, launches: Sequence[Launch]) -> dict[str, Tensor]:
    """What launches need in addition to a product's operands, which one hands on to another, or a program to others."""
    found = {}
    for made in launches:
        for temporary in made.temporaries:
            device = "cpu" if temporary.dtype == torch.int32 else "meta"
            tensor = torch.zeros(temporary.shape, dtype=temporary.dtype, device=device)
            found[temporary.name] = recorder.add(temporary.name, tensor, HANDED_ON)
        if made.workspace:
            found["workspace"] = recorder.add("workspace", torch.empty(made.workspace // 4, device="meta"), HANDED_ON)
            found["counters"] = recorder.add("counters", torch.zeros(made.counters, dtype=torch.int32), COUNTED)
    return found
