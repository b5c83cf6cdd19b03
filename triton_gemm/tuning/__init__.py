"""Tuning: choosing a GEMM's kernel and configuration by measurement, and storing it in a table.

`recording` notes which products a program runs. `candidates` says what is worth timing for one, and `trials` which is
timed when and which wins. `conditions` says whether the GPU is fit to be measured, and `gpu` measures. `journal`
remembers what has failed. `session` goes from problem to problem and stores. `report` says what came of it.
`comparison` times torch too. docs/tuning.md is about its use. What is not needed to record is imported when something
is measured.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from .. import arguments, tables
from ..arithmetic import DTYPES, result_dtype
from ..compat import INTERPRETED, free_in_children
from ..hardware.device import DeviceInfo, device_info
from ..hardware.gpu_key import GpuKey
from ..operands import Order, operands_of_sizes
from ..problem import GemmProblem, Request
from ..runtime import policies
from ..runtime.background import held
from ..selection import generation
from ..selection.bit_classes import bit_class
from ..selection.select import Selection
from ..tables.files import BITS, TRITON, Bits
from .recording import read_shapes, record_shapes
from .report import Comparison, Measure, Progress, TuningReport

if TYPE_CHECKING:
    from .gpu import Gpu
    from .journal import Journal

__all__ = ["compare", "read_shapes", "record_shapes", "tune"]

BUDGET_OF_A_CALL = 10.0  # seconds that the policy "tune" spends on a problem

Shapes = str | os.PathLike[str] | Sequence[tuple[int, int, int] | GemmProblem] | Mapping[GemmProblem, int]
log = logging.getLogger("triton_gemm.tuning")

# What is timed at once is not timed well; what progress is reported to may multiply.
one_at_a_time = free_in_children(threading.RLock())


def tune(
    shapes: Shapes | torch.nn.Module,
    *,
    budget: float = 120.0,
    bits: Bits = "same",
    measure: Measure = "graph",
    configs: Sequence[Any] = (),
    dtype: torch.dtype = torch.bfloat16,
    layout: Order = "nn",
    resume: bool = False,
    repeat: int = 1,
    rows: int | Iterable[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    device: torch.device | str | int | None = None,
) -> TuningReport:
    """Times candidates for GEMMs on a GPU, and saves the winners in the user's table.

    The policy "cached" uses them, in this process from the next call on::

        with triton_gemm.record_shapes("shapes.json"):
            model(x)
        print(triton_gemm.tune("shapes.json", budget=120))

    The linear layers of a module, before it serves prompts of up to 2,048 tokens::

        print(triton_gemm.tune(model, rows=range(1, 2049), budget=300))

    A winner is saved if it is faster than the cost model's choice by more than the noise; among equally fast ones the
    first in the cost model's order wins. Each is saved at once. What was measured while the GPU was throttled or shared
    is measured once more, and discarded if it was so again. A candidate is skipped if it cannot be compiled or
    launched, ended a process at its first launch, or gives another result than the cost model's choice. With
    bits="same" that is any other bit, with "any" more than rounding. Later tunings with the same versions skip it, too.

    Args:
        shapes: A file of `record_shapes`; or a sequence of (M, N, K), in elements, and of GemmProblems; or a mapping
            from GemmProblem to its number of calls. Those called most come first. Or a module, whose linear layers are
            tuned for `rows`, which it requires. A layer that no kernel takes, as a quantized one, is logged and left
            out.
        budget: Seconds for all of them together. One candidate's compilation or first launch may end later.
        bits: "same" times only candidates that give the bits of the model's choice. "any" times all; its winners are
            used only under `set_policy(.., bits="any")`. It also times torch's kernel, to which `use()` then leaves the
            GEMM if that is faster by more than noise.
        measure: "graph", a kernel's time: replays of CUDA graphs, with operands in memory and not in L2; "eager", the
            time of calls from Python.
        configs: Your own configurations in addition: a kernel's Config, or a triton.Config with BLOCK_M, BLOCK_N,
            BLOCK_K and what else a kernel has (GROUP_M, CLUSTER_M, CLUSTER_N).
        dtype: Of shapes that are (M, N, K).
        layout: Of shapes that are (M, N, K): that of A and B, "n" by rows and "t" by columns. "nt" is `linear`'s.
        resume: Whether to skip what the same versions of this package, Triton and torch have tuned before.
        repeat: How often to tune each GEMM, with new operands and the first time's candidates. The first time counts,
            and the report says how often the same candidate won again.
        rows: Numbers of rows M, for all of which the GEMMs' weights are tuned, whatever M the GEMMs have. Some are
            measured, and each serves the fewer rows down to the next measured number (docs/tuning.md).
        progress: Called with a `Progress` after every step. Without it a terminal shows a line if rich is installed,
            and the logger `triton_gemm.tuning` has a line for each GEMM.
        device: The GPU; None: the current one.

    Returns:
        A `TuningReport`; `str()` of it is a table.

    Raises:
        ValueError, TypeError: Invalid shapes, rows, configs or options.
        OSError: The file cannot be read.
        RuntimeError: There is no GPU, or a CUDA graph is captured. A subclass,
            `triton_gemm.tuning.timing.DeviceLostError`: a candidate hangs or breaks the GPU's context, which no process
            survives. Earlier winners are saved, and the next tuning skips the candidate.
    """
    from .rows import of_weights, served
    from .session import Session, Wishes
    from .shown import shown, step_text

    arguments.count("repeat", repeat, 1)
    budget = arguments.number("tune", "budget", budget)
    if not budget > 0:
        raise ValueError(f"tune(): budget must be positive, not {budget!r}")
    arguments.flag("tune", "resume", resume)
    arguments.callback("tune", "progress", progress)
    arguments.one_of("tune", "bits", bits, BITS)
    arguments.one_of("tune", "measure", measure, get_args(Measure))
    arguments.several("tune", "configs", configs)
    numbers = None if rows is None else arguments.counts("tune", "rows", rows)
    calls = _of_model(shapes, numbers) if isinstance(shapes, torch.nn.Module) else problems_of(shapes, dtype, layout)
    fewest: dict[GemmProblem, int] = {}
    if numbers is not None:
        ranges = of_weights(calls, numbers)
        calls, fewest = ({x: one[i] for x, one in ranges.items()} for i in (0, 1))
    wishes = Wishes(budget, bits, measure, tuple(configs), resume, repeat, fewest)
    _check(wishes.configs)
    with measuring("tune", device, bits, measure) as gpu, shown(progress, step_text) as (on_step, ended):
        report = Session(gpu, gpu.journal, wishes, on_step).run(calls, ended)
        return report if numbers is None else replace(report, served=served(calls, numbers, gpu.info, bits))


def compare(
    shapes: Shapes,
    *,
    budget: float = 120.0,
    dtype: torch.dtype = torch.bfloat16,
    layout: Order = "nn",
    progress: Callable[[Comparison], None] | None = None,
    device: torch.device | str | int | None = None,
) -> Comparison:
    """Times GEMMs with torch and with this package on a GPU: is it faster for your shapes?

    For example ``print(triton_gemm.compare([(16, 14336, 4096)], layout="nt"))``. Both are timed as `tune` times
    candidates: alternating replays of CUDA graphs, with operands in memory and not in L2. Ours is the kernel that a
    call would run under the current policy. Torch's is the function, or functions, for the same result in the same
    precision, whatever `use` routes. What was measured while the GPU was throttled or shared is measured again, and
    then refused.

    Args:
        shapes, dtype, layout, device: As in `tune`. A GEMM that is named twice is measured once, and has two calls.
        budget: Seconds for all of them together. The least called ones are skipped if it is too short.
        progress: Called with the `Comparison` so far after every GEMM.

    Returns:
        A `Comparison`. `products` has a record of each GEMM (times, ratio, noise, errors, or why it was not measured),
        `torch_ms` and `ours_ms` the milliseconds of all calls together, and `ratio` their ratio. `as_dict()` is plain
        data, `str()` a text.

    Raises:
        ValueError, TypeError: Wrong arguments.
        OSError: The file cannot be read.
        RuntimeError: As `tune`.
    """
    from ..functional.routing import nothing_routed
    from .comparison import Comparing

    budget = arguments.positive("compare", "budget", budget)
    arguments.callback("compare", "progress", progress)
    calls = problems_of(shapes, dtype, layout, "compare")
    recorded = isinstance(shapes, (str, os.PathLike, Mapping))
    with measuring("compare", device) as gpu, nothing_routed():
        return Comparing(gpu, budget, progress or _silent).run(calls, recorded)


@contextmanager
def measuring(
    function: str, device: torch.device | str | int | None, bits: Bits = "same", measure: Measure = "graph"
) -> Iterator[Gpu]:
    """A GPU to time on, that nothing else of this process times on or compiles for meanwhile; raises as `tune`."""
    named_gpu(device)
    can_time(function)
    where = gpu_of(device)
    from .gpu import Gpu

    with one_at_a_time, held(), torch.cuda.device(where):
        gpu = Gpu(where, journal_of(device_info(where)), bits, measure)
        try:
            yield gpu
        finally:
            gpu.close()


def planned(
    shapes: Shapes, device: DeviceInfo, bits: Bits = "same", rows: Iterable[int] | None = None
) -> dict[GemmProblem, list[Selection]]:
    """What `tune` would time for each product on a GPU, here or not, the model's choice first. With rows, winners for
    other numbers of rows would join, and each of these is timed for fewer."""
    from .candidates import candidates
    from .rows import candidates_of_rows, of_weights

    calls = problems_of(shapes, torch.bfloat16, "nn")
    ranges = {} if rows is None else of_weights(calls, arguments.counts("tune", "rows", rows))
    found = {}
    for problem in ranges or calls:
        choice = policies.by_model(problem, device)
        found[problem] = candidates(problem, device, choice, bits)
        if problem in ranges:
            found[problem] = candidates_of_rows(problem, device, bits, ranges[problem][1], (), found[problem])
    return found


def can_time(function: str) -> None:
    """RuntimeError where no launch of this process can be waited for."""
    if not torch.cuda.is_available():
        sees_none = f"torch {torch.__version__} sees no GPU to time anything on"
        raise RuntimeError(f"{function}(): {sees_none}; `triton-gemm doctor` says why")
    if INTERPRETED:
        raise RuntimeError(f"{function}(): under TRITON_INTERPRET=1 kernels run in Python, so timings mean nothing")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{function}(): nothing can be timed while a CUDA graph is captured")


def named_gpu(device: torch.device | str | int | None) -> torch.device:
    """What is named, with a number or without; ValueError where it is no GPU, torch's errors for what is nothing."""
    named = "cuda" if device is None else device
    found = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    if found.type != "cuda":
        raise ValueError(f"{found} is not a GPU")
    return found


def gpu_of(device: torch.device | str | int | None) -> torch.device:
    """A GPU with its number."""
    found = named_gpu(device)
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def problems_of(shapes: Shapes, dtype: torch.dtype, layout: Order, function: str = "tune") -> dict[GemmProblem, int]:
    """What `tune` and `compare` take as shapes, as calls by problem; raises as they do."""
    arguments.one_of(function, "layout", layout, get_args(Order))
    arguments.dtype(dtype, "dtype")
    if isinstance(shapes, (str, os.PathLike)):
        return read_shapes(shapes)
    arguments.several(function, "shapes", shapes)
    if isinstance(shapes, Mapping):
        for problem, count in shapes.items():
            arguments.instance(function, "a key of shapes", problem, GemmProblem)
            arguments.count("shapes[problem]", count, 1)
        return dict(shapes)
    calls: dict[GemmProblem, int] = {}
    for shape in shapes:
        problem = shape if isinstance(shape, GemmProblem) else _of_sizes(shape, dtype, layout, function)
        calls[problem] = calls.get(problem, 0) + 1
    return calls


def _of_model(model: torch.nn.Module, rows: Sequence[int] | None) -> dict[GemmProblem, int]:
    """A model's linear layers, as calls by problem for one row. ValueError without rows, or a linear layer."""
    from ..layers import used_by

    if rows is None:
        raise ValueError("tune(): a model is tuned for numbers of rows, as in rows=range(1, 2049)")
    left_out: list[str] = []
    calls = used_by(model, left_out)
    for sentence in left_out:
        log.warning("tune(): %s", sentence)
    if not calls:
        raise ValueError(f"tune(): there is no linear layer to tune in this {type(model).__name__}")
    return calls


def _of_sizes(sizes: tuple[int, int, int], dtype: torch.dtype, layout: Order, function: str) -> GemmProblem:
    if dtype not in DTYPES:
        raise ValueError(
            f"{function}(): {dtype} is not multiplied by sizes alone: give GemmProblems, or a recorded file"
        )
    try:
        M, N, K = sizes
        positive = min(M, N, K) > 0
    except (TypeError, ValueError):
        positive = False
    if not positive:
        raise ValueError(f"{function}(): shapes are (M, N, K), at least 1, or GemmProblems, not {sizes!r}")
    a, b = operands_of_sizes(M, N, K, dtype, layout)
    return Request().problem(a, b, torch.empty(M, N, dtype=result_dtype(dtype), device="meta"))


def _check(configs: Sequence[Any]) -> None:
    from .candidates import kernels_of

    for config in configs:
        kernels_of(config)


def journal_of(device: DeviceInfo) -> Journal:
    from .journal import Journal

    where = tables.folder()
    path: Path | None = None if where is None else where / f"{GpuKey.of(device)}-triton{TRITON}{tables.checks.JOURNAL}"
    return Journal(path, tables.versions())


# --- The policy "tune" ---


def _choose(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """What the policy "tune" takes for a problem that no table has: the winner of a trial on that GPU, be it
    stored or not; where there is none, the model's choice. Under batch invariance the one within its class of bits,
    which is tuned where that is the model's own."""
    choice = policies.by_model(problem, device)
    if policies.current_policy().batch_invariant:
        found = policies.choose(problem, device)
        if bit_class(problem, found) != bit_class(problem, choice):
            return found
    if not one_at_a_time.acquire(blocking=False):  # who tunes may wait for this thread to plan
        return choice
    try:
        bits = "same" if policies.current_policy().batch_invariant else policies.current_policy().bits
        return _chosen(problem, device, bits, tables.changes.cleared)
    finally:
        one_at_a_time.release()


@generation.of_models(4096)
def _chosen(problem: GemmProblem, device: DeviceInfo, bits: Bits, cleared: int) -> Selection:
    """cleared: how often tables were, so that what won before is tuned again."""
    choice = policies.by_model(problem, device)
    if journal_of(device).has_stayed(problem, bits, choice):
        return choice
    gpus = range(torch.cuda.device_count())
    index = next(i for i in gpus if device_info(torch.device("cuda", i)).uuid == device.uuid)
    (report,) = tune([problem], budget=BUDGET_OF_A_CALL, bits=bits, progress=_silent, device=index).shapes
    if report.selection is None:
        return choice
    times = f"{report.us:.3g} us measured, the model's choice {report.choice_us:.3g} us"
    return replace(report.selection, reason=times)


def _silent(_: object) -> None:
    """No line in a terminal for what runs under a product."""


policies.set_tuner(_choose)
