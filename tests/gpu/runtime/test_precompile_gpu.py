"""What is compiled ahead of time, where no GPU is seen, is what a GPU runs: nothing is compiled or built there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from tests.support.processes import printed
from triton_gemm.compat import c_compiler
from triton_gemm.hardware.device import current_device_info
from triton_gemm.reporting import doctor

# One problem for each kernel, an epilogue, operands that are not aligned, and copies of operands.
PRODUCTS = """
import torch
import triton_gemm
from triton_gemm.runtime import plan
BF16 = torch.bfloat16
CALLS = {
    "square": lambda m: triton_gemm.matmul(m(1024, 1024), m(1024, 1024)),
    "linear": lambda m: triton_gemm.linear(m(512, 1024), m(768, 1024), m(768), activation="gelu"),
    "few rows": lambda m: triton_gemm.matmul(m(4, 4096), m(1024, 4096).t()),
    "one row": lambda m: triton_gemm.matmul(m(1, 4096), m(4096, 1024)),
    "odd": lambda m: triton_gemm.matmul(m(129, 515), m(515, 131)),
    "one element late": lambda m: triton_gemm.matmul(m(257, 512)[:, 1:], m(512, 256)[1:]),
    "fp32": lambda m: triton_gemm.matmul(m(256, 256, dtype=torch.float32), m(256, 256, dtype=torch.float32)),
    "planes": lambda m: triton_gemm.matmul(
        m(1024, 1024, dtype=torch.float32), m(1024, 1024, dtype=torch.float32), precision="bf16x6"
    ),
}
def run(made):
    for call in CALLS.values():
        call(lambda *shape, dtype=BF16: made(shape, dtype))
"""
# Which problems these are: plans are made, and nothing runs.
PROBLEMS = """
import json
from triton_gemm.tables.records import plain
problems = []
plan.GemmPlan.run = lambda self, *operands: None
choose, plan.selection_for = plan.selection_for, lambda problem, *how, **more: (
    problems.append(problem) or choose(problem, *how, **more)
)
run(lambda shape, dtype: torch.zeros(shape, dtype=dtype, device="cuda"))
print(json.dumps([plain(problem) for problem in problems]))
"""
COMPILE = """
import json, sys
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.runtime.precompile import precompile
from triton_gemm.problem import GemmProblem
from triton_gemm.tables.records import read
assert not torch.cuda.is_available()
request = json.load(sys.stdin)
request["device"]["capability"] = tuple(request["device"]["capability"])
made = precompile([read(GemmProblem, x) for x in request["problems"]], [DeviceInfo(**request["device"])])
assert made.failures == (), made.failures
print(json.dumps({"kernels": made.kernels, "compiled": made.compiled, "module": made.driver_module}))
"""
RUN = """
import json
from triton_gemm.compat import compilations
found = {}
torch.manual_seed(0)
with compilations(lambda kernel, there: found.setdefault(kernel, there)):
    run(lambda shape, dtype: torch.randn(shape, dtype=dtype, device="cuda"))
    torch.cuda.synchronize()
print(json.dumps(found))
"""


def python(code: str, given: str = "", **variables: str) -> str:
    return printed(PRODUCTS + code, given=given, TRITON_GEMM_POLICY="model", **variables).splitlines()[-1]


def test_a_gpu_compiles_nothing_after_compiling_ahead(tmp_path: Path) -> None:
    problems = json.loads(python(PROBLEMS, TRITON_CACHE_DIR=str(tmp_path / "other")))
    assert len(problems) >= 8
    request = json.dumps({"problems": problems, "device": asdict(current_device_info())})
    made = json.loads(python(COMPILE, request, TRITON_CACHE_DIR=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES=""))
    assert made["kernels"] == made["compiled"] >= 6
    assert made["module"] is None or c_compiler() is None
    compiler = {"CC": "/bin/false"} if made["module"] is None else {}
    found = json.loads(python(RUN, TRITON_CACHE_DIR=str(tmp_path / "cache"), **compiler))
    missed = [kernel for kernel, there in found.items() if not there]
    assert len(found) == made["kernels"] and not missed, missed


def test_doctor_finds_nothing_broken_here() -> None:
    found = doctor.examine()
    assert not found.broken, [finding for finding in found.findings if finding.status == "broken"]
    assert [finding.says for finding in found.findings if finding.about == "product"] == ["a small product is right"]
    assert len(found.devices) == torch.cuda.device_count()
