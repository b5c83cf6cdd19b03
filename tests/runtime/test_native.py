"""Calls like one before that C++ launches: the driver is shown what Triton's launcher would show it, and what an entry
does not cover is Python's."""

from __future__ import annotations

import dataclasses
import gc
import struct
import sys
import weakref
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from tests.support import fake_driver
from tests.support.fake_driver import Driver
from tests.support.native_calls import CALL, Call
from tests.support.tiers import one
from triton_gemm import compat
from triton_gemm.functional import fast_path
from triton_gemm.kernels.launch import TensorMap
from triton_gemm.problem import PRODUCT, Request
from triton_gemm.runtime import native, plan, workspace
from triton_gemm.runtime.step import parameters_of
from triton_gemm.selection import generation

pytestmark = pytest.mark.slow


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


CASES = {
    "warp_specialised": (half(256, 512), half(512, 768), ()),
    "warp_specialised swapped, bias": (half(256, 512), half(512, 768), (half(768),)),
    "warp_specialised in parts": (half(64, 8192), half(8192, 256), ()),
    "warp_specialised repacked": (half(200, 333), half(333, 111), ()),
    "warp_specialised of a batch": (half(3, 256, 512), half(3, 512, 768), ()),
    "gemv": (half(1, 4096), half(4096, 4096), ()),
    "skinny": (half(8, 4096), half(4096, 4096).T, ()),
    "portable": (torch.empty(64, 96), torch.empty(96, 80), (torch.empty(80),)),
    "portable fp64": (torch.empty(64, 96, dtype=torch.float64), torch.empty(96, 80, dtype=torch.float64), ()),
}
SMALL = half(256, 512), half(512, 768)


@pytest.fixture
def call(driver: Driver) -> Call:
    """One that C++ makes from now on."""
    return Call(driver, *SMALL).planned()


def comparable(driver: Driver, found: plan.GemmPlan, launches: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Parameters without the addresses of memory that each call makes for itself."""
    made = {x.name for step in found.steps for x in step.launch.temporaries}
    shown: list[list[bytes]] = []
    for step, parameters in zip(found.steps, launches, strict=True):
        remaining, shown = iter(parameters), [*shown, []]
        kernel = driver.kernels[step.entry.function]
        for part, kind in zip(step.launch.arguments.values(), kernel.src.signature.values(), strict=True):
            if isinstance(part, TensorMap):
                several = list(islice(remaining, 1 + 2 * len(part.shape)))
            else:
                several = [] if kind == "constexpr" else [next(remaining)]
            if getattr(part, "operand", None) in made:
                several[0] = several[0][8:]
            shown[-1] += several
        shown[-1] += remaining
    return shown


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("name", CASES)
def test_the_driver_is_shown_what_triton_shows_it(driver: Driver, name: str) -> None:
    a, b, auxiliary = CASES[name]
    call = Call(driver, a, b, auxiliary, Request(0.75, 1), out=a.new_empty((*a.shape[:-1], b.shape[-1])))
    found = call.plan()
    assert name.split()[0] == found.selection.kernel
    _, expected = call.by_python(request=Request(0.3, 1))
    assert call.by_cpp(request=Request(0.3, 1)) is call.out
    assert comparable(driver, found, [x.parameters for x in driver.seen]) == comparable(driver, found, expected)
    for step, *seen in zip(found.steps, driver.seen, driver.by_python or driver.seen, strict=True):
        kernel = driver.kernels[step.entry.function]
        expected = fake_driver.launched(kernel, step.launch.grid, step.launch.cluster)
        assert [(x.grid, x.block, x.shared, x.attributes) for x in seen] == 2 * [expected]
        parameters = parameters_of(compat.machine_code(kernel), step.launch, step.places)
        assert list(parameters.types) == [*fake_driver.types_of(kernel), "*i8", "*i8"]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("vectors", [(), (half(768),)])
@pytest.mark.parametrize("shape", [(256, 768), (256, 1), (768,)], ids=str)
def test_what_is_added_is_copied_first(
    driver: Driver, shape: tuple[int, ...], vectors: tuple[torch.Tensor, ...], given: bool
) -> None:
    out = torch.zeros(256, 768, dtype=torch.bfloat16) if given else None
    call = Call(driver, *SMALL, (*vectors, half(*shape)), Request(0.75, 1), out=out, copies=True)
    assert call.plan().problem.has_beta
    added = torch.randn(shape).bfloat16()
    others: dict[str, Any] = {"auxiliary": (*vectors, added), "request": Request(0.3, 1)}
    made, expected = call.by_python(**others)
    assert torch.equal(made, added.expand(256, 768))
    if out is not None:
        out.zero_()
    version = 0 if out is None else out._version
    c = call.by_cpp(**others)
    assert c is not None and torch.equal(c, added.expand(256, 768)) and (out is None or c is out)
    assert c._version == version, "as the dispatcher's kernels leave it"
    of_python, of_cpp = (struct.pack("Q", x.data_ptr()) for x in (made, c))
    [seen], [parameters] = driver.seen, expected
    assert struct.pack("f", 1.0) in parameters  # beta
    assert [of_python + x[8:] if x[:8] == of_cpp else x for x in seen.parameters] == list(parameters)


# --- Results and operands ---


def test_a_result_is_made_as_by_python(driver: Driver) -> None:
    for a, b in (SMALL, (half(3, 64, 128), half(3, 128, 256)), (torch.empty(64, 96), torch.empty(96, 80))):
        call = Call(driver, a, b).planned()
        expected, _ = call.by_python()
        c = call.by_cpp()
        assert c is not None and type(c) is torch.Tensor and not c.requires_grad
        assert (c.shape, c.stride()) == (expected.shape, expected.stride())
        assert (c.dtype, c.device) == (expected.dtype, expected.device)
        assert c.data_ptr() in [int.from_bytes(x, "little") for x in driver.seen[0].parameters if len(x) == 8]
        with torch.inference_mode():
            c = call.by_cpp()
            assert c is not None and c.is_inference()


def test_a_workspace_is_requested_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until kept workspaces change. Under capture, and if launches of a stream may not share it, each call does."""
    call = Call(driver, *CASES["warp_specialised in parts"], out=half(64, 256))
    sums, requests, shared = native.workspace(0, 0, 0), [], [False]
    monkeypatch.setattr(native, "workspace", lambda *_: requests.append(None) or sums)
    monkeypatch.setattr(native, "is_of_stream", lambda *_: shared[0])
    assert call.plan().shares

    def requests_of_two_calls() -> int:
        before = len(requests)
        for _ in range(2):
            _, expected = call.by_python()
            assert call.by_cpp() is not None
            assert driver.seen[0].parameters == expected[0]
        return len(requests) - before

    assert requests_of_two_calls() == 2
    shared[0] = True
    assert requests_of_two_calls() == 1 and requests_of_two_calls() == 0
    driver.capturing = True
    assert requests_of_two_calls() == 2
    driver.capturing = False
    assert requests_of_two_calls() == 0
    for changed in workspace._followers:
        changed()
    assert requests_of_two_calls() == 1


@pytest.mark.parametrize("alpha", [1, 2, -0.5, 1e30, 1e300, float("inf"), 3.0])
def test_operands_may_lie_anywhere_and_factors_are_those_of_the_call(call: Call, alpha: float) -> None:
    call.out = half(256, 768)
    call.plan()
    for a, b, out in ((call.a, call.b, call.out), (half(256, 512), half(512, 768), half(256, 768))):
        others = {"a": a, "b": b, "out": out, "request": Request(alpha, 1)}
        _, expected = call.by_python(**others)
        assert call.by_cpp(**others) is out
        assert call.driver.seen[0].parameters == expected[0]


# --- What the dispatcher has seen to, and else is looked at here ---


@pytest.fixture
def undispatched(driver: Driver) -> Call:
    return Call(driver, *SMALL, operation="matmul", request=PRODUCT, dispatched=False).planned()


def test_a_users_call_is_checked_for_gradients_and_modes(undispatched: Call) -> None:
    call = undispatched
    assert call.by_cpp() is not None
    parameter = torch.nn.Parameter(call.a)
    assert call.by_cpp(a=parameter) is None, "with gradients a call is another"
    [known] = call.fast.calls.values()
    key, _ = call.fast.take(**{name: getattr(call, name) for name in CALL} | {"a": parameter})
    call.fast.keep(key, dataclasses.replace(known, offered=False))
    call.take(a=parameter)
    assert (c := call.by_cpp(a=parameter)) is not None and c.grad_fn is not None
    with torch.no_grad():
        assert (c := call.by_cpp(a=parameter)) is not None and c.grad_fn is None
    assert call.by_cpp(a=torch._neg_view(call.a)) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call.by_cpp() is not None  # as for Python, CPU's autocast is not CUDA's
    with torch.autograd.forward_ad.dual_level():
        assert call.by_cpp() is None
    assert call.by_cpp() is not None


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("by", ["Python", "C++"])
def test_writes_are_counted_and_allowed(by: str, dispatched: bool, driver: Driver) -> None:
    """Unless the dispatcher has seen to both. Who checks refuses what may not be written outside of inference mode."""
    call = Call(driver, *SMALL, request=PRODUCT, out=half(256, 768), dispatched=dispatched).planned()
    before = call.out._version
    assert call.by(by) is call.out and call.out._version == before + (not dispatched)
    with torch.inference_mode():
        out = half(256, 768)
    assert (call.by(by, out=out) is not None) == dispatched


@pytest.mark.parametrize("which", ["a", "b", "auxiliary"])
def test_an_out_that_overlaps_an_operand_is_python_s(driver: Driver, which: str) -> None:
    memory = half(4 << 19)
    places = {"a": (256, 512), "b": (512, 768), "out": (256, 768)}
    a, b, out = (memory[at << 19 :][: M * N].view(M, N) for at, (M, N) in enumerate(places.values()))
    call = Call(driver, a, b, (half(768),), out=out).planned()
    assert call.by_cpp() is out
    if which == "auxiliary":
        assert call.by_cpp(auxiliary=(memory[3 << 19 :][:768],)) is None
        return
    first, x = {"a": (0, a), "b": (1 << 19, b)}[which]
    for at, overlaps in ((x.numel() - 8, True), (x.numel(), False)):
        shifted = memory[first + at :][: out.numel()].view(out.shape)
        assert (call.by_cpp(out=shifted) is None) == overlaps


# --- The table ---


@pytest.mark.parametrize("by", ["answers", "refused"])
def test_what_the_driver_refuses_is_triton_s_error(call: Call, by: str) -> None:
    """The driver refuses a launch, or a tensor map's address, without which nothing is launched. A thread without a
    context gets one first."""
    errors = getattr(call.driver, by)
    for refused, contexts in (([700], []), ([201, 201], [-1])):
        errors.extend(refused)
        call.driver.contexts.clear()
        with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: an illegal address$"):
            call.by_cpp()
        assert len(call.driver.seen) == len(refused) * (by == "answers") and call.driver.contexts == contexts
    errors.append(201)
    assert call.by_cpp() is not None and len(call.driver.seen) == 1 + (by == "answers")


def test_the_oldest_calls_are_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    call = Call(driver, *SMALL)
    for operation in range(5):
        call.operation = operation
        call.plan()
    assert [call.by_cpp(operation=operation) is not None for operation in range(5)] == [False, False, True, True, True]


def test_nothing_is_kept_alive(driver: Driver) -> None:
    call = Call(driver, *SMALL)
    found = weakref.ref(call.plan())
    references = [sys.getrefcount(x) for x in (None, call.a, call.request, call.operation)]
    for _ in range(1000):
        call.take()
    after = [sys.getrefcount(x) for x in (None, call.a, call.request, call.operation)]
    assert all(x <= y + 50 for x, y in zip(after, references, strict=True))
    driver.by_python.clear()
    call.fast.calls.clear()
    gc.collect()
    assert found() is not None
    call.fast.table.forget()
    gc.collect()
    assert found() is None
    call.plan()
    call.fast = fast_path.FastPath()


def test_a_change_meanwhile_keeps_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of = native.entry_of

    def and_advance(*arguments: Any) -> Any:
        generation.advance()
        return entry_of(*arguments)

    monkeypatch.setattr(native, "entry_of", and_advance)
    call = Call(driver, *SMALL)
    call.plan()
    assert call.by_cpp() is None
