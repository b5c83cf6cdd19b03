"""The pages of the site: what `make docs` cannot see."""

from __future__ import annotations

import re
from pathlib import Path

import triton_gemm

ROOT = Path(__file__).parents[2]


def undocumented(reference: str) -> set[str]:
    """The public names that the text has no directive for."""
    return {*triton_gemm.__all__} - {*re.findall(r"^\.\. auto\w+:: (\w+)$", reference, re.MULTILINE)}


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "api.rst").read_text()
    assert not undocumented(reference)
    assert undocumented(reference.replace(".. autofunction:: mv\n", "")) == {"mv"}


def test_no_page_is_too_long() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.glob("docs/**/*.md")}
    assert not {name for name, length in lengths.items() if length > 400}
