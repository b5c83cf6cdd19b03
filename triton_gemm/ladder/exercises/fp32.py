"""Whether the holes of exercises 1 to 6 are filled in rightly: kernels in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import triton
import triton.language as tl

from ...config import TileConfig
from ...hardware.gpus import named_device
from . import causes
from .questions import RUNS, equals_product, for_each, make_operands, same_bits, stored_tiles, traced, with_solution
from .trace import Access, Trace, WrongError, diagnosis, matrix

MASKED_OFF = (
    " Mask off rows from `height` and columns from `width` on: a lane needs both comparisons, which is `&`. `tl.where` "
    "would come after the load."
)


@for_each((64, 96, 8), (8, 160, 8), (16, 64, 4), drawn=lambda r: (r.randint(1, 12), 32 * r.randint(1, 6), 4))
def coalesce(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    strips = f" Strips of a row of C: {N // 32}, of 32 columns each, and in a strip only the columns vary with `lanes`."
    trace = traced(exercise, make_operands(M, N, K), outside=lambda *_: strips)
    equals_product(trace, cause=causes.diagonal)
    for name, kind in (("a", "load"), ("b", "load"), ("c", "store")):
        access = max(trace.of(name, kind), key=Access.sectors)
        if access.sectors() > 4:
            rows, step = len(set(access.rows)), access.columns[1] - access.columns[0]
            where = f"lie in {rows} rows" if rows > 1 else f"are {step} elements apart in a row"
            if rows == 1 and step == 1:
                where = f"begin at column {access.columns[0]}, amid a sector of 8,"
            raise WrongError(
                f"C is right, but a warp touches {access.sectors()} sectors in one {kind} of {name}, where 4 hold all "
                f"that 32 lanes use: its lanes {where} of {name}."
            )


@for_each((37, 29, 45), (20, 50, 35), drawn=lambda r: (r.randint(1, 40), r.randint(1, 40), r.randint(1, 40)))
def mask(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    operands = make_operands(M, N, K)

    def outside(name: str, row: int, column: int) -> str:
        return diagnosis(causes.unparenthesised, RUNS[-1]) or MASKED_OFF

    trace = traced(exercise, operands, outside=outside)
    equals_product(trace, cause=causes.beyond_k)
    for row, column in ((0, 32), (32, 0), (32, 32)):
        _outside_is_0(exercise, operands["a"], row, column)


def _outside_is_0(exercise: Any, x: torch.Tensor, row: int, column: int) -> None:
    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        _one_tile[(1,)](x, out, *x.shape, x.stride(0), out.stride(0), row, column, LOAD=exercise.load_tile, BLOCK=16)

    tile = matrix(16, 16, empty=True)
    Trace(a=x, tile=tile).run(run)
    wanted = torch.nn.functional.pad(x[row:, column:], (0, 16, 0, 16))[:16, :16]
    for i, j in (tile != wanted).nonzero().tolist():
        raise WrongError(
            f"C is right, but of a matrix of {x.shape[0]} rows and {x.shape[1]} columns `load_tile` gives "
            f"{float(tile[i, j]):.6g} for [{row + i}, {column + j}], counted from 0, and should give "
            f"{float(wanted[i, j]):.6g}: what lies outside of the matrix is 0."
        )


@triton.jit
def _one_tile(
    x_ptr, out_ptr, height, width, stride, stride_out, row, column, LOAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    x = LOAD(x_ptr, row + offs, column + offs, height, width, stride)
    tl.store(out_ptr + offs[:, None] * stride_out + offs[None, :], x)


def tile(exercise: Any, solution: Any) -> None:
    m, n, k = (getattr(x, "value", x) for x in (exercise.BLOCK_M, exercise.BLOCK_N, exercise.BLOCK_K))  # tl.constexpr
    if any(not isinstance(x, int) or x < 16 or x & (x - 1) for x in (m, n, k)):
        kinds = "powers of two" if all(isinstance(x, int) for x in (m, n, k)) else "whole numbers, powers of two"
        raise WrongError(f"the tile is {m!r} x {n!r} x {k!r}; Triton takes {kinds}, and `tl.dot` 16 at least.")
    if (exercise.NUM_WARPS, exercise.NUM_STAGES) != (solution.NUM_WARPS, solution.NUM_STAGES):
        raise WrongError("NUM_WARPS and NUM_STAGES are given, 4 and 3: the tile alone is to be found.")
    gpu, config = named_device("a100"), TileConfig(m, n, k, exercise.NUM_WARPS, exercise.NUM_STAGES)
    slots = config.buffers(gpu.capability)
    why = config.illegal(gpu, 4, 4, tensor_cores=False, buffers=slots)
    if why is not None:
        more = f"That is {slots} slots of ({m} + {n}) x {k} x 4 bytes, one fewer than NUM_STAGES (k06), and 256 more."
        if "shared memory" not in why:
            more = "FFMAs also read their operands from registers, and pointers are kept there."
        raise WrongError(f"a tile of {m} x {n} x {k} {why}. {more}")
    M, N, K = max(m, 64), max(n, 64), max(k, 32)
    trace = traced(exercise, make_operands(M, N, K))
    equals_product(trace)
    read = 4 * sum(access.addresses.size for name in "ab" for access in trace.of(name))
    if 2 * M * N * K < 16 * read:
        raise WrongError(
            f"C is right, but {2 * M * N * K / read:.3g} FLOP are done for each byte that is read; 16 are asked. "
            f"Reads of each element of A: {N // n}, of B: {M // m}."
        )


@for_each(
    *((160, 256, 16), (80, 96, 16), (128, 64, 16), (112, 80, 16)),
    drawn=lambda r: (16 * r.randint(1, 11), 16 * r.randint(1, 6), 16),
)
def group(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    two = {"iterable": ": `tile_of` returns two values, a row and a column."}

    def outside(name: str, row: int, column: int) -> str:
        if column >= N:
            return (
                f" Columns of tiles are 0 to {N // 16 - 1}: a group of GROUP_M rows has GROUP_M * num_n tiles, and the "
                "last group may have fewer rows."
            )
        return (
            f" Rows of tiles are 0 to {M // 16 - 1}: is the row given first, is it the remainder within a group, and "
            "has the last group fewer rows, if it must?"
        )

    trace = traced(exercise, make_operands(M, N, K), outside=outside, errors=two)
    found = [tiles[0] for tiles in stored_tiles(trace).values()]
    equals_product(trace)
    strips, wanted = _strips(found), _strips(_in_groups(M // 16, N // 16))
    if sum(map(sum, strips)) > sum(map(sum, wanted)):
        in_columns = [(row, column) for column, row in _in_groups(N // 16, M // 16)]
        of_columns = " Its groups have 4 columns, and all rows." * (found == in_columns)
        i = max(range(len(strips)), key=lambda i: sum(strips[i]) - sum(wanted[i]))
        raise WrongError(
            f"C is right, but of programs {16 * i} to {min(16 * i + 16, len(found)) - 1}, strips that are read of A: "
            f"{strips[i][0]}, of B: {strips[i][1]}; in groups of 4 rows they are {wanted[i][0]} and {wanted[i][1]}. "
            f"All waves read {sum(map(sum, strips))} strips, where {sum(map(sum, wanted))} are enough.{of_columns}"
        )


def _in_groups(rows: int, columns: int) -> list[tuple[int, int]]:
    """All tiles in the order of a grouped launch, whose groups have 4 rows."""
    return [
        (row, column)
        for first in range(0, rows, 4)
        for column in range(columns)
        for row in range(first, min(first + 4, rows))
    ]


def _strips(tiles: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of A and of B, that each 16 tiles read."""
    waves = (tiles[i : i + 16] for i in range(0, len(tiles), 16))
    return [(len({row for row, _ in wave}), len({column for _, column in wave})) for wave in waves]


def beta(exercise: Any, solution: Any) -> None:
    operands = make_operands(32, 48, 64, torch.float16)
    trace = traced(exercise, operands, 0.7, 0.0)
    if trace.of("c"):
        raise WrongError(
            f"C is read with beta = 0: {len(trace.of('c'))} loads. It holds NaN, and 0 times NaN is NaN. A kernel that "
            "loads C and then drops the value has read it all the same."
        )
    product = operands["a"].double() @ operands["b"].double()
    if not torch.allclose(operands["c"].double(), 0.7 * product, 2.0**-9, 2.0**-9):
        missing = torch.allclose(operands["c"].double(), product, 2.0**-9, 2.0**-9)
        is_found = "is 1.0 A B: alpha is missing" if missing else "is not 0.7 A B"
        raise WrongError(f"with alpha = 0.7 and beta = 0 C {is_found}.")
    before = operands["c"].copy_(matrix(32, 48, torch.float16)).double()
    wanted = with_solution(solution, operands, 0.7, -1.5)
    traced(exercise, operands, 0.7, -1.5)
    found = operands["c"].double()
    mistakes = (
        *((0.7, 1.0, "beta is missing"), (0.7, 0.0, "beta C is missing"), (1.0, -1.5, "alpha is missing")),
        *((0.7, 1.5, "beta C is subtracted"), (-0.7, -1.5, "alpha A B is subtracted")),
    )
    for alpha, beta, what in mistakes:
        if torch.allclose(found, alpha * product + beta * before, 2.0**-9, 2.0**-9):
            raise WrongError(f"with alpha = 0.7 and beta = -1.5 C is {alpha} A B + {beta} C: {what}.")
    if not torch.allclose(found, wanted.double(), 2.0**-6, 2.0**-6):
        all_scaled = torch.allclose(found, 0.7 * (product - 1.5 * before), 2.0**-6, 2.0**-6)
        why = "it is 0.7 (A B - 1.5 C)" if all_scaled else "and rounding is not all that differs"
        raise WrongError(f"with alpha = 0.7 and beta = -1.5 C is not 0.7 A B - 1.5 C, {why}.")
    # What fp32 may give, in whatever order it is computed: rounding to fp16 keeps their order.
    sizes = 0.7 * (operands["a"].double().abs() @ operands["b"].double().abs()) + 1.5 * before.abs()
    least, most = ((0.7 * product - 1.5 * before + error * sizes).half() for error in (-(2.0**-20), 2.0**-20))
    same = (least <= found) & (found <= most)
    if not same.all():
        load = " In the interpreter `beta * tl.load(c_ptrs)` has C's dtype: cast the load by `.to(tl.float32)`."
        raise WrongError(
            f"with alpha = 0.7 and beta = -1.5 {int((~same).sum())} of {same.numel()} results have other bits: "
            f"compute `out` in fp32, so that it is rounded once, when it is stored."
            + load
            * bool(diagnosis(causes.multiplies_a_load, Path(exercise.__file__)))
        )
    operands["c"].copy_(before)
    zero = {"ZeroDivisionError": ", with alpha = 0, where C is beta C: divide by nothing that may be 0."}
    traced(exercise, operands, 0.0, -1.5, errors=zero)
    if not torch.allclose(operands["c"].double(), -1.5 * before, 2.0**-9, 2.0**-9):
        value, right = float(operands["c"][0, 0]), -1.5 * float(before[0, 0])
        raise WrongError(f"with alpha = 0 and beta = -1.5 c[0, 0] is {value:.6g}, and should be {right:.6g}, -1.5 C.")
    random = Random(Path(exercise.__file__).read_bytes())
    drawn = [round(random.uniform(-3.0, 3.0), 2) or 1.0 for _ in range(2)]
    for alpha, beta in ((-1.25, 0.5), drawn):
        operands["c"].copy_(before)
        wanted = with_solution(solution, operands, alpha, beta)
        traced(exercise, operands, alpha, beta)
        if not torch.allclose(operands["c"], wanted, 2.0**-9, 2.0**-9):
            value, right = float(operands["c"][0, 0]), float(wanted[0, 0])
            raise WrongError(
                f"with alpha = {alpha} and beta = {beta} c[0, 0] is {value:.6g}, and should be {right:.6g}."
            )


@for_each(
    *((32, 16, 96), (16, 32, 48), (16, 16, 16), (16, 16, 32), (16, 16, 112)),
    drawn=lambda r: (16 * r.randint(1, 2), 16 * r.randint(1, 2), 16 * r.randint(1, 12)),
)
def pipeline(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    operands = make_operands(M, N, K)
    wanted = with_solution(solution, operands)
    trace = traced(exercise, operands, outside=causes.beyond(K))
    equals_product(trace, cause=causes.multiplied)
    for name in "ab":
        if int(trace.counted(name).max()) != {"a": N, "b": M}[name] // 16:  # tiles of C that need each
            raise WrongError(f"C is right, but k-tiles of {name} are loaded more than once.")
    for accesses in trace.programs().values():
        dots, loads = 0, Counter[str]()
        for access in (one for one in accesses if one.kind in ("load", "dot")):
            loads[access.operand] += access.kind == "load"
            if access.kind == "dot":
                dots += 1
                late = " and ".join(name for name in "ab" if loads[name] < min(dots + 1, K // 16))
                if late:
                    raise WrongError(
                        f"C is right, but when k-tile {dots - 1} is multiplied, k-tile {dots} of {late} was not asked "
                        "for yet: the units wait for each load. Load the next one before."
                    )
    if not same_bits(operands["c"], wanted).all():
        raise WrongError("C is right but for rounding: its bits are others. Are k-tiles added in another order?")
