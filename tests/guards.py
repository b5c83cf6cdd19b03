"""What no change of structure may alter, as a record: choices and their classes of bits, public names and signatures,
the command's options, and the operators' schemas.

    python -m tests.guards                what differs from the record; exit status 1 if anything does
    python -m tests.guards --update       writes the record of this Triton
    python -m tests.guards --dump FILE    every choice in a line, to compare two commits with `diff`

A change that means to alter a choice updates the record in the same commit. Machine code has records of its own
(`perf.drift`). Choices depend on Triton: run it with each version that has an entry.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import triton

import triton_gemm
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import policies
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.suites import SUITES
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape, between

FILE = Path(__file__).parent / "guards.json"
DEVICES = ("h100", "h200", "sm_80", "sm_89", "sm_100", "sm_120")
RULES = ("same", "any", "batch-invariant")  # to choose: which tables' entries count, and whose class of bits
RANDOM, SEED = 500, 35
MODES = tuple(dict.fromkeys(("bf16", "fp16", *(suite.mode for suite in SUITES.values() if suite.mode))))


def random_shapes() -> Iterator[tuple[Shape, str]]:
    """Shapes of all sizes, layouts, alignments and epilogues, and what each is multiplied in."""
    random = Random(SEED)
    for _ in range(RANDOM):
        mode = random.choice(MODES)
        M, N, K = (between(random, 1, 16384, random.choice((1, 1, 8, 64))) for _ in range(3))
        more: dict[str, Any] = {"layout": random.choice(("nt", "nn", "tn", "tt"))}
        if mode.startswith("fp8"):
            more = {"layout": "nt", "scales": random.choice(("tensor", "rows"))}
        elif random.random() < 0.3:
            more |= {"pad": random.choice((0, 8)), "offset": random.choice((0, 1))}
        if mode in ("bf16", "fp16", "tf32") and random.random() < 0.3:
            more |= {"bias": random.choice((None, "n")), "activation": random.choice((None, "relu", "gelu"))}
        if "scales" not in more and random.random() < 0.15:
            more["batch"] = random.randint(2, 64)
        yield Shape(M, N, K, **more), mode


@cache
def products() -> dict[str, dict[str, GemmProblem]]:
    """Problems by group and by what is said of them: every suite's, and the random ones."""
    found = {
        suite.name: {shape.key: gemm_problem(shape, suite.mode or "bf16") for shape in suite.shapes}
        for suite in SUITES.values()
    }
    drawn = {f"{shape.key} {mode}": gemm_problem(shape, mode) for shape, mode in random_shapes()}
    return found | {"random": drawn}


def choices(device: str, rule: str) -> Iterator[tuple[str, str]]:
    """(group, what is chosen for a product on the device, and its class of bits, in a line)."""
    info = named_device(device)
    with triton_gemm.policy("cached", bits="any" if rule == "any" else "same"):
        for group, problems in products().items():
            for key, problem in problems.items():
                try:
                    found = policies.choose(problem, info, invariant=rule == "batch-invariant")
                    parts = (found.kernel, found.config, found.work, found.swap_ab, found.packed, found.source)
                    chosen = f"{' '.join(map(repr, parts))}; {bit_class(problem, found)}; {found.reason}"
                except RuntimeError as error:
                    chosen = f"RuntimeError: {error}"
                yield group, f"{device} {rule} {group} {key}: {chosen}"


def digests(device: str, rule: str) -> dict[str, str]:
    """Of the choices on a device by one rule, by group."""
    found: dict[str, Any] = {}
    for group, line in choices(device, rule):
        found.setdefault(group, hashlib.sha256()).update(f"{line}\n".encode())
    return {name: digest.hexdigest()[:16] for name, digest in found.items()}


def names() -> dict[str, object]:
    """Public names: how a function is called, what a class has, what an alias stands for."""
    found: dict[str, object] = {}
    for name in triton_gemm.__all__:
        public = getattr(triton_gemm, name)
        if inspect.isclass(public):
            members = {*vars(public), *getattr(public, "__dataclass_fields__", ())}
            found[name] = sorted(member for member in members if not member.startswith("_"))
        else:
            found[name] = str(inspect.signature(public)) if inspect.isfunction(public) else str(public)
    return found


def commands() -> dict[str, list[str]]:
    """The command `triton-gemm`: each of its commands and groups, and what it takes."""
    import typer

    from triton_gemm.cli.app import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
        yield name, sorted(" ".join(parameter.opts) for parameter in command.params)
        for sub, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {sub}", inner)

    return dict(walk("triton-gemm", typer.main.get_command(app)))


def schemas() -> list[str]:
    """Of the operators that are registered with torch."""
    found = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in found if schema.name.startswith("triton_gemm::"))


# What is recorded, whatever the version of Triton.
STATIC: Mapping[str, Callable[[], object]] = {"names": names, "commands": commands, "schemas": schemas}


def key() -> str:
    """Of this Triton's choices in the record."""
    return ".".join(triton.__version__.split(".")[:2])


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__.partition(":")[0])
    parser.add_argument("--update", action="store_true", help="write the record")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write every choice in a line")
    given = parser.parse_args()
    if given.dump:
        every = (line for device in DEVICES for rule in RULES for _, line in choices(device, rule))
        given.dump.write_text("".join(f"{line}\n" for line in every))
        return 0
    before = read() if FILE.exists() else {"choices": {}}
    now: dict[str, Any] = {name: made() for name, made in STATIC.items()}
    chosen = {f"{device}, {rule}": digests(device, rule) for device in DEVICES for rule in RULES}
    now["choices"] = before["choices"] | {key(): chosen}
    if given.update:
        FILE.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    differ = [name for name in STATIC if before[name] != now[name]]
    for where, groups in chosen.items():
        known = before["choices"].get(key(), {}).get(where, {})
        differ += [f"choices: {where}, {group}" for group, digest in groups.items() if known.get(group) != digest]
    print("\n".join(f"differs: {name}" for name in differ) or "nothing differs from the record")
    return 1 if differ else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_GEMM_CACHE_DIR"] = empty
        sys.exit(main())
