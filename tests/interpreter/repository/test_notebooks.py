"""The notebooks of examples/ run, and show what a run prints today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import notebooks


@pytest.mark.slow
@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_outputs_are_those_of_a_run(page: Path) -> None:
    text = page.read_text()
    assert "predicted" in text
    assert notebooks.run(json.loads(text), page.stem) == text


KERNEL = """@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, 3.0)
x = torch.zeros(1)
kernel[(1,)](x)
print("x is", x.item())"""


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "execution_count": None, "outputs": [], "source": source.splitlines(keepends=True)}


def test_cells_share_names_and_keep_what_they_print() -> None:
    cells = [cell("import torch, triton\nimport triton.language as tl"), cell(KERNEL)]
    first, second = json.loads(notebooks.run({"cells": cells}, "shared"))["cells"]
    assert (first["execution_count"], first["outputs"]) == (1, [])
    assert (second["execution_count"], second["outputs"][0]["text"]) == (2, ["x is 3.0\n"])


def test_a_mistake_in_a_cell_is_found_with_its_line() -> None:
    with pytest.raises(NameError, match="missing") as found:
        notebooks.run({"cells": [cell("x = 1"), cell("\nmissing")]}, "wrong")
    last = found.traceback[-1]
    assert (str(last.path), last.lineno) == ("<wrong, code cell 2>", 1)
