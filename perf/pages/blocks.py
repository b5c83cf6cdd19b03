"""The blocks of pages by NAME: each is Markdown that is made of the committed results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perf.bench import tables as bench_tables
from perf.bench.scores import Sweep
from perf.common import formats
from perf.common.files import link
from perf.ladder import autotuner, counted, published, report_page, views
from perf.ladder import tables as ladder_tables
from perf.ladder.record import Record
from perf.ladder.rungs_and_twins import MODES
from perf.measure import environment
from perf.measure.providers import CUBLAS
from perf.models import tables as model_tables
from perf.models.zoo import FIRST_MINUTE
from perf.pages import architecture, exercises, limits, speed_map, summary
from perf.pages.results import KINDS, Results
from perf.pages.rung_page import NOTHING, page, picture, rung_page
from triton_gemm.ladder import LADDER

NO_TUNING = "No tuning is committed yet; `make report ARGS=--tuning` on a GPU makes one."
NOT_COUNTED = "No counters are committed yet; `make report ARGS=--counters` on a GPU with Nsight Compute makes them."
BLOCK = re.compile(r"(<!-- results:([\w-]+)(?: on ([\w-]+))? -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
FEWEST_MODELS = 5  # cases of training without which a GPU has no line of whole models
Block = Callable[[Results, Path], str]


def filled(text: str, results: Results, folder: Path) -> str:
    """The page `text`, which lies in `folder`, with its blocks made anew; raises ValueError for an unknown block.

    `results:NAME on GPU` shows only what was measured on that GPU, named as its folder of results.
    """

    def block(match: re.Match[str]) -> str:
        opening, name, gpu, _, closing = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"no block {name!r}; there are {', '.join(BLOCKS)}")
        shown = results.on(gpu) if gpu else results
        return f"{opening}{BLOCKS[name](shown, folder)}\n{closing}"

    return BLOCK.sub(block, text)


# --- Of the report ---


def _rungs(results: Results, folder: Path) -> str:
    """What there is of each rung: its page, its exercises, and what it gains."""
    record = results.latest
    gains = {factor.rung.id: factor for factor in views.factors(record)} if record else {}
    rows = []
    for rung in LADDER:
        gain = gains.get(rung.id)
        measured = f"{gain.measured:.2f}" if gain and gain.measured else ""
        rows.append((page(rung, folder), exercises.of(rung, folder), measured))
    over = f"times the rung before, {environment.short(views.gpu(record))}" if record else NOTHING
    pages = formats.table(["rung", "exercises"], [row[:2] for row in rows])
    gained = formats.table(["rung", over], [(name.partition("]")[0][1:], gain) for name, _, gain in rows])
    return f"{pages}\n\n{formats.folded('What each rung gained: guess first', gained)}"


def _tunings(results: Results, folder: Path) -> str:
    """How the tunings that the rungs show were made."""
    lines = [
        f"- {environment.named(tunings[0].made)}; "
        f"[every configuration]({link(record.folder / report_page.TUNING_FILE, folder)}). "
        f"{environment.origin([tuning.made for tuning in tunings], 'ladder')}"
        for record in results.records
        if (tunings := autotuner.shown(record))
    ]
    pictures = [
        picture(record, autotuner.PICTURE, "Every configuration as a share of its rung's fastest,", folder)
        for record in results.records
        if autotuner.shown(record)
    ]
    every = formats.folded("All of them in a picture: guess first", *pictures)
    return "\n\n".join(["\n".join(lines), every, autotuner.HOW]) if lines else NO_TUNING


def _made(record: Record, folder: Path) -> str:
    """What a ladder was measured on and with."""
    size = views.ladder_size(record)
    report = f"[the whole report]({link(record.folder / report_page.FILE, folder)})"
    origin = environment.origin([record.environment], "ladder")
    return f"{environment.named(record.environment)}; M = N = K = {size}; {report}. {origin}"


def _ladder(results: Results, folder: Path) -> str:
    """The whole table of every GPU."""
    parts = [f"{_made(record, folder)}\n\n{ladder_tables.ladder(record)}" for record in results.records]
    return "\n\n".join(parts) or NOTHING


def _ladders(results: Results, folder: Path) -> str:
    """One table for all GPUs, with less in it."""
    made = "\n".join(f"- {_made(record, folder)}" for record in results.records)
    return f"{made}\n\n{ladder_tables.ladders(results.records)}" if made else NOTHING


def _of_main(contents: Callable[[Record], str]) -> Block:
    """A table of the main record, and which GPU it is of."""
    return lambda results, folder: (
        f"{results.main.environment['gpu']}:\n\n{contents(results.main)}" if results.main else NOTHING
    )


def _picture_of_main(file: str, text: str) -> Block:
    return lambda results, folder: picture(results.main, file, text, folder) if results.main else NOTHING


def _experiments(record: Record) -> str:
    return "\n\n".join(
        f"### {source.id}: {source.source}\n\n{source.cited}\n\n{ladder_tables.experiment(record, source)}"
        for source in published.EXPERIMENTS
        if source in views.measured_experiments(record)
    )


def _grouping(record: Record) -> str:
    bandwidth, _ = views.roofs(record)
    copy = f"\n\nA copy moves {bandwidth:.2f} TB/s there, read and written together." if bandwidth else ""
    return ladder_tables.grouping(record) + copy


def _of_counted(contents: Callable[[Record], str]) -> Block:
    """What is made of the counters, of each GPU on which launches were counted."""

    def block(results: Results, folder: Path) -> str:
        parts = [
            f"{environment.named(made[0])}. {environment.origin(made, 'ladder')}\n\n{contents(record)}"
            for record in results.records
            if (made := counted.made(record))
        ]
        return "\n\n".join(parts) or NOT_COUNTED

    return block


def _tf32(record: Record) -> str:
    return ladder_tables.tf32_rounding(record.tf32_rounding) if record.tf32_rounding else NOTHING


# --- Of the bench ---


def _summary(results: Results, folder: Path) -> str:
    """README's table: of a torch and Triton that pip gives, if there is one."""
    return _speeds(_first(results), summary.SUITES, folder, short=True)


def _first(results: Results) -> list[list[Sweep]]:
    return sorted(_sweeps_of_gpus(results), key=lambda sweeps: _is_apart(sweeps[0]["environment"]))[:1]


def _glance(results: Results, folder: Path) -> str:
    """README's first figures, of the sweeps of its table."""
    models = sorted(results.others.get("models", []), key=lambda record: _is_apart(record["environment"]))[:1]
    minutes = {
        record["environment"]["triton"]: {
            name.partition(",")[0]: case["ratio"]["median"]
            for name, case in record["cases"].items()
            if name.endswith(FIRST_MINUTE) and "ratio" in case
        }
        for record in models
    }
    return "".join(summary.glance(sweeps, _whole_models(results), minutes) for sweeps in _first(results)) or (
        bench_tables.NOTHING
    )


def _whole_models(results: Results) -> dict[str, dict[str, list[float]]]:
    """By where they were measured, ratios to torch of whole models' cases, those of the GPT of examples/ among them."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in (*results.others.get("models", []), *results.others.get("gpt", [])):
        made = record["environment"]
        for name, case in record["cases"].items():
            kind = "training" if "training" in name else "inference"
            ratios = [x["ratio"]["median"] for x in (case, *case.get("variants", {}).values()) if "ratio" in x]
            if ratios and not name.endswith(FIRST_MINUTE):
                where = f"{environment.short(made['gpu'])}, {environment.of_triton(made)}"
                found.setdefault(where, {}).setdefault(kind, []).extend(ratios)
    return {where: kinds for where, kinds in found.items() if len(kinds.get("training", [])) >= FEWEST_MODELS}


def _is_apart(made: dict[str, Any]) -> bool:
    """Whether that Triton was installed separately, not with its torch."""
    return not environment.is_from_pip(made)


def _bench(results: Results, folder: Path) -> str:
    """What every suite comes to, a table for each GPU."""
    return _speeds(_sweeps_of_gpus(results), summary.SUITES | summary.VARIANTS, folder)


def _sweeps_of_gpus(results: Results) -> list[list[Sweep]]:
    return [sweeps for _, sweeps in bench_tables.by_place(results.sweeps)]


def _speeds(groups: Sequence[Sequence[Sweep]], suites: Mapping[str, str], folder: Path, short: bool = False) -> str:
    def to_suites(made: dict[str, Any]) -> str:
        return link(bench_tables.page_of(environment.RESULTS, made), folder)

    tables = [summary.speed(sweeps, suites, to_suites, short) for sweeps in groups]
    return "\n\n".join(tables) or bench_tables.NOTHING


def _maps(results: Results, folder: Path, readme: bool = False) -> str:
    """Where it is faster, a picture for each GPU and Triton, or for those of README's table."""
    parts = []
    for sweeps in _first(results) if readme else _sweeps_of_gpus(results):
        if (sweep := speed_map.listed(sweeps)) is None:
            continue
        file = link(speed_map.file_of(environment.RESULTS, sweep), folder)
        words = speed_map.caption(sweep, speed_map.unseen(sweeps), not readme)
        parts.append(f"![Where it is faster on {sweep['environment']['gpu']}]({file})\n\n{words}")
    return "\n\n".join(parts) or bench_tables.NOTHING


def _precision_picture(results: Results, folder: Path) -> str:
    """That of the GPU and Triton with most modes, two at least."""

    def modes(sweeps: list[Sweep]) -> int:
        return len({point.mode for point in bench_tables.points(sweeps)})

    sweeps = max(_sweeps_of_gpus(results), key=modes, default=[])
    if modes(sweeps) < 2:
        return bench_tables.NOTHING
    file = bench_tables.folder_of(environment.RESULTS, sweeps[0]["environment"]) / bench_tables.PICTURE
    return f"![Speed against error on {sweeps[0]['environment']['gpu']}]({link(file, folder)})"


# --- Of both ---

MORE_RATES = ("fp8", "int8", "fp64")  # of cuBLAS, which only the bench measures


def _gpus(results: Results, folder: Path) -> str:
    """What differs between the GPUs: their units, and what copies and cuBLAS's products reach there."""
    reports = {views.gpu(record): record for record in results.records}
    sweeps: dict[str, list[Sweep]] = {}
    for sweep in results.sweeps:
        sweeps.setdefault(sweep["environment"]["gpu"], []).append(sweep)
    facts = {gpu: _facts(reports.get(gpu), sweeps.get(gpu, [])) for gpu in sorted({*reports, *sweeps})}
    names = dict.fromkeys(name for found in facts.values() for name in found)
    rows = [[name, *(found.get(name) for found in facts.values())] for name in names]
    return formats.table(["", *map(environment.short, facts)], rows) if facts else NOTHING


def _facts(record: Record | None, sweeps: list[Sweep]) -> dict[str, str]:
    """Of one GPU by name: what its report and its newest sweeps say."""
    made = record.environment if record else sweeps[0]["environment"]
    ceilings = record.ceilings.get("measured") if record else None
    figures: dict[str, float | None] = {
        "SMs": made.get("num_sms"),
        "L2, MiB": made["l2_bytes"] / 2**20 if made.get("l2_bytes") else None,
        "memory, GiB": made["memory_bytes"] / 2**30 if made.get("memory_bytes") else None,
        "power limit, W": made.get("power_limit_w"),
        "SM clock while fp32 is multiplied, MHz": ceilings.sm_clock_mhz if ceilings else None,
        "copy, read and written, TB/s": ceilings.copy_tbs if ceilings else None,
        "copy, as suite `decode` measured it, TB/s": next((s["copy_tbs"] for s in sweeps if "copy_tbs" in s), None),
    }
    if record:
        figures |= {f"{roof.label}, TFLOPS": roof.tflops for roof in views.roofs(record)[1] if CUBLAS in roof.label}
    of_cublas = [point for point in bench_tables.points(sweeps) if point.provider == CUBLAS]
    for mode in MORE_RATES:  # int8 is slow where B is row-major
        fastest = max((point.tflops for point in of_cublas if point.mode == mode), default=None)
        figures[f"{CUBLAS} {mode}, {bench_tables.PRECISION_SIZE}, fastest layout, TFLOPS"] = fastest
    return {name: f"{figure:,.4g}" if figure < 1000 else f"{figure:,.0f}" for name, figure in figures.items() if figure}


def _of_kind(name: str, results: Results, folder: Path) -> str:
    return KINDS[name].shown(results.others.get(name, []))


BLOCKS: dict[str, Block] = {
    **{rung.id: partial(rung_page, rung) for rung in LADDER},
    **limits.BLOCKS,
    "picture": lambda results, folder: (
        picture(results.latest, "ladder.png", "The ladder", folder) if results.latest else NOTHING
    ),
    "climb": lambda results, _: summary.climb(results.latest) if results.latest else NOTHING,
    "summary": _summary,
    "glance": _glance,
    "rungs": _rungs,
    "exercises": lambda _, folder: exercises.table(folder),
    "grouping": _of_main(_grouping),
    "ladder": _ladder,
    "ladders": _ladders,
    "tunings": _tunings,
    "targets": _of_main(ladder_tables.targets),
    "factors": _of_main(ladder_tables.factors),
    "roofline": _picture_of_main("roofline.png", "Every rung under measured ceilings"),
    "counted": _of_counted(counted.table),
    "launch-order": _of_counted(counted.launch_order),
    "experiments": _of_main(_experiments),
    "tf32": _of_main(_tf32),
    **{f"sweep-{mode}": _picture_of_main(f"sweep-{mode}.png", "TFLOPS against size") for mode in MODES},
    "gpus": _gpus,
    "maps": _maps,
    "map": partial(_maps, readme=True),
    "bench": _bench,
    "host": lambda results, folder: bench_tables.calls(results.sweeps),
    "precision-picture": _precision_picture,
    "precision": lambda results, folder: bench_tables.precision(results.sweeps),
    "packages": lambda results, folder: architecture.packages(),
    "list-of-models": lambda results, folder: model_tables.list_of_models(),
    **{name: partial(_of_kind, name) for name in KINDS},
}
