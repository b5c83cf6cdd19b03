"""The package's layers as a picture and a list, from the contract in pyproject.toml and modules' first sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from importlinter import api

from perf.common.style import DARK_SVG
from perf.measure.environment import ROOT

PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = ROOT / "triton_gemm"
WIDTH, HEIGHT, GAP, MARGIN = 760, 32, 10, 34
TEXT = 'text-anchor="middle" font-size="14"'


def layers() -> list[list[str]]:
    """Modules of the package by layer, the highest first."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    (lines,) = (one["layers"] for one in contracts if one.get("containers") == ["triton_gemm"])
    return [[name.strip() for name in re.split("[|:]", line)] for line in lines]


def picture() -> str:
    """An SVG: a row of boxes for each layer, which imports what is below it."""
    rows = layers()
    height = len(rows) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'{DARK_SVG}<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<path d="M20 {GAP} V{height - GAP} m-5 -7 l5 7 l5 -7" fill="none" stroke="#777"/>',
        f'<text transform="translate(14 {height / 2:g}) rotate(-90)" {TEXT} fill="#555">imports</text>',
    ]
    for i, names in enumerate(rows):
        top, width = GAP + i * (HEIGHT + GAP), (WIDTH - MARGIN - GAP * len(names)) / len(names)
        for j, name in enumerate(names):
            left = MARGIN + j * (width + GAP)
            box = f'x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="5"'
            parts.append(f'<rect {box} fill="#eef3fa" stroke="#5b7fae"/>')
            parts.append(f'<text x="{left + width / 2:g}" y="{top + 21}" {TEXT}>{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def packages() -> str:
    """What each package or module is, the highest layer first, as a Markdown list."""
    lines = []
    for name in (name for names in layers() for name in names):
        folder = PACKAGE / name
        if not folder.is_dir():
            lines.append(f"- `{name}.py`: {_summary(folder.with_suffix('.py'))}")
            continue
        found = sorted(x.stem for x in folder.iterdir() if x.suffix == ".py" or (x / "__init__.py").exists())
        modules = ", ".join(f"`{x}`" for x in found if not x.startswith("_"))
        lines.append(f"- **`{name}/`** {_summary(folder / '__init__.py')} {modules}")
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(first.split()))[0]
