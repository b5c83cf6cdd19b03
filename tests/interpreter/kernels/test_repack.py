"""What the repacking kernel copies, in Triton's interpreter. `test_addresses.py` has the addresses that it touches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.interpreted_plans import run
from tests.support.kernel_cases import DTYPES
from tests.support.product_checks import NAN
from triton_gemm.arithmetic import EMULATED
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.kernels import portable, repack, tiles
from triton_gemm.problem import GemmProblem, Layout


@pytest.mark.parametrize(
    ("strides", "shape", "aligned", "expected"),
    [
        pytest.param((0, 64, 1), (9, 64), True, (1, 8), id="row-major"),
        pytest.param((0, 1, 64), (64, 9), True, (0, 8), id="column-major"),
        pytest.param((0, 64, 1), (9, 64), False, (1, 1), id="unaligned"),
        pytest.param((0, 100, 1), (9, 100), True, (1, 4), id="pitch"),
        pytest.param((0, 104, 1), (9, 102), True, (1, 2), id="a row's end"),
        pytest.param((30, 64, 1), (9, 64), True, (1, 2), id="batch stride"),
        pytest.param((0, 0, 1), (9, 64), True, (1, 8), id="expanded rows"),
        pytest.param((0, 64, 2), (9, 32), True, (None, 1), id="no unit stride"),
        pytest.param((0, 0, 0), (9, 32), True, (None, 1), id="one element"),
    ],
)
def test_vectors(strides, shape, aligned: bool, expected: tuple[int | None, int]) -> None:
    assert tiles.vector(Layout(strides, aligned), shape, torch.bfloat16) == expected


def test_every_problem_has_a_legal_config() -> None:
    """The least favourable: nothing aligned, everything in the epilogue."""
    for precision in portable.CONFIGS:
        dtype = DTYPES.get(precision, torch.float32)
        a, b = torch.empty(9, 66, dtype=dtype)[:, ::2], torch.empty(66, 9, dtype=dtype)[::2]
        c = torch.empty(9, 9, dtype=torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32)
        problem = GemmProblem.of(a, b.T.contiguous().T, c, has_beta=True, bias="m", activation="gelu")
        problem = replace(problem, precision=precision, scales="rows" if dtype.itemsize == 1 else None)
        assert any(portable.illegal(problem, INTERPRETER, c, 2) is None for c in portable.CONFIGS[precision])


# --- Repacking ---


def repacked(x: torch.Tensor, column_major: bool | None) -> torch.Tensor:
    """A view of the copy of x [batch, rows, columns], made on poisoned memory."""
    launch, layout = repack.launch("x", "out", Layout.of(x), tuple(x.shape), x.dtype, column_major=column_major)
    (temporary,) = launch.temporaries
    out = torch.full(temporary.shape, NAN).to(temporary.dtype)
    run(launch, {"x": x, "out": out})
    assert layout.tma_illegal(x.itemsize) is None
    if column_major is not None:
        assert layout.column_major == column_major or 1 in x.shape[1:]
    return out.as_strided(tuple(x.shape), layout.strides)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, 16, 70, 130]), st.sampled_from([1, 3, 8, 65, 600])),
    st.sampled_from(["rows", "columns"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
@example(torch.bfloat16, (2, 70, 65), "rows", None, 1, 1, True)
def test_repacking_copies_every_element(dtype, size, order, column_major, offset, step, expanded) -> None:
    batch, rows, columns = size
    if order == "columns":
        rows, columns = columns, rows
    count = (1 if expanded else batch) * rows * columns
    buffer = torch.full((offset + count * step,), NAN).to(dtype)
    buffer[offset::step] = torch.arange(count).remainder(251).to(dtype)
    x = buffer[offset::step].view(-1, rows, columns).expand(batch, rows, columns)
    if order == "columns":
        x = x.mT
    copy = repacked(x, column_major)
    assert torch.equal(copy, x)


@pytest.mark.parametrize("order", ["n", "t"])
@pytest.mark.parametrize("mode", EMULATED)
def test_planes_add_up(mode: str, order: str) -> None:
    """To all of fp32's bits with three planes of bf16; each plane is what rounding leaves over."""
    planes = EMULATED[mode]
    x = torch.randn(3, 37, 50) * 2.0 ** torch.randint(-60, 100, (3, 37, 50))
    x[0, 0, :4] = torch.tensor([torch.finfo().max, -torch.finfo().max, 0.0, -0.0])
    x[1, :4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    x = x if order == "n" else x.mT.contiguous().mT
    launch, layout = repack.launch("x", "out", Layout.of(x), tuple(x.shape), x.dtype, column_major=False, planes=planes)
    (out,) = launch.temporaries
    assert (out.shape[:3], out.dtype) == ((3, planes.count, 37), planes.dtype)
    assert layout.strides == (planes.count * 37 * out.shape[3], out.shape[3], 1)
    found = torch.full(out.shape, torch.nan, dtype=out.dtype)
    run(launch, {"x": x, "out": found})
    found = found[..., :50].double()
    ends = ~x.isfinite()
    assert torch.equal(found[:, 0].isnan(), x.isnan()) and torch.equal(found[:, 0][x.isinf()], x[x.isinf()].double())
    assert not found[:, 1:][ends[:, None].expand_as(found[:, 1:])].any(), "infinity less infinity"
    assert found[~ends[:, None].expand_as(found)].isfinite().all()
    error = (found.sum(1) - x.double())[~ends].abs()
    bits = {"bf16x3": 16, "bf16x6": 24, "bf16x9": 24, "tf32x3": 22}[mode]
    assert (error <= 2.0**-bits * x[~ends].double().abs()).all()
    normal = (x.abs() > 0) & (x.abs() < 1e38)
    assert (found[:, 1][normal].abs() <= 2.0 ** (-bits // planes.count) * found[:, 0][normal].abs()).all()


def test_repacking_keeps_bits() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).view(1, 256, 256)[:, :, :255]
    for column_major in (False, True):
        copy = repacked(x, column_major).contiguous()
        assert torch.equal(copy.view(torch.int16), x.contiguous().view(torch.int16))


def test_one_matrix_is_copied_once_for_a_whole_batch() -> None:
    x = torch.randn(1, 33, 9).expand(5, 33, 9)
    launch, layout = repack.launch("x", "out", Layout.of(x), (5, 33, 9), x.dtype)
    assert launch.temporaries[0].shape[0] == 1 and layout.strides[0] == 0
