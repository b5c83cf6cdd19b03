"""What loads the CUDA twins says and does, without a GPU: load_inline is replaced."""

import fcntl
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils import cpp_extension

import reference_cuda
from reference_cuda import TWINS, LoadedTwin, TwinUnavailable, Variant, loader
from tests.ladder.test_twins import SOURCES

STEM = "c08_wmma_tf32"
MATRICES = {"a": torch.zeros(2, 4), "b": torch.zeros(4, 3), "c": torch.zeros(2, 3)}


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine that looks as if it could build for an H100; load_inline only writes a file."""
    calls = []

    def load_inline(name, *, build_directory, **options):
        calls.append(options)
        assert not Path(build_directory, "lock").exists(), "load_inline would wait for ever"
        Path(build_directory, f"{name}.so").touch()

    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(loader, "_import", lambda name, library: SimpleNamespace(path=library))
    loader._load.cache_clear()
    folder = tmp_path / "cache" / "reference_cuda" / f"{STEM}_{loader.content_hash(STEM, 'sm_90')}"
    yield SimpleNamespace(monkeypatch=monkeypatch, calls=calls, folder=folder, extension=cpp_extension)
    loader._load.cache_clear()


def unavailable():
    with pytest.raises(TwinUnavailable) as caught:
        reference_cuda.load(STEM)
    return str(caught.value)


def test_builds_once_for_the_device_alone(hopper, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    built = reference_cuda.load(STEM)
    loader._load.cache_clear()
    again = reference_cuda.load(STEM)
    assert built.module.path == again.module.path and len(hopper.calls) == 1
    assert "-arch=sm_90" in hopper.calls[0]["extra_cuda_cflags"]


def test_load_all_reports_each(hopper):
    heard = []
    results = reference_cuda.load_all(lambda stem, result: heard.append(stem))
    assert list(results) == list(TWINS) and sorted(heard) == list(TWINS)
    assert all(isinstance(result, LoadedTwin) for result in results.values())


def test_unknown_stem_and_variants():
    with pytest.raises(ValueError, match=r"c99.*c01_naive_uncoalesced"):
        reference_cuda.load("c99")
    twin = TWINS["c03_shared_tiled"]
    assert isinstance(twin.variant(), Variant) and twin.variant() is twin.variants[0]
    assert twin.dtypes == (torch.float32, torch.int32) and twin.out_dtype == torch.float32


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (torch.version, "cuda", None, ["install a CUDA build"]),
        (torch.cuda, "is_available", lambda: False, ["CUDA_VISIBLE_DEVICES"]),
        (torch.cuda, "get_device_capability", lambda: (7, 5), ["compute capability 8.0 or newer, this one has 7.5"]),
        (cpp_extension, "CUDA_HOME", None, ["nvcc", "CUDA 13.0 toolkit", "CUDA_HOME"]),
        (cpp_extension, "is_ninja_available", lambda: False, ["pip install ninja"]),
    ],
    ids=["torch without CUDA", "no GPU", "too old", "no nvcc", "no ninja"],
)
def test_a_message_names_what_is_missing(hopper, where, name, value, words):
    hopper.monkeypatch.setattr(where, name, value)
    text = unavailable()
    assert all(word in text for word in words)
    refused = [stem for stem, result in reference_cuda.load_all().items() if isinstance(result, TwinUnavailable)]
    assert refused == ([STEM] if name == "get_device_capability" else list(TWINS))


def test_ninja_beside_a_python_that_was_not_activated(hopper, tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "ninja").touch(mode=0o755)
    hopper.monkeypatch.setenv("PATH", str(tmp_path))
    hopper.monkeypatch.setattr(sysconfig, "get_path", lambda _: str(scripts))
    reference_cuda.load(STEM)
    assert shutil.which("ninja") == str(scripts / "ninja")


def test_compile_error_shows_the_compilers_words_and_can_be_retried(hopper):
    works = hopper.extension.load_inline

    error = RuntimeError("Error building extension: " + "noise\n" * 100 + "c08_wmma_tf32.cu(7): error: expected")
    hopper.monkeypatch.setattr(hopper.extension, "load_inline", Mock(side_effect=error))
    text = unavailable()
    assert "c08_wmma_tf32.cu(7): error: expected" in text and len(text.splitlines()) < 30
    hopper.monkeypatch.setattr(hopper.extension, "load_inline", works)
    assert reference_cuda.load(STEM).twin.stem == STEM


def test_what_a_killed_build_left_is_taken_over(hopper):
    (hopper.folder / "build").mkdir(parents=True)
    (hopper.folder / "build" / "lock").touch()
    (hopper.folder / "owner.lock").touch()
    assert reference_cuda.load(STEM).module.path.exists()


def test_a_living_build_is_waited_for_but_not_for_ever(hopper):
    hopper.folder.mkdir(parents=True)
    hopper.monkeypatch.setattr(loader, "PATIENCE_S", 0.2)
    with (hopper.folder / "owner.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "end it or remove its folder" in unavailable()
    assert reference_cuda.load(STEM).module.path.exists()


def test_unwritable_cache(hopper, tmp_path):
    (tmp_path / "file").touch()
    hopper.monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "TORCH_EXTENSIONS_DIR" in unavailable()


def test_content_hash_covers_headers_flags_and_architecture(monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    monkeypatch.setattr(loader, "SOURCES", sources)
    seen = {loader.content_hash(STEM, "sm_90"), loader.content_hash(STEM, "sm_80")}
    for name in ("gemm.h", "common.cuh", "wmma.cuh", "binding.cpp", f"{STEM}.cu"):
        (sources / name).write_text((sources / name).read_text() + "\n")
        seen.add(loader.content_hash(STEM, "sm_90"))
    monkeypatch.setattr(loader, "NVCC_FLAGS", ("-O0",))
    seen.add(loader.content_hash(STEM, "sm_90"))
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"b": torch.zeros(5, 3)}, ValueError, r"a \(2, 4\), b \(5, 3\), c \(2, 3\)"),
        ({"c": torch.zeros(3, 2)}, ValueError, r"c \(3, 2\)"),
        ({"a": torch.zeros(4)}, ValueError, r"a \(4,\)"),
        ({"a": torch.zeros(2, 4, dtype=torch.half)}, TypeError, "a torch.float16"),
        ({"b": torch.zeros(3, 4).t()}, ValueError, r"contiguous.*\(1, 4\)"),
        ({"variant": "int32_16"}, TypeError, "int32_16 takes torch.int32"),
        ({**{x: torch.zeros(2, 2).int() for x in "abc"}, "alpha": 0.5, "variant": "int32_16"}, ValueError, "whole num"),
        ({"variant": "fp64"}, ValueError, "fp64.*fp32_32"),
        *(({x: torch._neg_view(y)}, ValueError, r"negative bit \(call .resolve_neg\(") for x, y in MATRICES.items()),
        ({}, ValueError, "CUDA device, got cpu"),
    ],
)
def test_launch_checks_its_tensors(change, error, text):
    loaded = LoadedTwin(TWINS["c03_shared_tiled"], SimpleNamespace(launch=lambda *_: pytest.fail("launched")))
    with pytest.raises(error, match=text):
        loaded.launch(**MATRICES | change)
