"""Every wrong argument to every product on a GPU: it is refused before anything is launched, so that the context lives
on, and the next call gives the bits of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import bad_arguments


@pytest.mark.parametrize("function", bad_arguments.PRODUCTS)
def test_wrong_arguments_do_not_poison_the_context(function: str, tmp_path: Path) -> None:
    right = bad_arguments.right("cuda", tmp_path)[function]
    first = bad_arguments.call(function, right)
    refused = 0
    for _, parameter in bad_arguments.cases(function):
        for value, _ in bad_arguments.wrong_values(function, parameter, right):
            try:
                bad_arguments.call(function, {**right, parameter: value})
            except Exception as error:
                refused += 1
                message = f"{parameter}={value!r}: {type(error).__name__}: {error}"
                assert "CUDA error" not in str(error) and not isinstance(error, torch.AcceleratorError), message
                torch.cuda.synchronize()  # where a launch has gone wrong, this raises
    assert refused > 20
    assert torch.equal(bad_arguments.call(function, right), first)
    torch.cuda.synchronize()


def test_what_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    """Operands on the CPU among those on the GPU."""
    for function, right in bad_arguments.right("cuda", tmp_path).items():
        if function in bad_arguments.PRODUCTS:
            for name in [name for name, x in right.items() if isinstance(x, torch.Tensor)]:
                with pytest.raises((RuntimeError, ValueError), match=r"device|cuda"):
                    bad_arguments.call(function, {**right, name: right[name].cpu()})
            bad_arguments.call(function, right)
    torch.cuda.synchronize()
