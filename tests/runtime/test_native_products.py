"""torch's products that the extension launches without Python: which it does, and that all else goes on to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import flop_counter

import triton_gemm
from tests.support import fake_driver
from tests.support.fake_driver import Driver
from tests.support.native_calls import Call
from tests.support.patches import replace_all
from tests.support.processes import python
from triton_gemm.functional import fast_path, native_products, ops, routing
from triton_gemm.functional.native_products import Places
from triton_gemm.runtime import native

pytestmark = pytest.mark.slow

A, B, BIAS, OUT = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((256, 512), (512, 768), (768,), (256, 768)))
BATCHES = [x[None].expand(3, *x.shape).contiguous() for x in (A, B, OUT)]
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.mm(A, B),
    "mm.out": lambda: torch.mm(A, B, out=OUT),
    "addmm": lambda: torch.addmm(BIAS, A, B),
    "addmm.out": lambda: torch.addmm(BIAS, A, B, beta=1.0, alpha=0.5, out=OUT),
    "bmm": lambda: torch.bmm(BATCHES[0], BATCHES[1]),
    "bmm.out": lambda: torch.bmm(BATCHES[0], BATCHES[1], out=BATCHES[2]),
    "baddbmm": lambda: torch.baddbmm(BIAS, BATCHES[0], BATCHES[1]),
    "baddbmm.out": lambda: torch.baddbmm(BIAS, BATCHES[0], BATCHES[1], out=BATCHES[2]),
}


def route(patch: pytest.MonkeyPatch, extension: str | Path) -> Driver:
    """Makes `use()` route products of CPU tensors to plans for Hopper."""
    found = fake_driver.install(patch, Path(extension))
    patch.setattr(native, "built", native.module)
    patch.setattr(routing._overrides, "_key", "CPU")
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    return found


@pytest.fixture
def driver(extension: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Products of CPU tensors are routed to plans for Hopper. No call was made before."""
    found = route(monkeypatch, extension)
    routing._made_under.cache_clear()
    triton_gemm.report_routing(reset=True)
    yield found
    routing._unregister()
    routing._made_under.cache_clear()


def make_known(driver: Driver, overload: str) -> None:
    """Has calls of CALLS be like one before, which Python has launched. In `use()`."""
    batched, given = "bmm" in overload, overload.endswith(".out")
    a, b, c = BATCHES if batched else (A, B, OUT)
    auxiliary = (BIAS,) if "add" in overload else ()
    fast = routing._rules[-1].fast
    Call(driver, a, b, auxiliary, out=c if given else None, operation=overload, fast=fast).plan()


def launched() -> dict[str, int]:
    """The overloads that C++ launched since it was asked, and how often."""
    return {name: count for name, count in routing._by_cpp.launched(True).items() if count}


@pytest.mark.parametrize("overload", CALLS)
def test_a_product_is_launched_without_python(driver: Driver, overload: str) -> None:
    call = CALLS[overload]
    with triton_gemm.use():
        make_known(driver, overload)
        assert launched() == {}
        count = len(driver.by_python)
        driver.seen.clear(), driver.by_python.clear()
        c, out = call(), BATCHES[2] if "bmm" in overload else OUT
        assert (c.shape, c.stride()) == (out.shape, c.contiguous().stride())
        assert overload.endswith(".out") == (c is out)
        assert not driver.by_python and len(driver.seen) == count
        by_cpp = [x.parameters for x in driver.seen]
        routing._rules[-1].fast.table.forget()
        if overload.endswith(".out"):
            call()
            assert by_cpp == [x.parameters for x in driver.by_python]
        expected = 1 + overload.endswith(".out")
        assert triton_gemm.report_routing(reset=True)[overload.removesuffix(".out"), "triton_gemm"] >= expected
        assert triton_gemm.report_routing() == {}


def test_counts_outlive_a_registration(driver: Driver) -> None:
    """They are reported, and reset, while the products are torch's own again."""
    with triton_gemm.use():
        make_known(driver, "mm")
        CALLS["mm"]()
    routing._unregister()
    assert triton_gemm.report_routing(reset=True)["mm", "triton_gemm"] >= 1
    with triton_gemm.use():
        assert triton_gemm.report_routing() == {}


def known(driver: Driver, overload: str = "addmm") -> None:
    make_known(driver, overload)
    CALLS[overload]()
    assert launched() == {overload: 1}


PYTHONS: dict[str, Callable[[], torch.Tensor]] = {
    "no product": lambda: torch.addmm(BIAS, A, B, alpha=0),
    "a factor that is no number": lambda: torch.addmm(BIAS, A, B, alpha=True),
    "a factor of what is added": lambda: torch.addmm(BIAS, A, B, beta=0.5),
    "another shape": lambda: torch.addmm(BIAS, A[:100], B),
    "another dtype": lambda: torch.addmm(BIAS.double(), A.double(), B.double()),
    "another product": lambda: torch.mm(A, B),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_another_call_is_python_s(driver: Driver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_stays", lambda *_: "the test says so")
    with triton_gemm.use():
        known(driver)
        driver.seen.clear()
        PYTHONS[name]()
        assert launched() == {} and not driver.seen
        overload = "mm" if name == "another product" else "addmm"
        assert (overload, "torch: the test says so") in triton_gemm.report_routing()


def test_rules_have_calls_of_their_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no table may be asked where a predicate would be."""
    with triton_gemm.use():
        known(driver)
        for others in ({"exclude": "addmm"}, {"predicate": lambda *_: False}):
            with triton_gemm.use(**others):
                assert torch.equal(CALLS["addmm"](), torch.full_like(OUT, 513)) and launched() == {}
        CALLS["addmm"]()
        assert launched() == {"addmm": 1}
    assert torch.equal(CALLS["addmm"](), torch.full_like(OUT, 513)) and launched() == {}


def test_entering_an_equal_rule_goes_on(driver: Driver) -> None:
    for number in range(3):
        with triton_gemm.use():
            if number == 0:
                make_known(driver, "mm")
            CALLS["mm"]()
            assert launched() == {"mm": 1}


def test_another_library_s_kernel_is_not_overridden(driver: Driver) -> None:
    theirs = torch.library.Library("aten", "IMPL")
    seen: list[Any] = []

    def kernel(keys: torch.DispatchKeySet, *arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return OUT

    with triton_gemm.use():
        make_known(driver, "mm")
        before = torch.library.get_kernel("aten::mm", "CPU")
        theirs.impl("mm", kernel, "CPU", with_keyset=True)
        try:
            before.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), A, B)  # as theirs may
            CALLS["mm"]()
        finally:
            theirs._destroy()
    assert len(seen) == 1 and launched() == {"mm": 1}


def test_a_launch_that_fails_is_heard_through_the_dispatcher(driver: Driver) -> None:
    with triton_gemm.use():
        known(driver)
        driver.answers.append(700)
        with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: an illegal address$"):
            CALLS["addmm"]()
        CALLS["addmm"]()
        assert launched() == {"addmm": 1}


def test_inputs_that_need_gradients(driver: Driver) -> None:
    """autograd is above: it calls with what needs none."""
    with triton_gemm.use():
        known(driver, "mm")
        c = torch.mm(A.clone().requires_grad_(), B)
        assert c.grad_fn is not None and launched() == {"mm": 1}


# --- The package's own operator, as compiled graphs call it ---

MATRIX = torch.ones(256, 768, dtype=torch.bfloat16)
gemm = torch.ops.triton_gemm.gemm
OPERATORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: gemm(A, B),
    "a bias": lambda: gemm(A, B, BIAS),
    "a matrix and a factor": lambda: gemm(A, B, MATRIX, 0.5, 1),
    "inference": lambda: torch.inference_mode()(gemm)(A, B),
    "no gradients wanted": lambda: torch.no_grad()(gemm)(A.clone().requires_grad_(), B),
}


@pytest.fixture
def operator(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """No call of the operator was made before, and C++ overrides it."""
    replace_all(monkeypatch, ops, KEYS=("AutogradCPU", "CPU"), _fast=fast_path.FastPath(ops._show))
    fake_driver.plan_for_hopper(monkeypatch)
    ops._by_cpp.register(ops.KEYS, native.module())
    yield driver
    ops._by_cpp.unregister()


def counted(reset: bool = True) -> int:
    """How many calls of the operator C++ launched since it was asked."""
    return ops._by_cpp.launched(reset).get(ops.NAME, 0)


def make_like(driver: Driver, call: Callable[[], torch.Tensor]) -> None:
    """Has calls like this one be C++'s from now on."""
    for _ in range(2):  # planned, and offered to C++
        call()
    counted()
    driver.seen.clear()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_is_launched_without_python(operator: Driver, name: str) -> None:
    call = OPERATORS[name]
    counted()
    make_like(operator, call)
    operator.by_python.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops._fast, "take", lambda *_, **__: pytest.fail("Python was asked"))
        c = call()
    assert c.shape == (256, 768) and c.dtype == torch.bfloat16 and not c.requires_grad
    assert counted() == 1 and len(operator.seen) == 1 and not operator.by_python
    assert name != "a matrix and a factor" or torch.equal(c, MATRIX), "it is copied, and the launch adds to it"


def fakes() -> None:
    with FakeTensorMode() as mode:
        gemm(mode.from_tensor(A), mode.from_tensor(B))


def in_a_mode() -> None:
    with flop_counter.FlopCounterMode(display=False) as mode:
        gemm(A, B)
    assert mode.get_total_flops() == 2 * 256 * 512 * 768


def with_tangent() -> None:
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(gemm(forward_ad.make_dual(A, A), B)).tangent is not None


# What is called, and how many calls of plain tensors that makes below torch's wrappers, modes and negative views, and
# beside a product with a tangent.
AROUND: dict[str, tuple[Callable[[], Any], int]] = {
    "gradients": (lambda: gemm(A.clone().requires_grad_(), B).grad_fn.name(), 0),
    "an activation": (lambda: gemm(A, B, None, 1, 1, "relu"), 0),
    "a dtype of the result": (lambda: gemm(A, B, None, 1, 1, None, torch.float32), 0),
    "a factor of what is added": (lambda: gemm(A, B, BIAS, 1, 2), 0),
    "what is negated on the way": (lambda: gemm(torch._neg_view(A), B), 1),
    "another shape": (lambda: gemm(A[:100], B), 0),
    "a mode": (in_a_mode, 1),
    "fake tensors": (fakes, 0),
    "vmap": (lambda: torch.vmap(gemm, (0, None))(A[None], B), 0),
    "functionalization": (lambda: torch.func.functionalize(gemm)(A, B), 1),
    "tangents": (lambda: torch.func.jvp(lambda x: gemm(x, B), (A,), (A,)), 2),
    "a level of tangents": (with_tangent, 2),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_needs_more_than_a_launch_is_python_s(operator: Driver, name: str) -> None:
    make_like(operator, lambda: gemm(A, B))
    call, below = AROUND[name]
    call()
    assert counted() == below


def test_an_override_that_fails_leaves_products_to_python(operator: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    products = native_products.NativeProducts(
        {ops.NAME: (ops.NAME, Places(0, 1, 2, 3, 4)), "triton_gemm::none": ("", Places(0, 1))}
    )
    ops._by_cpp.unregister()
    products.register(ops.KEYS, native.module())
    assert not products.registered and "CPU: triton_gemm ::" not in torch._C._dispatch_dump(ops.NAME)


EXIT = """
import sys
import pytest
import triton_gemm
from tests.runtime import test_native_products as tests
from triton_gemm.functional import ops
from triton_gemm.runtime import native

driver = tests.route(pytest.MonkeyPatch(), sys.argv[1])
triton_gemm.enable()
tests.known(driver)
ops._by_cpp.register(("AutogradCPU", "CPU"), native.module())
print("enabled")
"""


def test_a_process_ends_with_products_overridden(extension: Path) -> None:
    """torch's dispatcher frees them when Python is gone."""
    done = python("-c", EXIT, extension)
    assert (done.returncode, done.stdout, done.stderr) == (0, "enabled\n", "")
