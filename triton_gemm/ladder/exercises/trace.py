"""What an exercise's kernels read and write, counted: elements, sectors, banks and order."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

from ...compat import watching

SECTOR = 32  # bytes
WARP = 32  # lanes
HALO = 32  # elements around a matrix that are not its own


class WrongError(Exception):
    """What is wrong with a filled-in hole, in sentences that teach."""


def diagnosis(cause: Callable[..., str], *given: Any) -> str:
    """A sentence on why something is wrong; none where finding it fails, since what is wrong is true without it."""
    try:
        return cause(*given)
    except WrongError:  # of the time limit
        raise
    except Exception:
        return ""


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
    """One load, store or dot of a program, or what it would touch outside of an operand."""

    kind: str
    program: tuple[int, int, int]
    operand: str  # its name; for a dot, the dtype of its operands, such as "fp16"
    addresses: Any  # in bytes, of a block's elements in order, without those that are masked off
    rows: Any  # of the operand's elements there
    columns: Any
    masked: bool = False  # whether some elements are masked off

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
        self.file, self.grid = "", (1, 1, 1)  # of what was called, and of its last launch
        self.outside: Callable[[str, int, int], str] = lambda name, row, column: ""

    def run(self, function: Callable[..., None], *more: Any, programs: int | None = None) -> Trace:
        """Calls a function of the operands and `more`, and ends it behind so many programs."""

        self.given = (*self.operands.values(), *more)
        self.file = getattr(getattr(function, "__code__", None), "co_filename", "")
        started: set[tuple[int, int, int]] = set()

        def seen(kind: str, program: tuple[int, int, int], *access: Any) -> None:
            started.add(program)
            if programs is not None and len(started) > programs:
                raise _EnoughError
            self._seen(kind, program, *access)

        try:
            with watching(seen), _blocks_checked(self.file):
                function(*self.given)
                self.grid = getattr(interpreter.interpreter_builder, "grid_dim", self.grid)  # if there was a launch
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
                "`tl.dot` multiplies fp32 operands as TF32, 11 bits of their 24, on a GPU and not in the interpreter, "
                'unless it is given input_precision="ieee".'
            )
        if kind == "dot":
            self.accesses.append(Access(kind, program, addresses, (), (), ()))
            return
        addresses, inside = np.broadcast_arrays(addresses, mask.astype(bool))
        if kind == "load" and not inside.all() and not other:
            raise WrongError(
                "a masked load without `other`: on a GPU masked lanes hold anything; pass other=0.0, also where "
                "`tl.where` replaces them."
            )
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
                    + diagnosis(self.outside, name, int(rows[i]), int(columns[i]))
                    + (
                        diagnosis(_alike, inside) * bool((rows > x.shape[0]).any())
                        or diagnosis(_transposed, inside, addresses, x)
                    )
                )
            self.accesses.append(Access(kind, program, name, touched, rows, columns, not inside.all()))
            return
        if touched.size:
            raise WrongError(f"program {named(program)} {verb} memory that is none of {', '.join(self.operands)}.")


def _alike(mask: Any) -> str:
    """On a mask that was given and has no `[:, None]`; Triton repeats one of fewer dimensions in every row. One row too
    many may be `<=` for `<`."""
    if mask.ndim < 2 or mask.all() or (mask != mask[0]).any():
        return ""
    return (
        f" The mask is the same in every row of the block, as one of shape [{mask.shape[1]}] is: the pointers' "
        f"shape is [{mask.shape[0]}, {mask.shape[1]}], so compare rows[:, None] and columns[None, :]."
    )


def _transposed(mask: Any, addresses: Any, x: torch.Tensor) -> str:
    """On a mask whose axes are exchanged, and on one of elements' numbers, which may be the same."""
    offsets = (addresses.astype(np.int64) - x.data_ptr()) // x.element_size()
    left = (x.stride(0) - x.shape[1]) // 2
    rows, columns = (offsets + left) // x.stride(0), (offsets + left) % x.stride(0) - left
    right = (rows >= 0) & (rows < x.shape[0]) & (columns >= 0) & (columns < x.shape[1])
    sizes = (rows < x.shape[1]) & (columns < x.shape[0])
    if (mask == sizes).all() and not mask.all() and not (mask == right).all():
        return " The mask has the matrix's height and width exchanged."
    exchanged = mask.ndim == 2 and mask.shape[0] == mask.shape[1] and bool((mask == right.T).all())
    if mask.all() or (mask == right).all() or not (exchanged or (mask == (offsets < x.numel())).all()):
        return ""
    number = "it compares an element's number alone, which a lane beyond its row's end has, too: compare both indices."
    axes = "the mask's axes are exchanged: rows go down, rows[:, None], and columns across, columns[None, :]."
    return f" Either {axes} Or {number}" if exchanged else f" Is it that {number.replace(': compare', '? Compare')}"


@contextmanager
def _blocks_checked(file: str) -> Iterator[None]:
    """Fails where Python asks a block whether it is true, which the interpreter always answers with yes, or makes an
    index of a fraction, which it cuts off. The compiler refuses both. It takes a scalar for a mask; Triton 3.9's
    interpreter makes an int32 of that, and then wants a bool."""
    patch, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def splat_of_bool(builder: Any, kind: Any, x: Any) -> Any:
        made = splat(builder, kind, x)
        if kind.scalar.is_int1():
            made.data, made.dtype = made.data.astype(bool), kind.scalar
        return made

    def learners() -> bool:
        """Whether a line of the file asks, and not the interpreter itself."""
        return Path(sys._getframe(2).f_code.co_filename).resolve() == Path(file).resolve()

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        is_true, index = tensor.__bool__, tensor.__index__

        def is_true_checked(x: Any) -> Any:
            if x.handle.data.size > 1 and learners():
                raise WrongError(_line(file, _once))
            return is_true(x)

        def index_checked(x: Any) -> Any:
            if x.handle.data.size > 1 and learners():
                raise WrongError(_line(file, lambda _: "a block is no index of a list, and no bound of a `range`."))
            if x.dtype.is_floating() and learners():
                raise WrongError(_line(file, lambda _: WHOLE))
            return index(x)

        for name, function in (("__bool__", is_true_checked), ("__index__", index_checked)):
            (scope[0].set_attr if scope else setattr)(tensor, name, function)

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat = patched, splat_of_bool
    try:
        yield
    finally:
        interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat = patch, splat


WHOLE = (
    "a whole number is wanted, and it is a fraction. `/` makes fractions: `//` rounds a quotient down, and "
    "`tl.cdiv(x, y)` up."
)


def _line(file: str, why: Callable[[Sequence[ast.AST]], str]) -> str:
    """What is wrong with the line of a file that runs, of whose nodes `why` is a sentence."""
    number = sys._getframe(2).f_lineno

    def quoted() -> str:
        text = Path(file).read_text("utf-8")
        placed = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.stmt, ast.expr)))
        nodes = [node for node in placed if node.lineno <= number <= (node.end_lineno or 0)]
        return f"line {number}, `{text.splitlines()[number - 1].strip()}`: {why(nodes)}"

    return diagnosis(quoted) or f"line {number}: {why(())}"


EACH = (
    "decides once for the whole block. For each element do `mask=` of a load or store, and elsewhere "
    "`tl.where(condition, this, that)`."
)


CLOSER = "`&` and `|` bind closer than `<`: put each comparison in parentheses, as in (x < m) & (y < n)."


def _once(nodes: Sequence[ast.AST]) -> str:
    """On a block that Python takes for one truth value. What has a name alone for a condition may be a constexpr's."""
    ifs = [node for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.While)) and node.test in nodes]
    for one in ifs:
        if not isinstance(one.test, ast.Name):
            word = "a `while`" if isinstance(one, ast.While) else "an `if`"
            return f"{word} {EACH}"
    for node in nodes:
        bits = [one for one in getattr(node, "comparators", []) if isinstance(one, ast.BinOp)]
        if isinstance(node, ast.Compare) and any(isinstance(one.op, (ast.BitAnd, ast.BitOr)) for one in bits):
            return CLOSER
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if is_not or isinstance(node, ast.BoolOp) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
            no = "chain, `0 <= x < m`" if isinstance(node, ast.Compare) else "`and`, `or` or `not`"
            return f"Blocks take `&`, `|`, `^` and `~`, as in (x < m) & (y < n), and no {no}."
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max"):
            return f"of blocks it is `tl.{ast.unparse(node.func)}imum`."
    once = "an `if`" if ifs else "Python"
    return f"{once} {EACH}"


def named(program: Iterable[int]) -> str:
    x, y, z = program
    return str(x) if not y and not z else f"({x}, {y})" if not z else f"({x}, {y}, {z})"
