"""The operator within torch: autocast, checkpoints, subclasses, and modules in the place of layers that are there."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import triton_gemm
from tests.support.processes import printed
from tests.support.product_views import assert_autocast_casts_as_torch, compiled, draw
from triton_gemm.nn import GatedLinear, Linear

# --- Autocast ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch(dtype: torch.dtype) -> None:
    assert_autocast_casts_as_torch(dtype, "cpu")
    a, b = draw(2, 4, 5), draw(2, 5, 3)
    with torch.autocast("cpu", dtype):
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


@pytest.mark.parametrize("bias", [True, False])
def test_it_shares_the_parameters_of_a_layer(bias: bool) -> None:
    layer = torch.nn.Linear(5, 3, bias, dtype=torch.float64).eval()
    layer.weight.requires_grad_(False)
    ours, x = Linear.from_torch(layer, activation="relu"), torch.randn(4, 5, dtype=torch.float64)
    assert ours.weight is layer.weight and ours.bias is layer.bias and not ours.training
    torch.testing.assert_close(ours(x), torch.relu(layer(x)))
    assert [*ours.state_dict()] == [*layer.state_dict()] and "in_features=5, out_features=3" in repr(ours)
    assert Linear.from_torch(ours).weight is layer.weight and Linear.from_torch(ours).activation is None


@pytest.mark.parametrize(
    ("module", "how", "kind", "text"),
    [
        (torch.nn.Bilinear(2, 2, 2), {}, TypeError, "argument 'module' must be Linear, not Bilinear"),
        (type("Lora", (torch.nn.Linear,), {"forward": print})(2, 2), {}, TypeError, "Lora has a forward of its own"),
        (torch.nn.Linear(2, 2), {"activation": "swiglu"}, ValueError, "swiglu takes a second weight"),
    ],
)
def test_what_it_cannot_replace(module: Any, how: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Linear.from_torch(module, **how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gated_layer_shares_the_parameters_of_two(dtype: torch.dtype) -> None:
    up, gate = (torch.nn.Linear(32, 16, dtype=dtype) for _ in range(2))
    ours, x = GatedLinear.from_torch(up, gate), torch.randn(4, 32, dtype=dtype)
    assert ours.weight is up.weight and ours.gate_bias is gate.bias
    assert [*ours.state_dict()] == ["weight", "bias", "gate", "gate_bias"]
    torch.testing.assert_close(ours(x), torch.nn.functional.silu(gate(x)) * up(x), atol=0.02, rtol=0.02)
    ours(x).sum().backward()
    assert up.weight.grad is not None and gate.weight.grad is not None
    assert repr(ours) == "GatedLinear(in_features=32, out_features=16, bias=True, activation='swiglu')"


def test_a_gated_layer_of_its_own() -> None:
    torch.manual_seed(3)
    ours = GatedLinear(8, 6, bias=False, dtype=torch.float64, activation="reglu")
    torch.manual_seed(3)
    up, gate = (torch.nn.Linear(8, 6, bias=False, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), torch.relu(gate(x)) * up(x))


@pytest.mark.parametrize(
    ("up", "gate", "how", "kind", "text"),
    [
        ((2, 2), (2, 3), {}, ValueError, r"weights must be alike, not \[2, 2\]"),
        ((2, 2), (2, 2, False), {}, ValueError, "only one of the layers has a bias"),
        ((2, 2), (2, 2), {"activation": "silu"}, ValueError, 'must be "swiglu", the gate of silu'),
        ((2, 2), (2, 2), {"precision": "fast"}, ValueError, "precision must be one of ieee"),
    ],
)
def test_what_makes_no_gated_layer(up: Any, gate: Any, how: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        GatedLinear.from_torch(torch.nn.Linear(*up), torch.nn.Linear(*gate), **how)
    with pytest.raises(TypeError, match="argument 'gate' must be Linear, not Bilinear"):
        GatedLinear.from_torch(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2))


def test_linear_is_a_drop_in() -> None:
    theirs = torch.nn.Linear(9, 7)
    ours = Linear(9, 7)
    assert isinstance(ours, torch.nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for x in (draw(9), draw(4, 9), draw(2, 3, 9)):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.manual_seed(0)
    ours = Linear(9, 7, False, dtype=torch.float16, activation="silu")
    torch.manual_seed(0)
    theirs = torch.nn.Linear(9, 7, False, dtype=torch.float16)
    assert ours.bias is None and torch.equal(ours.weight, theirs.weight)
    torch.testing.assert_close(ours(draw(4, 9).half()), torch.nn.functional.silu(theirs(draw(4, 9).half())))


def test_linear_says_how_it_computes() -> None:
    layer = Linear(9, 7, activation="relu", precision="tf32")
    assert repr(layer) == "Linear(in_features=9, out_features=7, bias=True, activation='relu', precision='tf32')"
    assert repr(Linear(9, 7)) == repr(torch.nn.Linear(9, 7))
    with pytest.raises(ValueError, match=r"Linear\(\): activation must be one of"):
        Linear(9, 7, activation="tanh")
    with pytest.raises(ValueError, match=r"Linear\(\): swiglu takes a second weight: call linear .* with gate="):
        Linear(9, 7, activation="swiglu")
    with pytest.raises(ValueError, match=r"Linear\(\): precision says how fp32"):
        Linear(9, 7, dtype=torch.float16, precision="tf32")


def test_linear_is_copied_and_pickled() -> None:
    layer, x = Linear(9, 7, activation="gelu"), draw(4, 9)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), layer(x)) and other.activation == "gelu"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    layers = torch.nn.Sequential(Linear(9, 7, activation="gelu"), Linear(7, 9))
    gradients = []
    for run in (layers, lambda x: checkpoint(layers, x, use_reentrant=reentrant)):
        x = draw(4, 9).requires_grad_()
        layers.zero_grad()
        run(x).sin().sum().backward()
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])
    # Without gradients, as the reentrant one first runs it, the activation is fused and rounds once less.
    torch.testing.assert_close(*gradients, **({} if reentrant else {"rtol": 0, "atol": 0}))


class Quantized(torch.Tensor):
    """A weight that implements F.linear and nothing else, as torchao's do (pytorch/ao#391)."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            input, weight, bias = args
            return function(input, weight.as_subclass(torch.Tensor).round(), bias)
        if function in (torch.Tensor.t, torch.Tensor.mm, torch.Tensor.matmul):
            raise NotImplementedError(f"Quantized: {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_layer_whose_weight_was_quantized(activation: Any) -> None:
    layer = Linear(5, 3, activation=activation)
    weight, x = layer.weight.detach() * 4, draw(2, 5)
    del layer.weight
    layer.weight = weight.as_subclass(Quantized)
    expected = torch.nn.functional.linear(x, weight.round(), layer.bias)
    torch.testing.assert_close(layer(x), expected if activation is None else expected.relu())
