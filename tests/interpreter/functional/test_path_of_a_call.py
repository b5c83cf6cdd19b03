"""How much of the package a call goes through: in a new process, and once one like it was made."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import printed

SCRIPT = """
import json, os, sys
from collections import Counter
import torch, triton_gemm

package = os.path.dirname(triton_gemm.__file__) + os.sep
a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()

def counted():
    calls = Counter()
    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_filename[len(package):]] += 1
    sys.setprofile(note)
    triton_gemm.matmul(a, b)
    sys.setprofile(None)
    return calls

print(json.dumps([counted() for _ in range(3)]))
"""
# What the interpreter runs of a kernel, which a GPU runs else.
DEVICE_CODE = ("kernels/portable/kernel.py", "kernels/tiles.py", "kernels/epilogue.py", "kernels/programmatic.py")
DEVICE_CODE += ("kernels/schedule.py", "kernels/splitk.py", "compat/language.py")


@pytest.fixture(scope="module")
def calls() -> list[dict[str, int]]:
    """Of three calls of 64x64 in bf16 in a new process: how many functions each file has called."""
    found: list[dict[str, int]] = json.loads(printed(SCRIPT, TRITON_INTERPRET="1", TRITON_GEMM_NATIVE="0"))
    return found


def on_the_host(calls: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in calls.items() if name not in DEVICE_CODE}


def test_a_first_call_goes_through_few_functions(calls: list[dict[str, int]]) -> None:
    """Modules that it imports are counted, too."""
    assert sum(calls[0].values()) <= 1200, calls[0]
    assert len(on_the_host(calls[0])) <= 35, calls[0]


def test_a_later_call_goes_through_six_files(calls: list[dict[str, int]]) -> None:
    for later in calls[1:]:
        assert sum(later.values()) <= 60, later
    assert len(on_the_host(calls[2])) <= 6, calls[2]
