"""Whether the holes of exercises 7 to 13 are filled in rightly: tensor cores, shared K, TMA and the ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from . import causes
from .questions import RUNS, Advice, equals_product, for_each, make_operands, same_bits, stored_tiles, traced
from .ring import BLOCK, simulate
from .trace import HALO, Access, WrongError, matrix

RING = [torch.empty(size, dtype=torch.float16, device="meta") for size in ((64, 512), (512, 64), (64, 64))]
FLOATS = [  # bits, what they should become, and what is rounded there
    (0x3F800800, 0x3F800000, "below a tie, and goes down"),
    (0x3F801800, 0x3F802000, "above a tie, and goes up"),
    (0x3F801000, 0x3F802000, "a tie, which goes away from zero, not to even"),
    (0x3F803000, 0x3F804000, "a tie, which goes away from zero, not to odd"),
    (0xBF801000, 0xBF802000, "a tie, which goes away from zero"),
    (0x3FFFFFFF, 0x40000000, "a carry into the exponent"),
    (0x7F7FFFFF, 0x7F800000, "the largest of fp32, which carries to infinity"),
    (0xFF7FFFFF, 0xFF800000, "the least of fp32, which carries to -infinity"),
    (0x7F800000, 0x7F800000, "infinity, which stays"),
    (0xFF800000, 0xFF800000, "-infinity, which stays"),
    (0x80000000, 0x80000000, "-0, which keeps its sign"),
    *(  # each kind, of both signs: subnormals, and what stays below and above a last bit that is even or odd
        (sign + kept + low, sign + kept + 0x2000 * (low >= 0x1000), f"{'subnormal, ' * (kept < 1 << 23)}{where} a tie")
        for sign in (0, 0x80000000)
        for kept in (0x4000, 0x6000, 0x3F904000, 0x3F90A000, 0x7E004000)
        for low, where in ((0x0FFF, "below"), (0x1000, "at"), (0x1001, "above"), (0x1FFF, "above"))
    ),
]
NANS = [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F801000, 0xFFBFF000]
# A mistake that explains all of the results: what it does to the bits of a magnitude, and a sentence.
ROUNDINGS: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x & -0x2000, "truncation shrinks every operand"),
    (lambda x: (x + 0xFFF) & -0x2000, "ties go toward zero here, and should go away from it"),
    (lambda x: (x + 0xFFF + (x >> 13 & 1)) & -0x2000, "ties go to even here, and should go away from zero"),
    (lambda x: (x + 0x8000) & -0x10000, "7 bits of mantissa are kept, as in bf16, and TF32 keeps 10"),
    (lambda x: (x + 0x800) & -0x1000, "11 bits of mantissa are kept, and TF32 keeps 10"),
    (lambda x: (x + 0x1000) & -0x4000, "14 bits are cleared, so that 9 of mantissa are kept, and TF32 keeps 10"),
]


WHERE = "`tl.where(condition, this, that)` gives `this` where the condition is true"


def tf32(exercise: Any, solution: Any) -> None:
    random = Random(Path(exercise.__file__).read_bytes())
    given = [*(case[0] for case in FLOATS), *NANS, *(random.getrandbits(32) for _ in range(400))]
    x = matrix(1, len(given))
    x[0] = torch.tensor(given).int().view(torch.float32)
    out, wanted = torch.empty_like(x), torch.empty_like(x)
    traced(exercise, {"x": x, "out": out})
    solution.run(x, wanted)
    wrong = ~same_bits(out, wanted) & ~x.isnan()
    bits, found = (one[~x.isnan()].view(torch.int32) for one in (x, out))
    if wrong.any():
        i = int(wrong.nonzero()[0, 1])
        sizes, rounded = bits & 0x7FFFFFFF, found & 0x7FFFFFFF
        why = next((text for round_bits, text in ROUNDINGS if torch.equal(rounded, round_bits(sizes))), "")
        lost, becomes = same_bits(out.abs(), wanted.abs()) & wrong, out.isnan() & (x.abs() < 2.0**120)
        marked = wrong & x.isfinite() & (x != out) & (out.view(torch.int32) == x.view(torch.int32) | 0x400000)
        if not why and marked.any():
            i = int(marked.nonzero()[0, 1])
            why = f"it comes back with bit 0x400000 set, as a NaN may. Is a number taken for NaN? {WHERE}"
        elif not why and ((rounded & 0x1FFF) != 0).any():
            i = int(((out.view(torch.int32) & 0x1FFF) != 0).logical_and(wrong).nonzero()[0, 1])
            why = (
                "its last 13 bits are not all 0. Half of the last bit that stays is added first, and then they are "
                "cleared; `+` binds closer than `&`"
            )
        elif not why and torch.equal(*(x[sizes > 0] for x in (rounded, _signed(bits, sizes)))):
            why = "the sign is a bit of its own, so what is added to the others goes away from zero for both signs"
        elif not why and lost.any():
            i, why = int(lost.nonzero()[0, 1]), "it lost its sign"
        elif not why and becomes.any():
            i, why = int(becomes.nonzero()[0, 1]), f"a number becomes NaN. {WHERE}"
        elif not why and i < len(FLOATS):
            why = f"it is {FLOATS[i][2]}"
        raise WrongError(
            f"{float(x[0, i]):.9g} becomes {float(out[0, i]):.9g}, and should become {float(wanted[0, i]):.9g}"
            f" (bits 0x{_bits(x, i):08X}, 0x{_bits(out, i):08X} and 0x{_bits(wanted, i):08X}){': ' * bool(why)}{why}."
        )
    read = (out.view(torch.int32) & -0x2000).view(torch.float32)  # what a tensor core reads
    if (lost := x.isnan() & ~read.isnan()).any():
        i = int(lost.nonzero()[0, 1])
        raise WrongError(
            f"the NaN of bits 0x{_bits(x, i):08X} becomes bits 0x{_bits(out, i):08X}. A NaN stays one: a tensor core "
            "ignores the last 13 bits, so that a bit of the mantissa above them has to be set."
            + " Bits are integers: `tl.where` made one of a NaN."
            * bool((out[lost].view(torch.int32) == -(1 << 31)).all() and int(lost.sum()) >= len(NANS))
        )


def _signed(bits: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """What rounding gives that takes half of the last bit from a negative number."""
    return torch.where(bits < 0, sizes - 0x1000, sizes + 0x1000) & 0x7FFFE000


def _bits(x: torch.Tensor, i: int) -> int:
    return int(x.view(torch.int32)[0, i]) & 0xFFFFFFFF


AS_THEY_ARE = "give `tl.dot` a and b as they are, in fp16."
NO_FP32 = f"fp32 operands do not run on fp16's tensor cores: {AS_THEY_ARE}"
SUMS = ": sums that `tl.dot` is given have its result's shape and dtype, which is `out_dtype`, fp32 unless it is given."


def accumulate(exercise: Any, solution: Any) -> None:
    _not_lost(exercise)
    _rounded_once(exercise, solution)
    if why := causes.in_fp64(Path(exercise.__file__)):
        raise WrongError(why)


def _not_lost(exercise: Any) -> None:
    operands = make_operands(16, 16, 1024, torch.float16)
    operands["a"].fill_(1.0)
    operands["b"].fill_(1 / 32)  # a k-tile of 16 adds 0.5, but the first, which adds 2048
    operands["b"][:16].fill_(128.0)
    errors: dict[str, Advice] = {"must be same dtype": f": {AS_THEY_ARE}", "accumulator dtype": SUMS}
    errors["AssertionError"] = lambda text, _: SUMS * text.rstrip(": ").endswith("AssertionError")
    errors["multiplies fp32 operands"] = f" But {NO_FP32}"
    step = " A k-tile begins at a multiple of BLOCK."
    trace = traced(exercise, operands, outside=lambda *_: step, errors=errors)
    value, dots = float(operands["c"][0, 0]), sum(one.kind == "dot" for one in trace.accesses)
    if value == 2048 and dots == 64:
        raise WrongError(
            "a sum of 2048 and 63 times 0.5 is 2048, and should be 2080: each 0.5 is rounded away as it is added. The "
            "neighbours of 2048 are 2 apart in fp16, and 16 in bf16."
        )


@for_each((32, 48, 512), (32, 48, 80), drawn=lambda r: (16, 16 * r.randint(1, 3), 16 * r.randint(1, 40)))
def _rounded_once(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    operands = make_operands(M, N, K, torch.float16)
    trace = traced(exercise, operands)
    other = f" In the interpreter bf16 is multiplied as bits: {AS_THEY_ARE}" * bool(trace.of("bf16", "dot"))
    equals_product(trace, 2.0**-8, lambda trace: other or causes.added_in_bf16(trace) or causes.multiplied(trace))
    a, b, c = (operands[name].double() for name in "abc")
    # What sums in fp32 may become, added in whatever order: rounding to fp16 keeps their order.
    least, most = ((a @ b + error * (a.abs() @ b.abs())).half() for error in (-(2.0**-20), 2.0**-20))
    same = (least <= c) & (c <= most)
    if not same.all():
        why = "is something rounded to 16 bits in the loop, be it a k-tile's product?"
        if torch.equal(c, operands["c"].bfloat16().double()):
            why = "all of them have bf16's 8 bits, of fp16's 11. Sums in fp32 are rounded once, to fp16."
        raise WrongError(
            f"{int((~same).sum())} of {same.numel()} results have other bits than sums in fp32 that are rounded once, "
            f"in whatever order they are added: {why}"
        )
    if trace.of("fp32", "dot"):
        raise WrongError(f"C is right, but {NO_FP32}")
    if not trace.of("fp16", "dot"):
        raise WrongError("C is right, but no `tl.dot` multiplies a and b, and tensor cores do nothing else.")


@for_each(
    *((16, 32, 200), (16, 32, 232), (16, 32, 24), (16, 32, 48), (16, 32, 50)),
    drawn=lambda r: (16, 32, r.randint(1, 300)),
)
def split_k(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    operands = {**make_operands(M, N, K), "sums": matrix(3 * M, N, empty=True)}

    def outside(name: str, row: int, column: int) -> str:
        return f" A part {'begins at k = 0 at the earliest' if row < 0 else 'ends at K at the latest'}."

    trace, steps = traced(exercise, operands, outside=outside), -(-K // 16)
    counts = trace.counted("b")[:, ::16]  # of each k, in each tile of C
    begins = sorted({int(access.columns[0]) for access in trace.of("a") if len(access.columns)})
    odd = next((f" A part loads from k = {k} on, and parts begin at multiples of BLOCK." for k in begins if k % 16), "")
    alike = bool((counts == counts[:, :1]).all())
    for k, tile in (counts != 1).nonzero().tolist():
        times = f"by {counts[k, tile]} of the 3 parts" if counts[k, tile] else "by no part"
        where, why = ("", odd) if alike else (f" in tile (0, {tile}) of C", " `part` numbers the parts of every tile.")
        raise WrongError(f"k = {k} is summed {times}{where}, and should be by one: {K} are {steps} k-tiles.{why}")
    equals_product(trace)
    loads = Counter(access.program for access in trace.of("a"))
    for k in (k for k in begins if k % 16):
        raise WrongError(f"C is right, but a part loads from k = {k} on: parts begin at multiples of BLOCK = 16.")
    if max(loads.values()) > (most := -(-steps // 3)):
        raise WrongError(
            f"C is right, but a part has {max(loads.values())} of the {steps} k-tiles; the longest needs {most}."
        )


@for_each(
    *((64, 48, 32), (80, 64, 16), (16, 48, 16), (176, 16, 16), (112, 64, 16)),
    drawn=lambda r: (16 * r.randint(1, 8), 16 * r.randint(1, 5), 16),
)
def persistent(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    count = M * N // 256
    trace = traced(exercise, make_operands(M, N, K), outside=lambda *_: f" Tiles are 0 to {count - 1}.")
    if trace.grid != (5, 1, 1):
        raise WrongError("the grid is given, 5 programs: what each of them computes is to be found.")
    found = stored_tiles(trace, f" There are {count} tiles and 5 programs: some compute {-(-count // 5)}.")
    equals_product(trace)
    most = max(map(len, found.values()))
    if most > -(-count // 5):
        raise WrongError(
            f"C is right, but one of 5 programs computes {most} of the {count} tiles; {-(-count // 5)} are enough."
        )
    for i in range(most):
        at_once = sorted(N // 16 * tiles[i][0] + tiles[i][1] for tiles in found.values() if i < len(tiles))
        if at_once[-1] - at_once[0] >= len(at_once):
            raise WrongError(
                f"C is right, but the programs {'go on' if i else 'begin'} with tiles {', '.join(map(str, at_once))}: "
                "those that run at once should have neighbours, as tiles 0 to 4 are, which share rows and columns."
            )


@for_each(
    *((40, 24, 56), (24, 40, 24), (16, 16, 32), (16, 16, 52)),
    drawn=lambda r: (r.randint(1, 40), 4 * r.randint(1, 10), 4 * r.randint(1, 20)),
)
def tma(exercise: Any, solution: Any, M: int, N: int, K: int) -> None:
    counts = {"aligned": ": coordinates count elements, not tiles, and a box begins at a multiple of BLOCK."}
    beyond = (
        " Of the boxes that are multiplied {} begin beyond {}. Does k count elements, and is it multiplied by BLOCK?"
    )
    in_fp16 = " Operands are multiplied in fp16, which has 11 bits of their 24."
    trace, steps = traced(exercise, make_operands(M, N, K), errors=counts), -(-K // 16)
    for (m, n, _), accesses in trace.programs().items():
        dots = sum(one.kind == "dot" for one in accesses)
        for name in "ab":
            boxes = [(int(one.rows[0]), int(one.columns[0])) for one in accesses if _reads(one, name)]
            wanted = [(16 * m, 16 * i) if name == "a" else (16 * i, 16 * n) for i in range(steps)]
            for i, box in enumerate(boxes):
                if box not in wanted:
                    right = wanted[min(i, steps - 1)]
                    raise WrongError(
                        f"program ({m}, {n}) loads a box of {name} that begins at row {box[0]} and column {box[1]}, "
                        f"and wants row {right[0]} and column {right[1]}. Coordinates count elements, rows first."
                    )
            for row, column in (right for right in wanted if right not in boxes):
                raise WrongError(
                    f"program ({m}, {n}) never loads the box of {name} that begins at row {row} and column {column}: "
                    f"K = {K} has {steps} k-tiles." + beyond.format(dots - len(boxes), name) * (dots > len(boxes))
                )
            if len(boxes) > steps:
                raise WrongError(f"program ({m}, {n}) loads {len(boxes)} boxes of {name}, and needs {steps}.")
    equals_product(trace, cause=lambda trace: causes.multiplied(trace) or in_fp16 * bool(trace.of("fp16", "dot")))
    for (m, n, _), accesses in trace.programs().items():
        if (dots := sum(one.kind == "dot" for one in accesses)) > steps:
            raise WrongError(
                f"C is right, but program ({m}, {n}) multiplies {dots} k-tiles of {steps}: a box beyond K is 0, and "
                "takes time."
            )


def _reads(access: Access, name: str) -> bool:
    return access.kind == "load" and access.operand == name and len(access.rows) > 0


def swizzle(exercise: Any, solution: Any) -> None:
    x, out = matrix(64, 64, torch.float16), matrix(64, 64, torch.float16, empty=True)
    shared = torch.full((64 + 2 * HALO, 64), float("nan"), dtype=torch.float16)[HALO : HALO + 64]  # rows of 128 bytes
    trace = traced(exercise, {"x": x, "shared": shared, "out": out}, outside=causes.beyond_row)
    (store,) = trace.of("shared", "store")
    first, places = store.columns.reshape(64, 8, 8)[..., 0], store.columns.reshape(64, 64)
    rows = store.rows.reshape(64, 64)
    for row in range(64):
        if set(rows[row]) != {row} or len(set(places[row])) != 64:
            sign = " `%` of a negative number is negative or 0, in Triton as in C." if (rows[row] < row).any() else ""
            raise WrongError(
                f"row {row}: its 8 chunks do not lie in the places 0 to 7 of the row, each in one of its own.{sign}"
            )
    if not torch.equal(x, out):
        raise WrongError("the tile comes back changed.")
    turns = max(Counter(first[i : i + 8, j] // 8).most_common(1)[0][1] for i in range(0, 64, 8) for j in range(8))
    if turns > 1:
        raise WrongError(
            f"the tile comes back, but 8 lanes that read a column of chunks take {turns} wavefronts: {turns} of the "
            "chunks lie in the same 4 banks."
        )
    wanted = [[j ^ (i % 8) for j in range(8)] for i in range(64)]
    for i, j in ((i, j) for i in range(64) for j in range(8) if first[i, j] // 8 != wanted[i][j]):
        raise WrongError(
            "no bank conflicts, but not the places of TMA's 128-byte swizzle, where tensor cores look: chunk "
            f"{j} of row {i} belongs in place {wanted[i][j]}, and is in place {first[i, j] // 8}."
        )


@for_each(
    *((3, 8), (4, 8), (2, 13)), drawn=lambda r: (r.randint(2, 5), r.randint(1, 16)), form="with {} slots, {} k-tiles"
)
def ring(exercise: Any, solution: Any, slots: int, steps: int) -> None:
    a, b = matrix(BLOCK, steps * BLOCK, torch.float16), matrix(steps * BLOCK, BLOCK, torch.float16)
    for first in ("load", "multiply"):
        RUNS.append([])
        c = simulate(Path(exercise.__file__), a, b, first, slots, RUNS[-1])
        if not same_bits(c, simulate(Path(solution.__file__), a, b, first, slots)).all():
            raise WrongError("C is wrong: is each k-tile of a multiplied once by that of b, and added?")
