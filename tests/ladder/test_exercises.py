"""The command of the exercises, and how they are made from their solutions."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import gluon_on_cpu
from tests.support.gluon_threads import DeadlockError
from triton_gemm.kernels.launch import Launch, TensorMap
from triton_gemm.ladder import command
from triton_gemm.ladder.exercises import EXERCISES, SOLUTIONS, Exercise, ring
from triton_gemm.ladder.exercises import command as exercises
from triton_gemm.runtime import aot

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Types words behind `exercise` in an empty folder: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def typed(*words: str) -> tuple[int, str, str]:
        try:
            status = command.main(["exercise", *words])
        except SystemExit as left:
            status = int(str(left.code))
        return status, *capfd.readouterr()

    return typed


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_is_its_solution_with_a_hole(exercise: Exercise) -> None:
    assert exercise.name.startswith(f"e{exercise.number:02}_")
    assert len(exercise.hints) >= 2 and exercise.before.strip() and exercise.solution.strip()
    unfilled = exercise.unfilled
    ast.parse(unfilled)
    ast.parse(exercise.filled(exercise.solution))
    assert exercise.solution not in unfilled and exercise.before in unfilled
    assert "HINTS" not in unfilled and "BEFORE" not in unfilled
    assert unfilled.count("# FILL IN: ") == unfilled.count("# END\n") == 1
    assert unfilled.endswith("\n") and not unfilled.endswith("\n\n")
    assert len(unfilled.splitlines()) <= 60


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_compiles(exercise: Exercise) -> None:
    """It is checked in the interpreter; a learner with a GPU can run it there too."""
    module = importlib.import_module(f"triton_gemm.ladder.exercises.solutions.{exercise.name}")
    half = exercise.name in ("e05_beta", "e08_accumulate", "e12_swizzle", "e13_ring")
    dtype = torch.float16 if half else torch.float32
    x, row, sums = (torch.empty(rows, 64, dtype=dtype, device="meta") for rows in (64, 1, 192))
    operands: dict[str, tuple[Any, ...]] = {
        "e05_beta": (x, x, x, 1.0, 0.5),
        "e07_tf32": (row, row),
        "e09_split_k": (x, x, x, sums),
    }
    with aot.capture() as launches:
        module.run(*operands.get(exercise.name, (x, x, x)))
    assert launches
    for launch in launches:
        assert aot.compile_launch(launch, (9, 0)).spills == 0


@pytest.mark.parametrize(
    ("phases", "right"), [("turn ^ 1, turn", True), ("1, turn", False), ("turn ^ 1, 1", False), ("0, 0", False)]
)
def test_the_ring_in_the_simulator_of_kernels(phases: str, right: bool) -> None:
    """Which knows more of Hopper than the exercise's own: its verdict is the same."""
    folder = Path(ring.__file__).parent
    around = (folder / "ring.py").read_text().replace("from ...compat", "from ..compat")
    solution = (SOLUTIONS / "e13_ring.py").read_text().replace("return turn ^ 1, turn", f"return {phases}")
    around = around.replace("from .trace import WrongError, by_kernels", "")
    kernel = gluon_on_cpu.module("ring", {"ring": around}, {}).ring_kernel
    roles = gluon_on_cpu.module("e13_ring", {"e13_ring": solution}, {})
    generator, (m, k) = torch.Generator().manual_seed(0), (ring.BLOCK, 8 * ring.BLOCK)
    a, b = (torch.randint(-3, 4, shape, generator=generator).half() for shape in ((m, k), (k, m)))
    operands = {"a": a, "b": b, "c": torch.full((m, m), torch.nan, dtype=torch.float16)}
    maps = {
        f"{name}_desc": TensorMap(name, x.dtype, tuple(x.shape), x.stride(), (m, m)) for name, x in operands.items()
    }
    more = {"K": k, "LOAD": roles.load, "MULTIPLY": roles.multiply, "BLOCK": m, "SLOTS": ring.SLOTS}
    try:
        gluon_on_cpu.run(Launch(kernel, (1, 1, 1), {**maps, **more}, {"num_warps": 4}), operands, {})
        equal = torch.equal(operands["c"], (a.float() @ b.float()).half())
    except (DeadlockError, AssertionError):  # or more arrivals than a barrier counts
        equal = False
    assert equal == right


def test_what_a_file_lacks_outside_of_its_hole() -> None:
    """Comments, docstrings and what is added do not count."""
    for exercise in EXERCISES:
        for lines in (exercise.before, exercise.solution):
            assert exercise.missing(exercise.filled(lines).replace("# FILL IN", "more = 1  #")) == []
    swizzle = EXERCISES[11]
    text = swizzle.filled(swizzle.solution)
    assert swizzle.missing(text.replace("tl.debug_barrier()", "pass")) == ["tl.debug_barrier()"]


def test_it_copies_and_keeps_what_was_filled_in(run: Run) -> None:
    status, out, _ = run("start")
    assert status == 0 and "13 of 13 exercises copied to gemm_exercises." in out
    files = [Path("gemm_exercises") / f"{exercise.name}.py" for exercise in EXERCISES]
    assert [file.read_text() for file in files] == [exercise.unfilled for exercise in EXERCISES]
    files[0].write_text("mine")
    files[1].unlink()
    status, out, _ = run("start")
    assert status == 0 and "1 of 13 exercises copied to gemm_exercises; 12 were there, and are as they were." in out
    assert files[0].read_text() == "mine" and files[1].read_text() == EXERCISES[1].unfilled


@pytest.mark.full
def test_it_lists_and_checks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run()
    assert status == 0 and "exercise start` copies them into ./gemm_exercises" in out
    assert all(f"{exercise.number:>2} {exercise.title}" in out for exercise in EXERCISES)
    run("start", "--folder", "here")
    first, second = (Path("here") / f"{exercise.name}.py" for exercise in EXERCISES[:2])
    solved = EXERCISES[0].filled(EXERCISES[0].solution)
    first.write_text(solved.replace("def run(a, b, c):", "def run(a, b, c, *_):"))
    second.write_text(EXERCISES[1].filled("    return unknown\n"))
    status, out, _ = run("--folder", "here")
    assert status == 0
    outside = "     solved. Outside of the hole it has no `def run(a, b, c):`: not all is checked there.\n"
    assert out.count("to do") == 11 and out.count(outside) == 1 and "1 of 13 solved." in out
    assert re.search("line [0-9]+: NameError: name 'unknown' is not defined", out)
    status, out, _ = run("check", "1", "--folder", "here")
    assert status == 0 and "1 of 1 solved." in out
    status, out, _ = run("check", "1", "12", "--folder", "here")
    assert status == 1 and "not filled in yet: the tile comes back, but" in out
    monkeypatch.chdir("here")  # inside of their folder
    assert run("check", "1")[0] == 0 and "0 of 13 exercises copied to .;" in run("start")[1]
    assert not Path("gemm_exercises").exists()


def test_it_prints_json_for_grading(run: Run) -> None:
    run("start")
    text = EXERCISES[0].filled(EXERCISES[0].solution)
    (Path("gemm_exercises") / f"{EXERCISES[0].name}.py").write_text(f"print('mine')\n{text}")
    status, out, error = run("check", "1", "2", "--json")
    solved, other = json.loads(out)
    assert status == 1 and error == "mine\n"
    about = {"number": 1, "name": "e01_coalesce", "title": EXERCISES[0].title}
    assert solved == {**about, "solved": True, "wrong": None}
    assert not other["solved"] and other["wrong"].startswith("not filled in yet: program 0 reads a[0, 45]")


def test_hints_and_solution(run: Run) -> None:
    status, out, _ = run("hint", "4")
    assert status == 0 and out == f"Hint 1 of 3: {EXERCISES[3].hints[0]} (next: hint 4 --number 2)\n"
    assert "(`solution` is next)" in run("hint", "4", "--number", "3")[1]
    assert run("hint", "1", "2")[1].count("Hint 1 of ") == 2  # of both, as `check 1 2`
    assert run("solution", "4")[:2] == (0, EXERCISES[3].solution)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("check", "there is no folder gemm_exercises; `python -m triton_gemm.ladder exercise start` makes it"),
        ("check 14", "there are exercises 1 to 13, and no 14"),
        ("hint", "hint wants an exercise's number, as in `hint 1`"),
        ("solution", "solution wants an exercise's number"),
        ("hint 4 --number 4", "exercise 4 has hints 1 to 3, and no 4"),
        ("begin", "invalid choice: 'begin'"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(run: Run, words: str, sentence: str) -> None:
    status, out, error = run(*words.split())
    assert status == 2 and out == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error


def test_without_numpy_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("start")
    monkeypatch.setattr(exercises.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: pytest.fail("nothing to run"))
    assert run("check") == (1, "", "error: Triton's interpreter needs NumPy: pip install numpy\n")


def test_a_file_that_is_none_is_answered_by_a_sentence(run: Run) -> None:
    """Another encoding, a folder, and code that ends Python, as a solution might do."""
    run("start", "--folder", "here")
    files = [Path("here") / f"{exercise.name}.py" for exercise in EXERCISES]
    files[0].write_bytes("x = 'Größe'\n".encode("latin-1"))
    files[1].unlink(), files[1].mkdir()
    files[2].write_text("import sys\nsys.exit(0)\n")
    files[3].write_text(EXERCISES[3].filled("    exit()\n"))
    files[4].write_text("")
    files[5].write_bytes(bytes(range(256)))
    files[6].write_text("x = 1\n", "utf-16")
    files[7].unlink(), files[7].symlink_to(files[7].name)
    files[8].unlink(), files[8].symlink_to("nowhere")
    cookie = f"# coding: latin-1\n# Größe\n{EXERCISES[9].filled(EXERCISES[9].solution)}"
    files[9].write_bytes(cookie.encode("latin-1"))
    messages = {
        1: "SyntaxError: ",
        2: "it cannot be read: Is a directory",
        3: "it ends Python, by SystemExit(0)",
        4: "it ends Python, by SystemExit(None)",
        5: "AttributeError: ",
        6: "Error: ",
        7: "Error: ",
        8: "it cannot be read: Too many levels of symbolic links",
        9: "not copied",
        10: "solved",
    }
    for words, status in ((("check", *map(str, messages)), 1), ((), 0)):
        left, out, error = run(*words, "--folder", "here")
        assert left == status and "Traceback" not in out + error and "1 of 1" in out
        answers = dict(zip(out.splitlines()[::2], out.splitlines()[1::2], strict=False))
        for number, sentence in messages.items():
            assert sentence in answers[f"{number:>2} {EXERCISES[number - 1].title}"], number
    status, out, error = run("check", "3", "--folder", "here")
    assert status == 1 and "0 of 1 solved." in out


def test_an_interruption_is_told_from_a_solution_that_ends(run: Run) -> None:
    run("start")
    (Path("gemm_exercises") / f"{EXERCISES[0].name}.py").write_text("raise KeyboardInterrupt")
    assert run("check", "1") == (130, f" 1 {EXERCISES[0].title}\n", "error: interrupted\n")


def test_a_folder_that_is_none_is_answered_by_a_sentence(run: Run) -> None:
    Path("file").write_text("")
    Path("here").mkdir()
    (Path("here") / f"{EXERCISES[0].name}.py").symlink_to("/no/such/folder/file")
    for folder, why in (("file", "file: File exists"), ("file/x", "file/x: Not a directory"), ("here", "No such file")):
        status, out, error = run("start", "--folder", folder)
        assert status == 2 and out == "" and error.startswith("error: ") and error.count("\n") == 1 and why in error


def played(number: int) -> dict[str, Any]:
    """The scene of an exercise's page."""
    text = (Path("gemm_exercises") / f"{EXERCISES[number - 1].name}.html").read_text()
    return json.loads(re.findall(r'id="data">(.*)</script>', text)[0])[0]


@pytest.mark.full
def test_a_run_is_shown_and_a_wrong_one_looks_wrong(run: Run) -> None:
    run("start")
    numbers = ["1", "2", "4", "6", "12", "13"]
    status, out, _ = run("check", *numbers, "--show")
    assert status == 1 and out.count("plays it: open it in a browser") == len(numbers)
    wrong = {int(number): played(int(number)) for number in numbers}
    for number in wrong:
        exercise = EXERCISES[number - 1]
        (Path("gemm_exercises") / f"{exercise.name}.py").write_text(exercise.filled(exercise.solution))
    assert run("check", *numbers, "--show")[0] == 0
    right = {number: played(number) for number in wrong}
    for number, scene in wrong.items():
        assert scene["wrong"] and right[number]["wrong"] is None
        assert f"     not filled in yet: {scene['wrong']}\n" in out

    def text_of(scene: dict[str, Any]) -> str:
        return " ".join(step["says"] for step in scene["steps"])

    assert " 1 elements" not in text_of(wrong[2]) + text_of(right[1]) and " 1 sectors" not in text_of(right[1])
    assert "32 elements in 32 sectors" in text_of(wrong[1]) and "32 sectors" not in text_of(right[1])
    outside = [cell for step in wrong[2]["steps"] for cell in step["cells"] if cell[1] == "outside"]
    assert ["a", "outside", 0, 45, 16, 3] in outside and "outside" not in right[2]["key"]
    assert "Programs 0 to 15 read strips of A: 1, of B: 16." in text_of(wrong[4])
    assert "Programs 0 to 15 read strips of A: 4, of B: 4." in text_of(right[4])
    assert "chunk 0 of their rows: wavefronts 8" in text_of(wrong[12]) and "wavefronts 8" not in text_of(right[12])

    def pauses(scene: dict[str, Any]) -> int:
        products = [bar for bar in scene["bars"] if bar[1] == "product"]
        return sum(later[2] - earlier[3] for earlier, later in pairwise(products))

    assert pauses(wrong[6]) > 0 == pauses(right[6])
    assert {bar[1] for bar in wrong[13]["bars"]} == {"wait"}
    assert sum(bar[1] == "product" and not bar[5] for bar in right[13]["bars"]) == 8
