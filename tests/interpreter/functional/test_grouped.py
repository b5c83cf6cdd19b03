"""triton_gemm.grouped_matmul in Triton's interpreter: the three kinds of groups, whatever their sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support.epilogue_truth import activated
from tests.support.group_truth import KINDS, assert_right, assert_right_as_torchs, draw
from tests.support.product_views import assert_vmap_is_each
from triton_gemm.kernels import groups
from triton_gemm.kernels.launch import materialise
from triton_gemm.problem import ACTIVATIONS

ENDS = ([10, 10, 33], [0, 0, 40], [0, 0, 0], [40, 40, 40], [40], list(range(0, 41)), [39, 40])


def int32(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_every_size(kind: str, ends: list[int]) -> None:
    for dtype in (torch.bfloat16, torch.float32) if len(ends) < 10 else (torch.float16,):
        a, b = draw(kind, 40, len(ends), 50, 24, dtype)
        assert_right(a, b, int32(ends), triton_gemm.grouped_matmul(a, b, int32(ends)))


@pytest.mark.parametrize("ends", [[16, 32, 33], [0, 15, 80], [80], [0, 0, 0], [48, 40, 90], [1, 2, 3, 4, 64]], ids=str)
@pytest.mark.parametrize("band", [1, 2, 8])
def test_the_list_of_tiles_has_each_once(ends: list[int], band: int) -> None:
    """Those of a group one after another, and after all groups the rows that belong to none."""
    M, N, side = 80, 24, 16
    problem = SimpleNamespace(M=M, N=N, batch=len(ends))
    launch = groups.launch(problem, SimpleNamespace(BLOCK_M=side, BLOCK_N=side), band)
    (temporary,) = launch.temporaries
    tiles = torch.full(temporary.shape, -1, dtype=temporary.dtype)
    arguments = materialise(launch, {"ends": int32(ends), "tiles": tiles}, {})
    launch.kernel[launch.grid](**arguments, **launch.options)
    within = [min(end, M) for end in ends]
    expected = []
    for group, (begin, end) in enumerate(zip([0, *within], [*within, M], strict=True)):
        rows = range(begin, end, side)
        expected.append([(group, row, column, end) for row in rows for column in range(-(-N // side))])
    count = sum(map(len, expected))
    assert tiles[0, :2].tolist() == [count, len(ends)] and (tiles[1 + count :] == -1).all()
    found = iter(map(tuple, tiles[1 : 1 + count].tolist()))
    for of_group in expected:
        assert sorted(next(found) for _ in of_group) == of_group


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_precision_and_out_dtype(kind: str, precision: str) -> None:
    offs = int32([7, 30])
    a, b = draw(kind, 40, 2, 50, 24, torch.float32)
    assert_right(a, b, offs, triton_gemm.grouped_matmul(a, b, offs, precision=precision), precision)
    a, b = a.half(), b.half()
    c = triton_gemm.grouped_matmul(a, b, offs, out_dtype=torch.float32)
    assert c.dtype == torch.float32
    assert_right(a, b, offs, c)


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(kind: str, name: str) -> None:
    """Before the one rounding; what belongs to no group stays 0; with gradients by torch."""
    offs = int32([7, 30])
    a, b = draw(kind, 40, 2, 50, 24, torch.bfloat16)
    truth = activated(triton_gemm.grouped_matmul(a.double(), b.double(), offs), name)
    c = triton_gemm.grouped_matmul(a, b, offs, activation=name)
    assert ((c.double() - truth).abs() <= 2.0**-8 * truth.abs() + 2.0**-14).all()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(triton_gemm.grouped_matmul, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(a, b, offs, activation=name), c)
    a, b = (x.requires_grad_() for x in draw(kind, 5, 2, 3, 2, torch.float64))
    if name in ("relu", "silu"):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            of_groups = lambda a, b: triton_gemm.grouped_matmul(a, b, int32([2, 4]), activation=name)  # noqa: E731
            assert check(of_groups, (a, b), fast_mode=True)


def test_an_activation_of_batches() -> None:
    a, b = torch.randn(3, 5, 8), torch.randn(3, 8, 6)
    torch.testing.assert_close(triton_gemm.grouped_matmul(a, b, activation="gelu"), activated(a @ b, "gelu"))
    with pytest.raises(ValueError, match=r"grouped_matmul\(\): activation must be one of"):
        triton_gemm.grouped_matmul(a, b, activation="tanh")


def test_no_groups_are_zero() -> None:
    for a, b in ((torch.ones(6, 8), torch.ones(0, 8, 4)), (torch.ones(0, 4, 8), torch.ones(8, 6))):
        assert not triton_gemm.grouped_matmul(a, b, int32([])).any()


def test_the_operator_checks_what_it_is_given() -> None:
    a, b = torch.ones(4, 8), torch.ones(2, 8, 4)
    for x, y, offs in ((a, b[:, 1:], int32([2, 4])), (a, b, int32([2, 4]).long()), (a, b, int32([4]))):
        with pytest.raises(RuntimeError):
            torch.ops.triton_gemm.grouped_gemm(x, y, offs)


def test_forward_differentiation_is_refused() -> None:
    a, b = torch.ones(4, 8), torch.ones(2, 8, 4)
    with forward_ad.dual_level():
        triton_gemm.grouped_matmul(a, b, int32([2, 4]))
        with pytest.raises(NotImplementedError, match="forwards"):
            triton_gemm.grouped_matmul(forward_ad.make_dual(a, a), b, int32([2, 4]))


def test_a_view_of_everything() -> None:
    """Windows, expanded matrices and ends at a distance of one another."""
    a, b = torch.randn(60, 90)[3:43, 5:55], torch.randn(1, 50, 24).expand(3, 50, 24)
    offs = int32([10, -1, 20, -1, 35])[::2]
    assert_right(a, b, offs, triton_gemm.grouped_matmul(a, b, offs))


@pytest.mark.parametrize("ends", [[90, 20, 40], [-5, 30, 90], [40, 0, 40]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ends_that_are_none_touch_nothing_outside(kind: str, ends: list[int]) -> None:
    a, b = draw(kind, 40, 3, 20, 16, torch.float32)
    assert triton_gemm.grouped_matmul(a, b, int32(ends)).isfinite().all() or ends == [40, 0, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_sum_is_zero(kind: str) -> None:
    a, b = draw(kind, 40, 2, 0 if kind != "products" else 6, 16, torch.float32)
    c = triton_gemm.grouped_matmul(a, b, int32([10, 30]))
    assert kind == "products" or not c.any()
    if kind == "products":
        assert not triton_gemm.grouped_matmul(a[:, :0], b[:0], int32([0, 0])).any()


@pytest.mark.few
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], ids=["first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, check: Callable[..., bool]) -> None:
    offs = int32([2, 2, 4])
    a, b = (x.requires_grad_() for x in draw(kind, 5, 3, 3, 2, torch.float64))
    assert check(triton_gemm.grouped_matmul, (a, b, offs), fast_mode=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 2, None), (None, None, 0)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """Also of gradients; and without torch's warning that it goes one after the other."""
    ends = [int32([2, 2, 4]), int32([1, 4, 5])]
    each = [(*draw("rows", 5, 3, 3, 2, torch.float64), offs) for offs in ends]

    def gradient(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = triton_gemm.grouped_matmul(a, b, offs)
        by_a, by_b = torch.func.grad(lambda *ab: triton_gemm.grouped_matmul(*ab, offs).sin().sum(), (0, 1))(a, b)
        return c, by_a, by_b

    assert_vmap_is_each(gradient, each, in_dims)


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradients_asked_for(wanted: int) -> None:
    operands = draw("rows", 20, 2, 8, 6, torch.float32)
    operands[wanted].requires_grad_()
    with FlopCounterMode(display=False) as flops:
        triton_gemm.grouped_matmul(*operands, int32([8, 20])).sum().backward()
    assert flops.get_total_flops() == 2 * (2 * 20 * 8 * 6)
    assert operands[wanted].grad is not None and operands[1 - wanted].grad is None


def test_the_operator_is_sound() -> None:
    for kind in ("rows", "products"):
        a, b = (x.requires_grad_() for x in draw(kind, 20, 2, 8, 6, torch.float32))
        torch.library.opcheck(torch.ops.triton_gemm.grouped_gemm.default, (a, b, int32([8, 15])))


def test_compiled_without_a_break_for_any_ends() -> None:
    compiled = torch.compile(triton_gemm.grouped_matmul, fullgraph=True, backend="aot_eager")
    for ends in ([5, 20], [0, 7]):
        a, b = draw("rows", 20, 2, 8, 6, torch.float32)
        assert_right(a, b, int32(ends), compiled(a, b, int32(ends)))


def test_matrices_in_batches_are_bmms() -> None:
    a, b = torch.randn(3, 5, 8), torch.randn(3, 8, 6)
    for _ in range(2):  # the second call takes the fast path
        assert torch.equal(triton_gemm.grouped_matmul(a, b), triton_gemm.bmm(a, b))


@pytest.mark.parametrize("shape", [(40, 16), (3, 40, 16)], ids=("groups", "batches"))
def test_autocast_casts_nothing(shape: tuple[int, ...]) -> None:
    """Nor does it for torch's grouped_mm. Errors name the dtypes that were passed."""
    a, b = torch.randn(shape), torch.randn(3, 16, 24)
    offs = int32([10, 20, 40]) if a.dim() == 2 else None
    for gate in ({}, {"gate": b, "activation": "swiglu"}):
        c = triton_gemm.grouped_matmul(a, b, offs, **gate)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(triton_gemm.grouped_matmul(a, b, offs, **gate), c)
            assert torch.nn.functional.grouped_mm(a, b, offs=offs).dtype == c.dtype == torch.float32
            with pytest.raises(RuntimeError, match=r"float32.*bfloat16|float != c10::BFloat16"):
                triton_gemm.grouped_matmul(a, b.bfloat16(), offs, **gate)
            gate = {name: b.int() if name == "gate" else x for name, x in gate.items()}
            with pytest.raises(NotImplementedError, match=r"grouped_matmul is not implemented for torch\.int32"):
                triton_gemm.grouped_matmul(a.int(), b.int(), offs, **gate)


MISTAKES = {
    "one dimension": lambda a, b, offs: (a[0], b, offs),
    "other lengths": lambda a, b, offs: (a, b[:, 1:], offs),
    "no offsets": lambda a, b, offs: (a, b),
    "offsets of batches": lambda a, b, offs: (b, b.mT, offs),
    "int64": lambda a, b, offs: (a, b, offs.long()),
    "fewer matrices": lambda a, b, offs: (a, b[:2], offs),
    "two dtypes": lambda a, b, offs: (a, b.float(), offs),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_torchs(mistake: str) -> None:
    a, b = draw("rows", 40, 3, 16, 24, torch.bfloat16)
    arguments = MISTAKES[mistake](a, b, int32([10, 20, 30]))
    with pytest.raises(RuntimeError):
        torch.nn.functional.grouped_mm(*arguments[:2], offs=arguments[2] if len(arguments) > 2 else None)
    with pytest.raises(RuntimeError):
        triton_gemm.grouped_matmul(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_as_torch(kind: str) -> None:
    assert_right_as_torchs(kind, 40, 16, 24, int32([10, 10, 40]))
