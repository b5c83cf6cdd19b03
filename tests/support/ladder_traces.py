"""Traces of the ladder's kernels, which docs/ladder.md draws: what programs read and write, by address; k11's roles and
barriers, step by step.

`TRITON_INTERPRET=1 python -m tests.support.ladder_traces` prints them as JSON, by rung. Triton's interpreter runs the
rungs on pointers under `address_recorder`, and `gluon_on_cpu` runs k11.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.runtime import interpreter

from tests.support import gluon_on_cpu
from tests.support.address_recorder import ANYHOW, Recorder, recorded
from triton_gemm.config import GemmConfig
from triton_gemm.kernels.launch import Launch, Pointer, Scalar, TensorMap
from triton_gemm.ladder import LADDER, Rung, k07_tf32
from triton_gemm.ladder import rung as rung_module
from triton_gemm.ladder.k05_register_tiled import repacked
from triton_gemm.ladder.k07_tf32 import round_tf32

RUNGS = {rung.id: rung for rung in LADDER}
SQUARE = 4096
FAR = 16_384  # a C of which the programs that run at once cover little
WAVE = 5 * 132  # programs of k03 and k04 that an H100 runs at once (tests/ladder/test_compile_rungs.py)
PERSISTENT = (256, 1792, 512)  # 14 tiles of 128 x 256 for the interpreter's four programs, of eight k-tiles each
RING = (128, 512, 512)  # two tiles of C for one program of k11, of eight k-tiles each


class Tracer(Recorder):
    """Notes what the first programs load and store: (program, operand, its elements in order, and their bytes)."""

    def __init__(self, programs: int) -> None:
        super().__init__()
        self.most, self.loads, self.stores = programs, [], []

    def programs(self, grid: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """In the order in which a GPU starts them: along a grid's first axis first."""
        everyone = ((x, y, z) for z, y, x in product(*map(range, reversed(grid))))
        return islice(everyone, self.most)

    def note(self, into: list[Any], pointers: Any, mask: Any) -> None:
        operand, numbers, where = self.touched(pointers.data, mask.data)
        if operand is not None:
            places = np.broadcast_to(pointers.data, where.shape)[where] - np.uint64(operand.address(operand.tensor))
            into.append((interpreter.interpreter_builder.grid_idx, operand.name, numbers, places))

    def load(self, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self.note(self.loads, pointers, mask)
        return super().load(builder, pointers, mask, other, *rest)

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        self.note(self.stores, pointers, mask)
        super().store(builder, pointers, value, mask, *rest)


def traced(rung: Rung, sizes: tuple[int, int, int], programs: int) -> tuple[Tracer, GemmConfig]:
    """The first programs of a rung in its first configuration, on operands of (M, N, K) whose rows lie SQUARE or more
    apart."""
    M, N, K = sizes
    tracer, dtype = Tracer(programs), rung.dtypes[0]
    with recorded(tracer):
        a, b, c = (
            tracer.add(name, torch.zeros(rows, max(SQUARE, columns), dtype=dtype)[:, :columns], ANYHOW)
            for name, rows, columns in (("a", M, K), ("b", K, N), ("c", M, N))
        )
        rung.launch(a, b, c, config=rung.configs[0])
    return tracer, rung.configs[0]


def one_program(rung: Rung, K: int = 32) -> dict[str, Any]:
    """Of the first program: where the elements of its first load of each operand lie, in bytes and in the order of the
    tensor; how many it loads in all, for how many FMAs; how often it loads one at most."""
    tracer, _ = traced(rung, (SQUARE, SQUARE, K), 1)
    first = {name: places.tolist() for _, name, _, places in reversed(tracer.loads)}
    loaded = {name: np.concatenate([numbers for _, x, numbers, _ in tracer.loads if x == name]) for name in "ab"}
    return {
        "first": first if rung.id < "k03" else {},
        "loaded": sum(map(len, loaded.values())),
        "fma": K * sum(len(numbers) for _, _, numbers, _ in tracer.stores),
        "most": max(int(np.unique(numbers, return_counts=True)[1].max()) for numbers in loaded.values()),
    }


def wave(rung: Rung) -> dict[str, Any]:
    """Tile rows and columns of C that each program of the first wave stores, and the strips of A and B it reads."""
    K = rung.configs[0].BLOCK_K or 0
    tracer, config = traced(rung, (FAR, FAR, K), WAVE)
    m, n = config.BLOCK_M or 0, config.BLOCK_N or 0
    strips = {"a": set[int](), "b": set[int]()}
    for _, name, numbers, _ in tracer.loads:
        strips[name] |= set((numbers // K // m if name == "a" else numbers % FAR // n).tolist())
    tiles = [(int(numbers[0]) // FAR // m, int(numbers[0]) % FAR // n) for _, _, numbers, _ in tracer.stores]
    return {"edge": FAR // m, "tile": m, "tiles": tiles, **{name: sorted(found) for name, found in strips.items()}}


def persistent(rung: Rung) -> dict[str, Any]:
    """The tiles that each program stores, one after another, and the k-tiles of each."""
    M, N, _ = PERSISTENT
    tracer, config = traced(rung, PERSISTENT, 1 << 30)
    m, n = config.BLOCK_M or 0, config.BLOCK_N or 0
    programs: dict[int, list[int]] = {}
    for (program, *_), _, numbers, _ in tracer.stores:
        row, column = int(numbers[0]) // N // m, int(numbers[0]) % N // n
        programs.setdefault(program, []).append(column * (M // m) + row)
    loads = sum(name == "a" for _, name, *_ in tracer.loads)
    return {"programs": list(programs.values()), "k_tiles": loads // len(tracer.stores)}


def swizzle(rows: int = 8, width: int = 64) -> list[list[int]]:
    """Where TMA puts 16 bytes of a box of fp16 whose rows have 128, as Triton's layout says: the chunk of each row that
    lies at each place."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    bases = builder.to_linear_layout(gl.NVMMASharedLayout(128, 16, 2)._to_ir(builder), [64, width]).offset_bases

    def element(offset: int) -> tuple[int, int]:
        row = column = 0
        for bit, (of_row, of_column) in enumerate(bases):
            if offset >> bit & 1:
                row, column = row ^ of_row, column ^ of_column
        return row, column

    places = [[element(row * width + 8 * place) for place in range(width // 8)] for row in range(rows)]
    assert all(found == row for row, line in enumerate(places) for found, _ in line)
    return [[column // 8 for _, column in line] for line in places]


def tf32(sizes: tuple[int, int, int] = (128, 128, 256)) -> dict[str, Any]:
    """fp32 numbers by their bits, e and then eight to each step of TF32 from 1 on, and what k07 rounds them to; by how
    much its result misses the fp64 product, rounded and with the 13 bits cleared that a tensor core ignores."""
    M, N, K = sizes
    given = torch.tensor([math.e, *(1 + i * 2.0**-13 for i in range(17))])
    rounded = repacked(given[None], round_tf32)[0, : len(given)]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((M, K), (K, N)))
    wanted, errors = a.double() @ b.double(), {}
    for name, operands in (
        ("rounded", (a, b)),
        ("truncated", [(x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b)]),
    ):
        c = torch.full((M, N), torch.nan)
        k07_tf32.launch(*operands, c, config=RUNGS["k07"].configs[-1], round_operands=name == "rounded")
        errors[name] = float((c - wanted).norm() / wanted.norm())
    bits = {name: x.view(torch.int32).tolist() for name, x in (("given", given), ("rounded", rounded))}
    return {**bits, "errors": errors}


# ---- k11 ----


def named(barrier: Any) -> tuple[str, int]:
    """Which of the two barriers of which slot."""
    full, empty = (x for x in gluon_on_cpu.here.program.memory if isinstance(x, gluon_on_cpu.Barriers))
    return next(
        (name, slot)
        for name, barriers in (("full", full), ("empty", empty))
        for slot, one in enumerate(barriers)
        if one is barrier
    )


# What is noted of k11: where the simulator has it, and what is told of its arguments, or None for nothing.
HOPPER, COMPAT = "triton.experimental.gluon.language.nvidia.hopper", "triton_gemm.compat"
NOTED: dict[str, tuple[str, str, Callable[..., tuple[Any, ...] | None]]] = {
    "wait": (HOPPER, "mbarrier.wait", lambda barrier, phase: (*named(barrier), int(phase))),
    "arrive": (HOPPER, "mbarrier.arrive", lambda barrier, pred=True: named(barrier) if pred else None),
    "copy": (COMPAT, "tma_load", lambda tiles, corner, barrier, into: named(barrier)),
    "store": (COMPAT, "tma_store", lambda *_: ()),
    "product": (HOPPER, "warpgroup_mma", lambda *_, is_async: ()),
    "product wait": (HOPPER, "warpgroup_mma_wait", lambda pending, deps: (pending,)),
}


def simulated_k11() -> SimpleNamespace:
    """The rung's module, and what it has of lower rungs, as `gluon_on_cpu` runs it."""
    texts = {rung.name: Path(sys.modules[rung.module].__file__ or "").read_text() for rung in LADDER}
    plain = {
        "autotune": lambda rung, pre_hook=None: gluon_on_cpu.decorator,
        "checked": lambda rung: gluon_on_cpu.decorator,
    }
    loaded = {"rung": SimpleNamespace(**{**vars(rung_module), **plain})}
    return gluon_on_cpu.module("k11_warp_specialised", {**texts, "rung": ""}, loaded)


def ring(sizes: tuple[int, int, int] = RING) -> dict[str, Any]:
    """What k11's two roles do in one program, each in its order, and whether its result is the product."""
    M, N, K = sizes
    config = RUNGS["k11"].configs[0]
    steps: dict[str, list[list[Any]]] = {"load": [], "mma": []}

    def noting(what: str, says: Callable[..., tuple[Any, ...] | None], function: Callable[..., Any]) -> Any:
        def call(*given: Any, **by_name: Any) -> Any:
            told = says(*given, **by_name)
            if told is not None:
                steps["load" if gluon_on_cpu.here.warps == 1 else "mma"].append([what, *told])
            return function(*given, **by_name)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for what, (module, name, says) in NOTED.items():
            *folder, last = name.split(".")
            holder = reduce(getattr, folder, gluon_on_cpu.MODULES[module])
            patch.setattr(holder, last, noting(what, says, getattr(holder, last)))
        kernel = simulated_k11().warp_specialised_kernel
        kernel.__annotations__ = dict.fromkeys(kernel.__annotations__, "constexpr")  # which they are, and no strings
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randint(-3, 4, shape, generator=generator).half() for shape in ((M, K), (K, N)))
        operands = {"a": a, "b": b, "c": torch.full((M, N), torch.nan, dtype=torch.float16)}
        m, n, k = config.BLOCK_M or 0, config.BLOCK_N or 0, config.BLOCK_K or 0
        blocks = {"a": (m, k), "b": (k, n), "c": (m, n)}
        given: dict[str, Any] = {
            f"{name}_desc": TensorMap(name, x.dtype, tuple(x.shape), x.stride(), blocks[name])
            for name, x in operands.items()
        }
        given |= {"c_ptr": Pointer("c"), "M": M, "N": N, "K": K, "stride_cm": N, "HAS_BETA": False, "TUNE_KEY": ""}
        given |= {"alpha": Scalar("alpha"), "beta": Scalar("beta"), "A_COLUMN_MAJOR": False, "B_COLUMN_MAJOR": False}
        given |= config.kwargs()
        arguments = {name: given[name] for name in inspect.signature(kernel).parameters}
        launch = Launch(kernel, (1, 1, 1), arguments, {"num_warps": config.num_warps})
        gluon_on_cpu.run(launch, operands, {"alpha": 1.0, "beta": 0.0})
    right = bool(torch.equal(operands["c"], (a.float() @ b.float()).half()))
    return {**steps, "slots": config.num_stages, "right": right}


def everything() -> dict[str, Any]:
    """All traces, by rung."""
    found: dict[str, Any] = {number: one_program(RUNGS[number]) for number in ("k01", "k02", "k03")}
    found["k03"] |= wave(RUNGS["k03"])
    found["k04"] = wave(RUNGS["k04"])
    found["k07"] = tf32()
    found["k09"] = persistent(RUNGS["k09"])
    found["k10"] = {"swizzle": swizzle()}
    found["k11"] = ring()
    return found


if __name__ == "__main__":
    print(json.dumps(everything()))
