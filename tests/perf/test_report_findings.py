"""What the report opens with: findings, each figure from the record; without a GPU those of a committed record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perf.ladder import findings, published, report_page
from perf.ladder.record import Interpreted, Record
from perf.measure import environment
from tests.support.report_records import SURROUNDINGS, committed_record

TFLOPS = {
    4096: {"k08_tensor_cores": 400, "k09_persistent": 420, "k10_tma": 430, "k11_warp_specialised": 440},
    1024: {"k08_tensor_cores": 200, "k09_persistent": 190, "k10_tma": 250, "k11_warp_specialised": 300},
    1400: {"k08_tensor_cores": 50, "k09_persistent": 40, "k10_tma": 260, "k11_warp_specialised": 240},
}


def change(record: Record, key: str, **tflops: float) -> None:
    """Gives providers of a problem these speeds."""
    problem = record.problems[key]
    for provider, speed in tflops.items():
        old, time = problem.timed(provider), problem.tflops_in(1.0) / speed
        assert old is not None
        made = replace(old, time_ms=replace(old.time_ms, median=time, p20=time, p80=time))
        problem = replace(problem, providers={**problem.providers, provider: made})
    record.problems[key] = problem


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Of round speeds in half precision, and a TF32 rung of 200 TFLOPS."""
    made = committed_record(tmp_path)
    for size, known in TFLOPS.items():
        change(made, f"fp16 {size}x{size}x{size}", **known)
    change(made, "tf32 4096x4096x4096", k07_tf32=200)
    return made


def test_findings_are_computed_from_the_record(record: Record) -> None:
    text = " ".join(findings.sentences(record))
    assert "k11 (warp-specialised) reaches 440 TFLOPS" in text
    assert (
        "Twice the units' rate and no pass over operands give 2.00 times k07: k08 (FP16/BF16 tensor cores, 400 TFLOPS)"
        in text
    )
    assert "The last rungs, k09, k10 and k11, give +10.0 % at 4096 and +50.0 % at 1024 over k08." in text
    assert "At 1024, k11 (warp-specialised) alone gives +20.0 % over k10." in text
    assert "At 1400, no multiple of 16, k09 (persistent) falls to 40 TFLOPS, and k10 (TMA) keeps 260." in text
    assert "k08 over k07" not in text  # predicted 2.5, which is within 1.25 of 2
    change(record, "tf32 4096x4096x4096", k07_tf32=250)
    assert "k08 over k07 (2.5 predicted, 1.60 measured)" in " ".join(findings.sentences(record))


LACKS: dict[str, Callable[[str], bool]] = {
    "1024": lambda key: "1024" in key,
    "fp32": lambda key: key.startswith("ieee"),
    "tf32": lambda key: key.startswith("tf32"),
    "half": lambda key: key.startswith(("fp16", "bf16")),
    "all": lambda _: True,
}


@pytest.mark.parametrize("what", LACKS)
def test_what_the_record_lacks_is_left_out(what: str, record: Record) -> None:
    record.problems = {key: problem for key, problem in record.problems.items() if not LACKS[what](key)}
    text = " ".join(findings.sentences(record))
    assert ("at 1024 over" in text) == (what in ("fp32", "tf32"))
    assert ("On fp32 units" in text) == (what in ("1024", "tf32", "half"))
    assert ("Tensor cores give" in text) == (what in ("1024", "half"))
    assert ("Twice the units" in text) == (what in ("1024", "fp32"))
    assert "None" not in text and report_page.texts(record, [])


def test_the_page_has_findings_then_pictures_then_tables(record: Record) -> None:
    page = report_page.texts(record, environment.RESULTS.glob("h200/*.png"))[report_page.FILE]
    assert page.split("\n\n")[1] == "## What was found"
    assert (
        page.index(findings.sentences(record)[0]) < page.index("![") < page.rindex("sweep-bf16.png)") < page.index("|")
    )
    assert "met" not in page[: page.index("![")].split()  # a protocol of targets is not what was found
    assert page.count("<details>") == page.count("</details>") > 6


def test_a_missed_target_is_among_the_findings(record: Record) -> None:
    """k09 at 1 TFLOPS is slower than k08."""
    change(record, "fp16 4096x4096x4096", k09_persistent=1)
    page = report_page.texts(record, [])[report_page.FILE]
    assert "- Missed: k09_persistent as fast as k08_tensor_cores (0.00, 1.00 wanted)." in page


def test_without_a_gpu_the_page_opens_with_a_committed_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Record(tmp_path / "here", {**SURROUNDINGS, "gpu": None})
    here.interpreter["k04"] = Interpreted(rung="k04_grouped", dtype="float32", M=65, N=33, K=47)
    here.interpreter |= {
        f"k10 {i}": replace(here.interpreter["k04"], rung="k10_tma", absent=x) for i, x in enumerate([None, "odd"])
    }
    page = report_page.texts(here, [])[report_page.FILE]
    opening, _, rest = page.partition("## What was found here, without a GPU")
    assert "## The ladder on NVIDIA H200, not measured here" in opening and "/h200/ladder.png)" in opening
    measured = Record.read(environment.RESULTS / "h200")
    assert all(f"- {sentence}" in opening for sentence in findings.sentences(measured))
    assert "**k04 grouped launch**: right in the interpreter." in rest and "k04.svg)" in rest and "k05" not in rest
    assert "**k10 TMA**: right in the interpreter; in 1 of 2 cases not run: odd." in rest
    monkeypatch.setattr(environment, "RESULTS", tmp_path)
    assert "not measured here" not in report_page.texts(here, [])[report_page.FILE]


def test_published_experiments_are_cited(record: Record) -> None:
    """What is not known is said to be so."""
    page = report_page.texts(record, [])[report_page.FILE]
    for source in published.EXPERIMENTS:
        assert source.title and f"\n{source.cited}\n" in page
        for name, known in {"date": source.date, "GPU": source.gpu, "address": source.address}.items():
            assert (f"{name}: not known" in source.cited) == (known is None)
