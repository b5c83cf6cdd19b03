"""Every relative link in the documents leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_gemm.ladder.exercises import EXERCISES, SOLUTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path for folder in (".", "docs", "docs/ladder", "docs/exercises", "tests") for path in (ROOT / folder).glob("*.md")
]
PAGES += (ROOT / "perf" / "results").rglob("*.md")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them; of headings alike the second ends in -1."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if i == 0 else f"{name}-{i}" for name, last in found.items() for i in range(last + 1)}


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("`", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def files(page: Path) -> set[Path]:
    """That a page links to; the site copies those that are no pages."""
    links = LINK.findall(CODE.sub("`", page.read_text()))
    targets = ((page.parent / link.partition("#")[0]).resolve() for link in links)
    return {target for target in targets if target.is_file()}


def linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    return files(page) & {*PAGES}


def filled_holes(page: Path) -> set[str]:
    """The exercises whose solution is in a page or in a file that it links to, outside of a fold."""
    texts = [re.sub("<details><summary>Solution<.*?</details>", "", page.read_text(), flags=re.DOTALL)]
    texts += [file.read_text() for file in files(page) if file.suffix in (".py", ".ipynb", ".cu")]
    return {one.name for one in EXERCISES for text in texts if one.solution in text or "# BEFORE:\n" in text}


def test_every_document_is_two_links_from_readme_at_most() -> None:
    from_readme = linked(ROOT / "README.md")
    reached = from_readme.union(*map(linked, from_readme))
    assert {path for path in PAGES if ROOT / "docs" in path.parents} <= reached


def test_no_page_hands_out_a_solution(tmp_path: Path) -> None:
    assert not set[str]().union(*map(filled_holes, PAGES))
    page = tmp_path / "page.md"
    for text in (EXERCISES[0].solution, f"[x]({SOLUTIONS}/{EXERCISES[0].name}.py)"):
        page.write_text(text)
        assert EXERCISES[0].name in filled_holes(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One `k01`: two, three\n# Again\n# Again\n```sh\n# no heading\n```\n")
    right = "[a](other.md#one-k01-two-three) [b](other.md#again-1) [c](#here) [d](https://example.com/x) `[e](f)`"
    page.write_text(f"# Here\n{right}\n[f](gone.md) ![g](other.md#no-heading) [h](#gone) [i](other.md#again-2)\n")
    assert list(broken(page)) == ["gone.md", "other.md#no-heading", "#gone", "other.md#again-2"]
