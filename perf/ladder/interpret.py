"""Rungs in Triton's interpreter, on small shapes, against fp64.

`TRITON_INTERPRET=1 python -m perf.ladder.interpret` prints one JSON line a job. It needs a process of its own: the
variable must be set before the kernels are imported, and then nothing in that process can be compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from perf.common.dataclass_json import from_json, to_json
from perf.ladder.record import Interpreted
from perf.measure import numerics
from perf.measure.environment import ROOT, of_child
from triton_gemm.compat import INTERPRETED
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.problem import UnsupportedOperandError

Case = tuple[int, int, int, float, float]


class UnavailableError(RuntimeError):
    """The interpreter's process ended early: it cannot be had here, as with Triton 3.6 and a newer NumPy."""


# M, N, K, alpha, beta: no two sizes equal, none a multiple of a tile; K shorter and longer than BLOCK_K.
# The last has rows of whole 16 bytes, which TMA needs.
CASES: tuple[Case, ...] = (
    (65, 33, 47, 1.0, 0.0),
    (17, 130, 70, 1.0, 0.0),
    (70, 20, 131, 0.5, -2.0),
    (72, 40, 136, 0.5, -2.0),
)


@dataclass(frozen=True)
class Job:
    """One rung on one case; layout: A's and B's, n row-major, t column-major; config None: the rung's first."""

    rung: Rung
    dtype: torch.dtype
    case: Case
    layout: str = "nn"
    config: GemmConfig | None = None

    @property
    def key(self) -> str:
        M, N, K, alpha, beta = self.case
        how = f"{M}x{N}x{K} alpha {alpha:g} beta {beta:g}"
        more = ("" if self.layout == "nn" else f" {self.layout}") + ("" if self.config is None else f" {self.config}")
        return f"{self.rung.name} {str(self.dtype).removeprefix('torch.')} {how}{more}"

    def to_json(self) -> dict[str, Any]:
        config = None if self.config is None else asdict(self.config)
        dtype = str(self.dtype).removeprefix("torch.")
        return {"rung": self.rung.id, "dtype": dtype, "case": self.case, "layout": self.layout, "config": config}

    @classmethod
    def from_json(cls, made: dict[str, Any]) -> Job:
        rung = next(rung for rung in LADDER if rung.id == made["rung"])
        config = None if made["config"] is None else GemmConfig(**made["config"])
        return cls(rung, getattr(torch, made["dtype"]), tuple(made["case"]), made["layout"], config)


def jobs(rungs: Iterable[Rung]) -> list[Job]:
    """All CASES of the rungs that can be interpreted, in each dtype."""
    return [Job(rung, dtype, case) for rung in rungs if rung.interpretable for dtype in rung.dtypes for case in CASES]


def run(pending: Iterable[Job], done: Callable[[str, Interpreted], None]) -> None:
    """Runs every job, in a child process where this one compiles; `done` hears of each as it ends.

    Raises UnavailableError with the child's last words if it ends early.
    """
    if INTERPRETED:
        for job in pending:
            done(job.key, interpret(job))
        return
    command = [sys.executable, "-m", "perf.ladder.interpret", "--jobs", json.dumps([job.to_json() for job in pending])]
    surroundings = of_child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    child = subprocess.Popen(
        command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                ((key, row),) = json.loads(line).items()
                done(key, from_json(Interpreted, row))
            words = child.stderr.read()
            if child.wait():
                raise UnavailableError(words.strip().splitlines()[-1] if words.strip() else "no word of why")
        except BaseException:
            child.kill()
            raise


def interpret(job: Job) -> Interpreted:
    """One job: its error, and `failed` if that is beyond the bound or the rung raises."""
    rung, dtype, (M, N, K, alpha, beta) = job.rung, job.dtype, job.case
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int, order: str = "n") -> torch.Tensor:
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        return x if order == "n" else x.T.contiguous().T

    a, b, c0 = draw(M, K, job.layout[0]), draw(K, N, job.layout[1]), draw(M, N)
    c = c0.clone() if beta else torch.full_like(c0, float("nan"))
    begin = time.perf_counter()
    row = Interpreted(rung=rung.name, dtype=str(dtype).removeprefix("torch."), M=M, N=N, K=K)
    try:
        rung.launch(a, b, c, alpha, beta, config=job.config)
    except UnsupportedOperandError as error:
        return replace(row, absent=str(error))
    except Exception as error:
        return replace(row, failed=f"{type(error).__name__}: {error}".splitlines()[0])
    mode = numerics.mode_of(rung.precision, dtype)
    expected = numerics.reference(a, b, c0, alpha, beta)
    share = (c.double() - expected).abs() / numerics.error_bound(a, b, c0, alpha, beta, mode, dtype)
    worst = float(share.max()) if bool(share.isfinite().all()) else float("inf")
    return replace(
        row,
        alpha=alpha,
        beta=beta,
        norm=float((c.double() - expected).norm() / expected.norm()),
        bound=worst,
        seconds=time.perf_counter() - begin,
        failed=f"a result is off by {worst:.3g} times the bound" if worst > 1 else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.interpret", description=__doc__)
    known = [rung.id for rung in LADDER if rung.interpretable]
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help=f"of {', '.join(known)}; default all")
    parser.add_argument("--jobs", type=json.loads, metavar="JSON", help="a list of jobs instead, as `run` writes it")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.rungs if name not in known]
    if unknown:
        parser.error(f"the interpreter has no rung {', '.join(unknown)}; there are {', '.join(known)}")
    if given.jobs is not None and given.rungs:
        parser.error("--jobs names its rungs itself")
    if not INTERPRETED:
        parser.error("set TRITON_INTERPRET=1 before Python starts")
    if given.jobs is None:
        pending = jobs([rung for rung in LADDER if rung.id in (given.rungs or known)])
    else:
        pending = [Job.from_json(made) for made in given.jobs]
    for job in pending:
        print(json.dumps({job.key: to_json(interpret(job))}), flush=True)


if __name__ == "__main__":
    main()
