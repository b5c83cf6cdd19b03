"""Loads and products on a clock: the order of instructions and what they wait for is the kernel's own, as the compiler
or the simulator leaves it; how long each takes is the arithmetic of `perf.ladder.clock_model`.

A load takes L2's width for its bytes, one after another, and then a latency; a product takes the units' peak; a store
the same width as a load. Nothing else takes time, and one program runs alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from perf.ladder.clock_model import LATENCY_CLOCKS
from perf.ladder.drawings import traces
from perf.measure import roofline
from perf.measure.numerics import mode_of


@dataclass(frozen=True)
class Bar:
    """One thing that takes time. what: "copy", "product" or "store"; step: the k-tile, counted from the first; slot:
    where it lies in the ring."""

    what: str
    start: float
    end: float
    step: int
    slot: int = 0


@dataclass
class Clock:
    """One program's units: when they are free, and what they did."""

    product: float
    transfer: float
    store: float
    now: float = 0.0
    path_free: float = 0.0
    unit_free: float = 0.0
    bars: list[Bar] = field(default_factory=list)

    @classmethod
    def of(cls, rung: str) -> Clock:
        """In clocks of an H100's SM, for the rung's first configuration."""
        config, dtype = traces.RUNGS[rung].configs[0], traces.RUNGS[rung].dtypes[0]
        m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
        rate = roofline.flop_per_clock(roofline.TYPICAL[9, 0], mode_of(traces.RUNGS[rung].precision, dtype))
        width = roofline.L2_BYTES_PER_CLOCK
        return cls(2 * m * n * k / rate, (m + n) * k * dtype.itemsize / width, m * n * dtype.itemsize / width)

    def copy(self, at: float, step: int, slot: int) -> float:
        """Begins a load; returns when it has arrived."""
        self.path_free = max(at, self.path_free) + self.transfer
        self.bars.append(Bar("copy", at, self.path_free + LATENCY_CLOCKS, step, slot))
        return self.bars[-1].end

    def multiply(self, at: float, step: int, slot: int) -> float:
        start = max(at, self.unit_free)
        self.unit_free = start + self.product
        self.bars.append(Bar("product", start, self.unit_free, step, slot))
        return self.unit_free

    def write(self, at: float, step: int) -> float:
        self.bars.append(Bar("store", at, at + self.store, step))
        return at + self.store

    def of_kind(self, what: str) -> list[Bar]:
        return [bar for bar in self.bars if bar.what == what]


# ---- Loops as the compiler leaves them ----

OPERATIONS = re.compile(
    r"ttg\.(async_commit_group)|ttg\.(async_wait) .*?num = (\d+)|= (tt\.dot) |(ttng\.warp_group_dot) "
    r"|(ttng\.warp_group_dot_wait) .*?pendings = (\d+)|= (tt\.load) .*tensor<|(tt\.store) "
)
NAMES = {"async_commit_group": "copy", "async_wait": "wait", "tt.dot": "dot", "ttng.warp_group_dot": "async dot"}
NAMES |= {"ttng.warp_group_dot_wait": "dot wait", "tt.load": "load", "tt.store": "store"}


@dataclass(frozen=True)
class Operation:
    """number: how much a wait leaves under way; at_end: only behind the last k-tile of a tile of C."""

    name: str
    number: int = 0
    at_end: bool = False


@dataclass(frozen=True)
class Loop:
    """A kernel's main loop. ahead: k-tiles that are asked for before it; slots: k-tiles in shared memory."""

    ahead: int
    slots: int
    body: tuple[Operation, ...]

    @property
    def in_registers(self) -> bool:
        """Whether loads go through registers, for which the hardware waits where they are used."""
        return any(operation.name == "load" for operation in self.body)

    @classmethod
    def of(cls, rung: str) -> Loop:
        """Of the compiled kernel, in the dialect that Triton's pipeliner writes: A and B are a group of copies each."""
        lines = traces.compiled(rung).asm["ttgir"].splitlines()
        product = next(i for i, line in enumerate(lines) if "tt.dot " in line or "warp_group_dot " in line)
        begin = next(i for i in range(product, 0, -1) if "scf.for" in lines[i])
        indent = len(lines[begin]) - len(lines[begin].lstrip())
        end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
        ahead = sum("async_commit_group" in line for line in lines[:begin])
        ring = re.search(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x", "\n".join(lines))
        return cls(ahead // 2, int(ring[1]) if ring else 1, tuple(_operations(lines[begin + 1 : end], indent + 2)))

    def run(self, clock: Clock, steps: int, each: int = 0) -> None:
        """Goes round `steps` times, from `clock.now`; `each`: k-tiles of a tile of C, for loops that store."""
        groups: list[float] = []  # when each k-tile has arrived
        products: list[float] = []

        def request() -> None:
            step = len(groups)
            groups.append(clock.copy(clock.now, step, step % self.slots) if step < steps else clock.now)

        for _ in range(self.ahead):
            request()
        for step in range(steps):
            halves = 0
            for operation in self.body:
                if operation.at_end and (step + 1) % each:
                    continue
                if operation.name in ("copy", "load"):
                    halves += 1
                    if halves % 2 == 0:
                        request()
                elif operation.name == "wait":
                    clock.now = max([clock.now, *groups[: len(groups) - operation.number // 2]])
                elif operation.name == "dot":
                    if self.in_registers:
                        clock.now = max(clock.now, groups[step])
                    clock.now = clock.multiply(clock.now, step, step % self.slots)
                elif operation.name == "async dot":
                    products.append(clock.multiply(clock.now, step, step % self.slots))
                elif operation.name == "dot wait":
                    clock.now = max([clock.now, *products[: len(products) - operation.number]])
                else:
                    clock.now = clock.write(clock.now, step)
        clock.now = max([clock.now, *products])


def _operations(lines: Sequence[str], indent: int) -> Iterator[Operation]:
    for line in lines:
        found = OPERATIONS.search(line)
        if found:
            words = [word for word in found.groups() if word]
            number = int(words[1]) if len(words) > 1 else 0
            yield Operation(NAMES[words[0]], number, len(line) - len(line.lstrip()) > indent)


def pipelined(rung: str, steps: int) -> Clock:
    """A rung's main loop on the clock."""
    clock = Clock.of(rung)
    Loop.of(rung).run(clock, steps)
    return clock


def tile_after_tile(rung: str, tiles: int, each: int) -> Clock:
    """An SM that computes tiles of `each` k-tiles: in k09 by one program, in k08 by programs one after another."""
    clock, loop = Clock.of(rung), Loop.of(rung)
    if any(operation.at_end for operation in loop.body):
        loop.run(clock, tiles * each, each)
        return clock
    for _ in range(tiles):
        loop.run(clock, each)
        clock.now = clock.write(clock.now, each)
    return clock


# ---- k11's two roles ----


@dataclass(frozen=True)
class Ring:
    """What k11's roles do. turns: (barrier, slot, when) of every time that one lets somebody pass; waits: (role, from,
    to) where one stands still."""

    clock: Clock
    slots: int
    turns: list[tuple[str, int, float]]
    waits: list[tuple[str, float, float]]


def ring() -> Ring:
    """The simulator's trace of k11 on the clock: each role in its own order, and waiting for the other's arrivals."""
    trace = traces.recorded()["k11"]
    found = Ring(Clock.of("k11"), trace["slots"], [], [])
    clock, left = found.clock, {role: list(trace[role]) for role in ("load", "mma")}
    now = dict.fromkeys(left, 0.0)
    waited_for: Counter[tuple[str, int]] = Counter()  # how often a barrier was waited for
    copies: list[int] = []  # their slots: of A and of B for each k-tile
    products: list[float] = []

    def done(role: str, what: str, *more: Any) -> bool:
        """Does a role's next step; False where its barrier has not turned."""
        if what == "wait":
            *barrier, phase = more
            turns = [when for *one, when in found.turns if one == barrier]
            before = waited_for[barrier[0], barrier[1]]
            needed = before + (before % 2 == phase)  # turns, after which the barrier's phase is not `phase`
            if len(turns) < needed:
                return False
            waited_for[barrier[0], barrier[1]] += 1
            until = max([now[role], *turns[:needed]])
            if until > now[role]:
                found.waits.append((role, now[role], until))
            now[role] = until
        elif what == "copy":
            copies.append(more[1])
            if len(copies) % 2 == 0:  # both are one phase of the barrier
                found.turns.append((*more, clock.copy(now[role], len(copies) // 2 - 1, more[1])))
        elif what == "arrive":
            found.turns.append((*more, now[role]))
        elif what == "product":
            products.append(clock.multiply(now[role], len(products), len(products) % found.slots))
        elif what == "product wait":
            now[role] = max([now[role], *products[: len(products) - more[0]]])
        else:
            clock.write(now[role], len(products) - 1)
        return True

    while any(steps and done(role, *steps[0]) and steps.pop(0) for role, steps in left.items()):
        pass
    assert not any(left.values()), "the roles wait for each other"
    return found
