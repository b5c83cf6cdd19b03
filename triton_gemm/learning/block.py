"""Private operands of a trial, in one block of memory that torch's allocator has cached and nobody uses.

The driver is asked for no memory, and torch frees none for it. As long as the block is taken the GPU has as much free
memory beside, which torch can have instead. The block belongs to the stream whose calls are timed, so giving it back
needs no wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch

from ..compat import memory_segments
from ..hardware.graphs import copy, synchronize
from ..problem import GemmProblem, round_up
from ..runtime.workspace import COUNTERS
from ..tuning.operands import BETA, dtypes_of, extent, shapes_of
from ..tuning.timing import COLD_FACTOR

LIMIT = 256 * 2**20  # bytes
LAUNCHES = 4  # of a sample
LINE = 512  # bytes to which parts of the block are aligned
# Numbers that fill parts, and bytes that are compared at once. From 32,768 numbers on torch has threads on all cores,
# which spin afterwards; and a longer copy keeps the driver's lock for longer.
PATTERN, PIECE = 32_749, 1 << 17
OF_SETS = ("a", "b", "gate", "c")  # what each set of operands has for itself
SCALES = ("a_scale", "b_scale")


def is_free(index: int, stream: int, nbytes: int) -> bool:
    """Whether torch has a block of so many bytes for that stream that nobody uses, and the GPU twice as many beside."""
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    if torch.cuda.memory.get_allocator_backend() != "native" or unused < nbytes:
        return False
    if torch.cuda.mem_get_info(index)[0] < 2 * nbytes + LIMIT:
        return False
    segments = (x for x in memory_segments() if x["device"] == index and x["stream"] == stream)
    return any(
        block["state"] == "inactive" and block["size"] >= nbytes
        for segment in segments
        if segment["segment_type"] == "large" and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
    )


@dataclass(frozen=True)
class Layout:
    """Where the parts of a trial's block are."""

    sets: int  # of operands, which launches go round
    own: bool  # whether b is the call's, which the cache does not hold
    places: dict[Any, tuple[int, int]]  # (offset, bytes) by name, and of OF_SETS by name and number
    nbytes: int  # of the block

    @classmethod
    def of(cls, problem: GemmProblem, plans: Sequence[Any], l2: int) -> Layout | None:
        """The largest that is needed and fits LIMIT, or None."""
        sizes, cold = _sizes(problem), COLD_FACTOR * l2
        if sizes["b"] >= cold and "gate" not in sizes:
            found = cls._with(sizes, plans, LAUNCHES, True)
            return found if found.nbytes <= LIMIT else None
        wanted = min(LAUNCHES, math.ceil(cold / sum(sizes.get(name, 0) for name in OF_SETS)))
        for count in range(wanted, 0 if wanted == 1 else 1, -1):
            found = cls._with(sizes, plans, count, False)
            if found.nbytes <= LIMIT:
                return found
        return None

    @classmethod
    def _with(cls, sizes: Mapping[str, int], plans: Sequence[Any], count: int, own: bool) -> Layout:
        places: dict[Any, tuple[int, int]] = {}
        at = 0

        def add(key: Any, nbytes: int) -> None:
            nonlocal at
            places[key] = at, nbytes
            at += round_up(nbytes, LINE)

        for name, nbytes in sizes.items():
            for number in range(count) if name in OF_SETS else (None,):
                if not (own and name == "b"):
                    add(name if number is None else (name, number), nbytes)
        for name in ("expected", "initial"):
            add(name, sizes["c"])
        add("workspace", max(plan.workspace for plan in plans))
        add("counters", 4 * COUNTERS)
        add("temporaries", max(sum(_nbytes_of_temporary(x) for x in temporaries_of(plan)) for plan in plans))
        return cls(count, own, places, at)


def temporaries_of(plan: Any) -> list[Any]:
    return [temporary for step in plan.steps for temporary in step.launch.temporaries]


def _nbytes_of_temporary(temporary: Any) -> int:
    return round_up(math.prod(temporary.shape) * temporary.dtype.itemsize, LINE)


def _sizes(problem: GemmProblem) -> dict[str, int]:
    """Bytes of each operand."""
    layouts = {"a": problem.a, "b": problem.b, "gate": problem.b, "c": problem.c}
    shapes, dtypes = shapes_of(problem), dtypes_of(problem)
    found = {}
    for name, shape in shapes.items():
        count = extent(shape, layouts[name]) + (not layouts[name].aligned) if name in layouts else math.prod(shape)
        found[name] = count * dtypes[name].itemsize
    return found


class Operands:
    """The operands of a trial in its block, `memory`. No kernel of torch's runs for them, whose first use would load a
    module."""

    def __init__(self, problem: GemmProblem, layout: Layout, memory: torch.Tensor, own_address: int | None) -> None:
        # `own_address` is that of the call's b, where the layout says so. It is read beside calls of that b alone, and
        # these keep it.
        self.problem, self.layout, self.memory, self.own_address = problem, layout, memory, own_address
        self.beta = BETA if problem.has_beta else 0.0
        self.aligned = {
            "a": problem.a.aligned,
            "b": problem.b.aligned,
            "gate": problem.b.aligned,
            "c": problem.c.aligned,
        }

    def place(self, key: Any) -> tuple[int, int]:
        """The address and the bytes of a part."""
        at, nbytes = self.layout.places[key]
        return self.memory.data_ptr() + at, nbytes

    def fill(self, stream: int) -> None:
        """Fills all parts, on a stream, and waits for it."""
        for kind, keys in groupby(self.layout.places, self._kind):  # parts of one kind at once: fewer copies
            if kind is not None:
                (begin, _), *_, (at, nbytes) = 2 * [self.place(key) for key in keys]
                _spread(begin, at + nbytes - begin, _pattern(*kind), stream)
        synchronize(stream)

    def _kind(self, key: Any) -> tuple[torch.dtype | None, str] | None:
        """What fills a part, for `_pattern`; None: nothing."""
        name = key[0] if isinstance(key, tuple) else key
        dtype = dtypes_of(self.problem).get("c" if name == "initial" else name)
        if (dtype is None and name != "counters") or (name == "c" and not self.problem.has_beta):
            return None
        if name == "initial" and not self.problem.has_beta:
            return dtype, "unread"
        return dtype, name if name in SCALES else ""

    def prepare(self, key: Any, stream: int) -> None:
        """Has a C that will be compared be what is read, or NaN, and waits for it."""
        copy(self.place(key)[0], *self.place("initial"), stream)
        synchronize(stream)

    def is_as_expected(self, key: Any, stream: int) -> bool:
        """Whether the bytes of a C are those of the incumbent's, which the host compares once they are there."""
        pieces = torch.zeros(2, PIECE // 8, dtype=torch.int64)
        (begin, nbytes), (wanted, _) = self.place(key), self.place("expected")
        for at in range(0, nbytes, PIECE):
            for piece, of in zip(pieces, (begin, wanted), strict=True):
                copy(piece.data_ptr(), of + at, min(PIECE, nbytes - at), stream)
            synchronize(stream)
            if not torch.equal(*pieces):
                return False
        return True

    def values(self, plan: Any, number: int, into: Any = None) -> tuple[Any, ...]:
        """What launches of a plan are given (`runtime.step`), of the set of that number. into: where C goes, if not to
        the set's own."""
        number %= self.layout.sets
        at, _ = self.place("temporaries")

        def address(name: str) -> int:
            if name == "b" and self.own_address is not None:
                return self.own_address
            key = (name, number) if name in OF_SETS else name
            if name == "c" and into is not None:
                key = into
            past = 0 if self.aligned.get(name, True) else dtypes_of(self.problem)[name].itemsize
            return self.place(key)[0] + past

        found = {name: address(name) for name in plan.names if name in self.layout.places or name in OF_SETS}
        for temporary in temporaries_of(plan):
            found[temporary.name] = at
            at += _nbytes_of_temporary(temporary)
        return (1.0, self.beta, *(found[name] for name in plan.names))


@cache
def _pattern(dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """Numbers like data: zeros would run faster. A prime number of them, so that few rows are equal. Of a C that
    nothing reads first, NaN. They stay in memory, as copies read them."""
    if dtype is None:
        return torch.zeros(PATTERN, dtype=torch.int32)
    random = torch.Generator().manual_seed(0)  # torch's own numbers are the application's
    if name in SCALES:
        return torch.rand(PATTERN, dtype=dtype, generator=random) + 0.5
    is_wide = dtype.is_floating_point and dtype.itemsize > 1
    if name == "unread":
        return torch.full((PATTERN,), math.nan if is_wide else -127, dtype=dtype if is_wide else torch.int8)
    if is_wide:
        return torch.randn(PATTERN, generator=random).to(dtype)
    low, high = (0, 112) if dtype.is_floating_point else (-128, 128)  # of 8 bits; of floating point no NaN
    return torch.randint(low, high, (PATTERN,), dtype=torch.int8, generator=random)


def _spread(begin: int, nbytes: int, pattern: torch.Tensor, stream: int) -> None:
    """Fills memory with a pattern again and again."""
    done = min(nbytes, pattern.nbytes)
    copy(begin, pattern.data_ptr(), done, stream)
    while done < nbytes:
        count = min(done, nbytes - done)
        copy(begin + done, begin, count, stream)
        done += count
