"""`grouped_matmul` with a gate, in Triton's interpreter: values, derivatives, transforms, and words for mistakes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support import planted_bugs
from tests.support.epilogue_truth import activated
from tests.support.group_truth import assert_gated, gated
from tests.support.kernel_mutants import kernels_with
from tests.support.patches import noted
from tests.support.product_views import assert_gradients_as_near_as_torchs, assert_vmap_is_each, draw, traced
from triton_gemm.problem import GATES, GemmProblem
from triton_gemm.runtime.plan import InterpretedPlan

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ENDS = ([10, 10, 11, 33], [0, 0, 0, 40], [0, 0, 0, 0], [1, 2, 3, 39])  # empty groups, one row, rows of no group
OFFS = torch.tensor([10, 10, 11, 33], dtype=torch.int32)


def experts(dtype: torch.dtype, M: int = 40, N: int = 24, K: int = 32, groups: int = 4) -> tuple[torch.Tensor, ...]:
    """Rows, and weights [G, N, K] of up and of gate as matrices [G, K, N]."""
    x, up, gate = (
        draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((M, K), (groups, N, K), (groups, N, K)))
    )
    return x, up.mT, gate.mT


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch of a product whether it has a gate."""
    return noted(monkeypatch, InterpretedPlan, "run", lambda self, *_: self.problem.gate)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT, DOUBLE], ids=str)
def test_every_gate(dtype: torch.dtype, name: str, launched: list[bool]) -> None:
    x, up, gate = experts(dtype)
    for ends in ENDS:
        offs = torch.tensor(ends, dtype=torch.int32)
        c = triton_gemm.grouped_matmul(x, up, offs, activation=name, gate=gate)
        assert c.dtype == dtype
        if dtype.itemsize == 2:
            assert_gated(x, up, gate, offs, GATES[name], c)
        else:
            truth, size = gated(x.double(), up.double(), gate.double(), offs, GATES[name])
            assert ((c.double() - truth).abs() <= (2.0**-18 if dtype == FLOAT else 2.0**-44) * size).all()
    assert launched == ([True] if dtype.itemsize == 2 else [False] * 2) * len(ENDS)


def test_integers_are_exact() -> None:
    """Sums are not rounded before the gate."""
    x, up, gate = (torch.randint(-3, 4, x.shape).to(BF16) for x in experts(BF16))
    c = triton_gemm.grouped_matmul(x, up, OFFS, activation="reglu", gate=gate)
    assert torch.equal(c, gated(x.double(), up.double(), gate.double(), OFFS, "relu")[0].to(BF16))


def test_one_launch_for_pairs_that_lie_alike(launched: list[bool]) -> None:
    """Halves of one weight along N too, transposed or not, expanded, and not aligned; two products for others, and
    nothing is copied."""
    x, up, gate = experts(BF16)
    packed = draw(4, 48, 32, dtype=BF16)
    flat = draw(2, 1 + 4 * 24 * 32, dtype=BF16)[:, 1:].reshape(-1)
    alike = {
        "halves": packed.mT.chunk(2, -1),
        "halves, row-major": packed.mT.contiguous().chunk(2, -1),
        "one matrix for all": (up[:1].expand(4, 32, 24), gate[:1].expand(4, 32, 24)),
        "not aligned": tuple(flat[i : i + 4 * 24 * 32].view(4, 24, 32).mT for i in (1, 1 + 3 * 24 * 32)),
        "negative views": (torch._neg_view(up), torch._neg_view(gate)),
    }
    columns = packed.mT.contiguous()
    others = {"orders": (up, gate.contiguous()), "alternating columns": (columns[..., ::2], columns[..., 1::2])}
    for kind, (b, g) in {**alike, **others}.items():
        c = triton_gemm.grouped_matmul(x, b, OFFS, activation="swiglu", gate=g)
        if kind in alike:
            assert_gated(x, b, g, OFFS, "silu", c)
        else:
            truth, _ = gated(x.double(), b.double(), g.double(), OFFS, "silu")
            assert ((c.double() - truth).abs() <= 2.0**-6 * (truth.abs() + 1)).all(), kind
    assert launched == [True] * len(alike) + [False] * 2 * len(others)


BUGS = {
    "one gate for all groups": ("gate_ptr + batch * whole(", "gate_ptr + 0 * batch * whole("),
    "the gate stays at its first k-tile": ("gate_ptrs += BLOCK_K if B_UNIT", "gate_ptrs += 0 if B_UNIT"),
    "the tail of the gate is not masked": ("tl.load(gate_ptrs, mask=b_mask_k[:, None] &", "tl.load(gate_ptrs, mask="),
}


@planted_bugs.with_each(BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    """By the portable kernel, of rows that end inside of k-tiles, amid NaN."""
    package = kernels_with([BUGS[bug]] if bug in BUGS else [], tmp_path)
    portable, launch = (import_module(f"{package.__name__}.{part}") for part in ("portable", "launch"))
    first, *rest = experts(BF16, K=40)
    x, up, gate = (
        torch.nn.functional.pad(x, (0, 8), value=torch.nan)[..., :40] for x in (first, *(w.mT for w in rest))
    )
    up, gate, c = up.mT, gate.mT, torch.full((40, 24), torch.nan).to(BF16)
    problem = GemmProblem.of(x, up, c, activation="silu", groups="m", gate=True)
    made = portable.launches(problem, portable.host.GATED[1])
    operands = {"a": x, "b": up, "c": c, "gate": gate, "ends": OFFS}
    operands |= {t.name: torch.zeros(t.shape, dtype=t.dtype) for one in made for t in one.temporaries}
    for one in made:
        one.kernel[one.grid](**launch.materialise(one, operands, {"alpha": 1.0, "beta": 0.0}), **one.options)
    with planted_bugs.caught(bug):
        assert_gated(x, up, gate, OFFS, "silu", c)


def test_to_fp32() -> None:
    x, up, gate = experts(HALF)
    c = triton_gemm.grouped_matmul(x, up, OFFS, out_dtype=FLOAT, activation="geglu", gate=gate)
    assert c.dtype == FLOAT
    assert_gated(x, up, gate, OFFS, "gelu", c)


@pytest.mark.parametrize("groups", [1, 3])
def test_batches(groups: int, launched: list[bool]) -> None:
    """Without offs, as experts with a capacity have them."""
    x, up, gate = draw(groups, 9, 32, dtype=BF16), *experts(BF16, groups=groups)[1:]
    truth = activated(x.double() @ gate.double(), "silu") * (x.double() @ up.double())
    for out_dtype, roundoff in ((None, 2.0**-8), (FLOAT, 2.0**-20)):
        c = triton_gemm.grouped_matmul(x, up, out_dtype=out_dtype, activation="swiglu", gate=gate)
        assert c.dtype == out_dtype or BF16
        assert ((c.double() - truth).abs() <= roundoff * truth.abs() + 2.0**-12).all()
    assert launched == [True, False, False]
    operands = [x[:, :2, :2].double().requires_grad_() for x in (x, up, gate)]
    batch = lambda x, up, gate: triton_gemm.grouped_matmul(x, up, activation="swiglu", gate=gate)  # noqa: E731
    assert torch.autograd.gradcheck(batch, operands, fast_mode=True)


@pytest.mark.parametrize("name", GATES)
def test_derivatives(name: str) -> None:
    """The first; `test_support` has the second."""
    operands = [x.detach().clone().requires_grad_() for x in experts(DOUBLE, 4, 2, 3, 2)]
    offs = torch.tensor([1, 3], dtype=torch.int32)
    product = lambda x, up, gate: triton_gemm.grouped_matmul(x, up, offs, activation=name, gate=gate)  # noqa: E731
    assert torch.autograd.gradcheck(product, operands, fast_mode=True)


@pytest.mark.parametrize("out_dtype", [None, FLOAT], ids=str)
def test_gradients_of_16_bits_are_as_torchs(out_dtype: torch.dtype | None) -> None:
    how = {"out_dtype": out_dtype, "activation": "swiglu"}
    assert_gradients_as_near_as_torchs(
        lambda x, up, gate: triton_gemm.grouped_matmul(x, up, OFFS, gate=gate, **how),
        lambda x, up, gate: gated(x, up, gate, OFFS, "silu")[0],
        experts(BF16),
    )


@pytest.mark.parametrize("wanted", range(3))
def test_only_the_gradients_asked_for_and_no_product_again(wanted: int) -> None:
    operands = [x.detach() for x in experts(BF16, 20, 6, 8, 2)]
    operands[wanted].requires_grad_()
    offs = torch.tensor([8, 15], dtype=torch.int32)
    c = triton_gemm.grouped_matmul(operands[0], operands[1], offs, activation="geglu", gate=operands[2])
    with FlopCounterMode(display=False) as flops:
        c.sum().backward()
    products = 2 if wanted == 0 else 1  # by both weights, or to one
    assert flops.get_total_flops() == products * (2 * 20 * 8 * 6)
    assert [x.grad is not None for x in operands] == [i == wanted for i in range(3)]
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        torch.ops.triton_gemm.grouped_gemm(*operands[:2], offs, activation="silu", gate=operands[2])
    assert flops.get_total_flops() == 2 * (2 * 20 * 8 * 6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (None, None, 1, None)], ids=str)
def test_vmap_also_of_gradients(in_dims: tuple[int | None, ...]) -> None:
    each = [(*experts(DOUBLE, 5, 3, 4, 2), torch.tensor(ends, dtype=torch.int32)) for ends in ([2, 4], [1, 5])]

    def both(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def product(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return triton_gemm.grouped_matmul(x, up, offs, activation="geglu_tanh", gate=gate)

        gradients = torch.func.grad(lambda *xs: product(*xs).sin().sum(), (0, 1, 2))(x, up, gate)
        return product(x, up, gate), *gradients

    assert_vmap_is_each(both, each, in_dims)


def test_the_operator_is_sound() -> None:
    x, up, gate = (x.detach().requires_grad_() for x in experts(BF16, 20, 6, 8, 2))
    offs, operator = torch.tensor([8, 15], dtype=torch.int32), torch.ops.triton_gemm.grouped_gemm.default
    torch.library.opcheck(operator, (x, up, offs, None, None, None, "gelu", gate))
    for activation, other in ((None, gate), ("silu", gate[:1]), ("silu", gate.double())):
        with pytest.raises(RuntimeError, match="gate"):
            operator(x, up, offs, activation=activation, gate=other)


def test_compiled_it_is_one_operator() -> None:
    x, up, gate = experts(BF16)
    product = lambda x: triton_gemm.grouped_matmul(x, up, OFFS, activation="swiglu", gate=gate)  # noqa: E731
    found, named = traced(product, x)
    assert torch.equal(found, product(x))
    assert [name for name in named if "gemm" in name] == ["triton_gemm.grouped_gemm.default"]


def test_batch_invariance() -> None:
    x, up, gate = experts(BF16)
    c = triton_gemm.grouped_matmul(x, up, OFFS, activation="swiglu", gate=gate, batch_invariant=True)
    alone = torch.tensor([0, 0, 0, 22], dtype=torch.int32)
    some = triton_gemm.grouped_matmul(x[11:33], up, alone, activation="swiglu", gate=gate, batch_invariant=True)
    assert torch.equal(some, c[11:33])
    with triton_gemm.batch_invariant():
        assert torch.equal(triton_gemm.grouped_matmul(x, up, OFFS, activation="swiglu", gate=gate), c)
    with torch.no_grad():
        products = (triton_gemm.grouped_matmul(x, y, OFFS, batch_invariant=True) for y in (gate, up))
        assert torch.equal(torch.nn.functional.silu(next(products)) * next(products), c)


def test_forward_differentiation_is_refused() -> None:
    x, up, gate = experts(FLOAT)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forwards"):
        triton_gemm.grouped_matmul(x, up, OFFS, activation="swiglu", gate=forward_ad.make_dual(gate, gate))


X, UP, ENDS_OF_2 = torch.ones(4, 8), torch.ones(2, 8, 6), torch.tensor([2, 4], dtype=torch.int32)
MISTAKES = {
    "no gate": ((X, UP), {"gate": None}, ValueError, r"takes two weights, \[G, K, N\] each: mat_b and gate, and"),
    "no activation": ((X, UP), {"activation": None}, ValueError, "activation must be one of swiglu, geglu, .*not None"),
    "another activation": ((X, UP), {"activation": "silu"}, ValueError, 'must be "swiglu", the gate of silu'),
    "fewer": ((X, UP), {"gate": UP[:1]}, RuntimeError, r"mat_b float32\[2, 8, 6\], gate float32\[1, 8, 6\]"),
    "other columns": ((X, UP), {"gate": UP[..., :5]}, RuntimeError, r"mat_b .*\[2, 8, 6\], gate float32\[2, 8, 5\]"),
    "another length": ((X[:, :7], UP), {}, RuntimeError, r"mat_a float32\[4, 7\], mat_b .*, gate float32\[2, 8, 6\]"),
    "dtypes": ((X, UP), {"gate": UP.half()}, RuntimeError, r"all of one dtype.*gate float16\[2, 8, 6\]"),
    "groups of columns": ((UP.mT, X.T), {"gate": UP.mT}, RuntimeError, r"mat_a is \[M, K\].*mat_b float32\[8, 4\]"),
    "groups of K": ((X, X.T), {"gate": X.T}, RuntimeError, r"mat_b and gate are \[G, K, N\].*gate float32\[8, 4\]"),
    "batches": ((X.expand(3, 4, 8), UP, None), {}, RuntimeError, r"offs \[G, M, K\].*mat_a float32\[3, 4, 8\]"),
    "int8": (
        (X.to(torch.int8), UP.to(torch.int8)),
        {"gate": UP.to(torch.int8)},
        NotImplementedError,
        "not implemented",
    ),
    "no tensor": ((X, UP), {"gate": 1.5}, TypeError, "'gate' must be Tensor, not float"),
    "offs": ((X, UP, ENDS_OF_2.long()), {}, RuntimeError, "int32"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    operands, how, kind, words = MISTAKES[mistake]
    a, b, *offs = operands
    with pytest.raises(kind, match=words):
        triton_gemm.grouped_matmul(a, b, *(offs or [ENDS_OF_2]), **{"activation": "swiglu", "gate": UP, **how})
