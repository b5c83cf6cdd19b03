"""The operator within torch: autocast, checkpoints, subclasses, and modules that are loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import triton_gemm
from tests.support.processes import printed
from tests.support.product_views import compiled, draw
from tests.support.wrong_products import torchs

Function = Callable[..., torch.Tensor]


# --- Autocast ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch(dtype: torch.dtype) -> None:
    a, b, c = draw(2, 4, 5), draw(2, 5, 3), draw(3)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(("matmul", (a, b[0])), ("matmul", (a[0], b[0].half())), ("mm", (a[0], b[0].bfloat16())), ("bmm", (a, b))),
        *(("addmm", (c, a[0], b[0])), ("baddbmm", (c, a, b)), ("linear", (a, b[0].T, c))),
    ]
    for name, arguments in calls:
        with torch.autocast("cpu", dtype):
            expected, found = torchs(name)(*arguments), getattr(triton_gemm, name)(*arguments)
        assert found.dtype == expected.dtype == dtype, name
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype):
        assert triton_gemm.mv(b[0], c).dtype == dtype, "as torch's on CUDA; its list for CPUs lacks mv"
        assert triton_gemm.mm(a[0], b[0], out=torch.empty(4, 3)).dtype == torch.float32
        assert triton_gemm.mm(a[0], b[0], torch.float32).dtype == torch.float32
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            triton_gemm.mm(a[0].double(), b[0])
        with torch.autocast("cpu", enabled=False):
            assert triton_gemm.matmul(a, b).dtype == torch.float32
        with pytest.raises(ValueError, match="precision says how fp32 is multiplied, and operands are torch"):
            triton_gemm.matmul(a, b, precision="ieee")


def test_autocast_in_training_and_compiled() -> None:
    layer, x = triton_gemm.nn.Linear(9, 7), draw(2, 5, 9)
    for call in (layer, compiled(layer)):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            result = call(x)
        result.sum().backward()
        assert result.dtype == torch.bfloat16 and layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32


def test_a_checkpoint_of_the_operator_itself() -> None:
    """Which computes again in its backward what the activation was applied to; a checkpoint gives tensors once."""
    a, b = draw(4, 5).requires_grad_(), draw(5, 3).requires_grad_()
    gradients = []
    for call in (gelu_of_product, lambda *operands: checkpoint(gelu_of_product, *operands, use_reentrant=False)):
        gradients.append(torch.autograd.grad(call(a, b).sum(), (a, b)))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def gelu_of_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c: torch.Tensor = torch.ops.triton_gemm.gemm(a, b, None, 1.0, 1.0, "gelu")
    return c


def test_the_operator_refuses_two_dtypes() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.float32 and torch\.float16 cannot be multiplied"):
        torch.ops.triton_gemm.gemm(draw(4, 5), draw(5, 3).half())


def test_a_subclass_stays_one() -> None:
    class Tagged(torch.Tensor):
        pass

    a, b = draw(4, 5).as_subclass(Tagged), draw(5, 3)
    assert type(triton_gemm.matmul(a, b)) is Tagged
    torch.testing.assert_close(triton_gemm.matmul(a, b).as_subclass(torch.Tensor), triton_gemm.matmul(draw(4, 5), b))


RELOADED = """
import importlib, sys, warnings
warnings.simplefilter("error")
import torch, triton_gemm
from torch.utils.flop_counter import FlopCounterMode

def multiplies(tg):
    a, b = torch.randn(3, 5, 7, requires_grad=True), torch.randn(7, 4)
    c = tg.matmul(a, b)
    torch.testing.assert_close(c, a @ b)
    torch.testing.assert_close(torch.autograd.grad(c.sum(), a)[0], b.sum(1).expand(3, 5, 7))
    torch.testing.assert_close(torch.vmap(tg.matmul, (0, None))(a, b), a @ b)
    with FlopCounterMode(display=False) as flops:
        tg.matmul(a, b)
    assert flops.get_total_flops() == 2 * 3 * 5 * 7 * 4
    offs = torch.tensor([2, 5], dtype=torch.int32)
    tg.grouped_matmul(a[0], b.expand(2, 7, 4), offs).sum().backward()

multiplies(triton_gemm)
for name in ("ops", "grouped", "scaled", "ops"):
    importlib.reload(importlib.import_module(f"triton_gemm.functional.{name}"))
    multiplies(triton_gemm)
for name in [name for name in sys.modules if name.partition(".")[0] == "triton_gemm"]:
    del sys.modules[name]
import triton_gemm as again
assert again is not triton_gemm
multiplies(again)
"""


def test_modules_can_be_loaded_again() -> None:
    """As IPython's autoreload does it, and tests that delete modules."""
    printed(RELOADED)
