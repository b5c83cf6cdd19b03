"""README's and the documents' Python runs, made small for the CPU; and the notebooks of examples/, which tell what was
counted to whoever has guessed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import doc_snippets, notebooks


@pytest.mark.few(shows=lambda page: {page} & {"README.md"})
@pytest.mark.parametrize("page", doc_snippets.PAGES)
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    doc_snippets.run(doc_snippets.PAGES[page], gpu=False)


def test_readme_has_its_snippets() -> None:
    readme = doc_snippets.PAGES["README.md"]
    assert len(doc_snippets.blocks(readme, gpu=True)) == readme.read_text().count("```python") > 1
    assert doc_snippets.blocks(readme, gpu=False)


PAGE = """
```python
import torch
x = torch.zeros(4096, 3, device="cuda")
```
text
```python gpu
torch.cuda.synchronize()
```
```python
assert x.shape == (60 + 4, 3) and x.device.type == "cuda"
missing
```
"""


def test_a_mistake_on_a_page_is_found_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(NameError, match="missing") as found:
        doc_snippets.run(page, gpu=False)
    last = found.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (page, PAGE.splitlines().index("missing") + 1)


# What is counted, in the order of the questions.
COUNTED = [32, 1, 4, 32, 0.48, 9.6, 6, 2, 4.0, 8.0, 16.0, '"a[0, 45]"', 208, 17, 84, 4, 84]


def answered(page: Path, answers: list[object]) -> tuple[int, str]:
    """How many questions a notebook has, and what its cells print when they are answered so."""
    left, notebook = iter(answers), json.loads(page.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = [
                re.sub("None", lambda _: str(next(left)), line) if re.match("guess.* = ", line) else line
                for line in cell["source"]
            ]
            cell["source"] = lines
    ran = json.loads(notebooks.run(notebook, page.stem))
    return len(answers) - len(list(left)), "".join(
        line for cell in ran["cells"] for output in cell.get("outputs", []) for line in output["text"]
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_a_notebook_tells_what_was_counted_after_a_guess(page: Path) -> None:
    cells = json.loads(page.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    _, printed = answered(page, [None] * len(COUNTED))
    assert printed.count("guess first, in place of None") == len(COUNTED) and "counted" not in printed
    questions, printed = answered(page, COUNTED)
    assert questions == len(COUNTED) == printed.count("and so it is")
    _, printed = answered(page, [3, *COUNTED[1:]])
    assert "sectors: you said 3, counted 32\n" in printed


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
