"""torch's products, one by one, in Triton's interpreter: their values, shapes, strides, `out`, words for mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_gemm
from tests.support.patches import noted
from tests.support.product_checks import NAN
from tests.support.product_views import (
    BATCHES,
    EXPANDED,
    VIEWS,
    assert_product,
    assert_views_with_the_sign_turned,
    draw,
)
from tests.support.wrong_products import (
    FACTORS,
    WITH_MISTAKES,
    assert_mistake_is_torchs,
    assert_same_words,
    ones,
    with_nested,
    words,
)
from triton_gemm.functional import ops, rules
from triton_gemm.runtime import plan

HALF, BF16, FLOAT, DOUBLE, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8
DTYPES = [FLOAT, HALF, BF16]
SIZE = st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 31, 33, 40, 64, 65, 130])


@pytest.fixture(autouse=True, scope="module")
def poisoned_outputs() -> Iterator[None]:
    """Every torch.empty is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- Values ---


ANY_BATCH = st.one_of(st.just("none"), st.sampled_from(list(BATCHES)))
ANY_VIEW = st.sampled_from([*VIEWS, *EXPANDED])


@pytest.mark.full
@settings(max_examples=250, deadline=None, derandomize=True)
@given(ANY_BATCH, SIZE, SIZE, SIZE, st.sampled_from([*DTYPES, DOUBLE]), ANY_VIEW, ANY_VIEW, st.booleans())
def test_matmul_of_any_batches_and_strides(
    batches: str, M: int, N: int, K: int, dtype: torch.dtype, lay_a: str, lay_b: str, out: bool
) -> None:
    views = VIEWS | EXPANDED
    batch_a, batch_b = BATCHES[batches]
    a, b = (views[lay_a](draw(*batch_a, M, K, dtype=dtype)), views[lay_b](draw(*batch_b, K, N, dtype=dtype, seed=1)))
    c = triton_gemm.matmul(a, b, out=torch.empty(0, dtype=dtype) if out else None)
    assert c.shape == torch.matmul(a, b).shape and c.is_contiguous()
    assert_product(c, a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *(((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 6)), ((3, 5, 7), (7,)), ((7,), (2, 3, 7, 6)), ((0,), (0,))),
        ((5, 0), (0,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("view", VIEWS)
def test_matmul_of_vectors(a: tuple[int, ...], b: tuple[int, ...], view: str) -> None:
    x, y = VIEWS[view](draw(*a)), VIEWS[view](draw(*b, seed=1))
    out = torch.empty(torch.matmul(x, y).shape)
    assert triton_gemm.matmul(x, y, out=out) is out
    for c in (triton_gemm.matmul(x, y), out):
        assert_product(c, x, y)


def test_later_calls_are_cast_as_the_first() -> None:
    """Under autocast and outside of it, whichever came first."""
    a, b = draw(20, 33), draw(33, 9)
    for entered in (False, True, False, True):
        with torch.autocast("cpu", BF16, enabled=entered):
            assert {f(a, b).dtype for f in (triton_gemm.matmul, triton_gemm.mm)} == {BF16 if entered else FLOAT}


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_out_dtype_leaves_sums_in_fp32(dtype: torch.dtype) -> None:
    a, b = draw(3, 20, 33, dtype=dtype), draw(3, 33, 9, dtype=dtype)
    how: dict[str, Any] = {"out_dtype": FLOAT}
    assert_product(triton_gemm.mm(a[0], b[0], FLOAT), a[0], b[0], **how)
    assert_product(triton_gemm.mm(a[0], b[0], out_dtype=FLOAT, out=torch.empty(20, 9)), a[0], b[0], **how)
    assert_product(triton_gemm.bmm(a, b, **how), a, b, **how)
    for input_dtype in (dtype, FLOAT):
        input = draw(3, 20, 9, dtype=input_dtype)
        for added in (input[0], input[0, 0]):
            assert_product(triton_gemm.addmm(added, a[0], b[0], beta=2, **how), a[0], b[0], added, beta=2, **how)
        assert_product(triton_gemm.baddbmm(input, a, b, **how), a, b, input, **how)


def test_int8_has_one_out_dtype() -> None:
    a = torch.full((4, 400), 100, dtype=torch.int8)
    assert triton_gemm.mm(a, a.T, out_dtype=torch.int32).equal(torch.full((4, 4), 4_000_000, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"out_dtype must be .*, not torch\.int8 of torch\.int8"):
        triton_gemm.mm(a, a.T, out_dtype=torch.int8)


def test_int8_has_no_epilogue() -> None:
    a, b = torch.ones(2, 3, dtype=INT8), torch.ones(3, 5, dtype=INT8)
    with pytest.raises(NotImplementedError, match=r"addmm is not implemented for torch\.int8"):
        triton_gemm.addmm(torch.ones(5, dtype=INT8), a, b)
    with pytest.raises(NotImplementedError, match=r"linear is not .* int8 goes without bias"):
        triton_gemm.linear(a, b.t(), None, "relu")


def test_a_precision_is_used_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(plan, "multiply", lambda a, b, c, request, *_: used.append(request.precision))
    a, b, row, how = ones(2, 3, 3), ones(2, 3, 3), ones(3), {"precision": "bf16x6"}
    triton_gemm.matmul(a, b, **how), triton_gemm.bmm(a, b, **how), triton_gemm.baddbmm(row, a, b, **how)
    triton_gemm.mm(a[0], b[0], **how), triton_gemm.mv(a[0], row, **how), triton_gemm.addmm(row, a[0], b[0], **how)
    triton_gemm.linear(a, b[0], row, **how)
    assert used == ["bf16x6"] * 7
    with pytest.raises(ValueError, match=r"mv\(\): precision must be one of ieee, "):
        triton_gemm.mv(a[0], row, precision="fp8")


# --- Nothing is copied ---


@pytest.mark.parametrize(
    ("a", "b", "shapes"),
    [
        pytest.param(draw(2, 3, 4, 5), draw(5, 6), [(24, 5)], id="one weight: rows of one matrix"),
        pytest.param(draw(4, 2, 5).transpose(0, 1), draw(5, 6), [(2, 4, 5)], id="rows apart: a batch with stride 0"),
        pytest.param(draw(2, 3, 1, 5).transpose(0, 1), draw(5, 6), [(3, 2, 5)], id="single rows, not in order"),
        pytest.param(draw(2, 3, 4, 5), draw(2, 3, 5, 6), [(6, 4, 5)], id="two dimensions of batches"),
        pytest.param(draw(2, 4, 3, 5).transpose(1, 2), draw(2, 3, 5, 6), [(3, 4, 5)] * 2, id="heads inside of rows"),
        pytest.param(draw(3, 1, 4, 5), draw(2, 5, 6), [(3, 4, 5)] * 2, id="each with each"),
        pytest.param(draw(4, 5), draw(7, 5, 6), [(7, 4, 5)], id="one matrix, many weights"),
        pytest.param(draw(8, 4, 10)[::2, :, ::2], draw(4, 5, 6).flip(0), [(4, 4, 5)], id="every other"),
    ],
)
def test_operands_are_multiplied_where_they_lie(
    a: torch.Tensor, b: torch.Tensor, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def where(*operands: Any) -> list[int]:
        return [x.untyped_storage().data_ptr() for x in operands[:2]]

    seen = noted(monkeypatch, plan, "multiply", lambda *given: (given[0].shape, where(*given)))
    assert_product(triton_gemm.matmul(a, b), a, b)
    assert seen == [(shape, where(a, b)) for shape in shapes]


def test_a_bias_for_each_row_keeps_matrices_apart() -> None:
    a, b, bias = draw(2, 20, 33), draw(33, 9), draw(20, 1)
    assert_product(ops.gemm(a, b, bias), a, b, bias)


# --- out= ---


@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
@pytest.mark.parametrize("name", ["matmul", "mm", "bmm", "mv", "addmm", "baddbmm"])
def test_out_is_filled_where_it_lies(name: str, dtype: torch.dtype) -> None:
    batch = (3,) if "bmm" in name else ()
    a, b, input = (draw(*shape, dtype=dtype) for shape in ((*batch, 20, 33), (*batch, 33, 9), (9,)))
    operands = (a, b[..., 0]) if name == "mv" else (a, b)
    added = (input,) if "add" in name else ()
    function, shape = getattr(triton_gemm, name), torch.matmul(*operands).shape
    buffer = torch.full((*shape[:-1], 3 * shape[-1]), NAN, dtype=dtype)
    turned = torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    for out in (torch.empty(shape, dtype=dtype), buffer[..., : 2 * shape[-1] : 2], turned):
        before = out.stride()
        assert function(*added, *operands, out=out) is out and out.stride() == before
        assert_product(out, *operands, *added)
    assert int((~buffer.isnan()).sum()) == shape.numel(), "wrote between the elements of a strided out"


def test_what_a_backward_wants_is_not_written_unnoticed() -> None:
    """Writing to `out` increments its version counter, so that the backward raises as torch's does."""
    w, x, ones = draw(4, 4).requires_grad_(), draw(4, 4), torch.ones(4, 4)
    loss = (x * w).sum()
    triton_gemm.mm(ones, ones, out=x)
    assert x._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_of_inference_mode() -> None:
    with torch.inference_mode():
        out = torch.empty(4, 4)
    for mm in (torch.mm, triton_gemm.mm):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not"):
            mm(torch.ones(4, 4), torch.ones(4, 4), out=out)
    with torch.inference_mode():
        assert triton_gemm.mm(torch.ones(4, 4), torch.ones(4, 4), out=out).equal(torch.full((4, 4), 4.0))


@pytest.mark.parametrize("which", ["input", "row of out", "overlapping", "mat1", "mat2", "mat1 and input"])
@pytest.mark.parametrize("beta", [1, 0.5])
def test_out_may_be_what_is_added(which: str, beta: float) -> None:
    memory = draw(26, 24)
    out, a, b, input = memory[:24], draw(24, 24), draw(24, 24, seed=1), draw(24, 24, seed=2)
    if "input" in which:
        input = out
    elif which == "row of out":
        input = out[5]
    elif which == "overlapping":
        input = memory[2:]
    a, b = out if "mat1" in which else a, out if which == "mat2" else b
    kept = [x.clone() for x in (a, b, input)]
    triton_gemm.addmm(input, a, b, beta=beta, out=out)
    assert_product(out, *kept, beta=beta)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_is_read_may_be_what_is_resized() -> None:
    a, b, row = draw(20, 33), draw(33, 9), draw(9)
    kept_a, kept_row = a.clone(), row.clone()
    assert_product(triton_gemm.addmm(row, a, b, out=row), a, b, kept_row)
    assert_product(triton_gemm.mm(a, b, out=a), kept_a, b)


def test_adding_in_place_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c, a, b = draw(20, 9), draw(20, 33), draw(33, 9)
    before = c.clone()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied"))
    triton_gemm.addmm(c, a, b, out=c)
    monkeypatch.undo()
    assert_product(c, a, b, before)


def test_views_with_the_sign_turned() -> None:
    assert_views_with_the_sign_turned("cpu")


# --- Mistakes ---

H = {"dtype": HALF}
D = {"dtype": DOUBLE}


@WITH_MISTAKES
def test_a_mistake_raises_what_torch_raises(name: str, arguments: tuple[Any, ...], out: torch.Tensor | None) -> None:
    assert_mistake_is_torchs(name, arguments, out)


def test_a_wrong_text_or_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours come from torch, so a comparison with torch's must be seen to fail."""
    a, b = ones(2, 3), ones(4, 5)
    for wrong in (RuntimeError("mat1 and mat2 cannot be multiplied"), ValueError(words(lambda: torch.mm(a, b))[1])):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(rules, "mm", Mock(side_effect=wrong))
            assert_same_words(lambda: torch.mm(a, b), lambda: triton_gemm.mm(a, b))


def test_what_torch_would_multiply_is_refused_all_the_same() -> None:
    shapes = r"input float32\[2, 3\], mat2 float32\[3, 5\]"
    with pytest.raises(RuntimeError, match=f"mm: operands of these shapes are not taken; got {shapes}"):
        rules.refuse(torch.mm, input=ones(2, 3), mat2=ones(3, 5))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("argument", ["beta", "alpha"])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_factors_are_what_torch_takes_for_numbers(name: str, argument: str, factor: str) -> None:
    a, b, row, how = ones(2, 3), ones(3, 5), ones(5), {argument: FACTORS[factor]}
    if name == "baddbmm":
        a, b = a.expand(2, 2, 3), b.expand(2, 3, 5)
    try:
        expected = getattr(torch, name)(row, a, b, **how)
    except (TypeError, RuntimeError) as error:
        with pytest.raises(Exception, match=argument if isinstance(error, TypeError) else None) as caught:
            getattr(triton_gemm, name)(row, a, b, **how)
        assert caught.type is type(error)
        if not isinstance(error, TypeError):  # of which torch lists its signatures
            assert str(caught.value).startswith(str(error).splitlines()[0])
    else:
        assert torch.equal(getattr(triton_gemm, name)(row, a, b, **how), expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    for name, argument, arguments, more in with_nested(layout):
        if argument in ("beta", "alpha"):
            error: tuple[type[Exception], str] = TypeError, f"argument '{argument}' must be Number, not a 3-D Tensor"
        else:
            error = NotImplementedError, rf"{name}\(\): argument '{argument}'.* is a nested tensor"
        with pytest.raises(error[0], match=error[1]):
            getattr(triton_gemm, name)(*arguments, **more)


@pytest.mark.parametrize("name", ["matmul", "mm", "bmm", "mv", "addmm", "baddbmm"])
@pytest.mark.parametrize("wrong", ["operand", "out", "dtype", "overlap", "type"])
def test_an_out_that_cannot_be(name: str, wrong: str) -> None:
    batch = (2,) if "bmm" in name else ()
    operands = (ones(*batch, 3, 4), ones(4) if name == "mv" else ones(*batch, 4, 5))
    added = (ones(5),) if "add" in name else ()
    out: Any = torch.empty(torch.matmul(*operands).shape)
    if wrong == "operand":
        operands[1].requires_grad_()
    elif wrong == "out":
        out.requires_grad_()
    elif wrong == "dtype":
        out = out.double()
    elif wrong == "overlap":
        out = torch.empty(1).expand_as(out)
    calls = [
        lambda m=m: getattr(m, name)(*added, *operands, out=[1] if wrong == "type" else out)
        for m in (torch, triton_gemm)
    ]
    if wrong == "overlap" and name in ("bmm", "mv"):  # torch writes as it comes
        calls[0] = calls[1]
    (kind, text), (our_kind, our_text) = map(words, calls)
    assert our_kind is kind
    if not (wrong == "type" or (name == "mv" and wrong == "dtype")):  # torch lists its signatures; speaks of addmv
        assert our_text.startswith(text.split(". ")[0].rstrip("."))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: triton_gemm.mm(ones(2, 3), ones(3, 5), HALF), "out_dtype must be the same as input dtype or fp32 for"),
        (lambda: triton_gemm.mm(ones(2, 3, **H), ones(3, 5, **H), BF16), "out_dtype must be the same as input dtype"),
        (
            lambda: triton_gemm.mm(ones(2, 3, **H), ones(3, 5, **H), FLOAT, out=ones(2, 5, **H)),
            "out_dtype must be the same as the dtype of the provided out tensor",
        ),
        (
            lambda: triton_gemm.addmm(ones(5, **D), ones(2, 3, **H), ones(3, 5, **H), FLOAT),
            "self dtype must match either out_dtype or mat1 dtype",
        ),
        (
            lambda: triton_gemm.baddbmm(ones(5, dtype=BF16), ones(2, 2, 3, **H), ones(2, 3, 5, **H), FLOAT),
            "self dtype must match either out_dtype or batch1 dtype",
        ),
    ],
)
def test_out_dtypes_that_cannot_be(call: Any, text: str) -> None:
    """torch has them on CUDA only; the words are those of its source (ATen/native/cuda/Blas.cpp)."""
    kind, message = words(call)
    assert kind is RuntimeError and message.startswith(text)


def test_what_is_no_number_or_activation_is_named() -> None:
    with pytest.raises(TypeError, match=r"addmm\(\): argument 'beta' must be Number, not str"):
        triton_gemm.addmm(ones(5), ones(2, 3), ones(3, 5), beta="1")
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, gelu_tanh, silu or None, not 'tanh'"):
        triton_gemm.linear(ones(2, 3), ones(5, 3), None, "tanh")
    with pytest.raises(ValueError, match=r"baddbmm\(\): activation must be one of relu, .* or None, not 1"):
        triton_gemm.baddbmm(ones(5), ones(2, 2, 3), ones(2, 3, 5), activation=1)


def test_autocast_does_not_hide_what_is_wrong() -> None:
    """With `out` operands are not cast, and torch, asked for its words, must not cast them either."""
    a, b = torch.ones(3, 4), torch.ones(4, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
        triton_gemm.mm(a, b, out=torch.empty(3, 5))
