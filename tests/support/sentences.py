"""Sentences of docstrings and comments."""

import ast
import re

COMMENTS = re.compile(r"(?:^ *#.*\n)+|(?<=\S)  # .*$", re.MULTILINE)  # whole lines, or behind code
PARTS = re.compile(r"\n\s*\n|\n {4}(?! )|\n *(?:[-*]|\d+\.) ")  # paragraphs, entries of "Args:" and of lists
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def too_long(source: str, most: int) -> list[str]:
    """Sentences of more words in a Python file."""
    texts = [ast.get_docstring(x) or "" for x in ast.walk(ast.parse(source)) if isinstance(x, DOCUMENTED)]
    texts += [re.sub(r"^ *# ?", "", found, flags=re.MULTILINE) for found in COMMENTS.findall(source)]
    parts = [" ".join(part.split()) for part in PARTS.split("\n\n".join(texts))]
    return [x for part in parts for x in re.split(r"""(?<=[.!?])[)"'`]*\s+""", part) if len(x.split()) > most]
