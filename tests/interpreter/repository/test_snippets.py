"""README's and the documents' Python runs, made small for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import doc_snippets


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
