"""README's and the documents' Python runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import doc_snippets


@pytest.mark.parametrize("page", doc_snippets.PAGES)
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    doc_snippets.run(doc_snippets.PAGES[page], gpu=True)
