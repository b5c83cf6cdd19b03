"""Runs mutants in a copy of the checkout: measures which test runs which line, and runs the tests of each mutant."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results", "*.png")
PACKAGE = "triton_gemm"
LEAST_S = 10.0  # that a test may take, and five times what the slowest took
START_S = 60.0  # that pytest may take to start and to collect
MEASURE_S = 3600.0  # for the tests of a file, with coverage
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # in pytest's summary
NO_TEST = "no test"  # of the group's tests runs a line of the mutant's module


# Files of tests, as `tests/selection/test_select.py` is "selection/select".
CHOICES = (
    *("selection/select", "selection/bit_classes", "selection/batch_invariance", "runtime/plan", "runtime/policies"),
    *("runtime/plan_launches", "runtime/precompile", "reporting/explanation", "hardware/device_model"),
)
TABLES = (
    *(
        "tables/tables",
        "tables/faults",
        "tables/weights",
        "runtime/policies",
        "reporting/fingerprint",
        "tuning/session",
        "cli/cli",
    ),
    *("reporting/doctor", "calibration/calibration"),
)
TUNING = (
    *("tuning/gpu_bench", "tuning/candidates", "tuning/race", "tuning/session", "runtime/worker", "runtime/policies"),
    *("tuning/rows", "runtime/background", "runtime/compiling", "cli/cli", "tuning/comparison", "tuning/of_torch"),
)
CALLS = (
    *("functional/surface", "functional/matmul", "functional/ops", "functional/routing", "functional/support"),
    *("functional/bad_input", "tuning/recording", "reporting/explanation", "selection/batch_invariance"),
)


@dataclass(frozen=True)
class Group:
    """Sources that are mutated together, and the files of tests that could find it, without and with Triton's
    interpreter."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    interpreted: tuple[str, ...] = ()
    only_jit: bool = False

    def mutants(self, root: Path = ROOT) -> list[Mutant]:
        paths = sorted({path for pattern in self.sources for path in (root / PACKAGE).glob(pattern)})
        assert paths, f"nothing is {self.sources}"
        return [
            mutant
            for path in paths
            for mutant in mutants_of(path.read_text(), str(path.relative_to(root)), self.only_jit)
        ]

    def sample(self, count: int | None, seed: int, root: Path = ROOT) -> list[Mutant]:
        """`count` of the mutants, drawn by `seed`; all with None. A larger sample begins with a smaller one, and one of
        changed sources has the same mutants of what has not changed."""
        return sorted(self.mutants(root), key=lambda mutant: _drawn(seed, mutant))[:count]

    def files(self) -> list[str]:
        return [
            *(f"tests/{name.replace('/', '/test_')}.py" for name in self.tests),
            *(f"tests/interpreter/{name.replace('/', '/test_')}.py" for name in self.interpreted),
        ]


KERNELS = ("portable/*", "gemv", "skinny", "fma", "repack", "reduction", "tiles", "epilogue", "groups", "schedule")
KERNELS += ("mma_fp64",)
SIMULATED = ("skinny", "fma", "mma_fp64", "reduction", "scales", "schedule", "warp_specialised")
GROUPS = (
    Group("select", ("selection/select.py",), CHOICES, ("reporting/explanation",)),
    Group(
        "plan",
        (
            *("runtime/plan.py", "runtime/background.py", "runtime/stand_ins.py", "runtime/native.py"),
            *("runtime/native_build.py", "runtime/native_file.py", "runtime/interpreted_plan.py"),
            *("functional/native_products.py", "functional/overrides.py"),
        ),
        (
            *CHOICES,
            "runtime/workers",
            *("runtime/background", "runtime/stand_ins"),
            "runtime/native",
            "runtime/native_products",
            *("runtime/native_derivatives", "runtime/native_stand_ins"),
            *("runtime/native_build", "runtime/native_loading", "runtime/native_file"),
            *("runtime/reentry", "runtime/worker_start"),
            "runtime/fast_path",
            "tuning/gpu_bench",
        ),
        CALLS,
    ),
    Group("api", ("functional/api.py", "functional/calls.py"), (*CHOICES, "runtime/workers"), CALLS),
    Group(
        "tuning",
        ("tuning/*.py", "runtime/worker.py", "runtime/compiling.py"),
        TUNING,
        ("tuning/recording", "functional/bad_input"),
    ),
    Group("tables", ("tables/*.py",), TABLES),
    Group(
        "kernels",
        tuple(f"kernels/{name}.py" for name in KERNELS),
        tuple(f"kernels/{name}" for name in SIMULATED),
        (
            *("kernels/portable", "kernels/gemv", "kernels/addresses"),
            *("functional/matmul", "functional/grouped", "functional/scaled_matmul"),
        ),
        only_jit=True,
    ),
    Group(
        "barriers",
        ("kernels/warp_specialised/*.py", "kernels/splitk.py", "kernels/programmatic.py"),
        tuple(f"kernels/{name}" for name in ("warp_specialised", "reduction", "widths", "fma", "skinny")),
        ("kernels/portable", "kernels/gemv"),
        only_jit=True,
    ),
)


def _drawn(seed: int, mutant: Mutant) -> str:
    return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()


def interprets(name: str) -> bool:
    return name.startswith("tests/interpreter/")


def digest(root: Path, tests: Iterable[str] = ()) -> str:
    """Of the package, and with `tests` of what is common to all tests, and of these files."""
    paths = [path for path in (root / PACKAGE).rglob("*") if path.suffix in (".py", ".json")]
    if tests := list(tests):
        paths += [*(root / "tests").glob("*.py"), *(root / "tests" / "support").glob("*.py")]
    found = hashlib.sha256()
    for path in [*sorted(paths), *(root / name for name in tests)]:
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def run(
    tree: Path, chosen: Sequence[str], files: Sequence[str], limit_s: float, *options: str
) -> tuple[int | None, str]:
    """pytest's status, None where it did not end in time, and what it says, of tests of one kind in a copy of the
    checkout; what they write is beside it."""
    interpreting = interprets(files[0])
    home = tree.parent / f"home-{interpreting:d}"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    tests, log = tree.parent / "tests.json", tree.parent / "log"
    tests.write_text(json.dumps(chosen))
    left_out = ("PYTEST_", "TRITON_")
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    surroundings |= {"PYTHONPATH": str(tree), "MUTATION_TESTS": str(tests), "OMP_NUM_THREADS": "1"}
    surroundings |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "XDG_CACHE_HOME": str(home / ".cache")}
    surroundings |= {"COVERAGE_CORE": "ctrace"} | ({"TRITON_INTERPRET": "1"} if interpreting else {})
    surroundings |= {"PYTHONDONTWRITEBYTECODE": "1"} if chosen else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.reach", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--hypothesis-profile=ci", *options, *files]
    with log.open("w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=tree, env=surroundings, start_new_session=True, **streams)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text(errors="replace")


Map = dict[str, Any]  # what reach.py says of the tests of a file


def measured(tree: Path, folder: Path, names: Sequence[str]) -> list[Map]:
    """The maps of these files of tests; what was measured of the same sources before is read from `folder`."""
    found = []
    for name in names:
        kept = folder / f"{Path(name).stem}-{interprets(name):d}-{digest(tree, [name])}.json"
        if not kept.exists():
            print(f"  measuring which lines {name} runs", flush=True)
            _, said = run(tree, [], [name], MEASURE_S, "--tier=fast")
            made = json.loads((tree.parent / "tests.json").read_text())
            if not made or not made["lines"]:
                raise RuntimeError(f"{name} cannot be measured: {said[-2000:]}")
            for test in FAILED.findall(said):
                print(f"    fails without a mutant, left out: {test}", flush=True)
            kept.write_text(json.dumps(made))
        found.append(json.loads(kept.read_text()))
    return found


def tests_of(mutant: Mutant, maps: Sequence[Map], seconds: float) -> dict[str, float]:
    """Tests that take `seconds`, and what each takes: those that run the mutant's lines, then those of the rest of its
    function, then, as lines may run at import, or once and be remembered, of its module. Of each, three cases of every
    test come before more of any."""
    took = {name: time for found in maps for name, time in found["seconds"].items()}
    ranks: dict[str, int] = {}
    for line, names in (item for found in maps for item in found["lines"].get(mutant.path, {}).items()):
        rank = 0 if int(line) in mutant.lines else 1 if int(line) in mutant.function else 2
        ranks |= {name: min(rank, ranks.get(name, 2)) for name in names}
    cases, keys = Counter[tuple[int, str]](), {}
    for name in sorted(ranks, key=lambda name: (took[name], name)):
        test = ranks[name], name.partition("[")[0]
        keys[name] = ranks[name], cases[test] // 3, took[name]
        cases[test] += 1
    chosen: dict[str, float] = {}
    for name in sorted(keys, key=lambda name: keys[name]):
        if not chosen or sum(chosen.values()) + took[name] <= seconds:
            chosen[name] = took[name]
    return chosen


def judged(mutant: Mutant, tree: Path, maps: Sequence[Map], budget: float) -> Mapping[str, str]:
    """What becomes of a mutant by tests of `budget` seconds: caught, or timed out, and by which test; survived; or
    NO_TEST. The copy is as it was afterwards."""
    chosen = tests_of(mutant, maps, budget)
    path, outcome = tree / mutant.path, {"mutant": mutant.name, "outcome": NO_TEST}
    text = path.read_text()
    path.write_text(mutant.applied(text))
    try:
        for interpreting in dict.fromkeys(map(interprets, chosen)):
            mine = [name for name in chosen if interprets(name) == interpreting]
            each = LEAST_S + 5 * max(chosen[name] for name in mine)
            limit = START_S + 5 * sum(chosen[name] for name in mine)
            # with full, a test that is only in the full tier can be chosen
            files = list(dict.fromkeys(name.partition("::")[0] for name in mine))
            status, said = run(tree, mine, files, limit, "-x", "--tier=full", f"--timeout={each:.0f}")
            if status == 0:
                outcome["outcome"] = "survived"
            elif status != 5:  # of 5, a mutant that changes the names of its tests' cases, none ran
                late = status is None or "Failed: Timeout" in said
                by = FAILED.findall(said)[:1] or [f"pytest ended with {status}"]
                return outcome | {"outcome": "timed out" if late else "caught", "by": by[0]}
    finally:
        path.write_text(text)
    return outcome
