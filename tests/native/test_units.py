"""The extension's units without torch, checked by programs in C++ under sanitizers; and planted bugs, which these must
find."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.planted_bugs import UNCHANGED, caught, with_each
from triton_gemm import compat
from triton_gemm.compat import native

HERE = Path(__file__).parent
LOCK = "const std::unique_lock lock(changing_);"
GIVEN_UP = "std::vector<Entries::node_type> given_up;  // they end after the lock\n  "
FLAGS = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{HERE}", f"-I{native._SOURCES[0].parent}"]
UNITS = {x.stem: x for x in native._SOURCES if x.stem in ("launch", "table")}

# For each unit the text that a bug replaces, and its replacement.
BUGS: dict[str, dict[str, tuple[str, str]]] = {
    "launch": {
        "alpha-ignored": ("narrow = static_cast<float>(alpha)", "narrow = 1.0f"),
        "alpha-in-double": ("size == 4 ?", "size == 0 ?"),
        "address-of-another-operand": ("&addresses[operand]", "&addresses[0]"),
        "cluster-attribute-missing": ("add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim = {size, 1, 1};", ""),
        "programmatic-launch-forbidden": ("SerializationAllowed = 1", "SerializationAllowed = 0"),
        "stream-forgotten": ("config.hStream = stream;", ""),
        "error-swallowed": ("if (error == CUDA_SUCCESS) return;", "return;"),
        "context-not-made": ("driver.make_context(device);", ""),
        "parameter-may-end-outside": ("<= bytes.size()", "<= bytes.size() + 1"),
        "operand-one-too-far": ("            operand < given", "            operand <= given"),
        "map-anywhere": ("offset % alignof(CUtensorMap) == 0", "true"),
        "map-of-another-operand": ("(addresses[which])", "(addresses[0])"),
        "job-of-another-stream": ("device == of_device && stream == of", "device == of_device"),
        "job-of-another-device": ("device == of_device && stream == of", "stream == of"),
        "job-launched-again": (
            "__atomic_compare_exchange_n(&until, &waiting, 0,",
            "__atomic_compare_exchange_n(&waiting, &waiting, 0,",
        ),
        "job-under-capture": ("if (is_captured(driver, of)) {", "if (false) {"),
        "job-lost-by-a-capture": ("int64_t taken = 0;", "int64_t taken = 7;"),
        "job-s-threads-not-counted": ("__atomic_fetch_add(&inside, 1,", "__atomic_fetch_add(&inside, 0,"),
        "job-seen-before-its-parts": ("_n(&until, to, __ATOMIC_SEQ_CST)", "_n(&until, to, __ATOMIC_RELAXED)"),
        "job-error-swallowed": ("__atomic_store_n(&launched, error,", "__atomic_store_n(&launched, 0,"),
        "event-recorded-after-an-error": ("if (error == CUDA_SUCCESS) error = record", "error = record"),
        "workspace-of-another-device": ("{device, stream}", "{0, stream}"),
        "workspace-of-another-stream": ("{device, stream}", "{device, nullptr}"),
        "workspace-too-small": ("found->second.bytes < bytes", "false"),
        "workspace-under-capture": (" || status != CU_STREAM_CAPTURE_STATUS_NONE", ""),
        "failed-capture-query-ignored": ("!= CUDA_SUCCESS || status", "== CUDA_ERROR_UNKNOWN || status"),
        "find-without-a-lock": ("const std::shared_lock lock(changing_);", ""),
        "keep-without-a-lock": ("const std::unique_lock lock(changing_);\n  std::swap", "std::swap"),
        "memory-ends-within-the-lock": (
            "std::swap(kept_[{device, stream}], workspace);",
            "kept_[{device, stream}] = std::move(workspace);",
        ),
        "forgotten-within-the-lock": ("given_up.swap(kept_);", "kept_.clear();"),
    },
    "table": {
        "words-not-compared": ("std::memcmp(words.data(), key.words, sizeof(int64_t) * words.size()) == 0", "true"),
        "last-word-not-compared": ("sizeof(int64_t) * words.size()", "sizeof(int64_t) * (words.size() - 1)"),
        "longer-key-is-equal": ("words.size() == static_cast<size_t>(key.size) &&", ""),
        "find-without-a-lock": ("const std::shared_lock lock(changing_);", ""),
        "keep-without-a-lock": (GIVEN_UP + LOCK, GIVEN_UP),
        "entries-end-within-the-lock": (GIVEN_UP + LOCK, LOCK + GIVEN_UP),
        "one-too-many": ("order_.size() >= capacity_", "order_.size() > capacity_"),
        "newest-given-up": ("(order_.front()));\n    order_.pop_front", "(order_.back()));\n    order_.pop_back"),
        "order-kept-by-clear": ("order_.clear();", ""),
        "empty-after-clear-forgotten": ("empty_.store(true", "empty_.store(false"),
        "table-of-the-parent-used": ("return forks_ != forks.load(std::memory_order_relaxed);", "return false;"),
        "forks-counted-in-the-parent": ("(nullptr, nullptr, [] {", "(nullptr, [] { forks.fetch_add(1); }, [] {"),
    },
}
OF = {f"{unit}: {name}": (unit, *change) for unit, found in BUGS.items() for name, change in found.items()}


def compiled(folder: Path, sources: Iterable[Path], *flags: str) -> list[Path]:
    """Objects of these sources; those of checks are named after their unit."""
    compiler, made = compat.cxx_compiler() or ["g++"], []
    headers = ["-isystem", str(Path(native.nvidia.dirname, "include"))]
    for source in sources:
        made.append(folder / f"{source.parent.name}-{source.stem}.o")
        command = [*compiler, *FLAGS, *headers, *flags, "-c", str(source), "-o", str(made[-1])]
        subprocess.run(command, check=True, timeout=300)
    return made


def run(folder: Path, objects: Iterable[Path], sanitizer: str) -> None:
    """Links and runs these; AssertionError with what it said where it fails, or has not ended in a minute."""
    program = str(folder / "program")
    command = [*(compat.cxx_compiler() or ["g++"]), f"-fsanitize={sanitizer}", *map(str, objects), "-o", program]
    subprocess.run(command, check=True, timeout=300)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    for prefix in ([], ["setarch", "-R"]):
        try:
            done = subprocess.run(
                [*prefix, program], env=environment, capture_output=True, text=True, errors="replace", timeout=60
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"it has not ended: {late.stderr!r}") from None
        if "unexpected memory mapping" not in done.stderr:  # ThreadSanitizer's, where addresses are too random
            break
    else:
        pytest.skip("ThreadSanitizer does not run here")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.parametrize("unit", UNITS)
def test_checks_pass_and_touch_no_memory_of_others(unit: str, tmp_path: Path) -> None:
    flags = "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    run(tmp_path, compiled(tmp_path, [HERE / f"{unit}.cpp", *UNITS.values()], *flags), "address,undefined")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the units and of their checks, for ThreadSanitizer."""
    folder = tmp_path_factory.mktemp("threads")
    sources = [*UNITS.values(), *(HERE / f"{unit}.cpp" for unit in UNITS)]
    return {x.stem: x for x in compiled(folder, sources, "-O1", "-fsanitize=thread")}


TRIES = 4  # of a race, which may not happen at the first


@with_each(OF)
def test_planted_bugs_are_found(bug: str, objects: dict[str, Path], tmp_path: Path) -> None:
    for unit in UNITS if bug == UNCHANGED else [OF[bug][0]]:
        parts = {name: objects[name] for name in (f"cpp-{unit}", f"native-{unit}", "cpp-launch")}
        if bug != UNCHANGED:
            _, old, new = OF[bug]
            text = UNITS[unit].read_text()
            assert old in text, f"{unit}.cpp has no {old!r}: bring BUGS up to date"
            mutant = tmp_path / "cpp" / f"{unit}.cpp"
            mutant.parent.mkdir()
            mutant.write_text(text.replace(old, new))
            [parts[f"cpp-{unit}"]] = compiled(tmp_path, [mutant], "-O1", "-fsanitize=thread", "-w")
        with caught(bug):
            for _ in range(1 if bug == UNCHANGED else TRIES):
                run(tmp_path, parts.values(), "thread")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("unit", [x.stem for x in native._SOURCES])
def test_units_compile_without_warnings(unit: str, tmp_path: Path) -> None:
    """Users' builds ask for none (-w). Headers of others warn of nothing here."""
    compiling, _ = native.native_commands(compat.cxx_compiler() or ["g++"], "x.so")
    [command] = [x for x in compiling if f"{unit}.o" in x]
    strict = [f"-isystem{x[2:]}" if x.startswith("-I") else x for x in command if x != "-w"]
    subprocess.run([*strict, "-Wall", "-Wextra", "-Werror"], cwd=tmp_path, check=True, timeout=600)
