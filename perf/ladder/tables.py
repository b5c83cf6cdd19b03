"""Markdown tables of a record; the report's page and the project's pages are made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perf.common import formats
from perf.common.formats import Cell
from perf.ladder import published, static, views
from perf.ladder.autotuner import Tuning
from perf.ladder.record import Record, TF32Rounding
from perf.measure.environment import short
from perf.measure.numerics import mode_of
from triton_gemm.ladder.command import spelled


def ladder(record: Record) -> str:
    """Each rung and its fastest twin."""
    rows = [_ladder_row(step) for step in views.ladder(record)]
    columns = ["rung", "precision", "TFLOPS", "of cuBLAS", "twin", "twin's TFLOPS", "rung / twin"]
    registers = f"registers, Triton {record.environment['triton']}"
    return formats.table([*columns, "error", registers, "shared KiB", "spills"], rows)


def ladders(records: Sequence[Record]) -> str:
    """Each rung's speed on every GPU, its share of cuBLAS and its gain over the twin."""
    rows: dict[str, list[Cell]] = {}
    for i, record in enumerate(records):
        for step in views.ladder(record):
            rung, precision, tflops, share, _, _, over_twin, *_ = _ladder_row(step)
            row = rows.setdefault(step.rung.id, [rung, precision, *[None] * 3 * len(records)])
            row[2 + 3 * i : 5 + 3 * i] = tflops, share, over_twin
    columns = [
        f"{short(record.environment['gpu'])}, {what}" if i == 0 else what
        for record in records
        for i, what in enumerate(("TFLOPS", "of cuBLAS", "rung / twin"))
    ]
    return formats.table(["rung", "precision", *columns], [rows[name] for name in sorted(rows)])


def _ladder_row(step: views.Step) -> list[Cell]:
    own = step.own
    return [
        f"{step.rung.id} {step.rung.title}",
        mode_of(step.rung.precision, step.rung.dtypes[0]),
        formats.number(step.tflops) or ("failed" if own.failed is not None else "not run"),
        formats.percent(step.share(step.rung.name)),
        step.twin.replace("_", " ", 1).replace("_", "-") if step.twin else None,
        formats.number(step.twin_tflops),
        f"{step.over_twin:.2f}" if step.over_twin else None,
        formats.error(own.norm),
        own.registers,
        formats.kib(own.shared),
        own.spills,
    ]


def targets(record: Record) -> str:
    """What each target wants, and whether it is met."""
    rows = [
        (outcome.what, f"{outcome.wanted:.2f}", f"{outcome.measured:.2f}", "met" if outcome.met else "missed")
        for outcome in views.outcomes(record)
    ]
    return formats.table(["target", "wanted", "measured", ""], rows)


# Of the grouped launch: programs of these rungs that an SM of Hopper holds, by their registers and shared memory.
ON_AN_SM = {"k04": 5, "k08": 1}
SIZES_OF_C = (4096, 8192, 16384)


def grouping(record: Record) -> str:
    """What a wave of programs asks of DRAM, by columns of tiles as k03 and in groups of 8 rows, where its strips of A
    and B are read once; for k04, and for k08, whose products are many times as fast."""
    rows: list[list[Cell]] = []
    for step in views.ladder(record):
        tile = re.match(r"(\d+)x(\d+)x", step.own.config or "")
        if step.rung.id not in ON_AN_SM or tile is None or step.tflops is None:
            continue
        m, n = int(tile[1]), int(tile[2])
        wave = ON_AN_SM[step.rung.id] * record.environment["num_sms"]
        for size in SIZES_OF_C:
            counts = [_strips(wave, size // m, size // n, group) for group in (size // m, GROUP)]
            rates = [  # TB/s: K is in the bytes and in the FLOP
                (a * m + b * n) * step.rung.dtypes[0].itemsize * step.tflops / (2 * wave * m * n) for a, b in counts
            ]
            strips = [f"{a} + {b}" for a, b in counts]
            rows.append([f"{step.rung.id}, {m}x{n}", str(size), *strips, *(f"{rate:.2f}" for rate in rates)])
    columns = [f"{what}, {how}" for what in ("strips of A + B", "TB/s") for how in ("by columns", f"groups of {GROUP}")]
    return formats.table(["rung, tile", "M = N = K", *columns], rows)


GROUP = 8


def _strips(wave: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    """Rows and columns of tiles that the first programs cover, in groups of rows (a divisor of num_m)."""
    tiles = [(i // (group * num_n) * group + i % group, i % (group * num_n) // group) for i in range(wave)]
    return len({m for m, _ in tiles}), len({n for _, n in tiles})


def configurations(record: Record) -> str:
    """What the autotuner chose for each rung on the ladder, and what a call costs Python."""
    rows = [
        (f"{step.rung.id} {step.rung.title}", own.config, formats.number(own.call_us))
        for step in views.ladder(record)
        if (own := step.problem.timed(step.rung.name))
    ]
    return formats.table(["rung", "configuration", "call µs"], rows)


def tuning(tuning: Tuning) -> str:
    """Every configuration that was timed, the fastest first, and those that failed."""
    rows: list[dict[str, Cell]] = [
        {
            "tile,warps,stages,group": spelled(timed.config),
            "TFLOPS": formats.number(timed.tflops),
            "of the fastest": formats.percent(tuning.share(timed)),
            "20th to 80th percentile": f"{formats.number(timed.low)} to {formats.number(timed.high)}",
            "modelled, scaled": formats.number(tuning.expected(timed)),
            f"registers, Triton {tuning.made['triton']}": timed.registers,
            "spills": timed.spills,
        }
        for timed in sorted(tuning.timed, key=lambda timed: -timed.tflops)
    ]
    rows += [{"tile,warps,stages,group": spelled(config), "TFLOPS": "failed"} for config in tuning.failed]
    return formats.table_of(rows)


def sweep(record: Record, mode: str) -> str:
    """TFLOPS of every provider at every size."""
    problems = views.squares(record, mode)
    return formats.table_of(
        {"TFLOPS": name, **{str(size): formats.number(problem.tflops(name)) for size, problem in problems.items()}}
        for name in views.lines(record, mode)
    )


def errors(record: Record, mode: str) -> str:
    """The error of every provider at every size, as a norm."""
    problems = views.squares(record, mode)
    rows: list[list[Cell]] = []
    for name in views.lines(record, mode):
        results = [problem.providers.get(name) for problem in problems.values()]
        rows.append([name, *(formats.error(result.norm if result else None) for result in results)])
    return formats.table(["error", *(str(size) for size in problems)], rows)


def factors(record: Record) -> str:
    """Predicted and measured gain of every rung."""
    return formats.table_of(
        {
            "rung": f"{factor.rung.id} {factor.rung.title}",
            "over": factor.over,
            "predicted": f"{factor.predicted:g}",
            "measured": formats.number(factor.measured),
            "measured / predicted": formats.percent(factor.measured / factor.predicted) if factor.measured else None,
        }
        for factor in views.factors(record)
    )


def experiment(record: Record, source: published.Experiment) -> str:
    """One source's kernels: ours, and the published ratios."""
    return formats.table_of(
        {
            "kernel": f"{row.kernel.id} {row.kernel.title}",
            "twin": row.twin,
            "ms": formats.number(row.time_ms, 4) or row.result.failed or row.result.absent,
            "GFLOPS": formats.number(row.gflops, 4),
            "speed-up": formats.number(row.speedup),
            "published speed-up": formats.number(row.published_speedup),
            "of cuBLAS": "n/a" if row.mode == "int32" else formats.percent(row.cublas_share),
            "published of cuBLAS": formats.percent(row.published_share),
            "error": formats.error(row.result.norm),
        }
        for row in views.experiment(record, source)
    )


def tf32_rounding(rounding: TF32Rounding) -> str:
    """Who rounds TF32 operands, and what that does to the error."""
    return formats.table_of(
        {
            "product": name,
            "error (norm)": formats.error(error.norm),
            "max error / (\\|A\\|\\|B\\|)": formats.error(error.componentwise),
            "times cuBLAS's": None if error.vs_torch is None else f"{error.vs_torch:.2f}",
            "shrinks results by": None if error.toward_zero is None else f"{error.toward_zero:+.1e}",
        }
        for name, error in rounding.errors.items()
    )


def static_facts(record: Record) -> str:
    """Registers, shared memory, spills and the ceiling of each rung for each architecture."""
    return formats.table_of(
        {
            "rung": name,
            "for": target,
            "configuration": facts.config,
            "registers": facts.registers,
            "shared KiB": formats.kib(facts.shared),
            "spills": facts.spills,
            "blocks an SM": facts.blocks_per_sm,
            "ceiling TFLOPS": formats.number(facts.ceiling_tflops),
            "of peak": formats.percent(facts.ceiling_share),
            "limited by": facts.ceiling_limit or facts.failed,
        }
        for name, targets in views.static_defaults(record).items()
        for target, facts in targets.items()
    )


def instruction_mix(record: Record) -> str:
    """Opcodes in the SASS for one architecture, counted in the text and not as executed."""
    target = static.TUNED_ARCHITECTURE
    return formats.table_of(
        {f"SASS, {target}": name, "all": facts.instructions, **{kind: facts.mix[kind] or None for kind in static.KINDS}}
        for name, targets in views.static_defaults(record).items()
        if (facts := targets.get(target)) and facts.mix
    )


def every_configuration(record: Record) -> str:
    """All that the autotuner explores, for one architecture."""
    target = static.TUNED_ARCHITECTURE
    return formats.table_of(
        {
            "rung": facts.rung,
            "configuration": facts.config,
            "registers": facts.registers,
            "shared KiB": formats.kib(facts.shared),
            "spills": facts.spills,
            "blocks an SM": facts.blocks_per_sm,
            "ceiling of peak": formats.percent(facts.ceiling_share) or facts.failed,
        }
        for facts in sorted(record.static.values(), key=lambda facts: facts.rung)
        if facts.target == target
    )


def interpreter(record: Record) -> str:
    """Every rung in the interpreter against fp64."""
    return formats.table_of(
        {
            "rung": row.rung,
            "dtype": row.dtype,
            "M x N x K": f"{row.M}x{row.N}x{row.K}",
            "error (norm)": formats.error(row.norm),
            "of the bound": formats.percent(row.bound),
            "outcome": row.failed or (f"not taken: {row.absent}" if row.absent is not None else "right"),
        }
        for row in sorted(record.interpreter.values(), key=lambda row: row.rung)
    )
