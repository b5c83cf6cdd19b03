"""`triton-gemm warmup`: compile ahead of time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..hardware.device import DeviceInfo
from ..hardware.gpus import NAMES, named_device
from ..problem import GemmProblem
from ..runtime import kit_build, native_build
from ..runtime.precompile import Precompiled, precompile
from ..selection.select import Selection, select
from ..tables.files import Bits
from ..tuning.candidates import candidates as candidates_of
from . import output, products, words

_DROPPED = {
    "compilers": "another Triton or ptxas has made them",
    "shipped": "now in the package's own kit",
    "sources": "their sources have changed",
}


@products.takes_gemms
@output.command
def warmup(
    gemms: products.Gemms,
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_XX", help="All GPUs of that compute capability that have a name."),
    ] = None,
    device: words.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, metavar="DIR", help="The folder of the cache; by default Triton's own."),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A kit to add the kernels to, one file of machine code, and no cache."),
    ] = None,
    candidates: Annotated[
        Bits | None,
        typer.Option(
            help="Also compile the candidates that `tune` would time with --bits same or any.", show_default=False
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; by default one for each core.")] = None,
    as_json: output.Json = False,
) -> None:
    """Compile the kernels of your GEMMs into Triton's cache, without a GPU.

    Run it where an image is built, with the same Python packages as at run time:

    `triton-gemm warmup --shapes-from shapes.json --device h200 --out /opt/triton-cache`

    Linear layers are given by their weights, and compiled for all these numbers of rows:

    `triton-gemm warmup --weights 4096x4096,28672x4096 --rows 1-8192 --device h200`

    Set `TRITON_CACHE_DIR=/opt/triton-cache` in the image: nothing is compiled at run time then, and no C compiler
    is needed. It also builds Triton's driver module; with Triton 3.8 or later set `TRITON_LIBCUDA_PATH` for that, here
    and in the image, to the folder that has libcuda.so.1 at run time, mostly /usr/lib/x86_64-linux-gnu. And it builds
    what `triton-gemm build` does, into your cache folder.

    With `--candidates same` a later `triton-gemm tune` on the GPU finds all of its candidates compiled.

    `--kit` adds the kernels to one file instead, and builds neither that module nor the extension:

    `triton-gemm warmup --shapes-from shapes.json --device h200 --kit /opt/triton_gemm/fleet.kit`

    Set `TRITON_GEMM_KIT=/opt/triton_gemm/fleet.kit` in the image. The file keeps what earlier calls have put into it,
    as long as this package's sources, Triton and ptxas are the same.
    """
    if kit is not None and out is not None:
        raise output.wrong_call("give --out or --kit, not both")
    problems = products.chosen(gemms, None if gemms.rows is None else words.rows(gemms.rows))
    devices = devices_of(arch, device)
    errors = Console(stderr=True)
    with Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        line = bar.add_task("")
        how: dict[str, Any] = {
            "workers": workers,
            "progress": lambda done, total: bar.update(line, completed=done, total=total, description="compiled"),
            "selecting": lambda done, total: bar.update(line, completed=done, total=total, description="selected"),
            "also": lambda problem, device: _candidates(problem, device, candidates),
        }
        made = (
            precompile(problems, devices, cache=out and out.expanduser(), **how)
            if kit is None
            else kit_build.extend(kit.expanduser().absolute(), problems, devices, **how)
        )
    if isinstance(made, Precompiled):
        made = replace(made, extension=native_build.ahead())
    data = asdict(made) | {"devices": [x.name for x in devices]}
    wanted = f"{output.counted(made.problems, 'GEMM')} on {', '.join(data['devices'])}"
    if isinstance(made, Precompiled):
        lines = [
            f"{output.counted(made.kernels, 'kernel')} for {wanted} in {made.cache}",
            f"{made.compiled} compiled in {made.seconds:.0f} s, {made.kernels - made.compiled} were compiled before",
            f"kits have {output.counted(made.in_kits, 'kernel')} more, which need no compiling",
            f"Triton's driver module: {made.driver_module or 'built'}",
            f"the extension that launches repeated calls: {made.extension or 'built'}",
        ]
    else:
        lines = [
            f"{output.counted(made.kernels, 'kernel')}, {-(-made.nbytes // 1000):,} kB, in {made.file}",
            f"{made.compiled} compiled in {made.seconds:.0f} s, {made.kernels - made.compiled} were there before",
            f"{output.counted(made.needed, 'kernel')} for {wanted}, {made.shipped} of them in the package's own kit",
        ]
        if made.needed == made.shipped:
            lines.append("these GEMMs need no kit of your own, with this Triton and this package")
        lines += [f"{count} dropped: {_DROPPED[why]}" for why, count in sorted(made.dropped.items())]

    def render(console: Console) -> None:
        for text in (*lines, *(f"failed: {x}" for x in made.failures)):
            console.print(text)

    output.show(data, as_json, render)
    if made.failures:
        raise typer.Exit(output.FAILED)


def _candidates(problem: GemmProblem, device: DeviceInfo, bits: Bits | None) -> list[Selection]:
    """What `tune` would time for a product with these bits; nothing without them."""
    return [] if bits is None else candidates_of(problem, device, select(problem, device), bits)


def devices_of(arch: str | None, device: str | None) -> list[DeviceInfo]:
    """The GPUs to compile for. With --arch: all of that compute capability in `gpus.NAMES`, the generic "sm_90" too.
    Else that of --device, by default the current one. A usage error if both are given, or --arch is unknown."""
    if arch is None:
        return [words.device(device)]
    if device is not None:
        raise output.wrong_call("give --arch or --device, not both")
    if not arch.startswith("sm_") or arch not in NAMES:
        known = ", ".join(name for name in NAMES if name.startswith("sm_"))
        raise output.wrong_call(f"--arch: {arch!r} is not one of {known}")
    wanted = named_device(arch)
    return [x for x in map(named_device, NAMES) if x.capability == wanted.capability]
