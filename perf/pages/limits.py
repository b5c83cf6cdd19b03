"""Page 0 of the ladder: how fast a GEMM could be. Every peak is of `triton_gemm.hardware.gpus`, through `roofline`."""

from __future__ import annotations

from pathlib import Path

from perf.common import formats
from perf.ladder import clock_model, compiled, counted, explorer
from perf.ladder.drawings import traces
from perf.ladder.drawings.traces import RUNGS
from perf.measure import environment, roofline
from perf.pages.results import Results
from triton_gemm.config import REGISTERS_PER_SM
from triton_gemm.hardware.device import RESERVED, SHARED_MEMORY, DeviceInfo
from triton_gemm.hardware.gpus import bandwidth, named_device

GPUS = explorer.AXES["gpu"]
MODES = {"ieee": "fp32 units", "tf32": "TF32", "half": "16 bits"}
SIZE = 4096
HOPPER = (9, 0)
WARP = 32
FFMAS_PER_CLOCK, BANKS = 128, 32  # of an SM
ON_FFMAS = ("k03", "k05", "k06")  # whose words of shared memory are counted, in their first configurations
EXAMPLES = ("k03", "k06", "k08")  # whose occupancy is counted, in their first configurations


def peak(gpu: DeviceInfo, mode: str) -> float:
    """TFLOPS of all SMs."""
    return roofline.flop_per_clock(gpu, mode) * roofline.clock(gpu, mode) * gpu.num_sms / 1e6


def peaks(results: Results, folder: Path) -> str:
    """What units and memory of each GPU allow."""
    rows: list[list[formats.Cell]] = []
    for gpu in map(named_device, GPUS):
        tbs = bandwidth(gpu) / 1e6
        rates = [formats.number(peak(gpu, mode)) for mode in MODES]
        # Of the figures that the row shows, so that a reader finds the same.
        shown = [float(f"{peak(gpu, mode):.3g}") / round(tbs, 2) for mode in MODES]
        ridges = [f"{x:.{int(x < 10)}f}" for x in shown]
        clocks = " / ".join(dict.fromkeys(f"{roofline.clock(gpu, mode):,.0f}" for mode in MODES))
        rows.append([gpu.name.removeprefix("NVIDIA "), gpu.num_sms, *rates, f"{tbs:.2f}", *ridges, clocks])
    columns = ["GPU", "SMs", *(f"{name}, TFLOPS" for name in MODES.values()), "memory, TB/s"]
    columns += [f"FLOP a byte, {name}" for name in MODES.values()]
    return formats.table([*columns, "MHz: fp32 units / tensor cores"], rows)


def bounds(results: Results, folder: Path) -> str:
    """How long 4096^3 takes at least, on an H100."""
    gpu, flop = named_device("h100"), 2 * SIZE**3
    rows: list[list[formats.Cell]] = []
    for mode, name in MODES.items():
        moved = 3 * SIZE**2 * (2 if mode == "half" else 4)
        by_units, by_memory = flop / peak(gpu, mode) / 1e6, moved / bandwidth(gpu)
        rows.append([name, moved // 2**20, f"{by_units:,.0f}", f"{by_memory:,.0f}", f"{by_units / by_memory:.0f}"])
    table = formats.table(["arithmetic", "MiB", "us by the units", "us by memory", "times as long"], rows)
    return f"{flop / 1e9:.0f} GFLOP on an {gpu.name.removeprefix('NVIDIA ')}:\n\n{table}"


def occupancy(results: Results, folder: Path) -> str:
    """Programs on an SM of an H100, by each thing that they share."""
    rows: list[list[formats.Cell]] = []
    tritons = set[str]()
    for name in EXAMPLES:
        row = compiled.row_of(RUNGS[name], HOPPER, RUNGS[name].configs[0])
        assert row is not None
        warps = RUNGS[name].configs[0].num_warps
        threads, registers = WARP * warps, 8 * -(-row.registers // 8)
        by = (
            REGISTERS_PER_SM // (registers * threads),
            (SHARED_MEMORY[HOPPER] + RESERVED) // (row.shared + RESERVED),
            clock_model.THREADS_PER_SM[HOPPER] // threads,
        )
        assert min(by) == row.blocks_per_sm
        tritons.add(row.triton)
        cells = (row.registers, row.shared // 2**10, threads, *by, min(by))
        rows.append([f"{name}, {row.config}", *cells])
    (triton,) = tritons
    columns = ["rung; tile, warps, stages", f"registers, Triton {triton}", "shared KiB", "threads"]
    return formats.table([*columns, "by registers", "by shared memory", "by threads", "programs"], rows)


def words(results: Results, folder: Path) -> str:
    """Shared memory of the rungs on fp32 units: by the words that threads read, without broadcasts, and as counted."""
    record = next(record for record in results.records if record.counted)
    found = {one.rung.id: one.product for one in counted.counted(record)}
    rows: list[list[formats.Cell]] = []
    for name in ON_FFMAS:
        thread, fma = traces.results_of(name), found[name]["FMA pipe"]
        alone = fma * FFMAS_PER_CLOCK / thread.count * thread.words / BANKS
        shown = [f"{share:.0f} %" for share in (fma, alone, found[name]["L1 and shared memory"])]
        rows.append([name, f"{thread.words} for {thread.count}", *shown])
    gpu = environment.short(record.environment["gpu"])
    return formats.table(
        ["rung", "words for FMAs", f"FMA pipe, {gpu}", "reads, no broadcast", "wavefronts, counted"], rows
    )


BLOCKS = {"peaks": peaks, "bounds": bounds, "words": words, "occupancy": occupancy}
