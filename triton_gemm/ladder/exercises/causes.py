"""Sentences on why what a kernel did is wrong."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from .trace import CLOSER, Trace, named


def beyond_k(trace: Trace) -> str:
    """What lanes outside of A and B give to C, whose last k-tile is not whole."""
    for name in "ab":
        if (never := trace.counted(name) == 0).any():
            row, column = never.nonzero()[0].tolist()
            mask = ": the mask leaves out what is inside" if any(one.masked for one in trace.of(name)) else ""
            return f" {name}[{row}, {column}] is never read{mask}."
    for program, accesses in trace.programs().items():
        for name in "ab":
            loads = [one.addresses for one in accesses if one.kind == "load" and one.operand == name]
            times = Counter(x for one in loads for x in one.tolist())
            if again := sum(n > 1 for n in times.values()):
                return (
                    f" Program {named(program)} reads {again} elements of {name} more than once: lanes beyond K must "
                    "be 0, and have other elements."
                )
    a, b, c = (trace.operands[name].double() for name in "abc")
    if c.isnan().any():
        return " It is NaN, as are lanes beyond K, or what `other` gives them: they must be 0."
    K, more = a.shape[1], float((c - a @ b)[0, 0])
    if torch.allclose(c - a @ b, torch.full_like(c, more), 0.0, 1e-3):
        lanes = f"{-K % 16} lanes of the last k-tile lie beyond K = {K}"
        return f" Each is A B + {more:.3g}: {lanes}, where `other` must be 0."
    return ""


def beyond(K: int) -> Callable[[str, int, int], str]:
    def why(name: str, row: int, column: int) -> str:
        if (column if name == "a" else row) >= K:
            return " The last k-tile has no next one."
        step = "BLOCK" if name == "a" else "BLOCK * stride_b"
        return f" The next k-tile of {name} is {step} elements further."

    return why


def multiplied(trace: Trace) -> str:
    """Which k-tiles of A and B were multiplied by which, if C is a sum of such products."""
    a, b, c = (trace.operands[name].double() for name in "abc")
    for k in sorted({int(one.columns[0]) for one in trace.of("a") if len(one.columns)}):
        if k % 16:
            return f" A k-tile of a is loaded from k = {k} on: k-tiles begin at multiples of BLOCK = 16."
    if (steps := -(-a.shape[1] // 16)) > 32 or c.isnan().any():
        return ""
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, 16 * steps - a.shape[1])) for x in (a.T, b))  # 0, as beyond K
    a = a.T
    pairs = [(i, j) for i in range(steps) for j in range(steps)]
    products = torch.stack([(a[:, 16 * i :][:, :16] @ b[16 * j :][:16]).flatten() for i, j in pairs], 1)
    times = torch.linalg.lstsq(products, c.reshape(-1, 1)).solution[:, 0]
    found = {pair: round(float(n)) for pair, n in zip(pairs, times, strict=True)} if times.isfinite().all() else {}
    if not torch.allclose(products @ times.round(), c.flatten(), 1e-2, 1e-2):
        return ""
    added = [pair for pair, n in found.items() if n]
    if steps > 1 and added == [(steps - 1, steps - 1)]:
        return " C is the last k-tile's product alone: each is to be added to the sum of those before."
    dots = sum(one.kind == "dot" for one in trace.accesses) // len(trace.programs())
    if len(added) < steps <= dots and trace.counted("a").all() and all(i == j and found[i, j] == 1 for i, j in added):
        left = ", ".join(str(i) for i, _ in added)
        kept = f"the sum of the products of k-tiles {left}, counted from 0," if added else "0,"
        dropped = "the other sums are dropped" if added else "their sums are dropped"
        return f" C is {kept} though {dots} are multiplied: {dropped}. Is each added to those before?"
    for (i, j), n in sorted(found.items(), key=lambda one: one[0][0] == one[0][1]):
        if i != j and n:
            return f" K-tile {i} of a, counted from 0, is multiplied by k-tile {j} of b."
        if i == j and n != 1:
            loads, tiles = int(trace.counted("a")[0, 16 * i]), -(-b.shape[1] // 16)
            why = "did the next one replace it before its product?"
            if not loads:
                why = "it is never loaded."
            elif not n and i == steps - 1:
                why = "it is the last one. Does its product come after the loop?"
            elif loads > tiles:
                why = f"it is loaded {loads // tiles} times. Do pointers advance before each load?"
            elif n > 1:
                why = "it is loaded once, and its product must not be added again."
            return f" K-tile {i}, counted from 0, is multiplied {n} times: {why}"
    return ""


def doubled(trace: Trace) -> str:
    """On `acc += tl.dot(a, b, acc)`."""
    for node in ast.walk(ast.parse(Path(trace.file).read_bytes())):
        value = getattr(node, "value", None)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            terms = [node.target, node.value]
        elif isinstance(node, ast.Assign) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            terms = [value.left, value.right]
        else:
            continue
        names = [ast.unparse(term) for term in terms]
        for dot in (x for x in terms if isinstance(x, ast.Call) and ast.unparse(x.func) == "tl.dot"):
            acc = [*dot.args[2:3], *(one.value for one in dot.keywords if one.arg == "acc")]
            if acc and (name := ast.unparse(acc[0])) in names:
                return (
                    f" `{name} += tl.dot(a, b, {name})` adds {name} twice: `tl.dot` adds it already, write `{name} =`."
                )
    return ""


def exchanged(trace: Trace) -> str:
    """On `tl.dot(b, a)` of square tiles, and on transposed ones."""
    a, b, c = (trace.operands[name].double() for name in "abc")
    a, b = (torch.nn.functional.pad(x, (0, -x.shape[1] % 16, 0, -x.shape[0] % 16)) for x in (a, b))
    a_tiles, b_tiles = (x.unfold(0, 16, 16).unfold(1, 16, 16) for x in (a, b))
    for product, text in (
        ("kjxz,ikzy->ixjy", "b times one of a: `tl.dot(a, b)` it is."),
        ("kjyz,ikxz->ixjy", "a times one of b that is transposed."),
        ("kjzy,ikzx->ixjy", "a that is transposed times one of b."),
    ):
        found = torch.einsum(product, b_tiles, a_tiles).reshape(a.shape[0], b.shape[1])
        if torch.allclose(c, found[: c.shape[0], : c.shape[1]], 1e-2, 1e-2):
            return f" Each is a sum of tiles of {text}"
    return ""


def unparenthesised(trace: Trace) -> str:
    """On `x < m & y < n`, which from Triton 3.9 on compares each element, as `x < (m & y)` and `(m & y) < n`."""
    for node in ast.walk(ast.parse(Path(trace.file).read_bytes())):
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(isinstance(x, ast.BinOp) and isinstance(x.op, (ast.BitAnd, ast.BitOr)) for x in operands):
            return f" {CLOSER}"
    return ""


def diagonal(trace: Trace) -> str:
    """On a strip in which both the rows and the columns vary with the lane."""
    store = trace.of("c", "store")[0]
    steps = [{int(y) - int(x) for x, y in pairwise(one)} for one in (store.rows, store.columns)]
    return " A program's results lie on a diagonal: only the columns vary with `lanes`." * (steps == [{1}, {1}])


def added_in_bf16(trace: Trace) -> str:
    """On NaN that a kernel stored, of operands without any: the interpreter adds bf16's bits as integers."""
    stored = trace.operands["c"].isnan() & (trace.counted("c", "store") > 0)
    why = " Was it added in bf16, which has 8 bits, and the interpreter cannot add? Sums belong in fp32."
    return why * bool(stored.any())


def multiplies_a_load(path: Path) -> str:
    """The name or the load that is multiplied, if a load that is not cast is; else nothing."""
    file = ast.parse(path.read_bytes())
    is_load = {
        ast.unparse(node)
        for node in ast.walk(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
    }
    sets = (node for node in ast.walk(file) if isinstance(node, ast.Assign) and ast.unparse(node.value) in is_load)
    is_load |= {ast.unparse(node.targets[0]) for node in sets} - {"a", "b"}
    products = (node for node in ast.walk(file) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    return next((x for node in products for x in map(ast.unparse, (node.left, node.right)) if x in is_load), "")


def in_fp64(path: Path) -> str:
    """On a kernel that adds in fp64, which no result shows."""
    body = ast.walk(ast.parse(path.read_bytes()))
    if any(isinstance(node, ast.Attribute) and node.attr == "float64" for node in body):
        return "C is right, but sums in fp64 cost a conversion and a slow addition for each product: fp32 is asked for."
    return ""


def beyond_row(name: str, row: int, column: int) -> str:
    sign = " `%` of a negative number is negative or 0, in Triton as in C." * (row < 0)
    return f" A place outside of 0 to 7 is none in its chunk's row, and lies in another.{sign}" * (name == "shared")
