"""`triton-gemm explain`: what a product could run on, and what it does run on."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ..arithmetic import DTYPES, SCALED, Precision, ScaleKind, scaled_arithmetic
from ..problem import Activation
from ..reporting.candidates import Comparison, RankedCandidate, compare
from ..tables.records import LARGEST, plain
from . import output, words


@output.command
def explain(
    M: Annotated[int, typer.Argument(min=1, max=LARGEST, metavar="M", help="Rows of A and C.")],
    N: Annotated[int, typer.Argument(min=1, max=LARGEST, metavar="N", help="Columns of B and C.")],
    K: Annotated[int, typer.Argument(min=1, max=LARGEST, metavar="K", help="Columns of A and rows of B.")],
    dtype: words.Dtype = "bf16",
    layout: words.Layout = "nn",
    batch: Annotated[int, typer.Option(min=1, max=LARGEST, help="The number of such GEMMs in one launch.")] = 1,
    bias: Annotated[Literal["n"] | None, typer.Option(help="n: add one value for each column of C.")] = None,
    activation: Annotated[Activation | None, typer.Option(help="The activation, applied to C.")] = None,
    beta: Annotated[float, typer.Option(help="beta C is added, as addmm does; 0 does not read C.")] = 0.0,
    precision: Annotated[
        Precision | None,
        typer.Option(help="How fp32 is multiplied: ieee on CUDA cores, others by Tensor Cores. By default torch's."),
    ] = None,
    scales: Annotated[ScaleKind | None, typer.Option(help="What each scale of fp8 or int8 applies to.")] = None,
    fast_accum: Annotated[bool, typer.Option("--fast-accum", help="fp8: sum in the tensor cores alone.")] = False,
    groups: Annotated[int | None, typer.Option(min=1, help="A grouped GEMM with this number of groups.")] = None,
    group_dim: Annotated[
        Literal["M", "N", "K"] | None,
        typer.Option(help="Which size is divided into --groups, by default M.", show_default=False),
    ] = None,
    out_dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="C's dtype, if it is another.")] = None,
    device: words.Device = None,
    limit: Annotated[int, typer.Option(min=1, help="How many candidates to show.")] = 10,
    compile: Annotated[
        int, typer.Option(min=0, help="Compile the first candidates, and show their registers and shared memory.")
    ] = 0,
    bits: Annotated[bool, typer.Option("--bits", help="Show each candidate's bit class.")] = False,
    as_json: output.Json = False,
) -> None:
    """Show the candidates for a GEMM, their predicted and measured times, and which one runs.

    Nothing is launched, and no GPU is needed if one is named. A linear layer with 16 tokens on an H200:

    `triton-gemm explain 16x14336x4096 --layout nt --device h200`

    The sizes may also be three words.
    """
    if groups is None and group_dim is not None:
        raise output.wrong_call("--group-dim goes with --groups")
    info = words.device(device)
    if scales is None and groups is None and (given := words.dtype(dtype)) in SCALED and given not in DTYPES:
        if info.capability >= scaled_arithmetic(given, fast_accum).capability:
            raise output.wrong_call(f"--dtype {dtype} goes with --scales tensor, rows or blocks")
        scales = "tensor"  # the error is that this GPU has no such products
    problem, info = words.problem_and_device(
        M=M,
        N=N,
        K=K,
        dtype=words.dtype(dtype),
        layout=layout,
        batch=batch,
        bias=None if bias is None else True,
        activation=activation,
        beta=beta,
        precision=precision,
        scales=scales,
        use_fast_accum=fast_accum,
        groups=groups,
        group_dim=group_dim or "M",
        out_dtype=None if out_dtype is None else words.dtype(out_dtype),
        device=info,
    )
    found = compare(problem, info, limit=limit, compiled=compile)
    output.show(as_plain(found), as_json, lambda console: render(found, console, bits))


def as_plain(found: Comparison) -> dict[str, Any]:
    """For JSON."""
    return {
        "problem": plain(found.problem),
        "device": asdict(found.device),
        "model": found.model,
        "policy": found.policy._asdict(),
        "chosen": {"by": found.chosen.source, "kit": found.chosen.kit, "reason": found.chosen.reason}
        | _selection(found.chosen),
        "candidates": [_candidate(candidate) for candidate in found.fastest],
        "compared": found.candidates,
        "refused": found.refused,
    }


def _selection(selection: Any) -> dict[str, Any]:
    names = ("kernel", "config", "schedule", "split_k", "swap_ab", "packed", "precision")
    return {name: plain(getattr(selection, name)) for name in names}


def _candidate(candidate: RankedCandidate) -> dict[str, Any]:
    figures = {"predicted_us": candidate.predicted_us, "known_us": candidate.known_us, "table": candidate.table}
    launches = [
        {"kernel": x.name, "registers": x.registers, "shared_memory": x.shared, "spills": x.spills}
        for x in candidate.compiled
    ]
    return (
        _selection(candidate.selection)
        | figures
        | {"bits": candidate.bits, "chosen": candidate.chosen, "launches": launches}
    )


def render(found: Comparison, console: Console, bits: bool = False) -> None:
    """For people. bits: whether to show bit classes, which are long."""
    console.print(f"{words.problem_text(found.problem)} on {found.device.name}", style="bold")
    columns = ["", "kernel and configuration", *["bits"] * bits, "predicted us", "measured us"]
    columns += (
        ["registers", "shared memory", "spills"] if any(candidate.compiled for candidate in found.fastest) else []
    )
    rows = []
    for candidate in found.fastest:
        what = str(candidate.selection).removesuffix(f": {candidate.selection.reason}")
        row: list[object] = [
            "->" if candidate.chosen else "",
            what,
            *[candidate.bits] * bits,
            output.us(candidate.predicted_us),
        ]
        row.append(candidate.known_us and f"{output.us(candidate.known_us)} ({candidate.table})")
        row += [
            " + ".join(str(getattr(x, name)) for x in candidate.compiled) for name in ("registers", "shared", "spills")
        ]
        rows.append(row[: len(columns)])
    console.print(output.table(columns, rows, left=2 + bits))
    legal = found.candidates - found.refused
    console.print(f"{len(found.fastest)} of the {legal} candidates that this GPU can run")
    console.print(f"runs: {found.chosen}")
    chooser = replace(found.chosen, model=found.model).chooser
    invariant = ", for any number of rows" * found.chosen.batch_invariant
    console.print(f"chosen by the {chooser}, policy {found.policy.name}, bits {found.policy.bits}{invariant}")
    caveat = ", not measured on this GPU: trust their order, not the times" if found.model == "derived" else ""
    console.print(f"predicted times: {found.model} model{caveat}")
    if "registers" not in columns:
        console.print("--compile 3 compiles the first three, and shows their registers and shared memory")
    if not bits:
        console.print("--bits shows each candidate's bit class")
