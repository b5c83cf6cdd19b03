"""Which candidates of the warp-specialised kernel are worth comparing, and which of them may be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import sqrt
from typing import Any

from ...hardware.device import DeviceInfo
from ...hardware.device_model import DeviceModel
from ...problem import GemmProblem
from .. import forms, repack
from ..candidate import Algorithm, Bounded, Candidate
from ..cost_model import SECTOR, pitch
from ..schedule import Schedule, clusters_at_once
from .configs import GATED, GATED_CLUSTERED, LONG, Config, listed
from .costs import OfConfig, OfProblem, kind_of, of_config, of_problem, sustained
from .host import can_split_k, illegal, unsuited
from .widths import widths

MAX_PARTS = 32  # that one program adds up
SHORTEST_PART = 4  # k-tiles of those that a second launch adds up


def candidates(problem: GemmProblem, device: DeviceInfo, in_part: bool = False) -> Iterator[Candidate]:
    """Over copies of what TMA reads badly or not; swapped or not; in every tile that fits; whole and split. in_part: as
    in `schedules`."""
    for given, swap_ab, packed in given_as(problem, device):
        for config in (
            GATED + GATED_CLUSTERED * _clusters(given)[0]
            if problem.gate
            else (*listed(given.planes.dtype.itemsize, *_clusters(given)), *widths(given, device.num_sms))
        ):
            yield from _with(config, given, device, swap_ab, packed, in_part)


def _with(
    config: Config,
    given: GemmProblem,
    device: DeviceInfo,
    swap_ab: bool,
    packed: tuple[str, ...],
    in_part: bool = False,
) -> Iterator[Candidate]:
    if given.groups or _fits(given, config):
        for schedule in schedules(given, config, device, in_part):
            yield Candidate(given, Algorithm("warp_specialised", config, schedule, swap_ab, packed))


def given_as(problem: GemmProblem, device: DeviceInfo) -> Iterator[tuple[GemmProblem, bool, tuple[str, ...]]]:
    """What the kernel may be given for a problem: (the problem, whether it is swapped, operands that are copied)."""
    if problem.groups or problem.gate:  # of which a copy would be made as well
        if unsuited(problem, device) is None:
            yield problem, False, ()
        return
    # A square is its own transpose, but for fp32 that wgmma reads from registers: that must be A.
    both = problem.scales != "blocks" and (problem.M != problem.N or problem.dtype.itemsize != 2)
    for packed in _packings(problem):
        readable = repack.repacked(problem, packed)
        for swap_ab in (False, True) if both else (False,):
            given = readable.swap_ab() if swap_ab else readable
            if unsuited(given, device) is None:
                yield given, swap_ab, packed


def _clusters(problem: GemmProblem) -> tuple[bool, bool]:
    """Whether configurations in clusters are compared, only where they can run; and whether those for long sums."""
    clustered = forms.clusters() and not problem.groups
    return clustered, clustered and max(problem.M, problem.N) * LONG <= problem.K


def without_clusters(problem: GemmProblem) -> str:
    """What there is to say where Triton is too old for clusters, which would else be compared."""
    return "" if forms.clusters() or problem.groups else "; without clusters, which need Triton 3.9"


def _packings(problem: GemmProblem) -> list[tuple[str, ...]]:
    """Which operands to copy first. Both are where they are multiplied as planes. Of 16 bits those are that TMA cannot
    read, and beside them none, or one whose rows begin inside of L2's sectors. Of other sizes those are that TMA cannot
    read, and perhaps others, which then are K-major."""
    if problem.planes.count > 1:
        return [("a", "b")]
    itemsize = problem.dtype.itemsize
    layouts = {"a": problem.a, "b": problem.b}
    unreadable = {name for name, layout in layouts.items() if layout.tma_illegal(itemsize) is not None}
    found = [unreadable]
    if itemsize != 2:
        found += [unreadable | {"a"}, unreadable | {"b"}, {"a", "b"}]
    else:
        found += [unreadable | {name} for name, layout in layouts.items() if pitch(layout, itemsize) % SECTOR]
    return [tuple(sorted(names)) for i, names in enumerate(found) if names not in found[:i]]


def _fits(problem: GemmProblem, config: Config) -> bool:
    """Whether less than half of a tile, or a cluster's tiles, lies outside of C, where a smaller one would do."""
    m, n = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N
    return (m == 64 or m < 2 * problem.M) and (n == 16 or n < 2 * problem.N)


def schedules(
    problem: GemmProblem, config: Config, device: DeviceInfo, in_part: bool = True, parts: int | None = None
) -> list[Schedule]:
    """The schedules of a problem's tiles that are worth comparing: all whole, those of the last wave cut along K, or
    all of them, where that is legal. Of clusters as of programs, of which fewer run at the same time; none where a
    cluster has more CTAs than run at the same time, which `illegal` refuses.

    in_part: whether also those that cut some of several waves' tiles. Which elements of C these are depends on C's
    size, and so would a row's bits. Without them choices lose 0.3 % in the mean of 1,398 measured products.
    parts: only those with K in so many.
    """
    if problem.groups:
        return [Schedule(device.num_sms)]
    count = problem.batch * config.tiles(problem.M, problem.N)
    programs = clusters_at_once(config.ctas, device.num_sms)
    if programs == 0:
        return []
    found = [Schedule(min(count, programs))]
    if problem.gate:
        return found
    k_tiles = -(-problem.K // config.BLOCK_K)
    if can_split_k(config) and (count <= programs or in_part or problem.arithmetic.exact):
        found += [Schedule(n, rest, parts) for n, rest, parts in _cuts(count, k_tiles, programs)]
    reduced_parts = _reduced_parts(problem, count, k_tiles, programs)
    if reduced_parts and parts in (None, reduced_parts):
        reduced = Schedule(count * reduced_parts, count, reduced_parts, reduction=True)
        found += [reduced] * (illegal(problem, device, config, reduced) is None)
    return [x for x in found if parts in (None, x.split_k)]


def _reduced_parts(problem: GemmProblem, count: int, k_tiles: int, most: int) -> int:
    """Into how many parts to cut all of `count` tiles that a second launch is to add up: as many as fill one wave, less
    those that make no part shorter. It is 0 for less than two, and for what such a launch cannot add."""
    parts = min(most // count, k_tiles // SHORTEST_PART)
    if parts < 2 or problem.arithmetic.exact or problem.groups:
        return 0
    return -(-k_tiles // -(-k_tiles // parts))


def _cuts(count: int, k_tiles: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(programs, tiles that are cut, into how many parts), for `most` programs at once. The tiles of the last wave are
    cut, into as few parts as make for less work on the busiest SM; of many parts not every number."""
    rest = count % most if count > most else count
    if rest == 0:
        return
    enough = min(k_tiles // 2, MAX_PARTS, most // rest)  # `Schedule` says why no more than there are programs
    longest = k_tiles
    for parts in range(2, enough + 1):
        if parts < 16 or parts % 2 == 0 or parts == most // rest:
            if -(-k_tiles // parts) < longest:
                longest = -(-k_tiles // parts)
                yield min(rest * parts + count - rest, most), rest, parts


def lower_bounds(problem: GemmProblem, device: DeviceInfo, model: DeviceModel) -> Iterator[Bounded]:
    """`Bounded` for each configuration that `candidates` compares, however its tiles are dealt out: as if SMs loaded
    them in no time."""
    for i, (given, swap_ab, packed) in enumerate(given_as(problem, device)):
        copying, on = repack.microseconds(problem, packed, model), of_problem(given, model)
        kind = given.dtype.itemsize, *kind_of(given), model
        wide = [of_config(config, *kind) for config in widths(given, model.num_sms)]
        for j, of in enumerate((*_listed(_clusters(given), *kind), *wide)):
            if of.most:
                yield copying + _least(given, on, of, model), (i, j), _with(of.config, given, device, swap_ab, packed)


@lru_cache(maxsize=64)
def _listed(clusters: tuple[bool, bool], itemsize: int, *kind: Any) -> list[OfConfig]:
    return [of_config(config, itemsize, *kind) for config in listed(itemsize, *clusters)]


def _least(problem: GemmProblem, on: OfProblem, of: OfConfig, model: DeviceModel) -> float:
    """A lower bound of the predicted time in a configuration."""
    config, m, n, most, cuts, multiply, lines, more, start, share, part, waiting = of[:12]
    count, k_tiles = problem.batch * -(-problem.M // m) * -(-problem.N // n), -(-problem.K // config.BLOCK_K)
    one = k_tiles * (multiply + more)  # tile, whole
    a, b = min(config.BLOCK_M, problem.M) * on.a_lines, min(config.BLOCK_N, problem.N) * on.b_lines
    l2 = count * k_tiles * lines * (a * of.a_least + b * of.b_requested) / model.l2
    cubes = on.memory_cubed + l2 * l2 * l2
    waves, rest = divmod(count, most)
    busy = (waves + (rest > 0)) * (one + start + on.bias)
    least = sustained(busy, cubes, on.power * of.energy)
    if 0 < 2 * rest <= most:
        if cuts and (waves == 0 or problem.arithmetic.exact):
            # The time in `parts` is a convex function of them, and no less than its tangent where it is about least.
            enough = min(most // rest, MAX_PARTS)
            parts = min(enough, max(2.0, sqrt(one / part)))
            busy = waves * (one + start) + start + one / parts
            total = (busy * busy * busy + cubes) ** (1 / 3)
            slope = part - one * (busy / (total * parts)) ** 2
            cut = share + (parts - 1) * part + total + slope * ((2 if slope > 0 else enough) - parts)
            least = min(least, cut)
        if parts := _reduced_parts(problem, count, k_tiles, most):
            busy = -(-k_tiles // parts) * (multiply + more) + start
            reduced = (busy * busy * busy + cubes) ** (1 / 3) + on.reduction + parts * on.reduced_part
            least = min(least, reduced)
    return on.fixed + waiting + on.spread * config.ctas * min(count, most) + least
