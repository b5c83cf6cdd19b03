"""`make explore`: one page that shows what a tile, warps, stages, GROUP_M and a GPU do, at once, to a rung's registers,
shared memory, programs on an SM, waves, ceilings and modelled speed, beside the speed that was measured.

Every figure is computed here, and looked up by the page, which is one file and needs no network. A rung's time is
`clock_model.clocks`; its registers are the compiler's, where they are in the committed table (`compiled`). `portable`,
which `matmul` runs on each GPU and no rung is, stands apart; its time is the package's cost model's. No time is shorter
than the GPU's data sheet allows, nor than the fastest kernel needed that met the power limit.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from perf.ladder import autotuner, clock_model, compiled
from perf.ladder.record import Record, committed
from perf.measure import environment, roofline
from perf.measure.environment import RESULTS, ROOT
from perf.measure.numerics import mode_of
from triton_gemm.arithmetic import ARITHMETICS, SHORT_NAMES
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import DeviceInfo, architecture
from triton_gemm.hardware.device_model import model_of, origin
from triton_gemm.hardware.gpus import bandwidth, named_device, rate
from triton_gemm.kernels import portable
from triton_gemm.kernels.cost_model import load_imbalance, traffic
from triton_gemm.kernels.portable.choice import programs_per_sm, registers_of
from triton_gemm.kernels.portable.host import itemsize_of_sums
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting.explanation import described
from triton_gemm.selection.select import credible, select

PAGE = ROOT / "build" / "explorer.html"
TEMPLATE = Path(__file__).with_suffix(".html")
RUNGS = {rung.id: rung for rung in compiled.RUNGS}
ALL_ROWS = 4096  # GROUP_M that takes all rows of tiles: by columns, as k03, which has none

# The choices, in the order in which the page has them. A kernel is a rung, or `portable` in a precision.
AXES: dict[str, tuple[Any, ...]] = {
    "kernel": (*RUNGS, "ieee", "tf32", "half", "int8"),
    "gpu": ("a100", "rtx4090", "h100", "h200", "b200", "rtx5090"),
    "shape": ((4096, 4096, 4096), (1024, 1024, 1024), (16, 14336, 4096)),
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128, 256),
    "BLOCK_K": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "GROUP_M": (1, 4, 8, 16, ALL_ROWS),
}
CHOICES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
CHOSEN = ("kernel", "gpu", *CHOICES)
DTYPES = {"half": torch.bfloat16, "int8": torch.int8}  # others multiply fp32


@dataclass
class Table:
    """One figure over some of the axes, the last of which varies fastest. values: numbers, or with `texts` their
    numbers in that list."""

    axes: Sequence[str]
    values: list[Any]
    texts: list[str] | None = None


@dataclass
class Explored:
    """All that the page knows. `programs` is an axis too, whose place is the table of that name."""

    axes: dict[str, list[Any]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, axes: Sequence[str], figure: Callable[..., Any]) -> None:
        points = itertools.product(*(self.axes[axis] for axis in axes))
        self.tables[name] = Table(axes, [figure(*point) for point in points])

    def add_texts(self, name: str, axes: Sequence[str], text: Callable[..., str]) -> None:
        self.add(name, axes, text)
        table = self.tables[name]
        table.texts = list(dict.fromkeys(["", *table.values]))
        places = {text: place for place, text in enumerate(table.texts)}
        table.values = [places[text] for text in table.values]

    def at(self, name: str, **point: Any) -> Any:
        """A figure, as the page looks it up."""
        table, place = self.tables[name], 0
        for axis in table.axes:
            here = point[axis] if axis in point else self.at(axis, **point)
            place = place * len(self.axes[axis]) + self.axes[axis].index(here)
        return table.values[place] if table.texts is None else table.texts[table.values[place]]

    def as_dict(self) -> dict[str, Any]:
        tables = {name: {key: x for key, x in vars(table).items() if x} for name, table in self.tables.items()}
        return {"axes": self.axes, "choices": CHOICES, "tables": tables, "measured": self.measured}


@cache
def problem_of(kernel: str, shape: tuple[int, int, int], gpu: str = "h100") -> tuple[GemmProblem, DeviceInfo]:
    """The product of that shape in a kernel's precision, its operands K-major as in a linear layer."""
    M, N, K = shape
    precision = RUNGS[kernel].precision if kernel in RUNGS else kernel
    dtype = DTYPES.get(precision, torch.float32)
    fp32: Any = precision if dtype == torch.float32 else None
    problem, device, _ = described(M=M, N=N, K=K, dtype=dtype, layout="nt", precision=fp32, device=gpu)
    return problem, device


def rounded(x: float) -> float:
    """To five digits, of which the page shows three: to fewer, a speed made of a time would differ in its last."""
    return float(f"{x:.5g}")


def grouped(num_m: int, num_n: int, group: int) -> Iterator[tuple[int, int]]:
    """Tiles (row, column) in the order of k04's `grouped_pid`."""
    for first in range(0, num_m, group):
        for column in range(num_n):
            yield from ((row, column) for row in range(first, min(first + group, num_m)))


@cache
def wave(num_m: int, num_n: int, group: int, programs: int) -> tuple[int, int]:
    """Rows and columns of tiles that the first `programs` programs touch."""
    tiles = list(itertools.islice(grouped(num_m, num_n, group), programs))
    return len({row for row, _ in tiles}), len({column for _, column in tiles})


def gpu_of(record: Record) -> str | None:
    return next((gpu for gpu in AXES["gpu"] if named_device(gpu).name == record.environment["gpu"]), None)


def by_power(records: Sequence[Record]) -> dict[tuple[str | None, str], float]:
    """By GPU and precision the TFLOPS of the fastest product that was measured, where the power limit lowered its
    clock."""
    found: dict[tuple[str | None, str], tuple[float, bool]] = {}
    for record, problem in ((of, problem) for of in records for problem in of.problems.values()):
        key = gpu_of(record), {"fp16": "half", "bf16": "half"}.get(problem.mode, problem.mode)
        fastest = max(filter(None, map(problem.tflops, problem.providers)), default=0.0)
        found[key] = max(found.get(key, (0.0, False)), (fastest, problem.clocks_after.by_power))
    return {key: fastest for key, (fastest, by_power) in found.items() if by_power}


def measured(record: Record) -> Iterator[dict[str, Any]]:
    """What a record has of the rungs, at the page's shapes: by the autotuner, and in the ladder's own measurement."""
    gpu = gpu_of(record)

    def entry(rung: str, size: Sequence[int], config: GemmConfig, tflops: float, how: str, made: Any) -> dict[str, Any]:
        choices = {"choices": [getattr(config, name) for name in CHOICES], "group": config.GROUP_M}
        where = f"{environment.named(made)}, {made['date'][:10]}"
        of = {"kernel": rung, "gpu": gpu, "shape": list(size), **choices}
        return {**of, "tflops": float(f"{tflops:.6g}"), "how": how, "made": where}

    for tuning in autotuner.shown(record) if gpu else ():
        for timed in tuning.timed:
            yield entry(tuning.rung.id, tuning.size, timed.config, timed.tflops, "kernel alone", tuning.made)
    for problem, rung in itertools.product(record.problems.values() if gpu else (), RUNGS.values()):
        size, result = (problem.M, problem.N, problem.K), problem.timed(rung.name)
        if result and size in AXES["shape"] and problem.mode == mode_of(rung.precision, rung.dtypes[0]):
            config = next(config for config in rung.configs if str(config) == result.config)
            tflops = problem.tflops_in(result.time_ms.median)
            yield entry(rung.id, size, config, tflops, "whole rung", record.environment)


def explored() -> Explored:
    """Computes every figure; some seconds."""
    found = Explored({name: list(values) for name, values in AXES.items()})
    records = list(committed(RESULTS))
    found.measured = [entry for record in records for entry in measured(record)]
    held = by_power(records)
    devices = {gpu: named_device(gpu) for gpu in AXES["gpu"]}
    models = {gpu: model_of(device) for gpu, device in devices.items()}
    square = AXES["shape"][0]
    precisions = {kernel: RUNGS[kernel].precision if kernel in RUNGS else kernel for kernel in AXES["kernel"]}

    @cache
    def of_portable(m: int, n: int, k: int, warps: int, stages: int) -> portable.Config:
        return portable.Config(m, n, k, warps, stages, 8)

    @cache
    def of_rung(rung: str, m: int, n: int, k: int, warps: int, stages: int) -> GemmConfig:
        return GemmConfig(m, n, k, RUNGS[rung].configs[0].GROUP_M, warps, stages)

    def illegal(kernel: str, gpu: str, *choices: int) -> str:
        device = devices[gpu]
        if kernel not in RUNGS:
            if choices[-1] == 1:
                return "the cost model knows no portable kernel of one stage"
            return portable.illegal(*problem_of(kernel, square, gpu), of_portable(*choices)) or ""
        rung = RUNGS[kernel]
        if device.capability not in rung.capabilities:
            return f"{kernel} is for {' and '.join(map(architecture, rung.capabilities))}"
        return rung.illegal(of_rung(kernel, *choices), device, rung.dtypes[0]) or ""

    @cache
    def registers(kernel: str, gpu: str, *choices: int) -> tuple[int, str]:
        if kernel in RUNGS:
            return compiled.registers(RUNGS[kernel], devices[gpu].capability, of_rung(kernel, *choices))
        sums = itemsize_of_sums(problem_of(kernel, square)[0])
        return registers_of(of_portable(*choices), sums), "estimated"

    def shared(kernel: str, gpu: str, *choices: int) -> int:
        if kernel in RUNGS:
            return compiled.shared(RUNGS[kernel], devices[gpu].capability, of_rung(kernel, *choices))
        one, itemsize = of_portable(*choices), problem_of(kernel, square)[0].dtype.itemsize
        return one.shared_memory(itemsize, buffers=one.buffers(devices[gpu].capability))

    def programs(kernel: str, gpu: str, *choices: int) -> int:
        if kernel in clock_model.PERSISTENT:
            return 1
        if kernel in RUNGS:
            return max(1, compiled.blocks_per_sm(RUNGS[kernel], devices[gpu].capability, of_rung(kernel, *choices)))
        problem, _ = problem_of(kernel, square)
        return programs_per_sm(of_portable(*choices), problem.dtype.itemsize, itemsize_of_sums(problem), models[gpu])

    def where(kernel: str, gpu: str, *choices: int) -> dict[str, Any]:
        return {"kernel": kernel, "gpu": gpu, **dict(zip(CHOICES, choices, strict=True))}

    def if_legal(figure: Callable[..., Any], nothing: Any = 0) -> Callable[..., Any]:
        """A figure over CHOSEN, which what cannot run has not."""
        return lambda *point: nothing if found.at("illegal", **where(*point)) else figure(*point)

    @cache
    def modelled(shape: tuple[int, int, int], kernel: str, gpu: str, *choices: int) -> tuple[float, str, float]:
        """Microseconds; of a rung what it is bound by; and the time without that bound, if it is none of the tile's.
        0 for what cannot run."""
        if found.at("illegal", **where(kernel, gpu, *choices)):
            return 0, "", 0
        problem, device = problem_of(kernel, shape, gpu)
        if kernel not in RUNGS:
            us = portable.microseconds(problem, of_portable(*choices), 1, models[gpu])
            return rounded(credible(us, problem, device)), "", us
        config, at_once = of_rung(kernel, *choices), found.at("programs", **where(kernel, gpu, *choices))
        on = (precisions[kernel], problem.dtype.itemsize, device.capability)
        persistent = kernel in clock_model.PERSISTENT
        clocks = clock_model.clocks(config, *on, shape, device.num_sms, at_once, persistent=persistent)
        us = clocks / roofline.clock(device, precisions[kernel])
        step = clock_model.step_clocks(config, *on, min(at_once, -(-tiles(shape, *choices[:2]) // device.num_sms)))
        possible = credible(us, problem, device)
        if possible > us:
            return rounded(possible), "memory", us
        power = by_watts(kernel, gpu)
        if power and (least := 2 * problem.M * problem.N * problem.K / power / 1e6) > us:
            return rounded(least), "power", us
        limit, *others = sorted(step, key=lambda name: -step[name])
        close = ", ".join(name for name in others if step[name] > 0.95 * step[limit])
        return rounded(us), limit + f" (nearly by {close})" * bool(close), us

    def by_units(kernel: str, gpu: str) -> float:
        return rounded(2 * devices[gpu].num_sms * rate(devices[gpu], ARITHMETICS[precisions[kernel]].unit) / 1e6)

    def by_path(path: str, kernel: str, gpu: str, m: int, n: int, warps: int = 4) -> float:
        """TFLOPS that one of `clock_model.limits` allows on all SMs; 0 where it limits nothing."""
        device, itemsize = devices[gpu], problem_of(kernel, square)[0].dtype.itemsize
        config, precision = GemmConfig(m, n, 16, None, warps), precisions[kernel]
        limits = clock_model.limits(config, precision, itemsize, device.capability, sustained=True)
        return rounded(limits.get(path, 0.0) * device.num_sms * roofline.clock(device, precision) / 1e6)

    def by_memory(kernel: str, gpu: str, shape: tuple[int, int, int]) -> float:
        problem, device = problem_of(kernel, shape, gpu)
        return rounded(2 * problem.M * problem.N * problem.K / (traffic(problem) / bandwidth(device)) / 1e6)

    def by_watts(kernel: str, gpu: str) -> float:
        return rounded(held.get((gpu, precisions[kernel]), 0.0)) if kernel in RUNGS else 0.0

    def in_tiles(shape: tuple[int, int, int], m: int, n: int) -> tuple[int, int]:
        return -(-shape[0] // m), -(-shape[1] // n)

    def tiles(shape: tuple[int, int, int], m: int, n: int) -> int:
        rows, columns = in_tiles(shape, m, n)
        return rows * columns

    def waves(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int) -> float:
        return float(f"{tiles(shape, m, n) / (devices[gpu].num_sms * at_once):.3g}")

    def idle(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int) -> int:
        """Per cent of the SMs' time."""
        return round(100 * load_imbalance(tiles(shape, m, n), devices[gpu].num_sms, at_once, piled=0.0))

    def patch(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int, group: int) -> str:
        rows, columns = wave(*in_tiles(shape, m, n), group, devices[gpu].num_sms * at_once)
        return f"{rows} x {columns}"

    def patch_mib(
        itemsize: int, gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int, group: int
    ) -> float:
        """A's rows and B's columns that the first wave reads, once each."""
        rows, columns = wave(*in_tiles(shape, m, n), group, devices[gpu].num_sms * at_once)
        read = min(rows * m, shape[0]) + min(columns * n, shape[1])
        return rounded(read * shape[2] * itemsize / 2**20)

    def chosen(kernel: str, gpu: str, shape: tuple[int, int, int]) -> str:
        if kernel in RUNGS:
            return ""
        selection = select(*problem_of(kernel, shape, gpu))
        return f"{selection.kernel} {selection.config}: {selection.reason}"

    def best(kernel: str, gpu: str, shape: tuple[int, int, int]) -> list[int]:
        """Places of the fastest choices, of equal ones those that least depend on memory or power."""
        points = itertools.product(*(AXES[axis] for axis in CHOICES))
        times = {point: modelled(shape, kernel, gpu, *point) for point in points}
        least = min((time or float("inf"), us, point) for point, (time, _, us) in times.items())
        return [AXES[axis].index(choice) for axis, choice in zip(CHOICES, least[2], strict=True)]

    def first(kernel: str) -> list[int]:
        """Places of the choices with which a kernel is shown first: a rung's own first configuration."""
        config = RUNGS[kernel].configs[0] if kernel in RUNGS else GemmConfig(128, 128, 64, 8, 8, 3)
        return [AXES[axis].index(getattr(config, axis) or ALL_ROWS) for axis in (*CHOICES, "GROUP_M")]

    found.add_texts("gpu_name", ["gpu"], lambda gpu: devices[gpu].name)
    found.add("sms", ["gpu"], lambda gpu: devices[gpu].num_sms)
    found.add("shared_most", ["gpu"], lambda gpu: devices[gpu].shared_memory)
    found.add("known", ["gpu"], lambda gpu: int(origin(devices[gpu]) == "shipped"))
    found.add_texts("kernel_name", ["kernel"], kernel_name)
    found.add("rung", ["kernel"], lambda kernel: int(kernel in RUNGS))
    found.axes["itemsize"] = [1, 2, 4]
    found.add("itemsize", ["kernel"], lambda kernel: problem_of(kernel, square)[0].dtype.itemsize)
    found.add("no_broadcast", ["kernel"], lambda kernel: int(kernel in RUNGS and precisions[kernel] == "ieee"))
    found.add("flop", ["shape"], lambda shape: 2 * shape[0] * shape[1] * shape[2])
    found.add("first", ["kernel"], first)
    found.add_texts("illegal", CHOSEN, illegal)
    found.add("registers", CHOSEN, if_legal(lambda *point: registers(*point)[0]))
    found.add_texts("registers_from", CHOSEN, if_legal(lambda *point: registers(*point)[1], ""))
    found.add("shared", CHOSEN, shared)
    found.add("programs", CHOSEN, if_legal(programs, 1))
    found.axes["programs"] = sorted(set(found.tables["programs"].values))
    by_tile = ["BLOCK_M", "BLOCK_N"]
    found.add(
        *("bytes_per_flop", ["itemsize", *by_tile]),
        lambda itemsize, m, n: float(f"{1 / clock_model.l2_intensity(GemmConfig(m, n), itemsize):.3g}"),
    )
    found.add("tiles", ["shape", *by_tile], tiles)
    found.add("waves", ["gpu", "shape", *by_tile, "programs"], waves)
    found.add("idle", ["gpu", "shape", *by_tile, "programs"], idle)
    found.add_texts("patch", ["gpu", "shape", *by_tile, "programs", "GROUP_M"], patch)
    found.add("patch_mib", ["itemsize", "gpu", "shape", *by_tile, "programs", "GROUP_M"], patch_mib)
    found.add("most by units", ["kernel", "gpu"], by_units)
    found.add("most by memory", ["kernel", "gpu", "shape"], by_memory)
    found.add("most by power", ["kernel", "gpu"], by_watts)
    found.add("most by L2", ["kernel", "gpu", *by_tile], partial(by_path, "L2"))
    for path in ("shared memory", "issue slots"):
        found.add(f"most by {path}", ["kernel", "gpu", *by_tile, "num_warps"], partial(by_path, path))
    found.add("time", ["shape", *CHOSEN], lambda *point: modelled(*point)[0])
    found.add_texts("bound", ["shape", *CHOSEN], lambda *point: modelled(*point)[1])
    found.add_texts("chosen", ["kernel", "gpu", "shape"], chosen)
    found.add("best", ["kernel", "gpu", "shape"], best)
    return found


def kernel_name(kernel: str) -> str:
    """As "k06 pipelined, fp32 (ieee)"."""
    rung = RUNGS.get(kernel)
    precision = rung.precision if rung else kernel
    dtype = SHORT_NAMES[rung.dtypes[0] if rung else DTYPES.get(precision, ARITHMETICS[precision].dtypes[0])]
    named = dtype if dtype == precision else f"{dtype} ({precision})"
    return f"{rung.id} {rung.title}, {named}" if rung else f"portable, {named}"


def page(found: Explored) -> str:
    """The page, with all figures in it."""
    return filled(TEMPLATE, found.as_dict())


def filled(template: Path, figures: Any) -> str:
    """A page of a template, which unpacks these figures itself."""
    data = gzip.compress(json.dumps(figures, separators=(",", ":")).encode(), mtime=0)
    return template.read_text().replace("<!-- data -->", base64.b64encode(data).decode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.explorer", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default build/explorer.html")
    out: Path = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(explored()))
    print(f"{out}: open it in a browser ({out.stat().st_size / 2**10:.0f} KiB)")


if __name__ == "__main__":
    main()
