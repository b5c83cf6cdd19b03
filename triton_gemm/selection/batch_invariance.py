"""Batch invariance: one class of bits for all numbers of rows, so that a row of C depends on no other row of A.

The class is chosen from N, K, B's unit stride, dtype, precision, scales and epilogue alone. Only classes count that can
multiply any number of rows, wherever operands lie. Of these it is the one whose predicted times for COMPARED numbers of
rows have the smallest product. A product then runs on the fastest candidate of that class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod

from .. import kernels
from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..kernels.candidate import Candidate
from ..kernels.schedule import Schedule, clusters_at_once
from ..problem import GemmProblem, Layout, round_up
from . import generation
from .bit_classes import bit_class
from .select import Selection, about, illegal, predicted
from .select import ranked as of_any_class

FEW = 16
COMPARED = (FEW, 64, 256, 1024, 4096)  # rows, for which the model compares classes
MOST = 65_536  # for which a class must have a candidate
FOR_FEW = ("skinny", "gemv")  # kernels whose classes come and go with the number of rows

# Into how many parts all tiles are cut along K, at multiples of so many bytes of a row, and of so many each at least.
PARTS = (2, 3, 4, 6, 8, 16)
DEPTH = 256  # of the deepest tiles
SHORTEST = 4


def select(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """As `select.select`, of the candidates in `class_of` the problem. RuntimeError where none is legal."""
    wanted, parts = _class_of(_with_rows(problem, FEW), device)
    for time, candidate in (*ranked(problem, device, (parts,)), *_in_more_warps(problem, device)):
        if bit_class(problem, candidate) == wanted and illegal(problem, device, candidate) is None:
            return Selection.of(candidate, about(time, problem, device))
    raise RuntimeError(
        f"no kernel multiplies {problem.batch} x {problem.M} x {problem.N} x {problem.K} batch-invariantly on "
        f"{device.name}, which here is: {wanted}; multiply fewer rows at once"
    )


def class_of(problem: GemmProblem, device: DeviceInfo) -> str:
    """The class of bits of `problem` with any number of rows. RuntimeError where no kernel multiplies it."""
    return _class_of(_with_rows(problem, FEW), device)[0]


@generation.of_models(4096)
def _class_of(few: GemmProblem, device: DeviceInfo) -> tuple[str, int]:
    """The class, and into how many of PARTS all tiles are cut, or 1."""
    # Of a product alone, so that one row has the same class whether what is added to it is taken for a bias or for C.
    alone = replace(few, has_beta=False, residual=False, bias=None)
    best = [_best(_with_rows(alone, rows), device) for rows in COMPARED]
    in_all = set.intersection(*map(set, best))
    others = [_best(x, device) for x in (few, *(_with_rows(few, rows) for rows in (1, MOST)), _anywhere(few))]
    for found in sorted(in_all, key=lambda name: (prod(one[name][0] for one in best), name)):
        if all(found in other for other in others):
            return found, best[-1][found][1]
    raise RuntimeError(f"no kernel multiplies {few.dtype} in {few.precision} batch-invariantly on {device.name}")


def _with_rows(problem: GemmProblem, M: int) -> GemmProblem:
    """The problem with M rows, one product, and operands that lie as new ones do: B by rows or by columns."""
    N, K = problem.N, problem.K
    along_n, along_k = round_up(N, 16), round_up(K, 16)  # multiples of 16 bytes of any dtype
    a, c = Layout((0, along_k, 1)), Layout((0, along_n, 1))
    b = Layout((0, 1, along_k)) if problem.b.column_major else Layout((0, along_n, 1))
    bias = "n" if problem.bias else None
    return replace(problem, batch=1, M=M, a=a, b=b, c=c, bias=bias)


def _anywhere(problem: GemmProblem) -> GemmProblem:
    """The same of operands that lie as badly as can be."""
    M, N, K = problem.M, problem.N, problem.K
    a, b = Layout((0, 2 * K + 1, 2), aligned=False), Layout((0, 2 * N + 1, 2), aligned=False)
    return replace(problem, a=a, b=b, c=Layout((0, 1, M + 1), aligned=False))


def _best(problem: GemmProblem, device: DeviceInfo) -> dict[str, tuple[float, int]]:
    """Predicted microseconds of the fastest legal candidate of each class, and its parts of K."""
    found: dict[str, tuple[float, int]] = {}
    for time, candidate in ranked(problem, device):
        name = bit_class(problem, candidate)
        if name not in found and illegal(problem, device, candidate) is None:
            work = candidate.algorithm.work
            found[name] = time, work.split_k if isinstance(work, Schedule) else 1
    return found


def ranked(problem: GemmProblem, device: DeviceInfo, parts: Collection[int] = PARTS) -> list[tuple[float, Candidate]]:
    """As `select.ranked`, with candidates that only invariance wants, cut into one of these numbers of parts, and
    without kernels for few rows or columns."""
    found = [one for one in of_any_class(problem, device) if one[1].algorithm.kernel not in FOR_FEW]
    model = model_of(device)
    more = [*_whole(problem, device), *_swapped(problem, device)]
    found += [(predicted(problem, candidate, model), candidate) for candidate in more]
    found += _cut_alike(problem, device, parts)
    return sorted(found, key=lambda one: one[0])


def _cut_alike(problem: GemmProblem, device: DeviceInfo, numbers: Collection[int]) -> Iterator[tuple[float, Candidate]]:
    """The warp-specialised kernel's tiles, all of them cut into the same parts, whatever their depth: programs share
    tiles where all parts fit the GPU at once; else each sums the parts of its tiles in turn (`schedule`)."""
    numbers = [parts for parts in PARTS if parts in numbers]
    if problem.groups or problem.arithmetic.exact or not numbers:
        return
    kernel, model = kernels.warp_specialised, model_of(device)
    for candidate in kernel.candidates(problem, device):
        given, algorithm = candidate
        config, whole = algorithm.config, algorithm.work
        assert isinstance(config, kernel.Config) and isinstance(whole, Schedule)
        if whole.split_tiles:
            continue
        tiles, k_tiles = given.batch * config.tiles(given.M, given.N), -(-given.K // config.BLOCK_K)
        at_once = clusters_at_once(config.ctas, device.num_sms)
        unit = DEPTH // (config.BLOCK_K * given.planes.dtype.itemsize)
        units = -(-k_tiles // unit)
        for parts in numbers:
            if units < parts * SHORTEST:
                break
            work = replace(whole, split_k=parts, unit=unit if units % parts or k_tiles % parts else 1)
            if tiles * parts <= at_once and kernel.can_split_k(config):
                work = replace(work, programs=tiles * parts, split_tiles=tiles)
            cut = Candidate(given, algorithm._replace(work=work))
            yield predicted(problem, cut, model), cut


def _whole(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Of long sums in IEEE fp32 those that are not cut, as there must be of so many rows that cut ones cannot run."""
    for given, algorithm in kernels.named("fma").candidates(problem, device):
        if algorithm.work != 1:
            yield Candidate(given, algorithm._replace(work=1))


def _swapped(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Of planes and scales, whose order `swap_ab` changes, the portable kernel's other candidates: by itself it chooses
    by C's unit stride."""
    if problem.scales == "blocks" or problem.groups or (problem.planes.count == 1 and problem.scales is None):
        return
    for given, algorithm in kernels.named("portable").candidates(problem, device):
        yield Candidate(given.swap_ab(), algorithm._replace(swap_ab=not algorithm.swap_ab))


def _in_more_warps(problem: GemmProblem, device: DeviceInfo) -> list[tuple[float, Candidate]]:
    """The portable kernel's candidates with two and four times the warps, which change no bits.

    Operands of 8 bits off 16 bytes are read by elements: otherwise addresses take too many of a thread's registers.
    """
    if problem.dtype.itemsize > 1 or (problem.a.aligned and problem.b.aligned):
        return []
    model = model_of(device)
    found = []
    for given, algorithm in (
        *kernels.named("portable").candidates(problem, device),
        *_swapped(problem, device),
    ):
        for times in (2, 4):
            config = replace(algorithm.config, num_warps=times * algorithm.config.num_warps)
            candidate = Candidate(given, algorithm._replace(config=config))
            found.append((predicted(problem, candidate, model), candidate))
    return sorted(found, key=lambda one: one[0])
