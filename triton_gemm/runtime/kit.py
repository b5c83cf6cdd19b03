"""Kits: machine code of many kernels in one file, so that nothing need be compiled where it is used.

A kernel is found by the key of its launch, which is what it is compiled from but for its source, and counts while the
files that define it are those of the kit. No version of Triton is part of that. Machine code is ptxas's output of this
package's sources.

The file: MAGIC, the index's length in 8 bytes, the index, and groups. Index and groups are streams of xz, which has a
checksum. A group holds the code of GROUP kernels that are alike, so one kernel's unpacks few others.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import os
import secrets
import sys
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from ..compat import JITFunction, MachineCode
from ..tables import files

MAGIC = b"triton_gemm kit 1\n"
GROUP = 12  # kernels of a group: about 4 KB of xz each, 8 KB by themselves
MAX_INDEX, MAX_GROUP = 1 << 24, 1 << 26  # bytes, unpacked
PACKAGE = Path(__file__).parents[1]
_IMPORTED = time.time_ns()  # before kernels are
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


class DamagedError(Exception):
    """A file is no kit, or is damaged; the text says how."""


def key_of(identity: Hashable) -> str:
    """Of a launch, from its `binaries.identity`: of dtypes, numbers and words, which every Python prints alike."""
    return _digest(repr(identity).encode())


def sources_of(kernel: JITFunction[Any]) -> tuple[str, ...]:
    """The package's files that define a kernel: its own, and those that define the functions, classes and constants
    that it uses, and theirs. Relative to PACKAGE, sorted."""
    found: set[Path] = set()
    seen: set[int] = set()

    def visit(value: Any) -> None:
        module = str(getattr(value, "__module__", None))
        if id(value) in seen or not module.startswith(f"{PACKAGE.name}."):
            return
        seen.add(id(value))
        found.add(Path(str(sys.modules[module].__file__)))
        if isinstance(value, type):
            for member in (*value.__mro__[1:], *vars(value).values()):
                visit(member)
        function = getattr(value, "fn", value)
        if hasattr(function, "__code__"):
            for default in function.__defaults__ or ():
                visit(default)
            use(function.__globals__, Path(function.__code__.co_filename), set(_names(function.__code__)))

    def use(names: Mapping[str, Any], file: Path, used: set[str]) -> None:
        for name in used & names.keys():
            found.update(_imported(file, name))
            value = names[name]
            if str(getattr(value, "__package__", "")).startswith(PACKAGE.name):  # a module, of whose names it uses some
                use(vars(value), Path(value.__file__), used)
            else:
                visit(value)

    visit(kernel)
    return tuple(sorted(str(file.relative_to(PACKAGE)) for file in found))


def _names(code: CodeType) -> Iterator[str]:
    """That a function uses, and those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _imported(file: Path, name: str) -> tuple[Path, ...]:
    """The package's file that defines what another imports from it under a name; none where it imports nothing so."""
    found = _imports(file).get(name)
    if found is None:
        return ()
    source, original = found
    return _imported(source, original) or (source,)


@lru_cache(maxsize=256)
def _imports(file: Path) -> dict[str, tuple[Path, str]]:
    """What a file of the package imports from others of it, by name: the file, and its name there."""
    found: dict[str, tuple[Path, str]] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                tries = base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py"
                of = [x for x in tries if x.exists()]
                if of:
                    found[alias.asname or alias.name] = of[0], alias.name
    return found


@lru_cache(maxsize=256)
def source_hash(file: str) -> str | None:
    """Of a file of the package; None where there is none, or it was changed after this process had imported it."""
    path = PACKAGE / file
    try:
        text = path.read_bytes()
        return None if path.stat().st_ctime_ns > _IMPORTED else _digest(text)
    except OSError:
        return None


def is_unchanged() -> bool:
    """Whether no source of a kernel was changed after this process had imported it, as a reload or pip does."""
    files = *PACKAGE.glob("kernels/**/*.py"), *PACKAGE.glob("compat/*.py")
    try:
        return all(file.stat().st_ctime_ns <= _IMPORTED for file in files)
    except OSError:
        return False


@dataclass(frozen=True)
class Kernel:
    """A kernel of a kit. sources: as `sources_of` says."""

    made: MachineCode
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Kit:
    """A kit that was opened."""

    file: Path
    name: Path  # the file's, for people
    digest: str  # hash of the index
    capability: tuple[int, int]
    made_by: Mapping[str, str]  # versions
    hashes: Mapping[str, str] = field(repr=False)  # of source files
    # By key: group, number there, MachineCode without its code.
    kernels: Mapping[str, tuple[int, int, list[Any]]] = field(repr=False)
    sources: Mapping[str, tuple[str, ...]] = field(repr=False)  # of a kernel's function
    # Where each begins and ends in the file, its hash, and lengths of code; in bytes.
    groups: tuple[tuple[int, int, str, tuple[int, ...]], ...] = field(repr=False)
    _last: dict[int, list[bytes]] = field(default_factory=dict, repr=False)  # the group that was unpacked last

    def find(self, key: str) -> MachineCode | None:
        """The machine code of a launch, by its key; None where there is none, or its sources are others by now.
        OSError where the file cannot be read, DamagedError where it is another by now."""
        found = self.kernels.get(key)
        if found is None or not self.is_current(key):
            return None
        group, number, head = found
        symbol, warps, ctas, shared, cooperative, pdl, types, boxes = head
        how = symbol, warps, ctas, shared, cooperative, pdl
        of_boxes = tuple((swizzle, size, kind, tuple(sides)) for swizzle, size, kind, sides in boxes)
        return MachineCode(*how, tuple(types), of_boxes, self._unpacked(group)[number])

    def is_current(self, key: str) -> bool:
        """Whether the sources that define a kernel are those that it was made from."""
        sources = self.sources[self.kernels[key][2][0]]
        return all(source_hash(file) == self.hashes[file] for file in sources)

    def check(self) -> None:
        """Unpacks all groups. OSError and DamagedError as `find`."""
        for group in range(len(self.groups)):
            self._unpacked(group)

    def _unpacked(self, group: int) -> list[bytes]:
        found = self._last.get(group)
        if found is None:
            begin, end, digest, lengths = self.groups[group]
            with self.file.open("rb") as opened:
                opened.seek(begin)
                packed = opened.read(end - begin)
            if _digest(packed) != digest:
                raise DamagedError("a group is not that of the index: the file was replaced, or is damaged")
            text = _unpack(packed, MAX_GROUP)
            if len(text) != sum(lengths):
                raise DamagedError("a group is not as long as the index says")
            at, found = 0, []
            for length in lengths:
                found.append(text[at : at + length])
                at += length
            self._last.clear()
            self._last[group] = found
        return found


def read(file: Path, name: Path | None = None) -> Kit:
    """Opens a kit. name: what people know the file by. OSError where there is no such file, DamagedError where it is no
    kit."""
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise DamagedError("it is no kit of this version's format")
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_INDEX:
            raise DamagedError("its index is too long")
        text = _unpack(opened.read(length), MAX_INDEX)
        begin, size = opened.tell(), os.fstat(opened.fileno()).st_size
    try:
        index = json.loads(text)
        groups = []
        for packed, digest, lengths in index["groups"]:
            groups.append((begin, begin + int(packed), str(digest), tuple(map(int, lengths))))
            begin += int(packed)
            if not 0 <= packed <= MAX_GROUP or min(lengths, default=0) < 0:
                raise ValueError("a length is negative, or too long")
        if begin != size:
            raise DamagedError(f"it has {size} bytes, and its index says {begin}")
        heads = sorted(index["kernels"].items(), key=lambda one: one[1][:2])
        kernels = {key: (int(group), int(number), head) for key, (group, number, head) in heads}
        sources = {name: tuple(of) for name, of in index["sources"].items()}
        hashes = {source: str(index["hashes"][source]) for of in sources.values() for source in of}
        for group, number, (symbol, *numbers, types, boxes) in kernels.values():
            if not 0 <= number < len(groups[group][3]) or group < 0 or symbol not in sources:
                raise ValueError(f"there is no kernel {number} of group {group}, or no source of {symbol}")
            if [type(x) for x in numbers] != [int, int, int, bool, bool] or not isinstance(types, list):
                raise ValueError(f"{symbol} is launched with {numbers}")
            warps, ctas, shared = numbers[:3]
            if not (1 <= warps <= 32 and 1 <= ctas <= 8 and 0 <= shared <= 228 * 1024):
                raise ValueError(f"{symbol} is launched with {numbers}")
            if any(type(x) is not str for x in (symbol, *types)):
                raise ValueError(f"{symbol} has parameters {types}")
            if any(len(box) != 4 or not isinstance(box[3], list) for box in boxes):
                raise ValueError(f"{symbol} has tensor maps {boxes}")
        if not all(sources.values()) or any(Path(x).is_absolute() or ".." in Path(x).parts for x in hashes):
            raise ValueError("a kernel's sources are not the package's")
        major, minor = map(int, index["capability"])
        made_by = {str(name): str(version) for name, version in index["made_by"].items()}
        return Kit(file, name or file, _digest(text), (major, minor), made_by, hashes, kernels, sources, tuple(groups))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedError(f"its index is wrong: {type(error).__name__}: {error}") from None


def write(file: Path, capability: tuple[int, int], kernels: Mapping[str, Kernel], made_by: Mapping[str, str]) -> None:
    """Writes a kit of kernels by key, the same bytes for the same kernels, as `files.write`. ValueError where sources
    were changed since they were imported."""
    ordered = sorted(kernels, key=lambda key: (kernels[key].made.symbol, len(kernels[key].made.code), key))
    parts = [ordered[i : i + GROUP] for i in range(0, len(ordered), GROUP)]
    packed = [_pack(b"".join(kernels[key].made.code for key in part)) for part in parts]
    places = [(key, group, number) for group, part in enumerate(parts) for number, key in enumerate(part)]
    used = sorted({source for kernel in kernels.values() for source in kernel.sources})
    hashes = {source: source_hash(source) for source in used}
    if None in hashes.values():
        raise ValueError(f"{', '.join(x for x in used if not hashes[x])} changed while kernels were compiled")
    index = {
        "capability": capability,
        "made_by": dict(made_by),
        "hashes": hashes,
        "sources": {kernel.made.symbol: kernel.sources for kernel in kernels.values()},
        "groups": [
            (len(text), _digest(text), [len(kernels[key].made.code) for key in part])
            for text, part in zip(packed, parts, strict=True)
        ],
        "kernels": {key: (group, number, kernels[key].made[:-1]) for key, group, number in places},
    }
    text = _pack(json.dumps(index, sort_keys=True, separators=(",", ":")).encode())
    data = b"".join((MAGIC, len(text).to_bytes(8, "little"), text, *packed))
    files.write(file, data, f"{secrets.token_hex(8)}.tmp")


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:24]


def _pack(text: bytes) -> bytes:
    return lzma.compress(text, check=lzma.CHECK_CRC64, filters=XZ)


def _unpack(text: bytes, most: int) -> bytes:
    """At most so many bytes; DamagedError for more, and for what is no whole stream."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 28)
    try:
        found = reader.decompress(text, most)
    except lzma.LZMAError as error:
        raise DamagedError(f"a stream is damaged: {error}") from None
    if not reader.eof or reader.unused_data:
        raise DamagedError("a stream is too long, or cut short")
    return found
