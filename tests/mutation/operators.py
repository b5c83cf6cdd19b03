"""Mutants of Python source: one small change each, of the text of one node of its syntax tree.

Types, decorators, docstrings, f-strings, the words of exceptions and layouts of threads are left alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "and": "or", "or": "and"}
SWAPS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+", "/": "*"}
SWAPS |= {"//": "*", "%": "//", "**": "*", "&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<"}
OPERATOR = re.compile(r"#.*|(is\s+not|not\s+in|is|in|and|or)\b|([-+*/%&|^<>=!]+)")  # or a comment
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
CALLS |= {"floor": "ceil", "ceil": "floor"}
SIZES = {"M": "N", "N": "K", "K": "M", "BLOCK_M": "BLOCK_N", "BLOCK_N": "BLOCK_M"}
# Keywords that change a kernel's speed and nothing else, or that only check.
SPARED = {"eviction_policy", "cache_modifier", "num_stages", "loop_unroll_factor", "strict"}
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue)
LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """`new` in the place of bytes `begin` to `end` of a file. lines, function: what a test must run to find it, and
    near it; place: which of those alike in its function or class."""

    path: str
    scope: str
    lines: range
    function: range
    begin: int
    end: int
    new: str
    shown: str
    place: int = 0

    @property
    def name(self) -> str:
        """One that stays when lines around it change."""
        return f"{self.path}:{self.scope}: {self.shown}" + (f" #{self.place + 1}" if self.place else "")

    def applied(self, text: str) -> str:
        source = text.encode()
        return (source[: self.begin] + self.new.encode() + source[self.end :]).decode()


@dataclass(frozen=True)
class _Place:
    """Where a node is. statement: its first line; strides: of the function's parameters."""

    scopes: tuple[str, ...] = ()
    function: range = range(0)
    jit: bool = False
    strides: tuple[str, ...] = ()
    statement: int = 0

    def inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> _Place:
        found = replace(self, scopes=(*self.scopes, node.name), statement=0)
        if isinstance(node, ast.ClassDef):
            return found
        return replace(
            found,
            function=range(node.lineno, (node.end_lineno or node.lineno) + 1),
            jit=self.jit or any("jit" in ast.unparse(decorator) for decorator in node.decorator_list),
            strides=tuple(x.arg for x in node.args.args if x.arg.startswith("stride_")),
        )


class _Source:
    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.starts = list(accumulate(map(len, self.bytes.splitlines(keepends=True)), initial=0))

    def span(self, node: ast.AST) -> tuple[int, int]:
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return tuple(self.starts[line - 1] + column for line, column in (begin, end))  # type: ignore[return-value]

    def around(self, begin: int, end: int, middle: str) -> str:
        """A change with what is before and after it in its lines, without comments, in one line."""
        first, last = self.bytes.rfind(b"\n", 0, begin) + 1, self.bytes.find(b"\n", end)
        rest = self.bytes[end : last if last >= 0 else None].decode().partition("  # ")[0]
        return re.sub(r"\s+", " ", self.bytes[first:begin].decode() + middle + rest).strip()

    def operators(self, operands: list[ast.expr]) -> Iterator[tuple[int, int, str]]:
        """Other operators between these, with the parentheses that are around them."""
        for left, right in pairwise(operands):
            begin, end = self.span(left)[1], self.span(right)[0]
            for found in OPERATOR.finditer(self.bytes[begin:end].decode("latin-1")):
                if not found[0].startswith("#"):
                    yield begin + found.start(), begin + found.end(), SWAPS[" ".join(found[0].split())]

    def call(self, node: ast.Call) -> Iterator[tuple[int, int, str]]:
        end = self.span(node.func)[1]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CALLS:
            yield end - len(name), end, CALLS[name]
        spans = sorted((*self.span(part), part) for part in (*node.args, *node.keywords))
        for i, (begin, end, part) in enumerate(spans):
            if isinstance(part, ast.keyword) and part.arg not in SPARED:
                if i:  # with the comma before it
                    begin = self.bytes.rindex(b",", spans[i - 1][1], begin)
                yield begin, spans[1][0] if not i and len(spans) > 1 else end, ""

    def changes(self, node: ast.AST, place: _Place) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare():
                yield from self.operators([node.left, *node.comparators])
            case ast.BinOp():
                yield from self.operators([node.left, node.right])
            case ast.BoolOp():
                yield from self.operators(node.values)
            case ast.UnaryOp(op=ast.Not()):
                begin = self.span(node)[0]
                yield begin, begin + len(re.match(rb"not\s*", self.bytes[begin:])[0]), ""  # type: ignore[index]
            case ast.Constant(value=bool() as value):
                yield *self.span(node), str(not value)
            case ast.Constant(value=int() as value):
                yield *self.span(node), str(value + 1)
                yield *self.span(node), str(value - 1) if value else "(-1)"
            case ast.Constant(value=float() as value):
                yield *self.span(node), repr(2 * value if value else 1.0)
            case ast.Call():
                yield from self.call(node)
            case ast.Name(id=name, ctx=ast.Load()) if place.jit:
                if name in place.strides:
                    others = [x for x in place.strides if x[:-1] == name[:-1]]
                    others = others if len(others) > 1 else list(place.strides)
                    if len(others) > 1:
                        yield *self.span(node), others[(others.index(name) + 1) % len(others)]
                elif name in SIZES:
                    yield *self.span(node), SIZES[name]
            case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
                yield *self.span(node), "return None"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield *self.span(node), "pass"
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case _ if isinstance(node, DROPPED):
                yield *self.span(node), "pass"
        tests = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", [])
        for test in tests:
            if not isinstance(test, (ast.Compare, ast.UnaryOp, ast.BoolOp, ast.NamedExpr)):
                yield self.span(test)[0], self.span(test)[0], "not "

    def visit(self, node: ast.AST, place: _Place) -> Iterator[tuple[_Place, int, int, str]]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            place = place.inside(node)
            defaults = [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, FUNCTIONS) else []
            children = [*filter(None, defaults), *node.body]
        else:
            if isinstance(node, ast.stmt):
                place = replace(place, statement=node.lineno)
            if place.jit and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Layout"):
                return
            yield from ((place, *change) for change in self.changes(node, place))
            if isinstance(node, LEFT_ALONE) or getattr(node, "arg", None) in SPARED:
                return
            left_alone = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
            children = [child for child in ast.iter_child_nodes(node) if id(child) not in left_alone]
        for child in children:
            yield from self.visit(child, place)


def mutants_of(text: str, path: str, only_jit: bool = False) -> list[Mutant]:
    """All mutants of a source; `only_jit`: of functions that Triton compiles."""
    source, places, named = _Source(text), Counter[str](), []
    changes = [change for change in source.visit(ast.parse(text), _Place()) if change[0].jit or not only_jit]
    for place, begin, end, new in sorted(changes, key=lambda change: change[1:]):
        old = source.bytes[begin:end].decode()
        line = source.bytes.count(b"\n", 0, begin) + 1
        lines = range(place.statement or line, line + old.count("\n") + 1)
        shown = f"{source.around(begin, end, old)} -> {source.around(begin, end, new)}"
        one = Mutant(path, ".".join(place.scopes) or "module", lines, place.function, begin, end, new, shown)
        named.append(replace(one, place=places[one.name]))
        places[one.name] += 1
    return named
