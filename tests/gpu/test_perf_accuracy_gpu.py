"""Every kernel, precision and class of bits within its bound on hard matrices: what `python -m perf.accuracy` measures,
and long sums, and what BLAS says is not read."""

from __future__ import annotations

import pytest
import torch

from perf.accuracy.__main__ import compile_all, possible
from perf.accuracy.judge import benches, ends, failures, long_benches
from perf.accuracy.ways import KINDS, LONG, SIZES

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", KINDS)
def test_every_kernel_and_class_is_within_its_bound(name: str) -> None:
    kind = KINDS[name]
    if not possible(kind, DEVICE):
        pytest.skip("there is no such product on this GPU")
    found = benches(kind, SIZES, DEVICE)
    compile_all(found, lambda _: None)
    assert failures([bench.measure() for bench in found]) == []


@pytest.mark.parametrize("name", [name for name, x in KINDS.items() if not (x.scales or x.groups or x.odd)])
def test_sums_of_a_million_products(name: str) -> None:
    kind = KINDS[name]
    assert failures([bench.measure() for bench in long_benches(kind, LONG, DEVICE)]) == []
    assert not any(ends(kind, DEVICE).values())
