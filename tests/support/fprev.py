"""The order in which a sum is added, found from outside: FPRev ("FPRev: Revealing the Order of Floating-Point Summation
Operations", arXiv 2411.00442).

Of n terms let one be M, one -M and all others 1, so small that M + 1 rounds to M. What is added to either before they
cancel is lost, so the sum counts the terms outside of the smallest subtree that has both. Those counts of all
pairs are the tree. A node may have many children: tensor cores add several products and what was summed before at once.

A tree is an index, or the set of its children: an addition of two does not care for their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Union

Tree = Union[int, "frozenset[Tree]"]

# (i, others) -> for each of `others` how many terms the smallest subtree of it and i has.
Sizes = Callable[[int, Sequence[int]], list[int]]


def refined(n: int, sizes: Sizes) -> Tree:
    """The tree of n terms, from no more pairs than are needed: for a chain those of one term with all others."""

    def grown(terms: list[int]) -> Tree:
        """The subtree of all these terms: from the first one up, which meets the others by the size of the subtree that
        it meets them in."""
        first, *others = terms
        found = sizes(first, others) if others else []
        tree: Tree = first
        for size in sorted(set(found)):
            met = [j for j, met_in in zip(others, found, strict=True) if met_in == size]
            tree = frozenset([tree, *siblings(met, size)])
        return tree

    def siblings(terms: list[int], size: int) -> list[Tree]:
        """The children that have these terms, of a node that has `size` with others."""
        children = []
        while terms:
            first, *others = terms
            found = sizes(first, others) if others else []
            child = [first, *(j for j, met_in in zip(others, found, strict=True) if met_in < size)]
            children.append(grown(child))
            terms = [j for j in terms if j not in child]
        return children

    return grown(list(range(n)))
