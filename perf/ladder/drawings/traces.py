"""What drawings are made of: addresses and barriers that running kernels left, and what the compiler makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from perf.ladder.interpret import UnavailableError
from perf.ladder.static import SIZE, capture
from perf.measure.environment import ROOT, of_child
from triton_gemm import compat
from triton_gemm.ladder import LADDER
from triton_gemm.runtime import aot

RUNGS = {rung.id: rung for rung in LADDER}
HOPPER = (9, 0)
SECTOR, LINE, WARP = 32, 128, 32  # bytes that memory moves at least, bytes of a cache line, lanes


@cache
def recorded() -> dict[str, Any]:
    """By rung, what `tests.support.ladder_traces` records, in a process of its own: Triton's interpreter must be chosen
    before kernels are imported. Raises UnavailableError with its last words if it fails."""
    surroundings = of_child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.support.ladder_traces"]
    ran = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UnavailableError((ran.stderr.strip().splitlines() or ["no word of why"])[-1])
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@cache
def compiled(rung: str) -> aot.Compiled:
    """A rung's kernel in its first configuration, at 4096^3, for an H100."""
    known = RUNGS[rung]
    return aot.compile_launch(capture(known, known.configs[0], SIZE, known.dtypes[0]), HOPPER)


# ---- How threads hold a tensor ----


@dataclass(frozen=True)
class Blocked:
    """Triton's blocked layout: elements, lanes and warps along each dimension, and which of these is counted first."""

    elements: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, ttgir: str) -> Blocked:
        """Of what a kernel on FFMAs sums up: the result of `tl.dot`, or the only tensor of k01 and k02."""
        of_dot = re.search(r"tt\.dot .*parent = #(\w+)", ttgir)
        name = of_dot[1] if of_dot else "blocked"
        fields = "sizePerThread = (.*?), threadsPerWarp = (.*?), warpsPerCTA = (.*?), order = (.*?)"
        found = re.search(rf"#{name} = #ttg.blocked<{{{fields}}}>", ttgir)
        assert found is not None
        return cls(*(tuple(json.loads(numbers)) for numbers in found.groups()))

    def indices(self, dimension: int, size: int, lane: int) -> list[int]:
        """Where along one dimension of `size` a lane of the first warp has elements."""
        for faster in self.order[: self.order.index(dimension)]:
            lane //= self.lanes[faster]
        each = self.elements[dimension]
        begin = lane % self.lanes[dimension] * each
        step = each * self.lanes[dimension] * self.warps[dimension]
        return [first + begin + i for first in range(0, size, step) for i in range(each)]


@dataclass(frozen=True)
class Access:
    """What a warp asks of memory by one load: for each lane its first byte and how many follow."""

    lanes: list[int]
    width: int

    @property
    def sectors(self) -> list[int]:
        return sorted({byte // SECTOR for first in self.lanes for byte in range(first, first + self.width)})

    @property
    def used(self) -> int:
        return self.width * len(self.lanes)


def load_of(rung: str, operand: str) -> Access:
    """The first load of an operand by the first warp of k01 or k02: elements by the trace, lanes and width by the
    compiler."""
    places, kernel = recorded()[rung]["first"][operand], compiled(rung)
    width = max(int(number or 1) for number in re.findall(r"ld\.global(?:\.v(\d))?\.b32", kernel.asm["ptx"]))
    layout = Blocked.of(kernel.asm["ttgir"])
    mine = [layout.indices(0, len(places), lane)[:width] for lane in range(WARP)]
    assert all(places[lane[-1]] - places[lane[0]] == 4 * (width - 1) for lane in mine)
    return Access([places[lane[0]] for lane in mine], 4 * width)


@dataclass(frozen=True)
class Results:
    """The results of one thread in a tile of m x n: rows and columns; those of its warp."""

    tile: tuple[int, int]
    rows: list[int]
    columns: list[int]
    warp_rows: list[int]
    warp_columns: list[int]

    @property
    def count(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def words(self) -> int:
        """That it reads of A and of B for each step of K."""
        return len(self.rows) + len(self.columns)


def results_of(rung: str) -> Results:
    """Of lane 0 in a kernel whose `tl.dot` runs on FFMAs."""
    layout, config = Blocked.of(compiled(rung).asm["ttgir"]), RUNGS[rung].configs[0]
    tile = config.BLOCK_M or 0, config.BLOCK_N or 0
    of_lanes = [
        sorted({i for lane in range(WARP) for i in layout.indices(dimension, tile[dimension], lane)})
        for dimension in (0, 1)
    ]
    of_one = [layout.indices(dimension, tile[dimension], 0) for dimension in (0, 1)]
    return Results(tile, *of_one, *of_lanes)


# ---- TMA ----


def boxes() -> dict[str, list[int]]:
    """Rows and columns of the box that one TMA instruction of k10 copies, by operand."""
    rung = RUNGS["k10"]
    launch = capture(rung, rung.configs[0], SIZE, torch.float16)
    made = compat.compile_kernel(launch.kernel, launch.arguments, HOPPER).metadata.tensordesc_meta
    return {name: list(meta["block_size"]) for name, meta in zip("ab", made, strict=False)}
