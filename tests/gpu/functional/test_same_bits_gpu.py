"""200 random calls have the same bits whether C++ or Python launches them: at the first call and later, forwards and
backwards. C++ and Python launch them in separate processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.call_digests import FUNCTIONS, Run, difference
from tests.support.processes import python
from triton_gemm.runtime import native_build

CALLS, SHARES = 200, 8  # each share is one test, and tests run in parallel processes
PASSES = {"Python": 2, "C++": 4}  # C++ launches from the third on, and backward's calls from the fourth on


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all test processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp().parent))
        return native_build.build()


def run(share: int, passes: int, native: str) -> Run:
    command = "-m", "tests.support.call_digests", share, CALLS // SHARES, passes
    done = python(*command, timeout=900, TRITON_GEMM_NATIVE=native)
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
