"""Runs the tests of tests/gpu that show the kernels to be right, and prints one table: `make gpu-battery`.

The tests share the GPU and the cores. A test that has not ended after --budget seconds has failed. Some tests plant a
bug, which a check must find. Writes perf/results/<gpu>/battery-<Triton>.json. Exit status: 1 if a test failed or a
planted bug was not found, 3 if nothing failed but a check could not run here, 2 for a mistake in the call.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree

import torch

from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown, write_json
from perf.common.formats import Cell
from perf.measure import environment
from perf.measure.environment import RESULTS, ROOT, Records

BUDGET_S, GRACE_S = 570, 60  # the grace is for pytest to write what the tests said
MEMORY_OF_EACH = 5 << 30  # bytes of the GPU's memory for each process of tests
TESTS = ROOT / "tests" / "gpu"
JUNIT = ROOT / "build" / "battery.xml"
# Name, what is tried, and a regular expression of the tests' names; what takes longest first.
SECTIONS = {
    "fuzzing": ("GEMMs drawn at random, called in any order, against fp64", r"fuzz_gpu.*for_minutes"),
    "numerics": ("every kernel, precision and bit class on hard matrices, against a bound", r"test_accuracy_gpu"),
    "ConSan": ("shared memory and barriers, of kernels and rungs without PTX of their own", r"test_consan"),
    "large offsets": ("operands and results that span more than 2^31 elements, and bytes", r"windows_gpu.*(span|far)"),
    "windows": (
        "operands amid NaN, results amid sentinels, 0 to 3 elements beyond 16 bytes",
        r"windows_gpu.*(outside|write|read)",
    ),
    "concurrency": (
        "threads, streams, graphs, processes, reused addresses",
        r"(threads|load)_gpu.*::(?!.*another_gpu)",
    ),
    "bad input": ("every wrong argument raises an error, and the GPU's context survives", r"bad_input_gpu"),
    "memcheck": ("no access outside of allocations, of kernels in every variant, rungs and twins", r"test_.*memcheck"),
    "synccheck": ("every barrier, of the same kernels as memcheck", r"test_.*synccheck"),
}
PLANTED = re.compile(r"planted|sees_a")  # in the name of a test that plants a bug
COUNT = re.compile(r"^([\d,]+) (?:products|launches)\b", re.MULTILINE)  # what a test prints that makes many
FAILED = re.compile(r"^FAILED:? (.*)", re.MULTILINE)
FOUND = re.compile(r"^(?:E\s+)?=+ *((?:Invalid|Barrier error|Error:).*)", re.MULTILINE)  # by compute-sanitizer

Record = Mapping[str, Any]


def run(chosen: Sequence[str], cores: int, budget: float) -> None:
    """Runs the tests of these sections, and writes JUNIT; leaves no process behind."""
    JUNIT.parent.mkdir(parents=True, exist_ok=True)
    JUNIT.unlink(missing_ok=True)
    tests, end = " ".join(SECTIONS[name][1] for name in chosen), str(time.time() + budget)
    surroundings = environment.of_child(OMP_NUM_THREADS="1", BATTERY=tests, BATTERY_DEADLINE=end)  # for tests/gpu
    surroundings.pop("TRITON_INTERPRET", None)
    options = ["--tier=full", "-q", "-n", str(cores), "-p", "no:cacheprovider", "-o", "junit_logging=system-out"]
    command = [sys.executable, "-m", "pytest", str(TESTS), *options, f"--junit-xml={JUNIT}"]
    process = subprocess.Popen(command, cwd=ROOT, env=surroundings, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(budget + GRACE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def row(name: str, cases: Sequence[ElementTree.Element]) -> dict[str, Any]:
    """A section's row of the record, of its cases in JUNIT."""
    found: dict[str, Any] = {"name": name, "what": SECTIONS[name][0], "cases": 0, "failures": []}
    found |= {"planted": 0, "found": 0, "not_run": {}, "seconds": 0.0}
    times: list[float] = []  # when tests began and ended
    for case in cases:
        test, output = case.attrib["name"], case.findtext("system-out", "")
        failed = next((each for each in case if each.tag in ("failure", "error")), None)
        for begin in case.iterfind("properties/property[@name='begin']"):
            times += [float(begin.attrib["value"]), float(begin.attrib["value"]) + float(case.attrib["time"])]
        if (skipped := case.find("skipped")) is not None:
            found["not_run"][test.partition("[")[0]] = skipped.attrib.get("message", "")
            continue
        if PLANTED.search(test):
            found["planted"] += 1
            found["found"] += failed is None
        else:
            found["cases"] += sum(int(number.replace(",", "")) for number in COUNT.findall(output)[-1:]) or 1
        if failed is not None:
            detail = FOUND.search(failed.text or "")
            words = detail[1] if detail else failed.attrib.get("message", "").partition("\n")[0][:300]
            found["failures"] += [f"{test}: {words}" for words in dict.fromkeys(FAILED.findall(output)) or [words]]
    if not cases:
        found["failures"] = ["no test has ended"]
    return found | {"seconds": round(max(times, default=0.0) - min(times, default=0.0), 1)}


def battery(chosen: Sequence[str], cores: int, budget: float) -> dict[str, Any]:
    """A record, without its environment."""
    begin = time.monotonic()
    run(chosen, cores, budget)
    every = list(ElementTree.parse(JUNIT).iter("testcase")) if JUNIT.exists() else []
    rows = [
        row(name, [x for x in every if re.search(SECTIONS[name][1], f"{x.get('classname')}::{x.get('name')}")])
        for name in chosen
    ]
    return {"sections": rows, "cores": cores, "seconds": round(time.monotonic() - begin, 1)}


def status(record: Record) -> int:
    """The command's exit status."""
    if any(section["failures"] for section in record["sections"]):
        return 1
    return 3 if any(section["not_run"] for section in record["sections"]) else 0


# Of a section, and of all.
COLUMNS: dict[str, Callable[[Mapping[str, Any]], Cell]] = {
    "check": lambda x: x["name"],
    "what is tried": lambda x: x["what"],
    "cases": lambda x: f"{x['cases']:,}" if x["cases"] or not x["not_run"] else "**not run**",
    "failures": lambda x: f"**{len(x['failures'])}**" if x["failures"] else "0" if x["cases"] else None,
    "planted bugs found": lambda x: f"{x['found']} of {x['planted']}" if x["planted"] else None,
    "seconds": lambda x: f"{x['seconds']:.0f}",
}


def text(record: Record) -> str:
    """The table of one record, and what could not run or failed."""
    sections = record["sections"]
    total = {"name": "all", "what": None, "failures": [words for x in sections for words in x["failures"]]}
    total |= {key: sum(x[key] for x in sections) for key in ("cases", "found", "planted")}
    table = formats.table_by(COLUMNS, [*sections, {**total, "not_run": {}, "seconds": record["seconds"]}])
    notes = []
    for x in sections:
        notes += [f"- Not run: {x['name']}, {test}: {why}" for test, why in x["not_run"].items()]
        notes += [f"- Failed: {x['name']}, {words}" for words in x["failures"]]
    return "\n\n".join(filter(None, [table, "\n".join(notes)]))


NOTHING = "No battery is committed yet; `make gpu-battery` runs it."
RECORDS = Records("battery-{triton}.json", "battery", NOTHING, text)


def at_once() -> int:
    """How many processes of tests the cores and the GPU's memory allow."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_EACH))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser("battery", __doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--budget", type=args.count, default=BUDGET_S, help="seconds after which what runs is ended")
    parser.add_argument("--cores", type=args.count, help="processes at a time; default: what cores and memory allow")
    parser.add_argument("--out", type=args.path, metavar="FILE", help="where the record goes, instead")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    made = environment.describe("battery")
    record = {"environment": made, **battery(given.only or list(SECTIONS), given.cores or at_once(), given.budget)}
    print(f"\n{text(record)}\n\nThe output of each test: {shown(JUNIT)}")
    version = ".".join(str(made["triton"]).split(".")[:2])
    out = given.out or (None if given.only else RECORDS.path(RESULTS, {**made, "triton": version}))
    if out is not None:
        write_json(out, record)
        print(f"\nWritten to {shown(out)} after {record['seconds']:.0f} s; `python -m perf.pages` shows it.")
    return status(record)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
