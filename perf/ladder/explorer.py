"""`make explore`: one page that shows what a tile, warps, stages, GROUP_M, a precision and a GPU do, at once, to
registers, shared memory, programs on an SM, waves, ceilings and the predicted time.

Every figure is computed here, by the package's own functions, and looked up by the page, which is one file and needs no
network. The kernel is `portable`, the one that runs on each GPU; its time is the cost model's, and no shorter than the
GPU's data sheet allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from perf.ladder import prediction
from perf.measure.environment import ROOT
from triton_gemm.arithmetic import ARITHMETICS, SHORT_NAMES
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.device_model import model_of, origin
from triton_gemm.hardware.gpus import bandwidth, named_device, rate
from triton_gemm.kernels import portable
from triton_gemm.kernels.cost_model import load_imbalance, traffic
from triton_gemm.kernels.portable.choice import programs_per_sm, registers_of
from triton_gemm.kernels.portable.host import itemsize_of_sums
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting.explanation import asked
from triton_gemm.selection.select import credible, select

PAGE = ROOT / "build" / "explorer.html"
TEMPLATE = Path(__file__).with_suffix(".html")

# The choices, in the order in which the page has them.
AXES: dict[str, tuple[Any, ...]] = {
    "gpu": ("a100", "rtx4090", "h100", "h200", "b200", "rtx5090"),
    "precision": ("ieee", "tf32", "half", "int8"),
    "shape": ((4096, 4096, 4096), (1024, 1024, 1024), (16, 14336, 4096)),
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128, 256),
    "BLOCK_K": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
    "GROUP_M": (1, 4, 8, 16),
}
CHOICES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
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
            place = place * len(self.axes[axis]) + self.axes[axis].index(point[axis])
        return table.values[place] if table.texts is None else table.texts[table.values[place]]

    def as_dict(self) -> dict[str, Any]:
        tables = {name: {key: x for key, x in vars(table).items() if x} for name, table in self.tables.items()}
        return {"axes": self.axes, "choices": CHOICES, "tables": tables}


@cache
def problem_of(precision: str, shape: tuple[int, int, int], gpu: str = "h100") -> tuple[GemmProblem, DeviceInfo]:
    """The product of that shape, its operands K-major as in a linear layer."""
    M, N, K = shape
    dtype = DTYPES.get(precision, torch.float32)
    fp32: Any = precision if dtype == torch.float32 else None
    problem, device, _ = asked(M=M, N=N, K=K, dtype=dtype, layout="nt", precision=fp32, device=gpu)
    return problem, device


def rounded(x: float) -> float:
    """To three digits, whole numbers as such."""
    return int(f"{x:.0f}") if x >= 100 else float(f"{x:.3g}")


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


def explored() -> Explored:
    """Computes every figure; some seconds."""
    found = Explored({name: list(values) for name, values in AXES.items()})
    devices = {gpu: named_device(gpu) for gpu in AXES["gpu"]}
    models = {gpu: model_of(device) for gpu, device in devices.items()}
    square = AXES["shape"][0]

    def config(m: int, n: int, k: int, warps: int, stages: int, group: int = 8) -> portable.Config:
        return portable.Config(m, n, k, warps, stages, group)

    def illegal(gpu: str, precision: str, *choices: int) -> str:
        return portable.illegal(*problem_of(precision, square, gpu), config(*choices)) or ""

    def registers(precision: str, m: int, n: int, warps: int) -> int:
        return registers_of(config(m, n, 16, warps, 2), itemsize_of_sums(problem_of(precision, square)[0]))

    def shared(gpu: str, precision: str, m: int, n: int, k: int, stages: int) -> int:
        one = config(m, n, k, 4, stages)
        itemsize = problem_of(precision, square)[0].dtype.itemsize
        return one.shared_memory(itemsize, buffers=one.buffers(devices[gpu].capability))

    def programs(gpu: str, precision: str, *choices: int) -> int:
        problem, _ = problem_of(precision, square)
        return programs_per_sm(config(*choices), problem.dtype.itemsize, itemsize_of_sums(problem), models[gpu])

    def time(gpu: str, precision: str, shape: tuple[int, int, int], *choices: int) -> float:
        """Microseconds; 0 for what cannot run."""
        if found.at("illegal", gpu=gpu, precision=precision, **dict(zip(CHOICES, choices, strict=True))):
            return 0
        problem, device = problem_of(precision, shape, gpu)
        return rounded(credible(portable.microseconds(problem, config(*choices), 1, models[gpu]), problem, device))

    def by_units(gpu: str, precision: str) -> float:
        return rounded(2 * devices[gpu].num_sms * rate(devices[gpu], ARITHMETICS[precision].unit) / 1e6)

    def by_path(path: str, gpu: str, precision: str, m: int, n: int, warps: int = 4) -> float:
        """TFLOPS that one of `prediction.limits` allows on all SMs."""
        device, itemsize = devices[gpu], problem_of(precision, square)[0].dtype.itemsize
        limits = prediction.limits(GemmConfig(m, n, 16, None, warps), precision, itemsize, device.capability)
        return rounded(limits[path] * device.num_sms * device.clock / 1e6)

    def by_memory(gpu: str, precision: str, shape: tuple[int, int, int]) -> float:
        problem, device = problem_of(precision, shape, gpu)
        return rounded(2 * problem.M * problem.N * problem.K / (traffic(problem) / bandwidth(device)) / 1e6)

    def in_tiles(shape: tuple[int, int, int], m: int, n: int) -> tuple[int, int]:
        return -(-shape[0] // m), -(-shape[1] // n)

    def tiles(shape: tuple[int, int, int], m: int, n: int) -> int:
        return config(m, n, 16, 4, 2).tiles(*shape[:2])

    def waves(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int) -> float:
        return float(f"{tiles(shape, m, n) / (devices[gpu].num_sms * at_once):.3g}")

    def idle(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int) -> int:
        """Per cent of the SMs' time."""
        return round(100 * load_imbalance(tiles(shape, m, n), devices[gpu].num_sms, at_once, piled=0.0))

    def patch(gpu: str, shape: tuple[int, int, int], m: int, n: int, at_once: int, group: int) -> str:
        rows, columns = wave(*in_tiles(shape, m, n), group, devices[gpu].num_sms * at_once)
        return f"{rows} x {columns}"

    def patch_mib(
        gpu: str, precision: str, shape: tuple[int, int, int], m: int, n: int, at_once: int, group: int
    ) -> float:
        """A's rows and B's columns that the first wave reads, once each."""
        rows, columns = wave(*in_tiles(shape, m, n), group, devices[gpu].num_sms * at_once)
        read = min(rows * m, shape[0]) + min(columns * n, shape[1])
        return rounded(read * shape[2] * problem_of(precision, square)[0].dtype.itemsize / 2**20)

    def chosen(gpu: str, precision: str, shape: tuple[int, int, int]) -> str:
        selection = select(*problem_of(precision, shape, gpu))
        return f"{selection.kernel} {selection.config}: {selection.reason}"

    def best(gpu: str, precision: str, shape: tuple[int, int, int]) -> list[int]:
        """Places of the fastest choices."""
        points = itertools.product(*(range(len(AXES[axis])) for axis in CHOICES))
        times = (
            (found.at("time", gpu=gpu, precision=precision, shape=shape, **named(point)) or float("inf"), point)
            for point in points
        )
        return list(min(times)[1])

    def named(point: Sequence[int]) -> dict[str, Any]:
        return {axis: AXES[axis][place] for axis, place in zip(CHOICES, point, strict=True)}

    found.add_texts("gpu_name", ["gpu"], lambda gpu: devices[gpu].name)
    found.add("sms", ["gpu"], lambda gpu: devices[gpu].num_sms)
    found.add("shared_most", ["gpu"], lambda gpu: devices[gpu].shared_memory)
    found.add("measured", ["gpu"], lambda gpu: int(origin(devices[gpu]) == "shipped"))
    found.add_texts("precision_name", ["precision"], precision_name)
    found.add("flop", ["shape"], lambda shape: 2 * shape[0] * shape[1] * shape[2])
    found.add_texts("illegal", ["gpu", "precision", *CHOICES], illegal)
    found.add("registers", ["precision", "BLOCK_M", "BLOCK_N", "num_warps"], registers)
    found.add("shared", ["gpu", "precision", "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"], shared)
    found.add("programs", ["gpu", "precision", *CHOICES], programs)
    found.axes["programs"] = sorted(set(found.tables["programs"].values))
    by_tile = ["BLOCK_M", "BLOCK_N"]
    found.add(
        *("bytes_per_flop", ["precision", *by_tile]),
        lambda precision, m, n: float(
            f"{1 / prediction.l2_intensity(GemmConfig(m, n), problem_of(precision, square)[0].dtype.itemsize):.3g}"
        ),
    )
    found.add("tiles", ["shape", *by_tile], tiles)
    found.add("waves", ["gpu", "shape", *by_tile, "programs"], waves)
    found.add("idle", ["gpu", "shape", *by_tile, "programs"], idle)
    found.add_texts("patch", ["gpu", "shape", *by_tile, "programs", "GROUP_M"], patch)
    found.add("patch_mib", ["gpu", "precision", "shape", *by_tile, "programs", "GROUP_M"], patch_mib)
    found.add("most by units", ["gpu", "precision"], by_units)
    found.add("most by L2", ["gpu", "precision", *by_tile], partial(by_path, "L2"))
    shared_axes = ["gpu", "precision", *by_tile, "num_warps"]
    found.add("most by shared memory", shared_axes, partial(by_path, "shared memory"))
    found.add("most by memory", ["gpu", "precision", "shape"], by_memory)
    found.add("time", ["gpu", "precision", "shape", *CHOICES], time)
    found.add_texts("chosen", ["gpu", "precision", "shape"], chosen)
    found.add("best", ["gpu", "precision", "shape"], best)
    return found


def precision_name(precision: str) -> str:
    """As "bf16 (half)"."""
    dtype = SHORT_NAMES[DTYPES.get(precision, ARITHMETICS[precision].dtypes[0])]
    return dtype if dtype == precision else f"{dtype} ({precision})"


def page(found: Explored) -> str:
    """The page, with all figures in it."""
    data = json.dumps(found.as_dict(), separators=(",", ":"))
    return TEMPLATE.read_text().replace("/* data */", data)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.explorer", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default build/explorer.html")
    out: Path = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(explored()))
    print(f"{out}: open it in a browser ({out.stat().st_size / 2**20:.2f} MiB)")


if __name__ == "__main__":
    main()
