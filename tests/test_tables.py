"""Tables: what they hold comes back, in whatever order they are merged, whoever writes, and whatever a file says."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tabled
from tests.tabled import HOPPER, another, entries, problem_of, problems, store, table_in
from triton_gemm import kernels, tables
from triton_gemm.device import INTERPRETER
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.select import ranked, select
from triton_gemm.tables import files, records, silicon
from triton_gemm.tables.files import Table
from triton_gemm.tables.records import Entry
from triton_gemm.tables.silicon import Silicon

few = settings(max_examples=40, deadline=None)
SILICON = Silicon((9, 0), 132, 6144, 700, "a GPU")


def found(problem: GemmProblem, **how: Any) -> Any:
    selection = tables.lookup(problem, HOPPER, **how)
    return selection and (selection.kernel, selection.config, selection.work, selection.source)


def chosen(problem: GemmProblem, nth: int = 1, source: str = "user's table") -> Any:
    selection = another(problem, nth)
    return selection.kernel, selection.config, selection.work, source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tabled.own_folder(tmp_path, monkeypatch)


# --- What is written is read ---


@few
@given(st.dictionaries(problems(), entries(), max_size=3), st.sampled_from(files.BITS))
def test_a_table_comes_back(held: dict[GemmProblem, Entry], bits: files.Bits) -> None:
    table = Table(SILICON, bits=bits, entries=held)
    read = files.parse(table.text().encode())
    assert read.wrong is None and read.table == table and read.table.silicon.name == SILICON.name
    assert read.table.text() == table.text()
    assert len(table.text().splitlines()) == 8 + len(held), "a line for each entry"


@pytest.mark.parametrize(("M", "K"), [(1, 4096), (16, 512), (512, 16384), (4096, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_candidate_can_be_held_and_is_as_legal_as_its_kernel_says(M: int, K: int, dtype: torch.dtype) -> None:
    problem = problem_of(M, 1000, K, dtype)
    problem = replace(problem, precision="ieee" if dtype == torch.float32 else "half")
    for _, name, candidate in ranked(problem, HOPPER):
        given_, config, work, swap_ab, packed = candidate
        entry = Entry(name, config, work, swap_ab, packed, 1.0, 1.0, "", "")
        assert records.read_entry(json.loads(json.dumps(records.plain(entry)))) == entry
        why = kernels.named(name).illegal(given_, HOPPER, config, work) or kernels.repack.illegal(problem, packed)
        assert records.illegal(problem, HOPPER, entry) == why
        selection = entry.selection(problem, "user's table")
        assert (selection.work, selection.precision) == (work, given_.precision)


def test_a_field_that_a_config_gains_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels.named("warp_specialised")
    old = Entry("warp_specialised", kernel.Config(128, 256, 64, 8, 4), Schedule(132), False, (), 1.0, 1.0, "", "")

    @dataclass(frozen=True)
    class Config(kernel.Config):  # type: ignore[name-defined,misc]
        CLUSTER_M: int = 1

    monkeypatch.setattr(kernel, "Config", Config)
    read = records.read_entry(records.plain(old))
    assert read.config == Config(128, 256, 64, 8, 4) and read.config.CLUSTER_M == 1
    new = replace(old, config=Config(128, 256, 64, 8, 4, 2))
    assert records.plain(new)["config"]["CLUSTER_M"] == 2 and records.read_entry(records.plain(new)) == new


@few
@given(st.lists(st.dictionaries(problems(), entries(), max_size=3), min_size=1, max_size=4), st.randoms())
def test_merging_in_any_order_gives_the_same(held: list[dict[GemmProblem, Entry]], chance: random.Random) -> None:
    held.append({problem: replace(entry, us=1.0) for problem, entry in held[0].items()})
    held.append({problem: replace(entry, us=1.0, swap_ab=not entry.swap_ab) for problem, entry in held[0].items()})
    given_ = [Table(replace(SILICON, name=str(i)), entries=x) for i, x in enumerate(held)]
    merged = files.merge(given_)
    shuffled = chance.sample(given_, len(given_))
    assert files.merge([files.merge(shuffled[:2]), *shuffled[1:]]).text() == merged.text()
    assert all(
        entry.us == min(x[problem].us for x in held if problem in x) for problem, entry in merged.entries.items()
    )


def test_tables_of_several_kinds_are_not_merged() -> None:
    for other in (Table(replace(SILICON, power_limit=350)), Table(SILICON, "3.6"), Table(SILICON, bits="any")):
        with pytest.raises(ValueError, match="of one kind"):
            files.merge([Table(SILICON), other])


# --- Asking ---


def test_a_users_entry_goes_before_a_shipped_one(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(tables, "SHIPPED", shipped)
    first, second = problem_of(M=256), problem_of(M=512)
    assert store(first, 2) and store(second, 2)
    os.rename(folder, shipped)
    tables.reload()
    assert store(second)
    assert found(first) == chosen(first, 2, "shipped table") and found(second) == chosen(second)
    assert found(problem_of(M=1024)) is None
    reason = str(tables.lookup(second, HOPPER))
    assert "1 us measured on 20" in reason and "the model's choice 2 us" in reason


def test_entries_of_any_bits_are_for_who_wants_them(folder: Path) -> None:
    problem = problem_of()
    assert store(problem) and store(problem, 2, bits="any")
    assert found(problem) == chosen(problem) and found(problem, bits="any") == chosen(problem, 2)


@pytest.mark.parametrize(
    "change", [{"num_sms": 114}, {"bus_width": 5120}, {"power_limit": 350}, {"capability": (9, 1)}]
)
def test_other_silicon_is_not_asked(folder: Path, change: dict[str, Any]) -> None:
    store(problem_of())
    assert found(problem_of()) and tables.lookup(problem_of(), replace(HOPPER, name="renamed"))
    assert tables.lookup(problem_of(), replace(HOPPER, **change)) is None


def test_what_the_device_cannot_run_is_left_out_and_counted(folder: Path) -> None:
    problem, wrong = problem_of(), problem_of(M=4096)
    selection = replace(another(problem), kernel="skinny", config=kernels.named("skinny").Config(16, 16, 64))
    assert tables.store(wrong, selection, HOPPER, us=1, default_us=2) and store(problem)
    assert found(wrong) is None and found(wrong) is None and found(problem)
    ((why, count),) = tables.ignored().items()
    assert why.startswith("user's table: ") and count == 2
    (report,) = tables.verify(HOPPER)
    assert report.entries == 2 and len(report.faults) == 1 and '"M": 4096' in report.faults[0]


@pytest.mark.parametrize(
    "work",
    [Schedule(132, 100, 1), Schedule(132, 4, 33), 2, Schedule(10**6)],
    ids=["more tiles than there are", "more parts than steps", "of another kind", "a grid of any size"],
)
def test_work_that_is_not_the_problems_is_never_launched(work: Any) -> None:
    config = kernels.named("warp_specialised").Config(128, 256, 64, 8, 4)
    entry = Entry("warp_specialised", config, work, False, (), 1.0, 1.0, "", "")
    why = records.illegal(problem_of(), HOPPER, entry)
    assert (why is None) == (work == Schedule(10**6))  # programs beyond the last item do nothing


def test_where_there_is_no_table_a_look_at_each_folder_is_all(folder: Path, monkeypatch: Any) -> None:
    looked: list[Any] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looked.append(path) or listdir(path))
    monkeypatch.setattr(silicon, "power_limit_of", lambda uuid: pytest.fail("NVML was asked"))
    for M in range(1, 20):
        assert found(problem_of(M)) is None
    assert looked == [folder, tables.SHIPPED]


def test_importing_reads_no_table_and_none_of_its_helpers(tmp_path: Path) -> None:
    code = """
import sys, torch, triton
seen = []
sys.addaudithook(lambda event, args: seen.append(str(args[0])) if event in ("open", "os.listdir") else None)
known = set(sys.modules)
import triton_gemm
looked = [name for name in seen if name.endswith(".json") or "cache" in name.split("/")]
print(sorted({"platformdirs", "filelock"} & (set(sys.modules) - known)), looked)
"""
    home = {**os.environ, "TRITON_GEMM_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=home, capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


def test_the_users_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("TRITON_GEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables._users_folder.cache_clear()
    assert tables.folder() == tmp_path / "triton_gemm" / "tables"
    tables._users_folder.cache_clear()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert tables.folder() is None and tables.lookup(problem_of(), HOPPER) is None and not store(problem_of())
    tables._users_folder.cache_clear()


def test_the_power_limit_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        def __init__(self, name: str) -> None:
            assert name.startswith("libnvidia-ml")

        nvmlInit_v2 = staticmethod(lambda: 0)  # noqa: N815
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid, _: uuid != b"GPU-known")  # noqa: N815

        @staticmethod
        def nvmlDeviceGetPowerManagementLimit(_: object, milliwatts: Any) -> int:  # noqa: N802
            milliwatts._obj.value = 699_800
            return 0

    monkeypatch.setattr(silicon.ctypes, "CDLL", Nvml)
    limits = [silicon.power_limit_of.__wrapped__(uuid) for uuid in ("known", "other", "")]
    assert limits == [700, 0, 0]
    assert str(Silicon.of(replace(HOPPER, bus_width=6144, power_limit=600))) == "sm_90-132sms-6144bit-600W"


@pytest.mark.parametrize("what", [{"scales": "blocks"}, {"groups": "m"}], ids=str)
def test_what_cannot_be_swapped_is_not(what: dict[str, Any]) -> None:
    """Even where Python checks no assertions."""
    entry = Entry("portable", kernels.named("portable").Config(64, 64, 32), 1, True, (), 1.0, 1.0, "", "")
    assert records.illegal(replace(problem_of(), **what), HOPPER, entry) == "it swaps what cannot be swapped"


# --- Who writes at once ---


def write_some(first: int, count: int = 8) -> None:
    selection = another(problem_of())
    for M in range(first, first + count):
        assert tables.store(problem_of(M), selection, HOPPER, us=M, default_us=2 * M)


def test_64_threads_lose_nothing(folder: Path) -> None:
    threads = [threading.Thread(target=write_some, args=(1 + 2 * i, 2)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = files.load(table_in(folder)).table
    assert held and {problem.M for problem in held.entries} == set(range(1, 129))
    assert not list(folder.glob("*.tmp"))


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_8_processes_lose_nothing(folder: Path) -> None:
    processes = [forked(lambda i=i: write_some(1 + 8 * i)) for i in range(8)]  # type: ignore[misc]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == 8 * [0]
    tables.reload()
    assert all(tables.lookup(problem_of(M), HOPPER) for M in range(1, 65))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_while_saving_loses_nothing(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(problem_of(1))
    before = table_in(folder).read_bytes()

    def work() -> None:
        setattr(os, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        store(problem_of(2))

    process = forked(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL and table_in(folder).read_bytes() == before
    assert store(problem_of(3)) and found(problem_of(1)) and found(problem_of(3)) and not list(folder.glob("*.tmp"))


def test_a_full_disk_loses_nothing(folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    store(problem_of(1))
    before = table_in(folder).read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store(problem_of(2)) and not store(problem_of(3))
    assert table_in(folder).read_bytes() == before and not list(folder.glob("*.tmp"))
    assert caplog.messages == [f"nothing is kept in {folder}: No space left on device"]


def test_who_holds_the_lock_is_not_waited_for_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT", 0.05)
    done: list[bool] = []
    with files.locked(folder):
        thread = threading.Thread(target=lambda: done.append(store(problem_of())))
        thread.start()
        thread.join()
    assert done == [False] and store(problem_of())


def test_a_clock_that_jumps_decides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    assert store(problem, 2, measured="9999-12-31T00:00:00+00:00")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert store(problem, 1, measured="1970-01-01T00:00:00+00:00", us=1.5)
    assert found(problem) == chosen(problem)


def test_a_folder_that_is_only_read(folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    store(problem_of(1))

    @contextmanager
    def refused(_: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")
        yield

    monkeypatch.setattr(files, "locked", refused)
    tables.reload()
    assert found(problem_of(1)) and not store(problem_of(2)) and not store(problem_of(2))
    assert caplog.messages == [f"nothing is kept in {folder}: Permission denied"]
    table_in(folder).write_text("{")
    tables.reload()
    assert found(problem_of(1)) is None and table_in(folder).read_text() == "{"
    assert len(caplog.messages) == 2 and "cannot be set aside" in caplog.messages[1]


def test_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", os.devnull)
    assert not store(problem_of()) and tables.clear() == 0 and found(problem_of()) is None


# --- What a file may say ---


def edited(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Of a file's one entry, or of the file: dotted names and new values."""

    def edit(file: dict[str, Any]) -> dict[str, Any]:
        for name, value in changes.items():
            at: Any = file["entries"][0] if name.split("__")[0] in file["entries"][0] else file
            *path, last = name.split("__")
            for step in path:
                at = at[step]
            at[last] = value
        return file

    return edit


HOSTILE: dict[str, tuple[str, Any]] = {
    "truncated": ("not-json", lambda file: json.dumps(file)[:-40]),
    "empty": ("not-json", lambda file: ""),
    "deep": ("not-json", lambda file: 100_000 * "["),
    "nan": ("not-json", edited(us=float("nan"))),
    "digits": ("not-json", lambda file: json.dumps(file).replace('"M": 512', '"M": ' + 5000 * "9")),
    "a list": ("no-table", lambda file: [file]),
    "future": ("future-format", edited(format=2)),
    "far future": ("future-format", edited(format=10**300)),
    "a format of text": ("no-table", edited(format="1")),
    "no silicon": ("no-table", edited(silicon={})),
    "other silicon": ("other-kind", edited(silicon__sms=114)),
    "a path for a version": ("no-table", edited(triton="../../3.7")),
    "a path for bits": ("no-table", edited(bits="../same")),
    "bits of a list": ("no-table", edited(bits=[])),
    "no entries": ("no-table", edited(entries={})),
    "an entry of text": ("wrong-entries", edited(entries=["__import__('os')"])),
    "an unknown kernel": ("wrong-entries", edited(kernel="os")),
    "a module for a kernel": ("wrong-entries", edited(kernel="repack")),
    "a kernel of a list": ("wrong-entries", edited(kernel=["portable"])),
    "an unknown field": ("wrong-entries", edited(config__run="rm")),
    "a field too many": ("wrong-entries", lambda file: edited(entries=[file["entries"][0] | {"selection": "x"}])(file)),
    "a dtype that is a function": ("wrong-entries", edited(problem__dtype="load")),
    "no dtype": ("wrong-entries", edited(problem__dtype=None)),
    "an unknown precision": ("wrong-entries", edited(problem__precision="fast")),
    "an unknown activation": ("wrong-entries", edited(problem__activation="os.system")),
    "a negative size": ("wrong-entries", edited(problem__M=-1)),
    "a size of text": ("wrong-entries", edited(problem__M="512")),
    "a size that is true": ("wrong-entries", edited(problem__M=True)),
    "a huge size": ("wrong-entries", edited(problem__M=2**63)),
    "no tile": ("wrong-entries", edited(config__BLOCK_M=0)),
    "an odd tile": ("wrong-entries", edited(config__BLOCK_M=5)),
    "a huge tile": ("wrong-entries", edited(config__BLOCK_M=2**40)),
    "a fraction of a warp": ("wrong-entries", edited(config__num_warps=0.5)),
    "no programs": ("wrong-entries", edited(work__programs=0)),
    "no group": ("wrong-entries", edited(work__group_m=0)),
    "a schedule to wait for": ("wrong-entries", edited(work__split_tiles=2**20, work__split_k=2**20)),
    "work that is none": ("wrong-entries", edited(work=0)),
    "less than no work": ("wrong-entries", edited(work=-1)),
    "a huge split": ("wrong-entries", edited(work=2**40)),
    "a grid of any size": ("wrong-entries", edited(work__programs=2**40)),
    "work of text": ("wrong-entries", edited(work="1")),
    "an operand twice": ("wrong-entries", edited(packed=["a", "a"])),
    "an operand with a path": ("wrong-entries", edited(packed=["../a"])),
    "an endless time": ("wrong-entries", edited(us=10**400)),
    "a negative time": ("wrong-entries", edited(us=-1.0)),
    "a date without end": ("wrong-entries", edited(measured=1000 * "1")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_set_aside(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    word, hostile = HOSTILE[name]
    store(problem_of())
    path = table_in(folder)
    made = hostile(json.loads(path.read_text()))
    text = made if isinstance(made, str) else json.dumps(made)
    for number in (1, 2):
        path.write_text(text)
        caplog.clear()
        tables.reload()
        assert found(problem_of()) is None and found(problem_of()) is None
        aside = path.with_name(f"{path.name}.{word}.{number}")
        assert aside.read_text() == text and len(caplog.messages) == 1 and aside.name in caplog.text
    assert store(problem_of()) and found(problem_of()) == chosen(problem_of())
    assert [report.faults for report in tables.verify(HOPPER)] == 2 * [("it is set aside",)] + [()]
    with pytest.raises(ValueError, match="of one kind" if word == "other-kind" else aside.name):
        tables.merge([path, aside], folder / "out")


def test_the_entries_that_can_be_read_go_on(folder: Path) -> None:
    store(problem_of(1)), store(problem_of(2))
    path = table_in(folder)
    path.write_text(path.read_text().replace('"M": 2,', '"M": "2",'))
    tables.reload()
    assert found(problem_of(1)) and found(problem_of(2)) is None
    assert set(files.load(path).table.entries) == {problem_of(1)}  # type: ignore[union-attr]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_file_makes_reading_fail(data: st.DataObject) -> None:
    """One value of a good file, or several, is anything or is missing; or the file is any bytes."""
    problem = problem_of()
    entry = Entry("warp_specialised", another(problem).config, Schedule(132), False, (), 1.0, 1.0, "", "")
    file = json.loads(Table(SILICON, entries={problem: entry}).text())
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = file
        while True:
            name = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
            if not isinstance(at[name], (dict, list)) or not at[name] or data.draw(st.booleans()):
                break
            at = at[name]
        if data.draw(st.booleans()):
            at[name] = data.draw(JSON)
        else:
            del at[name]
    text = data.draw(st.one_of(st.just(json.dumps(file).encode()), st.binary(max_size=50)))
    read = files.parse(text)
    assert (read.table is None) <= (read.wrong is not None)
    for kept, its in (read.table.entries if read.table else {}).items():
        records.illegal(kept, HOPPER, its)
        assert Path(read.table.name).name == read.table.name  # type: ignore[union-attr]


def test_what_is_no_file_is_not_read(folder: Path) -> None:
    """Reading a pipe would wait for ever."""
    folder.mkdir()
    path = folder / Table(Silicon.of(HOPPER)).name
    os.mkfifo(path)
    assert found(problem_of()) is None and not path.exists() and len(list(folder.glob("*.no-table.1"))) == 1
    path.mkdir()
    tables.reload()
    assert found(problem_of()) is None


# --- Files from one machine to another ---


def test_tables_travel(folder: Path, tmp_path: Path) -> None:
    first, second, out = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "both.json"
    store(problem_of(1)), store(problem_of(2), us=3.0)
    assert tables.export_to(first, HOPPER) == 2
    assert tables.clear() == 1 and found(problem_of(1)) is None and tables.export_to(second, HOPPER) == 0
    store(problem_of(2), 2, us=2.0), store(problem_of(3))
    tables.export_to(second, HOPPER)
    assert tables.merge([first, second], out) == 3
    assert tables.import_from(first) == 2
    assert table_in(folder).read_bytes() == out.read_bytes()
    assert found(problem_of(2)) == chosen(problem_of(2), 2), "the faster one"
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"no such file|no regular file|cannot be read"):
            tables.import_from(path)


def test_a_table_of_other_silicon_can_be_kept_and_is_not_used(folder: Path, tmp_path: Path) -> None:
    other = replace(HOPPER, num_sms=78)
    path = tmp_path / "other.json"
    entry = Entry("portable", kernels.named("portable").Config(64, 64, 32), 1, False, (), 1.0, 1.0, "", "")
    path.write_text(Table(Silicon.of(other), entries={problem_of(): entry}).text())
    assert tables.import_from(path) == 1 and found(problem_of()) is None
    (report,) = tables.verify(HOPPER)
    assert report.faults == ("it is of sm_90-78sms-0bit-0W and Triton " + files.TRITON,)


def test_the_interpreter_has_tables_like_any_device(folder: Path) -> None:
    problem = problem_of(64, 64, 64)
    selection = select(problem, INTERPRETER)
    assert tables.store(problem, selection, INTERPRETER, us=1, default_us=1)
    held = tables.lookup(problem, INTERPRETER)
    assert held == replace(selection, reason=held.reason, source="user's table")  # type: ignore[union-attr]


def test_nothing_is_logged_where_all_is_well(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triton_gemm")
    assert store(problem_of()) and found(problem_of()) and tabled.table_in(folder).stat().st_size < 2000
    assert caplog.messages == []
