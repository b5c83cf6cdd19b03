"""Mutants of Python source: one small change each, made by replacing the text of one node of its syntax tree.

Lines stay where they are, and comments too, so that coverage of the original holds for the mutant. Types, decorators,
docstrings, f-strings, the words of exceptions and layouts of threads are left alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, replace

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*"}
ARITHMETIC |= {"&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<"}
LOGIC = {"and": "or", "or": "and"}
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
CALLS |= {"floor": "ceil", "ceil": "floor"}
SIZES = {"M": "N", "N": "K", "K": "M", "BLOCK_M": "BLOCK_N", "BLOCK_N": "BLOCK_M"}
# What can change a kernel's speed and nothing else.
HINTS = {"eviction_policy", "cache_modifier", "num_stages", "loop_unroll_factor"}
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue)
# What only says that something cannot be, like an assertion.
CHECKS = {"strict"}
LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """`old` replaced by `new` at byte `begin` of a file. place: which of those alike in its function or class; a name
    that stays when lines around it change."""

    path: str
    scope: str
    kind: str
    line: int
    lines: tuple[int, ...]
    begin: int
    end: int
    old: str
    new: str
    shown: str
    place: int = 0

    @property
    def name(self) -> str:
        return f"{self.path}:{self.scope}: {self.shown}" + (f" #{self.place + 1}" if self.place else "")

    def applied(self, text: str, begin: int = 0, end: int | None = None) -> str:
        """The mutant's source, or its bytes from what was `begin` to what was `end`."""
        source = text.encode()
        assert source[self.begin : self.end].decode() == self.old, f"{self.path} has changed"
        return (source[begin : self.begin] + self.new.encode() + source[self.end : end]).decode()


class _Finder:
    def __init__(self, text: str, path: str, only_jit: bool) -> None:
        self.path, self.only_jit = path, only_jit
        self.source = text.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.scopes: list[str] = []
        self.jit = False
        self.strides: list[str] = []
        self.statement: ast.stmt | None = None

    def begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, begin: int, end: int) -> str:
        return self.source[begin:end].decode()

    def add(self, kind: str, begin: int, end: int, new: str) -> None:
        if self.only_jit and not self.jit:
            return
        old = self.text(begin, end)
        line = self.source.count(b"\n", 0, begin) + 1
        first = self.statement.lineno if self.statement is not None else line
        last = line + old.count("\n")
        shown = f"{_short(self._around(begin, end, old))} -> {_short(self._around(begin, end, new))}"
        self.found.append(
            Mutant(
                *(self.path, ".".join(self.scopes) or "module", kind, line),
                (first, *range(line, last + 1)),
                *(begin, end, old, new, shown),
            )
        )

    def _around(self, begin: int, end: int, middle: str) -> str:
        """The change with what is before and after it in its lines, without comments."""
        before = self.source.rfind(b"\n", 0, begin) + 1
        after = self.source.find(b"\n", end)
        rest = self.text(end, after if after >= 0 else len(self.source))
        return self.text(before, begin) + middle + rest.partition("  # ")[0]

    def operator(self, kind: str, left: ast.AST, right: ast.AST, table: dict[str, str]) -> None:
        """The operator between two nodes, with the parentheses that are around them."""
        begin, end = self.end(left), self.begin(right)
        gap = self.text(begin, end)
        bare = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0].encode()), gap)
        found = re.search("|".join(sorted(map(_word, table), key=len, reverse=True)), bare)
        if found is not None:
            at = begin + len(bare[: found.start()].encode())
            self.add(kind, at, at + len(found[0]), table[re.sub(r"\s+", " ", found[0])])

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return self.definition(node)
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
            self.of_statement(node)
        if isinstance(node, LEFT_ALONE) or self.is_layout(node) or getattr(node, "arg", None) in HINTS | CHECKS:
            self.statement = outer
            return
        self.of_expression(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self.statement = outer

    def is_layout(self, node: ast.AST) -> bool:
        """How threads hold a tensor, or memory: the compiler's affair, and a GPU's."""
        return self.jit and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Layout")

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        outer = self.jit, self.strides, self.statement
        self.scopes.append(node.name)
        if not isinstance(node, ast.ClassDef):
            self.jit = self.jit or any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            arguments = [argument.arg for argument in node.args.args]
            self.strides = [name for name in arguments if name.startswith("stride_")]
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        for child in node.body:
            self.visit(child)
        self.scopes.pop()
        self.jit, self.strides, self.statement = outer

    def of_statement(self, node: ast.stmt) -> None:
        begin, end = self.begin(node), self.end(node)
        stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (isinstance(node, STATEMENTS) or stored) and not constant:
            self.add("statement dropped", begin, end, "pass" + "\\\n" * self.text(begin, end).count("\n"))
        if isinstance(node, ast.Return) and node.value is not None:
            value = self.text(self.begin(node.value), self.end(node.value))
            if value != "None":
                self.add("return None", begin, end, "return None" + "\\\n" * self.text(begin, end).count("\n"))

    def of_expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                self.operator("comparison", left, right, COMPARISONS)
        elif isinstance(node, ast.BinOp):
            self.operator("arithmetic", node.left, node.right, ARITHMETIC)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                self.operator("logic", left, right, LOGIC)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.add("condition", self.begin(node), self.begin(node.operand), "")
        elif isinstance(node, ast.Constant):
            self.constant(node)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.name(node)
        tests = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", [])
        for test in tests:
            if not isinstance(test, (ast.Compare, ast.UnaryOp, ast.BoolOp)):
                self.add("condition", self.begin(test), self.begin(test), "not ")

    def constant(self, node: ast.Constant) -> None:
        begin, end, value = self.begin(node), self.end(node), node.value
        if isinstance(value, bool):
            self.add("constant", begin, end, str(not value))
        elif isinstance(value, int):
            self.add("constant", begin, end, str(value + 1))
            self.add("constant", begin, end, str(value - 1) if value else "(-1)")
        elif isinstance(value, float):
            self.add("constant", begin, end, repr(2 * value if value else 1.0))

    def call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CALLS:
            end = self.end(node.func)
            self.add("other function", end - len(name), end, CALLS[name])
        parts: list[ast.AST] = sorted([*node.args, *node.keywords], key=self.begin)
        for i, part in enumerate(parts):
            if not isinstance(part, ast.keyword) or part.arg in HINTS | CHECKS:
                continue
            begin, end = self.begin(part), self.end(part)
            if i:  # from the end of the one before, parentheses and comma
                gap = self.text(self.end(parts[i - 1]), begin)
                begin = self.end(parts[i - 1]) + len(gap[: gap.rindex(",")].encode())
            elif len(parts) > 1:
                end = self.begin(parts[1])
            self.add("keyword dropped", begin, end, "\n" * self.text(begin, end).count("\n"))

    def name(self, node: ast.Name) -> None:
        if not self.jit:
            return
        other = SIZES.get(node.id)
        if node.id in self.strides:
            of_operand = [name for name in self.strides if name[:-1] == node.id[:-1]]
            others = of_operand if len(of_operand) > 1 else self.strides
            other = others[(others.index(node.id) + 1) % len(others)]
        if other is not None and other != node.id:
            self.add("other size or stride", self.begin(node), self.end(node), other)


def _word(operator: str) -> str:
    words = r"\s+".join(map(re.escape, operator.split()))
    return rf"\b{words}\b" if operator[0].isalpha() else words


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\\\n", " ")).strip()


def mutants_of(text: str, path: str, only_jit: bool = False) -> list[Mutant]:
    """All mutants of a source that can be compiled; `only_jit`: of functions that Triton compiles."""
    finder = _Finder(text, path, only_jit)
    found: list[Mutant] = []
    for node in ast.parse(text).body:
        finder.found = []
        finder.visit(node)
        begin, end = finder.begin(node), finder.end(node)
        found += [one for one in finder.found if _compiles(one.applied(text, begin, end) + "\n")]
    places: Counter[str] = Counter()
    named = []
    for mutant in sorted(found, key=lambda one: (one.begin, one.end, one.new)):
        named.append(replace(mutant, place=places[mutant.name]))
        places[mutant.name] += 1
    return named


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
