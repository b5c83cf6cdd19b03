"""What a rung's source changes against the rung before it: the diffs in docs/ladder/, and whole kernels beside them.

Compared are the kernel, the functions that the rung introduces, and the body of `launch`; where two rungs share one
kernel also their configurations, which then are what changes. In a diff every kernel is called `kernel`, docstrings are
left out, and indentation alone is no change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path

from perf.common import formats
from perf.pages.exercises import spoils
from triton_gemm import ladder
from triton_gemm.ladder import LADDER, Rung

FOLDER = Path(ladder.__file__).parent
CONTEXT = 2  # lines around a change


@dataclass(frozen=True)
class Source:
    """A rung's file in parts."""

    rung: Rung

    @cached_property
    def text(self) -> str:
        return (FOLDER / f"{self.rung.name}.py").read_text()

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in ast.parse(self.text).body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def kernel_name(self) -> str:
        """The kernel that `launch` launches."""
        names = [node.id for node in ast.walk(self.functions["launch"]) if isinstance(node, ast.Name)]
        return next(name for name in names if name.endswith("_kernel"))

    @cached_property
    def kernel(self) -> list[str]:
        """The kernel's lines, from another rung's file where this rung launches that rung's kernel."""
        if self.kernel_name in self.functions:
            return self.lines(self.kernel_name)
        shared = re.search(rf"^{self.kernel_name} = .*?(\w+_kernel)\.fn", self.text, re.MULTILINE)
        assert shared is not None
        owner = next(source for source in map(Source, LADDER) if shared[1] in source.functions)
        return owner.lines(shared[1])

    @cached_property
    def launch(self) -> list[str]:
        """The lines of `launch` below its signature, which is the same for all rungs."""
        lines = self.lines("launch")
        return lines[lines.index(") -> None:") + 1 :]

    @cached_property
    def helpers(self) -> dict[str, ast.FunctionDef]:
        """Every other function."""
        return {name: node for name, node in self.functions.items() if name not in ("launch", self.kernel_name)}

    @cached_property
    def device_code(self) -> list[str]:
        """The functions that run on the GPU, the kernel last."""
        helpers = [name for name, node in self.helpers.items() if any(map(_is_jit, node.decorator_list))]
        return [*helpers, self.kernel_name]

    @cached_property
    def configurations(self) -> list[str]:
        found = re.search(r"^CONFIGS = .*?^\)$", self.text, re.MULTILINE | re.DOTALL)
        return found[0].splitlines() if found else []

    def lines(self, name: str) -> list[str]:
        """A function's lines without decorators, docstring and the formatter's marks."""
        function = self.functions[name]
        hidden = range(0)
        if ast.get_docstring(function) is not None:
            hidden = range(function.body[0].lineno, (function.body[0].end_lineno or 0) + 1)
        lines = enumerate(self.text.splitlines()[: function.end_lineno], 1)
        shown = [re.sub(r" *# fmt: \w+$", "", text) for i, text in lines if i >= function.lineno and i not in hidden]
        return [line for i, line in enumerate(shown) if line or (i and shown[i - 1])]


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).endswith(".jit")


def difference(rung: Rung) -> str:
    """What `rung` changes against the rung before it, folded, in Markdown; empty for the first rung, and where little
    of the rung before is left."""
    place = LADDER.index(rung)
    if place == 0:
        return ""
    before, after = Source(LADDER[place - 1]), Source(rung)
    kernels = list(_diff("kernel", _anonymous(before), _anonymous(after)))
    if _rewritten(kernels, after):
        return ""
    same = f"# The kernel is {before.rung.id}'s."
    lines = kernels or [same, *_diff("CONFIGS", before.configurations, after.configurations)]
    for name in after.helpers:
        lines += _new(after, name)
    lines += _diff("launch", *(_renamed(source, source.launch) for source in (before, after)))
    return _folded(f"The difference from {before.rung.id}{spoils(rung)}", lines)


def whole(rung: Rung, explained: str) -> str:
    """The rung's kernel with its own helpers, folded, in Markdown, and where the others are.

    explained: the address that says what every kernel has.
    """
    place, source = LADDER.index(rung), Source(rung)
    own = source.device_code if source.kernel_name in source.functions else []
    code = "\n\n\n".join("\n".join(source.lines(name)) for name in own) or "\n".join(source.kernel)
    called = re.compile(r"(?<![\w.])(\w+)\(").findall(code)  # without methods
    used = {one.id: [f"`{x}`" for x in Source(one).helpers if x in called] for one in LADDER[:place]}
    of = [f"{number}'s {', '.join(names)}" for number, names in used.items() if names]
    text = f"{rung.id}'s kernel, whole"
    if place and _rewritten(list(_diff("", _anonymous(Source(LADDER[place - 1])), _anonymous(source))), source):
        text += f"; it has little of {LADDER[place - 1].id}'s"
    return _folded(
        text + spoils(rung),
        code.splitlines(),
        "python",
        (f"It calls {' and '.join(of)}. " if of else "") + f"For the rest see [what every kernel has]({explained})",
    )


def _rewritten(changes: Sequence[str], after: Source) -> bool:
    """Whether the changes are longer than the kernel."""
    return sum(line.startswith(("-", "+")) for line in changes) > len(after.kernel)


def _new(source: Source, name: str) -> list[str]:
    return [f"@@ {name}, new @@", *(f"+{line}" for line in source.lines(name))]


def _anonymous(source: Source) -> list[str]:
    name = source.kernel[0].removeprefix("def ").partition("(")[0]
    return [source.kernel[0].replace(name, "kernel"), *source.kernel[1:]]


def _renamed(source: Source, lines: Sequence[str]) -> list[str]:
    return [re.sub(rf"\b{source.kernel_name}\b", "kernel", line) for line in lines]


def _diff(name: str, before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """A unified diff whose hunks are headed by a name; unchanged lines are indented as `after` has them."""
    matcher = SequenceMatcher(None, [x.strip() for x in before], [x.strip() for x in after], autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        yield f"@@ {name} @@"
        for tag, i, j, k, end in group:
            if tag == "equal":
                yield from (f" {line}".rstrip() for line in after[k:end])
            else:
                yield from (f"-{line}" for line in before[i:j])
                yield from (f"+{line}" for line in after[k:end])


def _folded(text: str, lines: Sequence[str], language: str = "diff", below: str = "") -> str:
    code = "\n".join(lines)
    block = f"```{language}\n{code}\n```"
    if language == "python":  # as it is in the source, whose marks `lines` removes
        block = f"<!-- fmt: off -->\n{block}\n<!-- fmt: on -->"
    return formats.folded(text, block, *[f"{below[0].upper()}{below[1:]}."] if below else [])
