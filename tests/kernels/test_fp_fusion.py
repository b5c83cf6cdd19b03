"""Every kernel has multiplications fused with additions, also where Triton does so only when told: 3.9 warns where
nothing is said, and 3.10 leaves them apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from tests.support import compiled_kernels
from tests.support.compiled_kernels import compiled
from tests.support.kernel_mutants import RUNGS
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import KERNELS
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.rung import Autotuner
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import aot
from triton_gemm.selection.select import launches, select

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture(autouse=True)
def fusion_is_off_by_default() -> Iterator[None]:
    """As in Triton 3.10; and 3.9's warning, which comes once in a process, is an error."""
    with triton.knobs.language.scope(), warnings.catch_warnings():
        triton.knobs.language.default_fp_fusion = False
        if hasattr(triton._utils, "warn_once"):
            triton._utils.warn_once.cache_clear()
        warnings.simplefilter("error")
        yield


def fuses(arguments: dict[str, Any]) -> bool:
    """Whether a kernel launched with these arguments and options is compiled with fusion."""
    return make_backend(GPUTarget("cuda", 90, 32)).parse_options(dict(arguments)).enable_fp_fusion


def operands(rung: Rung) -> tuple[torch.Tensor, ...]:
    """a, b, c: enough columns for k05 to copy A."""
    return tuple(
        torch.empty(size, dtype=rung.dtypes[0], device="meta") for size in ((512, 256), (256, 1024), (512, 1024))
    )


@pytest.mark.parametrize("rung", LADDER, ids=list(RUNGS))
def test_every_launch_of_a_rung(rung: Rung) -> None:
    with aot.capture() as made:
        rung.launch(*operands(rung), config=rung.configs[0])
    assert made and all(fuses(launch.arguments) for launch in made)


@pytest.mark.parametrize("rung", LADDER[2:], ids=list(RUNGS)[2:])
def test_every_rung_that_is_tuned(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[dict[str, Any]] = []
    monkeypatch.setattr(Autotuner, "run", lambda self, *args, **kwargs: tuned.append(kwargs))
    with aot.capture():
        rung.launch(*operands(rung))
    (arguments,) = tuned
    assert fuses(arguments)


def problem(*size: int, dtype: torch.dtype = torch.bfloat16, step: int = 1) -> GemmProblem:
    """step: distance of neighbours in A's rows."""
    return compiled_kernels.product(size, "ntn", steps=(step, 1, 1), dtype=dtype)


def of_groups(dim: str) -> GemmProblem:
    a, b = (
        torch.empty(512, 256, dtype=torch.bfloat16, device="meta"),
        torch.empty(4, 256, 512, device="meta").bfloat16(),
    )
    if dim == "k":
        return GemmProblem.of(a.mT, a, a.new_empty(4, 256, 256), groups="k")
    return GemmProblem.of(a, b, a.new_empty(512, 512), groups="m")


PRODUCTS = {
    "gemv_kernel": (problem(1, 4096, 4096, dtype=torch.float32), HOPPER),
    "skinny_kernel": (problem(8, 4096, 4096), HOPPER),
    "warp_specialised_kernel": (problem(2048, 2048, 2048), HOPPER),
    "portable_kernel": (problem(2048, 2048, 2048), AMPERE),
    "fma_kernel": (problem(2048, 2048, 2048, dtype=torch.float32), HOPPER),
    "mma_fp64_kernel": (problem(2048, 2048, 2048, dtype=torch.float64), HOPPER),
    "repack_kernel": (problem(2048, 2048, 2048, step=2), HOPPER),
    "list_tiles_kernel": (of_groups("m"), HOPPER),
    "k_groups_kernel": (of_groups("k"), HOPPER),
}


def test_every_kernel_has_a_product() -> None:
    assert {f"{name}_kernel" for name in KERNELS} <= PRODUCTS.keys()


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_launch_of_a_kernel(kernel: str) -> None:
    product, capability = PRODUCTS[kernel]
    made = launches(product, select(product, device_of_capability(capability)))
    made += tuple(launch.programmatic() for launch in made)
    assert kernel in {launch.kernel.__name__ for launch in made}
    assert all(fuses(dict(launch.options)) for launch in made)


def test_a_kernel_compiles_to_ffmas_without_a_warning() -> None:
    product, capability = PRODUCTS["gemv_kernel"]
    (launch,) = launches(product, select(product, device_of_capability(capability)))
    apart = replace(launch, options={**launch.options, "enable_fp_fusion": False})
    assert compiled(product, [launch]).instructions["FFMA"] > 0 == compiled(product, [apart]).instructions["FFMA"]


@pytest.mark.parametrize("rung", [RUNGS["k03"], RUNGS["k11"]], ids=["in Triton", "in Gluon"])
def test_a_rung_compiles_without_a_warning(rung: Rung) -> None:
    with aot.capture() as made:
        rung.launch(*operands(rung), config=rung.configs[0])
    assert made
    for launch in made:
        aot.compile_launch(launch, HOPPER)
