"""Fuzzing: products drawn at random and called in any order, each held to fp64; `python -m tests.fuzz` is the command.

`Calls` is a hypothesis state machine. Its rules are calls of one product with different values, of earlier products
again, on another stream, through torch under `use()`, and from a captured graph; and changes of the state that
calls depend on: the policy, batch invariance, torch's precision of fp32, and the caches. Operands lie in the same
memory every time.

On a GPU processes share the work, each for MINUTES. Most problems come from a pool, so that kernels are compiled once
for all processes and runs; one in FRESH is drawn anew. Verdicts stay on the GPU until an example ends. A failure is
printed shrunk, as a test to paste. Without a GPU (TRITON_INTERPRET=1) products are tiny, and run in the interpreter:
tests/interpreter/functional/test_fuzz.py runs the same thousand every time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import triton_gemm
from tests.support.random_products import (
    GAPS,
    LARGE,
    ORDERS,
    ROUTED,
    SMALL,
    STEPS,
    VALUES,
    Memory,
    Prepared,
    Problem,
    draw_problem,
    meant,
    on_stream,
)
from triton_gemm.arithmetic import EMULATED
from triton_gemm.compat import INTERPRETED
from triton_gemm.runtime import plan
from triton_gemm.selection import generation

DEVICE = "cpu" if INTERPRETED else "cuda"
POOL, FRESH = 1500, 40
TIMES = 1 if INTERPRETED else 15  # draws of values for each call of a rule: compiling takes longer than all of them
DEAD = 3  # the status of a process whose GPU cannot be used any more
GRAPHS = 1  # that an example captures at most
SHRINK_S = 40.0
LIMIT_S = 60.0  # of one example, beyond the time that was given

TEST = """from tests.fuzz import Calls, Problem


def test_found_by_fuzzing() -> None:
    calls = Calls()
    try:
{}
    finally:
        calls.teardown()
"""


@lru_cache(maxsize=1)
def pool() -> list[Problem]:
    """The problems that most examples are made of, the simplest first: the same in every process."""
    chosen = random.Random(0)
    return sorted((draw_problem(chosen.choice, LARGE) for _ in range(POOL)), key=lambda problem: problem.cost)


@st.composite
def problems(draw: Any) -> Problem:
    if not INTERPRETED and draw(st.integers(0, FRESH - 1)):
        return draw(st.sampled_from(pool()))
    return draw_problem(lambda options: draw(st.sampled_from(options)), SMALL if INTERPRETED else LARGE)


PROBLEMS, SEEDS = problems(), st.integers(0, 999)
DRAWN = st.sampled_from(VALUES)


def fitting(problem: Problem, values: str) -> str:
    """`values`, unless a problem promises nothing of them: activations of infinities are those of torch's formulas, and
    planes may make NaN of an infinity, of which relu would have made 0."""
    promised = (None,) if problem.precision in EMULATED else (None, "relu")
    return "nan" if values == "inf" and problem.activation not in promised else values


@dataclass(frozen=True)
class Step:
    """A call of a rule."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"calls.{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@contextmanager
def alive() -> Iterator[None]:
    """Ends a process of the command whose GPU cannot be used any more: there every call fails, and no example could be
    shrunk. Its journal says which it was."""
    try:
        yield
    except RuntimeError as error:
        if Calls.journal is not None and ("CUDA error" in str(error) or "[CUDA]" in str(error)):
            print(error, file=sys.stderr, flush=True)
            os._exit(DEAD)
        raise


class Calls(RuleBasedStateMachine):
    """Calls of products, in any order."""

    products = 0  # of all machines of this process
    kernels: ClassVar[Counter[str]] = Counter()  # planned problems by kernel
    log: ClassVar[list[Step]] = []  # the present example's; of the last one, when it has failed
    deadline = math.inf  # of time.monotonic(); from then on nothing is called
    journal: Path | None = None  # a file that holds the log, too, for a process that does not come back

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(DEVICE)
        self.contexts: list[Any] = []
        self.seen: list[Problem] = []
        self.graphs: list[tuple[Any, Prepared] | None] = []
        self.waiting: list[tuple[torch.Tensor, str]] = []
        self.setting = torch.backends.cuda.matmul.fp32_precision
        Calls.log = []
        forget()  # what an example finds must not depend on those before

    @initialize(precision=st.sampled_from(("ieee", "tf32")))
    def begin(self, precision: str) -> None:
        self._say("begin", precision=precision)
        torch.backends.cuda.matmul.fp32_precision = precision

    # --- Calls ---

    @rule(problem=PROBLEMS, values=DRAWN, seed=SEEDS)
    def multiply(self, problem: Problem, values: str, seed: int) -> None:
        self._say("multiply", problem=problem, values=values, seed=seed)
        self.seen.append(problem)
        self._multiply(problem, values, seed)

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 9), values=DRAWN, seed=SEEDS)
    def again(self, which: int, values: str, seed: int) -> None:
        """An earlier product, by what is cached of it."""
        self._say("again", which=which, values=values, seed=seed)
        self._multiply(self._earlier(which), values, seed)

    @precondition(lambda self: self.seen)
    @rule(precision=st.sampled_from(("ieee", "tf32")), which=st.integers(0, 9), values=DRAWN, seed=SEEDS)
    def in_precision(self, precision: str, which: int, values: str, seed: int) -> None:
        """An earlier product, with torch's setting of fp32, which stays."""
        self._say("in_precision", precision=precision, which=which, values=values, seed=seed)
        torch.backends.cuda.matmul.fp32_precision = precision
        self._multiply(self._earlier(which), values, seed)

    @precondition(lambda self: self.seen)
    @rule(
        which=st.integers(0, 9),
        orders=st.sampled_from(ORDERS),
        gap=st.sampled_from(GAPS),
        step=st.sampled_from(STEPS),
        values=DRAWN,
        seed=SEEDS,
    )
    def lying_otherwise(self, which: int, orders: str, gap: int, step: int, values: str, seed: int) -> None:
        """An earlier product of operands with other strides, at the same addresses."""
        self._say("lying_otherwise", which=which, orders=orders, gap=gap, step=step, values=values, seed=seed)
        problem = replace(self._earlier(which), orders=orders, gap=gap, step=step)
        self._multiply(problem, values, seed)

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 9), values=DRAWN, seed=SEEDS)
    def on_a_stream(self, which: int, values: str, seed: int) -> None:
        self._say("on_a_stream", which=which, values=values, seed=seed)
        with on_stream(DEVICE):
            self._multiply(self._earlier(which), values, seed)
        if DEVICE == "cuda":
            with alive():
                torch.cuda.synchronize()  # the memory is the next call's

    @precondition(lambda self: any(problem.operation in ROUTED for problem in self.seen))
    @rule(which=st.integers(0, 9), values=DRAWN, seed=SEEDS)
    def through_torch(self, which: int, values: str, seed: int) -> None:
        """torch's function under `use()`."""
        self._say("through_torch", which=which, values=values, seed=seed)
        routed = [problem for problem in self.seen if problem.operation in ROUTED]
        problem = routed[-1 - which % len(routed)]
        if problem.dtype == "int8" or problem.out_dtype or problem.activation or problem.candidate is not None:
            return  # which torch's do not have
        if problem.operation == "matmul" and problem.out and problem.batch != "none":
            return  # torch's raises where it folds a batch into rows, and `out` is column-major
        self._multiply(problem, values, seed, through_torch=True)

    @precondition(lambda self: DEVICE == "cuda" and len(self.graphs) < GRAPHS)
    @rule(problem=PROBLEMS)
    def capture(self, problem: Problem) -> None:
        self._say("capture", problem=problem)
        if time.monotonic() > Calls.deadline:
            self.graphs.append(None)  # so that hypothesis draws what it drew in time
            return
        prepared = Prepared(problem, Memory(DEVICE))  # its own memory: the graph keeps the addresses
        prepared.fill("integers", 0)
        graph = torch.cuda.CUDAGraph()
        with alive():
            prepared.call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                prepared.call()
        self.graphs.append((graph, prepared))

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, GRAPHS - 1), values=DRAWN, seed=SEEDS)
    def replay(self, which: int, values: str, seed: int) -> None:
        self._say("replay", which=which, values=values, seed=seed)
        captured = self.graphs[which % len(self.graphs)]
        if captured is None or time.monotonic() > Calls.deadline:
            return
        graph, prepared = captured
        self._check(prepared, graph.replay, fitting(prepared.problem, values), seed)

    # --- What calls depend on ---

    @rule(name=st.sampled_from(("model", "cached")), bits=st.sampled_from(("same", "any")))
    def enter_policy(self, name: str, bits: str) -> None:
        self._say("enter_policy", name=name, bits=bits)
        self._enter(triton_gemm.policy(name, bits=bits))

    @rule(enabled=st.booleans())
    def enter_batch_invariant(self, enabled: bool) -> None:
        self._say("enter_batch_invariant", enabled=enabled)
        self._enter(triton_gemm.batch_invariant(enabled))

    @precondition(lambda self: self.contexts)
    @rule()
    def leave(self) -> None:
        self._say("leave")
        self.contexts.pop().__exit__(None, None, None)

    @rule()
    def forget(self) -> None:
        """What was planned, in all caches."""
        self._say("forget")
        forget()

    def teardown(self) -> None:
        with ExitStack() as stack:
            torch.backends.cuda.matmul.fp32_precision = self.setting
            for context in self.contexts:  # the innermost leaves first
                stack.push(context.__exit__)
            self.contexts = []
            self.graphs.clear()
            self.flush()

    # --- How ---

    def _earlier(self, which: int) -> Problem:
        """A product that was called before, counted from the last."""
        return self.seen[-1 - which % len(self.seen)]

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self.contexts.append(context)

    def _multiply(self, problem: Problem, values: str, seed: int, *, through_torch: bool = False) -> None:
        if time.monotonic() > Calls.deadline:
            return
        prepared = Prepared(problem, self.memory)
        call = prepared.call_through_torch if through_torch else prepared.call
        for i in range(TIMES):
            kind = VALUES[(VALUES.index(values) + i) % len(VALUES)]
            self._check(prepared, call, fitting(problem, kind), seed + i)

    def _check(self, prepared: Prepared, call: Any, values: str, seed: int) -> None:
        with alive():
            prepared.fill(values, seed)
            call()
        if not prepared.ours:
            return
        found = prepared.verdict()
        Calls.products += 1
        self.waiting.append((found, f"{Calls.log[-1]}, of {prepared.problem}"))
        if DEVICE == "cpu":
            self.flush()

    def flush(self) -> None:
        """Waits for all verdicts; AssertionError for the first that is not right."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        with alive():
            found = torch.stack([verdict for verdict, _ in waiting]).tolist()
        if any(wrong or outside for wrong, _, outside in found):
            Calls.deadline = math.inf  # hypothesis calls all this again, to see it fail again
        for (wrong, worst, outside), (_, name) in zip(found, waiting, strict=True):
            assert outside == 0, f"{name}: {outside:.0f} bytes were written that are no result's"
            assert wrong == 0, f"{name}: {wrong:.0f} elements are wrong, by up to {worst:.3g} times the bound"

    def _say(self, name: str, /, **arguments: Any) -> None:
        Calls.log.append(Step(name, arguments))
        if Calls.journal is not None:
            Calls.journal.write_text(as_test(Calls.log))


def forget() -> None:
    """Empties the caches of plans, and counts what was planned."""
    Calls.kernels.update(planned.selection.kernel for planned in plan.PLANS.values())
    plan.PLANS.clear()
    generation.advance()  # also what C++ launches


def as_test(log: Sequence[Step]) -> str:
    """Steps of an example as a test to paste."""
    return TEST.format("\n".join(f"        {step}" for step in log))


def fails(log: Sequence[Step]) -> bool:
    """Whether a result is wrong in these steps; what cannot be called at all is no failure."""
    calls = Calls()
    try:
        try:
            for step in log:
                getattr(calls, step.name)(**step.arguments)
        finally:
            calls.teardown()
    except AssertionError:
        return True
    except Exception:
        return False
    return False


def simpler(log: Sequence[Step]) -> Iterator[list[Step]]:
    """The same without some of its steps, many at first, and with one argument, or one field of a problem, that is
    simpler."""
    size = len(log) // 2
    while size:
        yield from ([*log[:i], *log[i + size :]] for i in range(0, len(log), size))
        size //= 2
    for i, step in enumerate(log):
        for name, value in step.arguments.items():
            for other in simpler_values(name, value):
                yield [*log[:i], Step(step.name, {**step.arguments, name: other}), *log[i + 1 :]]


def simpler_values(name: str, value: Any) -> list[Any]:
    """Of an argument, the simplest first; those that come to the same are left out."""
    if isinstance(value, Problem):
        found = [replace(value, **{x.name: x.default}) for x in fields(value)]
        for i, size in enumerate(value.size):
            smaller = sorted({1, 2, size // 2, size - 1} & set(range(1, size)))
            found += [replace(value, size=(*value.size[:i], x, *value.size[i + 1 :])) for x in smaller]
        found += [replace(value, ends=value.ends[:i] + value.ends[i + 1 :]) for i in range(len(value.ends))]
        return [x for x in map(meant, found) if x.cost < value.cost]
    if name == "values":
        return list(VALUES[: VALUES.index(value)])
    return sorted({0, value // 2}) if isinstance(value, int) and value > 0 else []


def shrunk(log: Sequence[Step]) -> list[Step]:
    """What is left of failing steps when none can be simpler, or after SHRINK_S. hypothesis could replace a problem of
    the pool only by another, and takes longer."""
    found, better, end = list(log), True, time.monotonic() + SHRINK_S
    while better:
        better = False
        for candidate in simpler(found):
            if time.monotonic() < end and fails(candidate):
                found, better = candidate, True
                break
    return found


def fuzz(number: int, examples: int, steps: int, machine: type[Calls] = Calls) -> None:
    """So many examples of at most so many steps, the same for the same number. A failure raises what has `found`, the
    shrunk example as a test."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(type("Calls", (machine,), {})), settings=chosen)
    except Exception as error:
        log, Calls.journal, Calls.deadline = list(Calls.log), None, math.inf
        error.found = as_test(shrunk(log) if fails(log) else log)
        raise


# --- The command ---


def work(number: int, minutes: float, journal: Path) -> int:
    """One process: examples until the time is over."""
    Calls.journal, Calls.deadline, chunk = journal, time.monotonic() + 60 * minutes, 0
    try:
        while time.monotonic() < Calls.deadline:
            fuzz(1000 * number + chunk, 20, 40)
            chunk += 1
    except Exception as error:
        print(f"{type(error).__name__}: {error}\n\n{error.found}", file=sys.stderr, flush=True)
        return 1
    finally:
        forget()
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in Calls.kernels.most_common())
        print(f"{Calls.products} products; planned: {kernels}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    jobs, clock = min(16, os.cpu_count() or 1), int(time.time()) % 100_000
    why = "processes that share the GPU, and compile most of the time; by default as many as cores, 16 at most"
    parser.add_argument("--jobs", type=int, default=jobs, help=why)
    parser.add_argument("--seed", type=int, default=clock, help="of what is drawn; by default the clock's")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.journal is not None:
        return work(given.seed, given.minutes, given.journal)
    if not INTERPRETED and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; TRITON_INTERPRET=1 fuzzes tiny products in the interpreter")
    print(f"fuzzing for {given.minutes:g} minutes, processes: {given.jobs}, seed: {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return share(given.minutes, given.jobs, given.seed, Path(folder))


def share(minutes: float, jobs: int, number: int, folder: Path) -> int:
    """Runs the processes; prints what they found, and the steps of one that died or did not end."""
    begin = time.monotonic()
    children = []
    for i in range(jobs):
        journal = folder / str(i)
        command = [sys.executable, "-m", "tests.fuzz", "--seed", str(number + i), "--minutes", str(minutes)]
        child = subprocess.Popen(
            [*command, "--journal", str(journal)],
            stdout=(folder / f"{i}.out").open("w"),
            stderr=(folder / f"{i}.err").open("w"),
        )
        children.append((child, journal))
    failed, total, kernels = 0, 0, Counter[str]()
    for i, (child, journal) in enumerate(children):
        try:
            child.wait(max(1.0, begin + 60 * minutes + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        printed, words = (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()
        if child.returncode:
            failed += 1
            how = "failed" if child.returncode == 1 else f"died, or did not end ({child.returncode})"
            print(f"process {i}, seed {number + i}, {how}:\n{words}")
            if child.returncode != 1 and journal.exists():
                print(f"Its last example, not shrunk:\n\n{journal.read_text()}")
        count, _, planned = printed.partition(" products; planned: ")
        total += int(count) if count.isdigit() else 0
        for item in filter(None, planned.strip().split(", ")):
            size, kernel = item.split(" ")
            kernels[kernel] += int(size)
    planned = ", ".join(f"{count:,} on {kernel}" for kernel, count in kernels.most_common())
    print(f"{total:,} products in {time.monotonic() - begin:.0f} s; problems planned: {planned}")
    if failed or not total:
        print(f"FAILED: {failed} of {jobs} processes" if failed else "FAILED: nothing was multiplied")
        return 1
    print("No wrong element, and no byte written elsewhere.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
