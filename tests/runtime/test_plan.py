"""Plans without a GPU: what shares one, what their caches hold, and which memory they take operands to span."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fake_driver
from tests.support.patches import replace_all
from tests.support.product_checks import fp32_precision
from tests.support.threads import at_once
from tests.support.tiers import one
from triton_gemm.functional import api, calls, fast_path
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.kernels.launch import Launch
from triton_gemm.problem import GemmProblem, Layout, Request
from triton_gemm.runtime import plan, step
from triton_gemm.selection.select import select

HALF = torch.float16


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=HALF)


# --- Layouts: what cannot matter makes no difference ---

SIZES = st.integers(1, 5)


@st.composite
def windows(draw: st.DrawFn, shape: tuple[int, ...], buffer: torch.Tensor | None = None) -> torch.Tensor:
    """A view of that shape with any strides, zero included, somewhere in a buffer."""
    if buffer is None:
        buffer = torch.empty(4096, dtype=HALF)
    strides = [draw(st.sampled_from([0, 1, 2, 3, 8, 16, 40])) for _ in shape]
    return buffer.as_strided(shape, strides, draw(st.sampled_from([0, 1, 8, 100, 333])))


@given(st.data(), st.tuples(SIZES, SIZES, SIZES))
def test_strides_that_are_never_stepped_along_make_no_difference(data: st.DataObject, shape: tuple[int, ...]) -> None:
    x = data.draw(windows(shape))
    other = [data.draw(st.integers(0, 50)) if size == 1 else s for size, s in zip(shape, x.stride(), strict=True)]
    assert Layout.of(x.as_strided(shape, other, x.storage_offset())) == Layout.of(x)


@given(st.data(), st.tuples(SIZES, SIZES, SIZES))
def test_a_layout_leads_to_the_same_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    x = data.draw(windows(shape, torch.arange(4096)))
    layout = Layout.of(x)
    assert layout.aligned == (x.data_ptr() % 16 == 0)
    assert torch.equal(x.as_strided(shape, layout.strides, x.storage_offset()), x)


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        pytest.param(half(3, 5), (0, 5, 1), id="row-major"),
        pytest.param(half(5, 3).T, (0, 1, 3), id="column-major"),
        pytest.param(half(1, 5), (0, 16, 1), id="one row"),
        pytest.param(half(5, 7)[:, 2:3], (0, 7, 1), id="a column of many"),
        pytest.param(half(5, 1), (0, 1, 5), id="one column"),
        pytest.param(half(1, 1), (0, 16, 1), id="one element"),
        pytest.param(half(1, 3, 5), (0, 5, 1), id="a batch of one"),
        pytest.param(half(3, 5).expand(4, 3, 5), (0, 5, 1), id="one matrix for all"),
        pytest.param(half(3, 4, 5).transpose(0, 1), (5, 20, 1), id="matrices between one another's rows"),
    ],
)
def test_strides_as_kernels_get_them(x: torch.Tensor, strides: tuple[int, int, int]) -> None:
    assert Layout.of(x).strides == strides


@pytest.mark.parametrize("columns", [1, 7, 8, 100])
def test_tma_reads_one_row_of_any_length(columns: int) -> None:
    assert Layout.of(half(1, columns)).tma_illegal(2) is None


@given(st.data(), st.tuples(SIZES, SIZES, SIZES))
def test_swapping_twice_changes_nothing(data: st.DataObject, sizes: tuple[int, int, int]) -> None:
    M, N, K = sizes
    a, b, c = (data.draw(windows(shape)) for shape in ((M, K), (K, N), (M, N)))
    problem = GemmProblem.of(a, b, c, has_beta=True, bias="m", activation="relu")
    assert problem.swap_ab().swap_ab() == problem
    assert (problem.swap_ab().M, problem.swap_ab().N, problem.swap_ab().bias) == (N, M, "n")


# --- What shares a plan ---


def operand(shape: tuple[int, ...], strides: tuple[int, ...], address: int = 1024, **changes: Any) -> SimpleNamespace:
    """What a plan's key sees of a tensor, on any device."""
    values = {"dtype": HALF, "device": 0, **changes}
    return SimpleNamespace(
        shape=shape,
        dtype=values["dtype"],
        stride=lambda: strides,
        data_ptr=lambda: address,
        untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: address),
        get_device=lambda: values["device"],
    )


A, B, C = ((64, 32), (32, 1)), ((32, 48), (48, 1)), ((64, 48), (48, 1))
BASE: dict[str, Any] = {"a": operand(*A), "b": operand(*B), "c": operand(*C)}
BIAS = operand((48,), (1,))
OTHERS: dict[str, dict[str, Any]] = {
    "another-m": {"a": operand((65, 32), (32, 1))},
    "another-n": {"b": operand((32, 49), (48, 1))},
    "strides-of-a": {"a": operand((64, 32), (1, 64))},
    "strides-of-b": {"b": operand((32, 48), (1, 32))},
    "strides-of-c": {"c": operand((64, 48), (1, 64))},
    "alignment-of-a": {"a": operand(*A, 1026)},
    "alignment-of-b": {"b": operand(*B, 1026)},
    "alignment-of-c": {"c": operand(*C, 1026)},
    "dtype": {name: operand(*x, dtype=torch.bfloat16) for name, x in (("a", A), ("b", B), ("c", C))},
    "dtype-of-c": {"c": operand(*C, dtype=torch.float32)},
    "device": {name: operand(*x, device=1) for name, x in (("a", A), ("b", B), ("c", C))},
    "beta": {"beta": 0.5},
    "no-product": {"alpha": 0.0},
    "activation": {"activation": "relu"},
    "another-activation": {"activation": "gelu"},
    "bias": {"bias": BIAS},
    "bias-of-rows": {"bias": BIAS, "axis": "m"},
    "alignment-of-bias": {"bias": operand((48,), (1,), 1026)},
    "dtype-of-bias": {"bias": operand((48,), (1,), dtype=torch.float32)},
    "beta-and-bias": {"beta": 0.5, "bias": BIAS},
    **{f"precision-{mode}": {"precision": mode} for mode in ("fp8", "fp8 fast")},
    **{f"scales-{kind}": {"scales": kind} for kind in ("tensor", "rows", "blocks")},
    **{f"groups-{dim}": {"groups": dim} for dim in ("m", "k")},
}


def key_of(a: Any, b: Any, c: Any, bias: Any = None, axis: str = "n", **how: Any) -> tuple[Any, ...]:
    if bias is None:
        return plan.key_of(Request(**how), a, b, c)
    return plan.key_of(Request(**how, bias=axis), a, b, c, (bias,))


@pytest.mark.parametrize("made", [{}, {"c": None}], ids=["into c", "c is made"])
def test_what_matters_has_a_plan_of_its_own(made: dict[str, Any]) -> None:
    names_of: dict[Any, list[str]] = {}
    for name, change in {"base": {}, **OTHERS}.items():
        if not made or change.keys() != {"c"}:
            names_of.setdefault(key_of(**{**BASE, **change, **made}), []).append(name)
    assert [names for names in names_of.values() if len(names) > 1] == [] and len(names_of) > 20


@pytest.mark.parametrize("case", ["a into c", "b into c", "c into c", "a, c is made", "b, c is made"])
def test_alignment_is_that_of_16_bytes(case: str) -> None:
    name, base = case[0], {**BASE, "c": None} if "made" in case else BASE
    kept = {"a": A, "b": B, "c": C}[name]
    keys = {offset: key_of(**{**base, name: operand(*kept, 1024 + offset)}) for offset in (0, 1, 2, 4, 8, 12, 16, 32)}
    assert keys[0] == keys[16] == keys[32] and keys[1] == keys[2] == keys[4] == keys[8] == keys[12] != keys[0]


def test_another_batch_has_a_plan_of_its_own() -> None:
    """Even where operands do not show it: matrices of which each batch takes the same."""
    one, other = (operand((batch, 64, 48), (64 * 48, 48, 1)) for batch in (2, 3))
    for a, b in ((BASE["a"], BASE["b"]), (operand((1, *A[0]), (0, *A[1])), operand((1, *B[0]), (0, *B[1])))):
        assert key_of(a, b, one) != key_of(a, b, other)


def test_addresses_and_factors_share_a_plan() -> None:
    """They are read at the launch; of a factor of 0 there is nothing to read."""
    assert key_of(operand(*A, 2048), operand(*B, 4096), operand(*C, 16)) == key_of(**BASE)
    assert key_of(**BASE, alpha=0.5) == key_of(**BASE) == key_of(**BASE, alpha=2)
    assert key_of(**BASE, beta=0.5) == key_of(**BASE, beta=1) == key_of(**BASE, alpha=-1, beta=float("nan"))


def test_torchs_precision_matters_to_fp32_only() -> None:
    single = {name: operand(*x, dtype=torch.float32) for name, x in (("a", A), ("b", B), ("c", C))}
    keys = {}
    for precision in ("ieee", "tf32"):
        with fp32_precision(precision):
            keys[precision] = key_of(**single), key_of(**BASE)
    assert keys["ieee"][0] != keys["tf32"][0]
    assert keys["ieee"][1] == keys["tf32"][1]


def test_the_same_key_means_the_same_problem() -> None:
    """Of all small products in a few layouts."""
    buffer = torch.empty(64, dtype=HALF)
    problems: dict[Any, GemmProblem] = {}
    views = list(itertools.product([(1, 2), (2, 1), (8, 1)], [0, 8, 16, 17]))
    for M, N, K in itertools.product([1, 2], repeat=3):
        for a, b, c in itertools.product(views, repeat=3):
            shapes = ((M, K), (K, N), (M, N))
            tensors = [buffer.as_strided(shape, *view) for shape, view in zip(shapes, (a, b, c), strict=True)]
            problem = GemmProblem.of(*tensors)
            assert problems.setdefault(key_of(*tensors), problem) == problem


# --- Caches are bounded ---


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_all(monkeypatch, plan, PLANS={}, MAX_PLANS=8)


def plan_of(M: int) -> plan.Plan:
    return plan.plan_for(half(M, 32), half(32, 48), half(M, 48))


def test_plans_are_found_again_and_few_are_kept(few: None) -> None:
    plans = [plan_of(M) for M in range(1, 30)]
    assert len(plan.PLANS) == plan.MAX_PLANS
    assert plan_of(29) is plans[-1]
    assert plan_of(1) is not plans[0]
    assert len(plan.PLANS) == plan.MAX_PLANS


def plan_without_a_gpu(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> plan.GemmPlan:
    problem = GemmProblem.of(a, b, c)
    chosen = select(problem, INTERPRETER)
    whole = replace(chosen, algorithm=chosen.algorithm._replace(work=1))
    return plan.GemmPlan(problem, whole, torch.device("cpu"))


class FakeStep:
    """A step that needs no GPU: notes the addresses and the scalars that it is run on."""

    launch = SimpleNamespace(
        temporaries=(), kernel=SimpleNamespace(__name__="fake", params=()), arguments={}, options={}
    )

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def compile(self, operands: Any) -> None:
        pass

    def call(self, stream: int, values: Sequence[Any]) -> None:
        self.calls.append((*values[2:], *values[:2]))


def hand_over(frame: FrameType, event: str, _: object) -> Any:
    """As a thread's trace function: lets others run after every instruction of the code under test."""
    if frame.f_code.co_filename not in (plan.__file__, api.__file__, calls.__file__, fast_path.__file__):
        return None
    frame.f_trace_opcodes = True
    time.sleep(0)
    return hand_over


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("what", ["plans", "keys", "fast"])
def test_threads_may_fill_a_full_cache(what: str, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drops the oldest entry while others do so."""
    fake_driver.launch_on_device_0(monkeypatch)
    replace_all(monkeypatch, plan, _new_plan=lambda *_: object(), multiply=lambda *how: plan.plan_for(*how))
    monkeypatch.setattr(api, "_fast", fast_path.FastPath())
    monkeypatch.setattr(api.rules, "computable", lambda *_, **__: None)
    a, b, c = half(64, 32), half(32, 48), half(64, 48)
    made = plan_without_a_gpu(a, b, c)
    made.steps = [FakeStep()]
    kept: dict[Any, Any] = {}

    def fill(thread: int) -> None:
        for i in range(100):
            if what == "plans":
                plan_of(1 + 100 * thread + i)
            elif what == "keys":
                plan.keep(kept, 100 * thread + i, None, 8)
                assert len(kept) < 8 + 4
            else:
                x = half(1 + 100 * thread + i, 32)
                plan.PLANS[key_of(x, b, half(x.shape[0], 48))] = made
                api.matmul(x, b)

    threading.settrace(hand_over)
    try:
        at_once(*(partial(fill, thread) for thread in range(4)))
    finally:
        threading.settrace(None)


def test_threads_with_the_same_new_problem_share_one_plan(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one of them makes, and one of them compiles."""
    made: list[object] = []

    def slowly(*_: object) -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(plan, "_new_plan", slowly)
    found: list[object] = []
    at_once(*16 * [lambda: found.append(plan_of(5))])
    assert len(made) == 1 and found == 16 * made

    fake_driver.take_driver(monkeypatch)
    launch, compiled = Launch(None, (1, 1, 1), {}, {}), []
    one_of_them = step.Step(launch, ())

    def compile_slowly(*_: object) -> None:
        time.sleep(0.05)
        compiled.append(threading.get_ident())

    replace_all(monkeypatch, step, compiled=compile_slowly, machine_code=lambda _: fake_driver.made_up(launch))
    at_once(*16 * [lambda: one_of_them.compile({})])
    assert len(compiled) == 1 and one_of_them.call is not None


# --- The memory that operands span ---


def span(x: torch.Tensor) -> range:
    """The bytes from the first of x's elements to the end of its last."""
    offsets = [0]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return range(x.data_ptr() + x.itemsize * min(offsets), x.data_ptr() + x.itemsize * (max(offsets) + 1))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.tuples(SIZES, SIZES, SIZES))
def test_overlap_is_that_of_the_bytes_between_first_and_last(data: st.DataObject, sizes: tuple[int, int, int]) -> None:
    M, N, K = sizes
    batch = data.draw(st.sampled_from([(), (1,), (3,)]))
    buffer = torch.empty(4096, dtype=HALF)
    a, b, c = (data.draw(windows((*batch, *shape), buffer)) for shape in ((M, K), (K, N), (M, N)))
    made = plan_without_a_gpu(a, b, c)
    assert made.extents == tuple(len(span(x)) for x in (a, b, c))

    def meets(x: torch.Tensor) -> bool:
        return span(x).start < span(c).stop and span(c).start < span(x).stop

    assert made.overlap(a, b, c) == (meets(a) or meets(b))


def test_neighbours_do_not_overlap() -> None:
    buffer = torch.empty(3 * 6, dtype=HALF)
    first, middle, last = (buffer[i : i + 6].view(2, 3) for i in (0, 6, 12))
    made = plan_without_a_gpu(first, last.T, middle[:, :2])
    assert not made.overlap(first, last.T, middle[:, :2])
