"""The Python in README.md and docs/: blocks that open with ```python, run page by page as a reader would.

A page's blocks run one after another in one namespace, and those of ALONE in one each. On a GPU they run as they
stand. On the CPU one rule makes them small enough for the interpreter: "cuda" becomes "cpu", and every integer of at
least 64 is divided by 64. Blocks that open with ```python gpu need CUDA itself (its graphs, say) and run on a GPU
only. Meshes are of 8 processes, seven of which are not there: their communication does nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python( gpu)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCALE = 64
PROCESSES = 8
ALONE = ROOT / "docs/recipes.md"  # each of its blocks is a whole program


def blocks(page: Path, gpu: bool) -> list[ast.Module]:
    """The page's blocks for a GPU or for the CPU, with the page's own line numbers."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        needs_gpu, code = match.groups()
        if gpu or not needs_gpu:
            tree = ast.parse("\n" * text.count("\n", 0, match.start(2)) + code, str(page))
            found.append(tree if gpu else _Small().visit(tree))
    return found


PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(path.read_text())
}


class _Small(ast.NodeTransformer):
    """A block as it runs on the CPU."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = node.value
        if value == "cuda":
            value = "cpu"
        elif type(value) is int and value >= SCALE:
            value //= SCALE
        return ast.copy_location(ast.Constant(value), node)


def run(page: Path, gpu: bool) -> None:
    """Runs the page's blocks; raises what they raise."""
    namespace: dict[str, Any] = {}
    with _processes():
        for block in blocks(page, gpu):
            exec(compile(block, str(page), "exec"), {} if page == ALONE else namespace)


@contextmanager
def _processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    try:
        yield
    finally:
        dist.destroy_process_group()
