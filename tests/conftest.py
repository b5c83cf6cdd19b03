"""What all tests share: which group and which tier a process runs, and which tests need a GPU.

Triton decides when it is imported whether kernels are interpreted (TRITON_INTERPRET=1) or compiled, so
a process runs one group: tests/interpreter with the variable set, everything else without it. Plain
`pytest` starts the other process itself (test_interpreter_group.py); `make test` starts both.
"""

import os
from collections.abc import Iterator
from pathlib import Path

# No test reads or writes the tables of who runs it: there can be no folder in this file.
os.environ["TRITON_GEMM_CACHE_DIR"] = os.devnull
# None builds the extension that launches repeated calls, but those that are about it.
os.environ["TRITON_GEMM_NATIVE"] = "0"
# Choices do not depend on which kernels of the package's kit are stale.
os.environ["TRITON_GEMM_KIT"] = "0"

import pytest

from tests.support import tiers

HERE = Path(__file__).parent
INTERPRETER = HERE / "interpreter"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=("fast", "full", "rest"), default="fast", help="which tests run: tests/support/tiers.py"
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    inside = collection_path.is_relative_to(INTERPRETER)
    if INTERPRETING:
        return None if inside or collection_path in (HERE, HERE.parent) else True
    return True if inside else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.choose(config, items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_call_is_like_another_tests() -> None:
    """Plans and kept calls of other tests, which may have been made under patches, are not served."""
    if INTERPRETING:
        from triton_gemm.selection import generation

        generation.advance()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the user's folder of tables during this test."""
    from tests.support import table_fakes

    return table_fakes.own_folder(tmp_path, monkeypatch)


@pytest.fixture
def default_policy() -> Iterator[None]:
    """The default policy is set when the test begins, and the policy before it is restored when it ends."""
    from tests.support import table_fakes

    with table_fakes.default_policy():
        yield


def _all_skipped(config: pytest.Config) -> bool:
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    ran = any(stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    return bool(stats.get("skipped")) and not ran


def pytest_sessionfinish(session: pytest.Session) -> None:
    on_worker = hasattr(session.config, "workerinput")
    if not on_worker and session.exitstatus == pytest.ExitCode.OK and _all_skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if _all_skipped(config):
        terminalreporter.write_line("Every test was skipped, so nothing was shown: a failure.", red=True)
    if INTERPRETING:
        terminalreporter.write_line("TRITON_INTERPRET=1: only tests/interpreter is collected.")
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line("tests/interpreter is collected only with TRITON_INTERPRET=1 set.")
