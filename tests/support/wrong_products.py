"""Wrong calls of products, to be answered as torch answers them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import triton_gemm


def words(call: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value).splitlines()[0]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def torchs(name: str) -> Callable[..., torch.Tensor]:
    return getattr(torch.nn.functional if name == "linear" else torch, name)


def assert_same_words(theirs: Callable[[], object], ours: Callable[[], object]) -> None:
    """The same exception, and torch's first sentence at the start of our text."""
    (kind, text), (our_kind, our_text) = words(theirs), words(ours)
    assert our_kind is kind
    assert our_text.startswith(text.split(". ")[0].rstrip(".")), f"torch says {text!r}, we say {our_text!r}"


H, B, D, INT8 = ({"dtype": dtype} for dtype in (torch.half, torch.bfloat16, torch.double, torch.int8))
_CALLS: dict[str, list[tuple[Any, ...]]] = {
    "matmul": [
        *((ones(), ones(3)), (ones(3), ones(4)), (ones(3), ones(4, 5)), (ones(3), ones(2, 4, 5))),
        *((ones(2, 3), ones(4)), (ones(2, 2, 3), ones(4)), (ones(2, 2, 3), ones(4, 5)), (ones(2, 3), ones(2, 4, 5))),
        *((ones(2, 2, 3), ones(2, 4, 5)), (ones(2, 2, 3), ones(3, 3, 5)), (ones(7, 2, 2, 3), ones(7, 4, 3, 5))),
        *((ones(2, 1, 2, 3), ones(3, 4, 5)), (ones(1, 2, 3), ones(3, 4, 5)), (ones(2, 2, 3), ones(3, 4, 5))),
        *((ones(3), ones(3, **D)), (ones(3), ones(3, 4, **D))),
        *((ones(2, 2, 3), ones(3, 5, **D)), (ones(2, 2, 3), ones(2, 3, 5, **D)), (ones(2, 2, 3), ones(2, 4, 5, **D))),
        *(([1], ones(3)), (ones(3), 1.0), (ones(3, **H), ones(3, **INT8))),
        (ones(2, 2, 3), ones(3, **D)),
    ],
    "mm": [
        *(([1], ones(3, 5)), (ones(3, 5), 3), (ones(2, 3), ones(3)), (ones(1, 2, 3), ones(3, 5))),
        *((ones(), ones(3, 5)), (ones(2, 3), ones()), (ones(), ones()), (ones(3), ones(3, 5))),
        *((ones(2, 3), ones(4, 5)), (ones(2, 3, **H), ones(4, 5, **H)), (ones(0, 3), ones(4, 0))),
        *((ones(2, 3), ones(3, 5, **D)), (ones(2, 3, **H), ones(3, 5, **B)), (ones(2, 3), ones(4, 5, **D))),
        (ones(2, 3), ones(3, 5, dtype=torch.int64)),
    ],
    "bmm": [
        *((ones(2, 3), ones(2, 3, 5)), (ones(2, 2, 3), ones(3, 5)), (ones(2, 2, 3), ones(3, 3, 5))),
        *((ones(2, 2, 3), ones(2, 4, 5)), (ones(1, 2, 3), ones(2, 3, 5)), (ones(2, 2, 3), ones(2, 3, 5, **D))),
        *((ones(2, 2, 3), [1]), (ones(2, 2, 3), ones(2, 4, 5, **D)), (ones(2, 2, 3), ones(5))),
        *((ones(), ones(2, 3, 5)), (ones(2, 2, 3), ones())),
    ],
    "mv": [
        *((ones(2, 3), ones(4)), (ones(3), ones(3)), (ones(2, 3), ones(3, 1)), (ones(2, 3), [1])),
        *((ones(2, 3), ones(4, **D)), (ones(2, 3), ones(3, **D)), (ones(2, 3, **H), ones(3, **B))),
        *((ones(), ones(3)), (ones(2, 3), ones())),
    ],
    "addmm": [
        *((ones(4), ones(2, 3), ones(3, 5)), (ones(3, 5), ones(2, 3), ones(3, 5)), (ones(5), ones(3), ones(3, 5))),
        *((ones(1, 2, 5), ones(2, 3), ones(3, 5)), (ones(5), ones(2, 3), ones(3)), (ones(5), ones(2, 3), ones(4, 5))),
        *((ones(4), ones(2, 3), ones(4, 5)), (ones(5), ones(2, 3), ones(3, 5, **D)), (ones(5), [1], ones(3, 5))),
        *((ones(5), ones(2, 3, **D), ones(3, 5)), (ones(5, **D), ones(2, 3), ones(3, 5, **D))),
        (ones(5, **D), ones(2, 3), ones(3, 5)),
        *((ones(4), ones(2, 3), ones(3, 5, **D)), ([1], ones(2, 3), ones(3, 5))),
        *((ones(5), ones(), ones(3, 5)), (ones(5), ones(2, 3), ones())),
    ],
    "baddbmm": [
        *((ones(4), ones(2, 2, 3), ones(2, 3, 5)), (ones(3, 2, 5), ones(2, 2, 3), ones(2, 3, 5))),
        *((ones(1, 1, 2, 5), ones(2, 2, 3), ones(2, 3, 5)), (ones(5), ones(2, 3), ones(2, 3, 5))),
        *((ones(5), ones(2, 2, 3), ones(3, 3, 5)), (ones(5), ones(2, 2, 3), ones(2, 4, 5))),
        *((ones(5), ones(2, 2, 3), ones(2, 3, 5, **D)), (ones(5, **D), ones(2, 2, 3), ones(2, 3, 5))),
        *((ones(5, **H), ones(2, 2, 3), ones(2, 3, 5)), (ones(4), ones(2, 2, 3), ones(2, 3, 5, **D))),
        *((ones(5), ones(), ones(2, 3, 5)), (ones(5), ones(2, 2, 3), ones())),
    ],
    "linear": [
        *((ones(2, 3), ones(2, 5, 3)), (ones(2, 3), ones(5, 4)), (ones(4, 2, 3), ones(5, 4)), (ones(3), ones(5, 4))),
        *((ones(2, 3), ones(5, 4), ones(5)), (ones(2, 3), ones(5, 3), ones(4)), (ones(4, 2, 3), ones(5, 3), ones(4))),
        *((ones(), ones(5, 3), ones(5)), (ones(3), ones()), (ones(2, 3), ones(5, 3, **D)), (ones(4, 2, 3), ones(4))),
        *((ones(2, 3), ones(5, 3, **D), ones(5)), (ones(2, 3), ones(5, 3), ones(5, **D)), ([1], ones(5, 3))),
        *((ones(2, 3), [1]), (ones(2, 3), ones(5, 3), [1]), (ones(2, 3), ones(3), ones(2))),
        *((ones(2, 3), ones(5, 3), ones(1, 2, 5)), (ones(2, 3), ones(5, 3), ones(4, **D))),
    ],
}  # fmt: skip
# What `mm` of 2x3 and 3x5 cannot write to.
_OUTS = {
    "dtype": ones(2, 5, **D),
    "expanded": ones(1, 5).expand(2, 5),
    "overlapping": ones(6).as_strided((2, 5), (0, 1)),
}


def _shown(argument: Any) -> str:
    kind = str(argument.dtype).removeprefix("torch.") if isinstance(argument, torch.Tensor) else type(argument).__name__
    return f"{kind}{list(getattr(argument, 'shape', ''))}"


_NAMED = [
    pytest.param(name, arguments, None, id=f"{name}({', '.join(map(_shown, arguments))})")
    for name, calls in _CALLS.items()
    for arguments in calls
]
_NAMED += [pytest.param("mm", (ones(2, 3), ones(3, 5)), out, id=f"mm-out-{name}") for name, out in _OUTS.items()]
WITH_MISTAKES = pytest.mark.parametrize(("name", "arguments", "out"), _NAMED)


def assert_mistake_is_torchs(
    name: str, arguments: tuple[Any, ...], out: torch.Tensor | None, device: str = "cpu"
) -> None:
    """Of WITH_MISTAKES, on a device."""

    def moved(x: Any) -> Any:
        memory = torch.ones(512, dtype=getattr(x, "dtype", None), device=device)
        return memory.as_strided(x.shape, x.stride()) if isinstance(x, torch.Tensor) else x

    given, how = [*map(moved, arguments)], {} if out is None else {"out": moved(out)}
    assert_same_words(lambda: torchs(name)(*given, **how), lambda: getattr(triton_gemm, name)(*given, **how))


# What may be given for beta or alpha, or may not, as torch decides.
FACTORS = {
    "number": -2,
    "bool": True,
    "numpy": np.float32(0.5),
    "real complex": 2 + 0j,
    "complex": 2j,
    "none": None,
    "0-D": torch.tensor(0.5),
    "0-D integer": torch.tensor(3),
    "0-D double": torch.tensor(0.25, dtype=torch.double),
    "0-D bool": torch.tensor(True),
    "0-D complex": torch.tensor(2j),
    "0-D without data": torch.empty((), device="meta"),
    "0-D requiring grad": torch.tensor(2.0, requires_grad=True),
    "1-D": ones(1),
    "2-D": ones(2, 5),
}


def with_nested(layout: torch.layout) -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Every argument of every product nested: the function's and the argument's name, and what to call it with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        nested = torch.nested.nested_tensor([ones(2, 3), ones(4, 3)], layout=layout)
    a, b, v, row, one, offs = ones(2, 3), ones(3, 5), ones(3), ones(5), ones(), torch.tensor([1, 2], dtype=torch.int32)
    x, y = a.expand(2, 2, 3), b.expand(2, 3, 5)
    calls: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
        "matmul": ({"input": a, "other": b}, {"out": a}),
        "mm": ({"input": a, "mat2": b}, {"out": a}),
        "bmm": ({"input": x, "mat2": y}, {"out": x}),
        "mv": ({"input": a, "vec": v}, {"out": v}),
        "addmm": ({"input": row, "mat1": a, "mat2": b}, {"out": a, "beta": one}),
        "baddbmm": ({"input": row, "batch1": x, "batch2": y}, {"out": x, "alpha": one}),
        "linear": ({"input": a, "weight": b.T, "bias": row}, {}),
        "grouped_matmul": ({"mat_a": a, "mat_b": y, "offs": offs}, {}),
        "scaled_matmul": ({"a": a, "b": b, "scale_a": one, "scale_b": one}, {"bias": row}),
        "explain": ({"input": a, "other": b}, {}),
    }
    for function, (positional, keyword) in calls.items():
        for name in (*positional, *keyword):
            arguments = tuple(nested if name == own else x for own, x in positional.items())
            yield function, name, arguments, {name: nested} if name in keyword else {}
