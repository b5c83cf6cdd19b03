"""torch's dispatcher: who watches a call and sees only what goes through it, what operands are besides memory, sizes
that a compiler may not know yet, and what operators register, with DTensor's dispatcher too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from .autograd import dual, forward_grad_enabled

# Dispatch keys of tensors that hold others, or nothing.
_WRAPPED = 0
for _name in ("Python", "Functionalize", "Batched", "FuncTorchBatched", "FuncTorchGradWrapper", "ZeroTensor"):
    _WRAPPED |= torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_name)).raw_repr()  # type: ignore[arg-type]


def _has_callbacks() -> Callable[[], bool]:
    """at::hasCallbacks of torch's C++, which has no binding in Python: whether anything observes operators here, or in
    all threads. Of a torch without it, whether a profiler runs in this thread."""
    with suppress(OSError, AttributeError):
        found = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))._ZN2at12hasCallbacksEv
        found.restype, found.argtypes = ctypes.c_bool, ()
        return found
    return torch.autograd._profiler_enabled  # type: ignore[attr-defined]


_is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_observed: Callable[[], bool] = _has_callbacks()
_tracing_state: Callable[[], object] = torch._C._get_tracing_state

below_autograd = torch._C._AutoDispatchBelowAutograd


def must_dispatch() -> object:
    """Whether a compiler, a dispatch mode, a tracer, a profiler, another observer or forward differentiation is active:
    it sees only what goes through the dispatcher."""
    return _is_compiling() or _dispatch_modes() or _tracing_state() or _observed() or forward_ad._current_level >= 0


# Whether one of torch.func's transforms is active.
in_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def differentiates_forward(*tensors: torch.Tensor | None) -> bool:
    """Whether a level of forward differentiation is open, as a call with these tensors sees it."""
    if forward_ad._current_level >= 0:
        return True
    if _is_compiling():
        return False
    # What Dynamo has traced opens levels past torch's Python, which does not know of them then.
    transform = in_transform()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Jvp:
        return True
    if not _dispatch_modes():
        return False
    with forward_grad_enabled(), torch._C._DisableTorchDispatch():  # or those modes would see it
        return any(x is not None and dual(x)[1] is not None for x in tensors)


def override_functions(*tensors: torch.Tensor | None) -> bool:
    """Whether one is of a subclass that says by itself what torch's functions do with it."""
    own: Any = torch.Tensor.__torch_function__
    for x in tensors:
        if x is not None and type(x) not in (torch.Tensor, torch.nn.Parameter):
            theirs: Any = type(x).__torch_function__
            if getattr(theirs, "__func__", theirs) not in (own.__func__, torch._C._disabled_torch_function_impl):
                return True
    return False


def differ(x: int | torch.SymInt, y: int | torch.SymInt) -> bool:
    """Whether sizes are known to differ; a compiler may know a size only when its code runs."""
    unequal = x != y
    if not _is_compiling() and not isinstance(unequal, torch.SymBool):  # to Dynamo it is a bool
        return bool(unequal)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(unequal)


def may_differ(x: int | torch.SymInt, y: int | torch.SymInt) -> bool:
    """Whether sizes differ, or are not known to be the same."""
    unequal = x != y
    if not _is_compiling() and not isinstance(unequal, torch.SymBool):
        return bool(unequal)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(unequal)


def is_wrapper(x: torch.Tensor) -> bool:
    """Whether x holds other tensors (a subclass, functionalization, vmap, torch.func) or no data at all."""
    return bool(torch._C._dispatch_keys(x).raw_repr() & _WRAPPED)


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements of x share memory, as far as torch can tell from its strides."""
    return torch._debug_has_internal_overlap(x) == 1


def withdraw(library: torch.library.Library) -> None:
    """Takes back all that `library` registered; what was there before it is there again."""
    library._destroy()


def library_of(operator: str) -> torch.library.Library:
    """An empty library for `torch.ops.triton_gemm`'s operator of that name. It takes back what an earlier one defined:
    a module that is loaded again, as IPython's autoreload does, defines its operators again."""
    kept = _libraries()
    if operator in kept:
        earlier, callbacks = kept.pop(operator)
        for callback in callbacks:
            callback()
        withdraw(earlier)
    library = torch.library.Library("triton_gemm", "FRAGMENT")
    kept[operator] = library, []
    return library


def before_withdrawal(operator: str, callback: Callable[[], object]) -> None:
    """Has `callback` called before the operator's library takes back what it defined."""
    _libraries()[operator][1].append(callback)


def _libraries() -> dict[str, tuple[torch.library.Library, list[Callable[[], object]]]]:
    """Each operator's, kept where they outlive the package's modules, and what is called before it is taken back."""
    return vars(torch.ops.triton_gemm).setdefault("_libraries", {})


def share_sharding_decisions(operator: Any, first_static: int) -> None:
    """Has DTensor tell apart calls of `operator` by its arguments from number `first_static` on when it looks up how an
    earlier one was sharded; register_sharding by itself counts from the first integer on."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    schema_info = RuntimeSchemaInfo(static_argnum=first_static, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = schema_info
