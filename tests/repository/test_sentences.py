"""Sentences of the package's docstrings and comments."""

from pathlib import Path

from tests.support.sentences import too_long

PACKAGE = Path(__file__).parents[2] / "triton_gemm"
MOST = 40  # words
WARP_SPECIALISED = "arguments", "cluster", "mma", "wide", "work"
LONGER = {  # files that have longer ones; a kernel's are shortened when a kit is built anew, which has its file's hash
    *("cli/source_tree.py", "functional/api.py", "functional/native_products.py", "functional/ops.py"),
    *("functional/scaled.py", "ladder/rung.py", *(f"kernels/{x}.py" for x in ("repack", "schedule", "splitk"))),
    *(f"kernels/{x}.py" for x in ("portable/kernel", *(f"warp_specialised/{y}" for y in WARP_SPECIALISED))),
}


def test_no_sentence_is_too_long() -> None:
    found = {str(x.relative_to(PACKAGE)): too_long(x.read_text(), MOST) for x in PACKAGE.rglob("*.py")}
    assert not {name: long for name, long in found.items() if long and name not in LONGER}
    for form in ('"""{}"""', "# {}\n", "x = 1  # {}"):
        assert not too_long(form.format("One word. " + MOST * "word "), MOST)
        assert too_long(form.format("One word: " + MOST * "word "), MOST)
