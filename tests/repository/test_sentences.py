"""Words of the sources: sentences of the package's docstrings and comments, and names."""

import io
import re
import tokenize
from pathlib import Path

from tests.support.sentences import too_long

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "triton_gemm"
MOST = 40  # words
# Words that are no terms (docs/glossary.md). As text they stay: keys of tables, records and JSON that users have.
OLDER = {"way", "ways", "silicon", "heat", "heats", "said", "told", "looked", "race", "races"}
SOURCES = "triton_gemm/**/*.py", "perf/**/*.py", "reference_cuda/*.py", "triton_gemm_*.py"


def test_no_sentence_is_too_long() -> None:
    found = {str(x.relative_to(PACKAGE)): too_long(x.read_text(), MOST) for x in PACKAGE.rglob("*.py")}
    assert not {name: long for name, long in found.items() if long}
    for form in ('"""{}"""', "# {}\n", "x = 1  # {}"):
        assert not too_long(form.format("One word. " + MOST * "word "), MOST)
        assert too_long(form.format("One word: " + MOST * "word "), MOST)


def older(text: str) -> set[str]:
    """Names with an older word, split at underscores and capitals."""
    names = {x.string for x in tokenize.generate_tokens(io.StringIO(text).readline) if x.type == tokenize.NAME}
    return {x for x in names if not OLDER.isdisjoint(word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", x))}


def test_no_name_has_an_older_word() -> None:
    files = [(str(x.relative_to(ROOT)), x) for pattern in SOURCES for x in ROOT.glob(pattern)]
    assert len(files) > 300 and not {(name, one) for name, x in files for one in older(x.read_text())}
    assert not [name for name, _ in files if older(name.removesuffix(".py").replace("/", " "))]
    code = 'def said(way_of, final):\n    class NoRaceError: HEAT = silicon.always["told"]\n'
    assert older(code) == {"said", "way_of", "NoRaceError", "HEAT", "silicon"}
