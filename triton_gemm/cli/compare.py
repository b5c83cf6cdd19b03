"""`triton-gemm compare`: is it faster than torch, for your products on your GPU?"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from . import output, products, words


@products.takes_gemms
@output.command
def compare(
    gemms: products.Gemms,
    budget: words.Budget = "2m",
    device: words.Gpu = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", dir_okay=False, metavar="FILE", help="Also write the table into a file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Also draw the ratios; needs matplotlib.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Time your GEMMs with torch and with this package on this GPU: which is faster, and how large is each error?

    `triton-gemm compare --shapes 16x14336x4096 --layout nt`

    The ratio is torch's time over ours: above 1 this package is faster. Of each range of --rows its ends and the powers
    of two between are compared. The exit status is 1 if a GEMM could not be measured.
    """
    seconds, gpu = words.seconds(budget), words.gpu(device)
    problems = products.chosen(gemms, None if gemms.rows is None else words.ends_and_powers(gemms.rows))
    for path in (csv_file, plot):
        if path is not None and not path.parent.is_dir():
            raise output.wrong_call(f"there is no folder {path.parent}")
    figure = None if plot is None else _figure(plot)
    found: list[Any] = []
    code = 0
    try:
        found.append(
            products.tuning().compare(gemms.shapes_from or problems, budget=seconds, progress=found.append, device=gpu)
        )
    except (KeyboardInterrupt, RuntimeError) as error:
        if not found:
            raise
        code = output.INTERRUPTED if isinstance(error, KeyboardInterrupt) else output.FAILED
        typer.echo(f"error: {output.printable(str(error) or 'interrupted')}", err=True)
    report = found[-1]
    output.show(report.as_dict(), as_json, lambda console: console.print(str(report), soft_wrap=True))
    lines = [one.as_dict() for one in report.products]
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            names = [name for line in lines[:1] for name in line if name != "problem"]
            table = csv.DictWriter(file, names, extrasaction="ignore")
            table.writeheader()
            table.writerows(lines)
    if figure is not None:
        _draw(report.device, [line for line in lines if line["ratio"] is not None], figure)
        figure.savefig(plot)
    if code or not all(one.measured for one in report.products):
        raise typer.Exit(code or output.FAILED)


def _figure(path: Path) -> Any:
    """An empty figure, before anything is measured in vain."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise output.FailedError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise output.wrong_call(f"--plot: {path.name!r} must end with one of {', '.join('.' + kind for kind in kinds)}")
    return figure


def _draw(device: str, lines: list[dict[str, Any]], figure: Any) -> None:
    figure.set_size_inches(8, 1.5 + 0.3 * len(lines))
    axes = figure.subplots()
    noise = [line["ratio"] * line["noise"] for line in lines]
    axes.barh(range(len(lines)), [line["ratio"] for line in lines], xerr=noise)
    axes.set_yticks(range(len(lines)), [line["product"] for line in lines])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("torch's time / triton_gemm's: above 1 triton_gemm is faster")
    axes.set_title(device)
