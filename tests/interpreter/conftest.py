"""Looks for Triton's builtins once. Its interpreter looks through all members of `triton.language` before every launch
and every call of a kernel's function, to patch the builtins among them: half of the time of a test."""

import inspect
import types
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

PATCHED = {
    id(of): [name for name, member in inspect.getmembers(of) if tl.core.is_builtin(member)]
    for of in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}


def getmembers(of: object, *only: Any) -> list[tuple[str, Any]]:
    names = PATCHED.get(id(of))
    if not names or only:
        return inspect.getmembers(of, *only)
    if not tl.core.is_builtin(getattr(of, names[0])):  # a kernel calls a function: all are patched already
        return []
    return [(name, getattr(of, name)) for name in names]


interpreter.inspect = types.ModuleType("inspect")
vars(interpreter.inspect).update(vars(inspect), getmembers=getmembers)
