"""Sentences on why what a kernel did is wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from .trace import Trace, named


def beyond_k(trace: Trace) -> str:
    """What lanes outside of A and B give to C, which has a last k-tile of 13 elements."""
    for program, accesses in trace.programs().items():
        for name in "ab":
            loads = [one.addresses for one in accesses if one.kind == "load" and one.operand == name]
            again = sum(map(len, loads)) - len(set().union(*loads))
            if again:
                return (
                    f" Program {named(program)} reads {again} elements of {name} again, as indices do that wrap round: "
                    "along K they are summed twice, and must be 0."
                )
    a, b, c = (trace.operands[name].double() for name in "abc")
    more = float((c - a @ b)[0, 0])
    if torch.allclose(c - a @ b, torch.full_like(c, more), 0.0, 1e-3):
        return f" Each is A B + {more:.3g}: 3 lanes of the last k-tile lie beyond K = 45, where `other` must be 0."
    return ""


def beyond(name: str, row: int, column: int) -> str:
    if (column if name == "a" else row) >= 96:
        return " The last k-tile has no next one."
    step = "BLOCK" if name == "a" else "BLOCK * stride_b"
    return f" The next k-tile of {name} is {step} elements further."


def multiplied(trace: Trace) -> str:
    """Which k-tiles of A and B were multiplied by which, if C is a sum of such products."""
    a, b, c = (trace.operands[name].double() for name in "abc")
    pairs = [(i, j) for i in range(6) for j in range(6)]
    products = torch.stack([(a[:, 16 * i :][:, :16] @ b[16 * j :][:16]).flatten() for i, j in pairs], 1)
    times = torch.linalg.lstsq(products, c.reshape(-1, 1)).solution[:, 0]
    found = {pair: round(float(n)) for pair, n in zip(pairs, times, strict=True)} if times.isfinite().all() else {}
    if not torch.allclose(products @ times.round(), c.flatten(), 1e-3, 1e-3):
        return ""
    for (i, j), n in sorted(found.items(), key=lambda one: one[0][0] == one[0][1]):
        if i != j and n:
            return f" K-tile {i} of a, counted from 0, is multiplied by k-tile {j} of b."
        if i == j and n != 1:
            loads = int(trace.counted("a")[0, 16 * i])
            why = "it is never loaded." if not loads else "the next one must not replace it before its product."
            if loads > 1:
                why = f"it is loaded {loads} times. Do pointers advance before each load?"
            return f" K-tile {i}, counted from 0, is multiplied {n} times: {why}"
    return ""


def added_in_bf16(trace: Trace) -> str:
    """On NaN that a kernel stored, of operands without any: the interpreter adds bf16's bits as integers."""
    stored = trace.operands["c"].isnan() & (trace.counted("c", "store") > 0)
    why = " Was it added in bf16, which has 8 bits, and the interpreter cannot add? Sums belong in fp32."
    return why * bool(stored.any())


def beyond_row(name: str, row: int, column: int) -> str:
    return " A place outside of 0 to 7 is none in its chunk's row, and lies in another." * (name == "shared")


def refused_by_the_compiler(path: Path) -> str | None:
    """What Triton's interpreter takes in a file's kernels, and its compiler does not, in a sentence; or None."""
    body = ast.parse(path.read_bytes()).body
    for kernel in (node for node in body if isinstance(node, ast.FunctionDef) and node.decorator_list):
        found = list(ast.walk(kernel))
        for node in found:
            if isinstance(node, (ast.Break, ast.Continue)):
                word = type(node).__name__.lower()
                return f"C is right in the interpreter, but on a GPU Triton compiles no `{word}` (line {node.lineno})."
        half = {name: dtype for name, value in _assigned(kernel) if (dtype := _half(value))}
        for loop in (node for node in found if isinstance(node, (ast.For, ast.While))):
            for name, value in _assigned(loop):
                is_cast = (
                    isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to"
                )
                if name in half and not is_cast and "dot(" in ast.unparse(value):
                    return (
                        f"C is right in the interpreter, but a loop turns `{name}` from {half[name]} into fp32, which "
                        f"the compiler refuses (line {value.lineno}): make `{name}` in fp32 from the beginning."
                    )
    return None


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _half(value: ast.expr) -> str:
    """The 16-bit dtype of a block that `tl.zeros` or `tl.full` makes, or nothing."""
    text = ast.unparse(value)
    made = text.startswith(("tl.zeros(", "tl.full("))
    return next((dtype for dtype in ("bfloat16", "float16") if made and f"tl.{dtype}" in text), "")
