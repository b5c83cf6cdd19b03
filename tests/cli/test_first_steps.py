"""What one meets first: the help, and calls that this GPU or this installation cannot serve."""

from __future__ import annotations

import pytest

from tests.cli.test_cli import CACHE, COMMANDS, document, words_of


@pytest.mark.parametrize("command", [(), *((x,) for x in COMMANDS[:-2]), *(("cache", x) for x in CACHE)], ids=" ".join)
def test_help_names_no_file_of_the_repository(command: tuple[str, ...]) -> None:
    """A wheel does not have them."""
    assert ".md" not in words_of(*command, "--help")


def test_fp8_on_a_gpu_without_it_is_no_question_of_scales() -> None:
    for scales in ((), ("--scales", "rows")):
        error = document("explain", "16x64x64", "--dtype", "fp8", "--device", "a100", *scales, code=1)["error"]
        assert "fp8 needs compute capability 8.9 or newer" in error
