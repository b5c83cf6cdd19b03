"""What the battery is made of: sections of commands of this repository, which say what they tried and what failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CALLS, FAR_CALLS = 10_000, 1_500  # in windows, and of operands that span more than 2^31 elements
SHARES = 6  # processes for the kernels under compute-sanitizer, and for the windows
FUZZING = 0.4  # of the budget


@dataclass(frozen=True)
class Job:
    """A command. name: what it is in its section; cores: that it keeps busy; finds: a regular
    expression that the output of a job with a planted bug must match; such a job must fail."""

    name: str
    command: tuple[str, ...]
    cores: int = 1
    finds: str | None = None


@dataclass(frozen=True)
class Section:
    """name: for --only and the table; what: is tried, in words for readers of the table."""

    name: str
    what: str
    jobs: tuple[Job, ...]


def _module(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", *words


def _tests(*files: str) -> tuple[str, ...]:
    options = ("-q", "-rfE", "--tier=full", "-p", "no:cacheprovider", "-n", "0")
    return _module("pytest", *(f"tests/gpu/{file}" for file in files), *options)


def _planted(bug: str, finds: str) -> Job:
    """In windows."""
    return Job(bug, _module("tests.windows", "--planted", bug, "--calls", "5"), finds=finds)


def _sanitized(tool: str, bugs: dict[str, str]) -> tuple[Job, ...]:
    """Everything under compute-sanitizer, and bugs with what it says of them."""

    def job(*words: str, finds: str | None = None) -> Job:
        return Job(" ".join(words[:1] + words[2:]), _module("tests.gpu.sanitize", tool, *words), finds=finds)

    return (
        *(job("kernels", "--share", f"{i + 1}/{SHARES}") for i in range(SHARES)),
        *(job(what) for what in ("rungs", "twins")),
        *(job(bug, finds=words) for bug, words in bugs.items()),
    )


def sections(cores: int, budget: float, folder: Path) -> tuple[Section, ...]:
    """All of them, for so many cores, and seconds for all; what takes longest first, and what compiles before others
    that find its kernels in Triton's cache. folder: for what commands write."""
    some = max(1, cores // 4)
    accuracy = _module("perf.accuracy", "--jobs", str(some), "--out", str(folder / "accuracy.json"))
    fuzz = _module("tests.fuzz", "--jobs", str(some), "--minutes", f"{FUZZING * budget / 60:.2f}")
    windows = tuple(
        Job(
            f"{i + 1}/{SHARES}",
            _module("tests.windows", "--calls", str(CALLS // SHARES + 1), "--share", f"{i + 1}/{SHARES}"),
        )
        for i in range(SHARES)
    )
    consan_of = _module("tests.gpu.sanitize", "consan")
    return (
        Section(
            "fuzzing", "products drawn at random, called in any order, against fp64", (Job("fuzz", fuzz, cores=some),)
        ),
        Section(
            "numerics",
            "every kernel, precision and class of bits on hard matrices, against a bound",
            (Job("accuracy", accuracy, cores=some),),
        ),
        Section(
            "ConSan",
            "shared memory and barriers, of kernels and rungs without PTX of their own",
            (
                Job("kernels", (*consan_of, "kernels", "--jobs", str(some)), cores=some),
                Job("race", (*consan_of, "race"), finds="pending access|outstanding"),
            ),
        ),
        Section(
            "large offsets",
            "operands and results that span more than 2^31 elements, and bytes",
            (
                Job("a, b and c", _module("tests.windows", "--far", "a", "b", "c", "--calls", str(FAR_CALLS))),
                _planted("far", "illegal memory access|are wrong"),
            ),
        ),
        Section(
            "windows",
            "operands amid NaN, results amid sentinels, 0 to 3 elements beyond 16 bytes",
            (
                *windows,
                _planted("write", "no result's"),
                _planted("read", "are wrong"),
            ),
        ),
        Section(
            "concurrency",
            "threads, streams, graphs, processes, addresses used again",
            (
                Job("threads", _tests("test_threads_gpu.py"), cores=2),
                Job("load", _tests("test_load_gpu.py"), cores=4),
            ),
        ),
        Section(
            "bad input",
            "every wrong argument: refused, and the context lives on",
            (Job("arguments", _tests("test_bad_input_gpu.py")),),
        ),
        Section(
            "memcheck",
            "no access outside of allocations, of kernels in every form, rungs and twins",
            _sanitized("memcheck", {"read": "Invalid __global__ read", "write": "Invalid __global__ write"}),
        ),
        Section(
            "synccheck",
            "every barrier, of the same as memcheck",
            _sanitized("synccheck", {"barrier": "Barrier error detected"}),
        ),
    )


def named(found: Sequence[Section], only: Sequence[str]) -> list[Section]:
    """Those of these names, or all; KeyError for one that is none's."""
    by_name = {section.name: section for section in found}
    return [by_name[name] for name in only] if only else list(found)
