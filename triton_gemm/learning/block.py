"""Private operands of a race, in one block of memory that torch's allocator has cached and nobody uses.

The driver is asked for no memory, and torch frees none for it. As long as the block is taken the GPU has as much free
memory beside, which torch can have instead. The block belongs to the stream whose calls are raced, so giving it back
needs no wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..problem import GemmProblem, round_up
from ..runtime.workspace import COUNTERS
from ..tuning.operands import BETA, dtypes_of, extent, shapes_of
from ..tuning.timing import COLD_FACTOR

LIMIT = 256 * 2**20  # bytes
LAUNCHES = 4  # of a sample
LINE = 512  # bytes to which parts of the block are aligned
ROW = 2048  # elements that one reduction looks at: so many take no memory beside
OF_SETS = ("a", "b", "gate", "c")  # what each set of operands has for itself
FILLS: Mapping[str, Callable[[torch.Tensor, torch.Generator], object]] = {
    "a_scale": lambda x, generator: x.uniform_(0.5, 1.5, generator=generator),
    "b_scale": lambda x, generator: x.uniform_(0.5, 1.5, generator=generator),
}


def is_free(index: int, stream: int, nbytes: int) -> bool:
    """Whether torch has a block of so many bytes for that stream that nobody uses, and the GPU twice as many beside."""
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    if torch.cuda.memory.get_allocator_backend() != "native" or unused < nbytes:
        return False
    if torch.cuda.mem_get_info(index)[0] < 2 * nbytes + LIMIT:
        return False
    segments = (x for x in torch.cuda.memory_snapshot() if x["device"] == index and x["stream"] == stream)
    return any(
        block["state"] == "inactive" and block["size"] >= nbytes
        for segment in segments
        if segment["segment_type"] == "large" and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
    )


@dataclass(frozen=True)
class Layout:
    """Where the parts of a race's block are. sets: of operands, which launches go round; own: whether b is the call's,
    which the cache does not hold; places: by name, and of OF_SETS by name and number, (offset, bytes)."""

    sets: int
    own: bool
    places: dict[Any, tuple[int, int]]
    nbytes: int

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
        add("expected", sizes["c"])
        add("differ", round_up(-(-sizes["c"] // (8 * ROW)), ROW) + 2 * ROW)
        add("workspace", max(plan.workspace for plan in plans))
        add("counters", 4 * COUNTERS)
        add("temporaries", max(sum(_nbytes_of_temporary(x) for x in temporaries_of(plan)) for plan in plans))
        return cls(count, own, places, at)


def temporaries_of(plan: Any) -> list[Any]:
    return [temporary for step in plan.steps for temporary in step.launch.temporaries]


def _nbytes_of_temporary(temporary: Any) -> int:
    return round_up(math.prod(temporary.shape) * temporary.dtype.itemsize, LINE)


def _sizes(problem: GemmProblem) -> dict[str, int]:
    """Bytes of each operand. C's are whole rows of what is compared."""
    layouts = {"a": problem.a, "b": problem.b, "gate": problem.b, "c": problem.c}
    shapes, dtypes = shapes_of(problem), dtypes_of(problem)
    found = {}
    for name, shape in shapes.items():
        count = extent(shape, layouts[name]) + (not layouts[name].aligned) if name in layouts else math.prod(shape)
        found[name] = count * dtypes[name].itemsize
    return found | {"c": round_up(found["c"], 8 * ROW)}


class Operands:
    """The operands of a race in its block, `memory`. own_b: the call's, where the layout says so."""

    def __init__(
        self, problem: GemmProblem, layout: Layout, memory: torch.Tensor, own_b: torch.Tensor | None, seed: int = 0
    ) -> None:
        self.problem, self.layout, self.memory, self.own_b = problem, layout, memory, own_b
        self.own_address = 0 if own_b is None else own_b.data_ptr()
        self.generator = torch.Generator(device=memory.device).manual_seed(seed)
        self.beta = BETA if problem.has_beta else 0.0
        self.aligned = {
            "a": problem.a.aligned,
            "b": problem.b.aligned,
            "gate": problem.b.aligned,
            "c": problem.c.aligned,
        }

    def part(self, key: Any, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        at, nbytes = self.layout.places[key]
        return self.memory[at : at + nbytes].view(dtype)

    def fill(self) -> None:
        """Fills all parts."""
        dtypes = dtypes_of(self.problem)
        for key in self.layout.places:
            name = key[0] if isinstance(key, tuple) else key
            if name in ("counters", "differ"):
                self.part(key).zero_()
            elif name in dtypes:
                self._fill(key, name, dtypes[name])

    def _fill(self, key: Any, name: str, dtype: torch.dtype) -> None:
        """With numbers like data: zeros would run faster."""
        if name in FILLS:
            FILLS[name](self.part(key, dtype), self.generator)
        elif dtype.is_floating_point and dtype.itemsize > 1:
            self.part(key, dtype).normal_(generator=self.generator)
        else:  # of 8 bits; of floating point no NaN
            low, high = (0, 112) if dtype.is_floating_point else (-128, 128)
            self.part(key, torch.int8).random_(low, high, generator=self.generator)

    def is_whole(self) -> bool:
        """Whether the call's own b still has its memory."""
        return self.own_b is None or (
            self.own_b.untyped_storage().nbytes() > 0 and self.own_b.data_ptr() == self.own_address
        )

    def values(self, plan: Any, number: int, into: Any = None) -> tuple[Any, ...]:
        """What launches of a plan are given (`runtime.step`), of the set of that number. into: where C goes, if not to
        the set's own."""
        number %= self.layout.sets
        at = {"temporaries": self.layout.places["temporaries"][0]}

        def address(name: str) -> int:
            if name == "b" and self.own_b is not None:
                return self.own_address
            key = (name, number) if name in OF_SETS else name
            if name == "c" and into is not None:
                key = into
            past = 0 if self.aligned.get(name, True) else dtypes_of(self.problem)[name].itemsize
            return self.memory.data_ptr() + self.layout.places[key][0] + past

        found = {name: address(name) for name in plan.names if name in self.layout.places or name in OF_SETS}
        for temporary in temporaries_of(plan):
            found[temporary.name] = self.memory.data_ptr() + at["temporaries"]
            at["temporaries"] += _nbytes_of_temporary(temporary)
        return (1.0, self.beta, *(found[name] for name in plan.names))

    def prepare(self, key: Any) -> None:
        """Fills a C that will be compared: with what is read, the same each time, or with NaN."""
        c = self.part(key, self.problem.out_dtype)
        if self.problem.has_beta:
            self.generator.manual_seed(1)
            self._fill(key, "c", self.problem.out_dtype)
        elif c.dtype.is_floating_point and c.dtype.itemsize > 1:
            c.fill_(math.nan)
        else:
            self.part(key, torch.int8).fill_(-127)

    def comparison(self, flag: torch.Tensor) -> list[Callable[[], object]]:
        """What says, one after another, whether C of the first set is what is expected bit by bit: in `flag`, on the
        host, without a wait. No memory is taken: reductions are as long as one thread block does by itself."""
        c, expected = self.part(("c", 0), torch.int64), self.part("expected", torch.int64)
        differ = self.part("differ", torch.bool)
        rows = c.numel() // ROW
        some = differ[: round_up(rows, ROW)].view(-1, ROW)
        return [
            partial(c.bitwise_xor_, expected),
            partial(torch.any, c.view(rows, ROW), 1, out=differ[:rows]),
            partial(torch.any, some, 1, out=differ[-2 * ROW :][: len(some)]),
            partial(torch.any, differ[-2 * ROW : -ROW], 0, out=differ[-1]),
            partial(flag.copy_, differ[-1], non_blocking=True),
        ]
