"""perf.accuracy: its matrices and its verdict, which finds planted bugs; its tables, and the command without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.accuracy import __main__ as command
from perf.accuracy import tables
from perf.accuracy.candidates import KINDS, Operands
from perf.accuracy.inputs import ERRORS, INPUTS, Drawing, drawn
from perf.accuracy.judge import answer, failures, questions
from perf.common.files import read_json, write_json
from tests.support.report_records import SURROUNDINGS

CPU, SIZE = torch.device("cpu"), (13, 9, 70)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def wrong(name: str, product: Product) -> dict[str, int]:
    """Of which inputs a kind's result is wrong, and in how many elements, when `product(a, b)` in fp64 computes it."""
    operands = Operands(KINDS[name], SIZE, CPU)

    def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: Any) -> None:
        for x, y, out in operands.products():
            out.copy_(product(x.double(), y.double()).to(out.dtype))

    found = {question.name: answer(operands, question, multiply) for question in questions(operands, INPUTS)}
    return {name: int(count) for name, (_, count) in found.items() if count}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_right_passes(name: str) -> None:
    assert wrong(name, torch.matmul) == {}


def nan_leaks_down(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a @ b
    c[1:][c.isnan().all(1)[:-1]] = torch.nan
    return c


def nan_is_lost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.nan_to_num(0.0, torch.inf, -torch.inf) @ b.nan_to_num(0.0, torch.inf, -torch.inf)


def zero_times_infinity_is_zero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((a[:, :, None] == 0) | (b[None] == 0), 0.0, a[:, :, None] * b[None]).sum(1)


def subnormals_are_flushed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (torch.where(x.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, x) for x in (a, b))
    return a @ b


def cut_off(x: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 without its lowest bits."""
    return (x.float().view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32).double()


def a_column_is_left(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a @ b
    c[:, -1] = torch.nan
    return c


def k_tail_lost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, :64] @ b[:64]


BUGS: dict[str, tuple[str, Product, str]] = {
    "k-tail": ("bf16", k_tail_lost, "normal"),
    "k-tail-of-int8": ("int8", k_tail_lost, "integers"),
    "sums-in-fp16": ("fp16 to fp32", lambda a, b: (a @ b).half().double(), "positive"),
    "nan-leaks": ("bf16", nan_leaks_down, "NaN"),
    "nan-leaks-in-groups": ("bf16, groups of rows", nan_leaks_down, "NaN"),
    "nan-lost": ("ieee", nan_is_lost, "NaN"),
    "zeros-skipped": ("ieee", zero_times_infinity_is_zero, "infinity"),
    "infinity-lost": ("ieee", lambda a, b: a.clamp(-3e38, 3e38) @ b, "infinity"),
    "flushed": ("ieee", subnormals_are_flushed, "denormal"),
    "flushed-copies": ("ieee", subnormals_are_flushed, "one-hot B"),
    "ieee-as-tf32": ("ieee", lambda a, b: cut_off(a, 13) @ cut_off(b, 13), "wide"),
    "bf16x6-as-bf16x3": ("bf16x6", lambda a, b: cut_off(a, 8) @ cut_off(b, 8), "wide"),
    "cut-off": ("bf16", lambda a, b: cut_off(a @ b, 16), "normal"),
    "column-left": ("bf16, odd", a_column_is_left, "one-hot A"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    name, product, seen_in = BUGS[bug]
    assert seen_in in wrong(name, product)


@pytest.mark.parametrize("name", INPUTS)
def test_matrices_are_what_they_say(name: str) -> None:
    for kind in KINDS.values():
        generator = torch.Generator().manual_seed(0)
        found = drawn(name, Drawing(*SIZE, kind.dtype, kind.mode, generator))
        if found is None:
            assert name == "denormal" or not INPUTS[name].fits(kind.dtype)
            continue
        a, b = found
        assert (a.shape, b.shape) == ((13, 70), (70, 9)) and a.dtype == b.dtype == kind.dtype
        assert (a.double().isfinite().all() and b.double().isfinite().all()) == (name not in ("NaN", "infinity"))
        truth = a.double() @ b.double()
        assert name in ("NaN", "infinity") or (truth.abs() <= 3.5e38).all() or kind.dtype == torch.float64
    assert name not in ERRORS or not INPUTS[name].exact


def made_up_record(share: float = 0.25, count: int = 0) -> dict[str, Any]:
    def row(kind: str, kernel: str, bits: str) -> dict[str, Any]:
        bounds, counts = {"normal": share, "wide": 0.5}, {"normal": 0, "wide": 0, "NaN": count}
        size = {"M": 64, "N": 48, "K": 1000}
        return {"kind": kind, **size, "kernel": kernel, "bits": bits, "way": "it", "of_bound": bounds, "wrong": counts}

    return {
        "environment": SURROUNDINGS,
        "ways": [row("bf16", "portable", "one"), row("bf16", "portable", "two"), row("ieee", "fma", "one")],
        "long": [row("bf16", "portable", "one")],
        "ends": [{"kind": "bf16", "wrong": {"K = 0": 0}}],
        "failed": [],
        "seconds": 1.0,
    }


def test_the_table_has_the_worst_of_each_kernels_classes_and_what_is_wrong() -> None:
    record = made_up_record(count=7)
    record["ways"][1]["of_bound"]["normal"] = 0.75
    record["ways"][2]["wrong"]["NaN"] = 0
    text = tables.text(record)
    assert "\n| bf16 | portable | 2 | 0.75 |  | 0.5 |  |  |  | **14 wrong** |\n" in text
    assert "\n| ieee | fma | 1 | 0.25 |  | 0.5 |  |  |  | right |\n" in text
    assert "\n| bf16 | portable | one | 0.25 |  | **7 wrong** |" in text
    assert failures(record["ways"])[0] == "bf16 64x48x1000, NaN: 7 elements are wrong: it"
    assert failures(record["ends"]) == []


def test_records_are_found_where_they_are_written(tmp_path: Path) -> None:
    record = made_up_record()
    write_json(path := tables.RECORDS.path(tmp_path, record["environment"]), record)
    assert tables.RECORDS.committed(tmp_path) == [record]
    assert path == tmp_path / "made-up-gpu" / "accuracy" / "3.6.0.json"


@pytest.mark.full
def test_without_a_gpu_the_interpreter_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["int8", "int8, rows", "--jobs", "2", "--out", str(tmp_path / "record")]) == 0
    assert read_json(tmp_path / "record")["failed"] == []
    printed = capfd.readouterr().out
    assert printed.startswith("In Triton's interpreter, on small products")
    assert "| int8 | portable | 1 |" in printed and "right" in printed
