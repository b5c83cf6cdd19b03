"""A user's kit: what is added to it, kept and dropped, which files are refused, and two who write it at once."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support import unsafe_files
from tests.support.processes import started
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import kit, kit_build, kits, policies

# Their kernels: repack_kernel and warp_specialised_kernel, gemv_kernel, portable_kernel.
PROBLEMS, ANOTHER = [problem_of(1001, 64, 1001), problem_of(1, 4096, 4096)], problem_of(17, 33, 65)
ADD = """
import sys, time
from pathlib import Path
from tests.runtime.test_kit_build import HOPPER, PROBLEMS
from triton_gemm.runtime import kit_build, kits
kits.SHIPPED = Path("/absent")
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.01)
kit_build.extend(Path(sys.argv[1]), [PROBLEMS[int(sys.argv[2])]], [HOPPER], workers=1)
"""


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kits, "SHIPPED", tmp_path / "shipped")


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of both problems, in one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kits, "SHIPPED", Path("/absent"))
        made = kit_build.extend(tmp_path_factory.mktemp("kit") / "both.kit", PROBLEMS, [HOPPER], workers=1)
    assert (made.kernels, made.compiled, made.needed, made.problems, made.failures) == (3, 3, 3, 2, ())
    assert (made.shipped, made.dropped) == (0, {}) and made.nbytes == made.file.stat().st_size
    return made.file


@pytest.fixture
def file(of_both: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    found = tmp_path / "own" / "fleet.kit"
    found.parent.mkdir(mode=0o755)
    found.write_bytes(of_both.read_bytes())
    found.chmod(0o644)
    return found


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_build, "_compiled", Mock(side_effect=AssertionError("nothing is to be compiled")))


def keys(problem: GemmProblem) -> set[str]:
    return set(kit_build.compilables(HOPPER, problem, policies.choose(problem, HOPPER)))


def extend(file: Path, *problems: GemmProblem, **how: Any) -> kit_build.Extended:
    return kit_build.extend(file, problems, [HOPPER], workers=1, **how)


def test_calls_add_to_it_in_any_order(of_both: Path, tmp_path: Path) -> None:
    """To the same bytes, as one call does. Nobody else may write it, nor its new folder, whatever the umask is."""
    for order in (PROBLEMS, PROBLEMS[::-1]):
        file = tmp_path / f"{order[0].M}" / "fleet.kit"
        with unsafe_files.umask(0):
            found = [extend(file, problem).kernels for problem in order]
        assert found == [len(keys(order[0])), 3] and file.read_bytes() == of_both.read_bytes()
        assert [stat.S_IMODE(x.stat().st_mode) for x in (file, file.parent)] == [0o644, 0o755]
        assert list(file.parent.iterdir()) == [file]
        again = extend(file, *order)
        assert (again.compiled, again.dropped) == (0, {}) and file.read_bytes() == of_both.read_bytes()
    with kit_build.opened(file) as read:
        assert read.kernels.keys() == keys(PROBLEMS[0]) | keys(PROBLEMS[1])


def test_what_is_stale_is_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs it: of another source the kernels that it defines, of other compilers all."""
    real = kit.source_hash
    monkeypatch.setattr(kit, "source_hash", lambda of: "changed" if of == "kernels/repack.py" else real(of))
    made = extend(file, PROBLEMS[1])
    assert (made.kernels, made.compiled, made.dropped) == (2, 0, {"sources": 1})
    monkeypatch.setattr(kit_build, "compiled_by", lambda: {"triton": "4.0.0", "ptxas": "14.0"})
    made = extend(file, PROBLEMS[1])
    assert (made.kernels, made.compiled, made.dropped) == (1, 1, {"compilers": 2})


@pytest.mark.parametrize("setting", ["0", "1", "/absent.kit"])
def test_what_the_package_ships_is_left_out(
    setting: str, of_both: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TRITON_GEMM_KIT is, and also what the file had of it before. What is stale there is not."""
    monkeypatch.setenv("TRITON_GEMM_KIT", setting)
    shipped = kits.SHIPPED / kits.NAMES[HOPPER.capability]
    shipped.parent.mkdir()
    shipped.write_bytes(of_both.read_bytes())
    made = extend(file, PROBLEMS[1])
    assert (made.kernels, made.needed, made.shipped, made.dropped) == (0, 1, 1, {"shipped": 3})
    assert kit.read(file).kernels == {}, "an empty kit is one"
    real = kit.source_hash
    monkeypatch.setattr(kit, "source_hash", lambda of: "changed" if of == "kernels/gemv.py" else real(of))
    made = extend(file, *PROBLEMS)
    assert (made.kernels, made.compiled, made.needed, made.shipped) == (1, 1, 3, 2)
    shipped.write_bytes(b"damaged")
    assert extend(file, *PROBLEMS).kernels == 3


OF_NO_USE: unsafe_files.Faults = {
    **unsafe_files.IRREGULAR,
    "another file": (lambda file: file.write_bytes(b"{}"), "fleet.kit: it is no kit"),
    "a damaged kit": (
        lambda file: file.write_bytes(file.read_bytes()[:-20] + bytes(20)),
        "fleet.kit: a group is not that of the index",
    ),
}


@pytest.mark.parametrize("name", [*unsafe_files.FOREIGN, *OF_NO_USE])
def test_files_that_are_not_replaced(name: str, file: Path, no_compiler: None) -> None:
    """Code that others could have put there would become this user's; nor is what is no kit lost to a wrong name."""
    change, words = {**unsafe_files.FOREIGN, **OF_NO_USE}[name]
    change(file)
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(ValueError if name in OF_NO_USE else OSError, match=words):
        extend(file, PROBLEMS[1])
    assert before is None or file.read_bytes() == before


def test_a_folder_that_cannot_be_written_to(file: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="own cannot be written to"):
        extend(file, PROBLEMS[1])


def test_a_disk_that_is_full_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = file.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        extend(file, PROBLEMS[1])
    assert file.read_bytes() == whole and list(file.parent.iterdir()) == [file]


def test_two_processes_write_one_file_with_the_kernels_of_both(of_both: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "fleet.kit"
    processes = [started(ADD, file, number, tmp_path / "go") for number in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    for process in processes:
        assert process.wait(200) == 0, process.communicate()[1]
    assert file.read_bytes() == of_both.read_bytes() and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("names", [["a100"], ["h200", "a100"]])
def test_gpus_that_no_kit_is_for(names: list[str], tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(ValueError, match=r"one compute capability, 9\.0, not for NVIDIA A100-SXM4-80GB \(8\.0"):
        kit_build.extend(tmp_path / "new" / "fleet.kit", PROBLEMS, [named_device(name) for name in names])
    assert not (tmp_path / "new").exists()


def test_how_many_kernels_it_may_have(
    file: Path, of_both: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as can be read again."""
    entries = {key: len(json.dumps({key: of}, separators=(",", ":"))) for key, of in kit.read(of_both).kernels.items()}
    assert kit_build.MOST * max(entries.values()) < 0.95 * kit.MAX_INDEX
    monkeypatch.setattr(kit_build, "MOST", 3)
    with pytest.raises(ValueError, match="would have 4 kernels, and 3 are the most"):
        extend(file, ANOTHER)


def test_what_fails_is_named_and_the_others_are_added(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of choosing, as under the policy "error", and of compiling."""
    file.unlink()
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(kit_build, "machine_code", Mock(side_effect=ValueError("it wants scratch memory")))
    made = extend(file, PROBLEMS[1], progress=lambda *how: calls.append(how))
    assert (made.kernels, made.failures) == (0, ("gemv_kernel: ValueError: it wants scratch memory",))
    assert calls == [(0, 1), (1, 1)] and file.exists()
    with policies.policy("error"):
        (failure,) = extend(file, ANOTHER).failures
    assert failure.startswith("no table has")


@pytest.mark.parametrize("variable", ["TRITON_DEBUG", "PTXAS_OPTIONS"])
def test_settings_that_change_what_is_compiled(
    variable: str, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"{variable} may change what Triton compiles"):
        extend(tmp_path / "new" / "fleet.kit", *PROBLEMS)
