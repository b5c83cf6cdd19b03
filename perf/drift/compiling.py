"""Compiles cases with the Triton of this interpreter, in processes of their own: a compiler may abort."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from perf.drift import cases
from perf.drift.record import GPUS, MAIN, Row
from triton_gemm.hardware.device_model import named_device
from triton_gemm.runtime import aot

Work = Callable[[str], Row]
ENDED = "the compiler ended its process"


def compile_case(name: str, gpu: str = GPUS[0]) -> Row:
    """What a case becomes, or why it does not compile."""
    try:
        made = aot.compile_launch(cases.every(gpu)[name].captured(), named_device(gpu).capability)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return Row(error=f"{type(error).__name__}: {first}"[:120])
    counts = {name: made.instructions[name] for name in MAIN if made.instructions[name]}
    return Row(
        made.registers, made.spills, made.shared, made.instructions.total(), counts, machine_code(made.asm["sass"])
    )


def machine_code(sass: str) -> str:
    """The start of the SHA-256 of a kernel's instructions and their encoding, whatever the kernel is called."""
    lines = [line.strip() for line in sass.splitlines() if line.lstrip().startswith("/*")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def compile_all(names: Iterable[str], jobs: int, work: Work = compile_case) -> Iterator[tuple[str, Row]]:
    """Each name with its row, as they end. What is left when a process dies is compiled one by one, so that it is known
    which case the compiler cannot survive."""
    left = dict.fromkeys(names)
    with _pool(jobs) as pool:
        begun = {pool.submit(work, name): name for name in left}
        for done in as_completed(begun):
            try:
                row = done.result()
            except BrokenProcessPool:
                break
            del left[begun[done]]
            yield begun[done], row
    yield from _one_by_one(list(left), work)


def _one_by_one(names: Sequence[str], work: Work) -> Iterator[tuple[str, Row]]:
    begun = 0
    while begun < len(names):
        with _pool(1) as pool:
            for name in names[begun:]:
                begun += 1
                try:
                    row = pool.submit(work, name).result()
                except BrokenProcessPool:
                    yield name, Row(error=ENDED)
                    break
                yield name, row


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
