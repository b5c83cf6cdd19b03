"""Windows of NaN and sentinels, and operands far apart, in the interpreter: kernels pass, planted bugs are found; and
what sanitizers watch on a GPU is every form of every kernel."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support import kernel_forms, nan_windows
from tests.support.kernel_forms import SMALL, Alone, Far, Separate, circumstances
from tests.support.random_products import Memory, Prepared, Problem
from tests.support.table_fakes import HOPPER
from tests.support.tiers import one
from triton_gemm import kernels
from triton_gemm.hardware.device import device_info
from triton_gemm.runtime.plan import InterpretedPlan

CPU = device_info(torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("share", ["1/4", "2/4", "3/4", "4/4"])
@pytest.mark.parametrize("offset", [0, 3])
def test_nothing_outside_is_read_or_written(offset: int, share: str) -> None:
    found = list(nan_windows.calls(Separate("cpu"), CPU, kernel_forms.shared(circumstances(SMALL), share), offset))
    failed: list[str] = []
    assert nan_windows.multiply(found, 1, failed.append) == len(found) >= 12
    assert failed == []


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("offset", [0, 1])
def test_rungs_read_and_write_nothing_outside(offset: int) -> None:
    found = list(nan_windows.by_rungs(Separate("cpu"), CPU, offset))
    failed: list[str] = []
    assert nan_windows.multiply(found, 1, failed.append) == len(found) >= 16
    assert failed == []


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_far_operands_span_what_they_say(which: str) -> None:
    """And are multiplied right."""
    far = {name: problem for name, problem in circumstances(SMALL).items() if name in nan_windows.FAR}
    assert set(far) == set(nan_windows.FAR)
    memory = Far("cpu", which, 1 << 16)
    for problem in far.values():
        x = dict(zip("abc", Prepared(problem, memory, by_plan=True).operands, strict=True))[which]
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        assert last > 1 << 16 and (last + 1) * x.itemsize <= memory.size
        assert 1 in x.stride()
    few = {name: far[name] for name in ("bf16 ntn", "bf16 few", "bf16 groups of rows", "int8")}
    failed: list[str] = []
    found = [*nan_windows.calls(memory, CPU, few, 0), *nan_windows.by_rungs(memory, CPU, 0)]
    nan_windows.multiply(found, 1, failed.append)
    assert failed == []


@pytest.mark.parametrize(("bug", "words"), [("write", "no result's"), ("read", "elements are wrong")])
def test_a_planted_bug_is_found(
    bug: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # which the command changes
    assert nan_windows.main(["--planted", bug, "--calls", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: a planted bug" in printed and words in printed and "1 products; 1 failures" in printed


def test_a_command_without_bugs_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_windows, "circumstances", lambda: circumstances(SMALL))
    assert nan_windows.main(["--calls", "8", "--share", "50/50"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(" products; 0 failures\n") and int(printed.split()[0]) >= 8
    assert nan_windows.main(["--share", "99/99"]) == 1  # there is none


def test_a_candidate_that_fuzzing_draws_has_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes before C is seen."""
    run = InterpretedPlan.run

    def stray(self: InterpretedPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *more: object) -> None:
        run(self, a, b, c, *more)  # type: ignore[arg-type]
        c.as_strided((1,), (1,), c.storage_offset() - 1).zero_()

    problem = Problem("mm", (5, 8, 16), "bfloat16", candidate=3)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(InterpretedPlan, "run", stray)
        prepared = Prepared(problem, Memory("cpu"))
        prepared.fill("normal", 1)
        prepared.call()
        wrong, _, outside = prepared.verdict().tolist()
        assert wrong == 0 and (outside > 0) == planted


def test_the_command_takes_each_operand_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nan_windows, "circumstances", lambda: {"bf16 few": circumstances(SMALL)["bf16 few"]})
    monkeypatch.setattr(nan_windows, "Far", lambda device, which: Far(device, which, 1 << 14))
    monkeypatch.setattr(nan_windows, "by_rungs", lambda *_: [])
    seen: list[str] = []
    judged = nan_windows.judged

    def judge(found: list[tuple[nan_windows.Call, str, torch.Tensor]]) -> list[str]:
        for call, *_ in found:
            operands = zip("abc", call.prepared.operands, strict=True)
            seen.extend(name for name, x in operands if max(x.stride()) > 1 << 8)
        return list(judged(found))

    monkeypatch.setattr(nan_windows, "judged", judge)
    assert nan_windows.main(["--far", "a", "b", "c", "--calls", "1"]) == 0
    assert sorted(set(seen)) == ["a", "b", "c"] and seen == sorted(seen)


def watched(most: int, inline_ptx: bool = True) -> Counter[str]:
    """How often each form is, on Hopper."""
    found = kernel_forms.variants(circumstances(), Memory("meta"), HOPPER, most, inline_ptx=inline_ptx)
    return Counter(variant.form for _, chosen in found for variant in chosen)


def test_every_form_of_every_kernel_is_watched() -> None:
    everything, few = watched(1000), watched(nan_windows.UNALIGNED)
    assert set(few) == set(everything)
    assert {form.partition(",")[0] for form in everything} == set(kernels.KERNELS)
    assert {"fma, split, in turn", "warp_specialised, second launch", "gemv, split"} <= set(everything)
    assert "warp_specialised, parts in turn" in everything
    assert not any("clusters" in form or "wide" in form for form in watched(1, inline_ptx=False))


@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_every_kernel_has_far_operands(which: str) -> None:
    """And copies of them, and second launches."""
    problems = {name: problem for name, problem in circumstances().items() if name in nan_windows.FAR}
    found = kernel_forms.variants(problems, Far("meta", which), HOPPER, nan_windows.ALIGNED)
    chosen = [variant for _, several in found for variant in several]
    assert {variant.selection.kernel for variant in chosen} == set(kernels.KERNELS)
    assert any(which in variant.selection.packed for variant in chosen) or which == "c"
    assert any("second launch" in variant.form for variant in chosen)


def test_shares_are_all_there_is() -> None:
    every = circumstances()
    parts = [kernel_forms.shared(every, f"{i + 1}/7") for i in range(7)]
    assert sorted(name for part in parts for name in part) == sorted(every)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("name", ["bf16 ntn", "bf16 odd", "bf16 with steps", "bf16 batch between", "fp32 tf32"])
def test_operands_end_where_their_memory_ends(name: str) -> None:
    """So that memcheck sees what is read after them."""
    for x in Prepared(circumstances()[name], Alone("cpu"), by_plan=True).operands:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        assert (x.storage_offset() + last + 1) * x.itemsize == x.untyped_storage().nbytes()
