"""`triton-gemm cache`: tables of measured choices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import tables
from ..calibration import kept
from ..hardware.device import DeviceInfo
from ..runtime import native_file, policies
from ..tables import files
from ..tables import learned as learned_tables
from ..tables.files import Table
from ..tables.records import Entry, plain
from . import output, words

app = typer.Typer(no_args_is_help=True)

# Tables, by file why they are not all that is there, and the GPU that they are of.
_Shown = tuple[Sequence[tuple[str, Table]], dict[str, str], DeviceInfo]
Files = Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, metavar="FILE...", show_default=False)]


@app.command("ls")
@output.command
def ls(as_json: output.Json = False) -> None:
    """List all tables, your own and the shipped ones, quarantined files, and calibrated models."""
    found = [
        {
            "file": path,
            "whose": source,
            "silicon": table and str(table.gpu_key),
            "name": table and table.gpu_key.name,
            "triton": table and table.triton,
            "bits": table and table.bits,
            "entries": len(table.entries) if table else 0,
            "wrong": contents.wrong and contents.wrong[1],
        }
        for source, path, contents in tables.listed()
        for table in [contents.table]
    ]
    models = [
        {
            "file": path,
            "silicon": contents.kept and str(contents.kept.gpu_key),
            "name": contents.kept and contents.kept.gpu_key.name,
            "measured": contents.kept and contents.kept.measured,
            "wrong": contents.elsewhere or (contents.wrong and contents.wrong[1]),
        }
        for path, contents in kept.listed()
    ]
    aside = [*tables.set_aside(), *kept.set_aside()]
    data = {"folder": tables.folder(), "tables": found, "set_aside": aside, "models": models}

    def render(console: Console) -> None:
        console.print(f"your tables are in {data['folder']}")
        columns = ("GPU key", "GPU", "Triton", "bits", "whose", "file", "entries")
        rows = [
            [x["silicon"], x["name"], x["triton"], x["bits"], x["whose"], Path(str(x["file"])).name, x["entries"]]
            for x in found
        ]
        console.print(output.table(columns, rows, left=6) if rows else "there is no table yet: triton-gemm tune")
        for x in found:
            if x["wrong"]:
                console.print(f"{x['file']}: {x['wrong']}")
        for path in aside:
            console.print(f"quarantined: {path}")
        for model in models:
            good = f"{model['name']}, calibrated {model['measured']}"
            state = f"not used: {model['wrong']}" if model["wrong"] else good
            console.print(f"model: {model['file']}: {state}", soft_wrap=True)

    output.show(data, as_json, render)


@app.command("show")
@output.command
def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", show_default=False, help="A table; by default all tables of the GPU."),
    ] = None,
    device: words.Device = None,
    as_json: output.Json = False,
) -> None:
    """Show the entries of a table, or of all tables of a GPU: for each GEMM the kernel and its gain.

    Entries that are not used are listed below: those of another version of Triton whose kernels no kit has, those that
    cannot run, and those with other bits than the model's choice.
    """
    shown, wrong, info = _table(file) if file else _tables_of(words.device(device))
    rows = [
        {
            "problem": plain(problem),
            "text": f"{_fewest(entry)}{words.problem_text(problem)}",
            "whose": whose,
            "bits": table.bits,
        }
        | {"triton": table.triton, "why_not": policies.left_out(problem, info, entry, table)}
        | plain(entry)
        | {"selection": str(entry.selection(problem, whose)).partition(":")[0], "gain": entry.default_us / entry.us - 1}
        for whose, table in shown
        for problem, entry in table.entries.items()
    ]
    rows = [row | {"used": row["why_not"] is None} for row in rows]

    def render(console: Console) -> None:
        columns = ("GEMM", "kernel and configuration", "bits", "Triton", "measured", "us", "model's us", "gain")
        lines = [
            (
                *(x["text"], x["selection"], x["bits"], x["triton"], str(x["measured"])[:10]),
                *(output.us(x["us"]), output.us(x["default_us"]), f"{100 * x['gain']:.1f} %"),
            )
            for x in rows
        ]
        console.print(output.table(columns, lines, left=5) if lines else "no table has an entry")
        for x in (x for x in rows if x.get("torch")):
            times = f"{output.us(x['torch_us'])} us of ours {output.us(x['us'])}"
            console.print(f"{x['text']}: torch is faster: {times} ({x['torch']})", soft_wrap=True)
        for x in (x for x in rows if x.get("samples")):
            how = "nothing was faster" if x["us"] == x["default_us"] else f"in place of {x['default']}"
            console.print(f"{x['text']}: learned in service from {x['samples']} samples: {how}", soft_wrap=True)
        foreign = [x for x in rows if x["triton"] != files.TRITON]
        for version in sorted({x["triton"] for x in foreign}):
            of = [x for x in foreign if x["triton"] == version]
            used, text = sum(x["used"] for x in of), f"of Triton {version}, as this is {files.TRITON}"
            if used:
                entries = output.counted(len(of), "entry", "entries")
                console.print(f"used here: {used} of {entries} {text}: a kit has their kernels")
            if used < len(of):
                unused = output.counted(len(of) - used, "entry", "entries")
                console.print(f"not used here: {unused} {text}: the model chooses for these GEMMs")
        for x in rows:
            if not x["used"] and x not in foreign:
                console.print(f"not used here: {x['text']}, {x['selection']}: {x['why_not']}")
        for path, why in wrong.items():
            console.print(f"{path}: {why}")

    output.show({"entries": rows, "wrong": wrong}, as_json, render)


def _table(path: Path) -> _Shown:
    found = files.contents_of(path)
    wrong = {str(path): found.wrong[1]} if found.wrong else {}
    if found.table is None:
        raise output.FailedError(f"{path}: {wrong.get(str(path), 'it cannot be read')}")
    return [("file", found.table)], wrong, tables.device_of(found.table.gpu_key)


def _tables_of(device: DeviceInfo) -> _Shown:
    """Of a GPU; a file that cannot be read may be one of its tables."""
    gpu_key = tables.GpuKey.of(device)
    every = [x for x in tables.listed() if x[2].table is None or x[2].table.gpu_key == gpu_key]
    found = [(source, contents.table) for source, _, contents in every if contents.table is not None]
    return found, {str(path): contents.wrong[1] for _, path, contents in every if contents.wrong}, device


def _fewest(entry: Entry) -> str:
    """The beginning of a range of rows, as in 385-512x4096x4096."""
    return f"{entry.least_rows}-" if entry.least_rows else ""


@app.command("export")
@output.command
def export(
    out: Annotated[Path, typer.Argument(dir_okay=False, metavar="OUT", show_default=False)],
    device: words.Device = None,
    bits: words.Bits = "same",
    as_json: output.Json = False,
) -> None:
    """Write your table for a GPU into the file OUT, for another machine. Exit status 1 if it has no entry."""
    info = words.device(device)
    if not any(table.entries and table.bits == bits for whose, table in _tables_of(info)[0] if whose == "user's table"):
        others = "a shipped table is not exported"
        raise output.FailedError(f"you have no table of {info.name} with an entry of bits {bits}; {others}")
    _counted(tables.export_to(out, info, bits), out, as_json)


@app.command("import")
@output.command
def import_(sources: Files, as_json: output.Json = False) -> None:
    """Merge files into your tables: of two entries for a GEMM the faster usable one wins.

    An entry is usable if it can run and has the bits of the model's choice; only the table's version of Triton can
    tell. An invalid file changes nothing.
    """
    _counted(sum(tables.import_from(path) for path in _whole(sources)), tables.folder(), as_json)


@app.command("merge")
@output.command
def merge(
    sources: Files,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, metavar="OUT", help="The file to write.")],
    as_json: output.Json = False,
) -> None:
    """Merge files of one kind into the file OUT, as import does. The order of files does not matter."""
    _counted(tables.merge(_whole(sources), out), out, as_json)


def _whole(paths: list[Path]) -> list[Path]:
    """The same, all of which can be read whole."""
    for path in paths:
        if (wrong := files.contents_of(path).wrong) is not None:
            raise output.FailedError(f"{path}: {wrong[1]}")
    return paths


def _counted(count: int, where: Path | None, as_json: bool) -> None:
    output.show(
        {"entries": count, "to": where},
        as_json,
        lambda console: console.print(f"{output.counted(count, 'entry', 'entries')} -> {where}"),
    )


@app.command("verify")
@output.command
def verify(device: words.Device = None, as_json: output.Json = False) -> None:
    """Check every table: can it be read, and can this GPU run each entry? Exit status 1 if not.

    A table of another GPU is not used here, and is not a fault. Of a table of another version of Triton those entries
    are used whose kernels a kit has.
    """
    info = words.device(device)
    reports = tables.verify(info)
    found: list[dict[str, Any]] = [
        {
            "file": x.path,
            "whose": x.source,
            "entries": x.entries,
            "used": _used(x.table, info),
            "faults": [fault for fault in x.faults if fault != x.elsewhere],
            "elsewhere": x.elsewhere or None,
        }
        for x in reports
    ]

    def render(console: Console) -> None:
        for x in found:
            used = "good" if x["used"] == x["entries"] else f"{x['used']} used here"
            if x["elsewhere"]:
                used = f"{x['used']} used here, though {x['elsewhere']}: a kit has their kernels"
            unused = f"not used here: {x['elsewhere'] or 'they cannot run, or have other bits than the model'}"
            state = "; ".join(x["faults"]) or (used if x["used"] or not x["entries"] else unused)
            console.print(f"{Path(x['file']).name}: {output.counted(x['entries'], 'entry', 'entries')}, {state}")
        if not found:
            console.print(f"there is no table in {tables.folder()}, and none came with the package")

    output.show({"tables": found}, as_json, render)
    if any(x["faults"] for x in found):
        raise typer.Exit(output.FAILED)


def _used(table: Table | None, device: DeviceInfo) -> int:
    """How many entries of a table are used on a device."""
    if table is None or table.gpu_key != tables.GpuKey.of(device):
        return 0
    return sum(policies.left_out(x, device, entry, table) is None for x, entry in table.entries.items())


@app.command("clear")
@output.command
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    models: Annotated[bool, typer.Option("--models", help="Delete calibrated models instead of tables.")] = False,
    learned: Annotated[bool, typer.Option("--learned", help="Delete only what was learned in service.")] = False,
    as_json: output.Json = False,
) -> None:
    """Delete your own tables and tuning's notes, of all GPUs, and built extensions; or your calibrated models; or what
    was learned in service.

    It asks first.
    """
    if models and learned:
        raise output.wrong_call("--models and --learned do not go together")
    where, delete = (kept.folder(), kept.clear) if models else (tables.folder(), tables.clear)
    own = [] if where is None else files.names(where, "")
    if learned:
        own, delete = learned_tables.names(), learned_tables.clear
    notes = [] if models or learned else tables.notes()
    extensions = [] if models or learned else native_file.extensions()

    def what(count: int) -> str:
        if models:
            return output.counted(count, "model")
        found = [output.counted(count, "table")]
        found += [output.counted(len(notes), "note of tuning", "notes of tuning")] * bool(notes)
        found += [output.counted(len(extensions), "built extension")] * bool(extensions)
        return " and ".join(found)

    if (own or notes or extensions) and not yes:
        if as_json:
            raise output.wrong_call("--json cannot ask: add --yes")
        places = [str(x) for x in (where if own or notes else None, *{x.parent for x in extensions}) if x]
        typer.confirm(f"Delete {what(len(own))} in {' and '.join(places)}?", abort=True)
    count = delete()
    for path in extensions:
        path.unlink(missing_ok=True)
    data = {"deleted": count} if models else {"deleted": count, "notes": len(notes), "extensions": len(extensions)}
    output.show(data, as_json, lambda console: console.print(f"deleted {what(count)}"))
