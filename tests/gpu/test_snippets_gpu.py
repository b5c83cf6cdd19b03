"""README's and the documents' Python runs as it stands."""

from __future__ import annotations

import pytest

from tests import snippets

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page", snippets.PAGES)
def test_what_a_page_shows_runs(page: str) -> None:
    snippets.run(snippets.PAGES[page], gpu=True)
