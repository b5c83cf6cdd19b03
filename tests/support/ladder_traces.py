"""Traces of the ladder's kernels, which docs/ladder.md draws: what programs read and write, by address; k11's roles and
barriers, step by step.

`TRITON_INTERPRET=1 python -m tests.support.ladder_traces` prints them as JSON, by rung. Triton's interpreter runs the
rungs on pointers, watched as the exercises' kernels are, and `gluon_on_cpu` runs k11.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

from tests.support import gluon_on_cpu
from tests.support.gluon_memory import Barriers
from tests.support.gluon_threads import here
from triton_gemm.config import GemmConfig
from triton_gemm.kernels.launch import Launch, Pointer, Scalar, TensorMap
from triton_gemm.ladder import LADDER, Rung, k07_tf32
from triton_gemm.ladder import rung as rung_module
from triton_gemm.ladder.exercises.trace import Trace
from triton_gemm.ladder.k05_register_tiled import repacked
from triton_gemm.ladder.k07_tf32 import round_tf32

RUNGS = {rung.id: rung for rung in LADDER}
SQUARE = 4096
FAR = 16_384  # a C of which the programs that run at once cover little
WAVE = 5 * 132  # programs of k03 and k04 that an H100 runs at once (tests/ladder/test_compile_rungs.py)
PERSISTENT = (256, 1792, 512)  # 14 tiles of 128 x 256 for the interpreter's four programs, of eight k-tiles each
RING = (128, 512, 512)  # two tiles of C for one program of k11, of eight k-tiles each


def traced(rung: Rung, sizes: tuple[int, int, int], programs: int | None) -> tuple[Trace, GemmConfig]:
    """What the first programs of a rung touch in its first configuration, on operands of (M, N, K) whose rows lie
    SQUARE or more apart."""
    (M, N, K), config = sizes, rung.configs[0]
    operands = {
        name: torch.zeros(rows, max(SQUARE, columns), dtype=rung.dtypes[0])[:, :columns]
        for name, rows, columns in (("a", M, K), ("b", K, N), ("c", M, N))
    }
    return Trace(**operands).run(partial(rung.launch, config=config), programs=programs), config


def one_program(rung: Rung, K: int = 32) -> dict[str, Any]:
    """Of the first program: where the elements of its first load of each operand lie, in bytes and in the order of the
    tensor; how many it loads in all, for how many FMAs; how often it loads one at most."""
    trace, _ = traced(rung, (SQUARE, SQUARE, K), 1)
    first = {name: (trace.of(name)[0].addresses - trace.operands[name].data_ptr()).tolist() for name in "ab"}
    loaded = {name: np.concatenate([access.addresses for access in trace.of(name)]) for name in "ab"}
    return {
        "first": first if rung.id < "k03" else {},
        "loaded": sum(map(len, loaded.values())),
        "fma": K * sum(len(access.addresses) for access in trace.of("c", "store")),
        "most": max(int(np.unique(addresses, return_counts=True)[1].max()) for addresses in loaded.values()),
    }


def wave(rung: Rung) -> dict[str, Any]:
    """Tile rows and columns of C that each program of the first wave stores, and the strips of A and B it reads."""
    trace, config = traced(rung, (FAR, FAR, rung.configs[0].BLOCK_K or 0), WAVE)
    m, n = config.BLOCK_M or 0, config.BLOCK_N or 0
    rows = {row for access in trace.of("a") for row in (access.rows // m).tolist()}
    columns = {column for access in trace.of("b") for column in (access.columns // n).tolist()}
    tiles = [(int(store.rows[0]) // m, int(store.columns[0]) // n) for store in trace.of("c", "store")]
    return {"edge": FAR // m, "tile": m, "tiles": tiles, "a": sorted(rows), "b": sorted(columns)}


def persistent(rung: Rung) -> dict[str, Any]:
    """The tiles that each program stores, one after another, and the k-tiles of each."""
    trace, config = traced(rung, PERSISTENT, None)
    m, n, stores = config.BLOCK_M or 0, config.BLOCK_N or 0, trace.of("c", "store")
    programs: dict[int, list[int]] = {}
    for store in stores:
        tile = int(store.columns[0]) // n * (PERSISTENT[0] // m) + int(store.rows[0]) // m
        programs.setdefault(store.program[0], []).append(tile)
    return {"programs": list(programs.values()), "k_tiles": len(trace.of("a")) // len(stores)}


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
    full, empty = (x for x in here.program.memory if isinstance(x, Barriers))
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

    def noting(what: str, describe: Callable[..., tuple[Any, ...] | None], function: Callable[..., Any]) -> Any:
        def call(*given: Any, **by_name: Any) -> Any:
            described = describe(*given, **by_name)
            if described is not None:
                steps["load" if here.warps == 1 else "mma"].append([what, *described])
            return function(*given, **by_name)

        return call

    with ExitStack() as patches:  # not pytest's: `make explore` needs no pytest
        for what, (module, name, describe) in NOTED.items():
            *folder, last = name.split(".")
            holder = reduce(getattr, folder, gluon_on_cpu.MODULES[module])
            patches.enter_context(mock.patch.object(holder, last, noting(what, describe, getattr(holder, last))))
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
