"""Every kernel, precision and class of bits within its bound on hard matrices: what `python -m perf.accuracy` measures,
and long sums, and what BLAS says is not read."""

from __future__ import annotations

import pytest
import torch

from perf.accuracy import tables
from perf.accuracy.candidates import KINDS, possible
from perf.accuracy.judge import failures, of_kind

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", KINDS)
def test_every_kernel_and_class_is_within_its_bound(name: str) -> None:
    kind = KINDS[name]
    if not possible(kind, DEVICE):
        pytest.skip("there is no such product on this GPU")
    made = of_kind(kind, DEVICE)
    assert made["ways"]
    failed = [words for rows in made.values() for words in failures(rows)]
    print(tables.summary({**made, "failed": failed}))
    assert failed == []
