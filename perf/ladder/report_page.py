"""The report's page, `report.md`: what was found, pictures, tables, and on what it ran. All of it from the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from perf.common import formats
from perf.common.files import link
from perf.ladder import autotuner, counted, findings, static, tables, views
from perf.ladder.counters import LARGE_SIZE, SIZE
from perf.ladder.drawings.pictures import shown
from perf.ladder.record import Record, committed, latest
from perf.ladder.rungs_and_twins import MODE_TITLES
from perf.measure import environment
from perf.measure.environment import origin
from triton_gemm.ladder import LADDER

FILE, TUNING_FILE = "report.md", "autotuner.md"
RUNGS_AND_TWINS = (
    "Rungs are kernels in Triton. Most have a *twin*, a kernel in CUDA C++ (`reference_cuda/`) that teaches the rung's "
    "idea and no other, without inline PTX. A rung that is 4 times as fast as its twin shows what Triton's compiler "
    "adds to that idea; it does not show that Triton is faster than CUDA. CUDA at its best is cuBLAS, with which every "
    "rung is compared as well."
)
UNALIGNED = (
    "Hollow marks on grey in the pictures above: {sizes}. Triton compiles a kernel anew for sizes and strides that are "
    "multiples of 16, and only then knows that every row starts on 16 bytes. Elsewhere, loads and stores through "
    "pointers move one element at a time instead of 16 bytes. `cp.async` takes 4 bytes or more, so it cannot copy "
    "single 16-bit elements, and k08 and k09 lose their pipeline as well. Large tiles would spill, as each element "
    "wants an address: the tuner leaves most configurations of k05 to k09 out. k07 loads 16 bytes, as its copies are "
    "padded, and stores C element by element. k10 and k11 keep their pipeline: TMA needs rows that are a multiple of "
    "16 bytes apart, which it is told at run time. The marks are not on the lines, because a line between two "
    "multiples of 16 says nothing of the other sizes."
)


def write(record: Record, pictures: Iterable[Path]) -> Path:
    """Writes the page into the folder of its pictures, and that of the tunings if there are any."""
    for name, page in texts(record, pictures).items():
        (record.folder / name).write_text(page)
    return record.folder / FILE


def texts(record: Record, pictures: Iterable[Path]) -> dict[str, str]:
    """The pages by their names, in the same folder as their pictures."""
    names = {path.name for path in pictures}
    sections = _gpu_sections(record, names) if record.environment["gpu"] else _cpu_sections(record, names)
    pages = {FILE: sections, TUNING_FILE: _tunings(record, names)}
    joined = {name: "\n\n".join(parts) for name, parts in pages.items()}
    return {name: f"{page}\n" for name, page in joined.items() if page}


def _picture(name: str, text: str, pictures: set[str]) -> Iterator[str]:
    if name in pictures:
        yield f"![{text}]({name})"


def _gpu_sections(record: Record, pictures: set[str]) -> Iterator[str]:
    yield f"# The ladder on {record.environment['gpu']}"
    yield from _findings(record)
    size = views.ladder_size(record)
    if views.ladder(record):
        yield f"## The ladder at M = N = K = {size}"
        yield from _picture("ladder.png", "TFLOPS of every rung beside its CUDA twin and cuBLAS", pictures)
        yield RUNGS_AND_TWINS
    if views.factors(record):
        yield "## Predicted and measured gains"
        yield from _picture("factors.png", "predicted and measured factor of every rung", pictures)
    for mode in views.modes(record):
        yield f"## {MODE_TITLES[mode]} against size"
        yield from _picture(f"sweep-{mode}.png", f"TFLOPS against size, {MODE_TITLES[mode]}", pictures)
    unaligned = sorted({s for m in views.modes(record) for s in views.squares(record, m) if not views.aligned(s)})
    if unaligned:
        yield "## Sizes that are no multiple of 16"
        yield UNALIGNED.format(sizes=", ".join(map(str, unaligned)))
    yield from _ceilings(record, pictures)
    yield from _tables(record)
    yield from _experiments(record, pictures)
    yield from _made(record)


def _tables(record: Record) -> Iterator[str]:
    """The figures behind the pictures; those against size are folded."""
    yield "## Tables"
    if autotuner.shown(record):
        yield f"[What the autotuner timed]({TUNING_FILE}) has a page of its own."
    if views.ladder(record):
        yield f"### Of the ladder at M = N = K = {views.ladder_size(record)}"
        yield tables.ladder(record)
        yield (
            "The twin is the fastest variant of those that the rung has. *Error* is the norm of C minus the fp64 "
            "product over the norm of the latter. *Of cuBLAS* divides the TFLOPS by cuBLAS's in the same precision, "
            "both by their median times. Targets take the median of ratios round by round, `ratio` in "
            "`results.json`. The two differ where a kernel is several times as slow as cuBLAS: such kernels are timed "
            "apart from the fast ones, and in their rounds the GPU is cooler and cuBLAS faster. fp16 products are "
            "summed in fp32, and the CUDA twins write fp32."
        )
        yield tables.configurations(record)
        yield "*Call* is Python's time for one call, measured apart from kernel time."
    if views.factors(record):
        yield formats.folded("Predicted and measured gains", tables.factors(record))
    outcomes = list(views.outcomes(record))
    if outcomes:
        yield formats.folded(f"{len(outcomes)} targets", tables.targets(record))
    for mode in views.modes(record):
        sweep = f"Speeds against size, {MODE_TITLES[mode]}"
        yield formats.folded(sweep, tables.sweep(record, mode))
        yield formats.folded(f"Errors against size, {MODE_TITLES[mode]}", tables.errors(record, mode))
    if views.unmeasured(record):
        yield formats.folded("Not measured", _bullets(views.unmeasured(record)))


def _tunings(record: Record, pictures: set[str]) -> Iterator[str]:
    tunings = autotuner.shown(record)
    if not tunings:
        return
    yield f"# What the autotuner timed on {record.environment['gpu']}"
    yield f"Of [the ladder's report]({FILE}). {autotuner.HOW}"
    yield origin([tuning.made for tuning in tunings], "ladder")
    for tuning in tunings:
        yield f"## {tuning.rung.id} {tuning.rung.title}"
        yield from _picture(autotuner.picture(tuning.rung), f"every configuration of {tuning.rung.id}", pictures)
        yield autotuner.summary(tuning)
        yield tables.tuning(tuning)


def _findings(record: Record) -> Iterator[str]:
    """What was found, what was wrong, and the targets that are missed."""
    sentences = findings.sentences(record)
    missed = [outcome for outcome in views.outcomes(record) if not outcome.met]
    sentences += [f"Missed: {one.what} ({one.measured:.2f}, {one.wanted:.2f} wanted)." for one in missed]
    if sentences:
        yield "## What was found"
        yield _bullets(sentences)
    doubtful = list(views.suspicious(record))
    if doubtful:
        yield "Too good to be believed before it is explained:\n\n" + _bullets(doubtful)
    if record.failures():
        yield "## Failed\n\nThese are not plotted:\n\n" + _bullets(record.failures())


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
    if found := counted.table(record):
        yield f"## What bounds each rung at M = N = K = {SIZE}"
        yield from _picture(counted.PICTURE, "FLOP for each byte that DRAM and L2 carried", pictures)
        yield f"Nsight Compute counted. {origin(counted.made(record), 'ladder')}"
        yield found
    if order := counted.launch_order(record):
        yield f"### The order of tiles at M = N = K = {LARGE_SIZE}"
        yield order


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
        yield source.cited
        yield from _picture(f"experiment-{source.id}.png", f"speed-ups of {source.id}", pictures)
        yield tables.experiment(record, source)
    if loads := counted.loads(record):
        yield "### What S3 teaches of memory, and the counters"
        yield loads
    rounding = record.tf32_rounding
    if rounding:
        yield f"## Who rounds TF32 operands, {rounding.size} x {rounding.size} x {rounding.size}"
        yield tables.tf32_rounding(rounding)


def _cpu_sections(record: Record, pictures: set[str]) -> Iterator[str]:
    yield "# The ladder without a GPU"
    yield from _committed(record.folder)
    if record.failures():
        yield "## Failed\n\n" + _bullets(record.failures())
    yield "## What was found here, without a GPU"
    yield (
        "Nothing below is a timing. What kernels compute was found with Triton's interpreter, what they become with "
        "its compiler; both need no GPU."
    )
    yield from _rungs(record)
    if record.static:
        yield from _picture("static-resources.png", "registers and shared memory by architecture", pictures)
        yield (
            "The ceiling in the tables is arithmetic (`perf/ladder/clock_model.py`): the slowest of the units, issue "
            "slots, shared memory and L2, by what a tile asks of each for its FLOP, on a typical GPU of the "
            "architecture at the clock of its data sheet's peak. Latency, waves of tiles and power are left out. In "
            "fp32 each thread's words of shared memory count by themselves, without broadcasts within a warp, so a "
            "kernel may be faster (page 0 of the ladder)."
        )
    yield "## Tables"
    if record.interpreter:
        yield formats.folded(
            "Right or wrong: every rung in the interpreter, against fp64. In 16 bits the bound is mostly rounding",
            tables.interpreter(record),
        )
    if record.static:
        yield formats.folded("Static facts, not timings", tables.static_facts(record), tables.instruction_mix(record))
        every = f"Every configuration that the autotuner explores, {static.TUNED_ARCHITECTURE}"
        yield formats.folded(every, tables.every_configuration(record))
    yield from _made(record)


def _committed(folder: Path) -> Iterator[str]:
    """The ladder that was measured last, where one is committed, seen from the page's folder."""
    measured = latest(committed(environment.RESULTS))
    if measured is None:
        return
    gpu, where = measured.environment["gpu"], link(measured.folder, folder)
    yield f"## The ladder on {gpu}, not measured here"
    yield (
        f"This machine has no GPU. Measured on one {gpu} with Triton {measured.environment['triton']}, and committed "
        f"with the sources, M = N = K = {views.ladder_size(measured)}: [its whole report]({where}/{FILE}). "
        f"{origin([measured.environment], 'ladder')}"
    )
    yield _bullets(findings.sentences(measured))
    yield f"![TFLOPS of every rung on {gpu}, not on this machine]({where}/ladder.png)"


def _rungs(record: Record) -> Iterator[str]:
    """A line a rung, and its drawing."""
    static_facts = views.static_defaults(record)
    for rung in LADDER:
        tried = [row for row in record.interpreter.values() if row.rung == rung.name]
        ran = [row for row in tried if row.absent is None]
        facts = static_facts.get(rung.name, {}).get(static.TUNED_ARCHITECTURE)
        if not ran and rung.name not in static_facts:
            continue
        wrong = any(row.failed for row in ran)
        text = ["wrong in the interpreter" if wrong else "right in the interpreter"] if ran else []
        if ran and ran != tried:
            why = next(row.absent for row in tried if row.absent is not None)
            text += [f"in {len(tried) - len(ran)} of {len(tried)} cases not run: {why}"]
        text += [] if rung.interpretable else ["not run: the interpreter has no Gluon"]
        if facts and facts.registers is not None:
            of = f"{facts.target}, {facts.config}"
            text.append(f"{facts.registers} registers, {formats.kib(facts.shared) or 0} KiB shared memory ({of})")
        yield "\n\n".join(
            filter(None, [f"**{rung.id} {rung.title}**: {'; '.join(text)}.", shown(rung.id, record.folder)])
        )


def _made(record: Record) -> Iterator[str]:
    made = record.environment
    clocks = [clock for problem in record.problems.values() if (clock := problem.clocks_after.clocks_sm)]
    facts = {
        "date": made["date"],
        "GPU": made["gpu"],
        "driver": made.get("driver"),
        "power limit": f"{made['power_limit_w']:g} W" if made.get("power_limit_w") else None,
        "SM clock after each measurement": f"{min(clocks)} to {max(clocks)} MHz" if clocks else None,
        "torch": made["torch"],
        "Triton": made["triton"],
        "CUDA": made["cuda"],
        "Python": made["python"],
    }
    yield "## How it was made"
    lines = [f"{name}: {value}" for name, value in facts.items() if value is not None]
    yield _bullets([*lines, origin([made], "ladder").removesuffix(".")])
    if made["gpu"]:
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
