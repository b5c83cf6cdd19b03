"""A thousand products drawn at random, the same every time; and planted bugs, which fuzzing finds and shrinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fuzz
from tests.fuzz import Calls, Step, as_test
from tests.support import random_products
from tests.support.patches import replace_all
from tests.support.random_products import OPERATIONS, SMALL, Problem, draw_problem
from tests.support.tiers import one
from triton_gemm.functional import ops
from triton_gemm.problem import Layout
from triton_gemm.runtime import plan
from triton_gemm.runtime.plan import InterpretedPlan
from triton_gemm.tuning import truth

PRODUCTS, SHARES = 1000, 10
Run = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_stays_planned() -> Iterator[None]:
    yield
    fuzz.forget()


@pytest.mark.few(shows=one)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("share", range(SHARES))
def test_a_thousand_products(share: int) -> None:
    end, number = Calls.products + PRODUCTS // SHARES, 1000 * share
    while Calls.products < end:
        fuzz.fuzz(number, 5, 20)
        number += 1


def test_every_kind_of_product_is_drawn() -> None:
    """Whatever a field may be, some problem of the GPU's pool has it, so that the field is not there for nothing."""
    pool = fuzz.pool()
    assert {problem.operation for problem in pool} == set(OPERATIONS)
    for name in ("dtype", "precision", "out_dtype", "batch", "orders", "gap", "step", "offset", "between", "out"):
        assert len({getattr(problem, name) for problem in pool}) > 1, name
    for name in ("added", "alpha", "beta", "activation", "scales", "fast", "ends", "batch_invariant", "candidate"):
        assert len({getattr(problem, name) for problem in pool}) > 1, name
    assert pool == sorted(pool, key=lambda problem: problem.cost)
    assert draw_problem(lambda options: options[0], SMALL) == Problem()


# --- Planted bugs ---


def by_torch(
    self: InterpretedPlan,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    auxiliary: tuple[torch.Tensor, ...] = (),
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """InterpretedPlan.run, in fp64: what a plan computes, quickly, and without torch's products, which may be routed
    here."""
    K = self.problem.K  # 0 where alpha is
    of = alpha * a[..., :K].double(), b[..., :K, :], c, *auxiliary
    c0 = c if beta else None
    c.copy_(truth.exact(self.problem, of, c0, beta, multiply=lambda a, b: (a[..., None] * b[..., None, :, :]).sum(-2)))


def as_planned(self: InterpretedPlan, *given: Any) -> tuple[Any, ...]:
    """What a call like one before gives to a plan, as matrices: it gives its own operands."""
    problem = self.problem
    if problem.groups:
        return given
    shapes = (problem.M, given[0].shape[-1]), (given[0].shape[-1], problem.N), (problem.M, problem.N)
    batch = (problem.batch,) * (problem.batch > 1)
    views = [
        x.as_strided((*batch, *shape), strides_of((*batch, *shape), layout), x.storage_offset())
        for x, shape, layout in zip(given, shapes, (problem.a, problem.b, problem.c), strict=False)
    ]
    return (*views, *given[3:])


def strides_of(shape: tuple[int, ...], layout: Layout) -> list[int]:
    """Of a dimension of size 1, which is never stepped along, those of a contiguous matrix."""
    strides = layout.strides[-len(shape) :]
    return [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]


def changed(change: Callable[..., Any]) -> Run:
    """A plan's run, but that `change(plan, a, b, c, auxiliary, alpha, beta)` gives other arguments."""
    return lambda self, *arguments: by_torch(self, *change(self, *_all(arguments)))


def after(change: Callable[..., Any]) -> Run:
    """A plan's run, after which `change(plan, a, b, c)` does something."""

    def run(self: InterpretedPlan, *arguments: Any) -> None:
        by_torch(self, *arguments)
        change(self, *arguments[:3])

    return run


def _all(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments, (), 1.0, 0.0)[:3] + arguments[3:] + ((), 1.0, 0.0)[len(arguments) - 3 :]


def leak(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """A NaN reaches the row after its own."""
    if not self.problem.groups and c.is_floating_point() and c.shape[-2] > 2:
        rows = c.isnan().all(-1)
        c[..., 1:, :][rows[..., :-1]] = torch.nan


def beyond(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """A row is stored a whole vector at a time."""
    if c.stride(-1) == 1 and c.shape[-1] % 2 and c.stride(-2) > c.shape[-1]:
        c.as_strided((1,), (1,), c.storage_offset() + c.shape[-1]).zero_()


def lost_tail(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    """One column of K beyond a whole k-tile is not summed."""
    plain = not (self.problem.groups or self.problem.scales)
    return (a[..., :-1], b[..., :-1, :], *rest) if plain and a.shape[-1] % 16 == 1 else (a, b, *rest)


def batch_of_one(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    """The batch's stride of b is taken for 0."""
    return (a, b[:1].expand_as(b) if b.dim() == 3 and not self.problem.groups else b, *rest)


def forgotten_alpha(self: InterpretedPlan, *given: Any) -> tuple[Any, ...]:
    *rest, alpha, beta = given
    return (*rest, 1.0 if self.problem.bias and alpha else alpha, beta)


def truncated(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """fp32 is rounded to tf32 where it was not asked for."""
    if c.dtype == torch.float32 and self.problem.precision == "ieee":
        c.copy_((c.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32))


def as_tf32(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """No bug: as accurate as tf32 is, in plans of tf32."""
    if self.problem.precision == "tf32":
        c.copy_((c.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32))


def zeroed_beyond(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Rows beyond the last group keep what was there."""
    if self.problem.groups == "m" and not c[-1].any():
        c[-1] = 1.0


def wrong_infinity(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Infinity times 0 is 0, as where zeros are skipped."""
    if c.is_floating_point() and not a.isnan().any() and not b.isnan().any():
        c.nan_to_num_(0.0, torch.inf, -torch.inf)


RUNS: dict[str, Run] = {
    "a-nan-leaks": after(leak),
    "stores-beyond-rows": after(beyond),
    "k-tail-lost": changed(lost_tail),
    "batch-stride-lost": changed(batch_of_one),
    "alpha-forgotten-with-a-bias": changed(forgotten_alpha),
    "less-precise-than-said": after(truncated),
    "rows-beyond-groups": after(zeroed_beyond),
    "zero-times-infinity": after(wrong_infinity),
    "writes-an-operand": after(lambda self, a, b, c: a.neg_() if self.problem.batch == 3 else None),
}

key_of = plan.key_of


def without(*left_out: int) -> Callable[..., tuple[Any, ...]]:
    """`plan.key_of` without some of its parts."""
    return lambda *given: tuple(x for i, x in enumerate(key_of(*given)) if i not in left_out)


KEYS = {"strides-not-in-the-key": without(7, 8), "fp32-setting-not-in-the-key": without(3)}


def found(monkeypatch: pytest.MonkeyPatch, run: Run) -> str | None:
    """What fuzzing prints of a bug in a plan's run, or None. hypothesis also draws the constants of loaded modules, so
    what a number finds depends on the tests before."""
    monkeypatch.setattr(InterpretedPlan, "run", lambda self, *given: run(self, *as_planned(self, *given)))
    for number in range(24):
        try:
            fuzz.fuzz(number, 40, 20)
        except AssertionError as error:
            return error.found
    return None


def run_pasted(test: str, folder: Path) -> None:
    """Runs the test as if it had been pasted."""
    space: dict[str, Any] = {}
    exec(compile(test, str(folder / "test_pasted.py"), "exec"), space)
    space["test_found_by_fuzzing"]()


@pytest.mark.parametrize("bug", ["unchanged", *RUNS])
def test_a_planted_bug_is_found_and_shrunk(bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test = found(monkeypatch, RUNS.get(bug, by_torch))
    if bug == "unchanged":
        assert test is None, test
        return
    assert test is not None
    steps = [line.strip() for line in test.splitlines() if "calls." in line and "teardown" not in line]
    assert len(steps) <= 2, test
    assert test.count("=") <= 16, f"not simple:\n{test}"
    with pytest.raises(AssertionError, match=r"wrong, by up to|were written"):
        run_pasted(test, tmp_path)
    monkeypatch.setattr(InterpretedPlan, "run", by_torch)
    run_pasted(test, tmp_path)


def of_its_plan(run: Run) -> Run:
    """A plan that trusts its problem, as compiled ones do: operands are read with the strides it was made for."""

    def found(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        if not self.problem.groups:
            a, b = (
                x.as_strided(x.shape, layout.strides[-x.dim() :])
                for x, layout in ((a, self.problem.a), (b, self.problem.b))
            )
        run(self, a, b, *rest)

    return found


@pytest.mark.parametrize("bug", KEYS)
def test_a_planted_bug_of_a_cache_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes several calls in an order; of few kinds of products, for it is rare."""
    replace_all(monkeypatch, random_products, OPERATIONS=("mm",), FLOATS=("float32",))
    monkeypatch.setattr(plan, "key_of", KEYS[bug])
    monkeypatch.setattr(ops.plan, "key_of", KEYS[bug])
    test = found(monkeypatch, of_its_plan(after(as_tf32)))
    assert test is not None and 2 <= test.count("calls.") - 1 <= 4, test


def test_a_test_to_paste_has_its_steps() -> None:
    assert as_test([Step("forget", {})]).splitlines()[-5:] == [
        *("    calls = Calls()", "    try:", "        calls.forget()", "    finally:", "        calls.teardown()")
    ]


# --- The command ---


def test_the_command_prints_a_failure_as_a_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(InterpretedPlan, "run", RUNS["k-tail-lost"])
    replace_all(monkeypatch, Calls, journal=None, deadline=Calls.deadline)
    assert fuzz.work(0, 1.0, tmp_path / "journal") == 1
    seen = capsys.readouterr()
    assert "def test_found_by_fuzzing() -> None:" in seen.err and "        calls.multiply(problem=Problem(" in seen.err
    assert " products; planned: " in seen.out
    assert "calls." in (tmp_path / "journal").read_text(), "a process that dies could not say what it did"


def test_the_command_shares_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--minutes", "0.1", "--jobs", "1", "--seed", "5"]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[0] == "fuzzing for 0.1 minutes, processes: 1, seed: 5"
    assert " products in " in printed[-2] and " on portable" in printed[-2]
    assert printed[-1] == "No wrong element, and no byte written elsewhere."
    assert fuzz.main(["--minutes", "0", "--jobs", "1"]) == 1, "nothing was shown"


def test_what_hypothesis_draws_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule's precondition holds after the deadline as before it, or replaying an example ends in an error."""
    calls = Calls()
    monkeypatch.setattr(fuzz, "DEVICE", "cuda")
    monkeypatch.setattr(Calls, "deadline", 0.0)
    before = Calls.products
    calls.capture(problem=Problem())
    assert len(calls.graphs) == 1
    calls.replay(which=0, values="normal", seed=0)
    calls.teardown()
    assert Calls.products == before
