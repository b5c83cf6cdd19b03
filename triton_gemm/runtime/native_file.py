"""Where the extension of `compat.native` is kept, and whether its file may be loaded: it is whole, and nobody else
could have written it.

The file ends with its hash, and with that of what it depends on. So one that is damaged, or is of another torch, is
never loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ELOOP
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..compat import native_key

NAME = "triton_gemm_native"
DAY_S = 24 * 3600.0
MARK = 32 + 64  # characters at a file's end: the key, and the hash of all before and of the key

log = logging.getLogger("triton_gemm")


def wrong(variable: str = "TRITON_GEMM_NATIVE") -> str | None:
    """What is wrong with an environment variable that is 0, 1 or a file, or None."""
    given = os.environ.get(variable) or "1"
    right = given in ("0", "1") or os.path.isabs(given)
    return None if right else f"{variable} must be 0, 1 or the absolute path of a file, not {given!r}"


@lru_cache(maxsize=2)
def setting(variable: str = "TRITON_GEMM_NATIVE") -> str:
    """Such a variable's value: "0", "1" or the path of a file. A wrong value is warned of once, and counts as 1."""
    if (words := wrong(variable)) is not None:
        log.warning("%s: it counts as 1", words)
        return "1"
    return os.environ.get(variable) or "1"


def folder() -> Path | None:
    """Where the user's extensions are. TRITON_GEMM_CACHE_DIR does not move it: that folder may be shared."""
    with suppress(ModuleNotFoundError, RuntimeError):
        from platformdirs import user_cache_path

        found = user_cache_path("triton_gemm", appauthor=False) / "native"
        return found if found.is_absolute() else None
    return None


def path() -> Path | None:
    """The file that is loaded, which need not be there yet; None without a cache folder."""
    if setting() != "1":
        return Path(setting())
    where = folder()
    return None if where is None else where / f"{NAME}-{native_key()}.so"


def extensions() -> list[Path]:
    """The user's extensions: one for each torch, Python and version of this package that has built one."""
    where = folder()
    return [] if where is None else sorted(where.glob(f"{NAME}-*.so"))


@contextmanager
def opened(where: Path) -> Iterator[Path]:
    """The folder by a name that stays its own, whoever may rename what it lies in. So of its ancestors nothing is
    asked. PermissionError where others could put files there."""
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        if where.is_symlink():
            raise NotADirectoryError(error.errno, "a link instead of a folder", str(where)) from None
        raise
    try:
        _check(descriptor, where)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _check(descriptor: int, name: Path) -> os.stat_result:
    about = os.fstat(descriptor)
    if about.st_uid not in (0, os.geteuid()):
        how = "build it as this user, or give it to root with chown"
        raise PermissionError(f"{name} belongs to user {about.st_uid}, so no code is loaded from there: {how}")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.filemode(about.st_mode)
        shared = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
        how = "put the file into a folder of your own" if shared else f"`chmod go-w {name}`"
        raise PermissionError(f"others may write to {name} ({mode}), so no code is loaded from there: {how}")
    return about


def open_safely(file: Path) -> int:
    """A descriptor of a regular file, which is no link, in a folder. PermissionError where others could have written
    it, ImportError for other kinds of files; OSError where there is none."""
    with opened(file.parent) as where:
        try:  # a pipe is opened, too, without waiting for who writes
            descriptor = os.open(where / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == ELOOP:
                raise ImportError(f"{file} is a link") from None
            raise OSError(error.errno, error.strerror, str(file)) from None
    try:
        if not stat.S_ISREG(_check(descriptor, file).st_mode):
            raise ImportError(f"{file} is no regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_checked(file: Path) -> int:
    """A descriptor of an extension that may be loaded. As `open_safely`, and ImportError where it is damaged or of
    another torch."""
    descriptor = open_safely(file)
    try:
        with open(descriptor, "rb", closefd=False) as whole:
            content = whole.read()
        if content[-64:] != digest(content[:-64]):
            raise ImportError(f"{file} is damaged, or `triton-gemm build` has not written it")
        if content[-MARK:-64] != native_key().encode():
            raise ImportError(f"{file} is of another torch, Python or version of this package")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def usable(file: Path, since: float = 0.0) -> bool:
    """Whether there is an extension that may be loaded, from `since` or later. PermissionError as `open_checked`."""
    try:
        descriptor = open_checked(file)
    except (FileNotFoundError, ImportError):
        return False
    try:
        return os.fstat(descriptor).st_mtime >= since
    finally:
        os.close(descriptor)


def load(file: Path, by: Callable[[str], Any]) -> Any:
    """What `by` makes of the file that was checked. Its descriptor stays open: the loader would take another file of
    that name for this one."""
    name = f"/proc/self/fd/./{open_checked(file)}"
    try:
        found = by(name)
    except ImportError as error:
        raise ImportError(str(error).replace(name, str(file))) from None
    if time.time() - os.stat(name).st_mtime > DAY_S:
        with suppress(OSError):
            os.utime(name)  # it is used
    return found
