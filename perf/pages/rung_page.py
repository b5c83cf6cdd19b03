"""A rung's page: its header, drawings and source, what was measured, and what readers guess first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from perf.common import formats
from perf.common.files import link
from perf.ladder import autotuner, clock_model, counted, tables, views
from perf.ladder.drawings import pictures
from perf.ladder.findings import SMALL
from perf.ladder.player import PLAYED
from perf.ladder.record import Record, Result
from perf.measure import environment
from perf.pages import exercises, limits, rung_diff
from perf.pages.results import Results
from triton_gemm.hardware.gpus import named_device
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import spelled

NOTHING = "No measurement is committed yet; `make report` on a GPU makes one."
TUNED = (
    "The tuner times the kernel alone, and does not wait until the GPU's clock has settled. *Measured* is the whole "
    "rung, with what it does to its operands first, in turns with cuBLAS after the clock has settled: the two differ. "
    "Only *Measured* compares rungs: one that is faster there may be slower here."
)
MODELLED = (
    "*Modelled, scaled*: the model's clocks without power, scaled so that the best of them have the speed of the "
    "fastest. The explorer's *modelled* is not scaled, and is at most what power allows."
)
WIDE = 1.02  # that runs of a configuration spread
# What the player shows of the rungs of PLAYED, where it is no clock.
PLAYS = {
    **dict.fromkeys(("k01", "k02"), "a warp's load, lane by lane"),
    **dict.fromkeys(("k03", "k04"), "which tiles run at once"),
}
# Where docs/glossary.md explains what a rung's page leaves to it.
SECTIONS = {
    "the-gpu": ("bank", "wavefront", "wgmma", "swizzle", "warpgroup"),
    "kernels": ("mbarrier", "predicate"),
    "the-multiplication": ("K-major",),
    "measuring": ("It waits for",),
}
TERMS = {term: section for section, terms in SECTIONS.items() for term in terms}
PAGE = environment.ROOT / "docs" / "ladder.md"
RUNG_PAGES = environment.ROOT / "docs" / "ladder"
HEADER_OF_A_SECTION = ("Changes", "Why", "Requires")


def rung_page(rung: Rung, results: Results, folder: Path) -> str:
    """A rung's page: its neighbours and exercises, its header, its drawings, its source against the rung before and
    whole, what was measured, and what tuning timed."""
    files = [f"triton_gemm/ladder/{rung.name}.py", *(f"reference_cuda/{stem}.cu" for stem in rung.twins)]
    sources = ", ".join(f"[`{Path(file).name}`]({link(environment.ROOT / file, folder)})" for file in files)
    named = exercises.of(rung, folder)
    source = f"Source: {sources}{exercises.spoils(rung)}."
    lines = [_neighbours(rung, folder), source + (f" Exercises: {named}." if named else "")]
    lines += [f"**{name}** {rung.header[name]}" for name in HEADER_OF_A_SECTION]
    every = f"{link(PAGE, folder)}#what-every-kernel-has"
    lines += [pictures.shown(name, folder) for name in pictures.of(rung.id)]
    shown = PLAYS.get(rung.id, "loads and products over time")
    lines += [f"To play {shown}: `build/player.html#{rung.id}`, which `make explore` writes."] * (rung.id in PLAYED)
    lines += filter(None, [rung_diff.difference(rung), rung_diff.whole(rung, every)])
    measured = [line for record in results.records for line in _measured(rung, record)]
    over = f"times as fast as {rung.predicted[0]}" if rung.predicted else "TFLOPS, at 4096 x 4096 x 4096"
    lines.append(f"<details><summary>Guess first: how many {over}? What was predicted, and what came out</summary>")
    lines.append(f"**Predicted** {rung.header['Predicts']}")
    lines += [f"**Measured** {line}" for line in measured or [NOTHING]]
    lines += [f"**Came out** {rung.header['Came out']}"] if "Came out" in rung.header else []
    lines += ["</details>", f"**Tuning** {rung.header['Tuning']}"]
    tuned = [line for record in results.records for line in _tuned(rung, record)]
    lines += ["<details><summary>What the tuner timed</summary>", TUNED, *tuned, "</details>"] if tuned else []
    bound = [f"**Bound by** {rung.header['Bound by']}"]
    bound += [line for record in results.records for line in _counted(rung, record)]
    lines += ["<details><summary>Guess first: what limits it?</summary>", *bound, "</details>"]
    lines.append(f"**Next** {rung.header['Next']}")
    return "\n\n".join(_explained(lines, folder))


def _explained(lines: Sequence[str], folder: Path) -> Iterator[str]:
    """The lines, whose fields link a term of the glossary where a page first has it."""
    left = dict(TERMS)
    for line in lines:
        for term in [term for term in left if line.startswith("**")]:
            target = rf"[\1]({link(PAGE.with_name('glossary.md'), folder)}#{left[term]})"
            line, found = re.subn(
                rf"(?<![\w`\[])(`{term}`|{term}s?)(?![\w`])(?=[^`]*(?:`[^`]*`[^`]*)*$)", target, line, count=1
            )
            if found:
                del left[term]
        yield line


def page(rung: Rung, folder: Path) -> str:
    """A link to a rung's page."""
    return f"[{rung.id} {rung.title}]({link(RUNG_PAGES / f'{rung.id}.md', folder)})"


def _neighbours(rung: Rung, folder: Path) -> str:
    """Links to the ladder, the rung before and the rung after."""
    place = LADDER.index(rung)
    first = f"[page 0]({link(RUNG_PAGES / 'limits.md', folder)}), how fast could it be"
    before = [f"before it {page(LADDER[place - 1], folder) if place else first}"]
    after = [f"after it {page(one, folder)}" for one in LADDER[place + 1 : place + 2]]
    return ", ".join([f"[The ladder]({link(PAGE, folder)})", *before, *after]) + "."


def _tuned(rung: Rung, record: Record) -> Iterator[str]:
    """What the autotuner timed on one GPU, in words and in a table; nothing if that is not recorded."""
    for tuning in autotuner.shown(record):
        if tuning.rung == rung:
            yield autotuner.summary(tuning) + _tuned_anew(tuning, record)
            yield f"{tables.tuning(tuning)}\n\n{MODELLED}"


def _tuned_anew(tuning: autotuner.Tuning, record: Record) -> str:
    """How far the runs of the fastest spread, if far; and that *Measured* has another configuration, if so, and why."""
    best, spread = tuning.fastest, ""
    if best.high > WIDE * best.low:
        spread = f" The runs of the fastest spread from {best.low:.0f} to {best.high:.0f} TFLOPS, the middle 60 %. "
        spread += "Their clocks were not recorded, so smaller differences say little."
    step = next((step for step in views.ladder(record) if step.rung == tuning.rung), None)
    chosen = next((one for one in tuning.timed if step and str(one.config) == step.own.config), tuning.fastest)
    if chosen is best:
        return spread
    share = f"{100 * tuning.share(chosen):.1f} %"
    text = f"whose own tuning chose `{spelled(chosen.config)}`: here {share} of that speed."
    return f"{spread} *Measured* is from another run, {text}"


def _measured(rung: Rung, record: Record) -> Iterator[str]:
    """What a rung did on one GPU, in words; nothing if it was not asked."""
    step = next((step for step in views.ladder(record) if step.rung == rung), None)
    if step is None:
        return
    on = f"on {_where(record, record.environment)}:"
    if step.tflops is None:
        yield f"{on} {step.own.failed or step.own.absent}"
        return
    size = views.ladder_size(record)
    text = f"{on} {formats.number(step.tflops)} TFLOPS at {size} x {size} x {size}"
    share = step.share(rung.name)
    if share:
        text += f", {formats.percent(share)} of cuBLAS"
    peak = _peak(record, step.problem.mode)
    if share and peak:
        text += f", which holds {formats.percent(step.tflops / share / peak)} of the units' peak"
    if step.over_twin:
        text += f"; {step.over_twin:.2f} times its fastest twin, `{step.twin}`"
    factor = next((factor for factor in views.factors(record) if factor.rung == rung), None)
    if factor and factor.measured:
        text += f"; {factor.measured:.2f} times {factor.over}, where {factor.predicted:g} was predicted"
        wanted = step.tflops / factor.measured * factor.predicted
        of = [f"{formats.number(wanted)} TFLOPS"]
        of += [f"{formats.percent(wanted * share / step.tflops)} of cuBLAS"] if share else []
        of += [f"above the units' peak of {formats.number(peak)} TFLOPS"] if peak and wanted > peak else []
        text += f" ({', '.join(of)})"
    config = step.own.config
    text += "." + (f" Configuration: {_in_words(config)}{_at_once(step.own, record)}." if config else "")
    before = LADDER[max(0, LADDER.index(rung) - 1)]
    small = views.squares(record, step.problem.mode).get(SMALL) if rung.id in clock_model.PERSISTENT else None
    speeds = [small.tflops(one.name) or 0.0 for one in (before, rung)] if small else []
    if small and all(speeds):
        times = f"{speeds[1] / speeds[0]:.2f} times {before.id}"
        text += f" At {SMALL} x {SMALL} x {SMALL} it reaches {formats.number(speeds[1])} TFLOPS, {times}"
        text += f", with {_in_words(small.providers[rung.name].config or '')}."
    yield text


def _peak(record: Record, mode: str) -> float | None:
    """TFLOPS of page 0, of a GPU that has a data sheet."""
    with suppress(ValueError):
        return limits.peak(named_device(views.gpu(record)), mode)
    return None


def _counted(rung: Rung, record: Record) -> Iterator[str]:
    """What Nsight Compute counted of a rung on one GPU, in words."""
    for one in counted.counted(record):
        if one.rung == rung:
            where = _where(record, one.launch.made or record.environment)
            speed = f"in one launch at {formats.number(one.tflops)} TFLOPS"
            text = f"**Counted** on {where}, {speed}: {counted.sentence(one)}"
            tflops = next((step.tflops for step in views.ladder(record) if step.rung == rung), None)
            with suppress(ValueError):
                text += counted.beside(one, tflops, named_device(views.gpu(record))) * (rung.precision != "ieee")
            yield text


def _where(record: Record, made: environment.Environment) -> str:
    return f"{environment.short(views.gpu(record))}, Triton {made['triton']}"


def _at_once(own: Result, record: Record) -> str:
    """A thread's registers, and how many programs an SM has room for."""
    warps = re.search(r"(\d+) warps", own.config or "")
    if not (own.registers and warps) or own.shared is None:
        return ""
    major, minor = record.environment["capability"]
    programs = clock_model.blocks_per_sm(own.registers, own.shared, int(warps[1]), (major, minor))
    return f"; {own.registers} registers a thread, room for {programs} program{'s' * (programs != 1)} on an SM"


def _in_words(config: str) -> str:
    """A record's `64x64x16 group 8 4 warps 1 stages`, as a sentence has it."""
    tile, _, rest = config.partition(" ")
    group, warps, stages = re.findall(r"(?:group (\d+) )?(\d+) warps (\d+) stages", rest)[0]
    of_group = f"GROUP_M {group}, " if group else ""
    kind = "tile" if "x" in tile else "strip of"
    return f"{kind} {tile}, {of_group}{warps} warps, {stages} stage{'s' * (stages != '1')}"


def picture(record: Record, file: str, text: str, folder: Path) -> str:
    return f"![{text} on {record.environment['gpu']}]({link(record.folder / file, folder)})"
