"""What a configuration could reach at best, by counting bytes: pure arithmetic, no GPU, no compiler.

A block's main loop does 2 BLOCK_M BLOCK_N FLOP for every k. For the same k it brings BLOCK_M + BLOCK_N elements from
L2, and its warps read their fragments from shared memory. Each path has a width in bytes a clock and SM
(`perf.measure.roofline`); the slowest of units, issue slots, shared memory and L2 is the ceiling. Latency, occupancy,
waves and the clock under load are left out.

Shared memory of fp32 has no broadcasts: the words of each thread count by themselves. A GPU broadcasts the same 16
bytes to several lanes of a warp, so the counters are lower (`perf.pages.limits.words`), and a kernel may be faster.
With broadcasts all of k03's and k04's tiles would be 1.4 to 2 times as fast as measured: the model has no conflicts and
no barriers, and what it reads too much stands for these.

`clocks` adds latency, occupancy and waves, and says which of a rung's configurations should win. The clock under load,
DRAM, the order of the tiles (GROUP_M) and loads of single elements are still left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perf.measure import roofline
from perf.measure.roofline import Capability
from triton_gemm.config import REGISTERS_PER_SM, GemmConfig
from triton_gemm.hardware.device import RESERVED, SHARED_MEMORY

THREADS_PER_SM = {(8, 0): 2048, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
BLOCKS_PER_SM = {(8, 0): 32, (8, 9): 24, (9, 0): 32, (10, 0): 32, (12, 0): 24}
LATENCY_CLOCKS = 600  # of a load from memory, the low end; what k06's header says of it
# The same while all SMs load. Small tiles of k09 and k10, one program on an SM, wait for nothing else: the H200 times
# them as 1100 to 1300 (at 1.9 GHz), beside the transfer.
LOADED_LATENCY_CLOCKS = 1100
SCHEDULER_LANES = 128  # of an SM: four schedulers issue an instruction for 32 lanes in a clock
PERSISTENT = ("k09", "k10", "k11")  # launched as one program for each SM


@dataclass(frozen=True)
class Ceiling:
    """TFLOPS on the architecture's typical GPU, the share of its units' peak, and what sets the limit."""

    tflops: float
    share: float
    limit: str


def ceiling(config: GemmConfig, mode: str, itemsize: int, capability: Capability) -> Ceiling:
    """What `config` can reach in a precision class, with shared memory without broadcasts."""
    gpu = roofline.TYPICAL[capability]
    found = limits(config, mode, itemsize, capability, sustained=True)
    limit = min(found, key=lambda name: found[name])
    tflops = found[limit] * gpu.num_sms * roofline.clock(gpu, mode) / 1e6
    return Ceiling(tflops, found[limit] / found["units"], limit)


def limits(
    config: GemmConfig, mode: str, itemsize: int, capability: Capability, *, sustained: bool = False
) -> dict[str, float]:
    """FLOP a clock and SM that the units and each path of operands allow; sustained: with an SM's share of L2 where
    all read at once, and shared memory that is also written, and serves each thread by itself. In truth it
    broadcasts the same 16 bytes to at least two lanes at once."""
    peak = roofline.flop_per_clock(roofline.TYPICAL[capability], mode)
    if config.BLOCK_M is None or config.BLOCK_N is None:
        return {"units": peak, "L1": 2 * 32 / strip_wavefronts(config)}
    l2 = roofline.l2_share(capability) if sustained else roofline.L2_BYTES_PER_CLOCK
    lanes = 2 if mode == "ieee" and not sustained else 1
    read = 1 / (lanes * shared_intensity(config, mode, itemsize, capability))
    written = 1 / l2_intensity(config, itemsize) if sustained else 0.0
    found = {
        "units": peak,
        "L2": l2 * l2_intensity(config, itemsize),
        "shared memory": roofline.SHARED_BYTES_PER_CLOCK / (read + written),
    }
    if mode == "ieee":
        # Beside the FFMAs of a square of results a thread issues, for each k, half its edge of 16-byte reads and about
        # as many instructions for addresses: what the H100 counted of k03 to k06, 1 of 7 to 1 of 9.
        results = config.accumulators()
        found["issue slots"] = 2 * SCHEDULER_LANES * results / (results + math.sqrt(results))
    return found


def clocks(
    config: GemmConfig,
    mode: str,
    itemsize: int,
    capability: Capability,
    size: tuple[int, int, int],
    num_sms: int,
    blocks: int,
    *,
    persistent: bool = False,
) -> float:
    """Clocks of a product of (M, N, K) `size`, where an SM has room for `blocks` programs: waves x (steps x a step, and
    the ends of a tile).

    A step of BLOCK_K takes its transfer from L2 or its product, the longer, at the sustained `limits`. A program alone
    takes longer where latency is: with one stage it loads, waits and multiplies; with more it has num_stages - 1 loads
    under way, since one slot is being multiplied (Little's law). At the ends it waits for its first load, and stores C.
    Other programs fill that time, as many as run on the SM; the busiest SM has `waves` tiles. A persistent kernel runs
    one program there, which loads the next tile while it stores, and so waits for the store alone.
    """
    M, N, K = size
    tile = config.tile
    waves = math.ceil(tile.tiles(M, N) / num_sms)
    at_once = 1 if persistent else max(1, min(blocks, waves))
    step = max(step_clocks(config, mode, itemsize, capability, at_once).values())
    first = 0.0 if persistent else LOADED_LATENCY_CLOCKS
    transfer = tile.BLOCK_M * tile.BLOCK_N + (0 if persistent else (tile.BLOCK_M + tile.BLOCK_N) * tile.BLOCK_K)
    ends = waiting(first + transfer * itemsize / roofline.l2_share(capability), mode, capability)
    return waves * (math.ceil(K / tile.BLOCK_K) * step + ends / at_once)


def waiting(clocks: float, mode: str, capability: Capability) -> float:
    """Clocks in which nothing is multiplied, in those of the peak in `mode`. They pass at the highest clock, which is
    that of fp32's units."""
    gpu = roofline.TYPICAL[capability]
    return clocks * roofline.clock(gpu, mode) / roofline.clock(gpu, "ieee")


def step_clocks(config: GemmConfig, mode: str, itemsize: int, capability: Capability, at_once: int) -> dict[str, float]:
    """Clocks of a step of BLOCK_K by each of the sustained `limits`, and by latency, as `clocks` says."""
    flop = 2 * (config.BLOCK_M or 1) * (config.BLOCK_N or 1) * (config.BLOCK_K or 1)
    found = {name: flop / limit for name, limit in limits(config, mode, itemsize, capability, sustained=True).items()}
    load = waiting(LOADED_LATENCY_CLOCKS + found["L2"], mode, capability)
    product = max(clocks for name, clocks in found.items() if name != "L2")
    alone = load + product if config.num_stages == 1 else load / (config.num_stages - 1)
    return {**found, "latency": alone / at_once}


def strip_wavefronts(config: GemmConfig) -> float:
    """L1 wavefronts of a warp for 32 FMA in a kernel without tiles: a line of B for each of a thread's columns, or 32
    of A for each of its rows, which are a multiple of 128 bytes apart; and a broadcast that all of these share."""
    results = (config.BLOCK_M or config.BLOCK_N or 1) / (32 * config.num_warps)
    return (1 if config.BLOCK_M is None else 32) + 1 / max(1.0, results)


def l2_intensity(config: GemmConfig, itemsize: int) -> float:
    """FLOP for each byte from L2."""
    m, n = config.BLOCK_M or 1, config.BLOCK_N or 1
    return 2 * m * n / ((m + n) * itemsize)


def shared_intensity(config: GemmConfig, mode: str, itemsize: int, capability: Capability) -> float:
    """FLOP for each byte that a fragment of shared memory brings to the units."""
    if mode == "ieee":
        # A thread's square of results: its row and its column of operands for each k.
        edge = math.sqrt(max(1, config.accumulators()))
        return 2 * edge * edge / (2 * edge * 4)
    m, n = fragment(config, capability)
    return 2 * m * n / ((m + n) * itemsize)


def fragment(config: GemmConfig, capability: Capability) -> tuple[float, float]:
    """The piece of the tile whose operands are read once for each k.

    wgmma (sm_90) reads 64 rows of A and all its columns of B from shared memory, tcgen05 (sm_100) 128 rows;
    mma.sync reads a warp's share of the tile into registers, the warps standing in the squarest grid.
    """
    m, n = config.BLOCK_M or 1, config.BLOCK_N or 1
    rows = {(9, 0): 64, (10, 0): 128}.get(capability)
    if rows is not None:
        return min(rows, m), n
    grids = [(w, config.num_warps // w) for w in (1, 2, 4, 8, 16) if config.num_warps % w == 0]
    shares = [(m / warps_m, n / warps_n) for warps_m, warps_n in grids]
    return min(shares, key=sum)


def blocks_per_sm(registers: int, shared: int, num_warps: int, capability: Capability) -> int:
    """How many blocks fit an SM at once. A warp is given registers 256 at a time, 8 a thread."""
    threads = 32 * num_warps
    by_registers = REGISTERS_PER_SM // (8 * max(1, math.ceil(registers / 8)) * threads)
    by_shared = (SHARED_MEMORY[capability] + RESERVED) // (shared + RESERVED)
    return min(by_registers, by_shared, THREADS_PER_SM[capability] // threads, BLOCKS_PER_SM[capability])
