"""Documents: relative links lead to files and headings; none is too long, and the reference has every public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import triton_gemm
from triton_gemm.ladder.exercises import EXERCISES, SOLUTIONS, Exercise

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for folder in (".", "docs", "docs/ladder", "docs/exercises", "docs/log", "tests")
    for path in (ROOT / folder).glob("*.md")
]
PAGES += (ROOT / "perf" / "results").rglob("*.md")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
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


def test_every_link_leads_somewhere() -> None:
    assert [f"{page}: {link}" for page in PAGES for link in broken(page)] == []


def files(page: Path) -> set[Path]:
    """That a page links to; the site copies those that are no pages."""
    links = LINK.findall(CODE.sub("`", page.read_text()))
    targets = ((page.parent / link.partition("#")[0]).resolve() for link in links)
    return {target for target in targets if target.is_file()}


def linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    return files(page) & {*PAGES}


@cache
def runs(code: str) -> set[tuple[str, ...]]:
    """Every four successive words and signs, in which all names are the same."""
    words = re.findall(r"[.\w]+|[^\w\s]+", re.sub("#.*", "", code))
    alike = ["name" if re.match(r"(?!(tl|for|in|if|return)\b)[^\W\d]", word) else word for word in words]
    return {*zip(*(alike[i:] for i in range(4)), strict=False)}


def is_solved_by(one: Exercise, code: str) -> bool:
    """Whether code has an expression that fills the hole, or by other names half of what no exercise shows."""
    shown = "".join(other.unfilled for other in EXERCISES)
    new, right = runs(one.solution) - runs(shown), [line.partition(" = ")[2] for line in one.solution.splitlines()]
    alike = len(new & runs(code)) > len(new) / 2
    return alike or any(len(line) > 20 and line in code and line not in shown for line in right)


def filled_holes(page: Path) -> set[str]:
    """The exercises whose solution is in a page, or in what it links to for learners, and is not said to be there."""
    found, text = set(), page.read_text()
    linked = [x for x in files(page) if {*x.parts} & {"ladder", "examples"} and x.suffix in (".py", ".ipynb")]
    for one in EXERCISES:
        spoiler = rf"spoils exercises?[^<.]*\b{one.number}\b"
        left = re.sub(rf"<details><summary>(Solution|[^<]*{spoiler}).*?</details>", "", text, flags=re.DOTALL)
        code = re.findall(r"^```(?:python|diff)\n(.*?)^```", left, re.DOTALL | re.MULTILINE)
        code += [x.read_text() for x in linked if not re.search(rf"/{x.name}\).*{spoiler}", left)]
        if any(is_solved_by(one, re.sub(r'\\n",\n *"', "\n", lines)) or "# BEFORE:\n" in lines for lines in code):
            found.add(one.name)
    return found


def test_every_document_is_two_links_from_readme_at_most() -> None:
    from_readme = linked(ROOT / "README.md")
    reached = from_readme.union(*map(linked, from_readme))
    assert {path for path in PAGES if ROOT / "docs" in path.parents} <= reached


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


def test_no_page_hands_out_a_solution(tmp_path: Path) -> None:
    assert not set[str]().union(*map(filled_holes, PAGES))
    page = tmp_path / "page.md"
    lines, name = EXERCISES[0].solution, EXERCISES[0].name
    fold = f"<details><summary>It spoils exercise {{}}</summary>\n\n```python\n{lines}```\n</details>"
    renamed = fold.format(10).replace("strips", "x").replace("rows", "y").replace("pid", "p")
    for text in (f"```python\n{lines}```", f"[x]({SOLUTIONS}/{name}.py)", fold.format(10), renamed):
        page.write_text(text)
        assert name in filled_holes(page)
    page.write_text(fold.format(1))
    assert not filled_holes(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One `k01`: two, three\n# Again\n# Again\n```sh\n# no heading\n```\n")
    right = "[a](other.md#one-k01-two-three) [b](other.md#again-1) [c](#here) [d](https://example.com/x) `[e](f)`"
    page.write_text(f"# Here\n{right}\n[f](gone.md) ![g](other.md#no-heading) [h](#gone) [i](other.md#again-2)\n")
    assert list(broken(page)) == ["gone.md", "other.md#no-heading", "#gone", "other.md#again-2"]
