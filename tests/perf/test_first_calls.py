"""The bench of first calls: what a scenario's process measures, by a clock that is made up, and what becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import triton_gemm
from perf.bench import __main__ as bench
from perf.bench import first_calls
from perf.common.files import read_json
from perf.measure import environment, operands
from perf.pages.results import Results
from tests.support.patches import replace_all
from tests.support.report_records import SURROUNDINGS, block
from triton_gemm.suites import SUITES
from triton_gemm.suites.shapes import Shape

TINY = [Shape(M, N, 16, layout="nt") for N in (8, 24) for M in (3, 2, 4)]


class Machine:
    """A clock, and a product that takes 1 s in its first call and 1 ms later; `pending`: how often to wait in vain."""

    def __init__(self, pending: float = 0) -> None:
        self.now, self.pending, self.calls = 0.0, pending, Counter[int]()

    def product(self, index: int, values: list[float]) -> torch.Tensor:
        """Has the last of `values` from so many calls on."""
        self.calls[index] += 1
        self.now += 0.001 if self.calls[index] > 1 else 1.0
        value = values[min(self.calls[index], len(values)) - 1]
        return torch.tensor([[1.0, value]], dtype=torch.bfloat16)

    def wait(self, timeout: float) -> bool:
        assert timeout == 0
        self.pending -= 1
        return self.pending < 0

    def measure(self, *products: list[float]) -> dict[str, Any]:
        calls = {f"p{i}": lambda i=i, values=values: self.product(i, values) for i, values in enumerate(products)}
        return first_calls.measure(calls, self.wait, lambda: None, lambda: self.now)


def test_products_are_those_of_the_weights_in_every_order() -> None:
    listed = first_calls.products()
    assert len({shape.key for shape in listed}) == len(listed) == 240
    assert [(s.N, s.K) for s in listed[::40]] == list(first_calls.WEIGHTS)
    for shapes in (listed[:40], listed[-40:]):
        rows = {shape.M for shape in shapes}
        assert rows > {32, 64, 128, 256, 512, 1024, 2048} and min(rows - {32, 64}) >= 65
    assert {shape.M for shape in listed[:40]} != {shape.M for shape in listed[40:80]}
    assert first_calls.products(1) == first_calls.products(1) != first_calls.products(2)
    assert Counter(first_calls.products(1)) == Counter(listed) and first_calls.products(1) != listed
    unseen = first_calls.products(-1)
    assert len(unseen) == 40 and {(s.N, s.K) for s in unseen} == {(5632, 2048)}
    assert not {(s.N, s.K) for suite in SUITES.values() for s in suite.shapes} & {(5632, 2048)}


def test_passes_go_on_until_all_is_compiled() -> None:
    machine = Machine(pending=3)
    found = machine.measure([2.0], [3.0])
    assert found["calls_ms"] == {"p0": 1000.0, "p1": 1000.0} and set(machine.calls.values()) == {1 + 3 + 2}
    assert found["compiled_s"] == pytest.approx(2 + 3 * 0.002) and found["last_pass_s"] == pytest.approx(0.002)
    assert found["changed"] == [] and found["digests"]["p0"] != found["digests"]["p1"]
    found = Machine(pending=float("inf")).measure([2.0] * 2)
    assert found["compiled_s"] is None


def test_a_first_pass_ends_in_time() -> None:
    """With a call of 1 s each, and later passes over the same."""
    machine = Machine()
    found = machine.measure(*[[1.0]] * 100)
    assert list(found["calls_ms"]) == [f"p{i}" for i in range(61)] == list(found["digests"])
    assert machine.calls == Counter({i: 3 for i in range(61)})


def test_a_bit_that_changes_is_seen() -> None:
    found = Machine().measure([0.0], [0.0, 0.0, -0.0], [float("nan")], [0.0, 1.0, 0.0])
    assert found["changed"] == ["p1"]
    assert found["digests"]["p0"] == found["digests"]["p1"] == found["digests"]["p3"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child on the CPU, where torch multiplies for us, and each number of columns has a class of bits."""
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    monkeypatch.setattr(first_calls, "products", lambda order: TINY[::-1] if order else TINY)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replace_all(monkeypatch, triton_gemm, linear=lambda *x: F.linear(*x), wait_until_compiled=lambda timeout: True)
    monkeypatch.setattr(triton_gemm, "explain", lambda a, b: SimpleNamespace(bits=str(b.shape)))


@pytest.mark.usefixtures("on_cpu")
def test_a_child_says_what_it_measured_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for arguments in (["triton_gemm", "0"], ["triton_gemm", "1"], ["torch", "0"]):
        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        first_calls.child()
        (line,) = capsys.readouterr().out.splitlines()
        runs.append(json.loads(line))
    plain, shuffled, torchs = runs
    assert list(plain["digests"]) == list(plain["calls_ms"]) == [shape.key for shape in TINY]
    assert plain["opens"] == shuffled["opens"] == [True, False, False, True, False, False] and "opens" not in torchs
    assert list(plain["digests"]) != list(shuffled["digests"])
    assert plain["digests"] == shuffled["digests"] == torchs["digests"] and plain["changed"] == []
    assert len(set(plain["digests"].values())) == 6
    monkeypatch.setattr(triton_gemm, "wait_until_compiled", lambda timeout: [][0])
    with pytest.raises(IndexError):
        first_calls.child()


def made_up_run(ours: bool = True, value: str = "a", **more: Any) -> dict[str, Any]:
    times = {"p0": 1500.0, "p1": 60.0, "p2": 0.2}
    run = {"calls_ms": times, "compiled_s": 12.34, "last_pass_s": 0.0561, "changed": []}
    return run | {"digests": dict.fromkeys(times, value)} | ({"opens": [True, False, False]} if ours else {}) | more


def test_the_table_and_the_bits() -> None:
    runs = {"on": made_up_run(), "off": made_up_run(compiled_s=None), "torch": made_up_run(ours=False, value="b")}
    text = first_calls.text({"scenarios": runs, "differences": first_calls.differences(runs)})
    assert "| on | 3 | 1.56 | 2 | 1,500 | 1 | 1 | 12.3 | 0.056 |" in text and "| not in time | 0.056 |" in text
    assert "| torch | 3 | 1.56 | 2 | 1,500 |  |  |  | 0.056 |" in text and "gives the same bits." in text
    runs |= {"off": made_up_run(digests={"p1": "b", "p2": "a"}, changed=["p2"])}
    differ = first_calls.differences(runs)
    assert differ == ["p2: off has other bits in the last pass", "p1: off gives other bits than on"]
    assert "**Bits differ: 2 times.**" in first_calls.text({"scenarios": runs, "differences": differ})


def test_the_command_writes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[Any, ...]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        cache = Path(env["TRITON_CACHE_DIR"])
        cold, background = not any(cache.iterdir()), env.get("TRITON_GEMM_BACKGROUND")
        runs.append((*command[3:], cold, background))
        without_kit.append("TRITON_GEMM_KIT" in env)
        (cache / "kernel").touch()
        found = made_up_run(command[3] == "triton_gemm", value=next(values))
        return SimpleNamespace(stdout=f"a warning\n{json.dumps(found)}\n")

    without_kit: list[bool] = []
    values: Iterator[str] = iter(
        ["a", "a", "a", "another Triton's", "torch's", "a", "torch's"] + ["a"] * 4 + ["a", "b"]
    )
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", "0")
    monkeypatch.setattr(subprocess, "run", run)
    replace_all(monkeypatch, environment, RESULTS=tmp_path, describe=lambda _: SURROUNDINGS)
    assert bench.main(["first-calls"]) == 0
    assert [one[:2] for one in runs[:5]] == [("triton_gemm", "0")] * 4 + [("torch", "0")]
    assert [one[:2] for one in runs[5:]] == [("triton_gemm", "-1"), ("torch", "-1")]
    assert [one[2:] for one in runs[:5]] == [(True, None), (True, "0"), (False, None), (True, None), (False, None)]
    assert without_kit == [False] * 3 + [True] + [False] * 3 and runs[5][2]
    record = read_json(tmp_path / "made-up-gpu" / "first-calls" / "results.json")
    assert record["environment"] == SURROUNDINGS and "digests" not in record["scenarios"]["off"]
    shown = block("first-calls", Results.read(tmp_path))
    assert first_calls.text(record) in shown and "Made-up GPU" in shown
    runs.clear()
    assert bench.main(["first-calls", "--orders", "2"]) == 0
    assert runs == [("triton_gemm", order, True, off) for order in ("1", "2") for off in (None, "0")]
    assert bench.main(["first-calls", "--orders", "1"]) == 1
    printed = capsys.readouterr()
    assert "FAILED p0: order 1, background off gives other bits than order 1, background on" in printed.err


def test_a_scenario_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(first_calls, "CHILD", "import sys; sys.exit(7)")
    monkeypatch.setattr(environment, "describe", lambda _: SURROUNDINGS)
    assert bench.main(["first-calls"]) == 1
    assert "process ended with 7" in capsys.readouterr().err
