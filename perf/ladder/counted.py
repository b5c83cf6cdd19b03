"""What Nsight Compute's counters say of the rungs: shares of each unit's peak, waits, and the bytes that moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perf.common import formats
from perf.ladder.counters import LARGE_SIZE, READY, S3_SIZE, SIZE, STALLS, TAUGHT, UNITS, of_s3
from perf.ladder.record import CountedLaunch, Record
from perf.measure import roofline
from perf.measure.environment import Environment
from perf.measure.operands import MODE_DTYPES
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.ladder import LADDER, Rung

Figures = Mapping[str, float]
WORTH_SAYING = 0.05  # of the cycles between a warp's instructions
MOST_WAITS = 3
NOTE = (
    "Shares of each unit's peak rate at the launch's own clock, while the kernel that multiplies runs, with cold "
    "caches. L2's bytes are what the SMs received from it and sent to it. L2 itself does less, as one request probably "
    "serves several SMs that ask for a line at about one time. DRAM's bytes were read and written. The least are those "
    "of A and B read once and C written once. Copies of operands are in the bytes, and not in the shares. "
    "*Ready* is the share of a warp's time in which it could issue, and another warp did: where it is large, issue "
    "slots are scarce. *A barrier* is one at which threads of a block meet, and no mbarrier. The FMA pipe also "
    "multiplies and adds integers, as for addresses: in k01 and k02 these are a large part of its share. L2's share is "
    "that of its busiest part, and not of its bytes. Which part is so busy in k01 was not counted."
)
ONE_LAUNCH = (
    "The profiler times single launches. The ladder waits until the clock has settled, which power lowers for tensor "
    "cores: so k08 may be faster here than there."
)


@dataclass(frozen=True)
class Counted:
    """A rung's call, and what was counted of it."""

    rung: Rung
    launch: CountedLaunch

    @property
    def product(self) -> Figures:
        """Of the kernel that multiplies."""
        return list(self.launch.kernels.values())[-1]

    def total(self, *figures: str) -> float:
        """Of all kernels, copies of operands among them."""
        return sum(kernel[figure] for kernel in self.launch.kernels.values() for figure in figures)

    @property
    def tflops(self) -> float:
        """At the clock that the GPU has under the profiler, copies included."""
        return self.launch.tflops_in(self.total("ns") / 1e6)

    @property
    def dram_bytes(self) -> float:
        return self.total("DRAM read", "DRAM written")

    @property
    def l2_bytes(self) -> float:
        return self.total("L2 read", "L2 written")

    @property
    def least_bytes(self) -> int:
        """That must cross DRAM: A and B read once, C written once."""
        M, N, K = self.launch.M, self.launch.N, self.launch.K
        return (M * K + K * N + M * N) * MODE_DTYPES[self.launch.mode].itemsize

    @property
    def flop(self) -> float:
        return 2.0 * self.launch.M * self.launch.N * self.launch.K

    def waits(self) -> list[tuple[str, float]]:
        """What a warp waits for between two of its instructions, the longest first, as shares of that time; an
        instruction that is issued takes one cycle."""
        cycles = {name: self.product[name] for name in STALLS}
        whole = 1 + sum(cycles.values())
        found = [(name, each / whole) for name, each in cycles.items() if each > WORTH_SAYING * whole and name != READY]
        return sorted(found, key=lambda wait: -wait[1])

    @property
    def ready(self) -> float:
        """The share of that time in which a warp could have issued an instruction, and another did."""
        return self.product[READY] / (1 + sum(self.product[name] for name in STALLS))


def counted(record: Record, size: int = SIZE) -> list[Counted]:
    """The rungs that were counted at a size, in the ladder's order."""
    return [
        Counted(rung, launch)
        for rung in LADDER
        for launch in record.counted.values()
        if (launch.provider, launch.M) == (rung.name, size)
    ]


def made(record: Record) -> list[Environment]:
    """The surroundings in which launches were counted."""
    return [launch.made or record.environment for launch in record.counted.values()]


def sentence(one: Counted) -> str:
    """What bound a rung: units by their share of their peak, the busiest first, and what warps waited for."""
    units = sorted(UNITS, key=lambda unit: -one.product[unit])
    busy = ", ".join(f"{unit} {one.product[unit]:.0f} %" for unit in units if round(one.product[unit]))
    waits = ", ".join(f"{name} ({formats.percent(share)})" for name, share in one.waits()[:MOST_WAITS])
    pipe = " Address arithmetic is in the FMA pipe, too." * (one.rung.configs[0].BLOCK_K is None)
    ready = f"For {100 * one.ready:.0f} % of its time a warp could issue an instruction, but another warp did"
    return f"{busy} of their peaks, of L2 by its busiest part.{pipe} {ready}." + f" It waits for {waits}." * bool(waits)


def beside(one: Counted, tflops: float | None, gpu: DeviceInfo) -> str:
    """What the shares of a kernel on tensor cores leave out: the copies of operands before it, and its clock, by its
    FLOP and the share of the clocks in which they are busy; and what both make of the ladder's TFLOPS of the rung."""
    mode, copies = one.launch.mode, one.total("ns") - one.product["ns"]
    share, left = one.product["tensor cores"], tflops and one.flop / tflops / 1e3 - copies  # ns
    text = ""
    if copies:
        before = list(one.launch.kernels.values())[:-1]
        dram = sum(each["ns"] * each["DRAM"] for each in before) / copies
        carried = sum(each["DRAM read"] + each["DRAM written"] for each in before) / 1e6
        moved = sum(each["L2 read"] + each["L2 written"] for each in before) / 1e6
        text = (
            f" These are shares of the kernel that multiplies, which took {one.product['ns'] / 1e3:.0f} us. Copies of "
            f"operands took {copies / 1e3:.0f} us before it, at {dram:.0f} % of DRAM's peak: it carried {carried:.0f} "
            f"of their {moved:.0f} MB, and L2 kept the rest of what they wrote."
        )
        text += (
            f" *Measured* less these: {left / 1e3:.0f} us, {formats.number(one.flop / left / 1e3)} TFLOPS."
            if left
            else ""
        )
    if share:
        clocks = 100 * one.flop / roofline.flop_per_clock(gpu, mode) / gpu.num_sms / share
        text += (
            f" Tensor cores' share is of the clocks that pass: {clocks / one.product['ns']:.2f} GHz by this launch's "
        )
        text += f"FLOP and time, where the units' peak has {roofline.clock(gpu, mode) / 1e3:.2f}."
        if left:
            text += f" If they are as busy in *Measured*, its clock is {clocks / left:.2f} GHz: power lowers it."
    return text


def table(record: Record) -> str:
    """Every rung: shares of peaks, the bytes that moved for each byte that must, and what warps wait for."""
    table = formats.table_of(
        {
            "rung": f"{one.rung.id} {one.rung.title}",
            **{f"{unit}, %": f"{one.product[unit]:.0f}" for unit in UNITS},
            "L2's bytes / least": formats.number(one.l2_bytes / one.least_bytes),
            "DRAM's bytes / least": formats.number(one.dram_bytes / one.least_bytes),
            "ready, %": f"{100 * one.ready:.0f}",
            "a warp waits most for": next((f"{wait}, {formats.percent(share)}" for wait, share in one.waits()), None),
        }
        for one in counted(record)
    )
    return table and f"{table}\n\n{NOTE}"


def launch_order(record: Record) -> str:
    """What DRAM carried at LARGE_SIZE, by the order in which programs are launched."""
    table = formats.table_of(
        {
            "rung, tile": f"{one.rung.id}, {tile}",
            "order of tiles": order,
            "hits in L2": f"{one.product['L2 hits']:.0f} %",
            "GiB by DRAM": formats.number(one.dram_bytes / 2**30),
            "TB/s": formats.number(one.dram_bytes / one.total("ns") / 1e3),
            "TFLOPS under the profiler": formats.number(one.tflops),
        }
        for one in counted(record, LARGE_SIZE)
        for tile, order in [_order(one.launch)]
    )
    return table and f"{table}\n\n{ONE_LAUNCH}"


def _order(launch: CountedLaunch) -> tuple[str, str]:
    """A configuration's tile, and the order of its tiles in words."""
    tile, _, _, *group = launch.config.split(",")
    rows = int(tile.partition("x")[0])
    by_columns = not group or int(group[0]) * rows >= launch.M
    return tile.rpartition("x")[0], "by columns" if by_columns else f"groups of {group[0]} rows"


def loads(record: Record) -> str:
    """Words that are loaded for each result: as S3 counts them, and as the hardware did; nothing if not counted."""
    rows = [
        (kernel_id, memory, formats.number(taught, 4), formats.number(figures[memory] / 4 / S3_SIZE**2, 4))
        for kernel_id, words in TAUGHT.items()
        if (launch := record.counted.get(str(of_s3(kernel_id))))
        for figures in [list(launch.kernels.values())[-1]]
        for memory, taught in zip(("global", "shared"), words, strict=True)
    ]
    note = "S3 counts a word once for each thread that reads it; the counters count one that a whole warp shares once."
    columns = ["kernel", "words a result loads from", "taught", "counted"]
    return f"{formats.table(columns, rows)}\n\n{note}" if rows else ""
