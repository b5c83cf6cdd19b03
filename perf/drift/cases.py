"""What is compiled: every kernel in each of its configurations, in one product for each precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from perf.drift.record import GPUS
from triton_gemm import kernels
from triton_gemm.arithmetic import ARITHMETICS, HALF, IEEE, TF32, Arithmetic
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.device_model import named_device
from triton_gemm.kernels import reduction
from triton_gemm.kernels.candidate import Algorithm, Work
from triton_gemm.kernels.launch import Launch, materialise
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import of_itemsize
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime import precompile
from triton_gemm.runtime.aot import CapturedLaunch
from triton_gemm.suites.problems import operands_of_sizes

# (M, N, K) and layout of A and B. A configuration is compiled in the first of these that its kernel takes: "nt" is
# `linear`'s, the narrow ones are for the kernels of a few rows.
PRODUCTS = (
    ((1024, 1280, 2048), "nt"),
    ((1024, 1280, 2048), "nn"),
    *(((rows, 1280, 2048), layout) for rows in (1, 2, 4, 16) for layout in ("nt", "nn")),
)
ODD = (1023, 1279, 2047)  # whose rows TMA cannot read, so that they are copied
LONG = (256, 320, 32768)  # whose parts of K a second launch adds up
PARTS = (8, 32)  # of K; the second launch reads more of many at once


@dataclass(frozen=True)
class Case:
    """One kernel to compile. name: kernel, precision, product and configuration: what records know it by."""

    name: str
    launch: Launch = field(repr=False)
    problem: GemmProblem = field(repr=False)

    def captured(self) -> CapturedLaunch:
        """The launch as a plan makes it, on operands that do not exist."""
        operands: Mapping[str, torch.Tensor] = precompile.operands_of(self.problem, [self.launch])
        arguments = materialise(self.launch, operands, precompile.SCALARS)
        return CapturedLaunch(self.launch.kernel, {**arguments, **self.launch.options})


def problem(size: tuple[int, int, int], layout: str, arithmetic: Arithmetic) -> GemmProblem:
    """The product of that size in a precision's main dtype, bf16 of the 16-bit ones, without an epilogue. Operands
    that have scales have one for each of them, and give bf16."""
    M, N, K = size
    dtype = torch.bfloat16 if arithmetic is HALF else arithmetic.dtypes[0]
    out_dtype = arithmetic.out_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
    a, b = operands_of_sizes(M, N, K, dtype, layout)
    request = Request(precision=arithmetic.name, scales=None if arithmetic.plain else "tensor")
    return request.problem(a, b, torch.empty(M, N, dtype=out_dtype, device="meta"))


def configurations(kernel: str, given: GemmProblem) -> tuple[TileConfig, ...]:
    """All that a kernel lists for what it is given."""
    module = kernels.named(kernel)
    if kernel == "warp_specialised":
        listed = kernels.warp_specialised
        return listed.configs(given.dtype) + listed.configs(given.dtype, clusters=True)
    if isinstance(module.CONFIGS, dict):
        found: tuple[TileConfig, ...] = module.CONFIGS[given.precision]
        return found
    return tuple(module.CONFIGS)


@cache
def every(gpu: str = GPUS[0]) -> dict[str, Case]:
    """All cases of a GPU in GPUS by name, those of one kernel after one another."""
    device = named_device(gpu)
    found: dict[str, Case] = {}
    makers: list[Callable[[Arithmetic], Iterator[Case]]] = [
        partial(_for_long_sums, device=device),
        *(partial(_of_kernel, kernel, device=device) for kernel in kernels.KERNELS),
        _second_launches,
        _copies,
    ]
    for cases in makers:
        for arithmetic in ARITHMETICS.values():
            for case in cases(arithmetic):
                if device.capability >= (9, 0):  # as `plan.launches_on` does
                    case = replace(case, launch=case.launch.programmatic())
                found.setdefault(case.name, case)
    return found


def _of_kernel(kernel: str, arithmetic: Arithmetic, device: DeviceInfo) -> Iterator[Case]:
    """The configurations that the kernel offers for one of the products, and those that it lists. Tiles as wide as a
    wave needs are offered and not listed, and what is listed for other sizes is not offered."""
    module = kernels.named(kernel)
    offered: dict[TileConfig, Case] = {}
    listed: dict[TileConfig, Case] = {}
    for size, layout in PRODUCTS:
        given: dict[GemmProblem, list[Algorithm]] = {}
        for made, algorithm in module.candidates(problem(size, layout, arithmetic), device):
            given.setdefault(made, []).append(algorithm)
        for made, algorithms in given.items():
            whole = Schedule(device.num_sms) if isinstance(algorithms[0].work, Schedule) else 1
            works: dict[TileConfig, list[Work]] = {}
            for algorithm in algorithms:
                works.setdefault(algorithm.config, [whole]).append(algorithm.work)
            for config in (*works, *configurations(kernel, made)):
                found = offered if config in works else listed
                legal = (w for w in works.get(config, [whole]) if module.illegal(made, device, config, w) is None)
                work = None if config in found else next(legal, None)
                if work is not None:
                    *_, launch = module.launches(made, config, work)
                    found[config] = Case(f"{kernel} {arithmetic.name}, {_shape(size, layout)}: {config}", launch, made)
    yield from (listed | offered).values()


def _for_long_sums(arithmetic: Arithmetic, device: DeviceInfo) -> Iterator[Case]:
    """The warp-specialised kernel's configurations for sums that are cut, with all tiles cut for a second launch."""
    kernel = kernels.warp_specialised
    for given in dict.fromkeys(
        candidate.problem for candidate in kernel.candidates(problem(LONG, "nt", arithmetic), device)
    ):
        for config in of_itemsize(kernel.FOR_LONG_SUMS, given.planes.dtype.itemsize):
            tiles = config.tiles(given.M, given.N)
            work = Schedule(2 * tiles, tiles, 2, reduction=True)
            if kernel.illegal(given, device, config, work) is None:
                first, _ = kernel.launches(given, config, work)
                yield Case(f"warp_specialised {arithmetic.name}, {_shape(LONG, 'nt')}: {config}", first, given)


def _second_launches(arithmetic: Arithmetic) -> Iterator[Case]:
    """Those that add up the parts of K that another left in memory: in 16 bits and fp32, whatever was multiplied."""
    if arithmetic in (HALF, TF32):
        made = problem(LONG, "nt", arithmetic)
        for parts in PARTS:
            launch = replace(reduction.launch(made, parts), temporaries=(reduction.sums_of(made, parts),))
            yield Case(f"reduction {arithmetic.name}, {_shape(LONG, 'nt')}: {parts} parts", launch, made)


def _copies(arithmetic: Arithmetic) -> Iterator[Case]:
    """Those that `kernels.repack` makes of operands which a kernel cannot read, or multiplies in planes."""
    if arithmetic not in (HALF, IEEE, TF32) and not arithmetic.planes:
        return
    made = problem(ODD, "nn", arithmetic)
    for name in ("a", "b"):
        launch, _ = kernels.repack.copy_of(made, name)
        yield Case(f"repack {arithmetic.name}, {_shape(ODD, 'nn')}: {name}", launch, made)


def _shape(size: tuple[int, int, int], layout: str) -> str:
    return f"{'x'.join(map(str, size))} {layout}"
