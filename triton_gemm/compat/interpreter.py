"""Triton's interpreter: what its kernels touch, before it is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What does it, and which of its arguments are pointers, mask and `other`, None where it has none.
_CALLS: dict[str, tuple[str, int | None, int | None, int | None]] = {
    "create_masked_load": ("load", 0, 1, 2),
    "create_masked_store": ("store", 0, 2, None),
    "create_atomic_rmw": ("atomic", 1, 3, None),
    "create_dot": ("dot", None, None, None),
}


@contextmanager
def watching(seen: Callable[[str, tuple[int, int, int], Any, Any, bool], None]) -> Iterator[None]:
    """Has `seen` told of each load, store, atomic and dot of interpreted kernels before it happens; what it raises ends
    the kernel. Programs run in the order in which a GPU starts them, along a grid's first axis first.

    seen(kind, program, addresses, mask, other): kind is "load", "store", "atomic" or "dot"; addresses in bytes and mask
    are NumPy arrays of the block's shape; of a dot they are its operands' dtype, as "fp16", and None. other says
    whether masked lanes were given a value; of a dot, whether a GPU rounds its fp32 operands to TF32.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    originals = {name: getattr(InterpreterBuilder, name) for name in (*_CALLS, "set_grid_idx")}

    def watched(name: str) -> Callable[..., Any]:
        kind, *places = _CALLS[name]

        def call(builder: Any, *given: Any, **named: Any) -> Any:
            pointers, mask, other = (None if place is None else _array(given[place]) for place in places)
            rounds = kind == "dot" and given[0].dtype.scalar.is_fp32() and "IEEE" not in str(given[3])
            touched = str(given[0].dtype.scalar) if kind == "dot" else pointers
            seen(kind, builder.grid_idx, touched, mask, other is not None or rounds)
            return originals[name](builder, *given, **named)

        return call

    def in_order(builder: Any, x: int, y: int, z: int) -> None:
        wide, high, deep = builder.grid_dim
        number = (x * high + y) * deep + z  # as the interpreter counts
        place = number % wide, number // wide % high, number // (wide * high)
        originals["set_grid_idx"](builder, *place)

    try:
        for name in _CALLS:
            setattr(InterpreterBuilder, name, watched(name))
        InterpreterBuilder.set_grid_idx = in_order
        yield
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


def _array(x: Any) -> Any:
    """The NumPy array of a TensorHandle, or of what is one itself, as a descriptor's mask is in Triton 3.7."""
    return x if x is None or isinstance(x.data, memoryview) else x.data
