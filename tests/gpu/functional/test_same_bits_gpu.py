"""Two hundred calls of every kind, drawn at random, have the same bits by C++ and by Python, in first calls and later
ones, forwards and backwards. Each of both is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.call_digests import FUNCTIONS, Run, difference
from triton_gemm.runtime import native_build

pytestmark = pytest.mark.gpu

CALLS, SHARES = 200, 8  # a share in each of the processes that test a GPU
PASSES = {"Python": 2, "C++": 4}  # C++ has an entry after the second, and of what a backward calls after the third


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all test processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp().parent))
        return native_build.build()


def run(share: int, passes: int, native: str) -> Run:
    command = [sys.executable, "-m", "tests.support.call_digests", str(share), str(CALLS // SHARES), str(passes)]
    environment = os.environ | {"TRITON_GEMM_NATIVE": native}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Run = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(SHARES))
def test_calls_have_the_same_bits(share: int, extension: Path, record_property: Callable[[str, object], None]) -> None:
    native = {"Python": "0", "C++": str(extension)}
    runs = {name: run(share, passes, native[name]) for name, passes in PASSES.items()}
    assert runs["Python"]["not by C++"] is not None and runs["C++"]["not by C++"] is None
    assert (found := difference(runs)) is None, found
    launches = zip(runs["Python"]["launches"][-1], runs["C++"]["launches"][-1], strict=True)
    by_cpp = [by_python > 0 and left == 0 for by_python, left in launches]
    served = Counter(FUNCTIONS[i % len(FUNCTIONS)] for i, served in enumerate(by_cpp) if served)
    record_property("calls that C++ launches", dict(served))
    assert sum(by_cpp) > CALLS // SHARES / 3, served
