"""Notebooks: their code cells, run one after another in one namespace as Jupyter does, and what they print.

Nothing of Jupyter is needed. Triton reads the source of a kernel, so a cell's lines are put where `inspect` finds them.
"""

from __future__ import annotations

import io
import json
import linecache
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def run(notebook: dict[str, Any], name: str) -> str:
    """The notebook's text with the outputs of its cells as a run gives them; raises what a cell raises."""
    module = sys.modules[name] = ModuleType(name)
    code_cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    try:
        for count, cell in enumerate(code_cells, 1):
            source, file = "".join(cell["source"]), f"<{name}, code cell {count}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, file, "exec"), module.__dict__)
            lines = printed.getvalue().splitlines(keepends=True)
            cell["execution_count"] = count
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    finally:
        del sys.modules[name]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
