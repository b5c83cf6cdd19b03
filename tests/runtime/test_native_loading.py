"""The extension that was built before, when it is loaded: which errors are left to the thread that builds it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import triton

from tests.runtime.test_native_build import compiler as compiler
from tests.runtime.test_native_build import new as new
from tests.support import fake_cxx
from triton_gemm import compat
from triton_gemm.runtime import native_build


@pytest.mark.parametrize("error", [RuntimeError("late"), TimeoutError("late"), OSError("late"), KeyboardInterrupt()])
def test_what_a_signal_s_handler_raises_while_it_is_loaded_is_the_caller_s(
    error: BaseException, compiler: fake_cxx.Compiler, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_build.build()
    before = signal.signal(signal.SIGUSR1, Mock(side_effect=error))
    try:
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(native_build, "_set_up", lambda _: signal.raise_signal(signal.SIGUSR1))
            native_build.built()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert native_build.built() is not None, "the next call loads it"


class OtherHooks:
    def setup(self, _: object) -> None:
        raise AttributeError("'function' object has no attribute 'calls'")


@pytest.mark.parametrize(
    "fails",
    [
        lambda _: compat.set_up_native(OtherHooks(), None, None, None),
        lambda name: compat.import_native(name),
        lambda name: os.stat(f"{name}/x"),
    ],
)
def test_what_cannot_be_loaded_at_once_is_left_to_the_thread(
    fails: Any, compiler: fake_cxx.Compiler, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_build.build()
    monkeypatch.setattr(native_build, "_set_up", fails)
    assert native_build.built() is None and not native_build._begun and native_build.possible()


@pytest.mark.slow
def test_hooks_in_the_place_of_triton_s_chain_are_named(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    with pytest.raises(NotImplementedError, match=r"Triton's hooks on launches are others: .*'calls'"):
        compat.set_up_native(compat.import_native(str(extension)), None, None, None)
