"""Kits: what is written is read, what is stale or damaged is not, and what is built is what the compiler makes."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from triton_gemm.compat import MachineCode
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import fma, repack, skinny
from triton_gemm.kernels.portable.kernel import portable_kernel
from triton_gemm.kernels.warp_specialised.kernel import warp_specialised_kernel
from triton_gemm.runtime import kit, kit_build
from triton_gemm.selection.select import select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape

HOPPER = (9, 0)
FILES = ("kernels/repack.py", "kernels/skinny.py")
MADE_BY = {"triton": "3.9.0", "ptxas": "12.9"}
BOXES = ((3, 2, 10, (1, 64, 64)), (3, 2, 10, (1, 256, 64)))


def kernels(count: int = 30, seed: int = 0) -> dict[str, kit.Kernel]:
    rng, found = random.Random(seed), {}
    for i in range(count):
        code = bytes(rng.choices(b"0123", k=500 + 10 * i))
        file = FILES[i % 2]
        made = MachineCode(
            Path(file).stem, 4 + i % 8, 1, 1024 * i, False, True, ("*bf16", "i32", "constexpr"), BOXES, code
        )
        found[kit.key_of(("a kernel", i, torch.bfloat16))] = kit.Kernel(made, (file,))
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "some.kit"
    kit.write(found, HOPPER, kernels(), MADE_BY)
    return found


def test_what_is_written_is_read(file: Path) -> None:
    """In groups, of which one is kept."""
    found, expected = kit.read(file), kernels()
    assert (found.capability, found.made_by, found.kernels.keys()) == (HOPPER, MADE_BY, expected.keys())
    assert len(found.groups) == 3
    for key, kernel in expected.items():
        assert found.find(key) == kernel.made
        assert len(found._last) == 1
    assert found.find(kit.key_of("another")) is None


def test_the_same_kernels_make_the_same_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order. A disk that is full leaves the old file, and nothing else."""
    other = tmp_path / "other.kit"
    kit.write(other, HOPPER, dict(reversed(kernels().items())), MADE_BY)
    assert other.read_bytes() == file.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        kit.write(file, HOPPER, kernels(5), MADE_BY)
    assert other.read_bytes() == file.read_bytes()
    assert {x.name for x in tmp_path.iterdir()} == {"some.kit", "other.kit"}


def test_keys_are_those_of_what_is_compiled() -> None:
    identities = ["a", ("a",), ("a", 1), ("a", True), ("a", torch.bfloat16), ("a", torch.float16), ("a", (False, True))]
    assert len({kit.key_of(x) for x in identities}) == len(identities)
    assert kit.key_of(("a", torch.bfloat16, 16)) == "798cbfb35df6c2ca1924a051", "files are read by other Pythons, too"


def test_kernels_of_a_changed_file_are_stale(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others."""
    real = kit.source_hash
    for other in ("changed", None):
        monkeypatch.setattr(kit, "source_hash", lambda of, other=other: other if of == FILES[0] else real(of))
        found = kit.read(file)
        current = {key for key in found.kernels if found.find(key) is not None}
        assert current == {key for key, kernel in kernels().items() if kernel.sources == (FILES[1],)}
        assert all(found.is_current(key) == (key in current) for key in found.kernels)


def test_sources_that_changed_under_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An upgrade, or an editor, has replaced a file whose functions this process has imported before."""
    kit.source_hash.cache_clear()
    monkeypatch.setattr(kit, "PACKAGE", tmp_path)
    source = tmp_path / FILES[0]
    source.parent.mkdir(parents=True)
    source.write_text("new")
    assert kit.source_hash(FILES[0]) is None is kit.source_hash(FILES[1])
    with pytest.raises(ValueError, match=f"{FILES[0]}.* changed while"):
        kit.write(tmp_path / "a.kit", HOPPER, kernels(), MADE_BY)
    kit.source_hash.cache_clear()
    monkeypatch.setattr(kit, "_IMPORTED", source.stat().st_ctime_ns)
    assert kit.source_hash(FILES[0]) is not None
    kit.source_hash.cache_clear()


def test_a_damaged_file_is_refused(file: Path) -> None:
    """Whichever byte is another, is missing, or is too much: an error, or the same kernels."""
    text, expected = file.read_bytes(), kernels()
    rng = random.Random(1)
    damaged = [text[:cut] for cut in (0, 5, len(kit.MAGIC), len(kit.MAGIC) + 8, 400, len(text) - 1)]
    damaged += [text + b"more", text[:-9] + b"more", b"\x00" * len(text)]
    for _ in range(150):
        at = rng.randrange(len(text))
        damaged.append(text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :])
    refused = 0
    for one in damaged:
        file.write_bytes(one)
        try:
            found = kit.read(file)
            assert {key: found.find(key) for key in found.kernels} == {key: x.made for key, x in expected.items()}
        except kit.DamagedError:
            refused += 1
    assert refused >= len(damaged) - 2  # a bit of a stream's header that means nothing
    file.unlink()
    with pytest.raises(FileNotFoundError):
        kit.read(file)


def test_a_file_that_was_replaced_is_refused(file: Path) -> None:
    found = kit.read(file)
    other = {key: kit.Kernel(x.made._replace(code=x.made.code[::-1]), x.sources) for key, x in kernels().items()}
    kit.write(file, HOPPER, other, MADE_BY)
    assert {key: kit.read(file).find(key) for key in other} == {key: x.made for key, x in other.items()}
    with pytest.raises(kit.DamagedError, match="replaced"):
        found.find(next(iter(found.kernels)))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        found.find(next(iter(found.kernels)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"kernels": {"a key": head}} for head in ([], [0], [9, 0, ["repack"]], [0, 0, ["repack", 4]], [0, 0, None])),
        *({"hashes": wrong} for wrong in ({}, None, 7)),
        *({"sources": wrong} for wrong in ({}, [], {"repack": 3}, {"repack": [], "skinny": []})),
        *({"sources": {"repack": [x], "skinny": [x]}, "hashes": {x: ""}} for x in ("/dev/zero", "../secret.py")),
        *(
            {"kernels": {"a key": [0, 0, ["repack", *x]]}}
            for x in (
                [0, 1, 0, False, True, [], []],
                [4, 0, 0, False, True, [], []],
                [4, -1, 0, False, True, [], []],
                [4, 1, 1 << 20, False, True, [], []],
                [4, 1, 0, False, True, [3], []],
            )
        ),
        *({"groups": wrong} for wrong in ([], [[1]], [["a", "b", "c"]], None)),
        *({"capability": wrong} for wrong in (9, [9], "hopper")),
        *({"made_by": wrong} for wrong in ([], None)),
    ],
    ids=str,
)
def test_an_index_that_is_wrong_is_refused(file: Path, changes: dict[str, Any]) -> None:
    """Though its checksums are right."""
    text = file.read_bytes()
    begin = len(kit.MAGIC) + 8
    length = int.from_bytes(text[begin - 8 : begin], "little")
    index = json.loads(kit._unpack(text[begin : begin + length], kit.MAX_INDEX))
    packed = kit._pack(json.dumps(index | changes).encode())
    file.write_bytes(kit.MAGIC + len(packed).to_bytes(8, "little") + packed + text[begin + length :])
    with pytest.raises(kit.DamagedError):
        kit.read(file)


def test_what_a_file_unpacks_to_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kit.read(file)
    monkeypatch.setattr(kit, "MAX_GROUP", 1000)
    for read in (lambda: found.find(next(iter(found.kernels))), lambda: kit.read(file)):
        with pytest.raises(kit.DamagedError, match="too long"):
            read()
    monkeypatch.setattr(kit, "MAX_INDEX", 1000)
    with pytest.raises(kit.DamagedError, match="too long"):
        kit.read(file)


@pytest.mark.parametrize(
    ("kernel", "some", "none"),
    [
        (
            warp_specialised_kernel,
            {"warp_specialised/kernel.py", "warp_specialised/ring.py", "schedule.py"},
            {"portable"},
        ),
        (portable_kernel, {"portable/kernel.py", "planes.py", "epilogue.py"}, {"warp_specialised", "configs.py"}),
        (skinny.skinny_kernel, {"skinny.py", "programmatic.py"}, {"schedule.py", "portable", "costs.py"}),
        (warp_specialised_kernel, {"warp_specialised/arguments.py"}, {"configs.py"}),
        (fma.fma_kernel, {"fma.py", "../compat/gluon.py"}, {"warp_specialised", "costs.py"}),
    ],
)
def test_sources_of_a_kernel(kernel: Any, some: set[str], none: set[str]) -> None:
    """Its own, what it calls and what it uses; not what plans it, nor other kernels'."""
    found = kit.sources_of(kernel)
    assert {f"kernels/{x}".replace("kernels/../", "") for x in some} | {"compat/language.py"} <= set(found)
    assert not [x for x in found for word in none if word in x]
    assert all(kit.source_hash(x) is not None for x in found) and not [x for x in found if "__init__" in x]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def launches() -> dict[str, Any]:
    """Two of one function, which compile in a moment."""
    device, found = named_device("h100"), {}
    for mode in ("bf16", "fp16"):
        problem = gemm_problem(Shape(1001, 64, 1001), mode)
        found |= kit_build.compilables(device, problem, select(problem, device))
    return {key: of for key, of in found.items() if of[0].kernel is repack.repack_kernel}


def test_a_kit_is_built(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only what changed anew, to the same bytes; its code has no paths of this machine."""
    file, wanted = tmp_path / "new" / "some.kit", launches()
    seen: list[tuple[int, int]] = []
    built = kit_build.build(file, wanted, HOPPER, cache=cache, workers=1, progress=lambda *x: seen.append(x))
    assert (built.kernels, built.compiled, built.failures) == (len(wanted), len(wanted), ()) and len(wanted) >= 2
    assert seen == [(i, len(wanted)) for i in range(len(wanted) + 1)] and built.nbytes == file.stat().st_size
    text, found = file.read_bytes(), kit.read(file)
    for key in wanted:
        code = found.find(key)
        assert code is not None and code.code.startswith(b"\x7fELF") and code.pdl and code.warps == 4
        assert code.types[0] == code.types[1] in ("*bf16", "*fp16") and str(kit.PACKAGE).encode() not in code.code
    again = kit_build.build(file, wanted, HOPPER, cache=tmp_path / "empty", workers=1)
    assert again.compiled == 0 and file.read_bytes() == text
    first = next(iter(wanted))
    assert kit_build.build(file, {first: wanted[first]}, HOPPER, cache=cache).kernels == 1
    assert kit_build.build(file, wanted, HOPPER, cache=cache, workers=1).compiled == len(wanted) - 1
    assert file.read_bytes() == text
    monkeypatch.setattr(kit_build, "compiled_by", lambda: {"triton": "4.0.0", "ptxas": "14.0"})
    assert kit_build.build(file, wanted, HOPPER, cache=cache, workers=1).compiled == len(wanted)
    file.write_bytes(b"damaged")
    assert kit_build.build(file, wanted, HOPPER, cache=cache, workers=1).compiled == len(wanted)
    monkeypatch.setenv("TRITON_DEBUG", "1")
    with pytest.raises(ValueError, match="TRITON_DEBUG may change"):
        kit_build.build(file, wanted, HOPPER, cache=cache)


def test_what_does_not_compile_is_left_out_and_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = launches()
    bad = next(iter(wanted))
    real = kit_build.machine_code

    def refuses(compiled: Any, left: list[str] = [bad]) -> MachineCode:  # noqa: B006  # once
        if left:
            raise ValueError(f"{left.pop()} wants scratch memory")
        return real(compiled)

    monkeypatch.setattr(kit_build, "machine_code", refuses)
    built = kit_build.build(tmp_path / "some.kit", wanted, HOPPER, cache=cache, workers=1)
    assert built.kernels == len(wanted) - 1 and built.failures == (
        f"repack_kernel: ValueError: {bad} wants scratch memory",
    )
