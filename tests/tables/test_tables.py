"""Tables: what they hold comes back, in whatever order they are merged, whoever writes, and whatever a file says."""

from __future__ import annotations

import json
import logging
import os
import pwd
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.patches import noted, replace_all
from tests.support.table_fakes import HOPPER, another, chosen, entries, found, problem_of, problems, store, table_in
from triton_gemm import kernels, tables
from triton_gemm.calibration import kept
from triton_gemm.hardware import nvml
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import illegal as select_illegal
from triton_gemm.selection.select import ranked, select
from triton_gemm.tables import files, records
from triton_gemm.tables.files import Table
from triton_gemm.tables.records import Entry

few = settings(max_examples=40, deadline=None)
GPU_KEY = GpuKey((9, 0), 132, 6016, 700, "a GPU")
CANNOT = Algorithm("skinny", kernels.named("skinny").Config(16, 16, 64))  # run: it has no such tile


@few
@given(st.dictionaries(problems(), entries(), max_size=3), st.sampled_from(files.BITS))
def test_a_table_comes_back(held: dict[GemmProblem, Entry], bits: files.Bits) -> None:
    table = Table(GPU_KEY, bits=bits, entries=held)
    read = files.parse(table.text().encode())
    assert read.wrong is None and read.table == table and read.table.gpu_key.name == GPU_KEY.name
    assert read.table.text() == table.text()
    assert len(table.text().splitlines()) == 8 + len(held), "a line for each entry"


@pytest.mark.parametrize(("M", "K"), [(1, 4096), (16, 512), (512, 16384), (4096, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_candidate_can_be_held_and_is_as_legal_as_its_kernel_says(M: int, K: int, dtype: torch.dtype) -> None:
    problem = problem_of(M, 1000, K, dtype)
    problem = replace(problem, precision="ieee" if dtype == torch.float32 else "half")
    for _, candidate in ranked(problem, HOPPER):
        entry = Entry(candidate.algorithm, 1.0, 1.0, "", "")
        assert records.read_entry(json.loads(json.dumps(records.plain(entry)))) == entry
        assert not {"residual", "gate", "preactivation"} & records.plain(problem).keys()
        assert records.illegal(problem, HOPPER, entry.algorithm) == select_illegal(problem, HOPPER, candidate)
        selection = entry.selection(problem, "user's table")
        assert (selection.algorithm, selection.precision) == (candidate.algorithm, candidate.problem.precision)


def test_a_field_that_a_config_gains_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels.named("warp_specialised")
    how = Algorithm("warp_specialised", kernel.Config(128, 256, 64, 8, 4), Schedule(132))
    old = Entry(how, 1.0, 1.0, "", "")

    @dataclass(frozen=True)
    class Config(kernel.Config):
        CLUSTER_M: int = 1

    monkeypatch.setattr(kernel, "Config", Config)
    read = records.read_entry(records.plain(old)).algorithm.config
    assert read == Config(128, 256, 64, 8, 4) and read.CLUSTER_M == 1
    new = replace(old, algorithm=how._replace(config=Config(128, 256, 64, 8, 4, 2)))
    assert records.plain(new)["config"]["CLUSTER_M"] == 2 and records.read_entry(records.plain(new)) == new


def test_a_users_entry_goes_before_a_shipped_one(folder: Path) -> None:
    first, second = problem_of(M=256), problem_of(M=512)
    assert store(first, 2) and store(second, 2)
    os.rename(folder, tables.queries.SHIPPED)
    tables.reload()
    assert store(second)
    assert found(first) == chosen(first, 2, "shipped table") and found(second) == chosen(second)
    assert found(problem_of(M=1024)) is None
    reason = str(tables.lookup(second, HOPPER))
    assert "1 us measured on 20" in reason and "the model's choice 2 us" in reason


@pytest.mark.parametrize("path", sorted(tables.queries.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_legal_and_beats_what_the_model_chooses(path: Path, monkeypatch: Any) -> None:
    """After a change of choices, rebuild tables by `python -m perf.tuning --rebuild RECORDS --table FILE`; tests/perf
    compares them with their records."""
    monkeypatch.setattr(forms, "CLUSTERS", True)  # as with the Triton that it was measured on
    found = files.contents_of(path)
    table = found.table
    assert found.wrong is None and table is not None and table.name == path.name
    (device,) = (gpu for gpu in map(named_device, ("h100", "h200")) if GpuKey.of(gpu) == table.gpu_key)
    for problem, entry in table.entries.items():
        choice = select(problem, device)
        served = entry.selection(problem, "shipped table")
        assert entry.us < entry.default_us and records.illegal(problem, device, entry.algorithm) is None
        assert bit_class(problem, served) == bit_class(problem, choice)
        assert records.named(choice) == entry.default


def test_entries_of_any_bits_are_for_who_wants_them(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged where all is well."""
    caplog.set_level(logging.INFO, "triton_gemm")
    problem = problem_of()
    assert store(problem) and store(problem, 2, bits="any")
    assert found(problem) == chosen(problem) and found(problem, bits="any") == chosen(problem, 2)
    assert caplog.messages == [] and all(path.stat().st_size < 2000 for path in folder.glob("*.json"))


@pytest.mark.parametrize(
    "change", [{"num_sms": 114}, {"bus_width": 5120}, {"power_limit": 350}, {"capability": (9, 1)}]
)
def test_a_table_of_another_gpu_key_serves_nothing(folder: Path, change: dict[str, Any]) -> None:
    store(problem_of())
    assert found(problem_of()) and tables.lookup(problem_of(), replace(HOPPER, name="renamed"))
    assert tables.lookup(problem_of(), replace(HOPPER, **change)) is None


def test_what_the_device_cannot_run_is_left_out_and_counted(folder: Path) -> None:
    problem, wrong = problem_of(), problem_of(M=4096)
    selection = replace(another(problem), algorithm=CANNOT)
    assert tables.store(wrong, selection, HOPPER, us=1, default_us=2) and store(problem)
    assert found(wrong) is None and found(wrong) is None and found(problem)
    ((why, count),) = tables.ignored().items()
    assert why.startswith("user's table: ") and count == 2
    (report,) = tables.verify(HOPPER)
    assert report.entries == 2 and len(report.faults) == 1 and '"M": 4096' in report.faults[0]


@pytest.mark.parametrize(
    ("work", "legal"),
    [
        pytest.param(Schedule(132, 100, 1), False, id="more tiles than there are"),
        pytest.param(Schedule(132, 4, 33), False, id="more parts than steps"),
        pytest.param(Schedule(9, split_k=32), True, id="as many parts in turn as steps"),
        pytest.param(Schedule(9, split_k=33), False, id="more parts in turn"),
        pytest.param(2, False, id="of another kind"),
        pytest.param(Schedule(10**6), True, id="programs beyond the last item, which do nothing"),
    ],
)
def test_work_that_is_not_the_problems_is_never_launched(work: Any, legal: bool) -> None:
    config = kernels.named("warp_specialised").Config(128, 128, 64, 8, 5)
    assert (records.illegal(problem_of(), HOPPER, Algorithm("warp_specialised", config, work)) is None) == legal


def test_where_there_is_no_table_each_folder_is_listed_once(folder: Path, monkeypatch: Any) -> None:
    listed = noted(monkeypatch, os, "listdir", lambda path: path)
    monkeypatch.setattr(nvml, "power_limit", lambda uuid: pytest.fail("NVML was asked"))
    for M in range(1, 20):
        assert found(problem_of(M)) is None
    assert listed == [folder, tables.queries.SHIPPED]


def test_the_users_folder_is_the_platforms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("TRITON_GEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tables.queries, "_users_folder", tables.queries._users_folder.__wrapped__)  # nothing is cached
    assert tables.folder() == tmp_path / "triton_gemm" / "tables"
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    files.say_once.cache_clear()
    assert tables.folder() is None and tables.lookup(problem_of(), HOPPER) is None and not store(problem_of())
    assert caplog.messages == [
        "platformdirs is not installed: a user's tables are looked for in TRITON_GEMM_CACHE_DIR only",
        "nothing is kept: there is no folder for it: set TRITON_GEMM_CACHE_DIR",
    ]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("older", [False, True], ids=["raises", "unexpanded"])
def test_a_user_without_a_home_has_no_tables(
    named: bool, older: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that is run with --user."""
    platformdirs = pytest.importorskip("platformdirs")
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_GEMM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    if named:
        monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "~/tables")
    if older:
        monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **how: Path("~/.cache"))
    files.say_once.cache_clear()
    monkeypatch.setattr(tables.queries, "_users_folder", tables.queries._users_folder.__wrapped__)  # nothing is cached
    assert tables.folder() is None and kept.folder() is None and found(problem_of()) is None
    assert not store(problem_of()) and tables.clear() == 0
    assert [message for message in caplog.messages if "home folder" in message] == caplog.messages[:1]


def test_the_folder_that_is_named_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "~/x")
    assert tables.folder() == tmp_path / "x" / "tables" and store(problem_of()) and found(problem_of())
    assert not Path("~").exists()


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("odd", [{"BLOCK_M": 96}, {"BLOCK_N": 48}, {"BLOCK_K": 48}, {"num_warps": 12}], ids=str)
def test_only_the_warp_specialised_kernel_has_sides_that_are_no_powers_of_two(kernel: str, odd: dict[str, int]) -> None:
    """Along N, and warps: its rows are those of whole warpgroups. Triton compiles no others."""
    algorithm = Algorithm(kernel, replace(kernels.named(kernel).Config(64, 64, 64), **odd))
    ((name, value),) = odd.items()
    fits = kernel == "warp_specialised" and name in ("BLOCK_N", "num_warps")
    assert records.nonsense(algorithm) == (None if fits else f"{name} = {value}")


@pytest.mark.parametrize("packed", [(), ("a",), ("b",), ("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("kernel", ["warp_specialised", "portable"])
def test_planes_are_copies_of_both_operands_or_of_none(kernel: str, packed: tuple[str, ...]) -> None:
    problem = replace(problem_of(dtype=torch.float32), precision="bf16x3")
    candidates = (candidate for _, candidate in ranked(problem, HOPPER) if candidate.algorithm.kernel == kernel)
    legal = next(candidate.algorithm for candidate in candidates if select_illegal(problem, HOPPER, candidate) is None)
    fits = set(packed) == set(legal.packed)
    assert (records.illegal(problem, HOPPER, legal._replace(packed=packed)) is None) == fits
    assert fits == (len(packed) == (2 if kernel == "warp_specialised" else 0))


@pytest.mark.parametrize("what", [{"scales": "blocks"}, {"groups": "m"}], ids=str)
def test_what_cannot_be_swapped_is_not(what: dict[str, Any]) -> None:
    """Even where Python checks no assertions."""
    swapped = Algorithm("portable", kernels.named("portable").Config(64, 64, 32), swap_ab=True)
    assert records.illegal(replace(problem_of(), **what), HOPPER, swapped) == "it swaps what cannot be swapped"


def test_a_gpu_that_is_here_is_asked_what_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's silicon does not say all that a model is derived from."""
    here = replace(HOPPER, name="renamed", bandwidth=1e6)
    assert tables.device_of(GpuKey.of(HOPPER)) == HOPPER
    replace_all(monkeypatch, torch.cuda, is_available=lambda: True, device_count=lambda: 2)
    devices = replace(here, num_sms=66), here
    monkeypatch.setattr(tables.changes, "device_info", lambda device: devices[device.index])
    assert tables.device_of(GpuKey.of(HOPPER)) is here


def test_a_table_of_another_gpu_key_can_be_kept_and_is_not_used(folder: Path, tmp_path: Path) -> None:
    other = replace(HOPPER, num_sms=78)
    path = tmp_path / "other.json"
    entry = Entry(Algorithm("portable", kernels.named("portable").Config(64, 64, 32)), 1.0, 1.0, "", "")
    path.write_text(Table(GpuKey.of(other), entries={problem_of(): entry}).text())
    assert tables.import_from(path) == 1 and found(problem_of()) is None
    (report,) = tables.verify(HOPPER)
    assert report.faults == ("it is of sm_90-78sms-0bit-0W",), "and not of another Triton"


def test_a_gpu_may_be_given_by_its_name(folder: Path, tmp_path: Path) -> None:
    problem = problem_of()
    assert tables.store(problem, select(problem, named_device("h200")), "h200", us=1, default_us=1)
    (report,) = [x for x in tables.verify("H200") if x.source == "user's table"]
    assert (report.entries, report.faults) == (1, ())
    assert [tables.export_to(tmp_path / "out", name) for name in ("h200", "a100")] == [1, 0]
    with pytest.raises(ValueError, match="device must be one of"):
        tables.verify("h2000")


def test_the_interpreter_has_tables_like_any_device(folder: Path) -> None:
    problem = problem_of(64, 64, 64)
    selection = select(problem, INTERPRETER)
    assert tables.store(problem, selection, INTERPRETER, us=1, default_us=1)
    held = tables.lookup(problem, INTERPRETER)
    assert held == replace(selection, reason=held.reason, source="user's table")


def test_values_are_read_within_their_bounds() -> None:
    most, long = records.LARGEST, "x" * records.LONGEST
    for kind, taken, refused in (
        (int, [0, 5, -5, most, -most], [most + 1, -most - 1, True, 1.0, "1", None]),
        (float, [0, 0.5, most - 1.0], [-0.5, float(most), float("inf"), float("nan"), True, "1", None]),
        (str, ["", long], [long + "x", 1, None]),
        (bool, [True, False], [1, 0, None]),
        (int | None, [None, 3], ["3", most + 1]),
        (tuple[int, ...], [[], [1, 2]], [1, ["1"], [0] * records.LONGEST]),
        (tuple[int, str], [[1, "a"]], [[1], ["a", 1], [1, "a", 2]]),
    ):
        for value in taken:
            found = records.read(kind, value)
            assert found == (tuple(value) if isinstance(value, list) else value)
        for value in refused:
            with pytest.raises(records.WrongError, match="is not a valid "):
                records.read(kind, value)


@pytest.mark.parametrize("name", ["us", "default_us"])
@pytest.mark.parametrize("us", [0, 1e-320, 0.009])
def test_nothing_takes_no_time(name: str, us: float, folder: Path) -> None:
    """A file that says so would win every merge."""
    store(problem_of())
    path = table_in(folder)
    document = json.loads(path.read_text())
    document["entries"][0][name] = us
    path.write_text(json.dumps(document))
    assert "it takes" in str(files.contents_of(path).wrong)
    with pytest.raises(ValueError, match=r"it takes|must be a positive number"):
        store(problem_of(64), **{name: us})
    document["entries"][0][name] = records.LEAST_US
    path.write_text(json.dumps(document))
    assert files.contents_of(path).wrong is None


def test_nothing_is_stored_that_cannot_be_read_again(folder: Path) -> None:
    for what in ({"us": 1e300}, {"by": "x" * 1000}):
        with pytest.raises(ValueError, match="is no"):
            store(problem_of(), **what)
    for value in (float("nan"), float("inf"), -float("inf")):  # which JSON has not
        with pytest.raises(ValueError):
            records.text_of({"us": value})
    assert not folder.exists()


def test_an_entry_says_which_choice_of_the_models_was_timed(folder: Path) -> None:
    """By a name that is the same from a kit and compiled."""
    store(problem_of())
    (entry,) = files.contents_of(table_in(folder)).table.entries.values()
    choice = select(problem_of(), HOPPER)
    used = replace(choice, kit=True, device="a GPU", policy="model", bits="of a class", source="user's table")
    assert entry.default == records.named(choice) == records.named(used)
    older = {name: value for name, value in records.plain(entry).items() if name != "default"}
    assert records.read_entry(older) == replace(entry, default="")


def test_what_cannot_be_written_raises_and_leaves_nothing(tmp_path: Path) -> None:
    for write in (files.write, files.write_for_user):
        with pytest.raises(FileNotFoundError) as caught:
            write(tmp_path / "gone" / "table.json", "{}")
        assert caught.value.filename == str(tmp_path / "gone" / "table.json") and caught.value.__suppress_context__
    (tmp_path / "table.json").mkdir()
    with pytest.raises(OSError):
        files.write(tmp_path / "table.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
