"""What Triton's interpreter does again and again is done once, or on whole arrays: much of a test's time.

It looks through all members of `triton.language` before every launch and every call of a kernel's function, to patch
the builtins among them; makes a table of all dtypes to look up one; and compares each sum of integers with the smallest
and the largest one by eight operations on tensors of its own, to assert nothing unless it debugs.
"""

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

LANGUAGE = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
BUILTINS = {id(of): [name for name, member in inspect.getmembers(of) if tl.core.is_builtin(member)] for of in LANGUAGE}
patch_language = interpreter._patch_lang


def getmembers(of: object, *only: Any) -> list[tuple[str, Any]]:
    if id(of) in BUILTINS and not only:
        return [(name, getattr(of, name)) for name in BUILTINS[id(of)]]
    return inspect.getmembers(of, *only)


def patch_language_once(function: Callable[..., Any]) -> Any:
    """A kernel's call of a function finds all patched, unless the function's module has Triton's other form."""
    forms = [x for x in function.__globals__.values() if x is tl or x is tl.core]
    if any(tl.core.is_builtin(form.load) for form in forms):
        return patch_language(function)
    return interpreter._LangPatchScope()


dtype_of_scalar = cache(interpreter._get_np_dtype)


def dtype_of(kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if kind.scalar.is_ptr() else dtype_of_scalar(kind.scalar)


OPERATIONS: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def assert_no_overflow(x: Any, y: Any, operation: Callable[..., Any]) -> None:
    kind, options = x.dtype, interpreter.interpreter_builder.options
    if options.debug and options.sanitize_overflow and kind.int_bitwidth < 64:
        result = OPERATIONS[operation.__name__](x.handle.data, y.handle.data, dtype=np.int64)
        inside = (kind.get_int_min_value() <= result) & (result <= kind.get_int_max_value())
        assert inside.all(), f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


interpreter.inspect = types.ModuleType("inspect")
vars(interpreter.inspect).update(vars(inspect), getmembers=getmembers)
interpreter._patch_lang = patch_language_once
interpreter._get_np_dtype = dtype_of
interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = assert_no_overflow
