"""What was measured: the times of a shape's candidates, and the file that keeps them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perf.calibrate.shapes import OTHER, REGIMES
from perf.common.files import read_json, times_of, write_json
from triton_gemm import kernels
from triton_gemm.hardware.device import DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import DeviceModel
from triton_gemm.kernels.candidate import Algorithm, Candidate
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection, predicted, ranked
from triton_gemm.suites import SUITES
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named

FILE = "calibration.json"
SIZES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
CLUSTER = ("CLUSTER_M", "CLUSTER_N")  # of kernels that have them, else 1
OTHERS = ("batch", "pad", "bias", "activation", "scales")  # figures of a shape that are written where it has them
COLUMNS = ("kernel", *SIZES, *CLUSTER, "programs", "split_tiles", "split_k", "reduction", "swap_ab", "packed", "us")
# Of a tuning record; of operands whose rows are not aligned it does not say how far apart these are.
PRODUCT = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+) (bf16|fp16) (nn|nt|tn|tt)( . not aligned)*")


@dataclass(frozen=True)
class Measured:
    """A shape in a mode, cuBLAS's time and each candidate's, in microseconds."""

    shape: Shape
    mode: str
    cublas_us: float
    us: Mapping[Candidate, float]

    @property
    def key(self) -> str:
        return f"{self.shape.key} {self.mode}"

    @property
    def regime(self) -> str:
        if self.mode != "bf16":
            return self.mode
        rows = min(self.shape.M, self.shape.N)
        if rows <= 32 and self.shape.batch is None:
            return "1 to 4 rows" if rows <= 4 else "5 to 16 rows" if rows <= 16 else "17 to 32 rows"
        return next((name for name in REGIMES if SUITES[name].regime(self.shape)), OTHER)

    @cached_property
    def problem(self) -> GemmProblem:
        return gemm_problem(self.shape, self.mode)

    @cached_property
    def best(self) -> Candidate:
        return min(self.us, key=self.us.__getitem__)

    def predicted(self, model: DeviceModel) -> list[float]:
        """Of each candidate, in their order."""
        return [predicted(self.problem, candidate, model) for candidate in self.us]

    def pick(self, model: DeviceModel) -> Candidate:
        """The model's; of equals the one that is not swapped."""
        times = zip(self.predicted(model), self.us, strict=True)
        return min(times, key=lambda one: (one[0], one[1].algorithm.swap_ab))[1]


@dataclass(frozen=True)
class Calibration:
    """The measured shapes of one file, and the GPU."""

    device: DeviceInfo
    shapes: list[Measured]


def write(target: Path, surroundings: Mapping[str, Any], measured: Iterable[Measured]) -> None:
    """Writes what was measured, a line for each candidate; a reader sees the old file or the new one."""
    shapes = []
    for found in measured:
        shape = found.shape
        others = {name: getattr(shape, name) for name in OTHERS if getattr(shape, name) != getattr(Shape, name)}
        fields = {"M": shape.M, "N": shape.N, "K": shape.K, "layout": shape.layout, **others, "mode": found.mode}
        rows = [_row(candidate, us) for candidate, us in found.us.items()]
        shapes.append({**fields, "cublas_us": _rounded(found.cublas_us), "rows": rows})
    write_json(target, {"environment": surroundings, "columns": COLUMNS, "shapes": shapes})


def read(*sources: Path) -> Calibration:
    """What `write` or `perf.tuning` wrote, of one GPU. Raises ValueError for another file, or those of several GPUs."""
    devices: set[DeviceInfo] = set()
    shapes: list[Measured] = []
    for source in sources:
        try:
            found = read_json(source)
            gpu = found["environment"]
            device = replace(device_of_capability((9, 0)), name=gpu["gpu"], num_sms=gpu["num_sms"])
            devices.add(device)
            if "products" in found:
                of_source = [one for product in found["products"] if (one := _of_tuning(product, device)) and one.us]
            else:
                columns = tuple(found["columns"])
                if not {*columns} <= {*COLUMNS}:  # files from before second launches and clusters have fewer
                    raise ValueError(f"columns {found['columns']}")
                of_source = [_measured(entry, columns) for entry in found["shapes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} was not written by `measure`: {error}") from error
        if not of_source:
            raise ValueError(f"{source} holds no shape")
        shapes += of_source
    if len(devices) > 1:
        raise ValueError(f"of several GPUs: {', '.join(sorted(device.name for device in devices))}")
    return Calibration(devices.pop(), shapes)


def _measured(entry: dict[str, Any], columns: Sequence[str]) -> Measured:
    others = {name: entry[name] for name in OTHERS if name in entry}
    shape = Shape(entry["M"], entry["N"], entry["K"], layout=entry["layout"], **others)
    problem = gemm_problem(shape, entry["mode"])
    us, known = {}, {}
    for row in entry["rows"]:
        fields = dict.fromkeys(CLUSTER, 1) | {"reduction": False} | dict(zip(columns, row, strict=True))
        swap_ab, packed = fields["swap_ab"], tuple(fields["packed"])
        module: Any = kernels.named(fields["kernel"])
        sizes = {name: fields[name] for name in (*SIZES, *CLUSTER)}
        config = module.Config(**{name: size for name, size in sizes.items() if name in SIZES or size > 1})
        if (packed, swap_ab) not in known:  # predictions remember what they know of one problem
            given = kernels.repack.repacked(problem, packed)
            known[packed, swap_ab] = given.swap_ab() if swap_ab else given
        given = known[packed, swap_ab]
        programs, tiles, work = (fields[name] for name in ("programs", "split_tiles", "split_k"))
        if programs is not None:
            work = Schedule(programs, tiles, work, reduction=bool(fields["reduction"]))
        algorithm = Algorithm(fields["kernel"], config, work, swap_ab=swap_ab, packed=packed)
        us[Candidate(given, algorithm)] = fields["us"]
    return Measured(shape, entry["mode"], entry["cublas_us"], us)


def _of_tuning(product: Mapping[str, Any], device: DeviceInfo) -> Measured | None:
    """A product of a tuning record, with those of its candidates that are ranked for it today; None where its operands
    cannot be made again."""
    found = PRODUCT.fullmatch(product["product"])
    if found is None:
        raise ValueError(f"product {product['product']}")
    batch, M, N, K, mode, layout, unaligned = found.groups()
    if unaligned:
        return None
    shape = Shape(int(M), int(N), int(K), layout=layout, batch=int(batch) if batch else None)
    times = times_of(product)
    ranks = ranked(gemm_problem(shape, mode), device) if times else ()
    by_name = {named(Selection.of(candidate, "")): candidate for _, candidate in ranks}
    us = {candidate: times[name] for name, candidate in by_name.items() if name in times}
    return Measured(shape, mode, math.nan, us)


def _row(candidate: Candidate, us: float) -> list[Any]:
    kernel, config, work, swap_ab, packed = candidate.algorithm
    figures = [getattr(config, name, 1) for name in (*SIZES, *CLUSTER)]
    dealt: tuple[Any, ...] = (None, 0, work, False)
    if isinstance(work, Schedule):
        dealt = (work.programs, work.split_tiles, work.split_k, work.reduction)
    return [kernel, *figures, *dealt, swap_ab, "".join(packed), _rounded(us)]


def _rounded(us: float) -> float:
    return float(f"{us:.5g}")
