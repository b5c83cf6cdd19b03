"""Runs mutants: a copy of the checkout, the map of which test runs which line, the tests of a mutant, and a journal.

Only the copy is ever changed. Killed at any time, a run leaves the checkout as it was, and goes on where it stopped.
"""

from __future__ import annotations

import ast
import compileall
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("triton_gemm", "tests", "perf", "reference_cuda", "examples", "docs", "pyproject.toml", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", ".hypothesis", "*.png")
PACKAGE = "triton_gemm"
# Imported once, before anything is forked.
IMPORTED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.testing",
    "triton",
    "triton.language",
    "triton.experimental.gluon",
)
IMPORTED += ("triton.runtime.interpreter", "pytest", "hypothesis", "hypothesis.stateful", "rich.console", "coverage")
LEAST_S = 10.0  # that a test may take, and five times what it took
CLOSE_S = 10.0  # that a worker has to end by itself
FIRST_S = 6.0  # of the tests that run first, before more files are imported


CHOICES = ("select", "plan", "policy", "bit_classes", "batch_invariance", "explain", "device_model", "precompile")
TABLES = ("tables", "tables_faults", "policy", "fingerprint", "tuning_session", "cli", "doctor", "calibration")
TUNING = ("tuning_bench", "tuning_candidates", "tuning_race", "tuning_session", "tuning_worker", "policy", "cli")
CALLS = ("surface", "matmul", "ops", "routing", "support", "bad_input", "recording", "explain", "batch_invariance")


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
            *(f"tests/test_{name}.py" for name in self.tests),
            *(f"tests/interpreter/test_{name}.py" for name in self.interpreted),
        ]


KERNELS = ("portable/*", "gemv", "skinny", "fma", "repack", "reduction", "tiles", "epilogue", "groups", "schedule")
GROUPS = (
    Group("select", ("select.py",), CHOICES, ("explain",)),
    Group("plan", ("plan.py",), (*CHOICES, "workers", "tuning_bench"), CALLS),
    Group("api", ("api.py",), (*CHOICES, "workers"), CALLS),
    Group("tuning", ("tuning/*.py",), TUNING, ("recording", "bad_input")),
    Group("tables", ("tables/*.py",), TABLES),
    Group(
        "kernels",
        tuple(f"kernels/{name}.py" for name in KERNELS),
        ("skinny", "fma", "reduction", "schedule", "warp_specialised"),
        ("portable", "gemv", "matmul", "grouped", "scaled_matmul", "addresses"),
        only_jit=True,
    ),
    Group(
        "barriers",
        ("kernels/warp_specialised/*.py", "kernels/splitk.py", "kernels/programmatic.py"),
        ("warp_specialised", "reduction", "widths", "fma", "skinny"),
        ("portable", "gemv"),
        only_jit=True,
    ),
)


def _drawn(seed: int, mutant: Mutant) -> str:
    return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()


def interprets(name: str) -> bool:
    return name.startswith("tests/interpreter/")


def digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def package_digest(root: Path = ROOT) -> str:
    return digest(path for path in (root / PACKAGE).rglob("*") if path.suffix in (".py", ".json"))


def helpers_digest(root: Path = ROOT) -> str:
    """Of what tests import from `tests`, and of its conftest.py."""
    return digest(path for path in (root / "tests").glob("*.py") if not path.name.startswith("test_"))


def copy(tree: Path, root: Path = ROOT) -> None:
    """The checkout at `tree`, made anew. Bytecode there is valid as long as its source has the same bytes."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=LEFT_OUT)
        elif source.exists():
            shutil.copy2(source, tree / name)
    compileall.compile_dir(
        tree / PACKAGE, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, workers=1
    )


class Worker:
    """The process of one group of tests, in a copy of the checkout, with folders of its own for what tests write."""

    def __init__(self, tree: Path, scratch: Path, interpreting: bool, imported: Sequence[str] = IMPORTED) -> None:
        self.scratch = scratch / ("interpreter" if interpreting else "compile")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        for name in ("TRITON_INTERPRET", "PYTHONPATH", "TRITON_GEMM_POLICY"):
            environment.pop(name, None)
        home = self.scratch / "home"
        for folder in (home, self.scratch / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        environment |= {"HOME": str(home), "TMPDIR": str(self.scratch / "tmp"), "XDG_CACHE_HOME": str(home / ".cache")}
        environment |= {"TRITON_CACHE_DIR": str(self.scratch / "triton"), "OMP_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if interpreting else {}
        self.process = subprocess.Popen(
            [sys.executable, str(tree / "tests" / "mutation" / "worker.py"), *imported],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.scratch / "worker.log").open("w"),
            text=True,
        )
        assert self.answer() == {"ready": True}

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended: {(self.scratch / 'worker.log').read_text()[-2000:]}")
        return json.loads(line)

    def ask(
        self,
        batches: Sequence[Sequence[str]],
        limits: Mapping[str, float] | None = None,
        chosen: bool = True,
        coverage: bool = False,
    ) -> dict[str, Any]:
        """Runs batches of tests; `chosen`: they are single tests, else files. With `coverage` all of them, with the
        lines that each runs; else until one fails."""
        assert self.process.stdin is not None
        request = {"batches": batches, "limits": limits or {}, "chosen": chosen, "coverage": coverage}
        request |= {"status": str(self.scratch / "status"), "log": str(self.scratch / "run.log")}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        for end in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                end()
        self.process.wait()


@dataclass
class Map:
    """Which tests run which lines of the package, and how long they take; of those that pass."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, answer: Mapping[str, Any]) -> None:
        names = list(answer["tests"])
        passed = {name for name, test in answer["tests"].items() if test["passed"]}
        self.seconds |= {name: answer["tests"][name]["seconds"] for name in passed}
        for path, lines in answer["lines"].items():
            for line, places in lines.items():
                self.lines[path, int(line)] |= {names[place] for place in places} & passed

    def of_path(self, path: str) -> set[str]:
        return {name for (found, _), names in list(self.lines.items()) if found == path for name in names}

    def tests_of(self, mutant: Mutant, scope: range, seconds: float) -> list[str]:
        """Tests that take `seconds`, by what they took for the map: those that run the mutant's lines, then those of
        the rest of its function, then, where both are few, of its module, as lines may run at import, or once and be
        remembered. In each, first few cases of every test, those whose file is about the module before others."""
        direct = {name for line in mutant.lines for name in self.lines.get((mutant.path, line), ())}
        near = {name for line in scope for name in self.lines.get((mutant.path, line), ())}
        found = self.in_order(direct, mutant) + self.in_order(near - direct, mutant)
        if sum(self.seconds[name] for name in found) < seconds:
            found += self.in_order(self.of_path(mutant.path) - direct - near, mutant)
        chosen, total = [], 0.0
        for name in found:
            total += self.seconds[name]
            if total <= seconds or not chosen:
                chosen.append(name)
        return chosen

    def in_order(self, names: Iterable[str], mutant: Mutant) -> list[str]:
        stems = {part.strip("_") for part in Path(mutant.path).with_suffix("").parts[1:]} - {"init", "kernels"}
        cases: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            cases[name.partition("[")[0]].append(name)
        keys = {}
        for of_test in cases.values():
            for i, name in enumerate(of_test):
                about = any(stem in name.partition("::")[0] for stem in stems)
                keys[name] = (i // 3, not about, self.seconds[name] > 2, name)
        return sorted(keys, key=lambda name: keys[name])


def measured(workers: Mapping[bool, Worker], cache: Path, names: Sequence[str], root: Path) -> Map:
    """The map of these files of tests; what was measured of the same sources before is read from `cache`."""
    cache.mkdir(parents=True, exist_ok=True)
    package = package_digest(root)
    helpers = helpers_digest(root)
    found = Map()
    for i, name in enumerate(names):
        kept = cache / f"{Path(name).stem}-{interprets(name):d}-{package}-{helpers}-{digest([root / name])}.json"
        if not kept.exists():
            answer = workers[interprets(name)].ask([[name]], chosen=False, coverage=True)
            if "lines" not in answer or not answer["inside"]:
                why = answer.get("late") or answer.get("died") or answer
                raise RuntimeError(f"{name} cannot be measured: {why}")
            for old in cache.glob(f"{Path(name).stem}-{interprets(name):d}-*.json"):
                old.unlink()
            kept.write_text(json.dumps(answer))
            failed = [test for test, said in answer["tests"].items() if not said["passed"] and "words" in said]
            print(
                f"  [{i + 1}/{len(names)}] {name}: {len(answer['tests'])} tests, {answer['seconds']:.0f} s", flush=True
            )
            for test in failed:
                print(f"    fails without a mutant, left out: {test}: {answer['tests'][test]['words']}", flush=True)
        found.add(json.loads(kept.read_text()))
    return found


NO_TEST = "no test"  # of the group's tests runs a line of the mutant's module


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: caught (by which test), timed out, survived (how many tests), or NO_TEST."""

    name: str
    outcome: str
    by: str = ""
    words: str = ""
    tests: int = 0
    seconds: float = 0.0


def scope_of(mutant: Mutant, text: str) -> range:
    """The lines of the function that the mutant is in; none at the top of a module."""
    best = range(0)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if mutant.line in lines and (not best or len(lines) < len(best)):
                best = lines
    return best


def judged(mutant: Mutant, tree: Path, workers: Mapping[bool, Worker], tests: Map, budget: float) -> Verdict:
    """Runs a mutant's tests on it, in the copy, for `budget` seconds; the copy is as it was afterwards."""
    path = tree / mutant.path
    text = path.read_text()
    chosen = tests.tests_of(mutant, scope_of(mutant, text), budget)
    limits = {name: LEAST_S + 5 * tests.seconds[name] for name in chosen}
    path.write_text(mutant.applied(text))
    seconds, ran = 0.0, 0
    try:
        for names in stages(chosen, tests.seconds):
            interpreting = interprets(names[0])
            answer = workers[interpreting].ask(by_file(names), limits)
            seconds += answer["seconds"]
            if "late" in answer:
                return Verdict(mutant.name, "timed out", answer["late"], seconds=seconds)
            if "died" in answer:
                return Verdict(mutant.name, "caught", answer["died"], "the process died", seconds=seconds)
            assert answer["inside"], "tests have imported a package that is not the copy"
            failed = [(name, test) for name, test in answer["tests"].items() if "words" in test]
            if failed:
                name, test = failed[0]
                return Verdict(mutant.name, "caught", name, test["words"].strip().split("\n")[0][:120], seconds=seconds)
            if answer["code"] not in (0, 5):
                return Verdict(mutant.name, "caught", "pytest", f"ended with {answer['code']}", seconds=seconds)
            ran += len(answer["tests"])
    finally:
        path.write_text(text)
    return Verdict(mutant.name, "survived" if ran else NO_TEST, tests=ran, seconds=seconds)


def stages(chosen: Sequence[str], seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """Few tests first, then all others; each in the processes they need, that of the first test first."""
    total, first = 0.0, 0
    while first < len(chosen) and total <= FIRST_S:
        total += seconds[chosen[first]]
        first += 1
    for part in (chosen[:first], chosen[first:]):
        for interpreting in sorted({interprets(name) for name in part}, key=lambda kind: kind != interprets(part[0])):
            yield [name for name in part if interprets(name) == interpreting]


def by_file(names: Iterable[str]) -> list[list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("::")[0]].append(name)
    return list(found.values())
