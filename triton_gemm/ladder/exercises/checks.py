"""Whether a hole is filled in rightly.

A check runs the file's kernels in Triton's interpreter or a simulation, and raises WrongError with a sentence that
teaches. Bits are compared with those of the solution.
"""

from __future__ import annotations

import ast
import importlib.util
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...config import TileConfig
from ...hardware.gpus import named_device
from . import EXERCISES, SOLUTIONS, Exercise, causes, ring
from .questions import RUNS, equals_product, error_text, make_operands, same_bits, stored_tiles, traced, with_solution
from .trace import HALO, Access, WrongError, matrix

LIMIT_S = 60

CHECKS: dict[str, Callable[[Any, Any], None]] = {}


def check(exercise: Exercise, path: Path) -> str | None:
    """What is wrong with an exercise's file, in a sentence, or None. A file that runs for a minute is ended. RUNS has
    what it did."""
    RUNS.clear()
    try:
        with _limited():
            CHECKS[exercise.name](_module(path), _solution(exercise))
    except Exception as error:  # whatever the learner's code raises
        return error_text(error, path) + _logical(path)
    return causes.refused_by_the_compiler(path)


def _logical(path: Path) -> str:
    """On what only the interpreter takes in a kernel, where it leaves out one of two blocks."""
    with suppress(SyntaxError, ValueError):
        kernels = [node for node in ast.parse(path.read_bytes()).body if getattr(node, "decorator_list", None)]
        for node in (node for kernel in kernels for node in ast.walk(kernel)):
            if isinstance(node, ast.BoolOp) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
                return " `and`, `or` and `0 <= x < m` take no blocks, as the compiler says: write (x < m) & (y < n)."
    return ""


def _of(name: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    def add(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        CHECKS[name] = function
        return function

    return add


def _module(path: Path) -> Any:
    """A file as a module, read anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _solution(exercise: Exercise) -> Any:
    return _module(SOLUTIONS / f"{exercise.name}.py")


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise WrongError(
            f"it did not end within {LIMIT_S} seconds: a loop may not come to an end, or this machine is busy."
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- Exercise by exercise ----


@_of("e01_coalesce")
def _coalesce(exercise: Any, solution: Any) -> None:
    trace = traced(exercise, make_operands(64, 96, 8))
    equals_product(trace)
    for name, kind in (("a", "load"), ("b", "load"), ("c", "store")):
        access = max(trace.of(name, kind), key=Access.sectors)
        if access.sectors() > 4:
            rows, step = len(set(access.rows)), access.columns[1] - access.columns[0]
            where = f"lie in {rows} rows" if rows > 1 else f"are {step} elements apart in a row"
            raise WrongError(
                f"C is right, but a warp touches {access.sectors()} sectors in one {kind} of {name}, where 4 hold all "
                f"that 32 lanes use: its lanes {where} of {name}."
            )


@_of("e02_mask")
def _mask(exercise: Any, solution: Any) -> None:
    operands = make_operands(37, 29, 45)
    trace = traced(exercise, operands, outside=lambda *_: " Lanes there must be masked off.")
    equals_product(trace, cause=causes.beyond_k)


@_of("e03_tile")
def _tile(exercise: Any, solution: Any) -> None:
    m, n, k = exercise.BLOCK_M, exercise.BLOCK_N, exercise.BLOCK_K
    if any(not isinstance(x, int) or x < 16 or x & (x - 1) for x in (m, n, k)):
        raise WrongError(f"the tile is {m} x {n} x {k}; Triton takes powers of two, and `tl.dot` 16 at least.")
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


@_of("e04_group")
def _group(exercise: Any, solution: Any) -> None:
    trace = traced(exercise, make_operands(160, 256, 16))
    tiles = [found[0] for found in stored_tiles(trace).values()]
    equals_product(trace)
    waves = [tiles[i : i + 16] for i in range(0, len(tiles), 16)]
    strips = [len({row for row, _ in wave}) + len({column for _, column in wave}) for wave in waves]
    if sum(strips) > 84:  # 8 waves of 4 + 4, and 2 of 2 + 8
        first = 16 * strips.index(max(strips))
        rows, columns = ({tile[i] for tile in tiles[first : first + 16]} for i in (0, 1))
        raise WrongError(
            f"C is right, but of programs {first} to {first + 15}, strips that are read of A: {len(rows)}, of B: "
            f"{len(columns)}; in groups of 4 rows they are 4 and 4. All waves read {sum(strips)} strips, where 84 are "
            "enough."
        )


@_of("e05_beta")
def _beta(exercise: Any, solution: Any) -> None:
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
    for what, alpha, beta in (("beta", 0.7, 1.0), ("beta C", 0.7, 0.0), ("alpha", 1.0, -1.5)):
        if torch.allclose(found, alpha * product + beta * before, 2.0**-9, 2.0**-9):
            raise WrongError(f"with alpha = 0.7 and beta = -1.5 C is {alpha} A B + {beta} C: {what} is missing.")
    if not torch.allclose(found, wanted.double(), 2.0**-6, 2.0**-6):
        all_scaled = torch.allclose(found, 0.7 * (product - 1.5 * before), 2.0**-6, 2.0**-6)
        why = "it is 0.7 (A B - 1.5 C)" if all_scaled else "even but for rounding"
        raise WrongError(f"with alpha = 0.7 and beta = -1.5 C is not 0.7 A B - 1.5 C, {why}.")
    same = same_bits(operands["c"], wanted)
    if not same.all():
        raise WrongError(
            f"with alpha = 0.7 and beta = -1.5 {int((~same).sum())} of {same.numel()} results have other bits: "
            "compute `out` in fp32, so that it is rounded once, when it is stored. In the interpreter "
            "`beta * tl.load(c_ptrs)` has C's dtype: cast the load by `.to(tl.float32)`."
        )
    operands["c"].copy_(before)
    zero = {"ZeroDivisionError": ", with alpha = 0, where C is beta C: divide by nothing that may be 0."}
    traced(exercise, operands, 0.0, -1.5, errors=zero)
    if not torch.allclose(operands["c"].double(), -1.5 * before, 2.0**-9, 2.0**-9):
        value, right = float(operands["c"][0, 0]), -1.5 * float(before[0, 0])
        raise WrongError(f"with alpha = 0 and beta = -1.5 c[0, 0] is {value:.6g}, and should be {right:.6g}, -1.5 C.")


@_of("e06_pipeline")
def _pipeline(exercise: Any, solution: Any) -> None:
    operands = make_operands(32, 16, 96)
    wanted = with_solution(solution, operands)
    trace = traced(exercise, operands, outside=causes.beyond)
    equals_product(trace, cause=causes.multiplied)
    for name in "ab":
        if int(trace.counted(name).max()) != {"a": 1, "b": 2}[name]:  # C has two rows of tiles, and one column
            raise WrongError(f"C is right, but k-tiles of {name} are loaded more than once.")
    for accesses in trace.programs().values():
        dots, loads = 0, Counter[str]()
        for access in (one for one in accesses if one.kind in ("load", "dot")):
            loads[access.operand] += access.kind == "load"
            if access.kind == "dot":
                dots += 1
                late = " and ".join(name for name in "ab" if loads[name] < min(dots + 1, 6))
                if late:
                    raise WrongError(
                        f"C is right, but when k-tile {dots - 1} is multiplied, k-tile {dots} of {late} was not asked "
                        "for yet: the units wait for each load. Load the next one before."
                    )
    if not same_bits(operands["c"], wanted).all():
        raise WrongError("C is right but for rounding: its bits are others, so k-tiles are added in another order.")


@_of("e07_tf32")
def _tf32(exercise: Any, solution: Any) -> None:
    ulp = 2.0**-10
    cases = [
        (1 + ulp / 4, 1.0, "below a tie, which goes down"),
        (1 + 3 * ulp / 4, 1 + ulp, "above a tie, which goes up: truncation shrinks every operand"),
        (1 + ulp / 2, 1 + ulp, "a tie, which goes away from zero, not to even"),
        (-1 - ulp / 2, -1 - ulp, "a tie, which goes away from zero"),
        (2 - 2.0**-23, 2.0, "a carry into the exponent"),
        (float("inf"), float("inf"), "infinity, which stays"),
        (float("nan"), float("nan"), "a NaN, which stays one"),
    ]
    x = matrix(1, len(cases) + 100)
    x[0, : len(cases)] = torch.tensor([case[0] for case in cases])
    x[0, len(cases) - 1] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # with the last bit alone
    out, wanted = torch.empty_like(x), torch.empty_like(x)
    traced(exercise, {"x": x, "out": out})
    read = (out.view(torch.int32) & -0x2000).view(torch.float32)  # what a tensor core reads
    for i, (given, rounded, why) in enumerate(cases):
        value = float(out[0, i])
        if rounded != rounded and value != value and not read[0, i].isnan():
            raise WrongError(
                f"a NaN becomes one of the bits 0x{int(out.view(torch.int32)[0, i]) & 0xFFFFFFFF:08X}. A tensor core "
                "ignores the last 13, and reads infinity: set a bit of the mantissa above them."
            )
        if value != rounded and not (value != value and rounded != rounded):
            raise WrongError(f"{given:.9g} becomes {value:.9g}, and should become {rounded:.9g}: it is {why}.")
    solution.run(x, wanted)
    same = same_bits(out, wanted) | x.isnan()  # of which any is right that is still one when it is read
    if not same.all():
        i = int((~same).nonzero()[0, 1])
        raise WrongError(f"{float(x[0, i]):.9g} becomes {float(out[0, i]):.9g}, and should become {wanted[0, i]:.9g}.")


@_of("e08_accumulate")
def _accumulate(exercise: Any, solution: Any) -> None:
    operands = make_operands(16, 16, 1024, torch.float16)
    operands["a"].fill_(1.0)
    operands["b"].fill_(1 / 32)  # a k-tile of 16 adds 0.5, but the first, which adds 2048
    operands["b"][:16].fill_(128.0)
    dtypes = {"AssertionError": "`tl.dot` adds to sums in fp32, and was given some in another dtype."}
    traced(exercise, operands, errors=dtypes)
    value = float(operands["c"][0, 0])
    if value == 2048:
        raise WrongError(
            "a sum of 2048 and 63 times 0.5 is 2048, and should be 2080: the neighbours of 2048 in fp16 are 2 apart, "
            "so each 0.5 is rounded away as it is added."
        )
    operands = make_operands(32, 48, 512, torch.float16)
    trace = traced(exercise, operands)
    equals_product(trace, 2.0**-8, causes.added_in_bf16)
    a, b, c = (operands[name].double() for name in "abc")
    # What sums in fp32 may become, added in whatever order: rounding to fp16 keeps their order.
    least, most = ((a @ b + error * (a.abs() @ b.abs())).half() for error in (-(2.0**-20), 2.0**-20))
    same = (least <= c) & (c <= most)
    if not same.all():
        why = "something is rounded to fp16 in the loop, be it a k-tile's product."
        if torch.equal(c, operands["c"].bfloat16().double()):
            why = "all of them have bf16's 8 bits, of fp16's 11. Sums in fp32 are rounded once, to fp16."
        raise WrongError(
            f"{int((~same).sum())} of {same.numel()} results have other bits than sums in fp32 that are rounded once, "
            f"in whatever order they are added: {why}"
        )
    if "input_precision=" in Path(exercise.__file__).read_text("utf-8", "replace"):
        raise WrongError(
            "C is right, but fp32 operands do not run on fp16's tensor cores: give `tl.dot` a and b as they are."
        )


@_of("e09_split_k")
def _split_k(exercise: Any, solution: Any) -> None:
    operands = {**make_operands(16, 32, 200), "sums": matrix(48, 32, empty=True)}
    trace = traced(exercise, operands)
    count = trace.counted("a")[0]  # two tiles of C read each element of A
    for k in (int(k) for k in (count != 2).nonzero()):
        times = "by no part" if count[k] == 0 else f"by {int(count[k]) // 2} of the 3 parts"
        raise WrongError(f"k = {k} is summed {times}, and should be by one: 200 are 13 k-tiles, the last of 8.")
    equals_product(trace)
    loads = Counter(access.program for access in trace.of("a"))
    for k in (int(access.columns[0]) for access in trace.of("a") if len(access.columns)):
        if k % 16:
            raise WrongError(f"C is right, but a part loads from k = {k} on: parts begin at multiples of BLOCK = 16.")
    if max(loads.values()) > 5:
        raise WrongError(f"C is right, but a part has {max(loads.values())} of the 13 k-tiles; the longest needs 5.")


@_of("e10_persistent")
def _persistent(exercise: Any, solution: Any) -> None:
    trace = traced(exercise, make_operands(64, 48, 32))
    found = stored_tiles(trace)
    equals_product(trace)
    most = max(map(len, found.values()))
    if most > 3:
        raise WrongError(f"C is right, but one of 5 programs computes {most} of the 12 tiles; 3 are enough.")
    first = sorted(3 * row + column for row, column in (tiles[0] for tiles in found.values()))
    if first != [0, 1, 2, 3, 4]:
        raise WrongError(
            f"C is right, but the programs begin with tiles {', '.join(map(str, first))}: those that run at once "
            "should have tiles 0 to 4, which share rows and columns."
        )


@_of("e11_tma")
def _tma(exercise: Any, solution: Any) -> None:
    counts = {"aligned": ": coordinates count elements, not tiles."}
    trace = traced(exercise, make_operands(40, 24, 56), errors=counts)
    for (m, n, _), accesses in trace.programs().items():
        for name, size in (("a", 56), ("b", 56)):
            boxes = [(int(one.rows[0]), int(one.columns[0])) for one in accesses if _reads(one, name)]
            steps = range(0, size, 16)
            wanted = [(16 * m, k) for k in steps] if name == "a" else [(k, 16 * n) for k in steps]
            for i, right in enumerate(wanted):
                if i == len(boxes):
                    raise WrongError(
                        f"program ({m}, {n}) never loads the box of {name} that begins at row {right[0]} and column "
                        f"{right[1]}: K = 56 has 4 k-tiles, the last of 8."
                    )
                if (box := boxes[i]) != right:
                    raise WrongError(
                        f"program ({m}, {n}) loads a box of {name} that begins at row {box[0]} and column {box[1]}, "
                        f"and wants row {right[0]} and column {right[1]}. Coordinates count elements, rows first."
                    )
        dots = sum(one.kind == "dot" for one in accesses)
        if dots > 4:
            raise WrongError(f"program ({m}, {n}) multiplies {dots} k-tiles of 4: a box beyond K is 0, and takes time.")
    equals_product(trace)


def _reads(access: Access, name: str) -> bool:
    return access.kind == "load" and access.operand == name and len(access.rows) > 0


@_of("e12_swizzle")
def _swizzle(exercise: Any, solution: Any) -> None:
    x, out = matrix(64, 64, torch.float16), matrix(64, 64, torch.float16, empty=True)
    shared = torch.full((64 + 2 * HALO, 64), float("nan"), dtype=torch.float16)[HALO : HALO + 64]  # rows of 128 bytes
    trace = traced(exercise, {"x": x, "shared": shared, "out": out}, outside=causes.beyond_row)
    (store,) = trace.of("shared", "store")
    first, places = store.columns.reshape(64, 8, 8)[..., 0], store.columns.reshape(64, 64)
    rows = store.rows.reshape(64, 64)
    for row in range(64):
        if set(rows[row]) != {row} or len(set(places[row])) != 64:
            raise WrongError(
                f"row {row}: its 8 chunks do not lie in the places 0 to 7 of the row, each in one of its own."
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


@_of("e13_ring")
def _ring(exercise: Any, solution: Any) -> None:
    a, b = matrix(ring.BLOCK, 8 * ring.BLOCK, torch.float16), matrix(8 * ring.BLOCK, ring.BLOCK, torch.float16)
    for first in ("load", "multiply"):
        RUNS.append([])
        c = ring.simulate(Path(exercise.__file__), a, b, first, RUNS[-1])
        if not same_bits(c, ring.simulate(Path(solution.__file__), a, b, first)).all():
            raise WrongError("C is wrong: it lacks k-tiles, or has some twice.")


assert CHECKS.keys() == {exercise.name for exercise in EXERCISES}
