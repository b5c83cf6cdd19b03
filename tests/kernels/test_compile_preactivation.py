"""What the compiler makes of kernels that store what an activation is applied to, and what is chosen for them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_gated import HOPPER, gated_problem, in_groups
from tests.support.compiled_kernels import compiled, product
from tests.support.kernel_cases import ids
from tests.support.tiers import one
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.kernels import fma, gemv, portable, skinny, warp_specialised
from triton_gemm.kernels.launch import Launch
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime import binaries, policies, stand_ins
from triton_gemm.selection.select import Selection

Capability = tuple[int, int]
CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
SIZE = (1024, 1280, 2048)


def problem(
    size: tuple[int, int, int] = SIZE, dtype: torch.dtype = torch.bfloat16, turned: bool = False, **words: Any
) -> GemmProblem:
    """Of operands along K, or fp32 ones across it; turned: C is column-major."""
    orders = ("nt" if dtype.itemsize == 2 else "tn") + ("t" if turned else "n")
    words = {"precision": "half", "activation": "gelu", "bias": "n", "preactivation": True, **words}
    return product(size, orders, dtype=dtype, **words)


FORMS = {
    "rows": problem(),
    "columns": problem(turned=True, bias="m"),
    "fp32": problem(out_dtype=torch.float32),
    "pointers": problem((1024, 1279, 2048)),
    "residual": problem(activation="silu", has_beta=True, residual=True),
    "residual of fp32": problem(out_dtype=torch.float32, activation="silu", has_beta=True, residual=True),
    "gate": replace(gated_problem(*SIZE, "gelu", "n"), preactivation=True),
    "gate of groups": replace(in_groups(*SIZE), preactivation=True),
}
ROOMY = 128  # accumulators a thread may hold and still have registers for the addresses of these stores


def tight(form: GemmProblem) -> list[TileConfig]:
    """Of those with most accumulators that leave room; and what is smallest."""
    configs = GATED if form.gate else warp_specialised.CONFIGS
    legal = [config for config in configs if warp_specialised.illegal(form, HOPPER, config) is None]
    sums = {config: (config.with_gate if form.gate else config).accumulators() for config in legal}
    roomy = [config for config in legal if sums[config] <= ROOMY]
    most = max(sums[config] for config in roomy)
    return [*[config for config in roomy if sums[config] == most], roomy[-1]]


@pytest.mark.few(shows=lambda name, config: {name})
@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(name, config, id=f"{name}-{ids(config)}") for name, form in FORMS.items() for config in tight(form)],
)
def test_warp_specialised(name: str, config: TileConfig) -> None:
    """Without split-K: there are as many TMA stores for each further matrix as for C. If TMA loads C's old values,
    threads store the preactivation by pointers, two elements at once."""
    form = FORMS[name]
    schedule = Schedule(HOPPER.num_sms)
    kernels = [compiled(x, warp_specialised.launches(x, config, schedule)) for x in (form, form.to_choose_for())]
    assert [kernel.spills for kernel in kernels] == [0, 0]
    for kernel in kernels:
        assert kernel.shared <= warp_specialised.shared_memory(form, config) <= SHARED_MEMORY[9, 0]
    matrices = {"HGMMA": 1, "UTMALDG": 1, "UTMASTG": {"rows": 2, "columns": 2, "fp32": 2, "gate": 3}.get(name, 1)}
    for instruction, times in matrices.items():
        assert kernels[0].instructions[instruction] == times * kernels[1].instructions[instruction], instruction
    widths = [Counter(re.findall(r"STG\.E(\.U16|\.64|)", kernel.asm["sass"])) for kernel in kernels]
    if name in ("rows", "columns", "fp32", "gate"):
        assert widths == [{}, {}]
    if name in ("residual", "residual of fp32"):
        assert not widths[1] and set(widths[0]) == {".64" if name == "residual of fp32" else ""}


def few_rows(capability: Capability) -> list[tuple[GemmProblem, Launch]]:
    found = []
    for rows, K in ((1, 2048), (2, 2047), (4, 2048)):
        form, device = problem((rows, 1280, K)), device_of_capability(capability)
        for split_k in (1, 4):
            config = gemv.default(form.to_choose_for(), device)[0]
            found.append((form, gemv.launches(form, config, split_k)[-1]))
    form = problem((16, 1280, 2048))
    return found + [(form, skinny.launches(form, config)[-1]) for config in skinny.CONFIGS]


@pytest.mark.few(shows=one)
@pytest.mark.few(shows=lambda capability: {capability})
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_few_rows_spill_nothing(capability: Capability) -> None:
    for form, launch in few_rows(capability):
        assert compiled(form, (launch,), capability).spills == 0


@pytest.mark.few(shows=lambda split_k, capability: {capability})
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fma_spills_nothing(capability: Capability, split_k: int) -> None:
    for config in fma.CONFIGS:
        for words in ({}, {"activation": "silu", "has_beta": True}):
            form = problem(dtype=torch.float32, precision="ieee", **words)
            assert fma.illegal(form, device_of_capability(capability), config, split_k) is None
            assert compiled(form, fma.launches(form, config, split_k), capability).spills == 0


OF_PORTABLE = {**{name: FORMS[name] for name in ("rows", "residual", "gate", "gate of groups")}}
OF_PORTABLE["odd"] = problem((1023, 1279, 2047), activation="gelu_tanh")


def for_portable(name: str, capability: Capability) -> list[TileConfig]:
    device, form = device_of_capability(capability), OF_PORTABLE[name]
    configs = dict.fromkeys((*portable.configs("half", capability), *portable.host.GATED))
    legal = [config for config in configs if portable.illegal(form, device, config) is None]
    return sorted(legal, key=lambda config: -config.accumulators())[:4]


@pytest.mark.few(shows=lambda name, capability: {name, capability})
@pytest.mark.parametrize("name", OF_PORTABLE)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_portable_spills_no_more_than_alone(capability: Capability, name: str) -> None:
    """Where accumulators leave a thread the fewest registers."""
    form = OF_PORTABLE[name]
    for config in for_portable(name, capability):
        spills = compiled(form, portable.launches(form, config), capability).spills
        alone = form.to_choose_for()
        assert not spills or spills <= compiled(alone, portable.launches(alone, config), capability).spills, config


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_operands_by_tma(capability: Capability) -> None:
    """Only the largest tiles spill, outside of their main loop."""
    for config in portable.TMA_CONFIGS[capability[0]]:
        form = problem(bias="n" if config.accumulators() <= 64 else None, activation="relu")
        assert portable.illegal(form, device_of_capability(capability), config, Schedule(132)) is None
        kernel = compiled(form, portable.launches(form, config, Schedule(132)), capability)
        assert kernel.spills == 0 or config.accumulators() >= 128
        main_loop = re.search(r"(HGMMA|UTCHMMA).*(HGMMA|UTCHMMA)", kernel.asm["sass"], re.DOTALL)
        assert main_loop and not re.search(r"\b(STL|LDL)\b", main_loop[0]), config


# --- What is chosen ---


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_choice_is_that_of_the_product_alone(name: str, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model, by tables and by the tuner, which see no other problem."""
    alone, lookups = FORMS[name].to_choose_for(), []
    monkeypatch.setattr(policies.tables, "lookup", lambda problem, *_: lookups.append(problem))
    with policies.policy("cached"):
        chosen = [policies.choose(x, HOPPER, invariant=invariant) for x in (FORMS[name], alone)]
    assert chosen[0] == chosen[1] and lookups == [alone, alone]


def test_no_stand_in_leaves_it_out() -> None:
    """Binaries of a product alone do not stand for those that store more."""
    form, alone = FORMS["rows"], FORMS["rows"].to_choose_for()
    available, selection = stand_ins.Available(), policies.choose(alone, HOPPER)
    available.add(HOPPER, alone, selection)
    assert available.nearest(alone, selection, HOPPER) is not None
    assert available.nearest(form, selection, HOPPER) is None
    available.add(HOPPER, form, selection)
    found = available.nearest(form, selection, HOPPER)
    assert isinstance(found, Selection) and found.algorithm == selection.algorithm


def test_the_problem_of_a_request() -> None:
    a, b, c = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 16), (16, 24), (8, 24)))
    request = Request(activation="silu", bias="n", preactivation=True)
    found = request.problem(a, b, c)
    assert found.preactivation and found.auxiliary == ("bias", "preactivation")
    gated = replace(found, gate=True, groups="m")
    assert gated.auxiliary == ("bias", "gate", "gate_bias", "ends", "preactivation", "ungated")
    assert not found.to_choose_for().preactivation and found.swap_ab().preactivation
    odd = replace(found, c=replace(found.c, aligned=False))
    addresses = {name: x.data_ptr() % 16 for name, x in binaries.operands_of(odd, ()).items()}
    assert addresses["c"] == addresses["preactivation"] == addresses["ungated"] != addresses["b"]
    with pytest.raises(AssertionError, match="without an activation"):
        replace(found, activation=None)
