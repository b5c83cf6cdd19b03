"""TRITON_GEMM_USE=1 on a GPU: a process that imports torch alone, and one that it spawns, multiply on these kernels."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.processes import environment, python

SCRIPT = """
import multiprocessing, sys, torch

def work(queue):
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c, a, b = (x.cpu() for x in (a @ b, a, b))
    from tests.support.numerics import error_bound, reference
    right = ((c.double() - reference(a, b)).abs() <= error_bound(a, b, None, 1.0, 0.0, "bf16", c.dtype)).all()
    queue.put((bool(right), sys.modules["triton_gemm"].report_routing()[("mm", "triton_gemm")]))

if __name__ == "__main__":
    assert "triton_gemm" not in sys.modules
    queue = multiprocessing.get_context("spawn").Queue()
    work(queue)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
    process.start()
    print(*queue.get(timeout=120), *queue.get(timeout=120))
    process.join()
"""


def test_processes_that_import_torch_alone(tmp_path: Path) -> None:
    info = tmp_path / "triton_gemm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton_gemm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntriton_gemm = triton_gemm_autoload:autoload\n")
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    done = python(script, PYTHONPATH=paths, TRITON_GEMM_USE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "1", "True", "1"]
