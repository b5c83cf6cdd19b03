"""Fingerprints: equal where choices are, and ranks that would choose differently are told in what."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.processes import forked
from tests.support.table_fakes import HOPPER, problem_of, store
from triton_gemm import kernels, tables, tuning
from triton_gemm.hardware import device_model
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting import fingerprint
from triton_gemm.runtime import policies
from triton_gemm.selection import batch_invariance
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, ranked, select
from triton_gemm.tables import files

pytestmark = pytest.mark.usefixtures("default_policy")


def parts() -> dict[str, str]:
    return triton_gemm.selection_fingerprint(HOPPER, parts=True)


def differ(first: dict[str, str]) -> set[str]:
    now = parts()
    alike, before = ({name: x for name, x in of.items() if name != fingerprint.MAY_DIFFER} for of in (now, first))
    assert (triton_gemm.selection_fingerprint(HOPPER) == fingerprint._hash(repr(before))) == (alike == before)
    return {name for name in first if first[name] != now[name]}


def test_equal_states_have_equal_fingerprints(folder: Path) -> None:
    store(problem_of(1)), store(problem_of(2))
    first = parts()
    tables.reload()
    assert differ(first) == set()
    tables.clear()
    store(problem_of(2), us=1.5, measured="2001-01-01", by="another"), store(problem_of(1))
    assert differ(first) == set(), "times and dates decide nothing"
    assert len(triton_gemm.selection_fingerprint(HOPPER)) == 16
    assert triton_gemm.selection_fingerprint("h200") == triton_gemm.selection_fingerprint(named_device("h200"))
    tables.clear()
    empty = parts()
    folder.joinpath(files.Table(tables.GpuKey.of(HOPPER)).name).write_text(files.Table(tables.GpuKey.of(HOPPER)).text())
    tables.reload()
    assert tables.queries.tables_in(folder, HOPPER) and differ(empty) == set(), "a table of nothing is as none"


def of_class(problem: GemmProblem, wanted: Callable[[str], bool]) -> Selection:
    """The fastest legal selection, by the model, whose class of bits is wanted."""
    legal = (Selection.of(x, "") for _, x in ranked(problem, HOPPER) if illegal(problem, HOPPER, x) is None)
    return next(selection for selection in legal if wanted(bit_class(problem, selection)))


def test_entries_that_are_always_left_out_decide_nothing(folder: Path) -> None:
    """Of a class of bits that no product has, or that the GPU cannot run; one that only batch-invariant products have
    counts."""
    problem = problem_of(4)
    models, invariant = bit_class(problem, select(problem, HOPPER)), batch_invariance.class_of(problem, HOPPER)
    assert models != invariant
    empty = parts()
    left_out = of_class(problem, lambda name: name not in (models, invariant))
    assert tables.store(problem, left_out, HOPPER, us=1.0, default_us=2.0)
    assert differ(empty) == set()
    with triton_gemm.policy("cached", bits="any"):
        assert parts()["tables"] != empty["tables"]
    assert tables.store(problem, of_class(problem, lambda name: name == invariant), HOPPER, us=1.0, default_us=2.0)
    assert differ(empty) == {"tables"}
    tables.clear()
    algorithm = left_out.algorithm._replace(kernel="skinny", config=kernels.named("skinny").Config(16, 16, 64))
    cannot = replace(left_out, algorithm=algorithm)
    assert tables.store(problem_of(), cannot, HOPPER, us=1.0, default_us=2.0)
    for bits in files.BITS:
        with triton_gemm.policy("cached", bits=bits):
            assert parts()["tables"] == empty["tables"]


def test_other_states_have_other_fingerprints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = parts()
    store(problem_of())
    assert differ(first) == {"tables"}
    first = parts()
    store(problem_of(), 2)
    assert differ(first) == {"tables"}
    with triton_gemm.policy("error"):
        assert differ(parts() | {"policy": "cached, bits same"}) == {"policy"}
    with triton_gemm.policy("model"):
        model = parts()
        assert model["tables"] == "not asked"
        store(problem_of(), 3)
        assert differ(model) == set(), "the model asks no table"
    first = parts()
    store(problem_of(7), bits="any")
    assert differ(first) == set()
    with triton_gemm.policy("cached", bits="any"):
        assert differ(first) == {"policy", "tables"}
    assert triton_gemm.selection_fingerprint(replace(HOPPER, num_sms=114)) != triton_gemm.selection_fingerprint(HOPPER)
    monkeypatch.setattr(triton_gemm, "__version__", "9")
    assert differ(first) == {"versions"}
    slower = replace(device_model.model_of(HOPPER), launch=9.0)
    monkeypatch.setattr(fingerprint, "model_of", lambda _: slower)
    assert differ(first) == {"versions", "device model"}


def test_another_tuner_is_another_fingerprint(folder: Path) -> None:
    class Tuner:
        def __call__(self, problem: GemmProblem, device: DeviceInfo) -> Selection:
            raise AssertionError("it is named, and not asked")

    def named(tuner: Any) -> str:
        policies.set_tuner(tuner)
        return parts()["tuner"]

    assert named(Tuner()) == "not asked"
    with triton_gemm.policy("tune"):
        assert named(None) == "none"
        assert named(tuning._choose) == "triton_gemm.tuning._choose"
        assert named(Tuner()) == named(Tuner()) != named(tuning._choose)
        assert named(Tuner()).endswith(".Tuner") and named(lambda *_: None).endswith(".<lambda>")


def of_ranks(count: int, folder: Path, work: Callable[[int], object]) -> list[Any]:
    """What each rank's process makes of its number, among so many."""
    results = multiprocessing.get_context("fork").Queue()

    def rank(number: int) -> None:
        meeting = f"file://{folder}/meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=number, world_size=count)
        found = work(number)
        torch.distributed.destroy_process_group()
        results.put((number, found))

    processes = [forked(partial(rank, number)) for number in range(count)]
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return [found[number] for number in range(count)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Running all_gather_object on global rank 0")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_ranks_of_a_group_have_their_numbers_among_all(tmp_path: Path) -> None:
    """And who is not in the group is told nothing."""

    def work(number: int) -> str:
        group = torch.distributed.new_group([1, 2])
        if number == 2:
            triton_gemm.set_policy("model")
        try:
            triton_gemm.check_ranks(group, HOPPER)
        except RuntimeError as error:
            return str(error)
        return ""

    alone, *messages = of_ranks(3, tmp_path, work)
    assert alone == "" and messages[0] == messages[1]
    assert "policy (ranks 1: cached, bits same; ranks 2: model)" in messages[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_the_message_names_what_ranks_differ_in(tmp_path: Path) -> None:
    def work(number: int) -> list[str]:
        table_fakes.own_folder(tmp_path / str(number), pytest.MonkeyPatch())
        return table_fakes.messages_of_check_ranks(number, HOPPER)

    first, second = of_ranks(2, tmp_path, work)
    assert first == second
    agree, by_tables, by_policy = first
    assert agree == ""
    assert by_tables.startswith("ranks would choose differently, because they differ in tables (ranks 0: ")
    assert "policy (ranks 0: cached, bits same; ranks 1: model)" in by_policy


def test_without_a_gpu_the_fingerprint_is_the_interpreters() -> None:
    if not torch.cuda.is_available():
        device = triton_gemm.selection_fingerprint(parts=True)["device"]
        assert device.startswith("no GPU here, so that of Triton's interpreter")
    assert files.TRITON in parts()["versions"]
