"""Wrong calls of a product, to be answered as torch.mm answers them."""

from collections.abc import Callable

import pytest
import torch


def words(call: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value).splitlines()[0]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


MISTAKES = {
    "inner-sizes": (ones(2, 3), ones(4, 5), None),
    "inner-sizes-half": (ones(2, 3, dtype=torch.half), ones(4, 5, dtype=torch.half), None),
    "inner-sizes-empty": (ones(0, 3), ones(4, 0), None),
    "dtypes": (ones(2, 3), ones(3, 5, dtype=torch.double), None),
    "dtypes-16-bit": (ones(2, 3, dtype=torch.half), ones(3, 5, dtype=torch.bfloat16), None),
    "dtypes-integer": (ones(2, 3), ones(3, 5, dtype=torch.int64), None),
    "a-1d": (ones(3), ones(3, 5), None),
    "b-1d": (ones(2, 3), ones(3), None),
    "a-3d": (ones(1, 2, 3), ones(3, 5), None),
    "a-0d": (ones(), ones(3, 5), None),
    "shapes-and-dtypes": (ones(2, 3), ones(4, 5, dtype=torch.double), None),
    "out-dtype": (ones(2, 3), ones(3, 5), ones(2, 5, dtype=torch.double)),
    "out-dtype-half": (ones(2, 3), ones(3, 5), ones(2, 5, dtype=torch.half)),
    "out-expanded": (ones(2, 3), ones(3, 5), ones(1, 5).expand(2, 5)),
    "out-one-element": (ones(2, 3), ones(3, 5), ones(1, 1).expand(2, 5)),
    "out-overlapping": (ones(2, 3), ones(3, 5), ones(6).as_strided((2, 5), (0, 1))),
}
