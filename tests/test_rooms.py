"""Who may import whom."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("triton_gemm", "reference_cuda", "perf", "examples", "tests")

# A room is a module or package and all that is in it. The standard library and a room's own modules
# are always allowed; everything else that a room may import is named here, other packages included.
TYPES = {"problem", "device", "config"}
TRITON = {"torch", "triton", "compat"}
ROOMS_OF_PERF = {"perf.common", "perf.measure"}
TABLE: dict[str, set[str]] = {
    "triton_gemm": TYPES
    | {"api", "nn", "grouped", "routing", "scaled", "explanation", "ops", "arithmetic", "plan", "select", "policies"}
    | {"fingerprint", "tuning", "calibration"},
    "routing": {"torch", "compat", "checks", "device", "problem", "ops", "plan", "arithmetic"},
    "nn": {"torch", "api", "checks", "arithmetic", "problem"},
    "api": TYPES | {"torch", "compat", "arithmetic", "checks", "plan", "select", "ops"},
    "inductor": {"torch", "triton_gemm", "compat", "arithmetic", "device", "problem", "ops"},
    "grouped": {"torch", "compat", "arithmetic", "problem", "api", "checks", "ops", "plan"},
    "scaled": {"torch", "compat", "arithmetic", "problem", "checks", "ops", "plan"},
    "explanation": TYPES
    | {"torch", "compat", "arithmetic", "checks", "device_model", "plan", "policies", "select", "bit_classes", "ops"}
    | {"scaled"},
    "comparison": {"problem", "device", "device_model", "select", "kernels", "plan", "policies", "tables", "aot"}
    | {"bit_classes", "precompile"},
    "precompile": TRITON | {"problem", "device", "kernels", "plan", "select"},
    "doctor": TRITON | {"api", "calibration", "device", "device_model", "driver", "policies", "tables"},
    "cli": {"torch", "typer", "rich", "triton_gemm.*"},
    "triton_gemm.__main__": {"cli"},
    "fingerprint": {"torch", "checks", "device", "device_model", "policies", "tables"},
    "checks": {"torch", "compat", "arithmetic", "problem"},
    "ops": {"torch", "arithmetic", "compat", "problem", "config", "plan", "sharding"},
    "sharding": {"torch", "compat"},
    "arithmetic": {"torch"},
    "problem": {"torch", "arithmetic"},
    "suites": {"torch", "arithmetic", "problem"},
    "device": {"torch"},
    "device_model": {"device"},
    "config": {"torch", "device"},
    "cost_model": {"torch", "problem", "device_model"},
    "compat": {"torch", "triton"},
    "driver": set(),
    "aot": TRITON,
    "select": TYPES | {"torch", "arithmetic", "device_model", "kernels"},
    "workspace": {"torch", "compat", "driver"},
    "bit_classes": {"torch", "arithmetic", "problem", "select", "kernels"},
    "batch_invariance": {"bit_classes", "problem", "device", "device_model", "select", "kernels", "generation"},
    "generation": {"compat"},
    "tables": TYPES
    | TRITON
    | {"checks", "arithmetic", "select", "kernels", "generation", "platformdirs", "filelock", "bit_classes", "nvml"}
    | {"batch_invariance"},
    "nvml": set(),
    "timing": {"torch", "compat"},
    "policies": {"torch", "compat", "checks", "problem", "device", "select", "tables", "generation"}
    | {"bit_classes", "batch_invariance"},
    "tuning": TYPES
    | {"torch", "rich", "compat", "checks", "arithmetic", "bit_classes", "device_model", "explanation", "kernels"}
    | {"nvml", "plan", "policies", "precompile", "select", "tables", "timing", "workspace", "generation"},
    "calibration": {
        "torch",
        "arithmetic",
        "compat",
        "checks",
        "problem",
        "device",
        "device_model",
        "kernels",
        "select",
        "suites",
        "tables",
    }
    | {"tuning", "timing", "generation"},
    "plan": TYPES | TRITON | {"driver", "arithmetic", "select", "kernels", "workspace", "policies", "generation"},
    "kernels": TYPES | TRITON | {"arithmetic", "device_model", "cost_model", "ladder"},
    "ladder": TYPES | TRITON | {"arithmetic", "driver"},
    "triton_gemm.ladder.__main__": {"perf.ladder"},
    "reference_cuda": {"torch"},
    "perf": {"torch", "rich", "ladder", *ROOMS_OF_PERF, "perf.ladder"},
    "perf.common": {"numpy", "matplotlib", "rich"},
    "perf.measure": {"torch", "triton", "numpy", "triton_gemm.*", "perf.measure.numerics"},
    "perf.measure.numerics": {"torch", "arithmetic"},
    "perf.ladder": {
        *("torch", "triton", "numpy", "matplotlib", "rich"),
        *("triton_gemm.*", "reference_cuda", "perf.measure.numerics", *ROOMS_OF_PERF),
    },
    "perf.bench": {"torch", "triton", "matplotlib", "rich", "triton_gemm.*", *ROOMS_OF_PERF},
    "perf.accuracy": {"torch", "rich", "triton_gemm.*", "perf.measure.numerics", *ROOMS_OF_PERF},
    "perf.battery": {"torch", "rich", *ROOMS_OF_PERF},
    "perf.calibrate": {"torch", "numpy", "rich", "triton_gemm.*", *ROOMS_OF_PERF, "perf.bench"},
    "perf.tuning": {"torch", "triton_gemm.*", *ROOMS_OF_PERF},
    "perf.drift": {"torch", "triton", "rich", "triton_gemm.*", *ROOMS_OF_PERF},
    "perf.pages": {
        "ladder",
        *ROOMS_OF_PERF,
        "perf.ladder",
        "perf.bench",
        "perf.accuracy",
        "perf.battery",
        "perf.tuning",
    },
    "examples": {"torch", "rich", "triton_gemm", *ROOMS_OF_PERF, "perf.pages", "examples.gpt"},
    "examples.gpt": {"torch"},
    "tests": {
        *("torch", "triton", "numpy", "pytest", "hypothesis", "coverage", "typer"),
        *("triton_gemm.*", "reference_cuda", "perf.measure.numerics", "examples.gpt"),
    },
}
# Other tests take nothing of perf but its arithmetic, and of the examples but the models; these test the rest.
TESTS_OF_PERF = re.compile(r"(test_)?(perf|report|bench)\w*\.py")
# Beyond imports: select is pure, and must give the same answer where there is no GPU.
NEVER_NAMES = {"select": "torch.cuda"}


def room_of(module: str) -> str:
    """`triton_gemm.ladder.k03_tile` -> `ladder`; `perf.bench.sweep` -> `perf.bench`; `torch.nn` -> `torch`."""
    parts = module.split(".")
    for count in range(len(parts), 1, -1):
        if ".".join(parts[:count]) in TABLE:
            return ".".join(parts[:count])
    return parts[1] if parts[0] == "triton_gemm" and len(parts) > 1 else parts[0]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(module: str, root: Path) -> bool:
    path = root.joinpath(*module.split("."))
    is_room = module.count(".") == 1 and room_of(module) in TABLE
    return is_room or path.is_dir() or path.with_suffix(".py").is_file() or rung_number(module) is not None


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in the file, those inside functions included."""
    module = module_name(path, root)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_ours = base.split(".")[0] in TREES
                yield node.lineno, inner if is_ours and is_module(inner, root) else base


def dotted_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def rung_number(module: str) -> int | None:
    found = re.fullmatch(r"triton_gemm\.ladder\.k(\d\d)_\w+", module)
    return int(found.group(1)) if found else None


def may_import(room: str, target: str) -> bool:
    wanted, top = room_of(target), target.split(".")[0]
    allowed = TABLE[room]
    if wanted == room or wanted in allowed or top in sys.stdlib_module_names:
        return True
    return top == "triton_gemm" and "triton_gemm.*" in allowed


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(p for tree in TREES for p in (root / tree).rglob("*.py")):
        module = module_name(path, root)
        room = room_of(module)
        where = path.relative_to(root)
        if room not in TABLE:
            found.append(f"{where}: there is no room '{room}' in the table")
            continue
        for line, target in imports(path, root):
            tests_perf = target.split(".")[0] in ("perf", "examples") and TESTS_OF_PERF.fullmatch(path.name)
            if not may_import(room, target) and not tests_perf:
                found.append(f"{where}:{line}: '{room}' may not import {target}")
            number = rung_number(module)
            if number is not None and room_of(target) == "ladder":
                imported = rung_number(target)
                is_lower = imported is not None and imported < number
                if not is_lower and target != "triton_gemm.ladder.rung":
                    found.append(f"{where}:{line}: a rung imports rung.py and lower rungs, not {target}")
        for line, name in dotted_names(path) if room in NEVER_NAMES else ():
            if name == NEVER_NAMES[room]:
                found.append(f"{where}:{line}: '{room}' may not use {name}")
    return found


def test_every_room_is_built() -> None:
    assert {room_of(module_name(path, ROOT)) for tree in TREES for path in (ROOT / tree).rglob("*.py")} == set(TABLE)


def test_every_import_is_allowed() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_the_walk_sees_this_tree() -> None:
    seen = {module_name(p, ROOT) for tree in TREES for p in (ROOT / tree).rglob("*.py")}
    assert "tests.test_rooms" in seen
    assert "pytest" in {target for _, target in imports(Path(__file__), ROOT)}


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("triton_gemm/problem.py", "import triton", "'problem' may not import triton"),
        ("triton_gemm/problem.py", "def f():\n    from . import kernels", "not import triton_gemm.kernels"),
        ("triton_gemm/device.py", "import triton.language as tl", "not import triton.language"),
        ("triton_gemm/ladder/k03_tile.py", "from ..api import matmul", "not import triton_gemm.api"),
        ("triton_gemm/ladder/k03_tile.py", "from triton_gemm import plan", "not import triton_gemm.plan"),
        ("triton_gemm/ladder/k03_tile.py", "from . import LADDER", "not triton_gemm.ladder"),
        ("triton_gemm/ladder/k03_tile.py", "from .k04_group import launch", "k04_group"),
        ("triton_gemm/ladder/k03_tile.py", "from .k03_tile import launch", "k03_tile"),
        ("triton_gemm/kernels/dense.py", "import triton_gemm.select", "not import triton_gemm.select"),
        ("triton_gemm/api.py", "from triton_gemm.kernels import dense", "not import triton_gemm.kernels"),
        ("triton_gemm/select.py", "import torch\ntorch.cuda.current_device()", "may not use torch.cuda"),
        ("triton_gemm/plan.py", "from . import ops", "not import triton_gemm.ops"),
        ("triton_gemm/api.py", "import requests", "not import requests"),
        ("triton_gemm/api.py", "import perf.bench", "not import perf.bench"),
        ("triton_gemm/helpers.py", "import torch", "no room 'helpers'"),
        ("reference_cuda/__init__.py", "import triton_gemm", "not import triton_gemm"),
        ("triton_gemm/ladder/rung.py", "from perf.measure import timer", "'ladder' may not import perf.measure"),
        ("triton_gemm/ladder/__main__.py", "import torch", "'triton_gemm.ladder.__main__' may not import torch"),
        ("perf/bench.py", "from tests import conftest", "not import tests.conftest"),
        ("examples/gpt.py", "import triton_gemm", "'examples.gpt' may not import triton_gemm"),
        ("examples/bench_gpt.py", "from triton_gemm import ops", "not import triton_gemm.ops"),
        ("tests/test_a.py", "from examples import bench_gpt", "'tests' may not import examples.bench_gpt"),
        ("perf/measure/numerics.py", "from perf import bench", "'perf.measure.numerics' may not import perf.bench"),
        ("perf/measure/timer.py", "from perf.ladder import views", "'perf.measure' may not import perf.ladder"),
        ("tests/test_a.py", "import pandas", "'tests' may not import pandas"),
        ("tests/test_a.py", "from perf import bench", "'tests' may not import perf.bench"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, line: str, complaint: str) -> None:
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(line + "\n")
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("triton_gemm/__init__.py", "from .api import matmul"),
        ("triton_gemm/api.py", "from __future__ import annotations\nfrom .plan import plan_for"),
        ("triton_gemm/plan.py", "from .kernels.launch import Launch\nfrom .select import select"),
        ("triton_gemm/ladder/__init__.py", "from . import k01_naive, k11_warp_specialized"),
        ("triton_gemm/ladder/k04_group.py", "from .k03_tile import launch\nfrom .rung import Rung"),
        ("triton_gemm/ladder/k04_group.py", "import triton.language as tl\nfrom ..config import GemmConfig"),
        ("perf/ladder/tasks.py", "import rich.progress\nimport triton_gemm.ladder\nimport reference_cuda"),
        ("tests/gpu/test_b.py", "import triton_gemm.aot\nfrom perf.measure.numerics import reference"),
        ("triton_gemm/ladder/__main__.py", "import sys\nfrom perf.ladder.by_hand import main"),
        ("examples/bench_gpt.py", "import triton_gemm\nfrom examples.gpt import Gpt\nfrom perf.measure import timer"),
        ("tests/gpu/test_c.py", "from examples.gpt import Gpt"),
        ("tests/test_perf_bench.py", "from perf import bench, numerics"),
    ],
)
def test_what_the_table_allows_passes(tmp_path: Path, path: str, line: str) -> None:
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(line + "\n")
    assert violations(tmp_path) == []
