"""Tables under faults: many writers, kills, full disks, folders that are only read, and files that say anything."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.patches import replace_all
from tests.support.processes import forked, printed
from tests.support.table_fakes import HOPPER, another, chosen, found, problem_of, store, table_in
from tests.support.threads import at_once
from tests.tables.test_tables import GPU_KEY
from triton_gemm import tables
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.tables import files, records
from triton_gemm.tables.files import Table
from triton_gemm.tables.records import Entry

DENIED = PermissionError(errno.EACCES, "Permission denied")


def deny(patch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """A function of `os` is denied for a path."""
    function = getattr(os, name)

    def denying(given: Any, *how: Any, **more: Any) -> Any:
        if Path(given) == path:
            raise DENIED
        return function(given, *how, **more)

    patch.setattr(os, name, denying)


def write_some(first: int, count: int = 8) -> None:
    selection = another(problem_of())
    for M in range(first, first + count):
        assert tables.store(problem_of(M), selection, HOPPER, us=M, default_us=2 * M)


def test_64_threads_lose_nothing(folder: Path) -> None:
    at_once(*(partial(write_some, 1 + 2 * i, 2) for i in range(64)))
    held = files.load(table_in(folder)).table
    assert held and {problem.M for problem in held.entries} == set(range(1, 129))
    assert not list(folder.glob("*.tmp"))


def test_threads_that_write_one_file_of_the_users_tear_none(folder: Path) -> None:
    store(problem_of(1)), store(problem_of(2))
    out = folder.parent / "out.json"

    def export() -> None:
        for _ in range(30):
            assert tables.export_to(out, HOPPER) == 2
            assert out.read_bytes() == table_in(folder).read_bytes()

    at_once(*4 * [export])
    assert list(folder.parent.glob("out*")) == [out]


def test_containers_that_share_a_folder_write_no_file_of_one_name(folder: Path, monkeypatch: Any) -> None:
    """Each has a process 1. What a killed one leaves is no table, and none that was set aside."""
    store(problem_of())
    names, own = list[str](), os.replace
    replace_all(monkeypatch, os, getpid=lambda: 1, replace=lambda old, new: [names.append(str(old)), own(old, new)])
    for _ in range(2):
        tables.export_to(table_in(folder), HOPPER)
    assert len(set(names)) == 2
    Path(names[0]).touch()
    assert tables.set_aside() == [] and len(tables.listed()) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_8_processes_lose_nothing(folder: Path) -> None:
    processes = [forked(partial(write_some, 1 + 8 * i)) for i in range(8)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == 8 * [0]
    tables.reload()
    assert all(tables.lookup(problem_of(M), HOPPER) for M in range(1, 65))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_while_saving_loses_nothing(where: str, folder: Path) -> None:
    store(problem_of(1))
    before = table_in(folder).read_bytes()

    def work() -> None:
        setattr(os, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        store(problem_of(2))

    process = forked(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL and table_in(folder).read_bytes() == before
    assert store(problem_of(3)) and found(problem_of(1)) and found(problem_of(3)) and not list(folder.glob("*.tmp"))


def test_who_holds_the_lock_is_not_waited_for_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT", 0.05)
    with files.locked(folder):
        assert at_once(lambda: store(problem_of())) == [False]
    assert store(problem_of())


def test_who_reads_waits_for_no_writer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else a damaged table would hold up all that is planned, while another process writes."""
    store(problem_of(1)), store(problem_of(2))
    path = table_in(folder)
    path.write_text(path.read_text().replace('"M": 2,', '"M": "2",'))
    tables.reload()
    with files.locked(folder):
        begin = time.monotonic()
        assert found(problem_of(1)) and found(problem_of(2)) is None
        assert time.monotonic() - begin < files.WAIT / 2 and path.exists() and not tables.set_aside()
        assert len(caplog.messages) == 1 and "cannot be quarantined" in caplog.text
    tables.reload()
    assert found(problem_of(1)) and found(problem_of(2)) is None and len(tables.set_aside()) == 1
    assert set(files.load(path).table.entries) == {problem_of(1)}


def test_a_clock_that_jumps_decides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    assert store(problem, 2, measured="9999-12-31T00:00:00+00:00")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert store(problem, 1, measured="1970-01-01T00:00:00+00:00", us=1.5)
    assert found(problem) == chosen(problem)


def test_a_folder_that_is_only_read(folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    store(problem_of(1))
    monkeypatch.setattr(files, "locked", Mock(side_effect=DENIED))
    tables.reload()
    assert found(problem_of(1)) and not store(problem_of(2)) and not store(problem_of(2))
    assert caplog.messages == [f"nothing is kept in {folder}: Permission denied"]
    table_in(folder).write_text("{")
    tables.reload()
    assert found(problem_of(1)) is None and table_in(folder).read_text() == "{"
    assert len(caplog.messages) == 2 and "cannot be quarantined" in caplog.messages[1]


def test_a_file_that_may_not_be_read_is_not_written_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that another user has made in a folder of several."""
    store(problem_of(1))
    path, before = table_in(folder), table_in(folder).read_bytes()
    other = folder.parent / "other.json"
    tables.export_to(other, HOPPER)
    with monkeypatch.context() as patch:
        deny(patch, "open", path)
        tables.reload()
        assert found(problem_of(1)) is None and not store(problem_of(2)) and not store(problem_of(2))
        with pytest.raises(PermissionError):
            tables.import_from(other)
        with pytest.raises(PermissionError):
            tables.export_to(other, HOPPER)
        with pytest.raises(ValueError, match="cannot be read: Permission denied"):
            tables.import_from(path)
        assert [report.faults for report in tables.verify(HOPPER)] == [("it cannot be read: Permission denied",)]
    assert caplog.messages == [
        f"{path} cannot be read, and is left as it is: Permission denied",
        f"nothing is kept in {folder}: Permission denied",
    ]
    tables.reload()
    assert path.read_bytes() == before and list(folder.glob("*.json*")) == [path] and found(problem_of(1))


def test_a_folder_that_may_not_be_read_is_not_taken_for_empty(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(problem_of(1))
    with monkeypatch.context() as patch:
        deny(patch, "listdir", folder)
        patch.setattr(files, "contents", Mock(side_effect=DENIED))
        tables.reload()
        assert found(problem_of(1)) is None and found(problem_of(2)) is None
        (report,) = tables.verify(HOPPER)
        assert (report.path, report.faults) == (folder, ("it cannot be read: Permission denied",))
        with pytest.raises(PermissionError):
            tables.clear()
    assert caplog.messages == [f"{folder} cannot be read: Permission denied"]
    tables.reload()
    assert found(problem_of(1))


@pytest.mark.parametrize("how", ["store", "export", "merge"])
def test_a_full_disk_loses_nothing(how: str, folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a user's table nor the file that a user has named."""
    store(problem_of(1))
    out = folder.parent / "out.json"
    tables.export_to(out, HOPPER)
    if how != "store":
        store(problem_of(2))
    before = out.read_bytes(), table_in(folder).read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    if how == "store":
        assert not store(problem_of(3)) and not store(problem_of(4))
        assert caplog.messages == [f"nothing is kept in {folder}: No space left on device"]
    else:
        with pytest.raises(OSError, match="No space left"):
            tables.export_to(out, HOPPER) if how == "export" else tables.merge([out, table_in(folder)], out)
    assert (out.read_bytes(), table_in(folder).read_bytes()) == before
    assert list(folder.parent.glob("out*")) == [out] and not list(folder.glob("*.tmp"))


def test_what_is_no_file_is_written_to(folder: Path, tmp_path: Path) -> None:
    """A device or a pipe is not replaced by a file, and a link goes on to be one."""
    store(problem_of())
    assert tables.export_to(os.devnull, HOPPER) == 1 and not Path(os.devnull).is_file()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "linked.json")
    assert tables.export_to(link, HOPPER) == 1 and link.is_symlink() and (tmp_path / "linked.json").is_file()
    script = "from tests.support.table_fakes import HOPPER; from triton_gemm import tables; "
    script += "tables.export_to('/dev/stdout', HOPPER)"
    piped = printed(script)
    assert piped == table_in(folder).read_text()
    with open(tmp_path / "printed", "w") as redirected:
        redirected.write("before\n"), redirected.flush()
        subprocess.run([sys.executable, "-c", script], stdout=redirected, check=True)
    assert (tmp_path / "printed").read_text() == "before\n" + piped
    link.unlink(), link.symlink_to(link)
    with pytest.raises(OSError, match="symbolic links"):
        tables.export_to(link, HOPPER)


def test_what_cannot_be_replaced_stays_and_so_do_permissions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that a container has mounted."""
    store(problem_of())
    out = folder.parent / "out.json"
    out.touch(), out.chmod(0o640)
    tables.export_to(out, HOPPER)
    written = out.read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) == 0o640 and files.load(out).table
    store(problem_of(1))
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EBUSY, os.strerror(errno.EBUSY))))
    with pytest.raises(OSError, match=f"{os.strerror(errno.EBUSY)}.*out.json"):
        tables.export_to(out, HOPPER)
    assert out.read_bytes() == written and not list(folder.parent.glob("*.tmp"))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_flock(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre or NFS may be mounted; another machine that has flock has left its `.lock`."""
    store(problem_of(1))
    (folder / ".lock").touch()
    begin = time.monotonic()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    files.has_flock.cache_clear()
    assert store(problem_of(2)) and found(problem_of(1)) and found(problem_of(2))
    with files.locked(folder), pytest.raises(TimeoutError), files.locked(folder, wait=False):
        pass
    table_in(folder).write_text("{")
    tables.reload()
    assert found(problem_of(1)) is None and len(tables.set_aside()) == 1
    assert time.monotonic() - begin < files.WAIT / 2
    files.has_flock.cache_clear()


def test_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", os.devnull)
    assert not store(problem_of()) and tables.clear() == 0 and found(problem_of()) is None


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
    "no multiprocessors": ("no-table", edited(silicon__sms=0)),
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
    reports = tables.verify(HOPPER)
    assert [report.faults for report in reports] == 2 * [("it is quarantined",)] + [()]
    assert [report.entries for report in reports] == [0, 0, 1]
    assert {report.source for report in reports} == {"user's table"}
    with pytest.raises(ValueError, match="of one kind" if word == "other-kind" else aside.name):
        tables.merge([path, aside], folder / "out")


def test_the_whole_lines_of_what_is_cut_off_go_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for M in (1, 2, 3):
        store(problem_of(M))
    path = table_in(folder)
    whole = path.read_text()
    end = whole.rfind("\n ]")
    for cut, left in ((whole.rfind('"work"'), 2), (end, 2), (whole.rfind("}"), 3), (end + 3, 3), (0, 0)):
        path.write_text(whole[:cut])
        tables.reload()
        assert sum(found(problem_of(M)) is not None for M in (1, 2, 3)) == left
        assert "not-json" in caplog.messages[-1]
    assert len(list(folder.glob("*.not-json.*"))) == 5


def test_shipped_tables_are_left_where_they_are(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their folder is the package's: what is wrong with them is said, and `verify` finds it."""
    store(problem_of(1)), store(problem_of(2))
    shipped = tables.queries.SHIPPED / table_in(folder).name
    shipped.parent.mkdir()
    good = table_in(folder).read_text()
    tables.clear()
    served = chosen(problem_of(1), source="shipped table")
    for old, new, first in (('"M": 2,', '"M": "2",', served), ('"format": 1,', '"format": 2,', None)):
        text = good.replace(old, new)
        shipped.write_text(text)
        caplog.clear()
        tables.reload()
        assert [found(problem_of(1)), found(problem_of(2))] == [first, None]
        assert [str(shipped) in message for message in caplog.messages] == [True]
        assert shipped.read_text() == text and os.listdir(shipped.parent) == [shipped.name]
        (report,) = tables.verify(HOPPER)
        assert report.path == shipped and report.faults


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
    algorithm = Algorithm("warp_specialised", another(problem).config, Schedule(132))
    entry = Entry(algorithm, 1.0, 1.0, "", "")
    file = json.loads(Table(GPU_KEY, entries={problem: entry}).text())
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
        records.illegal(kept, HOPPER, its.algorithm)
        assert Path(read.table.name).name == read.table.name


def test_what_is_no_file_is_not_read(folder: Path) -> None:
    """Reading a pipe would wait for ever."""
    folder.mkdir()
    path = folder / Table(GpuKey.of(HOPPER)).name
    os.mkfifo(path)
    assert found(problem_of()) is None and not path.exists() and len(list(folder.glob("*.no-table.1"))) == 1
    path.mkdir()
    tables.reload()
    assert found(problem_of()) is None
