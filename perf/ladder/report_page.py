"""The report's page, `report.md`: what ran, on what, tables, pictures and findings. All of it from the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from perf.common import formats
from perf.ladder import autotuner, static, tables, views
from perf.ladder.drawings.pictures import shown
from perf.ladder.record import COUNTERS, Counters, Record
from perf.ladder.rungs_and_twins import MODE_TITLES
from perf.measure.environment import origin
from triton_gemm.ladder import LADDER

FILE = "report.md"
RUNGS_AND_TWINS = (
    "Rungs are kernels in Triton. Most have a *twin*, a kernel in CUDA C++ (`reference_cuda/`) that teaches the rung's "
    "idea and no other, without inline PTX. A rung that is 4 times as fast as its twin shows what Triton's compiler "
    "adds to that idea; it does not show that Triton is faster than CUDA. CUDA at its best is cuBLAS, with which every "
    "rung is compared as well."
)
UNALIGNED = (
    "Hollow marks on grey in the pictures below: {sizes}. Triton compiles a kernel anew for sizes and strides that are "
    "multiples of 16, and only then knows that every row starts on 16 bytes. Elsewhere, loads and stores through "
    "pointers move one element at a time instead of 16 bytes. `cp.async` takes 4 bytes or more, so it cannot copy "
    "single 16-bit elements, and k08 and k09 lose their pipeline as well. k10 and k11 keep theirs: TMA needs rows that "
    "are a multiple of 16 bytes apart, which it is told at run time. The marks are not on the lines, because a line "
    "between two multiples of 16 says nothing of the other sizes."
)


def write(record: Record, pictures: Iterable[Path]) -> Path:
    """Writes the page into the folder of its pictures."""
    target = record.folder / FILE
    target.write_text(text(record, pictures))
    return target


def text(record: Record, pictures: Iterable[Path]) -> str:
    """The page, in the same folder as its pictures."""
    names = {path.name for path in pictures}
    sections = _gpu_sections(record, names) if record.environment["gpu"] else _cpu_sections(record, names)
    return "\n\n".join(sections) + "\n"


def _picture(name: str, says: str, pictures: set[str]) -> Iterator[str]:
    if name in pictures:
        yield f"![{says}]({name})"


def _gpu_sections(record: Record, pictures: set[str]) -> Iterator[str]:
    yield f"# The ladder on {record.environment['gpu']}"
    yield RUNGS_AND_TWINS
    yield from _findings(record)
    if views.ladder(record):
        size = views.ladder_size(record)
        yield f"## The ladder at M = N = K = {size}"
        yield from _picture("ladder.png", "TFLOPS of every rung beside its CUDA twin and cuBLAS", pictures)
        yield tables.ladder(record)
        yield (
            "The twin is the fastest variant of those that the rung has. *Error* is the norm of C minus the fp64 "
            "product over the norm of the latter. *Of cuBLAS* divides the TFLOPS by cuBLAS's in the same precision, "
            "both by their median times. The findings above take the median of ratios round by round, `ratio` in "
            "`results.json`. The two differ where a kernel is several times as slow as cuBLAS: such kernels are timed "
            "apart from the fast ones, and in their rounds the GPU is cooler and cuBLAS faster. fp16 products are "
            "summed in fp32, and the CUDA twins write fp32."
        )
        yield tables.configurations(record)
        yield "*Call* is what Python pays for one call, measured apart from kernel time."
    if views.factors(record):
        yield "## Predicted and measured gains"
        yield from _picture("factors.png", "predicted and measured factor of every rung", pictures)
        yield tables.factors(record)
    yield from _tunings(record, pictures)
    unaligned = sorted({s for m in views.modes(record) for s in views.squares(record, m) if not views.aligned(s)})
    if unaligned:
        yield "## Sizes that are no multiple of 16"
        yield UNALIGNED.format(sizes=", ".join(map(str, unaligned)))
    for mode in views.modes(record):
        yield f"## {MODE_TITLES[mode]} against size"
        yield from _picture(f"sweep-{mode}.png", f"TFLOPS against size, {MODE_TITLES[mode]}", pictures)
        yield tables.sweep(record, mode)
        yield tables.errors(record, mode)
    yield from _ceilings(record, pictures)
    yield from _experiments(record, pictures)
    yield from _made(record)


def _tunings(record: Record, pictures: set[str]) -> Iterator[str]:
    tunings = autotuner.shown(record)
    if not tunings:
        return
    yield "## What the autotuner timed"
    yield autotuner.HOW
    yield origin([tuning.made for tuning in tunings], "ladder")
    for tuning in tunings:
        yield f"### {tuning.rung.id} {tuning.rung.title}"
        yield from _picture(autotuner.picture(tuning.rung), f"every configuration of {tuning.rung.id}", pictures)
        yield autotuner.says(tuning)
        yield tables.tuning(tuning)


def _findings(record: Record) -> Iterator[str]:
    outcomes = list(views.outcomes(record))
    if outcomes:
        yield "## Findings"
        yield "\n".join(
            f"- {'met' if outcome.met else '**missed**'}: {outcome.what} ({outcome.measured:.2f})"
            for outcome in sorted(outcomes, key=lambda outcome: outcome.met)
        )
    off = [f for f in views.factors(record) if f.measured and not 0.8 <= f.measured / f.predicted <= 1.25]
    if off:
        yield "Predictions off by more than a quarter:\n\n" + "\n".join(
            f"- {f.rung.name} over {f.over}: {f.predicted:g} predicted, {f.measured:.2f} measured" for f in off
        )
    doubtful = list(views.suspicious(record))
    if doubtful:
        yield "Too good to be believed before it is explained:\n\n" + _bullets(doubtful)
    if record.failures():
        yield "## Failed\n\nThese are not plotted:\n\n" + _bullets(record.failures())
    if views.unmeasured(record):
        yield "## Not measured\n\n" + _bullets(views.unmeasured(record))


def _ceilings(record: Record, pictures: set[str]) -> Iterator[str]:
    bandwidth, roofs = views.roofs(record)
    if not roofs:
        return
    yield "## Roofline"
    yield from _picture("roofline.png", "every rung under the measured ceilings", pictures)
    rows: list[tuple[str, str | None]] = [(roof.label, formats.number(roof.tflops)) for roof in roofs]
    yield formats.table(["ceiling", "TFLOPS"], rows)
    if bandwidth:
        yield f"A copy moves {bandwidth:.2f} TB/s, read and written together."


def _experiments(record: Record, pictures: set[str]) -> Iterator[str]:
    sources = views.measured_experiments(record)
    if sources:
        yield "## The published experiments"
        yield (
            "Each source's kernels, written afresh in `reference_cuda/`, on the source's own shape, called again and "
            "again on the same matrices as the sources do, so that L2 is hot. The published figures come from other "
            "GPUs: speed-ups over the source's own naive kernel compare, times do not."
        )
    for source in sources:
        yield f"### {source.id}: {source.source}, {source.size} x {source.size} x {source.size}"
        yield from _picture(f"experiment-{source.id}.png", f"speed-ups of {source.id}", pictures)
        yield tables.experiment(record, source)
    counters = record.experiments.get(COUNTERS)
    if isinstance(counters, Counters):
        yield "### What S3 teaches of memory, and the counters"
        yield tables.counters(counters)
    rounding = record.tf32_rounding
    if rounding:
        yield f"## Who rounds TF32 operands, {rounding.size} x {rounding.size} x {rounding.size}"
        yield tables.tf32_rounding(rounding)


def _cpu_sections(record: Record, pictures: set[str]) -> Iterator[str]:
    yield "# The ladder without a GPU"
    yield (
        "Nothing here is a timing. What kernels compute was found with Triton's interpreter, what they become with its "
        "compiler; both need no GPU."
    )
    if record.failures():
        yield "## Failed\n\n" + _bullets(record.failures())
    ran = {facts.rung for facts in record.static.values()} | {row.rung for row in record.interpreter.values()}
    drawings = [(rung, shown(rung.id, record.folder)) for rung in LADDER if rung.name in ran]
    if any(drawing for _, drawing in drawings):
        yield "## What the rungs do"
        yield from (f"### {rung.id} {rung.title}\n\n{drawing}" for rung, drawing in drawings if drawing)
    if record.interpreter:
        yield "## Right or wrong: every rung in the interpreter, against fp64"
        yield tables.interpreter(record)
        missing = [rung.name for rung in LADDER if not rung.interpretable]
        if missing:
            yield f"The interpreter cannot run Gluon: {', '.join(missing)} is only compiled here."
    if record.static:
        yield "## Static facts, not timings"
        yield from _picture("static-resources.png", "registers and shared memory by architecture", pictures)
        yield tables.static_facts(record)
        yield from _picture("static-ceilings.png", "predicted ceilings by architecture", pictures)
        yield (
            "The ceiling is arithmetic (`perf/ladder/prediction.py`): the slowest of the units, of shared memory and "
            "of L2, by the bytes that a tile asks of each for its FLOP, on a typical GPU of the architecture at the "
            "clock of its data sheet's peak, which light loads exceed. Latency, waves of tiles and power are left out."
        )
        yield tables.instruction_mix(record)
        yield f"## Every configuration that the autotuner explores, {static.TUNED_ARCHITECTURE}"
        yield tables.every_configuration(record)
    yield from _made(record)


def _made(record: Record) -> Iterator[str]:
    environment = record.environment
    clocks = [clock for problem in record.problems.values() if (clock := problem.clocks_after.clocks_sm)]
    facts = {
        "date": environment["date"],
        "GPU": environment["gpu"],
        "driver": environment.get("driver"),
        "power limit": f"{environment['power_limit_w']:g} W" if environment.get("power_limit_w") else None,
        "SM clock after each measurement": f"{min(clocks)} to {max(clocks)} MHz" if clocks else None,
        "torch": environment["torch"],
        "Triton": environment["triton"],
        "CUDA": environment["cuda"],
        "Python": environment["python"],
    }
    yield "## How it was made"
    lines = [f"{name}: {value}" for name, value in facts.items() if value is not None]
    yield _bullets([*lines, origin([environment], "ladder").removesuffix(".")])
    if environment["gpu"]:
        yield (
            "Normal random data from fixed seeds. Every provider was checked against fp64 before it was timed: the "
            "error at most twice torch's own in the same precision, and every element within its bound. Kernel time is "
            "the replay of a CUDA graph, over operand sets larger than L2 unless *hot* is said; providers take turns "
            "on settled clocks, and the figure is the median over rounds. `results.json` has the 20th and 80th "
            "percentile, rounds, repeats and all measures of the error of each provider, and clocks, temperature and "
            "power before and after."
        )


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
