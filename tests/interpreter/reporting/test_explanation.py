"""triton_gemm.explain in Triton's interpreter: what it says of a product is what the product's function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.patches import noted
from tests.support.product_views import draw
from triton_gemm.functional import api, fast_path
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.runtime import plan

HALF, FLOAT, E4M3 = torch.float16, torch.float32, torch.float8_e4m3fn
OFFS = torch.tensor([10, 10, 40], dtype=torch.int32)
Call = Callable[[], object]


def h(*shape: int) -> torch.Tensor:
    return draw(*shape, dtype=HALF)


def t(*shape: int) -> torch.Tensor:
    return h(*shape).mT.contiguous().mT


def fp8(*shape: int) -> torch.Tensor:
    return draw(*shape).to(E4M3)


A, B, X, Y, ROW, COLUMN, C = h(40, 24), h(24, 16), h(3, 40, 24), h(3, 24, 16), h(16), h(40, 1), h(40, 16)
A8, B8, ONE = fp8(40, 256), fp8(256, 144), torch.ones(())
ROWS, BLOCKS = (torch.ones(40, 1), torch.ones(1, 144)), (torch.ones(40, 2), torch.ones(2, 2))
SIZES: dict[str, Any] = {"M": 40, "N": 16, "K": 24, "dtype": HALF}
SIZES8: dict[str, Any] = {"M": 40, "N": 144, "K": 256, "dtype": E4M3}
explain = triton_gemm.explain

# The function's call, and the questions that are answered by what it runs.
SAME: dict[str, tuple[Call, ...]] = {
    "matmul": (
        lambda: triton_gemm.matmul(A, B), lambda: explain(A, B, bias=None), lambda: explain(A, B, bias=False),
        lambda: explain(**SIZES), lambda: explain(A.to("meta"), B.to("meta")),
    ),
    "matmul, other layouts": (
        lambda: triton_gemm.matmul(t(40, 24), t(24, 16)), lambda: explain(t(40, 24), t(24, 16)),
        lambda: explain(**SIZES, layout="tt"),
    ),
    "matmul of vectors": (lambda: triton_gemm.matmul(h(24), B), lambda: explain(h(24), B)),
    "matmul, one weight": (lambda: triton_gemm.matmul(X, B), lambda: explain(X, B)),
    "precision": (
        lambda: triton_gemm.matmul(A.float(), B.float(), precision="bf16x6"),
        lambda: explain(A.float(), B.float(), precision="bf16x6"),
        lambda: explain(**SIZES | {"dtype": FLOAT}, precision="bf16x6"),
    ),
    "int8": (
        lambda: triton_gemm.mm(A.to(torch.int8), B.to(torch.int8)), lambda: explain(A.to(torch.int8), B.to(torch.int8)),
        lambda: explain(**SIZES | {"dtype": torch.int8}),
    ),
    "out_dtype": (
        lambda: triton_gemm.mm(A, B, FLOAT), lambda: explain(A, B, out_dtype=FLOAT),
        lambda: explain(**SIZES, out_dtype=FLOAT),
    ),
    "bmm": (lambda: triton_gemm.bmm(X, Y), lambda: explain(X, Y), lambda: explain(**SIZES, batch=3)),
    "linear": (
        lambda: triton_gemm.linear(A, B.T.contiguous(), ROW, "gelu"),
        lambda: explain(A, B.T.contiguous().T, bias=ROW, activation="gelu"),
        lambda: explain(**SIZES, layout="nt", bias=True, activation="gelu"),
    ),
    "an activation alone": (
        lambda: triton_gemm.linear(A, B.T, None, "relu"), lambda: explain(A, B, activation="relu"),
        lambda: explain(**SIZES, activation="relu"),
    ),
    "addmm of a row": (
        lambda: triton_gemm.addmm(ROW, A, B), lambda: explain(A, B, bias=ROW), lambda: explain(**SIZES, bias=True),
    ),
    "addmm of a column": (
        lambda: triton_gemm.addmm(COLUMN, A, B), lambda: explain(A, B, bias=COLUMN),
        lambda: explain(**SIZES, bias=COLUMN),
    ),
    "addmm of a matrix": (
        lambda: triton_gemm.addmm(C, A, B, beta=0.5), lambda: explain(A, B, bias=C), lambda: explain(A, B, beta=0.5),
        lambda: explain(**SIZES, beta=0.5),
    ),
    "baddbmm of a column": (lambda: triton_gemm.baddbmm(COLUMN, X, Y), lambda: explain(X, Y, bias=COLUMN)),
    "groups of rows": (
        lambda: triton_gemm.grouped_matmul(A, Y, OFFS), lambda: explain(A, Y, groups=OFFS),
        lambda: explain(A, Y, groups=3), lambda: explain(**SIZES, groups=3),
    ),
    "groups of columns": (
        lambda: triton_gemm.grouped_matmul(X, h(24, 16), OFFS), lambda: explain(X, h(24, 16), groups=OFFS),
        lambda: explain(**SIZES, groups=3, group_dim="N"),
    ),
    "groups along K": (
        lambda: triton_gemm.grouped_matmul(A, B, OFFS, out_dtype=FLOAT),
        lambda: explain(A, B, groups=OFFS, out_dtype=FLOAT),
        lambda: explain(**SIZES, groups=3, group_dim="K", out_dtype=FLOAT),
    ),
    "scaled": (
        lambda: triton_gemm.scaled_matmul(A8, B8, ONE, ONE), lambda: explain(A8, B8, scales=(ONE, ONE)),
        lambda: explain(A8, B8, scales="tensor"), lambda: explain(**SIZES8, scales="tensor"),
    ),
    "scaled, fast and with a bias": (
        lambda: triton_gemm.scaled_matmul(A8, B8, *ROWS, bias=torch.ones(144), use_fast_accum=True, out_dtype=FLOAT),
        lambda: explain(A8, B8, scales=ROWS, bias=torch.ones(144), use_fast_accum=True, out_dtype=FLOAT),
        lambda: explain(**SIZES8, scales="rows", bias=True, use_fast_accum=True, out_dtype=FLOAT),
    ),
    "blocks of scales": (
        lambda: triton_gemm.scaled_matmul(A8, B8, *BLOCKS), lambda: explain(A8, B8, scales=BLOCKS),
        lambda: explain(**SIZES8, scales="blocks"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_what_is_explained_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same problem is chosen for, on the same device."""
    requested = noted(monkeypatch, plan, "selection_for")
    monkeypatch.setattr(plan, "PLANS", {})
    monkeypatch.setattr(api, "_fast", fast_path.FastPath())
    call, *questions = SAME[name]
    call()
    ((problem, device),) = requested
    assert device is INTERPRETER
    for question in questions:
        requested.clear()
        answer = question()
        assert requested == [(problem, device)]
        assert answer.device == INTERPRETER.name and f", on {INTERPRETER.name}: " in str(answer)


def test_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "multiply", lambda *_, **__: pytest.fail("launched"))
    for _, *questions in SAME.values():
        for question in questions:
            question()


def test_explain_of_batches() -> None:
    a, b = h(4, 64, 72), h(72, 80)
    assert str(explain(a, b)) == str(explain(a.view(256, 72), b))
    assert explain(a[:, 0], b[:, 0]).kernel


@pytest.mark.parametrize(
    "question",
    [
        lambda: explain(X[:0], Y[:0]),
        lambda: explain(**SIZES | {"M": 0}),
        lambda: explain(A[:0], Y, groups=OFFS),
        lambda: explain(A[:, :0], Y[:, :0], groups=OFFS),
        lambda: explain(A8[:0], B8, scales="tensor"),
    ],
)
def test_where_nothing_is_launched_there_is_nothing_to_explain(question: Call) -> None:
    with pytest.raises(RuntimeError, match="launches nothing"):
        question()


MISTAKES: dict[str, tuple[Call, type[Exception], str]] = {
    "nothing": (lambda: explain(), TypeError, "two tensors, input and other, or M, N, K and dtype"),
    "half of it": (lambda: explain(M=3, N=4, K=5), TypeError, "two tensors, input and other, or M, N, K and dtype"),
    "both": (lambda: explain(A, B, M=40), TypeError, "two tensors, input and other, or M, N, K and dtype"),
    "one tensor": (lambda: explain(A), TypeError, "argument 'other' .* must be Tensor, not NoneType"),
    "shapes": (lambda: explain(A, A), RuntimeError, "shapes cannot be multiplied"),
    "dtype": (lambda: explain(**SIZES | {"dtype": torch.int64}), NotImplementedError, "int64"),
    "bias of int8": (lambda: explain(**SIZES | {"dtype": torch.int8}, bias=True), NotImplementedError, "int8"),
    "dtypes": (lambda: explain(A, B.float()), RuntimeError, "same dtype"),
    "activation": (lambda: explain(A, B, activation="tanh"), ValueError, "activation must be one of relu"),
    "precision": (lambda: explain(A, B, precision="tf32"), ValueError, "precision says how fp32 is multiplied"),
    "out_dtype": (lambda: explain(A, B, out_dtype=torch.bfloat16), RuntimeError, "out_dtype must be"),
    "a bias that does not broadcast": (lambda: explain(A, B, bias=h(15)), RuntimeError, "expanded size"),
    "a bias of another dtype": (lambda: explain(A, B, bias=ROW.float()), RuntimeError, "self dtype must match"),
    "a bias that is none": (lambda: explain(A, B, bias=1.0), TypeError, "argument 'bias' must be Tensor, not float"),
    "layout": (lambda: explain(**SIZES, layout="n"), ValueError, "layout must be one of nn, nt, tn, tt, not 'n'"),
    "device": (lambda: explain(A, B, device="sm_70"), ValueError, "device must be one of a100, .*not 'sm_70'"),
    "an old device": (lambda: explain(A, B, device="sm_75"), RuntimeError, "needs compute capability 8.0 or newer"),
    "groups with a bias": (
        lambda: explain(A, Y, groups=OFFS, bias=ROW),
        ValueError,
        "groups and bias do not go together",
    ),
    "groups in batches": (lambda: explain(**SIZES, groups=3, batch=2), ValueError, "groups divide one matrix"),
    "group_dim": (
        lambda: explain(**SIZES, groups=3, group_dim="m"),
        ValueError,
        "group_dim must be one of M, N, K, not 'm'",
    ),
    "groups of others": (lambda: explain(A, Y, groups=2), RuntimeError, "batch sizes have to match"),
    "scales": (lambda: explain(A8, B8, scales="columns"), ValueError, "one of tensor, rows, blocks, not 'columns'"),
    "scales of fp16": (lambda: explain(A, B, scales="rows"), NotImplementedError, "float16"),
    "scales and beta": (
        lambda: explain(A8, B8, scales="rows", beta=1),
        ValueError,
        "scales and beta do not go together",
    ),
    "scales of three": (lambda: explain(A8.expand(2, 40, 256), B8, scales="rows"), RuntimeError, "must be a matrix"),
    "bias and beta": (lambda: explain(A, B, bias=ROW, beta=1), ValueError, "beta and bias do not go together"),
    "no GPU": (lambda: explain(A, B, device="cuda"), RuntimeError, 'device="sm_90"'),
}


@pytest.mark.parametrize(("question", "kind", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(question: Call, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        question()
