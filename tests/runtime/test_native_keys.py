"""The key of C++'s table. No kernel is launched: a call is found if its launch fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import fake_driver
from triton_gemm.problem import SUM
from triton_gemm.runtime import native, native_build

pytestmark = pytest.mark.slow
B = torch.empty(4, 4, dtype=torch.bfloat16)
STEP = native.DriverLaunch(1, (1, 1, 1), 32, 0, 1, False, False, b"", (), (), (), (), ())
ENTRY = native.Entry(
    None, None, 0, native.Shape((4, 4), (4, 1), B.dtype), (), (32, 32, 32), False, False, 0, 0, 0, (0, 0), (STEP,)
)


@pytest.mark.parametrize("place", ["a", "b", "bias", "out"])
@pytest.mark.parametrize("first", [0, 8])
def test_whether_an_address_is_a_multiple_of_16_is_in_the_key(
    place: str, first: int, driver: fake_driver.Driver
) -> None:
    table = native.table(native_build._module, 8)
    memory = torch.empty(64, dtype=B.dtype)
    assert memory.data_ptr() % 64 == 0

    def call(offset: int) -> tuple[Any, ...]:
        given = {"a": B, "b": B, "bias": B, "out": B.clone(), place: memory[offset // 2 :][:16].view(4, 4)}
        return "mm", given["a"], given["b"], (given["bias"],), SUM, given["out"], True

    assert table.keep(call(first), ENTRY)

    def is_found(offset: int) -> bool:
        try:
            return table.take(*call(offset)) is not None
        except RuntimeError as error:
            assert "illegal address" in str(error)  # of the launch
            return True

    found = [offset for offset in range(0, 64, 2) if is_found(offset)]
    assert found == [x for x in range(0, 64, 2) if (x % 16 == 0) == (first % 16 == 0)]
