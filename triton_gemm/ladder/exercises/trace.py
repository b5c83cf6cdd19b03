"""What an exercise's kernels read and write, counted: elements, sectors, banks and order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...compat import watching

SECTOR = 32  # bytes
WARP = 32  # lanes
HALO = 32  # elements around a matrix that are not its own


class WrongError(Exception):
    """What is wrong with a filled-in hole, in sentences that teach."""


class _EnoughError(Exception):
    """As many programs ran as were asked for."""


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, *, empty: bool = False) -> torch.Tensor:
    """Random values, the same for the same sizes, or NaN where `empty`; in memory amid NaN, whose rows begin at whole
    sectors."""
    pitch = -(-columns // HALO) * HALO + 2 * HALO
    memory = torch.full((rows + 2 * HALO, pitch), float("nan"), dtype=dtype)
    inside = memory[HALO : HALO + rows, HALO : HALO + columns]
    if not empty:
        generator = torch.Generator().manual_seed(1000 * rows + columns)
        inside.copy_(torch.randn(rows, columns, generator=generator))
    return inside


@dataclass(frozen=True, eq=False)
class Access:
    """One load, store or dot of a program, or what it would touch outside of an operand. operand: its name, or of a dot
    the dtype of what is multiplied, as "fp16"; addresses: in bytes, of a block's elements in order, without those that
    are masked off; rows, columns: of the operand's elements there."""

    kind: str
    program: tuple[int, int, int]
    operand: str
    addresses: Any
    rows: Any
    columns: Any

    def sectors(self) -> int:
        """The most sectors that 32 neighbouring lanes touch, each of which has one element."""
        lanes = (self.addresses[i : i + WARP] for i in range(0, len(self.addresses), WARP))
        return max((len(set(some // SECTOR)) for some in lanes), default=0)


@contextmanager
def by_kernels(**operands: torch.Tensor) -> Iterator[None]:
    """Fails where PyTorch writes operands: kernels write them without its knowledge."""
    before = {name: x._version for name, x in operands.items()}
    yield
    changed = [name for name, x in operands.items() if x._version != before[name]]
    if changed:
        raise WrongError(f"`run` has PyTorch write {' and '.join(changed)}: a kernel has to compute the result.")


class Trace:
    """Runs kernels in the interpreter and keeps what they touch, in order, and their dots.

    Raises WrongError for an address that is no element of the operands, before it is touched, with the advice of
    `outside` for the operand's name, row and column.
    """

    def __init__(self, **operands: torch.Tensor) -> None:
        self.operands = operands
        self.accesses: list[Access] = []
        self.given: tuple[Any, ...] = ()  # what was called
        self.outside: Callable[[str, int, int], str] = lambda name, row, column: ""

    def run(self, function: Callable[..., None], *more: Any, programs: int | None = None) -> Trace:
        """Calls a function of the operands and `more`, and ends it behind so many programs."""

        self.given = (*self.operands.values(), *more)
        started: set[tuple[int, int, int]] = set()

        def seen(kind: str, program: tuple[int, int, int], *access: Any) -> None:
            started.add(program)
            if programs is not None and len(started) > programs:
                raise _EnoughError
            self._seen(kind, program, *access)

        try:
            with watching(seen):
                function(*self.given)
        except Exception as error:  # the interpreter's, about what ended the kernel
            if not isinstance(error.__cause__ or error, _EnoughError):
                raise
        return self

    def of(self, operand: str, kind: str = "load") -> list[Access]:
        return [access for access in self.accesses if (access.operand, access.kind) == (operand, kind)]

    def programs(self) -> dict[tuple[int, int, int], list[Access]]:
        """Accesses by program, which are in order of their start."""
        found: dict[tuple[int, int, int], list[Access]] = {}
        for access in self.accesses:
            found.setdefault(access.program, []).append(access)
        return found

    def counted(self, operand: str, kind: str = "load") -> torch.Tensor:
        """How often each element of an operand was read or stored."""
        count = torch.zeros(self.operands[operand].shape, dtype=torch.int64)
        for access in self.of(operand, kind):
            where = torch.as_tensor(access.rows), torch.as_tensor(access.columns)
            count.index_put_(where, torch.ones_like(where[0]), accumulate=True)
        return count

    def _seen(self, kind: str, program: tuple[int, int, int], addresses: Any, mask: Any, other: bool) -> None:
        if kind == "dot" and other:
            raise WrongError(
                "`tl.dot` rounds fp32 operands to TF32, 11 bits of 24, on a GPU and not in the interpreter, unless it "
                'is given input_precision="ieee".'
            )
        if kind == "dot":
            self.accesses.append(Access(kind, program, addresses, (), (), ()))
            return
        addresses, inside = np.broadcast_arrays(addresses, mask.astype(bool))
        if kind == "load" and not inside.all() and not other:
            raise WrongError("a masked load without `other`: on a GPU masked lanes hold anything; pass other=0.0.")
        touched = addresses[inside].astype(np.int64)
        verb = "reads" if kind == "load" else "writes"
        for name, x in self.operands.items():
            offsets = (touched - x.data_ptr()) // x.element_size()
            left = (x.stride(0) - x.shape[1]) // 2  # columns are counted from the middle of what lies between two rows
            rows, columns = (offsets + left) // x.stride(0), (offsets + left) % x.stride(0) - left
            memory = x.untyped_storage()
            if not touched.size or not memory.data_ptr() <= touched[0] < memory.data_ptr() + memory.nbytes():
                continue
            wrong = (rows < 0) | (rows >= x.shape[0]) | (columns < 0) | (columns >= x.shape[1])
            if wrong.any():
                i = int(wrong.argmax())
                self.accesses.append(Access("outside", program, name, touched[wrong], rows[wrong], columns[wrong]))
                raise WrongError(
                    f"program {named(program)} {verb} {name}[{rows[i]}, {columns[i]}], and {name} has "
                    f"{x.shape[0]} rows and {x.shape[1]} columns, counted from 0."
                    + self.outside(name, int(rows[i]), int(columns[i]))
                    + (_alike(inside) if (rows > x.shape[0]).any() else "")  # one row may be `<=` for `<`
                )
            self.accesses.append(Access(kind, program, name, touched, rows, columns))
            return
        if touched.size:
            raise WrongError(f"program {named(program)} {verb} memory that is none of {', '.join(self.operands)}.")


def _alike(mask: Any) -> str:
    """On a mask that was given and has no `[:, None]`; Triton repeats one of fewer dimensions in every row."""
    if mask.ndim < 2 or mask.all() or (mask != mask[0]).any():
        return ""
    return (
        f" The mask is the same in every row of the block, as one of shape [{mask.shape[1]}] is: the pointers' "
        f"shape is [{mask.shape[0]}, {mask.shape[1]}], so compare rows[:, None] and columns[None, :]."
    )


def named(program: Iterable[int]) -> str:
    x, y, z = program
    return str(x) if not y and not z else f"({x}, {y})" if not z else f"({x}, {y}, {z})"
