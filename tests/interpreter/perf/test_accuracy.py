"""perf.accuracy in Triton's interpreter: every kernel that it runs is within its bound on hard matrices."""

from __future__ import annotations

import pytest
import torch

from perf.accuracy.candidates import KINDS, SMALL, SMALL_LONG
from perf.accuracy.judge import benches, ends, failures, long_benches

CPU = torch.device("cpu")
NAMES = ("bf16 to fp32", "bf16, odd", "ieee", "tf32, odd", "bf16x6, groups of rows", "fp64", "fp8 e4m3, blocks", "int8")


@pytest.mark.few(shows=lambda name: {"bf16" in name, "ieee" in name})
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_within_its_bound(name: str) -> None:
    kind = KINDS[name]
    found = benches(kind, SMALL, CPU)[:3]
    assert {bench.candidate.selection.kernel for bench in found} <= {"portable", "gemv"}
    assert failures([bench.measure() for bench in found]) == []


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", ["ieee", "bf16"])
def test_long_sums_and_what_is_not_read(name: str) -> None:
    assert failures([bench.measure() for bench in long_benches(KINDS[name], SMALL_LONG, CPU)]) == []
    found = ends(KINDS[name], CPU)
    assert len(found) == 4 and not any(found.values())
