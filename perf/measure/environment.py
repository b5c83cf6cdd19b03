"""What a measurement was made on: GPU, driver, clocks, versions, commit, and a hash of the sources that decide it.

A page names the commit (`origin`), and says where the sources have changed since. That is found out when the page is
written, and the test that pages are up to date looks past it (`pages.stale`): an edit of a kernel does not make every
page stale, and the next `python -m perf.pages` tells readers that the figures are older than the kernels.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"  # a folder for each GPU
COMMIT = "TRITON_GEMM_COMMIT"  # names the commit of a tree that was copied


def _modules(names: str) -> tuple[str, ...]:
    """Patterns that find modules by their names, in whichever folder of the package they are."""
    return tuple(f"triton_gemm/**/{name}.py" for name in names.split())


# The files that decide the figures of a record, by what it holds, as patterns below ROOT. For kernels' times: kernels,
# what chooses among them, what they are compiled and launched by, and the models of GPUs. Where the host's time counts,
# or calls are checked, also what passes calls on. Never what measures.
_COMPILED = _modules("arithmetic config problem compat/building compat/compiler compat/gluon compat/language")
_RUNGS = "ladder/rung ladder/record ladder/launch_checks device driver"
_LADDER = ("triton_gemm/ladder/k*.py", "reference_cuda/*", *_COMPILED, *_modules(_RUNGS))
_GEMM = (
    "triton_gemm/kernels/**/*.py",
    "triton_gemm/**/device_models.json",
    *_COMPILED,
    *_modules("compat/launching cost_model device_model gpus select of_configs bit_classes batch_invariance"),
)
_MATMUL = (*_GEMM, "triton_gemm/**/tables/*.json")  # which prefers measured choices
_FIRST_CALLS = (*_MATMUL, "triton_gemm/runtime/**/*.*")  # which compile
_PACKAGES = ("functional", "hardware", "selection", "tables", "compat")
_CALLS = (*_FIRST_CALLS, "triton_gemm/*.py", *(f"triton_gemm/{package}/**/*.*" for package in _PACKAGES))
SOURCES: dict[str, tuple[str, ...]] = {
    "ladder": _LADDER,
    "bench": _MATMUL,
    "host": _CALLS,
    "first-calls": _FIRST_CALLS,
    "accuracy": _GEMM,
    "battery": (*_CALLS, *_LADDER),
    "calibration": _GEMM,
    "tuning": _GEMM,
    "gpt": (*_CALLS, "examples/gpt.py"),
    "learning": (*_CALLS, "triton_gemm/learning/*.py"),
    "models": (*_CALLS, "perf/models/zoo.py", "perf/models/nanogpt.py"),
}
# The files that decide no figure: what measures, what is printed, and what is learned from.
NO_FIGURE = (
    *(f"triton_gemm/{package}/**/*.*" for package in ("calibration", "cli", "reporting", "suites", "tuning")),
    *("triton_gemm/ladder/__*.py", "triton_gemm/ladder/command.py", "triton_gemm/ladder/exercises/**/*.py"),
)
CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
# What must be equal for two measurements to stand in one record.
PAIRS = (
    [["2", "11"], ["3", "6"]],
    [["2", "13"], ["3", "7"]],
    [["2", "15"], ["3", "9"]],
)  # torch, and the Triton it brings
IDENTITY = ("gpu", "driver", "power_limit_w", "torch", "triton", "cuda", "sources")


class Environment(TypedDict, total=False):
    """What a measurement was made on and with; from `capability` on only where there is a GPU."""

    date: str
    python: str
    torch: str
    triton: str
    cuda: str | None
    commit: str | None
    sources: str
    gpu: str | None
    capability: list[int]
    num_sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None
    power_limit_w: float | None


def describe(measured: str) -> Environment:
    """The environment of this process, with or without a GPU; `measured` is a key of SOURCES."""
    made: Environment = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "sources": source_hash(measured),
        "gpu": None,
    }
    if not torch.cuda.is_available():
        return made
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, limit = query("driver_version", "power.limit")
    return {
        **made,
        "gpu": device.name,
        "capability": [device.major, device.minor],
        "num_sms": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
        "driver": driver,
        "power_limit_w": limit,
    }


def clocks() -> dict[str, Any]:
    """Clocks (MHz), temperature, power and throttle reasons now; values are None where nvidia-smi is missing."""
    names = [field.replace(".", "_") for field in CLOCK_FIELDS]
    return dict(zip(names, query(*CLOCK_FIELDS), strict=True))


def query(*fields: str) -> list[Any]:
    """nvidia-smi's values of `fields` for the current GPU, numbers as numbers, None for what it does not say."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [None] * len(fields)
    values = [value.strip() for value in text.partition("\n")[0].split(",")]
    return [_number(value) for value in values] if len(values) == len(fields) else [None] * len(fields)


def _number(text: str) -> Any:
    if re.fullmatch(r"\d+(\.\d+)?", text) and text.count(".") < 2:
        return float(text) if "." in text else int(text)
    return None if text.startswith("[") or text == "N/A" else text


def commit() -> str | None:
    """What the environment variable TRITON_GEMM_COMMIT says, for a copy of the tree on the machine with the GPU, which
    may have no repository, or that of another commit. Else the git commit of this checkout, with `+` where files other
    than results differ from it; None where it is no checkout.
    """
    given = os.environ.get(COMMIT, "").strip()
    if given:
        return given

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:  # and not a repository around a copy
            changed = git("status", "--porcelain", "--", ".", ":(exclude)perf/results")
            return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def of_child(*first: str, **variables: str) -> dict[str, str]:
    """Variables for a process that imports this checkout, after the folders `first`."""
    paths = filter(None, (*first, str(ROOT), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


@cache
def source_hash(measured: str) -> str:
    """Of what the files under SOURCES[measured] hold: 12 hexadecimal digits.

    Hashed are their top-level statements without imports, comments and docstrings, as a set: a module or a function
    that only moved has not changed. One that calls a renamed function has. A record is not continued where the hash
    differs, and a page says so.
    """
    files = files_of(SOURCES[measured])
    parts = {part for path in files for part in _PARTS[path.suffix](path.read_text())}
    digests = sorted(hashlib.sha256(part.encode()).digest() for part in parts)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]


def files_of(patterns: Iterable[str]) -> set[Path]:
    """The sources under ROOT that patterns find."""
    return {path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix in _PARTS}


@cache
def _statements(text: str) -> list[str]:
    return [repr(statement) for statement in _tree(ast.parse(text).body)]


def _tree(node: Any) -> Any:
    """A syntax tree as tuples and lists, without fields that are empty: Python's versions differ in those."""
    if isinstance(node, ast.AST):
        fields = [(name, _tree(value)) for name, value in ast.iter_fields(node)]
        return (type(node).__name__, *(field for field in fields if field[1] not in (None, [])))
    return [_tree(each) for each in node if not _is_silent(each)] if isinstance(node, list) else node


def _is_silent(node: Any) -> bool:
    """Whether it is an import, a docstring or `__all__`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    names = [getattr(target, "id", None) for target in node.targets] if isinstance(node, ast.Assign) else []
    return isinstance(node, (ast.Import, ast.ImportFrom)) or names == ["__all__"]


def _data(text: str) -> list[str]:
    """JSON without its `source`, which says in words where figures are from."""
    found = json.loads(text, object_hook=lambda found: {name: found[name] for name in found if name != "source"})
    return [json.dumps(found, sort_keys=True)]


def _words(text: str) -> list[str]:
    """C++ without comments and line breaks."""
    return [" ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())]


_PARTS: dict[str, Callable[[str], list[str]]] = {
    **{".py": _statements, ".json": _data},
    **dict.fromkeys((".cu", ".cuh", ".h", ".cpp"), _words),
}
CHANGED = " (changed since)"


def named(made: Mapping[str, Any]) -> str:
    """GPU and versions of an environment that `describe` gave, in words."""
    packages = (f", {name} {version}" for name, version in made.get("packages", {}).items() if version)
    return f"{made['gpu']}, torch {made['torch']}, Triton {made['triton']}, CUDA {made['cuda']}{''.join(packages)}"


def origin(made: Iterable[Mapping[str, Any]], measured: str) -> str:
    """At which commits records of these environments were measured, each once, in a sentence."""
    return sentence(stated(record, measured) for record in made)


def stated(made: Mapping[str, Any], measured: str) -> str:
    """The commit of an environment, and CHANGED where its sources are not today's."""
    return place(made) + ("" if made.get("sources") in (None, source_hash(measured)) else CHANGED)


def sentence(words: Iterable[str]) -> str:
    """What `stated` says of several, each commit once: of which some have changed, as changed."""
    several = dict.fromkeys(words)
    found = "; ".join(x for x in several if x + CHANGED not in several)
    return f"{found[:1].upper()}{found[1:]}."


def place(made: Mapping[str, Any]) -> str:
    """The commit of an environment, in words."""
    return f"commit `{made['commit']}`" if made.get("commit") else "commit not recorded"


def short(gpu: str | None) -> str:
    """A GPU's name without its maker's, for a column's head."""
    return (gpu or "no GPU").removeprefix("NVIDIA ")


@dataclass(frozen=True)
class Records:
    """Where the records of one kind are committed, and how a page shows them. files: their paths below the folder of a
    GPU; measured: a key of SOURCES; nothing: the text of a page without records; text: makes a record's Markdown; on:
    says in words what a record was measured on."""

    files: str
    measured: str
    nothing: str
    text: Callable[..., str]
    on: Callable[[Mapping[str, Any]], str] = lambda record: named(record["environment"])

    def path(self, results: Path, made: Mapping[str, Any]) -> Path:
        """Where the record of an environment belongs."""
        return results / slug(made["gpu"]) / self.files.format(triton=made["triton"])

    def committed(self, results: Path) -> list[dict[str, Any]]:
        return committed(results, self.files.format(triton="*"))

    def shown(self, records: Iterable[Mapping[str, Any]]) -> str:
        """The text of the records of each GPU and Triton, below what they were measured on and at which commits."""
        parts = []
        for _, group in groupby(records, key=lambda record: order(record["environment"])):
            found = list(group)
            cases = ((record, case) for record in found for case in record.get("cases", {}).values() or [{}])
            commits = origin(({**record["environment"], **case} for record, case in cases), self.measured)
            parts.append(f"{self.on(found[0])}. {commits}\n\n{self.text(*found)}")
        return "\n\n".join(parts) or self.nothing


def order(made: Mapping[str, Any]) -> tuple[str, list[int]]:
    """By GPU, then by the number of Triton's version."""
    return made["gpu"] or "", [int(part) if part.isdigit() else -1 for part in str(made["triton"]).split(".")]


def committed(results: Path, files: str) -> list[dict[str, Any]]:
    """Every record under the folders of GPUs in `results`, by GPU and Triton version. files: a pattern."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob(f"*/{files}"))]
    return sorted(found, key=lambda record: order(record["environment"]))


def is_from_pip(made: Mapping[str, Any]) -> bool:
    """Whether an environment's torch brings its Triton, so that `pip install torch` gives the pair."""
    return [str(made["torch"]).split(".")[:2], str(made["triton"]).split(".")[:2]] in PAIRS


def of_triton(made: Mapping[str, Any]) -> str:
    """The Triton of an environment, and that it was installed separately if its torch brings another one."""
    of_torch = str(made["torch"]).split(".")[:2]
    brought = next((triton for one, triton in PAIRS if one == of_torch), None)
    text = f"Triton {made['triton']}"
    if brought is None or is_from_pip(made):
        return text
    return f"{text}, installed separately: torch {'.'.join(of_torch)} brings {'.'.join(brought)}"


def newest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the records of each GPU, which have their `environment`, those with its newest Triton, and those of pairs from
    pip, in their order."""
    records = list(records)
    latest: dict[str, list[int]] = {}
    for gpu, version in (order(record["environment"]) for record in records):
        latest[gpu] = max(latest.get(gpu, []), version)
    made = ((record, record["environment"]) for record in records)
    return [record for record, of in made if order(of) in latest.items() or is_from_pip(of)]


def slug(gpu: str | None) -> str:
    """A folder's name: `NVIDIA H100 80GB HBM3` becomes `h100-80gb-hbm3`."""
    words = re.findall(r"[a-z0-9]+", (gpu or "no GPU").lower())
    return "-".join(word for word in words if word != "nvidia")
