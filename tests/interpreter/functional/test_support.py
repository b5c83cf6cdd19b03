"""The table of what is supported: every cell of it is tried, and what is left out raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support import support_table

OFFS = torch.tensor([2, 6], dtype=torch.int32)
ONE = torch.ones(())
B, M, K, N = 2, 6, 8, 4


@dataclass(frozen=True)
class Operation:
    """An operation: the shapes of its operands, and how it and fp64 compute it of them. relu: as fp64 computes it with
    that activation, where something follows."""

    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., torch.Tensor]
    truth: Callable[..., torch.Tensor]
    torchs: Callable[..., torch.Tensor] | None = None
    relu: Callable[..., torch.Tensor] | None = None


LAYERS = {
    (precision, activation): triton_gemm.nn.Linear(K, N, precision=precision, activation=activation)
    for precision, activation in ((None, None), ("bf16x3", None), (None, "relu"))
}


def layer(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    precision: str | None = None,
    activation: str | None = None,
    **how: Any,
) -> torch.Tensor:
    return torch.func.functional_call(LAYERS[precision, activation], {"weight": w, "bias": bias}, (x,), how)


def groups_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a[:2] @ b[0], a[2:] @ b[1]])


def relu_of(truth: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    return truth(*operands).relu()


F = torch.nn.functional
MATRICES, BATCHES = ((M, K), (K, N)), ((B, M, K), (B, K, N))
OPERATIONS = {
    "matmul": Operation(((B, M, K), (K, N)), triton_gemm.matmul, torch.matmul, torch.matmul),
    "mm": Operation(MATRICES, triton_gemm.mm, torch.mm, torch.mm),
    "bmm": Operation(BATCHES, triton_gemm.bmm, torch.bmm, torch.bmm),
    "mv": Operation(((M, K), (K,)), triton_gemm.mv, torch.mv, torch.mv),
    "addmm": Operation(((M, N), *MATRICES), triton_gemm.addmm, torch.addmm, torch.addmm),
    "baddbmm": Operation(((B, M, N), *BATCHES), triton_gemm.baddbmm, torch.baddbmm, torch.baddbmm),
    "linear": Operation(((B, M, K), (N, K), (N,)), triton_gemm.linear, F.linear, F.linear),
    "linear, residual": Operation(
        ((B, M, K), (N, K), (N,), (B, M, N)),
        lambda x, w, bias, residual, **how: triton_gemm.linear(x, w, bias, residual=residual, **how),
        lambda x, w, bias, residual: F.linear(x, w, bias) + residual,
        relu=lambda x, w, bias, residual: F.linear(x, w, bias).relu() + residual,
    ),
    "linear, gate": Operation(
        ((B, M, K), (N, K), (N, K)),
        lambda x, up, gate, activation="reglu", **how: triton_gemm.linear(x, up, None, activation, gate=gate, **how),
        lambda x, up, gate: F.linear(x, gate).relu() * F.linear(x, up),
    ),
    "nn.Linear": Operation(((B, M, K), (N, K), (N,)), layer, F.linear, F.linear),
    "grouped_matmul": Operation(
        ((M, K), (2, K, N)), lambda a, b, **how: triton_gemm.grouped_matmul(a, b, OFFS, **how), groups_apart
    ),
    "grouped_matmul, gate": Operation(
        ((M, K), (2, K, N), (2, K, N)),
        lambda a, b, gate, activation="reglu", **how: triton_gemm.grouped_matmul(
            a, b, OFFS, activation=activation, gate=gate, **how
        ),
        lambda a, b, gate: groups_apart(a, gate).relu() * groups_apart(a, b),
    ),
    "scaled_matmul": Operation(
        MATRICES, lambda a, b, **how: triton_gemm.scaled_matmul(a, b, ONE, ONE, **how), torch.mm
    ),
}
GATED = [operation for name, operation in OPERATIONS.items() if name.endswith(", gate")]
GROUPED = [operation for name, operation in OPERATIONS.items() if name.startswith("grouped")]
ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError)
WORDS = "(not implemented for|unexpected keyword argument|has no derivative)"
IGNORED = ("`torch.autocast`", "through `use()`")  # where an empty cell is no error: nothing happens
CELLS = [(operation, aspect) for operation in support_table.OPERATIONS for aspect in support_table.ASPECTS]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, which are exact in every dtype, and so are their products."""
    return torch.randint(-3, 4, shape).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else torch.cat([x, x])[::2].copy_(x)


def assert_right(operation: Operation, c: torch.Tensor, operands: list[torch.Tensor]) -> None:
    truth = operation.truth(*(x.detach().double() for x in operands))
    assert torch.equal(c.detach(), truth.to(c.dtype))  # rounded once, where it is not exact


def try_it(operation: Operation, aspect: str) -> None:
    """Raises unless the operation has the aspect."""
    scaled = operation is OPERATIONS["scaled_matmul"]
    plain = torch.float8_e4m3fn if scaled else torch.float32
    dtypes = {
        "fp32": [torch.float32],
        "fp16, bf16": [torch.float16, torch.bfloat16],
        "fp64": [torch.float64],
        "int8": [torch.int8],
        "fp8": [torch.float8_e4m3fn, torch.float8_e5m2],
        "`out_dtype=`": [plain if scaled else torch.float16],
    }.get(aspect, [plain])
    for dtype in dtypes:
        operands = [draw(shape, dtype) for shape in operation.shapes]
        how: dict[str, Any] = {}
        ours = operation.ours
        if aspect == "any strides":
            operands = [strided(x) for x in operands]
        elif aspect == "empty":
            operands = [x[..., :0, :] if x.shape[-2:] in ((M, K), (M, N)) else x for x in operands]
            if operation in GROUPED:
                assert ours(*operands).shape == (0, N)
                continue
        elif aspect == "`out=`":
            how["out"] = torch.empty_like(operation.truth(*(x.float() for x in operands)))
        elif aspect == "`out_dtype=`":
            how["out_dtype"] = torch.float32
        elif aspect == "`precision=`":
            how["precision"] = "bf16x3"
        elif aspect == "`activation=`":
            how["activation"] = "reglu" if operation in GATED else "relu"
        elif aspect in ("gradients", "double backward"):
            if operation in GATED:
                ours = partial(ours, activation="swiglu")  # relu has kinks at integers
            check = torch.autograd.gradcheck if aspect == "gradients" else torch.autograd.gradgradcheck
            assert check(ours, [x.double().requires_grad_() for x in operands], fast_mode=True)
            ours = operation.ours
        elif aspect == "`torch.vmap`":
            stacked = [torch.stack([x, torch.zeros_like(x)]) for x in operands]
            assert_right(operation, torch.vmap(ours)(*stacked)[0], operands)
        elif aspect == "`torch.compile`":
            torch._dynamo.reset()
            ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
        elif aspect == "`torch.export`":
            module = type("Module", (torch.nn.Module,), {"forward": staticmethod(lambda *xs: operation.ours(*xs))})()
            ours = torch.export.export(module, tuple(operands)).module()
        elif aspect == "`torch.autocast`":
            with torch.autocast("cpu", torch.bfloat16):
                c = ours(*operands)
            assert c.dtype == torch.bfloat16
        elif aspect == "through `use()`":
            assert operation.torchs is not None, "torch has no such function"
            triton_gemm.report_routing(reset=True)
            with triton_gemm.use():
                assert_right(operation, operation.torchs(*operands), operands)
            assert any(where == "triton_gemm" for _, where in triton_gemm.report_routing())
        c = ours(*operands, **how)
        assert c.dtype == how.get("out_dtype", c.dtype)
        judge = operation
        if how.get("activation") == "relu":
            judge = replace(operation, truth=operation.relu or partial(relu_of, operation.truth))
        assert_right(judge, c, operands)


@pytest.mark.few
@pytest.mark.parametrize(("operation", "aspect"), CELLS, ids=lambda x: x.replace("`", ""))
def test_every_cell(operation: str, aspect: str) -> None:
    if aspect not in support_table.NOT[operation]:
        try_it(OPERATIONS[operation], aspect)
        return
    of = operation.partition(",")[0].removeprefix("nn.")
    with pytest.raises(AssertionError) if aspect in IGNORED else pytest.raises(ERRORS, match=f"(?i)^{of}.*{WORDS}"):
        try_it(OPERATIONS[operation], aspect)


def test_the_page_has_the_table() -> None:
    page = support_table.PAGE.read_text()
    assert page == support_table.written(page), "python -m tests.support.support_table writes it"
