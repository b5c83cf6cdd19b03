"""Products amid NaN and sentinels, and of operands that span more than 2^31 elements, in every form of every kernel;
and planted bugs, which are found."""

from __future__ import annotations

import pytest
import torch

from tests.support import nan_windows
from tests.support.processes import python

SHARES = 6
CALLS, FAR_CALLS = 10_000, 1_500  # in nan_windows, and of operands that span more than 2^31 elements


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(SHARES))
def test_nothing_outside_is_read_or_written(share: int) -> None:
    assert nan_windows.main(["--calls", str(CALLS // SHARES + 1), "--share", f"{share + 1}/{SHARES}"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_operands_may_span_more_than_2_31_elements() -> None:
    status = nan_windows.main(["--far", "a", "b", "c", "--calls", str(FAR_CALLS)])
    torch.cuda.empty_cache()  # others share the GPU
    if status == nan_windows.SKIPPED:
        pytest.skip("needs more of the GPU's memory")
    assert status == 0


@pytest.mark.parametrize("bug", nan_windows.PLANTED)
def test_what_is_planted_is_found(bug: str) -> None:
    """In a process of its own, which an access outside ends."""
    done = python("-m", "tests.support.nan_windows", "--planted", bug, "--calls", "5")
    if done.returncode == nan_windows.SKIPPED:
        pytest.skip("needs more of the GPU's memory")
    output = done.stdout + done.stderr
    words = {"write": ["no result's"], "read": ["are wrong"], "far": ["illegal memory access", "are wrong"]}[bug]
    assert done.returncode and any(word in output for word in words), output[-3000:]
