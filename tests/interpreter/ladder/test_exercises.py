"""Exercises of the ladder: each solution passes, the hole as it is does not, and plausible mistakes are told what is
wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exercise_answers import BY_NAME, MISTAKES, OTHERS, REFUSED, UNFILLED
from tests.support.tiers import one
from triton_gemm.ladder.exercises import EXERCISES, Exercise, causes, checks, fp32


def checked(exercise: Exercise, lines: str, folder: Path, *, compiles: bool = False) -> str | None:
    path = folder / f"{exercise.name}.py"
    path.write_text(exercise.filled(lines))
    return checks.check(exercise, path, compiles=compiles)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_passes(exercise: Exercise, tmp_path: Path) -> None:
    assert checked(exercise, exercise.solution, tmp_path) is None


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_compiles(exercise: Exercise, tmp_path: Path) -> None:
    """Also if the file prints."""
    path = tmp_path / f"{exercise.name}.py"
    path.write_text(exercise.filled(exercise.solution) + 'print("here")\n')
    assert checks.check(exercise, path) is None


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_hole_does_not(exercise: Exercise, tmp_path: Path) -> None:
    assert UNFILLED[exercise.name] in (checked(exercise, exercise.before, tmp_path) or "")


@pytest.mark.few(shows=lambda name, **_: [name])
@pytest.mark.parametrize(("name", "right", "wrong", "message"), MISTAKES)
def test_a_mistake_is_named_in_the_message(name: str, right: str, wrong: str, message: str, tmp_path: Path) -> None:
    exercise = BY_NAME[name]
    assert right in exercise.solution
    assert message in (checked(exercise, exercise.solution.replace(right, wrong), tmp_path) or "")


@pytest.mark.few(shows=one)
@pytest.mark.parametrize(("name", "right", "wrong", "message"), REFUSED)
def test_what_the_compiler_refuses_is_named(name: str, right: str, wrong: str, message: str, tmp_path: Path) -> None:
    exercise = BY_NAME[name]
    assert right in exercise.solution
    assert message in (checked(exercise, exercise.solution.replace(right, wrong), tmp_path, compiles=True) or "")


def test_a_load_without_a_mask_compares_nothing(tmp_path: Path) -> None:
    exercise = BY_NAME["e06_pipeline"]
    message = checked(exercise, exercise.solution.replace("BLOCK * stride_b", "BLOCK"), tmp_path) or ""
    assert message.endswith(" The next k-tile of b is BLOCK * stride_b elements further.")


def test_one_column_too_many_is_no_mask_of_one_dimension(tmp_path: Path) -> None:
    exercise = BY_NAME["e02_mask"]
    message = checked(exercise, exercise.solution.replace("<", "<="), tmp_path) or ""
    assert "reads a[0, 45]" in message and message.endswith(fp32.MASKED_OFF)


WAIT = "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"
ARRIVE = "        mbarrier.arrive(empty.index(slot))\n"
MULTIPLY = "        acc = warpgroup_mma("
# As in k11: a product is waited for when the next one has begun.
LATER = {
    WAIT: WAIT.replace("0", "1"),
    ARRIVE: "        if step > 0:\n    " + ARRIVE.replace("slot", "(step - 1) % SLOTS"),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({WAIT: ""}, "`empty` of slot 0 is told that it is free, but its k-tile 0 is still being multiplied"),
        ({ARRIVE: "", MULTIPLY: ARRIVE + MULTIPLY}, "but its k-tile 0 is not multiplied yet"),
        ({ARRIVE: "", WAIT: ARRIVE + WAIT}, "is still being multiplied: `warpgroup_mma_wait` ends that"),
        ({WAIT: "", ", is_async=True": ""}, None),
        (LATER, "C is stored while a product is under way"),
        ({**LATER, "return acc\n": "return warpgroup_mma_wait(0, deps=(acc,))\n"}, None),
    ],
)
def test_a_race_in_the_ring_is_found(changes: dict[str, str], message: str | None, tmp_path: Path) -> None:
    """Outside of the hole: a product is asynchronous, and ends when it is waited for."""
    exercise, path = BY_NAME["e13_ring"], tmp_path / "e13_ring.py"
    text = exercise.filled(exercise.solution)
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path.write_text(text)
    found = checks.check(exercise, path, compiles=False)
    assert found is None if message is None else message in (found or "")


CHEATS = {
    "e07_tf32": "def run(x, out): out.copy_(x)",
    "e12_swizzle": "def run(x, shared, out): out.copy_(x)",
}
CHEAT = "def run(a, b, c, *more): c.copy_((a.double() @ b.double()).to(c.dtype))"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_what_pytorch_computes_is_refused(exercise: Exercise, tmp_path: Path) -> None:
    """Also where a kernel runs before, and where it has no hole."""
    path = tmp_path / f"{exercise.name}.py"
    cheat = CHEATS.get(exercise.name, CHEAT)
    call, body = cheat[len("def run") :].split(": ")
    texts = [
        f"{exercise.unfilled}\n{cheat}",
        f"{exercise.filled(exercise.solution)}\nlaunch = run\ndef run{call}: launch{call}, {body}",
        f"{exercise.filled(exercise.solution)}\ndef run{call}: pass",
    ]
    for text in texts:
        path.write_text(text)
        assert "a kernel has to compute the result" in (checks.check(exercise, path) or "")


def test_another_grid_is_no_answer(tmp_path: Path) -> None:
    exercise, path = BY_NAME["e10_persistent"], tmp_path / "e10_persistent.py"
    path.write_text(exercise.unfilled.replace("kernel[(5,)]", "kernel[(M // 16 * (N // 16),)]"))
    assert "the grid is given, 5 programs" in (checks.check(exercise, path) or "")


def test_a_diagnosis_that_fails_leaves_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "multiplied", lambda trace: 1 // 0)
    exercise = BY_NAME["e08_accumulate"]
    found = checked(exercise, exercise.solution.replace("tl.dot(a, b, acc)", "tl.dot(a, b)"), tmp_path) or ""
    assert found.endswith(" are wrong.")


def test_a_mistake_in_python_has_its_line(tmp_path: Path) -> None:
    exercise = BY_NAME["e04_group"]
    text = exercise.filled("    return unknown, 0\n")
    line = text.splitlines().index("    return unknown, 0") + 1
    assert (checked(exercise, "    return unknown, 0\n", tmp_path) or "").startswith(f"line {line}: NameError")


def test_an_endless_loop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LIMIT_S", 1)
    endless = "    while True:\n        pid += 0\n"
    assert "did not end within 1 seconds" in (checked(BY_NAME["e04_group"], endless, tmp_path) or "")


@pytest.mark.few(shows=one)
@pytest.mark.parametrize(("name", "right", "other"), OTHERS)
def test_another_right_answer_passes(name: str, right: str, other: str, tmp_path: Path) -> None:
    """What is counted decides, not what is written."""
    exercise = BY_NAME[name]
    assert right in exercise.solution
    assert checked(exercise, exercise.solution.replace(right, other), tmp_path) is None
