"""torch's own products on these kernels: what is routed, what stays torch's, and that it is as before afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import triton_gemm
from tests.support.processes import printed
from tests.support.threads import at_once
from triton_gemm.compat import withdraw
from triton_gemm.functional import left_to_torch, routing
from triton_gemm.hardware.gpus import named_device
from triton_gemm.runtime import background, plan

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


@pytest.fixture(autouse=True)
def fresh():
    triton_gemm.report_routing(reset=True)
    forget_calls()
    yield
    assert not routing._rules, "something is still routed"
    routing._unregister()


def forget_calls() -> None:
    """Of those made before, as where a table has changed."""
    routing._made_under.cache_clear()
    left_to_torch._faster.clear()


def ours() -> dict[str, int]:
    return {name: count for (name, where), count in triton_gemm.report_routing().items() if where == routing.OURS}


def went() -> str:
    ((_, where),) = triton_gemm.report_routing(reset=True)
    return where


CALLS = {
    "mm": lambda: torch.mm(draw(5, 7), draw(7, 3)),
    "mm-out": lambda: torch.mm(draw(5, 7), draw(7, 3), out=torch.empty(5, 3)),
    "matmul-of-a-batch": lambda: draw(2, 3, 5, 7) @ draw(3, 7, 4),
    "bmm": lambda: torch.bmm(draw(3, 5, 7), draw(3, 7, 4)),
    "addmm": lambda: torch.addmm(draw(4), draw(5, 7), draw(7, 4), alpha=0.5, beta=2),
    "addmm-of-nan": lambda: torch.addmm(torch.full((5, 4), torch.nan), draw(5, 7), draw(7, 4), beta=0),
    "baddbmm": lambda: torch.baddbmm(draw(3, 5, 4), draw(3, 5, 7), draw(3, 7, 4), alpha=-1),
    "linear": lambda: F.linear(draw(6, 7), draw(4, 7), draw(4)),
    "half": lambda: torch.mm(draw(5, 7, dtype=torch.float16), draw(7, 3, dtype=torch.float16)),
}


@pytest.mark.parametrize("call", CALLS)
def test_products_are_ours_and_the_same(call: str) -> None:
    GENERATOR.manual_seed(1)
    expected = CALLS[call]()
    GENERATOR.manual_seed(1)
    with triton_gemm.use():
        found = CALLS[call]()
    torch.testing.assert_close(found, expected)
    assert sum(ours().values()) == 1
    CALLS[call]()
    assert sum(ours().values()) == 1, "routed afterwards"


def test_a_model_trains_on_them() -> None:
    """The derivatives' products are routed with it."""
    x, layer = draw(6, 7), torch.nn.Linear(7, 4)
    grads = []
    for routed in (False, True):
        layer.zero_grad()
        if routed:
            triton_gemm.enable()
        layer(x).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    triton_gemm.disable()
    torch.testing.assert_close(grads[0], grads[1])
    assert ours() == {"addmm": 1, "mm": 1}


STAYS = {
    "integers": (lambda: torch.mm(*(torch.ones(3, 3, dtype=torch.int64),) * 2), "int64 is not computed"),
    "excluded": (lambda: torch.bmm(draw(2, 3, 3), draw(2, 3, 3)), "bmm is excluded"),
    "excluded-dtype": (lambda: torch.mm(*(draw(3, 3, dtype=torch.float64),) * 2), "float64 is excluded"),
    "out-is-an-operand": (lambda: torch.mm(x := draw(3, 3), draw(3, 3), out=x), "out may overlap"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_torchs_says_why(name: str) -> None:
    call, why = STAYS[name]
    with triton_gemm.use(exclude=("bmm", torch.float64)):
        call()
    ((_, where),) = triton_gemm.report_routing()
    assert where.startswith("torch: ") and why in where


def test_equal_rules_share_the_calls_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop that enters `use()` at each step chooses, and asks what torch is faster at, once."""
    calls: list[Any] = []
    monkeypatch.setattr(left_to_torch, "_slower", lambda *operands: calls.append(operands))
    a = draw(5, 5)
    for _ in range(3):
        with triton_gemm.use():
            a @ a
    assert len(calls) == 1 and ours() == {"mm": 3}
    paths = []
    for rule in ({}, {"only": "mm"}, {"exclude": "bmm"}, {"only": ["mm"]}, {"predicate": lambda *_: True}):
        with triton_gemm.use(**rule):
            paths.append(routing._rules[-1].fast)
    assert paths[0] is not paths[1] is paths[3] is not paths[2] and not paths[4].calls


def test_mistakes_are_in_torchs_words() -> None:
    with (
        triton_gemm.use(),
        pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x5\)"),
    ):
        torch.mm(draw(2, 3), draw(4, 5))


def test_a_bias_beside_no_matrix_is_torchs_mistake() -> None:
    with triton_gemm.use(), pytest.raises(RuntimeError):
        torch.addmm(torch.ones(3), draw(2, 3), torch.tensor(1.0))


def test_rules() -> None:
    """The innermost counts; names and dtypes apart; a predicate sees operands."""
    with triton_gemm.use(only=("addmm",)):
        torch.mm(draw(3, 3), draw(3, 3))
        assert ours() == {}
        with triton_gemm.use(only=(torch.float32,), predicate=lambda op, a, b: a.shape[0] > 3):
            torch.mm(draw(3, 3), draw(3, 3))
            assert ours() == {}
            torch.mm(draw(4, 3), draw(3, 3))
        assert ours() == {"mm": 1}
    with pytest.raises(ValueError, match=r"only must have dtypes or names of mm, bmm, .*, not conv2d"):
        triton_gemm.enable(only=("conv2d",))
    with pytest.raises(RuntimeError, match="nothing is routed"):
        triton_gemm.disable()


def test_a_block_that_ends_takes_its_own_rule_back() -> None:
    """And not that of another thread, which began later and goes on."""
    one, other = triton_gemm.use(only="mm"), triton_gemm.use(only="bmm")
    a, b = draw(3, 5, 4), draw(3, 4, 2)
    with one:
        other.__enter__()
    torch.bmm(a, b)
    assert ours() == {"bmm": 1}
    with pytest.raises(RuntimeError, match=r"tests has enabled nothing, and what a block of use\(\) began stays"):
        triton_gemm.disable()
    other.__exit__(None, None, None)
    torch.bmm(a, b)
    assert ours() == {"bmm": 1}


def in_package(name: str, code: str, **values: object) -> None:
    """Runs code of a module of that name."""
    exec(code, {"__name__": name, "triton_gemm": triton_gemm, **values})


def test_threads_that_disable_take_back_a_rule_each() -> None:
    names = [f"library{i}.module" for i in range(8)]
    for _ in range(20):
        for name in names:
            in_package(name, "triton_gemm.enable()")
        assert len(routing._rules) == 8
        at_once(*(partial(in_package, name, "triton_gemm.disable()") for name in names))
        assert routing._rules == []


def test_a_package_has_one_rule() -> None:
    """A cell of a notebook may run twice, and of two libraries neither ends the other's, nor a block."""
    for only in ("mm", "bmm"):
        in_package("__main__", "triton_gemm.enable(only=only)", only=only)
    assert [rule.only for rule in routing._rules] == [{"bmm"}]
    for name in ("one", "other.inner"):
        in_package(name, "triton_gemm.enable(only='addmm')")
    in_package("one.other", "triton_gemm.disable()")
    in_package("__main__", "triton_gemm.disable()")
    with triton_gemm.use(), pytest.raises(RuntimeError, match=r"what a block of use\(\), other began stays"):
        in_package("__main__", "triton_gemm.disable()")
    assert [rule.owner for rule in routing._rules] == ["other"]
    in_package("other", "triton_gemm.disable()")
    with triton_gemm.use():
        triton_gemm.enable(only="mm")
        triton_gemm.enable(only="bmm")
        assert [rule.owner for rule in routing._rules] == [None, "tests"]
        triton_gemm.disable()
    assert routing._rules == []


def test_the_environment_ends_all_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_USE", "0")
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    triton_gemm.report_routing(reset=True)
    triton_gemm.enable(required=True, learn=True)
    with triton_gemm.use(only="mm"):
        a @ b
    a @ b
    triton_gemm.disable()
    assert triton_gemm.report_routing(reset=True) == {("mm", "torch: TRITON_GEMM_USE=0"): 2}


WITHOUT_CUDA = """
import os, warnings, torch, triton_gemm
from triton_gemm.functional import routing
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for _ in range(2):
        with triton_gemm.use():
            assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
    triton_gemm.enable()
    triton_gemm.disable()
assert len(caught) == 2 and "sees none here: torch computes. use(required=True)" in str(caught[0].message), caught
assert {x.filename for x in caught} == {(lambda: 0).__code__.co_filename}, "not the caller's line"
torch.version.cuda = "13.0"
os.environ.pop("CUDA_VISIBLE_DEVICES")  # which hides GPUs on purpose
for how, there in ({"required": True}, False), ({}, True):
    routing.has_gpu = lambda: there
    try:
        with triton_gemm.use(**how):
            raise SystemExit("routed")
    except RuntimeError as error:
        assert "sees none here" in str(error) and "TRITON_INTERPRET=1" in str(error), error
assert routing._rules == [] == routing._overrides.libraries
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
"""


def test_without_cuda_it_says_so_and_leaves_nothing_behind() -> None:
    printed(WITHOUT_CUDA, TRITON_INTERPRET=None, CUDA_VISIBLE_DEVICES="")


def test_a_product_that_cannot_be_overridden_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = iter((torch.library.get_kernel, torch.library.get_kernel))

    def get_kernel(*arguments: str) -> object:
        kernel = next(kernels, None)
        if kernel is None:
            raise RuntimeError("no such kernel")
        return kernel(*arguments)

    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    with pytest.raises(RuntimeError, match="no such kernel"):
        triton_gemm.enable()
    assert routing._rules == [] == routing._overrides.libraries
    torch.mm(draw(3, 3), draw(3, 3))
    assert ours() == {}


def test_beside_an_override_of_torchs_own() -> None:
    """torch 2.14 and later override aten::bmm themselves: what is not routed goes there, and afterwards everything."""
    library, seen = torch.library.Library("aten", "IMPL"), []
    torchs = torch.library.get_kernel("aten::bmm", "CPU")

    def override(keys: torch.DispatchKeySet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.shape[0])
        return torchs.call_boxed(keys, a, b)

    library.impl("bmm", override, "CPU", with_keyset=True, allow_override=True)
    try:
        pairs = [(draw(batch, 5, 7), draw(batch, 7, 4)) for batch in (1, 2, 3)]
        with triton_gemm.use(predicate=lambda op, a, b: a.shape[0] != 2):
            results = [torch.bmm(a, b) for a, b in pairs]
        assert ours() == {"bmm": 2} and seen == [2]
        torch.testing.assert_close(results, [torch.bmm(a, b) for a, b in pairs])
        assert seen == [2, 1, 2, 3] and ours() == {"bmm": 2}
    finally:
        withdraw(library)


# --- First calls ---


def test_first_calls_may_be_torchs_until_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And count as torch's; the kept call of a product is not one of them."""
    launched = plan.InterpretedPlan.run
    compiled = False

    def run(self: plan.InterpretedPlan, *arguments: Any) -> None:
        if not compiled:
            assert background._of_thread.mode == "raise"
            raise background.WouldWaitError
        launched(self, *arguments)

    monkeypatch.setattr(plan.InterpretedPlan, "run", run)
    a, b, bias = draw(5, 7), draw(7, 4), draw(4)
    expected, total = a @ b, torch.addmm(bias, a, b)
    with triton_gemm.use(first_calls="torch"):
        assert torch.equal(a @ b, expected) and torch.equal(torch.addmm(bias, a, b), total)
        out = torch.empty(5, 4)
        torch.mm(a, b, out=out)
        assert torch.equal(out, expected) and not ours()
        why = "torch: its kernel is not compiled yet"
        assert triton_gemm.report_routing(reset=True) == {("addmm", why): 1, ("mm", why): 2}
        compiled = True
        torch.testing.assert_close(a @ b, expected)
        assert ours() == {"mm": 1}
    assert background._of_thread.mode == "wait"


def test_first_calls_by_torch_are_refused_under_batch_invariance() -> None:
    with triton_gemm.batch_invariant(), pytest.raises(RuntimeError, match="first_calls"):
        triton_gemm.enable(first_calls="torch")
    with triton_gemm.use(first_calls="torch"):
        with triton_gemm.batch_invariant(), pytest.raises(RuntimeError, match="first_calls"):
            draw(5, 7) @ draw(7, 4)
        with triton_gemm.use(), triton_gemm.batch_invariant():
            draw(5, 7) @ draw(7, 4)


def test_first_calls_by_torch_need_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "INTERPRETED", False)
    monkeypatch.setattr(background, "enabled", lambda: False)
    with pytest.raises(ValueError, match="TRITON_GEMM_BACKGROUND=0"):
        triton_gemm.enable(first_calls="torch")


def test_the_fingerprint_names_what_first_calls_run_on() -> None:
    def first_calls() -> str:
        return triton_gemm.selection_fingerprint(named_device("h100"), parts=True)["first calls"]

    assert first_calls() == "same bits"
    with triton_gemm.use(first_calls="torch"):
        assert first_calls() == "torch"
