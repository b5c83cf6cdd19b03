"""One table says what can be multiplied and how; nothing else compares the names in it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

import triton_gemm
from perf.measure.numerics import accumulation_error, mode_of
from triton_gemm import arithmetic
from triton_gemm.arithmetic import ARITHMETICS, EMULATED, MODES, Precision
from triton_gemm.kernels import portable

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "triton_gemm" / "arithmetic.py"


def is_kernel(node: ast.AST) -> bool:
    """Whether a function runs on the GPU: how it multiplies is its own."""
    decorators = getattr(node, "decorator_list", [])
    return any("jit" in ast.unparse(decorator) for decorator in decorators)


def names_in(node: ast.AST) -> bool:
    return any(isinstance(x, ast.Constant) and x.value in ARITHMETICS for x in ast.walk(node))


def comparisons(node: ast.AST) -> Iterator[int]:
    """Lines that choose by an arithmetic's name: that compare it, or look it up in a table on the spot."""
    if is_kernel(node):
        return
    if isinstance(node, ast.Compare) and any(map(names_in, (node.left, *node.comparators))):
        yield node.lineno
    if isinstance(node, ast.MatchValue) and names_in(node):
        yield node.lineno
    table = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
    if isinstance(table, ast.Dict) and any(key is not None and names_in(key) for key in table.keys):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from comparisons(child)


def test_no_module_compares_names_of_arithmetics() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*sorted((ROOT / "triton_gemm").rglob("*.py")), ROOT / "perf" / "measure" / "numerics.py"]
        if path != TABLE
        for line in comparisons(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'x = problem.precision == "ieee"',
        'x = 4 if "fp8" != precision else 2',
        'x = precision in ("half", "tf32")',
        'x = precision not in {"fp8", *OTHERS}',
        'x = {"half": None, "ieee": True}.get(precision, False)',
        'x = {"fp64": 8}[precision]',
        'match precision:\n    case "fp8 fast":\n        x = 1',
        'def f(p):\n    return p == "int8"',
    ],
)
def test_a_planted_comparison_is_seen(line: str) -> None:
    assert len(list(comparisons(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line", ["x = problem.arithmetic is HALF", 'f(precision="ieee")', '@triton.jit\ndef f(P):\n    return P == "tf32"']
)
def test_what_compares_no_name_passes(line: str) -> None:
    assert list(comparisons(ast.parse(line))) == []


def test_the_public_modes_are_fp32s() -> None:
    assert get_args(Precision) == MODES == get_args(triton_gemm.Precision)
    assert set(MODES) == {name for name, found in ARITHMETICS.items() if found.dtypes == (torch.float32,)}
    assert set(EMULATED) == set(MODES) - {"ieee", "tf32"}


def test_every_arithmetic_has_a_kernel_that_takes_everything() -> None:
    assert set(portable.CONFIGS) == set(ARITHMETICS)


def test_the_first_record_of_a_dtype_is_its_default() -> None:
    names = {dtype: arithmetic.default_arithmetic(dtype).name for dtype in (*arithmetic.DTYPES, *arithmetic.SCALED)}
    assert names == {
        torch.float32: "ieee",
        **dict.fromkeys((torch.float16, torch.bfloat16), "half"),
        torch.float64: "fp64",
        torch.int8: "int8",
        **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8"),
    }
    fast = {dtype: arithmetic.scaled_arithmetic(dtype, use_fast_accum=True).name for dtype in arithmetic.SCALED}
    assert fast == {**dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8 fast"), torch.int8: "int8"}


def test_terms_are_the_largest_products_the_smallest_first() -> None:
    for planes in EMULATED.values():
        sizes = [-(i + j) for i, j in planes.terms]
        left_out = [-(i + j) for i in range(planes.count) for j in range(planes.count) if (i, j) not in planes.terms]
        assert sizes == sorted(sizes) and max(left_out, default=-10) < min(sizes)
    assert [len(EMULATED[mode].terms) for mode in ("bf16x3", "tf32x3", "bf16x6", "bf16x9")] == [3, 3, 6, 9]


@pytest.mark.parametrize("name", ARITHMETICS)
def test_bounds_come_from_the_table(name: str) -> None:
    """Of one product the error is at least that of both operands, and it grows with K where sums are rounded."""
    found = ARITHMETICS[name]
    mode = mode_of(name, found.dtypes[0])
    assert accumulation_error(1, mode) >= 2 * found.operand_error + found.cut + found.unit_roundoff
    assert (accumulation_error(10_000, mode) > accumulation_error(100, mode)) != found.exact
