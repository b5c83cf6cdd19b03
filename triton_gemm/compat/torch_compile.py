"""torch.compile: what is hidden from Dynamo, which traces, and what is offered to Inductor, which times kernels and
chooses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_eval_frame = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def hide_from_dynamo(function: _Function) -> _Function:
    """`function`, run as it is, with all that it calls, when a compiled function or a graph break comes to it.

    As torch.compiler.disable, but at no cost for a call, and without the second that importing Dynamo takes.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "put it around the compiled function's call"  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


@cache
def _inductor_choices(kernels: tuple[tuple[str, Callable[..., object]], ...], state: str) -> dict[str, Any]:
    """Inductor's candidates by the names of torch's kernels: each is called kernel(*operands, out=out, **scalars).

    They stay in Inductor's namespace of kernels, where generated code looks for them, from a cache or not. state: what
    their times depend on, because Inductor keeps times on disk.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice, extern_kernels

    class Choice(ExternKernelChoice):
        def hash_key(self) -> str:  # type: ignore[override]
            return f"{super().hash_key()} {state}"

    missing = [name for name, _ in kernels if not hasattr(extern_kernels, name)]
    if missing:
        raise AttributeError(f"it has no kernel {missing[0]}")
    return {name: Choice(kernel, name=f"triton_gemm_{name}") for name, kernel in kernels}


def offer_to_inductor(
    kernels: Mapping[str, Callable[..., object]],
    tag: str,
    takes: Callable[[Sequence[Any], Any, Mapping[str, Any]], bool],
) -> Callable[[], None]:
    """Has Inductor's autotuning time kernels[name] wherever it times torch's kernel of that name and `takes(operands,
    layout, scalars)` is true; what it returns takes that back. RuntimeError where Inductor is not as expected.

    Candidates are offered only while `tag` is in torch.compiler.config.cache_key_tag, which is in the keys of all
    caches of compiled graphs: a graph that may call them is found only by a process that has them.
    """
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.kernel import bmm, mm  # noqa: F401 (they make torch's own candidates)
        from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice
        from torch._inductor.virtualized import V

        wanted = ("input_nodes", "layout", "kwargs")
        if not set(wanted) <= set(inspect.signature(ExternKernelChoice.bind).parameters):
            raise AttributeError(f"ExternKernelChoice.bind does not take {', '.join(wanted)}")
        found = InductorChoices.get_template_configs
        choices = _inductor_choices(tuple(kernels.items()), tag)
        assert isinstance(config.max_autotune, bool) and isinstance(torch.compiler.config.cache_key_tag, str)
    except (ImportError, AttributeError, AssertionError, TypeError) as error:
        raise RuntimeError(f"the Inductor of torch {torch.__version__} is not as expected: {error}") from error

    def twin(caller: Any) -> Any:
        """Our candidate for what a candidate of torch's computes, or None."""
        choice = choices.get(caller.choice.name) if isinstance(caller, ExternKernelCaller) else None
        if choice is None or not takes(caller.input_nodes, caller.layout, caller.kwargs):
            return None
        return choice.bind(caller.input_nodes, caller.layout, **caller.kwargs)

    @wraps(found)
    def get_template_configs(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        callers: list[Any] = found(self, *arguments, **named)
        tunes = config.max_autotune or config.max_autotune_gemm
        if not tunes or V.graph.cpp_wrapper or tag not in torch.compiler.config.cache_key_tag:
            return callers  # where nothing is timed, or where C++ would have to call Python
        return [*callers, *filter(None, map(twin, callers))]

    InductorChoices.get_template_configs = get_template_configs  # type: ignore[method-assign]

    def take_back() -> None:
        if InductorChoices.get_template_configs is get_template_configs:
            InductorChoices.get_template_configs = found  # type: ignore[method-assign]

    return take_back
