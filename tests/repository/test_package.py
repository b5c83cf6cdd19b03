"""What is shipped: the sdist is the repository, the wheel the package alone, and it works where nothing else is."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import triton

from tests.support.tiers import one

ROOT = Path(__file__).parents[2]
TREES = ("triton_gemm", "reference_cuda", "perf", "examples", "tests")


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees neither this checkout nor the interpreter, unless `variables` say so."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(map(str, command), cwd=cwd, env={**kept, **variables}, capture_output=True, text=True)


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: what git knows and does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("only git knows which files belong to the checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    folder = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(what: str, folder: Path, out: Path) -> Path:
    """Builds the "sdist" or the "wheel" of a folder by hatchling; the path of it."""
    code = f"import sys; from hatchling import build; build.build_{what}(sys.argv[1])"
    done = run(sys.executable, "-c", code, out, cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    archive = built("sdist", source, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


@dataclass(frozen=True)
class Wheel:
    """A wheel: where it is, what it holds but its metadata, and that."""

    path: Path
    files: set[str]
    metadata: Message


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Made of the sdist, as pip makes it."""
    copy = shutil.copytree(sdist, tmp_path_factory.mktemp("to build") / "source")
    path = built("wheel", copy, tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        return Wheel(path, files, message_from_bytes(archive.read(metadata)))


@dataclass(frozen=True)
class Installed:
    """A new environment with the wheel and what this one's torch and triton bring, and no checkout in sight."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, *arguments, cwd=self.folder, **variables)


@pytest.fixture(scope="module")
def installed(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = Installed(tmp_path_factory.mktemp("environment"))
    venv.create(environment.folder, with_pip=False, symlinks=True)
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", environment.python)
    done = run(*pip, "install", *options, wheel.path, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    # A .pth file shows their folders and not what .pth files in these show: no editable install of this checkout.
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    theirs = {str(Path(module.__file__).parent.parent) for module in (torch, triton)}
    (packages / "theirs.pth").write_text("\n".join(sorted(theirs)) + "\n")
    return environment


def test_the_sdist_is_the_repository(source: Path, sdist: Path) -> None:
    assert files_under(sdist) - {"PKG-INFO"} == files_under(source)


def test_the_wheel_is_the_package(source: Path, wheel: Wheel) -> None:
    assert "triton_gemm/py.typed" in wheel.files
    package = {name for name in files_under(source) if name.startswith("triton_gemm/")}
    assert wheel.files == {*package, "triton_gemm_autoload.py", "triton_gemm_command.py"}


def test_the_wheel_asks_for_little_more_than_torch_and_triton(wheel: Wheel) -> None:
    required = wheel.metadata.get_all("Requires-Dist", [])
    needed = {re.split(r"\W", line)[0] for line in required if "extra ==" not in line}
    assert needed == {"torch", "triton", "platformdirs", "filelock"}
    assert set(wheel.metadata.get_all("Provides-Extra", [])) == {"cli", "interpreter", "docs", "dev"}


def test_dev_brings_what_the_repository_imports(source: Path, wheel: Wheel) -> None:
    required = {re.split(r"[^\w-]", line)[0] for line in wheel.metadata.get_all("Requires-Dist", [])}
    imported: set[str] = set()
    for path in (path for tree in TREES for path in (source / tree).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.split(".")[0])
    others = imported - sys.stdlib_module_names - {*TREES, "triton_gemm_autoload", "triton_gemm_command"}
    assert {"rich", "hypothesis", "numpy"} <= others
    distributions = packages_distributions()
    assert {distribution for name in others for distribution in distributions.get(name, [name])} <= required


def test_the_description_stands_alone(wheel: Wheel) -> None:
    """A package index has no files and pictures for it to link to."""
    description = wheel.metadata.get_payload()
    assert "pip install" in description and "```python" in description
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)|<img", description) == []


def test_the_wheel_alone_is_imported_and_multiplies_in_the_interpreter(installed: Installed) -> None:
    code = """
import importlib.util, torch, triton_gemm, triton_gemm.ladder
print(triton_gemm.__file__)
print([name for name in ("reference_cuda", "perf", "examples", "tests") if importlib.util.find_spec(name)])
a, b = torch.randn(33, 40), torch.randn(40, 17)
torch.testing.assert_close(triton_gemm.matmul(a, b), a @ b)
with triton_gemm.use():
    torch.testing.assert_close(a @ b, triton_gemm.matmul(a, b), rtol=0, atol=0)
print(triton_gemm.report_routing(), triton_gemm.explain(a, b))
"""
    done = installed.run("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    file, others, routed = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed.folder) and others == "[]"
    assert routed.startswith("{('mm', 'triton_gemm'): 1} portable")


def test_a_learner_needs_nothing_else(installed: Installed) -> None:
    ladder = ("-m", "triton_gemm.ladder", "exercise")
    for words, answer in ((("start",), "13 of 13 exercises copied"), (("check", "11"), "not filled in yet: ")):
        done = installed.run(*ladder, *words)
        assert answer in done.stdout, done.stderr


def test_the_command_works(installed: Installed) -> None:
    command = installed.folder / "bin" / "triton-gemm"
    for how in ((command,), (installed.python, "-m", "triton_gemm")):
        done = run(*how, "explain", "16", "64", "32", "--device", "h200", "--json", cwd=installed.folder)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["chosen"]["by"] == "model"
    done = run(command, "explain", "16", "64", cwd=installed.folder)
    assert done.returncode == 2 and "Usage: triton-gemm explain" in done.stderr


def test_what_a_wheel_cannot_run_says_what_it_needs(installed: Installed) -> None:
    done = installed.run("-m", "triton_gemm", "bench", "square")
    assert (done.returncode, done.stderr) == (1, "error: bench needs a clone of the repository\n")
    done = installed.run("-m", "triton_gemm", "ladder", "k06", "--list")
    assert done.returncode == 0 and done.stdout.startswith("k06 pipelined")


@pytest.mark.few(shows=one)
@pytest.mark.parametrize(
    "without",
    [
        *('import sys; sys.modules["typer"] = None', 'import sys; sys.modules["rich"] = None'),
        'import typer; typer.__version__ = "0.12.5"',
    ],
)
def test_the_command_says_what_it_needs(without: str, installed: Installed) -> None:
    hidden = f"{without}; from triton_gemm.cli import main; main()"
    words = "the command line needs typer 0.19 or newer, and rich: pip install 'typer>=0.19' rich"
    assert 'cli = ["typer>=0.19", "rich' in (ROOT / "pyproject.toml").read_text()
    for call in (("--help",), ("doctor", "--quiet"), ("explain", "--json")):
        done = installed.run("-c", hidden, *call)
        assert (done.returncode, done.stderr) == (1, f"error: {words}\n")
        assert done.stdout == (json.dumps({"error": words}) + "\n" if "--json" in call else "")
    done = installed.run("-c", hidden, "doctor")
    assert done.returncode == 0 and done.stdout.startswith("versions ") and done.stdout.endswith(f"\n{words}\n")
    assert json.loads(installed.run("-c", hidden, "doctor", "--json").stdout)["broken"] is False


@pytest.mark.full
def test_the_interpreter_says_that_it_needs_numpy(installed: Installed) -> None:
    hidden = "import sys; sys.modules['numpy'] = None; import torch, triton_gemm"
    done = installed.run("-c", hidden, TRITON_INTERPRET="1")
    words = "TRITON_INTERPRET=1 selects Triton's interpreter, which needs NumPy: pip install numpy"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {words}"
    assert installed.run("-c", hidden).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize(("numpy", "runs"), [("2.3.5", True), ("2.4.0", False)])
def test_the_interpreter_of_triton_3_6_says_which_numpy_it_needs(numpy: str, runs: bool, installed: Installed) -> None:
    code = f"""
import triton
from importlib import metadata
triton.__version__ = "3.6.0"
metadata.version = lambda name: {numpy!r}
import triton_gemm
"""
    done = installed.run("-c", code, TRITON_INTERPRET="1")
    assert (done.returncode == 0) is runs
    assert runs or done.stderr.splitlines()[-1].endswith("pip install 'numpy<2.4'")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_tests_are_collected_in_the_sdist(interpret: str, sdist: Path) -> None:
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = run(*command, cwd=sdist, TRITON_INTERPRET=interpret, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+(/\d+)? tests collected", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("module", ["perf.bench.__main__", "perf.report", "examples.bench_gpt"])
def test_without_rich_an_import_raises_and_a_command_ends_with_a_sentence(module: str) -> None:
    """SystemExit from an import would end pytest and not only the test."""
    code = f"""
import runpy, sys
sys.modules["rich"] = None
try:
    import {module}
except ModuleNotFoundError as error:
    print(error.name.split(".")[0])
runpy.run_module({module!r}, run_name="__main__")
"""
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "rich\n")
    assert re.fullmatch(r"error: .*pip install -e '\.\[dev\]'.*\n", done.stderr)
