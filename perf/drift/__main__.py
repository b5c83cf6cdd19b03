"""What other Tritons make of the kernels: python -m perf.drift [--triton WHAT ...]

Compiles every kernel in all its configurations for one GPU (--gpu), without having it, with each Triton that is named,
and says which registers, spills, shared memory, instructions and machine code are not those of the committed record of
that version; of a version without one, of the last before it. --triton names a version, which pip installs into
build/drift; a Python interpreter; a folder that has triton in it; or what else pip can install, a wheel of a nightly
build for one. By default all versions that are supported. Exit status: 1 if something that compiled does not, or spills
more than before, 2 for a mistake in the call or a Triton that cannot be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

try:
    import triton
    from rich.console import Console
    from rich.table import Table

    from perf.common import arguments as args
    from perf.common import progress
    from perf.drift import cases, compiling, record, tritons
    from perf.drift.record import FIGURES, GPUS, Drift
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]'")

LINES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if given.write is not None:
        write_here(given.write, chosen(cases.every(given.gpu), given.only, given.every), given.jobs, given.gpu)
        return 0
    worse = False
    for what in given.triton:
        try:
            version, found = compiled_by(what, given)
            before = given.against or base(version, given.records, given.gpu)
            known = (
                {} if before is None or given.update else record.read(record.path_of(before, given.records, given.gpu))
            )
            known = {name: known[name] for name in chosen(known, given.only, given.every)}
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"error: {what}: {error}", file=sys.stderr)
            return 2
        drift = record.compare(known, found)
        show(version, before, drift, given.lines, console)
        worse |= bool(drift.worse())
        if given.update:
            record.write(record.path_of(version, given.records, given.gpu), found)
    return int(worse and not given.update)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m perf.drift",
        description=summary.partition(":")[0] + ".",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--triton", nargs="+", default=list(tritons.VERSIONS), metavar="WHAT", help="versions to try")
    parser.add_argument("--gpu", default=GPUS[0], choices=GPUS, help="what is compiled for (%(default)s)")
    parser.add_argument("--against", metavar="VERSION", help="compare with this version's record")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases that have these words in their name")
    parser.add_argument("--every", type=args.count, default=1, metavar="N", help="one case in N")
    parser.add_argument("--jobs", type=args.count, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--lines", type=args.count, default=LINES, metavar="N", help="changed cases that are shown")
    parser.add_argument("--update", action="store_true", help="write the records")
    parser.add_argument("--records", type=args.path, default=record.FOLDER, metavar="FOLDER", help="where they are")
    parser.add_argument(
        "--write", type=args.path, metavar="FILE", help="write what this interpreter's Triton makes to FILE, no more"
    )
    found = parser.parse_args(arguments)
    if found.update and (found.only or found.every > 1):
        parser.error("--update with --only or --every would leave cases out of the record")
    if found.write is not None:
        args.refuse(parser, found, ("triton", "against", "update", "records", "lines"), "--write compares nothing")
    return found


def chosen(names: Iterable[str], only: str, every: int) -> list[str]:
    """Those with all the words, one in so many. By its name alone, as not every Triton has the same cases."""
    words = only.split()
    return [name for name in names if all(word in name for word in words) and zlib.crc32(name.encode()) % every == 0]


def write_here(path: Path, names: Sequence[str], jobs: int, gpu: str) -> None:
    """Compiles cases with the Triton of this interpreter, and writes a record of them, and that Triton's version."""
    found: dict[str, record.Row] = {}

    def run(advance: progress.Advance) -> None:
        for name, row in compiling.compile_all(names, jobs, partial(compiling.compile_case, gpu=gpu)):
            found[name] = row
            advance(name)

    task = progress.Task(f"Triton {triton.__version__}", len(names), run)
    progress.run([task], Console(stderr=True))
    record.write(path, {name: found[name] for name in names})
    path.with_suffix(".version").write_text(triton.__version__)


def compiled_by(what: str, given: argparse.Namespace) -> tuple[str, dict[str, record.Row]]:
    """The version of a Triton, and what it makes of the cases."""
    made_by = tritons.toolchain(what)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.csv")
        options = [f"--only={given.only}", f"--every={given.every}", f"--jobs={given.jobs}"]
        options += [f"--gpu={given.gpu}", f"--write={path}"]
        command = [made_by.python, "-m", "perf.drift", *options]
        subprocess.run(command, env=made_by.environment(), check=True)
        return path.with_suffix(".version").read_text(), record.read(path)


def base(version: str, folder: Path, gpu: str = GPUS[0]) -> str | None:
    """The version whose record is compared with: its own, or else the last before it."""
    known = record.versions(folder, gpu)
    earlier = [other for other in known if record.order(other) <= record.order(version)]
    return version if version in known else next(reversed(earlier), None)


def show(version: str, before: str | None, drift: Drift, lines: int, console: Console) -> None:
    console.print(f"\nTriton {version}, {drift.cases} kernels", end="", highlight=False)
    if before is None:
        console.print(": there is no record to compare with", highlight=False)
        return
    console.print(f", against the record of {before}: {len(drift.changes)} differ", highlight=False)
    table = Table("", "more", "fewer")
    for figure in FIGURES:
        table.add_row(figure, *map(str, drift.moved(figure)))
    if drift.changes:
        console.print(table)
    for change in drift.changes[:lines]:
        mark = "WORSE  " if change.worse else "       "
        console.print(mark + str(change), highlight=False, markup=False, soft_wrap=True)
    if len(drift.changes) > lines:
        console.print(f"       and {len(drift.changes) - lines} more (--lines)", highlight=False)
    for word, names in (("only here", drift.new), ("only in the record", drift.gone)):
        if names:
            some = "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")
            console.print(f"{len(names)} {word}: {some}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
