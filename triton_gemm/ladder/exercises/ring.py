"""The kernel around the two roles of exercise 13, and what runs them without a GPU: Gluon has no interpreter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...compat import tma_store
from .trace import WrongError, by_kernels

BLOCK, SLOTS = 64, 3


@gluon.jit
def _produce(
    a_desc, b_desc, a_slots, b_slots, full, empty, K, LOAD: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    LOAD(a_desc, b_desc, a_slots, b_slots, full, empty, K, BLOCK, SLOTS)


@gluon.jit
def _consume(
    c_desc, a_slots, b_slots, c_tile, full, empty, K, MULTIPLY: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc = MULTIPLY(a_slots, b_slots, gl.zeros((BLOCK, BLOCK), gl.float32, layout), full, empty, K, BLOCK, SLOTS)
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], c_tile)
    tma.store_wait(0)


@gluon.jit
def ring_kernel(
    a_desc, b_desc, c_desc, K, LOAD: gl.constexpr, MULTIPLY: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    a_slots = gl.allocate_shared_memory(a_desc.dtype, [SLOTS, BLOCK, BLOCK], a_desc.layout)
    b_slots = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BLOCK, BLOCK], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [BLOCK, BLOCK], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (c_desc, a_slots, b_slots, c_tile, full, empty, K, MULTIPLY, BLOCK, SLOTS)),
            (_produce, (a_desc, b_desc, a_slots, b_slots, full, empty, K, LOAD, BLOCK, SLOTS)),
        ],
        [1],
        [24],
    )


def launch(load: Any, multiply: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """c [64, 64] = a [64, K] @ b [K, 64] in fp16 by one program, whose roles are `load` and `multiply`."""
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], gl.float16)
    descriptors = [TensorDescriptor.from_tensor(x, [BLOCK, BLOCK], layout) for x in (a, b, c)]
    ring_kernel[(1,)](*descriptors, a.shape[1], LOAD=load, MULTIPLY=multiply, BLOCK=BLOCK, SLOTS=SLOTS, num_warps=4)


# ---- Simulated ----


class _Waits(ast.NodeTransformer):
    """Has a function stop where it waits: it yields the barrier and the phase. Its `//` and `%` truncate, as Triton's
    do."""

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            return node
        name = "_quotient" if isinstance(node.op, ast.FloorDiv) else "_remainder"
        call = ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        made = ast.Assign([node.target], ast.copy_location(value, node))
        return self.visit(ast.fix_missing_locations(ast.copy_location(made, node)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") == "wait":
            node.value = ast.Yield(ast.Tuple(node.value.args, ast.Load()))
            ast.fix_missing_locations(node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and len(node.args) == 1:  # of a Python int
            node = ast.Call(ast.Name("_to", ast.Load()), [node.func.value, *node.args], [])
        return ast.fix_missing_locations(node)


ROUNDED: list[Any] = []  # negative numbers that were divided otherwise than Python divides


def _quotient(x: Any, y: Any) -> Any:
    if (x < 0) == (y < 0):
        return x // y
    ROUNDED.extend([x] * (x % y != 0))
    return -(-x // y)


def _remainder(x: Any, y: Any) -> Any:
    return x % y if isinstance(x, str) else x - y * _quotient(x, y)


def _to(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) else int(x)


class _Language(SimpleNamespace):
    """Triton's functions of scalars, as Python's of an int; what else it has as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)


_LANGUAGE = _Language(
    where=lambda condition, x, y: x if condition else y,
    minimum=min,
    maximum=max,
    cdiv=lambda x, y: -(-x // y),
    abs=abs,
    static_range=range,
    cast=_to,
)


class Barrier:
    """name: full or empty, and its slot; turns: how often it did; coming: tiles that arrive here, as late as they may:
    when somebody waits; frees: the slot's tiles, of which an arrival says that they may be replaced."""

    def __init__(self, name: str, *frees: Tile) -> None:
        self.name, self.turns, self.coming, self.frees = name, 0, list[Tile](), frees

    def passes(self, phase: int) -> bool:
        """Whether a wait goes on."""
        if self.coming and self.turns % 2 == phase:
            for tile in self.coming:
                tile.there = True
            self.coming, self.turns = [], self.turns + 1
        return self.turns % 2 != phase


class Tile:
    """A slot's part for one operand. step: of the k-tile in it, None before the first; there: whether it has arrived;
    used: whether its product has ended; busy: whether it has begun, and not ended."""

    def __init__(self, slot: int) -> None:
        self.slot, self.there, self.used, self.busy = slot, False, True, False
        self.step: int | None = None
        self.values = torch.zeros(BLOCK, BLOCK)


def _load(matrix: Any, corner: list[int], barrier: Barrier, into: Tile) -> None:
    step = max(corner) // BLOCK
    if not into.used:
        raise WrongError(
            f"slot {into.slot} is filled with k-tile {step} while k-tile {into.step} lies there, not yet multiplied: "
            "the load did not wait for `empty` to turn."
        )
    rows, columns = corner
    into.values = matrix.data[rows : rows + BLOCK, columns : columns + BLOCK].float()
    into.step, into.there, into.used = step, False, False
    barrier.coming.append(into)


class _Products(list[tuple[Tile, Tile]]):
    """The products under way, the oldest first. An asynchronous one ends as late as it may: when it is waited for."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def begin(self, a: Tile, b: Tile, acc: torch.Tensor, *, is_async: bool = False, **_: Any) -> torch.Tensor:
        self.events.append(("multiply", "product", a.slot, a.step))
        for tile in (a, b):
            if tile.used or tile.busy or not tile.there:
                before = "was multiplied before" if tile.there else "was never loaded"
                what = before if tile.used or tile.busy else "has not arrived"
                raise WrongError(
                    f"slot {tile.slot} is multiplied, but its k-tile {what}: the product did not wait for `full` to "
                    "turn."
                )
            tile.busy = True
        self.append((a, b))
        return self.wait(0 if not is_async else len(self), (acc + a.values @ b.values,))

    def wait(self, num_outstanding: int = 0, deps: tuple[torch.Tensor, ...] = ()) -> Any:
        while len(self) > num_outstanding:
            a, b = self.pop(0)
            for tile in (a, b):
                tile.busy, tile.used = False, True
            self.events.append(("multiply", "ended", a.slot, a.step))
        return deps[0] if len(deps) == 1 else deps


def _arrive(barrier: Barrier, **_: Any) -> None:
    for tile in barrier.frees:
        if not tile.used:
            what = "is still being multiplied: `warpgroup_mma_wait` ends that" if tile.busy else "is not multiplied yet"
            raise WrongError(f"{barrier.name} is told that it is free, but its k-tile {tile.step} {what}.")
    barrier.turns += 1


class _Slots(list[Any]):
    def index(self, slot: int) -> Any:  # type: ignore[override]
        return self[slot]


def simulate(
    path: Path, a: torch.Tensor, b: torch.Tensor, first: str, slots: int = SLOTS, events: list[Any] | None = None
) -> torch.Tensor:
    """What an exercise's file computes of a [64, K] and b [K, 64], in fp32.

    first: the role, "load" or "multiply", that goes on whenever it may; the other does when the first waits; events:
    takes what happens, as role, what, slot and k-tile. Raises WrongError where a slot is used wrongly, and where both
    roles wait for ever.
    """
    events = [] if events is None else events
    ROUNDED.clear()

    known: dict[str, Any] = {"__name__": path.stem}
    exec(compile(_Waits().visit(ast.parse(path.read_text())), str(path), "exec"), known)
    products, launched = _Products(events), list[Any]()

    def load_tile(matrix: Any, corner: list[int], barrier: Barrier, into: Tile) -> None:
        if into in a_slots:  # B comes with A
            events.append(("load", "load", into.slot, max(corner) // BLOCK))
        _load(matrix, corner, barrier, into)

    known |= {"tma_load": load_tile, "warpgroup_mma": products.begin, "warpgroup_mma_wait": products.wait}
    known["mbarrier"] = SimpleNamespace(expect=lambda *_: None, arrive=_arrive)
    known |= {name: _LANGUAGE for name, x in known.items() if x is gl or x is tl}
    known |= {"_to": _to, "_quotient": _quotient, "_remainder": _remainder}
    known["ring"] = SimpleNamespace(launch=lambda *given: launched.append(given))
    c = torch.empty(BLOCK, BLOCK)
    with by_kernels(a=a, b=b, c=c):
        known["run"](a, b, c)
    if not launched:
        raise WrongError("`run` launches no kernel: a kernel has to compute the result.")
    load, multiply = launched[0][:2]
    a_slots, b_slots = (_Slots(map(Tile, range(slots))) for _ in "ab")
    full = _Slots(Barrier(f"`full` of slot {i}") for i in range(slots))
    empty = _Slots(Barrier(f"`empty` of slot {i}", a_slots[i], b_slots[i]) for i in range(slots))
    size = SimpleNamespace(nbytes=2 * BLOCK**2)
    matrices = [SimpleNamespace(data=x, block_type=size) for x in (a, b)]
    more = (full, empty, a.shape[1], BLOCK, slots)
    roles: dict[str, Iterator[Any]] = {
        "load": load(*matrices, a_slots, b_slots, *more),
        "multiply": multiply(a_slots, b_slots, torch.zeros(BLOCK, BLOCK), *more),
    }
    waits: dict[str, Any] = dict.fromkeys(sorted(roles, key=lambda role: role != first))
    result = torch.zeros(BLOCK, BLOCK)
    while waits:
        ready = next((role for role, wait in waits.items() if wait is None or wait[0].passes(wait[1])), None)
        if ready is None:
            lines = [
                f"{role} waits while the phase of {barrier.name} is {phase}, and it has turned {barrier.turns} times"
                for role, (barrier, phase) in waits.items()
            ]
            toward_0 = " Of a negative number `//` and `%` round toward 0, in Triton as in C." * bool(ROUNDED)
            raise WrongError(f"deadlock: {'; '.join(lines)}.{toward_0}")
        last = waits[ready]
        try:
            barrier, phase = waits[ready] = next(roles[ready])
            if isinstance(phase, bool):
                raise WrongError(
                    f"{ready} waits for phase {phase}: a phase is an int32, 0 or 1, and no condition. `turn ^ 1` turns "
                    "a bit round, and `(x == y).to(gl.int32)` makes a bit of a comparison."
                )
            if phase not in (0, 1):
                why = "a phase is 0 or 1: take it modulo 2" if phase == int(phase) else "`/` makes fractions, use `//`"
                if phase < 0 and phase == int(phase):
                    why = "a phase is 0 or 1. `& 1` takes the last bit; `%` of a negative number is negative or 0"
                raise WrongError(f"{ready} waits for phase {phase:g} of {barrier.name}: {why}.")
            if barrier.turns % 2 == phase and not barrier.coming:
                events.append((ready, "wait", -1, ""))
        except WrongError as error:
            if "did not wait" not in str(error) or last is None:
                raise
            barrier, phase = last
            raise WrongError(
                f"{error} It waited last while the phase of {barrier.name} is {phase}, and that has turned "
                f"{barrier.turns} times."
            ) from None
        except StopIteration as end:
            del waits[ready]
            result = result if end.value is None else end.value
        except TypeError as error:
            if "subscriptable" in str(error):
                raise WrongError("`phases` returns two phases: of a k-tile's load, and of its product.") from None
            if "'float'" in str(error):
                raise WrongError(f"{error}: `/` makes fractions, use `//`.") from None
            raise
    if products:
        raise WrongError("C is stored while a product is under way: `warpgroup_mma_wait` ends it.")
    return result
