"""Importing the package: no GPU, no driver, little time, exactly the public names."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import printed

SECONDS = 0.3
ATTEMPTS = 5

PROBE = """
import json, sys, time
import torch, triton
from triton.runtime.driver import driver

def libraries():
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "libcuda" in line or "libnvidia" in line})

before, modules, seen = libraries(), set(sys.modules), []
sys.addaudithook(lambda event, args: seen.append(str(args[0])) if event in ("open", "os.listdir") else None)
OPTIONAL = {"typer", "rich", "pydantic", "platformdirs", "filelock"}
start = time.process_time()
import triton_gemm
seconds = time.process_time() - start

import __future__, types
public = [
    name for name, value in vars(triton_gemm).items()
    if not name.startswith("_") and not isinstance(value, (types.ModuleType, __future__._Feature))
]
print(json.dumps({
    "seconds": seconds,
    "cuda_initialized": torch.cuda.is_initialized(),
    "drivers": [repr(d) for d in (driver._default, driver._active) if d is not None],
    "decorated": sorted(x for x in sys.modules if x.startswith(("triton_gemm.kernels.", "triton_gemm.ladder"))),
    "optional": sorted({x.split(".")[0] for x in set(sys.modules) - modules} & OPTIONAL),
    "tables": [name for name in seen if name.endswith(".json") or "cache" in name.split("/")],
    "tuning": sorted(x.removeprefix("triton_gemm.tuning.") for x in sys.modules if x.startswith("triton_gemm.tuning.")),
    "tuner": triton_gemm.runtime.policies._tuner is triton_gemm.tuning._choose,
    "distributed": sorted(x for x in set(sys.modules) - modules if x.startswith("torch.distributed.tensor")),
    "new_libraries": [path for path in libraries() if path not in before],
    "all": list(triton_gemm.__all__),
    "missing": [name for name in triton_gemm.__all__ if not hasattr(triton_gemm, name)],
    "public": public,
    "version": triton_gemm.__version__,
}))
"""


def probe(**variables: str | None) -> dict[str, Any]:
    variables = {"TRITON_GEMM_CACHE_DIR": "/nowhere/cache", **variables}
    result: dict[str, Any] = json.loads(printed(PROBE, TRITON_INTERPRET=None, **variables).splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    return probe()


def test_takes_no_gpu_reads_no_table_and_leaves_packages_to_who_uses_them(imported: dict[str, Any]) -> None:
    assert not imported["cuda_initialized"]
    assert imported["new_libraries"] == imported["distributed"] == imported["optional"] == imported["tables"] == []
    assert imported["drivers"] == probe(CUDA_VISIBLE_DEVICES="")["drivers"] == []


def test_costs_little(tmp_path: Path) -> None:
    """From bytecode, which pip compiles where it installs. PYTHONDONTWRITEBYTECODE has each import parse the source."""
    compiled = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    probe(**compiled)
    # Of the processor's time, the least of several: other processes can only add to it.
    seconds = [probe(**compiled)["seconds"]]
    while min(seconds) >= SECONDS and len(seconds) < ATTEMPTS:
        seconds.append(probe(**compiled)["seconds"])
    assert min(seconds) < SECONDS, f"`import triton_gemm` costs {min(seconds):.2f} s beyond torch and triton"


def test_leaves_kernels_to_the_first_product(imported: dict[str, Any]) -> None:
    """They are most of the time: Triton reads the source of all that it decorates."""
    shared = {
        f"triton_gemm.kernels.{name}" for name in ("candidate", "cost_model", "forms", "launch", "schedule", "splitk")
    }
    assert set(imported["decorated"]) <= shared
    assert imported["tuner"] and imported["tuning"] == ["recording", "report", "timing"]


def test_all_is_exactly_the_public_names(imported: dict[str, Any]) -> None:
    assert imported["missing"] == []
    assert len(imported["all"]) == len(set(imported["all"]))
    assert set(imported["public"]) == {name for name in imported["all"] if not name.startswith("_")}
