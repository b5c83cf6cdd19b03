"""Which sources decide a record's figures, and when their hash is another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grimp
import pytest

from perf.measure import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is hashed, as the root."""
    for pattern in {pattern for patterns in environment.SOURCES.values() for pattern in patterns}:
        found = [path for path in ROOT.glob(pattern) if path.is_file()]
        assert found, f"{pattern} finds nothing: what it found has moved or is gone"
        for path in found:
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def hashes() -> dict[str, str]:
    return {measured: environment.source_hash.__wrapped__(measured) for measured in environment.SOURCES}


LADDER = {"ladder", "battery"}
GEMM = set(environment.SOURCES) - {"ladder"}
CALLS = {"host", "battery", "gpt", "learning", "models"}


def test_the_hash_looks_past_what_decides_no_figure(sources: Path) -> None:
    before = hashes()
    assert before == {measured: environment.describe(measured)["sources"] for measured in environment.SOURCES}
    kernels = sources / "triton_gemm" / "kernels"
    rung, kernel = sources / "triton_gemm" / "ladder" / "k04_grouped.py", kernels / "fma.py"
    for path in (rung, kernel):
        text = path.read_text().replace("from ", "import os\nfrom ", 1)
        path.write_text(text.replace('"""', '"""Other words. ', 1) + "\n\n__all__ = []  # changed\n")
    for path in (sources / "triton_gemm").rglob("select.py"):  # modules and functions may move
        path.rename(kernels / "selection.py")
    with kernel.open("a") as whole, (kernels / "gemv.py").open("r+") as part:
        whole.write(part.read())
        part.truncate(0)
    (models,) = (sources / "triton_gemm").rglob("device_models.json")
    figures = json.loads(models.read_text())
    models.write_text(json.dumps({name: {**figures[name], "source": "elsewhere"} for name in reversed(figures)}))
    twin = sources / "reference_cuda" / "c01_naive_uncoalesced.cu"
    twin.write_text("// c01\n/* of\ntwo lines */" + twin.read_text())
    (sources / "triton_gemm" / "kernels" / "README.md").write_text("other words")
    assert hashes() == before


@pytest.mark.parametrize(
    ("pattern", "old", "new", "of"),
    [
        ("ladder/k06_pipelined.py", "num_stages", "stages", LADDER),
        ("../reference_cuda/c01_naive_uncoalesced.cu", "int ", "long ", LADDER),
        ("kernels/fma.py", "LONGEST_CHAIN = 4096", "LONGEST_CHAIN = 2048", GEMM),
        ("**/select.py", "return ", "return not ", GEMM),
        ("**/device_models.json", '"num_sms": 132', '"num_sms": 78', GEMM),
        ("compat/language.py", "return ", "return not ", LADDER | GEMM),
        ("tables/*-5120bit-*.json", '"M": 1', '"M": 2', CALLS | {"bench", "first-calls"}),
        ("runtime/compiling.py", "STARTING = 4", "STARTING = 2", CALLS | {"first-calls"}),
        ("runtime/plan.py", "return ", "return not ", CALLS | {"first-calls"}),
        ("functional/api.py", "return ", "return not ", CALLS),
        ("functional/fast_path.py", "return ", "return not ", CALLS),
        ("learning/halving.py", "MOST = 8", "MOST = 4", {"learning"}),
        ("../examples/gpt.py", "self", "this", {"gpt"}),
        ("../perf/models/zoo.py", "layers=4", "layers=8", {"models"}),
    ],
)
def test_the_hash_follows_what_is_measured(pattern: str, old: str, new: str, of: set[str], sources: Path) -> None:
    before = hashes()
    (path,) = (sources / "triton_gemm").glob(pattern)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = hashes()
    assert {measured for measured in before if before[measured] != after[measured]} == of


def test_the_hash_of_the_ladder_holds_all_that_its_rungs_import() -> None:
    covered = {path for pattern in environment.SOURCES["ladder"] for path in ROOT.glob(pattern)}
    graph = grimp.build_graph("triton_gemm", cache_dir=None)
    waiting = [module for module in graph.find_children("triton_gemm.ladder") if ".k" in module]
    assert len(waiting) == 11
    seen: set[Path] = set()
    while waiting:
        module = waiting.pop()
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if path.exists() and path not in seen:  # no package, which imports what a rung does not
            seen.add(path)
            waiting += graph.find_modules_directly_imported_by(module)
    assert {path.stem for path in seen} >= {"k11_warp_specialised", "config"} and seen <= covered


def test_each_kind_of_calls_depends_on_all_c_plus_plus() -> None:
    found = {path for suffix in ("cpp", "h") for path in (ROOT / "triton_gemm").rglob(f"*.{suffix}")}
    assert found and all(found <= environment.files_of(environment.SOURCES[measured]) for measured in CALLS)


def test_every_source_counts_for_some_figure_or_is_said_to_count_for_none() -> None:
    """A new file belongs to what a record depends on, or into NO_FIGURE; patterns that find nothing are gone."""
    counting = environment.files_of(pattern for patterns in environment.SOURCES.values() for pattern in patterns)
    for pattern in environment.NO_FIGURE:
        without = environment.files_of([pattern])
        assert without and not without & counting, pattern
        counting |= without
    assert environment.files_of(["triton_gemm/**/*.*"]) == {
        path for path in counting if path.is_relative_to(ROOT / "triton_gemm")
    }
