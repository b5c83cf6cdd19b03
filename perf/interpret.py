"""Every rung in Triton's interpreter, on small shapes, against fp64.

`TRITON_INTERPRET=1 python -m perf.interpret` prints one JSON line a case. It needs a process of its own: the variable
must be set before the kernels are imported, and then nothing in that process can be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from perf import numerics
from perf.environment import ROOT
from triton_gemm.compat import INTERPRETED
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.problem import UnsupportedOperandError

Case = tuple[int, int, int, float, float]

# M, N, K, alpha, beta: no two sizes equal, none a multiple of a tile; K shorter and longer than BLOCK_K.
# The last has rows of whole 16 bytes, which TMA asks for.
CASES: tuple[Case, ...] = (
    (65, 33, 47, 1.0, 0.0),
    (17, 130, 70, 1.0, 0.0),
    (70, 20, 131, 0.5, -2.0),
    (72, 40, 136, 0.5, -2.0),
)


def keys(rungs: Iterable[Rung]) -> list[str]:
    """The keys of all cases, in the order they run in."""
    return [key(rung, dtype, case) for rung in rungs if rung.interpretable for dtype in rung.dtypes for case in CASES]


def key(rung: Rung, dtype: torch.dtype, case: Case) -> str:
    M, N, K, alpha, beta = case
    return f"{rung.name} {str(dtype).removeprefix('torch.')} {M}x{N}x{K} alpha {alpha:g} beta {beta:g}"


def run(rungs: Iterable[Rung], done: Callable[[str, dict[str, Any]], None]) -> None:
    """Runs every case in a child process; `done` hears of each as it ends.

    Raises RuntimeError with the child's last words if it ends early.
    """
    command = [sys.executable, "-m", "perf.interpret", *(rung.id for rung in rungs if rung.interpretable)]
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                row = json.loads(line)
                done(row.pop("key"), row)
            words = child.stderr.read()
            if child.wait():
                raise RuntimeError(f"the interpreter's process ended early:\n{words[-2000:]}")
        except BaseException:
            child.kill()
            raise


def interpret(rung: Rung, dtype: torch.dtype, case: Case) -> dict[str, Any]:
    """One case: its error, and `failed` if that is beyond the bound or the rung raises."""
    M, N, K, alpha, beta = case
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(M, K, generator=generator).to(dtype)
    b = torch.randn(K, N, generator=generator).to(dtype)
    c0 = torch.randn(M, N, generator=generator).to(dtype)
    c = c0.clone() if beta else torch.full_like(c0, float("nan"))
    begin = time.perf_counter()
    row: dict[str, Any] = {"rung": rung.name, "dtype": str(dtype).removeprefix("torch."), "M": M, "N": N, "K": K}
    try:
        rung.launch(a, b, c, alpha, beta)
    except UnsupportedOperandError as error:
        return {**row, "absent": str(error)}
    except Exception as error:
        return {**row, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    mode = numerics.mode_of(rung.precision, dtype)
    expected = numerics.reference(a, b, c0, alpha, beta)
    share = (c.double() - expected).abs() / numerics.error_bound(a, b, c0, alpha, beta, mode, dtype)
    worst = float(share.max()) if bool(share.isfinite().all()) else float("inf")
    row |= {
        "alpha": alpha,
        "beta": beta,
        "norm": float((c.double() - expected).norm() / expected.norm()),
        "bound": worst,
        "seconds": time.perf_counter() - begin,
    }
    return {**row, "failed": f"a result is off by {worst:.3g} times the bound"} if worst > 1 else row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.interpret", description=__doc__)
    known = [rung.id for rung in LADDER if rung.interpretable]
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help=f"of {', '.join(known)}; default all")
    wanted = parser.parse_args(arguments).rungs or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"the interpreter has no rung {', '.join(unknown)}; there are {', '.join(known)}")
    if not INTERPRETED:
        parser.error("set TRITON_INTERPRET=1 before Python starts")
    for rung in (rung for rung in LADDER if rung.id in wanted):
        for dtype in rung.dtypes:
            for case in CASES:
                print(json.dumps({"key": key(rung, dtype, case), **interpret(rung, dtype, case)}))


if __name__ == "__main__":
    main()
