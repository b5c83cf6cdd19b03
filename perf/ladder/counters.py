"""Nsight Compute's counters for the two kernels whose memory arithmetic S3 teaches.

`python -m perf.ladder.counters STEM VARIANT SIZE` launches one twin once, which is what ncu watches; it needs a
CUDA GPU.
`python perf/report.py --counters` runs it under ncu.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from perf.common import arguments as args
from perf.ladder.published import twin_of
from perf.ladder.record import Counters, Loads
from perf.measure import operands
from perf.measure.environment import ROOT
from reference_cuda import TWINS, TwinUnavailable, load

# Bytes that threads load; Nsight Compute, "Metrics Reference", smsp__sass_*.
METRICS = {
    "global": "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "shared": "smsp__sass_data_bytes_mem_shared_op_ld.sum",
}
SIZE = 1024
# Words a result loads, of K = SIZE: (global, shared), as S3 counts them.
TAUGHT = {"S3.3": (SIZE / 16, 2 * SIZE), "S3.4": (SIZE / 32, 9 * SIZE / 8)}


def read() -> Counters:
    """For each kernel the taught and the counted loads, or why they could not be counted."""
    if shutil.which("ncu") is None:
        return Counters(unavailable="ncu (Nsight Compute) is not on PATH")
    loads = {}
    for kernel_id, taught in TAUGHT.items():
        try:
            counted = _count(kernel_id)
        except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
            output = getattr(error, "stdout", None) or str(error)
            reason = next((line for line in output.splitlines() if "ERR" in line), output.splitlines()[-1])
            return Counters(unavailable=f"ncu failed: {reason.strip()}")
        loads[kernel_id] = {name: Loads(taught=taught[i], counted=counted[name]) for i, name in enumerate(METRICS)}
    return Counters(loads=loads)


def _count(kernel_id: str) -> dict[str, float]:
    """Words loaded for each result."""
    twin, variant = twin_of(kernel_id)
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS.values())]
    command += ["--kernel-name", f"regex:{variant.kernel.partition('<')[0]}"]
    command += [sys.executable, "-m", "perf.ladder.counters", twin.stem, variant.name, str(SIZE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    _, values = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[:2]
    return {name: float(values[metric].replace(",", "")) / 4 / SIZE**2 for name, metric in METRICS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.counters", description=__doc__)
    parser.add_argument("stem", choices=TWINS, metavar="STEM", help=f"of reference_cuda: {', '.join(TWINS)}")
    parser.add_argument("variant", metavar="VARIANT", help="one of that twin's")
    parser.add_argument("size", type=args.count, metavar="SIZE", help="M = N = K")
    given = parser.parse_args(arguments)
    variants = {variant.name: variant for variant in TWINS[given.stem].variants}
    if given.variant not in variants:
        parser.error(f"no variant {given.variant!r} of {given.stem}; there are {', '.join(variants)}")
    if not torch.cuda.is_available():
        print("error: this needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    dtype, out_dtype = variants[given.variant].dtype, variants[given.variant].out_dtype
    size = (given.size, given.size)
    generator = torch.Generator(device="cuda").manual_seed(0)
    a, b = (operands.draw(size, dtype, generator) for _ in range(2))
    try:
        load(given.stem).launch(a, b, torch.empty(size, dtype=out_dtype, device="cuda"), variant=given.variant)
    except TwinUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
