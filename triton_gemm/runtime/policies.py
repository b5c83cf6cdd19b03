"""Policies: whether the model, a table or a tuner chooses what a product runs on.

- "model": the model's choice, as `select` has it.
- "cached": a table's, where one has the problem, else the model's. The default.
- "tune": a table's, else that of the tuner; where nothing may be timed (a graph is captured, a compiler traces,
  Triton interprets), the model's.
- "error": a table's, else an error.

A choice is made when a product is planned, at its first call, so that a table is asked about the sizes that are run and
not about those that a compiler has traced. Under batch invariance (`batch_invariant`) whoever chooses has the choice of
one class of bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch

from .. import arguments, tables
from ..compat import INTERPRETED, backward_here, context_of_backward, hide_from_dynamo, must_dispatch
from ..hardware.device import DeviceInfo
from ..kernels import forms
from ..problem import GemmProblem
from ..selection import batch_invariance, generation
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, about, illegal, ranked, remembered
from ..tables import files
from ..tables.files import BITS, Bits, Table
from ..tables.records import Entry
from . import kits

PolicyName = Literal["model", "cached", "tune", "error"]
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
# Environment variables: the default, and the values allowed.
VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "TRITON_GEMM_POLICY": ("cached", NAMES),
    "TRITON_GEMM_BITS": ("same", BITS),
    "TRITON_GEMM_BATCH_INVARIANT": ("0", ("0", "1")),
    "TRITON_GEMM_LEARN": ("0", ("0", "1")),
}

# What times candidates on a device and says which is best; it may call `tables.store` to keep that.
Tuner = Callable[[GemmProblem, DeviceInfo], Selection]


class Policy(NamedTuple):
    """What chooses."""

    name: PolicyName = "cached"  # one of NAMES
    bits: Bits = "same"  # which tables are asked, as in `tables.lookup`
    # Whether products have the bits of `batch_invariance.class_of`, where a call does not say.
    batch_invariant: bool = False


_context: ContextVar[Policy | None] = ContextVar("triton_gemm_policy", default=None)
in_context = _context.get  # the policy of this thread's or task's context; None: the process's
_process: Policy | None = None
_tuner: Tuner | None = None
_warned: set[str] = set()  # wrong values

_invariant_by_model = generation.of_models(4096)(batch_invariance.select)


def by_model(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """The model's choice: in the forms of kits of another Triton than the installed one, where they hold it."""
    found = kits.choice(problem, device) if kits.others(device.capability) else None
    return found or remembered(problem, device)


def _only(name: str) -> Callable[[GemmProblem, DeviceInfo], str]:
    """What `tables.lookup` takes for entries of that class of bits."""
    return lambda *_: name


def _class_by_model(problem: GemmProblem, device: DeviceInfo) -> str:
    """The class of bits of the model's choice."""
    return bit_class(problem, by_model(problem, device))


def _class_by_kits(problem: GemmProblem, device: DeviceInfo) -> str:
    """Likewise in the forms of kits."""
    return bit_class(problem, remembered(problem, device, True))


def _class_of_default(problem: GemmProblem, device: DeviceInfo) -> str:
    """The class of bits that entries of the installed Triton must have: of a kit's Triton's entry, else the model's."""
    of_kits = _from_tables_of_kits(problem, device, "same")
    return bit_class(problem, of_kits or by_model(problem, device))


def current_policy() -> Policy:
    """The policy that applies here, the block's or the process's: `name`, `bits` and `batch_invariant`."""
    return _set() or _of_environment()


def _set() -> Policy | None:
    """The policy that was set where it counts here, if one was."""
    return in_context() or (in_backward() if generation.contexts else None) or _process


def _is_invariant() -> bool:
    """Whether products are batch-invariant here; asks the environment for nothing else."""
    found = _set()
    return _invariant_in_environment() if found is None else found.batch_invariant


def tunes() -> bool:
    """Whether what no table has is tuned here, where it can be."""
    return current_policy().name == "tune"


def _policy(name: PolicyName, bits: Bits, function: str) -> Policy:
    for argument, found, allowed in (("name", name, NAMES), ("bits", bits, BITS)):
        if not (isinstance(found, str) and found in allowed):
            raise ValueError(f"{function}(): {argument} must be one of {', '.join(allowed)}, not {found!r}")
    return Policy(name, bits)


def wrong(variable: str) -> str | None:
    """What is wrong with the value of one of VARIABLES, or None."""
    default, allowed = VARIABLES[variable]
    found = os.environ.get(variable, default)
    if found in allowed:
        return None
    return f"{variable} must be one of {', '.join(allowed)}, not {found!r}: it counts as {default}"


def _in_environment(variable: str) -> Any:
    """The value of one of VARIABLES. A wrong one is warned of once: it is read amid a user's call of torch."""
    default, _ = VARIABLES[variable]
    if (words := wrong(variable)) is None:
        return os.environ.get(variable, default)
    if words not in _warned:
        _warned.add(words)  # first: where a filter makes the warning an error, it ends one call alone
        arguments.warn_caller(words)
    return default


@lru_cache(maxsize=1)
def _of_environment() -> Policy:
    name, bits = _in_environment("TRITON_GEMM_POLICY"), _in_environment("TRITON_GEMM_BITS")
    return Policy(name, bits, _invariant_in_environment())


@lru_cache(maxsize=1)
def _invariant_in_environment() -> bool:
    return bool(_in_environment("TRITON_GEMM_BATCH_INVARIANT") == "1")


@lru_cache(maxsize=1)
def learns_in_environment() -> bool:
    """Whether rules of `use` learn that do not say."""
    return bool(_in_environment("TRITON_GEMM_LEARN") == "1")


@hide_from_dynamo
def set_policy(name: PolicyName, *, bits: Bits = "same") -> None:
    """Sets what chooses kernel and configuration, in all threads of the process.

    It has no effect inside `with policy(...)` or `with batch_invariant()` until the block ends. Until it is called, the
    environment variables TRITON_GEMM_POLICY and TRITON_GEMM_BITS apply. Existing plans are made again.

    Args:
        name: "model", the cost model. "cached", the default: a table of measured choices, and without an entry the
            model. "tune": a table, and without an entry the tuner, but the model while a CUDA graph is captured or
            torch.compile traces, and in Triton's interpreter. "error": a table, and without an entry RuntimeError.
        bits: "same" uses only entries that give the bits of the model's choice. "any" also uses the fastest ones,
            whatever their bits.

    Raises:
        ValueError: Another name or other bits.
    """
    global _process
    found = _policy(name, bits, "set_policy")
    _process = found._replace(batch_invariant=_invariant_in_environment())
    generation.advance()


@contextmanager
def policy(name: PolicyName, *, bits: Bits = "same") -> Iterator[None]:
    """`set_policy` for a block, in this thread or asyncio task alone: `with triton_gemm.policy("error"):`.

    It also applies to backwards that are started in the block, though torch runs them in other threads. Batch
    invariance is not changed. Open it between a generator's yields, not around one: around a yield it applies in the
    context of the first step alone, and a block that ends in another context stays active in the first.

    Args:
        name, bits: As in `set_policy`.

    Raises:
        ValueError: As `set_policy`.
    """
    found = _policy(name, bits, "policy")
    with _within(found._replace(batch_invariant=_is_invariant())):
        yield


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """A block in which a row's result does not depend on the other rows, in this thread or asyncio task alone.

    Of C = A B the rows are A's [M, K]; for `linear` all leading dimensions of its input together are M. On one GPU, for
    one B and one epilogue, a row of C has the same bits for any M, alone or in a batched GEMM, and wherever A and C lie
    in memory.

    Every function of this package follows it, and under `use` torch's own. A backward follows it if the forward, or the
    call of `backward`, is in the block; compiled code where it runs, its backward where that is called. `set_policy`
    has no effect in the block. Around a generator's yield it applies as `policy` does.

    The argument `batch_invariant=True` does the same for one call and its backward, and TRITON_GEMM_BATCH_INVARIANT=1
    in the environment for the whole process. A call raises RuntimeError if no kernel of the bit class that all numbers
    of rows share can multiply so many, from 65,536 rows on at the earliest (docs/bits.md).

    Args:
        enabled: False for a block without it, inside another block or under that environment.

    Raises:
        TypeError: enabled is not a bool.
    """
    arguments.flag("batch_invariant", "enabled", enabled)
    with _within(current_policy()._replace(batch_invariant=bool(enabled))):
        yield


@contextmanager
def _within(policy: Policy) -> Iterator[None]:
    generation.set_in_contexts()
    token = _context.set(policy)
    try:
        yield
    finally:
        try:
            _context.reset(token)
        except ValueError:  # around a yield, and left in another context, of which a copy has the block's policy, too
            if _context.get() is policy:
                _context.set(None if token.old_value is Token.MISSING else token.old_value)


def in_backward() -> Policy | None:
    """The policy of the context in which a backward was started, for the threads that torch runs it in."""
    if backward_here() < 0:  # so nearly always, and many calls ask
        return None
    context = context_of_backward()
    return None if context is None else context.get(_context)


def set_tuner(tuner: Tuner | None) -> None:
    """Replaces what the policy "tune" calls for a GEMM problem without a table entry.

    It is called while a GEMM is planned, by one thread at a time, never while a graph is captured or a compiler traces.
    GEMMs that it runs itself in that thread use the model's choice, and the bits are those of the policy there. `import
    triton_gemm` sets the tuner of `tuning`.

    Args:
        tuner: Takes the problem and the device, and returns the selection. None disables tuning: the policy "tune" then
            raises RuntimeError.
    """
    global _tuner
    arguments.callback("set_tuner", "tuner", tuner)
    _tuner = tuner
    generation.advance()


def tuner_name() -> str:
    """Whom the policy "tune" asks: a name that is the same in all processes, as an address is not."""
    if _tuner is None:
        return "none"
    named: Any = _tuner if hasattr(_tuner, "__qualname__") else type(_tuner)
    return f"{named.__module__}.{named.__qualname__}"


def choose(
    problem: GemmProblem, device: DeviceInfo, *, may_tune: bool = False, invariant: bool | None = None
) -> Selection:
    """What `problem` runs on, by the policy that counts here. may_tune: whether it is about to run; invariant: whether
    in the class of bits of any number of rows, None as the policy says.

    RuntimeError where the policy is "error" and no table has it, or "tune" and there is no tuner or it answers another
    class; as `select` else.
    """
    with_preactivation, problem = problem, problem.to_choose_for()
    name, bits, invariant_here = current_policy()
    invariant = invariant_here if invariant is None else invariant
    of_kits = None if invariant or name == "model" else _from_tables_of_kits(with_preactivation, device, bits)
    of_default = _class_by_model if of_kits is None else _only(bit_class(problem, of_kits))
    wanted = batch_invariance.class_of if invariant else of_default if bits == "same" else None
    found = None if name == "model" else tables.lookup(problem, device, bits, wanted) or of_kits
    if found is None and name == "error":
        raise RuntimeError(
            f'no table has {_text(problem)} on {device.name}, and the policy is "error": tune it, or set "cached"'
        )
    if found is None and name == "tune" and may_tune and _may_time():
        found = _tuned(problem, device, batch_invariance.class_of(problem, device) if invariant else None)
    if found is None and invariant:
        found = _invariant_by_model(problem, device)
    if found is None:
        found = kits.choice(with_preactivation, device) or remembered(problem, device)
        if with_preactivation != problem and kits.others(device.capability) and not found.kit:
            found = _with_bits_of(by_model(problem, device), problem, device)
    return replace(found, batch_invariant=True) if invariant else found


def _from_tables_of_kits(problem: GemmProblem, device: DeviceInfo, bits: Bits) -> Selection | None:
    """What tables of a kit's Triton say, where that is not the installed one and kits hold the kernels."""
    for triton in kits.others(device.capability):
        with forms.of_kits():
            found = tables.lookup(
                problem.to_choose_for(), device, bits, _class_by_kits if bits == "same" else None, triton
            )
            if found is not None and kits.holds(problem, device, found, foreign=True):
                return replace(found, kit=True)
    return None


def left_out(problem: GemmProblem, device: DeviceInfo, entry: Entry, table: Table) -> str | None:
    """Why `choose` leaves out a table's entry for its own problem, or None. An entry of another table may be asked
    before it."""
    foreign = table.triton != files.TRITON
    if foreign and table.triton not in kits.others(device.capability):
        return f"it is of Triton {table.triton}, and this is {files.TRITON}"
    only = None if table.bits == "any" else _class_by_kits if foreign else _class_of_default
    with forms.of_kits() if foreign else nullcontext():
        try:
            why = tables.left_out(problem, device, entry, only)
        except RuntimeError as error:  # the model has no choice
            return str(error)
        if not why and foreign and not kits.holds(problem, device, entry.selection(problem, ""), foreign=True):
            why = f"it is of Triton {table.triton}, and no kit has its kernels"
    return why


def _with_bits_of(plain: Selection, problem: GemmProblem, device: DeviceInfo) -> Selection:
    """What the installed Triton compiles with a preactivation, of the bits of `plain`: what a kit of another Triton
    decides for the same without one."""
    found, wanted = remembered(problem, device), bit_class(problem, plain)
    if bit_class(problem, found) == wanted:
        return found
    alike = ((us, x) for us, x in ranked(problem, device) if bit_class(problem, x) == wanted)
    legal = (Selection.of(x, about(us, problem, device)) for us, x in alike if illegal(problem, device, x) is None)
    return next(legal, found)


def torch_is_faster(problem: GemmProblem, device: DeviceInfo) -> bool:
    """Whether a table that the policy here asks says that torch's own product is faster."""
    problem, (name, bits, invariant) = problem.to_choose_for(), current_policy()
    return name != "model" and bits == "any" and tables.torch_is_faster(problem, device, invariant)


def _tuned(problem: GemmProblem, device: DeviceInfo, wanted: str | None) -> Selection:
    """The tuner's answer. wanted: the class of bits that it must have, if one."""
    if _tuner is None:
        raise RuntimeError(f'no table has {_text(problem)}, the policy is "tune", and there is no tuner: set "cached"')
    with _within(Policy("model", current_policy().bits, wanted is not None)):
        found = _tuner(problem, device)
    if not isinstance(found, Selection):  # a TypeError would make Python say that tensors have no @
        raise RuntimeError(f"the tuner's answer for {_text(problem)} must be a Selection, not {type(found).__name__}")
    found = replace(found, source="tuner")
    if wanted not in (None, bit_class(problem, found)):
        raise RuntimeError(f"the tuner's answer for {_text(problem)} gives {bit_class(problem, found)}, not {wanted}")
    return found


def _may_time() -> bool:
    """Whether launches may be waited for here, and are no one's to record. The interpreter's times say nothing."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not (INTERPRETED or capturing or torch.compiler.is_compiling() or must_dispatch())


def _text(problem: GemmProblem) -> str:
    batch = f"{problem.batch} x " if problem.batch != 1 else ""
    return f"{batch}{problem.M} x {problem.N} x {problem.K} in {str(problem.dtype).removeprefix('torch.')}"
