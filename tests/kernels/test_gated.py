"""Kernels for products with a gate, without a GPU: what the warp-specialised one computes, by its source on the CPU,
and what the compiler makes of both."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.epilogue_truth import activated
from tests.support.gluon_on_cpu import simulated
from tests.support.simulated_plans import Simulation
from triton_gemm.compat import CLUSTERS
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.kernels import fma, gemv, portable, skinny, warp_specialised
from triton_gemm.kernels.launch import materialise
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED, GATED_CLUSTERED
from triton_gemm.problem import GATES, GemmProblem, both_products
from triton_gemm.runtime import aot, binaries
from triton_gemm.selection.select import select

HOPPER = device_of_capability((9, 0))
EVERY = GATED + GATED_CLUSTERED * CLUSTERS
OFF = 64  # elements of the memory before and after C


def ids(config: TileConfig) -> str:
    return str(config).replace(" ", "-")


def gated_problem(
    M: int, N: int, K: int, activation: str = "silu", bias: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> GemmProblem:
    """Of operands without memory."""
    a, b, c = (torch.empty(rows, columns, dtype=dtype, device="meta") for rows, columns in ((M, K), (N, K), (M, N)))
    return GemmProblem.of(a, b.mT, c, activation=activation, bias=bias, gate=True)


def check(
    kernel: SimpleNamespace, config: TileConfig, size: tuple[int, int, int], programs: int, name: str, biased: bool
) -> None:
    """One launch against fp64; nothing is written outside of C."""
    M, N, K = size
    generator = torch.Generator().manual_seed(M + N + K)
    a, b, gate = (torch.randn(shape, generator=generator).bfloat16() for shape in ((M, K), (N, K), (N, K)))
    bias, gate_bias = (torch.randn(N, generator=generator).bfloat16() for _ in range(2))
    around = torch.full((M * N + 2 * OFF,), torch.nan, dtype=torch.bfloat16)
    c = around[OFF:-OFF].view(M, N)
    activation = GATES[name]
    problem = GemmProblem.of(a, b.mT, c, activation=activation, bias="n" if biased else None, gate=True)
    assert kernel.illegal(problem, HOPPER, config, Schedule(programs)) is None
    auxiliary = (bias, gate.mT, gate_bias) if biased else (gate.mT,)
    Simulation(problem, config, Schedule(programs, group_m=2), kernel).run(a, b.mT, c, auxiliary, 1.0, 0.0)
    up, of_gate = (a.double() @ x.double().mT for x in (b, gate))
    if biased:
        up, of_gate = up + bias.double(), of_gate + gate_bias.double()
    truth = activated(of_gate, activation) * up
    error = 2.0**-8 * truth.abs() + K * 2.0**-20 * (1 + up.abs() + of_gate.abs())
    assert ((c.double() - truth).abs() <= error).all()
    assert around[:OFF].isnan().all() and around[-OFF:].isnan().all(), "wrote outside of C"


@pytest.fixture(scope="module")
def kernel() -> SimpleNamespace:
    return simulated("warp_specialised")


def every_form(config: TileConfig) -> set[Hashable]:
    """What the fast tier shows."""
    return {config.BLOCK_M, config.BLOCK_N, config.num_warps, (config.CLUSTER_M, config.CLUSTER_N)}


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", EVERY, ids=ids)
def test_every_configuration(kernel: SimpleNamespace, config: TileConfig) -> None:
    """Ragged edges, whole tiles, and far less than a tile; with biases and without; activations in turn."""
    m, n, k = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N, config.BLOCK_K
    names, turn = list(GATES), EVERY.index(config)
    sizes = ((m + 9, 2 * n + 8, 3 * k + 8), (m, n, 9 * k), (3, 8, 8))
    for i, size in enumerate(sizes):
        check(kernel, config, size, 2, names[(turn + i) % len(names)], biased=(turn + i) % 2 == 0)


BUGS = {
    "the gate's columns follow the tile's": ("load", "tail = item.n if config.GATE else", "tail ="),
    "the gate is taken for the other": ("output", "sums = gated(sums, of_gate,", "sums = gated(of_gate, sums,"),
    "one bias for both": ("output", "gl.load(output.gate_bias_ptr + offs_n", "gl.load(output.bias_ptr + offs_n"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    _, old, new = BUGS[bug]
    config = next(c for c in GATED if (c.BLOCK_M, c.BLOCK_N) == (64, 64))
    broken = simulated("warp_specialised", [(old, new)])
    with pytest.raises(AssertionError):
        check(broken, config, (70, 136, 200), 2, "swiglu", biased=True)


# --- The compiler ---


def compiled(problem: GemmProblem, launch: object) -> aot.Compiled:
    launch = launch.programmatic()  # type: ignore[attr-defined]
    operands = binaries.operands_of(problem, [launch])
    arguments = materialise(launch, operands, binaries.SCALARS)
    return aot.compile_launch(aot.CapturedLaunch(launch.kernel, {**arguments, **launch.options}), (9, 0))


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", EVERY, ids=ids)
def test_the_warp_specialised_kernel_spills_nothing(config: TileConfig) -> None:
    """With the longest activation and biases; products of both matrices run on while the next are begun."""
    problem = gated_problem(1024, 1280, 2048, "gelu", "n")
    assert warp_specialised.illegal(problem, HOPPER, config) is None, "no configuration may be there for nothing"
    (launch,) = warp_specialised.launches(problem, config, Schedule(HOPPER.num_sms))
    kernel = compiled(problem, launch)
    assert kernel.spills == 0
    assert kernel.shared <= warp_specialised.shared_memory(problem, config) <= SHARED_MEMORY[9, 0]
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG"):
        assert kernel.instructions[instruction], instruction


def legal_portable() -> list[portable.Config]:
    problem = gated_problem(1024, 1280, 2048, "gelu", "n")
    configs = (*portable.configs("half", (9, 0)), *portable.host.GATED)
    return [config for config in configs if portable.illegal(problem, HOPPER, config) is None]


@pytest.mark.few(shows=lambda config: {config.BLOCK_M, config.BLOCK_N})
@pytest.mark.parametrize("config", legal_portable(), ids=ids)
def test_the_portable_kernel_spills_nothing(config: TileConfig) -> None:
    for size in ((1024, 1280, 2048), (1021, 1279, 2043)):
        problem = gated_problem(*size, "gelu", "n")
        if portable.illegal(problem, HOPPER, config) is None:
            (launch,) = portable.launches(problem, config)
            assert compiled(problem, launch).spills == 0


# --- What is chosen ---


def test_who_has_gates_and_who_has_none() -> None:
    problem = gated_problem(512, 1024, 512)
    for module in (fma, gemv, skinny):
        assert not list(module.candidates(replace(problem, M=1), HOPPER))
    few = replace(problem, M=1)
    assert "a gate is a second one" in str(gemv.illegal(few, HOPPER, gemv.default(replace(few, gate=False), HOPPER)[0]))
    reason = "a gate is of 16 bits"
    for change in ({"has_beta": True}, {"groups": "m"}):
        other = replace(problem, **change)
        assert str(warp_specialised.illegal(other, HOPPER, GATED[0])).startswith(reason)
        assert str(portable.illegal(other, HOPPER, portable.configs("half", (9, 0))[0])).startswith(reason)
    cut = Schedule(HOPPER.num_sms, split_tiles=4, split_k=2)
    assert warp_specialised.illegal(problem, HOPPER, GATED[0], cut) == "tiles with a gate are not cut"
    wide = replace(GATED[0], BLOCK_N=96)
    assert "a power of two wide" in str(warp_specialised.illegal(problem, HOPPER, wide))
    assert problem.auxiliary == ("gate",) and replace(problem, bias="n").auxiliary == ("bias", "gate", "gate_bias")


@pytest.mark.parametrize("M", [1, 16, 64, 512, 2048, 8192])
def test_it_costs_about_what_both_products_beside_each_other_do(M: int) -> None:
    """As to the model, within what tiles of half the width lose; and it is legal."""
    problem, device = gated_problem(M, 14336, 4096), HOPPER
    chosen, other = select(problem, device), select(both_products(problem), device)
    assert chosen.kernel == "warp_specialised" or M <= 16
    times = [float(x.reason.split("about ")[1].split(" us")[0]) for x in (chosen, other)]
    assert times[0] <= 1.25 * times[1]
