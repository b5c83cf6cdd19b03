"""Candidates of one class give the same bits, and add in the same tree, in Triton's interpreter and on the CPU.

The interpreter multiplies tiles by BLAS, in an order of its own. Here a `tl.dot` adds some products at once to what was
summed before, cut off below the last bits of the largest, as tensor cores do; or one after the other, as FMAs do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.cases import bits
from tests.fprev import Tree, refined
from triton_gemm.bit_classes import bit_class
from triton_gemm.device import INTERPRETER
from triton_gemm.kernels import gemv, portable
from triton_gemm.plan import InterpretedPlan
from triton_gemm.problem import GemmProblem
from triton_gemm.select import Selection

AT_ONCE = {"half": 16, "ieee": 1, "fp64": 1, "tf32": 8, "bf16x3": 16}
PRECISIONS = pytest.mark.parametrize(("precision", "at_once"), AT_ONCE.items(), ids=AT_ONCE, indirect=["at_once"])
DTYPES = {"half": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture
def at_once(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`tl.dot` as an instruction adds that many products."""

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        total = d.data
        for k in range(0, a.data.shape[-1], request.param):
            together = slice(k, k + request.param)
            products = a.data[:, together, None].astype(np.float64) * b.data[None, together].astype(np.float64)
            terms = np.concatenate([total[:, None], products], 1)
            if request.param > 1:
                unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - 25)
                terms = np.trunc(terms / unit) * unit
            total = terms.sum(1).astype(d.data.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    yield


def multiply(a: torch.Tensor, b: torch.Tensor, selection: Selection) -> torch.Tensor:
    dtype = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    c = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=dtype)
    InterpretedPlan(GemmProblem.of(a, b, c, precision=selection.precision), selection).run(a, b, c)
    return c


def tree(selection: Selection, K: int, N: int = 16, M: int | None = None) -> Tree:
    """In which every element of the product is summed, of all rows at once or of M."""
    dtype = DTYPES.get(selection.precision, torch.float32)
    big = 2.0**100

    pairs = list(combinations(range(K), 2))
    a = torch.ones(-(-len(pairs) // (M or 1)) * (M or 1), K, dtype=dtype)
    for row, (i, j) in zip(a, pairs, strict=False):
        row[i], row[j] = big, -big
    ones = torch.ones(K, N, dtype=dtype)
    c = torch.cat([multiply(rows, ones, selection) for rows in a.split(M or len(a))])
    assert (c == c[:, :1]).all(), "columns are summed otherwise"
    known = {pair: K - int(count) for pair, count in zip(pairs, c[:, 0], strict=False)}
    return refined(K, lambda i, others: [known[min(i, j), max(i, j)] for j in others])


def configs(precision: str) -> list[portable.Config]:
    """Small ones of both instructions, and of every depth of k-tiles that parts of a short K have room for."""
    deepest = 16 if "x" in precision else 32
    small = [x for x in portable.CONFIGS[precision] if x.BLOCK_M * x.BLOCK_N <= 64 * 64 and deepest >= x.BLOCK_K]
    found = {}
    for x in reversed(small):
        found[x.BLOCK_K, x.BLOCK_M >= 64 and x.num_warps >= 4, x.BLOCK_M > x.BLOCK_N] = x
    return list(found.values())


@PRECISIONS
def test_equal_classes_give_equal_bits(precision: str, at_once: None) -> None:
    """Ragged tiles, k-tiles that end beyond K, parts of K, both ways round."""
    generator, dtype = torch.Generator().manual_seed(0), DTYPES.get(precision, torch.float32)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((67, 152), (152, 24)))
    problem = GemmProblem.of(a, b, torch.empty(67, 24, dtype=dtype), precision=precision)
    results = defaultdict(list)
    for config in configs(precision):
        for split_k, swap_ab in ((1, False), (1, True), (2, False), (3, True)):
            selection = Selection("portable", config, "", None, split_k, swap_ab, precision=precision)
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


@pytest.mark.parametrize(("precision", "at_once"), [("half", 16), ("ieee", 1), ("bf16x3", 16)], indirect=["at_once"])
def test_equal_classes_add_in_the_same_tree(precision: str, at_once: None) -> None:
    K, trees, classes = 64, defaultdict(set), defaultdict(set)
    problem = GemmProblem.of(
        *(torch.empty(s, dtype=DTYPES.get(precision, torch.float32)) for s in ((K, K), (K, 16), (K, 16))),
        precision=precision,
    )
    for config in configs(precision)[:2]:
        for split_k in (1, 2):
            selection = Selection("portable", config, "", None, split_k, precision=precision)
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
    assert tree(Selection("portable", portable.CONFIGS["half"][-3], ""), 64, 5) == chain


def test_gemv_adds_in_the_same_tree_for_every_row_and_way_round() -> None:
    problem = GemmProblem.of(*(torch.empty(s) for s in ((2, 64), (64, 8), (2, 8))), precision="ieee")
    config = gemv.Config(2, 16, 16, 1)
    trees = {
        split_k: tree(Selection("gemv", config, "", None, split_k, precision="ieee"), 32, 5, 2) for split_k in (1, 2)
    }
    assert trees[1] != trees[2]
    names = {bit_class(problem, Selection("gemv", config, "", None, x, precision="ieee")) for x in (1, 2)}
    assert len(names) == 2
