"""Candidates of one class give the same bits, and add in the same tree, in Triton's interpreter and on the CPU.

`dots.add_at_once` says in which order a `tl.dot` adds here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.support.dot_order import add_at_once
from tests.support.fprev import Tree, of_products
from tests.support.kernel_cases import bits
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.kernels import gemv, portable
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.plan import InterpretedPlan
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection

AT_ONCE = {"half": 16, "ieee": 1, "fp64": 1, "tf32": 8, "bf16x3": 16}
PRECISIONS = pytest.mark.parametrize(("precision", "at_once"), AT_ONCE.items(), ids=AT_ONCE, indirect=["at_once"])
DTYPES = {"half": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture
def at_once(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_at_once(monkeypatch, request.param)


def multiply(a: torch.Tensor, b: torch.Tensor, selection: Selection) -> torch.Tensor:
    dtype = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    c = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=dtype)
    InterpretedPlan(GemmProblem.of(a, b, c, precision=selection.precision), selection).run(a, b, c)
    return c


def tree(selection: Selection, K: int, N: int = 16, M: int | None = None) -> Tree:
    """In which every element of the product is summed, of all rows at once or of M."""
    like = torch.empty(0, dtype=DTYPES.get(selection.precision, torch.float32))
    return of_products(K, lambda a: multiply(a, like.new_ones(K, N), selection), like, rows=M)


def configs(precision: str) -> list[portable.Config]:
    """Small ones of both instructions, and of every depth of k-tiles that parts of a short K have room for."""
    deepest = 16 if "x" in precision else 32
    small = [x for x in portable.CONFIGS[precision] if x.BLOCK_M * x.BLOCK_N <= 64 * 64 and deepest >= x.BLOCK_K]
    found = {}
    for x in reversed(small):
        found[x.BLOCK_K, x.BLOCK_M >= 64 and x.num_warps >= 4, x.BLOCK_M > x.BLOCK_N] = x
    return list(found.values())


@pytest.mark.few(shows=lambda precision, at_once: {precision == "half"})
@PRECISIONS
def test_equal_classes_give_equal_bits(precision: str, at_once: None) -> None:
    """Ragged tiles, k-tiles that end beyond K, parts of K, both ways round."""
    generator, dtype = torch.Generator().manual_seed(0), DTYPES.get(precision, torch.float32)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((67, 152), (152, 24)))
    problem = GemmProblem.of(a, b, torch.empty(67, 24, dtype=dtype), precision=precision)
    results = defaultdict(list)
    for config in configs(precision):
        for split_k, swap_ab in ((1, False), (1, True), (2, False), (3, True)):
            selection = Selection(Algorithm("portable", config, split_k, swap_ab), "", precision)
            given = problem.swap_ab() if swap_ab else problem
            assert portable.illegal(given, INTERPRETER, config, split_k) is None
            results[bit_class(problem, selection)].append(bits(multiply(a, b, selection)))
    assert any(len(found) > 1 for found in results.values())
    for name, (first, *others) in results.items():
        assert all(torch.equal(first, other) for other in others), name
    if precision != "fp64":  # of which few sums are not the same by chance
        whole = [found[0] for name, found in results.items() if "one sum" in name]
        cut = [found[0] for name, found in results.items() if "parts" in name]
        assert not any(torch.equal(x, y) for x in whole for y in cut)


@pytest.mark.parametrize(("precision", "at_once"), [("half", 16), ("ieee", 1)], indirect=["at_once"])
def test_equal_classes_add_in_the_same_tree(precision: str, at_once: None) -> None:
    K, trees, classes = 64, defaultdict(set), defaultdict(set)
    problem = GemmProblem.of(
        *(torch.empty(s, dtype=DTYPES.get(precision, torch.float32)) for s in ((K, K), (K, 16), (K, 16))),
        precision=precision,
    )
    for config in configs(precision)[:2]:
        for split_k in (1, 2):
            selection = Selection(Algorithm("portable", config, split_k), "", precision)
            found = tree(selection, K, 5)
            name = bit_class(problem, selection)
            trees[name].add(found), classes[found].add(name)
    assert all(len(found) == 1 for found in trees.values())
    assert len(classes) > 1, "parts of K are another tree"


@pytest.mark.parametrize("at_once", [16], indirect=True)
def test_the_tree_of_a_chain_of_instructions(at_once: None) -> None:
    """16 products at once, each with all before: what the class says."""
    chain: Tree = frozenset(range(16))
    for k in range(16, 64, 16):
        chain = frozenset([chain, *range(k, k + 16)])
    assert tree(Selection(Algorithm("portable", portable.CONFIGS["half"][-3]), ""), 64, 5) == chain


def test_gemv_adds_in_the_same_tree_for_every_row_swapped_or_not() -> None:
    problem = GemmProblem.of(*(torch.empty(s) for s in ((2, 64), (64, 8), (2, 8))), precision="ieee")
    config = gemv.Config(2, 16, 8, 1)
    selections = [Selection(Algorithm("gemv", config, split_k), "", "ieee") for split_k in (1, 2)]
    assert len({tree(selection, 16, 5, 2) for selection in selections}) == 2
    assert len({bit_class(problem, selection) for selection in selections}) == 2
