"""Sentences of the package's docstrings and comments."""

from pathlib import Path

from tests.support.sentences import too_long

PACKAGE = Path(__file__).parents[2] / "triton_gemm"
MOST = 40  # words


def test_no_sentence_is_too_long() -> None:
    found = {str(x.relative_to(PACKAGE)): too_long(x.read_text(), MOST) for x in PACKAGE.rglob("*.py")}
    assert not {name: long for name, long in found.items() if long}
    for form in ('"""{}"""', "# {}\n", "x = 1  # {}"):
        assert not too_long(form.format("One word. " + MOST * "word "), MOST)
        assert too_long(form.format("One word: " + MOST * "word "), MOST)
