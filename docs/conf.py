"""Sphinx's settings for `make docs`. Its sources are the Markdown pages as they stand, with the repository as the
source folder, so that every link leads to the same file on the site and on a code host."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import typer
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton_gemm  # noqa: E402
from triton_gemm.cli.app import app as commands  # noqa: E402

# The menu: pages by caption, in the order of reading. README is the first page.
MENU = {
    "Use it": ["use", "routing", "models", "recipes", "precision", "troubleshooting"],
    "Make it fast": ["choosing", "tuning", "tables", "bits"],
    "Learn": [
        "ladder",
        "ladder/limits",
        "ladder/k*",
        "ladder/results",
        "exercises",
        "The notebook <../examples/naive_to_grouped>",
        "kernels",
        "architecture",
        "glossary",
    ],
    "Results": [
        "performance",
        "performance-h100",
        "accuracy",
        "reliability",
        "measure",
        "../perf/results/*/report",
        "../perf/results/*/autotuner",
        "../perf/results/*/bench/*/README",
    ],
    "Reference": ["api", "cli", "What the wheel holds <package>", "../CHANGELOG"],
    "Contribute": ["../CONTRIBUTING", "adding-a-kernel", "adding-a-rung", "../tests/README", "log/README", "release"],
}
LISTS = {"docs/exercises": "exercises/*", "docs/log/README": "*"}  # pages of which others of the menu are parts
INTERACTIVE = {"explorer": "Explorer", "player": "Player", "picker": "Beat the picker"}  # files of `perf.ladder`
LINK = re.compile(r"\[([^]\n]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")

project = "triton_gemm"
version = release = triton_gemm.__version__
copyright = "the triton_gemm authors"
root_doc = "README"
include_patterns = [
    "*.md", "docs/*.md", "docs/*.rst", "docs/ladder/*.md", "docs/log/*.md", "docs/exercises/*.md", "tests/*.md",
    "perf/results/*/*.md", "perf/results/*/bench/*/*.md",
]  # fmt: skip
# Sources that pages link to, and the notebook, are pages themselves.
_PAGES = [path for pattern in include_patterns for path in ROOT.glob(pattern)]
_LINKED = {(page.parent / link[1]).resolve() for page in _PAGES for link in LINK.findall(page.read_text())}
CODE = {path.relative_to(ROOT).as_posix() for path in _LINKED if path.suffix in (".cu", ".ipynb", ".py")}
include_patterns += sorted(CODE)
source_suffix = {".rst": "restructuredtext", **dict.fromkeys((".md", ".cu", ".ipynb", ".py"), "markdown")}
exclude_patterns = [".*", "build", "dist", "venv"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_typehints = "description"
default_role = "py:obj"  # `name` in a docstring
smartquotes = False  # they would make dashes of options
html_theme = "furo"
html_title = f"triton_gemm {version}"
html_static_path = html_css_files = ["site.css"]


def _shown(link: re.Match[str], folder: Path) -> str:
    """A link of a page of this folder: by the title of the page or section, not by the file's name. None to folders."""
    text, target, anchor = link.groups("")
    if (folder / target).is_dir():
        return text
    return f"[]({target}{anchor})" if text.endswith(".md") and target.endswith(text) else link[0]


def _read(sphinx: Sphinx, page: str, source: list[str]) -> None:
    """What only the site has: a menu on the first page, without a GPU's single suites, all options on the commands'
    page, titles in links, sources as pages."""
    file = Path(sphinx.env.doc2path(page))
    if file.suffix == ".ipynb":
        source[0] = _notebook(json.loads(source[0]), file.name)
    elif file.suffix in (".cu", ".py"):
        language = "python" if file.suffix == ".py" else "cuda"
        source[0] = f"---\norphan: true\nnosearch: true\n---\n# {file.name}\n\n~~~~{language}\n{source[0]}~~~~\n"
        return
    source[0] = LINK.sub(lambda link: _shown(link, (ROOT / page).parent), source[0])
    if page == root_doc:
        for caption, pages in MENU.items():
            lines = "\n".join(name.replace("<", "<docs/") if "<" in name else f"docs/{name}" for name in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{lines}\n```\n"
    elif page in LISTS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{LISTS[page]}\n```\n"
    elif "/bench/" in page and not page.endswith("/README"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page.startswith("docs/ladder"):  # `make docs` writes the interactive pages
        up = "../" * page.count("/")
        source[0] = re.sub(r"`build/(\w+\.html)(#\w+)?`", rf'<a href="{up}\1\2">\1\2</a>', source[0])
    elif page == "docs/cli":
        command = typer.main.get_command(commands)
        _in_full(command)
        options = get_docs_for_click(obj=command, ctx=typer.Context(command), name="triton-gemm")
        source[0] += "\n## All options\n" + re.sub("^#", "##", options.partition("\n")[2], flags=re.MULTILINE)


def _notebook(notebook: dict[str, Any], file: str) -> str:
    """A notebook's cells, and what they printed, as Markdown; the file itself behind the heading."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = "".join(line for output in cell.get("outputs", []) for line in output.get("text", []))
        parts += [f"```text\n{printed}```"] if printed else []
    return "\n\n".join([parts[0], f"{{download}}`{file}`", *parts[1:]])


def _in_full(command: Any) -> None:
    """Lists of commands have the first line of each one's help, which would be cut after 45 characters."""
    for one in getattr(command, "commands", {}).values():
        one.short_help = one.short_help or (one.help or "").partition("\n\n")[0]
        _in_full(one)


def _menu(sphinx: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """The pages that Sphinx does not make, in the menu before the exercises."""
    links = (
        f'<li class="toctree-l1"><a class="reference" href="{context["pathto"](f"{name}.html", 1)}">{title}</a></li>'
        for name, title in INTERACTIVE.items()
    )
    before = re.compile(r'(?=<li class="[^"]*"><a [^>]*>Exercises</a>)')
    menu, found = before.subn("".join(links), context["furo_navigation_tree"])
    assert found == 1, page
    context["furo_navigation_tree"] = menu


def _finished(sphinx: Sphinx, error: Exception | None) -> None:
    """The first page, also by the name that browsers ask for."""
    if error is None:
        shutil.copy(Path(sphinx.outdir, "README.html"), Path(sphinx.outdir, "index.html"))


def setup(sphinx: Sphinx) -> None:
    sphinx.connect("source-read", _read)
    sphinx.connect("build-finished", _finished)
    sphinx.connect("html-page-context", _menu, priority=900)  # behind furo, which makes the menu
