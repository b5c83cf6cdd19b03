"""Results against fp64: errors as shares of their bound, and what is to be exact, or NaN, or infinite, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import triton_gemm
from perf.accuracy.candidates import LONG as LONG_SUM
from perf.accuracy.candidates import (
    SIZES,
    SMALL,
    SMALL_LONG,
    AccuracyCandidate,
    Kind,
    Operands,
    Size,
    candidates,
    chosen_candidates,
    planned,
)
from perf.accuracy.inputs import ERRORS, INPUTS, LONG, Drawing, drawn
from perf.measure.numerics import accumulation_error, magnitude, reference, rounded, underflow
from triton_gemm.arithmetic import EMULATED
from triton_gemm.compat import INTERPRETED
from triton_gemm.runtime.compiling import Compiler

PARTS = ("ways", "long", "ends")  # of a record
Row = dict[str, Any]
Multiply = Callable[..., None]  # as a plan's `run`


@dataclass
class Question:
    """What is asked with one pair of matrices, and the answer: the true result of each of its products, the magnitude
    that errors of its sums are measured against, and what may be lost to underflow."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    seed: int
    truths: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def questions(operands: Operands, names: Iterable[str]) -> list[Question]:
    """One for each of these inputs that the operands' dtype has."""
    found = []
    for seed, name in enumerate(names):
        generator = torch.Generator(operands.device).manual_seed(seed)
        kind = operands.kind
        matrices = drawn(name, Drawing(*operands.size, kind.dtype, kind.mode, generator))
        if matrices is not None:
            question = Question(name, *matrices, seed, [])
            put(operands, question)
            question.truths = [_truth(kind, a, b) for a, b, _ in operands.products()]
            found.append(question)
    return found


def put(operands: Operands, question: Question) -> None:
    """Gives operands the question's values, and C NaN, or what integers have in its place."""
    generator = torch.Generator(operands.device).manual_seed(question.seed)
    operands.put(question.a, question.b, generator, exact=INPUTS[question.name].exact)
    operands.c.fill_(torch.nan if operands.c.is_floating_point() else -1234567)


def _truth(kind: Kind, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lost = underflow(kind.mode)
    small = a.double().abs().sum(1)[:, None] + b.double().abs().sum(0) if lost else torch.zeros(())
    return reference(a, b), magnitude(a, b), lost * small.to(a.device)


def answer(operands: Operands, question: Question, multiply: Multiply, parts: int = 1) -> torch.Tensor:
    """(largest share of its bound that an error takes, wrong elements), on the device: one product, whose K is summed
    in so many parts."""
    mode = operands.kind.mode
    put(operands, question)
    multiply(operands.a, operands.b, operands.c, operands.auxiliary, 1.0, 0.0)
    exact, emulated = INPUTS[question.name].exact, operands.kind.precision in EMULATED
    share = torch.zeros((), dtype=torch.float64, device=operands.device)
    wrong = share.clone()
    for (truth, size, lost), (a, _, c) in zip(question.truths, operands.products(), strict=True):
        if not c.numel():
            continue
        bound = rounded(accumulation_error(a.shape[1] + parts - 1, mode) * size + lost, truth, c.dtype)
        finite = truth.isfinite()
        found = c.double()
        of_bound = torch.where(finite, (found - truth).abs() / bound.clamp(min=1e-300), 0.0)
        # A splitting mode has (inf, 0, 0) for infinity, and infinity times 0 is NaN.
        placed = (found == truth) | (found.isnan() & (truth.isnan() | emulated))
        right = torch.where(finite, of_bound <= 1, placed)
        if exact or not c.is_floating_point():
            right &= c == truth.to(c.dtype)
        share = torch.maximum(share, of_bound.nan_to_num(torch.inf).max())
        wrong = wrong + (~right).sum()
    return torch.stack([share, wrong])


@dataclass
class Bench:
    """A candidate, ready to be checked."""

    operands: Operands
    checks: list[Question]
    candidate: AccuracyCandidate
    plan: Any

    def compile(self) -> None:
        operands = self.operands
        self.plan.compile(operands.a, operands.b, operands.c, *operands.auxiliary)

    def measure(self) -> Row:
        """A record's row: of each question the share of the bound, and how many elements are wrong."""
        selection, schedule = self.candidate.selection, self.candidate.selection.schedule
        parts = selection.split_k if schedule is None else schedule.split_k
        answers = torch.stack([answer(self.operands, x, self.plan.run, parts) for x in self.checks]).tolist()
        found = {question.name: answer for question, answer in zip(self.checks, answers, strict=True)}
        return {
            "kind": self.operands.kind.name,
            **dict(zip("MNK", self.operands.size, strict=True)),
            **{"kernel": selection.kernel, "bits": self.candidate.bits, "way": str(selection).rpartition(": ")[0]},
            "of_bound": {name: share for name, (share, _) in found.items() if name in ERRORS},
            "wrong": {name: int(wrong) for name, (_, wrong) in found.items()},
        }


def benches(kind: Kind, sizes: Iterable[Size], device: torch.device) -> list[Bench]:
    """Every candidate of a kind, each in the first size that has it."""
    found: dict[object, Bench] = {}
    for size in sizes:
        operands = Operands(kind, size, device)
        checks = questions(operands, INPUTS)
        for candidate in candidates(operands.problem, kind, device):
            key = (candidate.selection.kernel, candidate.bits if kind.every else candidate.selection.packed)
            if key not in found:
                found[key] = Bench(operands, checks, candidate, planned(operands.problem, candidate, device))
    return list(found.values())


def long_benches(kind: Kind, size: Size, device: torch.device) -> list[Bench]:
    """Sums that are as long as `size` says, as `matmul` computes them."""
    operands = Operands(kind, size, device)
    problem, checks = operands.problem, questions(operands, LONG)
    return [Bench(operands, checks, x, planned(problem, x, device)) for x in chosen_candidates(problem, device)]


def compile_all(found: Sequence[Bench]) -> None:
    """Compiles in threads; RuntimeError for what cannot be compiled."""

    def one(job: object) -> None:
        torch.cuda.set_device(0)
        found[job].compile()  # type: ignore[call-overload]

    compiler = Compiler(one)
    compiler.add(range(len(found)))
    try:
        for i, bench in enumerate(found):
            while not compiler.done(i):
                compiler.pause(0.1)
            why = compiler.failure(i)
            if why is not None:
                raise RuntimeError(f"{bench.candidate.selection}: {why}")
    finally:
        compiler.close()


def of_kind(kind: Kind, device: torch.device) -> dict[str, list[Row]]:
    """What a record says of a kind: rows for each of PARTS."""
    sizes, long = (SMALL, SMALL_LONG) if INTERPRETED else (SIZES, LONG_SUM)
    found = benches(kind, sizes, device)
    of_long = [] if kind.scales or kind.groups or kind.odd else long_benches(kind, long, device)
    if not INTERPRETED:
        compile_all([*found, *of_long])
    rows = ([bench.measure() for bench in part] for part in (found, of_long))
    wrong = ends(kind, device)
    return dict(zip(PARTS, (*rows, [{"kind": kind.name, "wrong": wrong}] if wrong else []), strict=True))


def ends(kind: Kind, device: torch.device) -> dict[str, int]:
    """Wrong elements where BLAS says what is read: K = 0, alpha = 0 and beta = 0, by the public functions."""
    if kind.scales or kind.groups or kind.odd or not kind.dtype.is_floating_point or kind.result != kind.dtype:
        return {}
    precision: Any = kind.precision if kind.dtype == torch.float32 else None
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-6, 7, shape, generator=generator, device=device).to(kind.dtype)

    a, b, c = draw(33, 70), draw(70, 20), draw(33, 20)
    nothing, void = torch.full_like(a, torch.nan), torch.full_like(c, torch.nan)
    made = {
        "K = 0": (triton_gemm.matmul(a[:, :0], b[:0], precision=precision), torch.zeros_like(c)),
        "K = 0, beta = 2": (triton_gemm.addmm(c, a[:, :0], b[:0], beta=2, precision=precision), 2 * c),
        "alpha = 0 of NaN": (triton_gemm.addmm(c, nothing, b, alpha=0, beta=2, precision=precision), 2 * c),
        "beta = 0 of NaN": (
            triton_gemm.addmm(void, a, b, beta=0, out=void, precision=precision),
            (a.double() @ b.double()).to(kind.dtype),
        ),
    }
    return {name: int((found != truth).sum()) for name, (found, truth) in made.items()}


def failures(rows: Iterable[Row]) -> list[str]:
    """What is wrong in rows, in words."""
    found = []
    for row in rows:
        for name, count in row["wrong"].items():
            if count:
                share = row.get("of_bound", {}).get(name)
                more = f", by up to {share:.3g} times the bound" if share is not None else ""
                where = row.get("way", "")
                size = f" {row['M']}x{row['N']}x{row['K']}" if "M" in row else ""
                found.append(f"{row['kind']}{size}, {name}: {count} elements are wrong{more}: {where}")
    return found
