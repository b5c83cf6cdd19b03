"""TRITON_GEMM_USE=1: what torch's import and CUDA's initialisation do in a process that imports torch alone."""

from __future__ import annotations

import os
import subprocess
import timeit
from pathlib import Path

import pytest

import triton_gemm_autoload
from tests.support.processes import ROOT, python

# Stands for CUDA's initialisation, where there is no GPU: calls what waits for it.
BEGIN = """
import sys, torch
def begin():
    torch.cuda._tls.is_initializing = True
    with torch.cuda._initialization_lock:  # as torch holds it: who takes it again waits for ever
        for call, _ in torch.cuda._queued_calls:
            if call.__module__ == "triton_gemm_autoload":
                call()
    del torch.cuda._tls.is_initializing
def loaded():
    return sorted({x.split(".")[0] for x in sys.modules} & {"triton", "triton_gemm"})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed, as far as entry points go."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "triton_gemm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton_gemm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntriton_gemm = triton_gemm_autoload:autoload\n")
    return folder


def run(
    installed: Path, code: str | Path, use: str | None = "1", options: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """A process of some code, or a script, in which the variable is `use`, and products of CPU tensors are routed."""
    paths = os.pathsep.join(filter(None, [str(installed), str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "TRITON_GEMM_USE": use, **more}
    return python(*options, *(["-c"] if isinstance(code, str) else []), code, timeout=120, cwd=installed, **variables)


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("use", [None, "", "0"])
def test_without_the_variable_nothing_is_imported(use: str | None, installed: Path) -> None:
    done = run(installed, BEGIN + "begin(); print(*loaded(), 'triton_gemm_autoload' in sys.modules)", use)
    assert printed(done) == ["True"] and done.stderr == ""


def test_without_the_variable_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_GEMM_USE", raising=False)
    assert min(timeit.repeat(triton_gemm_autoload.autoload, number=100, repeat=5)) / 100 < 1e-4


def test_it_is_enabled_when_cuda_begins(installed: Path) -> None:
    """And not before, nor in a process that has no GPU, or never uses it; `disable` takes it back."""
    code = """
print(len(loaded()))
x = torch.ones(2, 2)
assert (x @ x).sum() == 8
begin()
from triton_gemm.functional import routing
print(len(loaded()), len(routing._rules))
import triton_gemm
triton_gemm.disable()
print(len(routing._rules))
"""
    done = run(installed, BEGIN + code)
    assert printed(done) == ["0", "2", "1", "0"] and done.stderr == ""


@pytest.mark.parametrize("first", ["triton_gemm", "triton", "torch.cuda", "torch._dynamo"])
def test_what_is_imported_first_does_not_matter(first: str, installed: Path) -> None:
    code = "from triton_gemm.functional import routing; begin(); print(len(routing._rules))"
    assert printed(run(installed, f"import {first}\n{BEGIN}{code}")) == ["1"]


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["warnings", "errors"])
def test_another_value_is_reported_and_ignored(options: tuple[str, ...], installed: Path) -> None:
    done = run(installed, BEGIN + "begin(); print(len(loaded()))", "yes", options)
    assert printed(done) == ["0"] and "TRITON_GEMM_USE=yes is neither 0 nor 1" in done.stderr


def test_a_broken_installation_breaks_neither_torch_nor_cuda(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "triton_gemm").mkdir()
    (tmp_path / "triton_gemm" / "__init__.py").write_text("raise ImportError('half of it is missing')")
    paths = os.pathsep.join((str(tmp_path), str(installed), str(ROOT)))
    for options in ((), ("-W", "error")):
        done = run(installed, BEGIN + "begin(); print(torch.ones(1).item())", options=options, PYTHONPATH=paths)
        assert printed(done) == ["1.0"]
        assert "triton_gemm is not enabled: ImportError: half of it is missing" in done.stderr


def test_a_torch_without_the_hook_is_left_alone(installed: Path) -> None:
    code = "import torch; del torch.cuda._lazy_call; import triton_gemm_autoload as x; x.autoload(); print(1)"
    done = run(installed, code)
    assert printed(done) == ["1"] and "is not enabled: AttributeError" in done.stderr


def test_torch_can_be_told_to_load_no_backend(installed: Path) -> None:
    code = BEGIN + "print('triton_gemm_autoload' in sys.modules)"
    assert printed(run(installed, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) == ["False"]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_that_are_started_are_enabled_too(how: str, installed: Path, tmp_path: Path) -> None:
    """One that is spawned imports torch by itself; one that is forked has what waited in its parent."""
    script = tmp_path / "engine.py"
    script.write_text(
        BEGIN
        + f"""
import multiprocessing
def work(queue):
    begin()
    from triton_gemm.functional import routing
    queue.put(len(routing._rules))
if __name__ == "__main__":
    started = multiprocessing.get_context({how!r})
    queue = started.Queue()
    process = started.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(timeout=60), len(loaded()))
    process.join()
"""
    )
    assert printed(run(installed, script)) == ["1", "0"]
