"""What is worth timing: the model's choice first, its bits alone where they are to stay, and users' own."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import kernels
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime.binaries import launches_on
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, ranked, select
from triton_gemm.tables import records
from triton_gemm.tuning import candidates as offered
from triton_gemm.tuning import shown
from triton_gemm.tuning.candidates import candidates, kernels_of
from triton_gemm.tuning.report import Progress, ShapeReport

AMPERE = device_of_capability((8, 0))
PROBLEMS = {
    "middle": problem_of(),
    "decode": problem_of(16, 14336, 4096),
    "one row": problem_of(1, 4096, 4096),
    "large": problem_of(8192, 8192, 8192),
    "odd": replace(problem_of(800, 2391, 4472), b=Layout((0, 2391, 1)), c=Layout((0, 2391, 1))),
    "emulated": replace(problem_of(dtype=torch.float32), precision="bf16x6"),
    "groups": replace(problem_of(), batch=8, groups="m", b=Layout((2048 * 1024, 1024, 1))),
}


def of(problem: GemmProblem, device: Any = HOPPER, **how: Any) -> list[Selection]:
    return candidates(problem, device, select(problem, device), **how)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
def test_the_models_choice_comes_first_and_all_can_be_stored(name: str, device: Any) -> None:
    problem = PROBLEMS[name]
    choice = select(problem, device)
    for bits in ("same", "any"):
        found = of(problem, device, bits=bits)
        assert found[0] == choice and len({replace(one, reason="", source="") for one in found}) == len(found)
        assert len(found) <= offered.KEEP + offered.LEAST * len(kernels.KERNELS)
        for one in found:
            assert records.illegal(problem, device, one.algorithm) is None
        classes = {bit_class(problem, one) for one in found}
        assert bits == "any" or classes == {bit_class(problem, choice)}


def test_they_come_in_the_models_order() -> None:
    problem = PROBLEMS["middle"]
    order = [candidate.algorithm for _, candidate in ranked(problem, HOPPER)]
    found = [one.algorithm for one in of(problem, bits="any")]
    places = [order.index(algorithm) for algorithm in found]
    assert places == sorted(places) and {name for name, *_ in found} == {"warp_specialised", "portable"}
    configs = [algorithm[:2] + algorithm[3:] for algorithm in found]
    assert max(configs.count(config) for config in configs) <= offered.MOST


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_users_configuration_is_left_out_where_a_kernel_has_no_such_tile(rows: int) -> None:
    """That of docs/tuning.md, which `skinny` could be given by its parameters, on a product of few rows."""
    own = triton.Config({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4, num_stages=3)
    problem = replace(problem_of(rows, 6144, 4096), b=Layout((0, 1, 4096)))
    assert ("skinny", kernels.skinny.Config(128, 64, 64, 4, 3)) in kernels_of(own)
    found = of(problem, bits="any", configs=[own])
    assert all(launches_on(HOPPER, problem, one) for one in found)
    assert {"portable"} <= {one.kernel for one in found if one.config.num_stages == 3}
    assert offered.refused(problem, HOPPER, found, "any", [own]) == [], "one kernel has it"


@pytest.mark.parametrize("form", [(4, 32), (256, 1), (2, 64), (8, 16)])
def test_a_users_cluster_that_is_larger_than_the_gpu_is_left_out(form: tuple[int, int]) -> None:
    figures = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "CLUSTER_M": form[0], "CLUSTER_N": form[1]}
    own = triton.Config(figures, num_warps=8, num_stages=4)
    ((kernel, config),) = kernels_of(own)
    problem = PROBLEMS["large"]
    assert of(problem, bits="any", configs=[own]) == of(problem, bits="any")
    why = kernels.named(kernel).illegal(problem, HOPPER, config, Schedule(1))
    assert offered.refused(problem, HOPPER, [], "any", [own]) == [(str(own), f"warp_specialised: {why}")]


def test_a_message_says_why_a_users_configuration_is_no_candidate() -> None:
    problem = PROBLEMS["middle"]
    portable = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 4}
    large = kernels.portable.Config(4096, 4096, 4096, 4, 3)
    few = kernels.skinny.Config(16, 8, 512, 4, 2)
    configs = [triton.Config(portable, num_warps=4, num_stages=3), large, few]
    found = of(problem, configs=configs)
    (first, why), (second, other) = offered.refused(problem, HOPPER, found, "same", configs)
    assert (first, second) == (str(large), str(few))
    assert why.startswith("portable: ") and "rows nor columns" in other
    split = next(one for one in of(problem, bits="any") if bit_class(problem, one) != bit_class(problem, found[0]))
    ((_, bits),) = offered.refused(problem, HOPPER, [], "same", [split.config])
    assert "its bits are not those of the model's choice" in bits


def test_users_configurations_join() -> None:
    problem = PROBLEMS["middle"]
    figures = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    own = triton.Config({**figures, "GROUP_M": 4}, num_warps=4, num_stages=3)
    portable = kernels.portable.Config(64, 64, 64, 4, 3, GROUP_M=4)
    assert ("portable", portable) in kernels_of(own)
    found = of(problem, bits="any", configs=[own])
    assert found[1].config == portable and found[0] == select(problem, HOPPER)
    same = of(problem, configs=[own])
    assert {bit_class(problem, one) for one in same} == {bit_class(problem, found[0])}
    assert sum(one.config == portable for one in same) == 1, "split K gives other bits"
    # For every kernel that has its parameters, each with work as that kernel deals it out.
    plain = triton.Config(figures, num_warps=4, num_stages=4)
    first = {one.kernel: one for one in reversed(of(problem, bits="any", configs=[plain])) if one.config.BLOCK_K == 64}
    assert isinstance(first["warp_specialised"].work, Schedule) and isinstance(first["portable"].work, int)
    count = -(-problem.M // 64) * -(-problem.N // 64)
    assert first["warp_specialised"].work.programs == min(count, HOPPER.num_sms)
    # A kernel's own, which it does not offer by itself.
    clustered = kernels.warp_specialised.Config(128, 128, 64, 8, 6, CLUSTER_M=2)
    with forms.of_kits():
        assert any(one.config == clustered for one in of(problem, configs=[clustered]))


@pytest.mark.parametrize(
    "config",
    [
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLIT": 2}),
        kernels.portable.Config,
        "128x128x64",
        None,
    ],
    ids=str,
)
def test_what_is_no_configuration_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"triton\.Config with BLOCK_M"):
        of(PROBLEMS["middle"], configs=[config])


def test_what_no_gpu_could_run_is_left_out() -> None:
    problem = PROBLEMS["middle"]
    for name in kernels.KERNELS:
        kind = kernels.named(name).Config
        for figures in (
            *((64, 64, 0, 4, 3), (0, 64, 64, 4, 3), (96, 64, 64, 4, 3), (64, 64, 48, 4, 3), (64, 64, 64, 3, 3)),
            *((64, 68, 64, 4, 4), (64, 64, 64, 4, 0)),
        ):
            with pytest.raises(ValueError, match="in sizes that tiles can have"):
                of(problem, configs=[kind(*figures)])
        for figures in ((64, 64, 64, 4, 999), (4096, 4096, 4096, 4, 3)):
            found = of(problem, bits="any", configs=[kind(*figures)])
            assert not any(one.config == kind(*figures) for one in found)
    # One stage is enough for a kernel that has no ring.
    own = triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, num_stages=1)
    found = of(problem, bits="any", configs=[own])
    assert {one.kernel for one in found if one.config.num_stages == 1} == {"portable"}


@pytest.mark.parametrize(("name", "offered"), [("b200", True), ("rtx5090", True), ("h100", False)])
def test_tma_of_portable_is_tuned_on_blackwell_and_never_the_models_choice(name: str, offered: bool) -> None:
    device = named_device(name)
    for problem, bits in ((PROBLEMS["large"], "same"), (PROBLEMS["middle"], "any"), (PROBLEMS["odd"], "any")):
        listed = [one for _, one in ranked(problem, device) if one.algorithm.kernel == "portable"]
        assert not any(isinstance(one.algorithm.work, Schedule) for one in listed)
        found = [one for one in of(problem, device, bits=bits) if " TMA" in str(replace(one, reason=""))]
        assert bool(found) == (offered and problem != PROBLEMS["odd"])
        for one in found:
            entry = records.Entry(one.algorithm, 1.0, 2.0, "2026-01-01", "x")
            assert records.read_entry(records.plain(entry)) == entry and launches_on(device, problem, one)


STEP = Progress(1, 3, PROBLEMS["middle"], 5, 24, select(PROBLEMS["middle"], HOPPER), 8.0, 8.4, 57.3)


def test_a_step_is_one_line() -> None:
    best = f"{STEP.best.kernel} {STEP.best.config}"
    assert shown.step_text(STEP) == f"1/3 512x1024x2048: 5 of 24 timed, best 8 us, +5.0 %: {best}; 57 s left"


def test_without_a_terminal_there_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    report = ShapeReport(PROBLEMS["middle"], 1, "refused", why="the GPU is too hot")
    with caplog.at_level(logging.INFO, "triton_gemm.tuning"), shown.shown(None, shown.step_text) as (progress, ended):
        assert progress is None
        ended(report)
    assert caplog.messages == ["512x1024x2048 bfloat16: refused: the GPU is too hot"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_progress(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown.shown(None, shown.step_text) as (progress, ended):
        progress(STEP)
        ended(ShapeReport(PROBLEMS["middle"], 1, "no time"))
    assert "512x1024x2048 bfloat16: no time" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with shown.shown(None, shown.step_text) as (progress, _):
        assert progress is None
    own = SimpleNamespace(messages=[])
    with shown.shown(own.messages.append, shown.step_text) as (progress, _):
        progress(STEP)
    assert own.messages == [STEP]
