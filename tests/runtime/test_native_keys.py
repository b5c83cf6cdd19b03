"""The key of C++'s table. No kernel is launched: a call is found if its launch fails."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import torch
import triton

from tests.runtime.test_native import SMALL, half
from tests.runtime.test_native import call as call
from tests.support.fake_driver import Driver
from tests.support.native_calls import CALL, Call
from tests.support.product_checks import fp32_precision
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.problem import SUM, Request
from triton_gemm.runtime import native, native_build, policies
from triton_gemm.selection import generation

pytestmark = pytest.mark.slow
B = torch.empty(4, 4, dtype=torch.bfloat16)
STEP = native.DriverLaunch(1, (1, 1, 1), 32, 0, 1, False, False, b"", (), (), (), (), ())
ENTRY = native.Entry(
    None, None, 0, native.Shape((4, 4), (4, 1), B.dtype), (), (32, 32, 32), False, False, 0, 0, 0, (0, 0), (STEP,)
)


@pytest.mark.parametrize("place", ["a", "b", "bias", "out"])
@pytest.mark.parametrize("first", [0, 8])
def test_whether_an_address_is_a_multiple_of_16_is_in_the_key(place: str, first: int, driver: Driver) -> None:
    table = native.table(native_build._module, 8)
    memory = torch.empty(64, dtype=B.dtype)
    assert memory.data_ptr() % 64 == 0

    def call(offset: int) -> tuple[Any, ...]:
        given = {"a": B, "b": B, "bias": B, "out": B.clone(), place: memory[offset // 2 :][:16].view(4, 4)}
        return "mm", given["a"], given["b"], (given["bias"],), SUM, given["out"], True

    assert table.keep(call(first), ENTRY)

    def is_found(offset: int) -> bool:
        try:
            return table.take(*call(offset)) is not None
        except RuntimeError as error:
            assert "illegal address" in str(error)  # of the launch
            return True

    found = [offset for offset in range(0, 64, 2) if is_found(offset)]
    assert found == [x for x in range(0, 64, 2) if (x % 16 == 0) == (first % 16 == 0)]


@pytest.mark.parametrize(
    "how",
    [{}, {"pdl": True}, {"cooperative": True}, {"cluster": 4}, {"pdl": True, "cooperative": True, "cluster": 2}],
    ids=str,
)
def test_the_driver_is_shown_what_python_shows_it(how: dict[str, Any], driver: Driver) -> None:
    """Which tests/runtime/test_step.py has."""
    step, table = STEP._replace(grid=(8, 4, 2), shared=5000, **how), native.table(native_build._module, 8)
    call = "mm", B, B, (), SUM, None, True
    assert table.keep(call, ENTRY._replace(steps=(step,))) and table.take(*call) is not None
    assert hardware_driver.launch(hardware_driver.launch_config(step), ctypes.c_void_p(step.function), None) == 0
    assert driver.seen == driver.by_python != []


A, B = SMALL
OTHERS = {
    "another shape": {"a": half(255, 512)},
    "other strides": {"b": B.T.contiguous().T},
    "an address that is no multiple of 16": {"a": half(1 + 256 * 512)[1:].view(256, 512)},
    "another dtype": {"a": A.half(), "b": B.half()},
    "a dtype for one operand": {"a": A.half()},
    "a subclass": {"a": A.as_subclass(type("Subclass", (torch.Tensor,), {}))},
    "no tensor": {"a": None},
    "a sparse tensor": {"a": torch.zeros(256, 512).to_sparse()},
    "a tensor without memory": {"a": A.to("meta"), "b": B.to("meta")},
    "a tensor without storage": {"a": torch._efficientzerotensor(256, 512, dtype=torch.bfloat16)},
    "a bias": {"auxiliary": (half(768),)},
    "an out": {"out": half(256, 768)},
    "another function": {"operation": "addmm"},
    "a function without a hash": {"operation": ["mm"]},
    "an activation": {"request": Request(beta=1, activation="relu")},
    "a precision": {"request": Request(beta=1, precision="ieee")},
    "no addend": {"request": Request()},
    "a factor of 0": {"request": Request(0.0, 1)},
    "a factor that is no number": {"request": Request(True, 1)},
    "a factor past fp64": {"request": Request(10**400, 1)},
    "no request": {"request": None},
    "auxiliary operands in a list": {"auxiliary": []},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_python_s(call: Call, name: str) -> None:
    call.fast.calls.clear()
    assert call.by_cpp() is not None
    with suppress(AttributeError, TypeError, OverflowError):  # that Python's way has for what is no operand
        assert call.take(**OTHERS[name]) is None
    assert not call.driver.seen or call.by_cpp(**{}) is not None
    call.driver.seen.clear()
    assert call.fast.table.take(*({name: getattr(call, name) for name in CALL} | OTHERS[name]).values()) is None
    assert not call.driver.seen and call.by_cpp() is not None


@contextmanager
def another_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    generation.advance()
    yield


@contextmanager
def a_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generation, "contexts", None)
    with policies.policy("model"):
        yield


@contextmanager
def the_policy_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the context has none."""
    monkeypatch.setattr(generation, "contexts", None)
    generation.set_in_contexts()
    monkeypatch.setattr(policies, "backward_here", lambda: 1)
    context = copy_context()
    context.run(policies._context.set, policies.Policy("model"))
    monkeypatch.setattr(policies, "context_of_backward", lambda: context)
    yield


@contextmanager
def a_hook(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chain = getattr(triton.knobs.runtime, where)
    chain.add(print)
    try:
        yield
    finally:
        chain.remove(print)


@contextmanager
def an_assigned_hook(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, where, print)
        yield


STATES: dict[str, Any] = {
    "another number of the state": another_state,
    "a policy": a_policy,
    "a backward's policy": the_policy_of_a_backward,
    "a hook before launches": partial(a_hook, "launch_enter_hook"),
    "a hook after launches": partial(a_hook, "launch_exit_hook"),
    "an assigned hook before launches": partial(an_assigned_hook, "launch_enter_hook"),
    "an assigned hook after launches": partial(an_assigned_hook, "launch_exit_hook"),
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_is_python_s(call: Call, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2 if "hook" in name else 1):  # a chain that was assigned back stands among the knobs' own attributes
        with STATES[name](monkeypatch):
            assert call.by_cpp() is None
            assert not call.driver.seen
        assert "hook" not in name or call.by_cpp() is not None


@pytest.mark.parametrize("by", ["Python", "C++"])
def test_a_policy_that_is_equal_is_the_same(by: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "contexts", None)
    call = Call(driver, *SMALL)
    with policies.policy("model"):
        call.plan()
    for name in policies.NAMES:
        with policies.policy(name):
            assert (call.by(by) is not None) == (name == "model")
    assert call.by(by) is None


def test_fp32_is_multiplied_as_torch_is_set(driver: Driver) -> None:
    call = Call(driver, torch.empty(64, 96), torch.empty(96, 80)).planned()
    with fp32_precision("tf32"):
        assert call.by_cpp() is None
    with fp32_precision("ieee"):
        assert call.by_cpp() is not None
