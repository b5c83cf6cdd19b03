"""Nsight Compute's counters of the ladder's kernels: what each is bound by, and the bytes that it moves.

`python perf/report.py --counters` counts every rung, and the two twins whose memory arithmetic S3 teaches, in one run
of ncu. `python -m perf.ladder.counters LAUNCH...` is the program that ncu watches: it launches each kernel once, and
needs a CUDA GPU. LAUNCH is PROVIDER:MODE:SIZE[:CONFIG], as k04_grouped:ieee:4096:64x64x16,4,1,8 or
c03_shared_tiled/fp32_32:ieee:1024.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from perf.ladder import rungs_and_twins
from perf.ladder.published import mode_of, twin_of
from perf.ladder.record import CountedLaunch, Record
from perf.measure import numerics
from perf.measure.environment import ROOT
from perf.measure.operands import MODE_DTYPES, Operands, Problem
from reference_cuda import TWINS, TwinUnavailable, load
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import MistakeError, config_of, spelled

NCU_TIMEOUT_S = 300.0
SIZE, LARGE_SIZE = 4096, 16384
# At LARGE_SIZE, where the launch order decides what DRAM carries: k08 by columns of tiles, as k03, and in groups.
LARGE: Mapping[str, tuple[dict[str, int], ...]] = {
    "k03_blocked": ({},),
    "k04_grouped": ({"GROUP_M": 8},),
    "k08_tensor_cores": ({"GROUP_M": LARGE_SIZE // 128}, {"GROUP_M": 8}),
}
S3_SIZE = 1024
# Words a result loads, of K = S3_SIZE: (global, shared), as S3 counts them.
TAUGHT = {"S3.3": (S3_SIZE / 16, 2 * S3_SIZE), "S3.4": (S3_SIZE / 32, 9 * S3_SIZE / 8)}

_PEAK = "avg.pct_of_peak_sustained_elapsed"
# Shares of a unit's peak while the kernel runs, in percent. The names are in Nsight Compute's "Metrics Reference".
UNITS = {
    "FMA pipe": f"sm__pipe_fma_cycles_active.{_PEAK}",
    "tensor cores": f"sm__pipe_tensor_cycles_active.{_PEAK}",
    "issue slots": f"sm__issue_active.{_PEAK}",
    "L1 and shared memory": f"l1tex__data_pipe_lsu_wavefronts.{_PEAK}",
    "L2": f"lts__throughput.{_PEAK}",
    "DRAM": f"gpu__dram_throughput.{_PEAK}",
}
READY = "its turn to issue"
# Cycles for which a warp waits between two of its instructions, on average, by what it waits for.
STALLS = {
    name: f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"
    for name, stall in {
        "L1 or the memory behind it": "long_scoreboard",
        "shared memory": "short_scoreboard",
        "the queue of shared-memory instructions": "mio_throttle",
        "the queue of global loads": "lg_throttle",
        "a busy arithmetic pipe": "math_pipe_throttle",
        "a barrier": "barrier",
        "wgmma": "gmma",
        "the instruction before it": "wait",
        READY: "not_selected",
        "the fetch of instructions": "no_instruction",
    }.items()
}
AMOUNTS = {
    "ns": "gpu__time_duration.sum",
    "DRAM read": "dram__bytes_read.sum",
    "DRAM written": "dram__bytes_write.sum",
    "L2 read": "l1tex__m_xbar2l1tex_read_bytes.sum",  # bytes that L2 sends to the SMs
    "L2 written": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "L2 hits": "lts__t_sector_hit_rate.pct",
    # Bytes that threads load
    "global": "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "shared": "smsp__sass_data_bytes_mem_shared_op_ld.sum",
}
METRICS = {**AMOUNTS, **UNITS, **STALLS}


class CountingError(RuntimeError):
    """Why ncu counted nothing, in its words."""


@dataclass(frozen=True)
class Launch:
    """One call of a rung or of a twin's variant. config: as `spelled`, nothing for a twin."""

    provider: str
    mode: str
    size: int
    config: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (self.provider, self.mode, str(self.size), self.config)))

    @classmethod
    def read(cls, text: str) -> Launch:
        """`str` backwards; raises ValueError where it names no rung, variant, mode or configuration that there is."""
        if not 3 <= len(text.split(":")) <= 4:
            raise ValueError("is not PROVIDER:MODE:SIZE[:CONFIG]")
        provider, mode, size, *config = text.split(":")
        made = cls(provider, mode, int(size), *config)
        if mode not in MODE_DTYPES or made.size < 1:
            raise ValueError(f"no precision class {mode!r}, or a size below 1")
        made.call()
        return made

    def call(self) -> tuple[torch.dtype, Callable[..., None]]:
        """The dtype of C, and what launches the kernel."""
        stem, _, name = self.provider.partition("/")
        if stem in TWINS:
            variant = TWINS[stem].variant(name)
            return variant.out_dtype, lambda a, b, c: load(stem).launch(a, b, c, variant=name)
        rung = next((rung for rung in LADDER if rung.name == stem), None)
        if rung is None:
            raise ValueError(f"no rung or twin {stem!r}")
        config = config_of(rung, self.config)
        return MODE_DTYPES[self.mode], lambda a, b, c: rung.launch(a, b, c, config=config)


def launches(record: Record, rungs: Iterable[Rung]) -> Iterator[Launch]:
    """Every rung in the configuration that was tuned for the record at SIZE, else in its first; and what the launch
    order does at LARGE_SIZE."""
    for rung in rungs:
        mode = numerics.mode_of(rung.precision, rung.dtypes[0])
        timed = record.problems.get(Problem(SIZE, SIZE, SIZE, mode).key)
        tuned = timed.providers[rung.name].config if timed and rung.name in timed.providers else None
        config = next((one for one in rung.configs if str(one) == tuned), rung.configs[0])
        yield Launch(rung.name, mode, SIZE, spelled(config))
        for changes in LARGE.get(rung.name, ()):
            yield Launch(rung.name, mode, LARGE_SIZE, spelled(replace(config, **changes)))


def of_s3(kernel_id: str) -> Launch:
    twin, variant = twin_of(kernel_id)
    return Launch(rungs_and_twins.twin_name(twin.stem, variant), mode_of(twin, variant), S3_SIZE)


def count(chosen: Sequence[Launch]) -> dict[str, CountedLaunch]:
    """What ncu counts of each launch, by `str` of it; CountingError where it cannot, with what it says."""
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "perf.ladder.counters", *map(str, chosen)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=NCU_TIMEOUT_S)
    except OSError as error:
        raise CountingError(error.strerror) from error
    except subprocess.TimeoutExpired as error:
        raise CountingError(f"it took longer than {NCU_TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]  # the program's reason, then ncu's
        raise CountingError(next((line for line in lines if "error" in line.lower()), f"status {done.returncode}"))
    return dict(zip(map(str, chosen), of_launches(done.stdout, chosen), strict=True))


def of_launches(output: str, chosen: Sequence[Launch]) -> Iterator[CountedLaunch]:
    """What ncu printed, split into launches: the product is the last kernel of each, after copies of operands."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise CountingError(f"ncu printed no table: {lines[-1] if lines else 'nothing'}")
    table = [line for line in lines[start:] if line.startswith('"')]
    _, *rows = csv.DictReader(io.StringIO("\n".join(table)))  # the first row has units
    of_each = iter(rows)
    for one in chosen:
        kernels: dict[str, dict[str, float]] = {}
        copies = True
        for row in of_each:
            name = row["Kernel Name"]
            copies = name.startswith("repack")
            kernels[f"{name} {len(kernels) + 1}" if copies else name] = dict(_figures(row))
            if not copies:
                break
        if copies:
            raise CountingError(f"it saw no product of {one}")
        M = N = K = one.size
        yield CountedLaunch(provider=one.provider, config=one.config, mode=one.mode, M=M, N=N, K=K, kernels=kernels)


def _figures(row: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for figure, metric in METRICS.items():
        try:
            yield figure, float(row[metric].replace(",", ""))
        except (KeyError, ValueError) as error:
            raise CountingError(f"it has no {metric} on this GPU") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.ladder.counters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("launches", nargs="+", type=_launch, metavar="LAUNCH", help="PROVIDER:MODE:SIZE[:CONFIG]")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: this needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    try:
        for one in given.launches:
            run(one)
    except (TwinUnavailable, torch.OutOfMemoryError) as error:
        print(f"error: {error}".splitlines()[0], file=sys.stderr)
        return 2
    return 0


def _launch(text: str) -> Launch:
    try:
        return Launch.read(text)
    except (ValueError, TypeError, LookupError, MistakeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def run(one: Launch) -> None:
    """Launches it twice, the second time under the profiler: the first call may compile, or build a twin."""
    out_dtype, call = one.call()
    problem = Problem(one.size, one.size, one.size, one.mode)
    a, b, c = Operands(problem, {out_dtype}, 1).arguments(out_dtype)[0]
    call(a, b, c)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(a, b, c)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main())
