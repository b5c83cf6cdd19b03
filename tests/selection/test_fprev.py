"""FPRev finds the tree that a sum was added by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fprev import Sizes, Tree, refined

BIG = 2.0**60


def value(tree: Tree, terms: Sequence[float]) -> float:
    """The sum of terms by a tree, where what is added at once is cut off below the last bit of the largest."""
    if isinstance(tree, int):
        return terms[tree]
    parts = [value(child, terms) for child in tree]
    return sum(x for x in parts if abs(x) * 2**53 > max(map(abs, parts)))


def sizes_of(tree: Tree, n: int, pairs: list[tuple[int, int]]) -> Sizes:
    """As outside only the sum's value tells."""

    def sizes(i: int, others: Sequence[int]) -> list[int]:
        found = []
        for j in others:
            pairs.append((i, j))
            terms = [1.0] * n
            terms[i], terms[j] = BIG, -BIG
            found.append(n - round(value(tree, terms)))
        return found

    return sizes


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, int]:
    n = draw(st.integers(2, 24))
    nodes: list[Tree] = list(draw(st.permutations(range(n))))
    while len(nodes) > 1:
        count = draw(st.integers(2, min(5, len(nodes))))
        nodes = [*nodes[count:], frozenset(nodes[:count])] if draw(st.booleans()) else [
            frozenset(nodes[:count]), *nodes[count:]
        ]  # fmt: skip
    return nodes[0], n


@given(trees())
def test_it_finds_every_tree(given: tuple[Tree, int]) -> None:
    tree, n = given
    pairs: list[tuple[int, int]] = []
    assert refined(n, sizes_of(tree, n, pairs)) == tree
    assert len(pairs) <= n * n


def test_a_chain_takes_one_sweep() -> None:
    n, tree = 64, 0
    for i in range(1, n):
        tree = frozenset([tree, i])
    pairs: list[tuple[int, int]] = []
    assert refined(n, sizes_of(tree, n, pairs)) == tree
    assert len(pairs) == n - 1 and all(j - i == 1 for (_, i), (_, j) in pairwise(pairs))
