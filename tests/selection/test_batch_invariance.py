"""Batch invariance: one class of bits for any number of rows, whoever chooses, and wherever it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_gemm
from tests.selection.test_bit_classes import problem_of
from tests.support import table_fakes
from tests.support.patches import replace_all
from tests.support.plan_fakes import FakePlan, take_plans_away
from tests.support.sums_by_hand import parts as parts_of
from tests.support.table_fakes import HOPPER
from tests.support.threads import at_once
from triton_gemm.arithmetic import ARITHMETICS
from triton_gemm.hardware.device import DeviceInfo, device_of_capability
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout, Request
from triton_gemm.runtime import plan, policies
from triton_gemm.runtime.policies import Policy, choose
from triton_gemm.selection import batch_invariance
from triton_gemm.selection.batch_invariance import class_of
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, about, illegal, launches, ranked

BF16 = torch.bfloat16
DEVICES = [HOPPER, *(device_of_capability(x) for x in ((8, 0), (8, 9), (10, 0), (12, 0)))]
ROWS = (*range(1, 18), 31, 33, 48, 64, 65, 100, 127, 128, 129, 200, 255, 256, 300, 384, 511, 512, 1024, 4096, 8192)

pytestmark = pytest.mark.usefixtures("default_policy")


def chosen(problem: GemmProblem, device: DeviceInfo = HOPPER) -> str:
    """The class of what is chosen."""
    return bit_class(problem, batch_invariance.select(problem, device))


def able(precision: str, device: DeviceInfo) -> bool:
    return device.capability >= ARITHMETICS[precision].capability


@st.composite
def layers(draw: st.DrawFn) -> tuple[GemmProblem, DeviceInfo]:
    """What does not depend on rows, with one row."""
    device = draw(st.sampled_from(DEVICES))
    arithmetic = draw(st.sampled_from([x for x in ARITHMETICS.values() if able(x.name, device)]))
    N, K = (draw(st.one_of(st.integers(1, 20), st.integers(1, 12_000))) for _ in range(2))
    fields: dict[str, object] = {"scales": None if arithmetic.plain else draw(st.sampled_from(arithmetic.scales))}
    if arithmetic.dtypes[0].itemsize > 1:
        fields |= {"has_beta": draw(st.booleans()), "activation": draw(st.sampled_from([None, *ACTIVATIONS]))}
        fields["groups"] = draw(st.sampled_from([None, None, None, "m"]))
        if fields["groups"]:
            fields |= {"has_beta": False, "activation": None}
    return problem_of(1, N, K, arithmetic.name, f"n{draw(st.sampled_from('nt'))}n", **fields), device


@st.composite
def with_rows(draw: st.DrawFn, problem: GemmProblem) -> GemmProblem:
    """Some rows, in some batch, and operands that lie anywhere."""
    M, batch = draw(st.sampled_from(ROWS)), draw(st.sampled_from([1, 1, 2, 7]))
    N, K = problem.N, problem.K

    def anywhere(rows: int, columns: int) -> Layout:
        pad, order = draw(st.sampled_from([1, 8, 128])), draw(st.sampled_from("nt"))
        row, column = -(-rows // pad) * pad + draw(st.sampled_from([0, 1])), -(-columns // pad) * pad
        strides = (column, 1) if order == "n" else (1, row)
        return Layout((batch * max(strides) * max(rows, columns) if batch > 1 else 0, *strides), draw(st.booleans()))

    a, c = anywhere(M, K), anywhere(M, N)
    a = Layout((0, *a.strides[1:]), a.aligned) if problem.groups else a
    c = Layout((0, *c.strides[1:]), c.aligned) if problem.groups else c
    b = problem.b if batch == 1 else Layout((N * K * 16, *problem.b.strides[1:]), draw(st.booleans()))
    return replace(problem, M=M, batch=batch, a=a, b=b, c=c)


@settings(deadline=None, max_examples=60)
@given(st.data(), layers())
def test_one_class_for_all_rows(data: st.DataObject, layer: tuple[GemmProblem, DeviceInfo]) -> None:
    """Any number of them, in any batch, wherever operands lie; and it has a legal candidate there."""
    problem, device = layer
    wanted = class_of(problem, device)
    for _ in range(3):
        rows = data.draw(with_rows(problem))
        assert class_of(rows, device) == wanted == chosen(rows, device)


@pytest.mark.parametrize("scales", ["tensor", "rows", "blocks"])
@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_a_class_has_a_candidate_for_operands_off_16_bytes(capability: tuple[int, int], scales: str) -> None:
    """In more warps: a thread has too few registers for the addresses of single elements otherwise."""
    device, warps = device_of_capability(capability), set()
    for M, N, K in ((1, 1, 336), (16, 4096, 4096), (4096, 576, 7168)):
        layer = problem_of(M, N, K, "fp8", "ntn", scales=scales)
        a, b, c = (replace(x, aligned=False) for x in (layer.a, layer.b, layer.c))
        problem = replace(layer, a=a, b=b, c=c)
        selection = batch_invariance.select(problem, device)
        assert bit_class(problem, selection) == class_of(layer, device)
        (launch,) = launches(problem, selection)
        assert 32 * launch.options["num_warps"] * launch.options["maxnreg"] <= 65_536, "an SM's registers"
        warps.add(launch.options["num_warps"])
    assert max(warps) > 4


@pytest.mark.few(shows=lambda precision, N, K: {precision})
@pytest.mark.parametrize("precision", ARITHMETICS)
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (576, 7168)])
def test_one_class_from_1_to_8192_rows(precision: str, N: int, K: int) -> None:
    layer = problem_of(1, N, K, precision)
    wanted = class_of(layer, HOPPER)
    assert {chosen(problem_of(M, N, K, precision)) for M in ROWS} == {wanted}


def test_what_the_class_depends_on() -> None:
    """Not on the rows' own bias, and on no tile."""
    layer = problem_of(1, 4096, 4096)
    assert class_of(layer, HOPPER) == "bf16, tensor cores, one sum along K"
    assert {chosen(problem_of(M, 1536, 512)) for M in range(1, 513)} == {"bf16, tensor cores, one sum along K"}
    assert class_of(replace(layer, bias="m"), HOPPER) == class_of(replace(layer, bias="n"), HOPPER)
    long = problem_of(1, 8192, 8192, "ieee")
    assert class_of(long, HOPPER) == "fp32 ieee, FMAs, fma, one sum along K"
    assert "parts" in class_of(problem_of(1, 576, 8192, "ieee"), HOPPER)


@pytest.mark.parametrize("M", [1, 64, 1024, 8192, 65_536])
@pytest.mark.parametrize(("N", "K"), [(576, 7168), (256, 7168), (1024, 8192), (1536, 7168)])
def test_few_columns_of_long_sums_are_cut_alike(M: int, N: int, K: int) -> None:
    """All tiles, into as many parts as N and K say, less time for few rows: programs share tiles where all parts run at
    once; else each sums the parts of its tiles in turn, without memory and counters."""
    problem = problem_of(M, N, K)
    selection = batch_invariance.select(problem, HOPPER)
    name = bit_class(problem, selection)
    assert name == class_of(problem_of(1, N, K), HOPPER)
    parts = int(name.split()[5])
    lengths = "128-deep tiles" if K // 128 % parts else K // parts
    assert name == f"bf16, tensor cores, K in {parts} parts of {lengths}" and parts in batch_invariance.PARTS
    ((cut, everywhere),) = parts_of(problem, selection).items()
    units = [i * (K // 128) // parts for i in range(parts + 1)]
    assert [(k.start, k.stop) for k in cut] == [(128 * i, 128 * j) for i, j in pairwise(units)] and everywhere.all()
    schedule, config = selection.schedule, selection.config
    if schedule.in_turn:
        (launch,) = launches(problem, selection)
        assert launch.workspace == launch.counters == 0 and f"{parts} parts in turn" in str(selection)
    else:
        assert schedule.programs == parts * schedule.split_tiles <= HOPPER.num_sms // config.ctas
    assert schedule.in_turn or M < 8192


@pytest.mark.parametrize(("N", "K"), [(576, 7168), (4096, 4096), (384, 3200)])
def test_what_is_left_out_would_not_have_been_chosen(N: int, K: int) -> None:
    """Only the class's own number of parts is compared: as if all had been."""
    for M in (1, 33, 300, 4096):
        problem = problem_of(M, N, K)
        selection, wanted = batch_invariance.select(problem, HOPPER), class_of(problem, HOPPER)
        for time, candidate in batch_invariance.ranked(problem, HOPPER):
            found = Selection.of(candidate, about(time, problem, HOPPER))
            if bit_class(problem, found) == wanted and illegal(problem, HOPPER, candidate) is None:
                assert found == selection
                break
        else:
            pytest.fail("no candidate is of the class")


@pytest.mark.parametrize("precision", ["half", "tf32", "bf16x6", "fp8", "fp8 fast"])
def test_what_is_cut_for_few_rows_is_summed_in_turn_for_many(precision: str) -> None:
    """Whatever multiplies."""
    layer = problem_of(1, 1024, 8192, precision)
    parts = class_of(layer, HOPPER).partition("K in ")[2].split()[0]
    for M in (4096, 65_536):
        selection = batch_invariance.select(problem_of(M, 1024, 8192, precision), HOPPER)
        assert selection.schedule.in_turn and selection.schedule.split_k == int(parts)


@pytest.mark.parametrize(("N", "K"), [(576, 7168), (4096, 4096)])
def test_default_products_have_no_parts_in_turn(N: int, K: int) -> None:
    """They gain nothing there: a whole sum takes less."""
    for M in ROWS:
        for _, (_, algorithm) in ranked(problem_of(M, N, K), HOPPER):
            assert not (isinstance(algorithm.work, Schedule) and algorithm.work.in_turn)


def test_the_message_names_too_many_rows() -> None:
    long = problem_of(1, 576, 8192, "ieee")
    with pytest.raises(RuntimeError, match=r"5000000 x 576 x 8192 batch-invariantly on sm_90.*FMAs.*fewer rows"):
        batch_invariance.select(replace(long, M=5_000_000), HOPPER)


def test_an_argument_a_block_and_the_environment_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few = problem_of(1, 4096, 4096)
    assert not choose(few, HOPPER).batch_invariant and choose(few, HOPPER).kernel in ("gemv", "skinny")
    assert bit_class(few, choose(few, HOPPER, invariant=True)) == class_of(few, HOPPER)
    with triton_gemm.batch_invariant():
        assert choose(few, HOPPER).batch_invariant and not choose(few, HOPPER, invariant=False).batch_invariant
        with triton_gemm.policy("model", bits="any"):
            assert policies.current_policy() == Policy("model", "any", True)
        with triton_gemm.batch_invariant(False):
            assert not choose(few, HOPPER).batch_invariant
        assert at_once(policies.current_policy) == [Policy()]
    monkeypatch.setenv("TRITON_GEMM_BATCH_INVARIANT", "1")
    table_fakes.read_environment_again()
    assert choose(few, HOPPER).batch_invariant
    triton_gemm.set_policy("model")
    assert policies.current_policy() == Policy("model", "same", True)
    with triton_gemm.batch_invariant(False):
        assert not choose(few, HOPPER).batch_invariant


def test_threads_of_a_backward_have_the_block_that_it_was_started_in(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = x(8, 64), x(64, 32)
    with triton_gemm.batch_invariant():
        started, within = copy_context(), plan.key_of(Request(), a, b, None)
    replace_all(monkeypatch, policies, context_of_backward=lambda: started, backward_here=lambda: 0)
    [found] = at_once(lambda: (policies.current_policy(), plan.key_of(Request(), a, b, None)))
    assert found == (Policy("cached", "same", True), within)


def test_explain_and_fingerprints_say_so() -> None:
    sizes = {"M": 2, "N": 4096, "K": 4096, "dtype": BF16, "device": "sm_90"}
    answer = triton_gemm.explain(**sizes, batch_invariant=True)
    assert answer.batch_invariant and answer.bits == "bf16, tensor cores, one sum along K"
    assert "bits: bf16, tensor cores, one sum along K, for any number of rows; chosen by the model" in str(answer)
    assert not triton_gemm.explain(**sizes).batch_invariant
    before = triton_gemm.selection_fingerprint(HOPPER, parts=True)
    with triton_gemm.batch_invariant():
        assert triton_gemm.explain(**sizes) == answer
        now = triton_gemm.selection_fingerprint(HOPPER, parts=True)
    assert {name for name in now if now[name] != before[name]} == {"policy"}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[FakePlan]:
    return take_plans_away(monkeypatch)


def x(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


ONE = torch.ones(())
OFFS = torch.tensor([3, 8], dtype=torch.int32)
CALLS: dict[str, Callable[..., object]] = {
    "matmul": lambda **how: triton_gemm.matmul(x(2, 8, 64), x(64, 32), **how),
    "matmul out": lambda **how: triton_gemm.matmul(x(8, 64), x(64, 32), out=x(8, 32), **how),
    "matmul of vectors": lambda **how: triton_gemm.matmul(x(64), x(64, 32), **how),
    "mm": lambda **how: triton_gemm.mm(x(8, 64), x(64, 32), torch.float32, **how),
    "bmm": lambda **how: triton_gemm.bmm(x(2, 8, 64), x(2, 64, 32), **how),
    "mv": lambda **how: triton_gemm.mv(x(8, 64), x(64), **how),
    "addmm": lambda **how: triton_gemm.addmm(x(32), x(8, 64), x(64, 32), **how),
    "addmm alpha": lambda **how: triton_gemm.addmm(x(8, 32), x(8, 64), x(64, 32), alpha=2, beta=3, **how),
    "baddbmm": lambda **how: triton_gemm.baddbmm(x(32), x(2, 8, 64), x(2, 64, 32), **how),
    "linear": lambda **how: triton_gemm.linear(x(2, 8, 64), x(32, 64), x(32), "gelu", **how),
    "Linear": lambda **how: triton_gemm.nn.Linear(64, 32, dtype=BF16, **how)(x(2, 8, 64)),
    "grouped_matmul": lambda **how: triton_gemm.grouped_matmul(x(8, 64), x(2, 64, 32), OFFS, **how),
    "grouped columns": lambda **how: triton_gemm.grouped_matmul(x(2, 32, 64), x(64, 8), OFFS, **how),
    "scaled_matmul": lambda **how: triton_gemm.scaled_matmul(
        x(16, 64, dtype=torch.float8_e4m3fn), x(64, 32, dtype=torch.float8_e4m3fn), ONE, ONE, **how
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_takes_it(name: str, planned: list[FakePlan]) -> None:
    """As an argument, in a block, twice each, and not afterwards."""
    for how in ({}, {"batch_invariant": True}):
        for _ in range(2):
            CALLS[name](**how)
    with triton_gemm.batch_invariant():
        for _ in range(2):
            CALLS[name]()
        CALLS[name](batch_invariant=False)
    CALLS[name]()
    assert [made.selection.batch_invariant for made in planned] == [False, True, True, False]
    for made in planned:
        if made.selection.batch_invariant:
            assert bit_class(made.problem, made.selection) == class_of(made.problem, HOPPER)


def test_what_is_added_to_one_row_is_what_is_added_to_more(planned: list[FakePlan]) -> None:
    """A matrix of C's shape is C even where it could be a bias for each column; a vector is a bias."""
    added = {M: x(M, 32) for M in (1, 8)}
    for M, c in added.items():
        triton_gemm.addmm(c, x(M, 64), x(64, 32), beta=3, batch_invariant=True)
        triton_gemm.addmm(c[0], x(M, 64), x(64, 32), beta=3, batch_invariant=True)
    triton_gemm.addmm(added[1], x(1, 64), x(64, 32), beta=3)
    added_as = [(made.problem.has_beta, made.problem.bias) for made in planned]
    assert added_as == [(True, None), (False, "n")] * 2 + [(False, "n")]
    assert len({bit_class(made.problem, made.selection) for made in planned[:4]}) == 1


def losses() -> dict[str, Callable[..., torch.Tensor]]:
    a, b, w = (x(*shape).requires_grad_() for shape in ((8, 64), (64, 32), (32, 64)))
    groups = x(2, 64, 32).requires_grad_()
    return {
        "matmul": lambda **how: triton_gemm.matmul(a, b, **how),
        "linear": lambda **how: triton_gemm.linear(a, w, x(32).requires_grad_(), "silu", **how),
        "twice": lambda **how: torch.autograd.grad(
            triton_gemm.matmul(a, b, **how).float().pow(2).sum(), a, create_graph=True
        )[0],
        "grouped_matmul": lambda **how: triton_gemm.grouped_matmul(a, groups, OFFS, **how),
    }


@pytest.mark.parametrize("scenario", ["argument", "block around the forward", "block around the backward"])
@pytest.mark.parametrize("name", losses())
def test_backwards_are_too(name: str, scenario: str, planned: list[FakePlan]) -> None:
    """In whatever thread they run."""
    forward, how = losses()[name], {"batch_invariant": True} if scenario == "argument" else {}
    with triton_gemm.batch_invariant() if scenario == "block around the forward" else nullcontext():
        result = forward(**how)
    before = len(planned)
    if scenario == "block around the backward":
        with triton_gemm.batch_invariant():
            result.float().sum().backward()
        del planned[:before]
    else:
        at_once(result.float().sum().backward)
    assert len(planned) >= (1 if scenario == "block around the backward" else 3)
    assert all(made.selection.batch_invariant for made in planned)


@pytest.mark.parametrize("scenario", ["argument", "block"])
def test_compiled_code_is_too(scenario: str, planned: list[FakePlan]) -> None:
    """An argument is part of the graph; a block counts where the graph runs, and needs no other graph."""
    how = {"batch_invariant": True} if scenario == "argument" else {}
    compiled = torch.compile(lambda a, b: triton_gemm.matmul(a, b, **how).relu(), fullgraph=True, backend="aot_eager")
    a, b = x(8, 64).requires_grad_(), x(64, 32).requires_grad_()
    compiled(a, b).sum().backward()
    assert len(planned) == 3 and all(made.selection.batch_invariant == (scenario == "argument") for made in planned)
    planned.clear()
    with torch.compiler.set_stance("fail_on_recompile"), triton_gemm.batch_invariant():
        compiled(a, b).sum().backward()
    assert len(planned) == 3 and all(made.selection.batch_invariant for made in planned)


class Exported(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return triton_gemm.matmul(a, b, batch_invariant=True)


def test_the_operator_has_it(planned: list[FakePlan]) -> None:
    """For torch.export, vmap and traces."""
    a, b = x(8, 64), x(64, 32)
    torch.ops.triton_gemm.gemm(a, b, batch_invariant=True)
    torch.vmap(lambda row: triton_gemm.matmul(row, b, batch_invariant=True))(x(3, 8, 64))
    graph = torch.export.export(Exported(), (a, b)).graph
    (node,) = (node for node in graph.nodes if node.target is torch.ops.triton_gemm.gemm.default)
    assert node.args[-1] is True and all(made.selection.batch_invariant for made in planned) and len(planned) == 2


def test_keys_differ() -> None:
    a, b = x(8, 64), x(64, 32)
    keys = [plan.key_of(Request(batch_invariant=flag), a, b, None) for flag in (None, True, False)]
    with triton_gemm.batch_invariant():
        keys.append(plan.key_of(Request(), a, b, None))
    assert len(set(keys)) == 4 and plan.key_of(Request(), a, b, None) == keys[0]
