"""torch's own products on these kernels, without editing the model: `use`, `enable`, `disable`, `report_routing`.

torch dispatches matmul, linear and their derivatives to aten's mm, addmm, bmm and baddbmm, and compiled graphs call
their `out=` forms. Its products of 8 bits and of groups are in `other_products`. From the first rule on all are
overridden for CUDA (in the interpreter: for the CPU) below autograd and autocast, and what was there before is kept for
all that stays torch's. They stay overridden, and pass all on when nothing is routed: torch would free what it takes
back, and any thread may be running it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

import torch

from .. import arguments
from ..compat import (
    INTERPRETED,
    hash_triton_in_background,
    hide_from_dynamo,
)
from ..hardware.device import has_gpu
from ..problem import SUM, Request
from ..runtime import background, kits, plan, policies, turns
from . import left_to_torch, matrices
from .fast_path import FastPath
from .matrices import Operands
from .native_products import Places
from .other_products import COUNTED, PRODUCTS, Product
from .overrides import Kernel, Overrides
from .routing_rule import ROUTED, FirstCalls, Kind, Rule, Wanted, kinds_of

KEY = "CPU" if INTERPRETED else "CUDA"
OURS = "triton_gemm"
AUTOLOAD = "triton_gemm_autoload"  # the owner of the rule of TRITON_GEMM_USE=1
NOT_COMPILED, NOT_ROUTED = "its kernel is not compiled yet", "torch: it is not routed"

_rules: list[Rule] = []  # changed by `_by_cpp.change` alone: a signal or the collector may enter and leave any time
_counts: Counter[tuple[str, str]] = Counter()


@hide_from_dynamo
def enable(
    *,
    only: Kind | Collection[Kind] | None = None,
    exclude: Kind | Collection[Kind] = (),
    predicate: Wanted | None = None,
    first_calls: FirstCalls = "same bits",
    required: bool = False,
    learn: bool | None = None,
) -> None:
    """Runs torch's mm, bmm, addmm and baddbmm on triton_gemm, in every thread, until `disable`.

    With these also matmul and linear of matrices and all derivatives, because torch makes them of these four, and some
    others (docs/routing.md). torch keeps the calls that triton_gemm cannot compute, and those for which a table of
    bits="any" says that torch is faster, but for dtypes in `only` and with a predicate. If rules are nested, the
    innermost counts. A package that calls this again replaces its own rule, as a notebook's cell that is run twice.

    With TRITON_GEMM_USE=0 in the environment torch keeps all calls, whatever the arguments are.

    Args:
        only: The name of an operator ("addmm") or a dtype, or several: only these are routed. None: all.
        exclude: The same: these are not routed.
        predicate: predicate(op, a, b) returns a bool: whether to route a call.
        first_calls: What runs if a call's kernel is not compiled yet. "same bits": a loaded kernel with the same bits,
            and if there is none the call waits for the compiler. "torch": such a kernel, and if there is none torch's,
            with torch's bits. A call always waits while a CUDA graph is captured, and if nothing can be compiled in the
            background.
        required: Raise an error on a machine without a GPU. By default torch computes there, with one warning.
        learn: Time kernels of the same bits in service, in at most 1 % of the GPU time of calls, and run calls on the
            fastest from then on (docs/tuning.md). None: if TRITON_GEMM_LEARN is 1.

    Raises:
        ValueError: An unknown name; `only` is empty; `only` and `exclude` leave no operator with a dtype that it
            computes; or first_calls="torch" with TRITON_GEMM_BACKGROUND=0.
        RuntimeError: torch sees no CUDA device and `required`, or there is one that torch cannot use (unless
            TRITON_INTERPRET=1 was set before Python started); or first_calls="torch" under batch invariance, here and
            at every call. A call: its predicate raised an error, or returned no bool.
    """
    rule = replace(_rule("enable", only, exclude, predicate, first_calls, required, learn), owner=_caller())
    before = [x for x in list(_rules) if x.owner == rule.owner]
    _begin(rule)
    for one in before:
        _end(one)


@hide_from_dynamo
def _rule(
    function: str,
    only: Kind | Collection[Kind] | None,
    exclude: Kind | Collection[Kind],
    predicate: Wanted | None,
    first_calls: FirstCalls,
    required: bool,
    learn: bool | None,
) -> Rule:
    """A rule of the arguments of `enable` or `use`, which are checked."""
    arguments.flag(function, "required", required)
    arguments.flag(function, "learn", learn, or_none=True)
    arguments.callback(function, "predicate", predicate, "op", "a", "b")
    arguments.one_of(function, "first_calls", first_calls, get_args(FirstCalls))
    kinds = kinds_of(function, only, exclude)
    if first_calls == "torch":
        _refuse_invariance()
        if not (INTERPRETED or background.enabled()):
            raise ValueError('first_calls="torch" compiles in the background, which TRITON_GEMM_BACKGROUND=0 turns off')
    off = "TRITON_GEMM_USE=0" if os.environ.get("TRITON_GEMM_USE") == "0" else None
    if off:
        learn = False
    elif not (INTERPRETED or torch.cuda.device_count()):
        _without_cuda(function, required)
    # What a predicate says may differ from call to call, so that nothing is kept.
    fast = _made_under((*kinds, first_calls, off) if predicate is None else None)
    learns = policies.learns_in_environment() if learn is None else learn
    return Rule(*kinds, predicate, first_calls, learns and not INTERPRETED, fast, off=off)


def _without_cuda(function: str, required: bool) -> None:
    """RuntimeError where CUDA calls are `required`, or there is a GPU that torch cannot use; else the one warning."""
    text = f"triton_gemm routes calls on CUDA devices, and torch {torch.__version__} sees none here"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if required or (torch.version.cuda and not hidden and has_gpu()):
        how = "to route CPU tensors to Triton's interpreter, set TRITON_INTERPRET=1 before Python starts"
        raise RuntimeError(f"{text}; `triton-gemm doctor` says why; {how}")
    _warn_once(f"{text}: torch computes. use(required=True) raises an error instead", 6 if function == "use" else 5)


@lru_cache(8)
def _warn_once(text: str, stacklevel: int) -> None:
    warnings.warn(text, stacklevel=stacklevel)


def _caller() -> str:
    """The package whose module, or `__main__`, calls the public function that calls this."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]


@hide_from_dynamo
def _begin(rule: Rule) -> None:
    """Makes a rule the innermost one."""
    is_new = (INTERPRETED or torch.cuda.device_count() > 0) and _overrides.register()
    if is_new and not INTERPRETED and not kits.exist():
        hash_triton_in_background()  # kernels are likely to be compiled
    _by_cpp.change(_rules, _rules.append, rule)
    if rule.learn:
        turns.begin()


@lru_cache(8)  # a training loop may enter an equal rule at every step
def _made_under(key: object) -> FastPath:
    """The calls that were made under equal rules, or, for None, under those that keep none."""
    return FastPath(lambda *_: _follow())


@hide_from_dynamo
def _follow() -> None:
    """Has C++ route by the rule that is innermost now."""
    _by_cpp.change(_rules, _rules.copy)


def _end(rule: Rule) -> None:
    """Ends that rule, and no other, unless `disable` has done so."""
    with suppress(ValueError):
        _by_cpp.change(_rules, _rules.remove, rule)
    if rule.learn:
        turns.end()


@hide_from_dynamo
def disable() -> None:
    """Ends the `enable` of the package that calls this, or if it has none that of TRITON_GEMM_USE=1.

    Blocks of `use`, and what other packages have enabled, stay.

    Raises:
        RuntimeError: There is neither.
    """
    rules, owner = list(_rules), _caller()
    own = [x for x in rules if x.owner == owner] or [x for x in rules if x.owner == AUTOLOAD]
    if not own:
        who = ", ".join(sorted({x.owner or "a block of use()" for x in rules}))
        why = f"{owner} has enabled nothing, and what {who} began stays" if rules else "nothing is routed"
        raise RuntimeError(f"disable(): {why}")
    _end(own[-1])


@contextmanager
def use(
    *,
    only: Kind | Collection[Kind] | None = None,
    exclude: Kind | Collection[Kind] = (),
    predicate: Wanted | None = None,
    first_calls: FirstCalls = "same bits",
    required: bool = False,
    learn: bool | None = None,
) -> Iterator[None]:
    """`enable` for a block: `with triton_gemm.use(): model(x)`.

    Args:
        only, exclude, predicate, first_calls, required, learn: As in `enable`.

    Raises:
        ValueError, RuntimeError: As `enable`.
    """
    rule = _rule("use", only, exclude, predicate, first_calls, required, learn)
    try:
        try:
            _begin(rule)
            yield
        finally:
            _end(rule)
    finally:  # a signal's handler may have raised before
        _end(rule)


@contextmanager
def nothing_routed() -> Iterator[None]:
    """A block in which torch's products are torch's in every thread, whatever is routed around it."""
    if _rules:
        with use(predicate=lambda *_: False):
            yield
    else:
        yield


def _learns() -> bool:
    """Whether a rule learns."""
    return any(rule.learn for rule in list(_rules))


turns.active = _learns


def first_calls() -> FirstCalls:
    """What computes products under the innermost rule while kernels are compiled."""
    return "torch" if _rules and _rules[-1].first_calls == "torch" else "same bits"


@hide_from_dynamo
def report_routing(*, reset: bool = False) -> dict[tuple[str, str], int]:
    """Counts the calls of each operator by where they ran, and why torch kept some.

    Args:
        reset: Whether to start again from zero afterwards.

    Returns:
        A dict, for example {("addmm", "triton_gemm"): 12, ("mm", "torch: int64 is not computed"): 1}. With learn=True
        also what was learned, as ("learning", "kernels replaced"): 3.
    """
    arguments.flag("report_routing", "reset", reset)
    found = Counter(_counts)
    for overload, count in _by_cpp.launched(reset).items():
        found[overload.partition(".")[0], OURS] += count
    for left, count in _by_cpp.left(reset).items():
        name, _, why = left.partition(" ")
        found[name, why] += count
    for what, count in list(turns.counts.items()):
        found["learning", what] += count
    if reset:
        _counts.clear()
        turns.counts.clear()
    return dict(sorted((+found).items()))


def _routed(overload: str) -> Kernel:
    """What computes aten's `overload` under a rule, or returns None for what is torch's."""
    name = overload.partition(".")[0]
    first = ROUTED[name]

    @hide_from_dynamo
    def kernel(*arguments: torch.Tensor, out: torch.Tensor | None = None, **scalars: Any) -> torch.Tensor | None:
        rules, key = _rules[-1:], None  # another thread may take it back
        if not rules:
            return None
        a, b = arguments[first : first + 2]
        input = arguments[0] if first else None
        request = Request(scalars.get("alpha", 1), scalars.get("beta", 1)) if scalars else SUM
        call = overload, a, b, () if input is None else (input,), request, out, True
        fast = rules[0].fast
        if rules[0].predicate is None and type(request.alpha) in (int, float):
            table = fast.table  # asked here, too, because the Python of `take` costs as much as it does
            c = None if table is None else table.take(*call)
            if c is None:
                key, c = fast.take(*call)
            if c is not None:
                _counts[name, OURS] += 1
                return c
        why = fast.by_torch.get(key) or _stays(rules[0], name, a, b, input, out, scalars)
        if why is None and rules[0].predicate is None and a.dtype not in rules[0].only:
            why = left_to_torch.faster_by_torch(overload, a, b, input, out, request)
        if why is None:
            left_to_torch.warn_of_a_guess(a.device)
            request = Request(float(request.alpha), float(request.beta))
            try:
                with _first_calls(rules[0]):
                    x = Operands(a, b, input)
                    if out is None:
                        c, found = matrices.compute(x, request)
                    else:
                        c, found = out, matrices.compute_into(out, x, request)
                _counts[name, OURS] += 1
                fast.keep(key, found)
                return c
            except background.WouldWaitError:
                why = NOT_COMPILED
        elif key is not None and why not in left_to_torch.OF_OUT:
            if _by_cpp.registered:  # C++ leaves such calls to torch, and counts them, without asking Python again
                words = f"{name} torch: {why}"
                fast.add_to_table(_by_cpp.extension, key, call, lambda table: _by_cpp.leave(table, call, words))
            plan.keep(fast.by_torch, key, why, plan.MAX_PLANS)
        _counts[name, f"torch: {why}"] += 1
        return None

    return kernel


def _stays(rule: Rule, name: str, a: torch.Tensor, b: torch.Tensor, *call: Any) -> str | None:
    """Why this call is not routed, or None."""
    return rule.refuses(name, a, b) or left_to_torch.stays(name, a, b, *call)


def _routed_other(name: str, overload: str, product: Product) -> Kernel:
    """As `_routed`, of a product with a schema of its own."""

    @hide_from_dynamo
    def kernel(*arguments: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
        rules, key = _rules[-1:], None
        if not rules:
            return None
        fast = rules[0].fast
        a, b, *others = arguments
        if rules[0].predicate is None:
            # A tensor that the key has not counts as being there.
            operation = overload, *["tensor" if isinstance(x, torch.Tensor) else x for x in others]
            key, c = fast.take(operation, a, b, product.auxiliary(*arguments), SUM, out, dispatched=True)
            if c is not None:
                _counts[name, OURS] += 1
                return c
        device = plan.info_of(a.device)
        why = rules[0].refuses(name, a, b) or product.stays(device, out, *arguments)
        if why is None and device.capability < (8, 0):
            why = "the GPU is older than compute capability 8.0"
        if why is None:
            try:
                with _first_calls(rules[0]):
                    c, found = product.compute(out, *arguments)
                _counts[name, OURS] += 1
                fast.keep(key, found)
                return c
            except background.WouldWaitError:
                why = NOT_COMPILED
        _counts[name, f"torch: {why}"] += 1
        return None

    return kernel


def _counted(overload: str) -> Kernel:
    """What counts calls of an overload, which are torch's."""

    @hide_from_dynamo
    def kernel(*_: Any, **__: Any) -> None:
        if _rules:
            _counts[overload, NOT_ROUTED] += 1

    return kernel


def _first_calls(rule: Rule) -> AbstractContextManager[None]:
    """In which a product is computed under that rule."""
    if rule.first_calls != "torch":
        return nullcontext()
    _refuse_invariance()
    return background.first_calls("raise")


def _refuse_invariance() -> None:
    if policies.current_policy().batch_invariant:
        raise RuntimeError(
            'first_calls="torch" gives first calls other bits, and batch-invariant ones must not have these'
        )


_places = {f"{name}.out": Places(1, 2, 0, 4, 3, 5) if first else Places(0, 1, out=2) for name, first in ROUTED.items()}
_places |= {overload.removesuffix(".out"): place._replace(out=-1) for overload, place in _places.items()}
_overrides = Overrides(
    KEY,
    {overload: _routed(overload) for overload in _places}
    | {overload: _routed_other(name, overload, x) for name, x in PRODUCTS.items() for overload in x.overloads}
    | {overload: _counted(overload) for overload in COUNTED},
    _places,
    {overload: f"{overload} {NOT_ROUTED}" for overload in COUNTED},
    _follow,
)
_unregister, _by_cpp = _overrides.unregister, _overrides.by_cpp
