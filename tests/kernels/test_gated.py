"""Kernels for products with a gate, without a GPU: what the warp-specialised one computes, by its source on the CPU,
and what the compiler makes of both."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.test_compile_warp_specialised import compiled as of_hopper
from tests.support.compiled_kernels import compiled
from tests.support.epilogue_truth import activated
from tests.support.gluon_on_cpu import run
from tests.support.group_truth import assert_gated, listed_tiles
from tests.support.kernel_cases import ids
from tests.support.simulated_plans import simulation
from tests.support.table_fakes import HOPPER
from triton_gemm.compat import CLUSTERS
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import fma, gemv, portable, skinny, warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED, GATED_CLUSTERED
from triton_gemm.problem import GATES, GemmProblem, both_products
from triton_gemm.selection.select import select

EVERY = GATED + GATED_CLUSTERED * CLUSTERS
OFF = 64  # elements of the memory before and after C


def gated_problem(
    M: int, N: int, K: int, activation: str = "silu", bias: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> GemmProblem:
    """Of operands without memory."""
    a, b, c = (torch.empty(rows, columns, dtype=dtype, device="meta") for rows, columns in ((M, K), (N, K), (M, N)))
    return GemmProblem.of(a, b.mT, c, activation=activation, bias=bias, gate=True)


def in_groups(
    M: int, N: int, K: int, activation: str = "silu", groups: int = 8, out_dtype: torch.dtype = torch.bfloat16
) -> GemmProblem:
    """The same of groups of rows, each with a pair of matrices."""
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (groups, N, K)))
    c = torch.empty(M, N, dtype=out_dtype, device="meta")
    return GemmProblem.of(a, b.mT, c, activation=activation, groups="m", gate=True)


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
    simulation(problem, config, Schedule(programs, group_m=2), kernel).run(a, b.mT, c, auxiliary, 1.0, 0.0)
    up, of_gate = (a.double() @ x.double().mT for x in (b, gate))
    if biased:
        up, of_gate = up + bias.double(), of_gate + gate_bias.double()
    truth = activated(of_gate, activation) * up
    error = 2.0**-8 * truth.abs() + K * 2.0**-20 * (1 + up.abs() + of_gate.abs())
    assert ((c.double() - truth).abs() <= error).all()
    assert around[:OFF].isnan().all() and around[-OFF:].isnan().all(), "wrote outside of C"


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


def check_groups(kernel: SimpleNamespace, config: TileConfig, name: str) -> None:
    """Groups of rows that are empty, of one row, end inside of tiles, and end before the matrix does."""
    m, n, k = config.BLOCK_M, config.BLOCK_N, 2 * config.BLOCK_K + 8
    ends = [0, 1, m + 5, m + 5, 2 * m + 9]
    generator = torch.Generator().manual_seed(m + n)
    a, both = (torch.randn(x, generator=generator).bfloat16() for x in ((2 * m + 20, k), (len(ends), 2 * n + 16, k)))
    gate, up = both.mT.chunk(2, -1)  # halves of one weight
    c = torch.full((len(a), n + 8), torch.nan, dtype=torch.bfloat16)
    problem = GemmProblem.of(a, up, c, activation=GATES[name], groups="m", gate=True)
    if warp_specialised.illegal(problem, HOPPER, config) is not None:
        return
    _, launch = kernel.launches(problem, config, Schedule(3))
    operands = {"a": a, "b": up, "gate": gate, "c": c, "tiles": listed_tiles(ends, len(a), m, 2)}
    run(launch.programmatic(), operands, {"alpha": 1.0, "beta": 0.0})
    assert_gated(a, up, gate, torch.tensor(ends), GATES[name], c)


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", GATED, ids=ids)
def test_groups(kernel: SimpleNamespace, config: TileConfig) -> None:
    check_groups(kernel, config, ("swiglu", "geglu_tanh", "reglu")[GATED.index(config) % 3])


# --- The compiler ---


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", EVERY, ids=ids)
def test_the_warp_specialised_kernel_spills_nothing(config: TileConfig) -> None:
    """With the longest activation and biases; products of both matrices run on while the next are begun."""
    problem = gated_problem(1024, 1280, 2048, "gelu", "n")
    assert warp_specialised.illegal(problem, HOPPER, config) is None, "no configuration may be there for nothing"
    kernel = of_hopper(problem, config, "whole")
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG"):
        assert kernel.instructions[instruction], instruction


def groups_with(activation: str) -> list[GemmProblem]:
    return [in_groups(1024, 1280, 2048, activation, out_dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.few(shows=lambda config, activation: every_form(config) | {activation})
@pytest.mark.parametrize(
    ("config", "activation"),
    [
        pytest.param(config, activation, id=f"{ids(config)}-{activation}")
        for activation in ("gelu", "gelu_tanh")
        for config in GATED
        if activation != "gelu"
        or None in (warp_specialised.illegal(problem, HOPPER, config) for problem in groups_with(activation))
    ],
)
def test_the_warp_specialised_kernel_of_groups_spills_nothing(config: TileConfig, activation: str) -> None:
    """Where pointers to C take registers, too."""
    for problem in groups_with(activation):
        if activation != "gelu" or warp_specialised.illegal(problem, HOPPER, config) is None:
            of_hopper(problem, config, "whole")


CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
PORTABLE = dict.fromkeys((*portable.configs("half", (8, 0)), *portable.host.GATED))


ALIGNED = (1024, 1280, 2048)


def of_portable(config: portable.Config, capability: tuple[int, int]) -> list[GemmProblem]:
    """The problems that the tile can compute, with gelu if it can, else with silu."""
    device, found = device_of_capability(capability), []
    for size in (ALIGNED, (1021, 1279, 2043)):
        for made in (partial(gated_problem, *size, bias="n"), partial(in_groups, *size)):
            problems = (made(activation=activation) for activation in ("gelu", "silu"))
            found += [x for x in problems if portable.illegal(x, device, config) is None][:1]
    return found


@pytest.mark.few(shows=lambda config, capability: {config.BLOCK_M, config.BLOCK_N, capability})
@pytest.mark.parametrize(
    ("config", "capability"),
    [
        pytest.param(config, capability, id=f"{ids(config)}-{capability}")
        for config in PORTABLE
        for capability in CAPABILITIES
        if of_portable(config, capability)
    ],
)
def test_the_portable_kernel_spills_nothing(config: portable.Config, capability: tuple[int, int]) -> None:
    """Matrices aligned to 16 bytes are copied to shared memory by vectors, both weights alike. A bias is not."""
    for problem in of_portable(config, capability):
        kernel = compiled(problem, portable.launches(problem, config), capability)
        assert kernel.spills == 0
        if (problem.M, problem.N, problem.K) == ALIGNED and problem.bias is None:
            assert kernel.instructions["LDGSTS"] and not re.search(r"LDG\.E\.U16|STS\.U16", kernel.asm["sass"])


# --- What is chosen ---


def test_who_has_gates_and_who_has_none() -> None:
    problem = gated_problem(512, 1024, 512)
    for module in (fma, gemv, skinny):
        assert not list(module.candidates(replace(problem, M=1), HOPPER))
    few = replace(problem, M=1)
    assert "a gate is a second one" in str(gemv.illegal(few, HOPPER, gemv.default(replace(few, gate=False), HOPPER)[0]))
    reason = "a gate is of 16 bits"
    for change in ({"has_beta": True}, {"groups": "k"}):
        other = replace(problem, **change)
        assert str(warp_specialised.illegal(other, HOPPER, GATED[0])).startswith(reason)
        assert str(portable.illegal(other, HOPPER, portable.configs("half", (9, 0))[0])).startswith(reason)
    cut = Schedule(HOPPER.num_sms, split_tiles=4, split_k=2)
    assert warp_specialised.illegal(problem, HOPPER, GATED[0], cut) == "tiles with a gate are not cut"
    of_groups = in_groups(512, 1024, 512, "gelu")
    reasons = [str(warp_specialised.illegal(of_groups, HOPPER, x)) for x in (GATED[0], *GATED_CLUSTERED[:CLUSTERS])]
    assert "too few registers for its gelu" in reasons[0] and all("groups end inside" in x for x in reasons[1:])
    flat = next(c for c in portable.configs("half", (9, 0)) if (c.BLOCK_M, c.BLOCK_N) == (16, 128))
    assert "for a gelu of groups" in str(portable.illegal(of_groups, HOPPER, flat))
    wide = replace(GATED[0], BLOCK_N=96)
    assert "a power of two wide" in str(warp_specialised.illegal(problem, HOPPER, wide))
    assert problem.auxiliary == ("gate",) and replace(problem, bias="n").auxiliary == ("bias", "gate", "gate_bias")


@pytest.mark.parametrize("M", [1, 16, 64, 512, 2048, 8192])
def test_it_costs_about_what_both_products_beside_each_other_do(M: int) -> None:
    """As to the model, within what tiles of half the width lose; and it is legal."""
    for problem, few in ((gated_problem(M, 14336, 4096), 16), (in_groups(M, 14336, 4096), 64)):
        chosen, other = select(problem, HOPPER), select(both_products(problem), HOPPER)
        assert chosen.kernel == "warp_specialised" or few >= M
        times = [float(x.reason.split("about ")[1].split(" us")[0]) for x in (chosen, other)]
        assert times[0] <= 1.25 * times[1]
