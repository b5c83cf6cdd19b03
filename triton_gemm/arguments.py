"""Checks of single arguments of any function. Each raises an error in torch's words for an invalid one. And warnings,
of environment variables, which are arguments of all."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from inspect import signature
from numbers import Integral, Real

import torch


def tensors(function: str, **arguments: object) -> None:
    """Raise unless the first arguments of `function`, in their order, are tensors."""
    for position, (name, x) in enumerate(arguments.items(), 1):
        tensor(function, f"'{name}' (position {position})", x)


def tensor(function: str, argument: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}(): argument {argument} must be Tensor, not {type(x).__name__}")
    if x.is_nested:
        raise NotImplementedError(f"{function}(): argument {argument} is a nested tensor, which is not supported")


def number(function: str, name: str, x: object) -> float:
    """x as a number. As for torch a 0-D tensor is one too, unless it requires grad."""
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, torch.Tensor):
        if x.dim() > 0 or x.requires_grad:
            what = f"a {x.dim()}-D Tensor{' that requires grad' if x.requires_grad else ''}"
            raise TypeError(f"{function}(): argument '{name}' must be Number, not {what}")
        x = x.item()
    if isinstance(x, complex) and x.imag != 0:
        raise RuntimeError(f"value cannot be converted to type float without overflow: {function}'s {name} is {x}")
    if isinstance(x, complex):
        return x.real
    if not isinstance(x, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{function}(): argument '{name}' must be Number, not {type(x).__name__}")
    return x  # type: ignore[return-value]  # the operator makes a float of it


def flag(function: str, name: str, x: object, *, or_none: bool = False) -> None:
    """Raise TypeError unless x is a bool, or NumPy's, as torch takes them."""
    if not (isinstance(x, bool) or (or_none and x is None) or type(x).__name__ in ("bool", "bool_")):
        raise TypeError(f"{function}(): argument '{name}' must be bool{' or None' * or_none}, not {type(x).__name__}")


def callback(function: str, name: str, x: object, *parameters: str) -> None:
    """Raise TypeError unless x is None or can be called, with `parameters` as far as its signature is known."""
    if x is None:
        return
    if not callable(x):
        raise TypeError(f"{function}(): argument '{name}' must be callable or None, not {type(x).__name__}")
    with suppress(ValueError):  # it has no signature
        try:
            signature(x).bind(*parameters) if parameters else None
        except TypeError as error:
            called = ", ".join(parameters)
            raise TypeError(f"{function}(): argument '{name}' is called with ({called}): {error}") from None


def instance(function: str, name: str, x: object, kind: type, *, or_none: bool = False) -> None:
    """Raise TypeError unless x is an instance of a class."""
    if not (isinstance(x, kind) or (or_none and x is None)):
        what = f"{kind.__name__}{' or None' * or_none}"
        raise TypeError(f"{function}(): argument '{name}' must be {what}, not {type(x).__name__}")


def several(function: str, name: str, x: object) -> None:
    """Raise TypeError unless x is an iterable, but not a string."""
    if not isinstance(x, Iterable) or isinstance(x, (str, bytes)):
        raise TypeError(f"{function}(): argument '{name}' must be a collection, not {type(x).__name__}")


def positive(function: str, name: str, x: object) -> float:
    """x as a number. Raise ValueError unless it is above 0 and finite."""
    found = number(function, name, x)
    if not 0 < found < math.inf:
        raise ValueError(f"{function}(): {name} must be a positive number, not {x!r}")
    return found


def dtype(x: object, name: str = "out_dtype") -> None:
    """Raise TypeError unless x is a dtype, for the argument of that name."""
    if not isinstance(x, torch.dtype):
        raise TypeError(f"argument '{name}' must be torch.dtype, not {type(x).__name__}")


def count(name: str, x: object, least: int = 0) -> None:
    """Raise unless x is a whole number of at least that size."""
    if not isinstance(x, (Integral, torch.SymInt)) or isinstance(x, bool):
        raise TypeError(f"argument '{name}' must be int, not {type(x).__name__}")
    if x < least:
        raise ValueError(f"argument '{name}' must be at least {least}, not {x}")


def counts(function: str, name: str, x: object) -> list[int]:
    """The positive integers in x, an iterable or one integer, without repeats. Raises ValueError if there is none."""
    if isinstance(x, Integral):
        x = (x,)
    several(function, name, x)
    found: dict[int, None] = {}
    for number in x:  # type: ignore[attr-defined]  # which can be gone through
        count(name, number, 1)
        found[int(number)] = None
    if not found:
        raise ValueError(f"{function}(): argument '{name}' must have at least one number, but is empty")
    return list(found)


def one_of(function: str, name: str, x: object, allowed: Sequence[str], *, or_none: bool = False) -> None:
    """Raise ValueError unless x is one of the allowed words."""
    if not ((isinstance(x, str) and x in allowed) or (or_none and x is None)):
        raise ValueError(f"{function}(): {name} must be one of {', '.join(allowed)}{' or None' * or_none}, not {x!r}")


def warn_caller(text: str) -> None:
    """Warns at the line of the program that runs, as a filter by module or line expects: of no file of this package, of
    torch, or of a `with` statement's."""
    frame, level, inner = sys._getframe(1), 2, ("triton_gemm", "torch", "contextlib")
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in inner:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
