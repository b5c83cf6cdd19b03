"""Products that stay torch's under a rule, with the extension before Python: what Python decides, and what C++ then
leaves to torch by itself, and counts."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.runtime.test_native_products import CALLS
from tests.runtime.test_native_products import driver as driver
from tests.support.fake_driver import Driver
from tests.support.patches import noted
from triton_gemm.functional import left_to_torch, routing
from triton_gemm.selection import generation

pytestmark = pytest.mark.slow

X, BATCHES = torch.eye(8), torch.eye(8).expand(3, 8, 8).contiguous()
NOT_IN_ONLY = "torch: torch.float32 is not in only="
# On a CPU without bf16 instructions, torch's baddbmm calls this for each batch.
WITHIN_BADDBMM = ("addmm_", "torch: it is not routed")


def left() -> int:
    """How many calls C++ has left to torch since the last count."""
    return sum(count for name, count in routing._by_cpp.left(True).items() if name != " ".join(WITHIN_BADDBMM))


@pytest.mark.parametrize("overload", CALLS)
def test_python_decides_once(driver: Driver, overload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, seen = CALLS[overload], noted(monkeypatch, routing, "_stays")
    expected, why = call().clone(), "torch: torch.bfloat16 is not in only="
    with triton_gemm.use(only=torch.float32):
        for _ in range(4):
            assert torch.equal(call(), expected)
        assert len(seen) == 1
        counted = triton_gemm.report_routing(reset=True)
        counted.pop(WITHIN_BADDBMM, None)
        assert counted == {(overload.partition(".")[0], why): 4}
        assert triton_gemm.report_routing() == {}
        call()
        assert left() == 1
    with triton_gemm.use(only=torch.float32):
        call()
        assert (len(seen), left()) == (1, 1), "an equal rule goes on"
    with triton_gemm.use(only=torch.float64):
        call()
        assert (len(seen), left()) == (2, 0), "another rule decides for itself"
    call()
    assert (len(seen), left()) == (2, 0)


def test_another_call_is_decided_by_itself(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch, routing, "_stays")
    with triton_gemm.use(only=torch.bfloat16):
        torch.addmm(X, X, X), torch.addmm(X, X, X)
        assert (len(seen), left()) == (1, 1)
        torch.mm(X, X)
        torch.addmm(X[0], X, X)
        torch.addmm(X, X, X, beta=2)
        torch.addmm(X, X, X, alpha=0)
        assert (len(seen), left()) == (5, 0)


def test_what_chooses_anew_decides_anew(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a table has changed. And where that happens meanwhile, nothing is kept."""
    seen = noted(monkeypatch, routing, "_stays")
    with triton_gemm.use(only=torch.bfloat16):
        torch.mm(X, X)
        generation.advance()
        torch.mm(X, X)
        assert (len(seen), left()) == (2, 0)
        leave = routing._by_cpp.leave
        monkeypatch.setattr(routing._by_cpp, "leave", lambda *call: (generation.advance(), leave(*call)))
        torch.bmm(BATCHES, BATCHES)
        torch.bmm(BATCHES, BATCHES)
        assert left() == 0


def test_what_depends_on_addresses_is_decided_each_time(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, a = noted(monkeypatch, routing, "_stays"), torch.ones(64, 64, dtype=torch.bfloat16)
    with triton_gemm.use():
        for _ in range(3):
            torch.mm(a, a, out=a)
    assert len(seen) == 3 and triton_gemm.report_routing() == {("mm", f"torch: {left_to_torch.OVERLAP}"): 3}


def test_mistakes_stay_in_torchs_words(driver: Driver) -> None:
    with triton_gemm.use():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(X, X[:5])
        assert left() == 2


def test_a_table_that_cannot_be_made_leaves_calls_to_python(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with triton_gemm.use(only=torch.bfloat16):
        monkeypatch.setattr(routing._rules[-1].fast, "_table", Mock(side_effect=RuntimeError("no driver")))
        assert torch.mm(X, X).equal(X) and torch.mm(X, X).equal(X)
    assert triton_gemm.report_routing() == {("mm", NOT_IN_ONLY): 2}


def test_python_sees_what_torch_gave(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments by position and by name, dtypes and absent tensors; as its kernels in torch's dispatcher do."""
    seen: dict[str, list[Any]] = {}
    for overload in routing._overrides._kernels:
        record = seen.setdefault(overload, [])
        decide = lambda *given, record=record, **named: record.append((given, named))  # noqa: E731
        monkeypatch.setitem(routing._overrides._kernels, overload, decide)
    eight, one, out = X.to(torch.float8_e4m3fn), torch.ones(()), torch.empty(8, 8)
    with triton_gemm.use():
        torch.mm(X, X, out=out)
        torch.addmm(X, X, X)
        torch.addmm(X, X, X, alpha=0.5, beta=2)
        torch._int_mm(X.char(), X.char())
        torch._scaled_mm(eight, eight.T, one, one, out_dtype=torch.bfloat16)
    [(_, into)], [(plain, none), (_, factors)] = seen["mm.out"], seen["addmm"]
    assert into["out"] is out and all(x is X for x in plain) and none == {} and factors == {"alpha": 0.5, "beta": 2}
    [(integers, _)], [(given, _)] = seen["_int_mm"], seen["_scaled_mm"]
    assert [x.dtype for x in integers] == [torch.int8] * 2
    assert given[2] is one is given[3] and given[4] is None and given[6] is torch.bfloat16 and given[7] is False


def test_what_python_raises_comes_through(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseException):
        pass

    monkeypatch.setattr(routing, "_stays", Mock(side_effect=Stop))
    with triton_gemm.use(), pytest.raises(Stop):
        torch.mm(X, X)
