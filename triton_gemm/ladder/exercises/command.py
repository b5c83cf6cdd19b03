"""`python -m triton_gemm.ladder exercise`: copies the exercises, checks what was filled in, and helps."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ...compat import INTERPRETED
from . import EXERCISES, Exercise

PROGRAM = "python -m triton_gemm.ladder exercise"
FOLDER = "gemm_exercises"
DESCRIPTION = f"""\
Thirteen kernels with one hole each. They run in seconds and without a GPU, in Triton's interpreter or a simulation.

  {PROGRAM} start         copies them into ./{FOLDER}
  {PROGRAM} check 1       says what is wrong with the first, or that it is solved
  {PROGRAM} check 1 --show  also writes a page that plays what your kernel does, step by step
  {PROGRAM} hint 1        the first hint for it; `hint 1 --number 2` is the second
  {PROGRAM} solution 1    the lines that fill the hole
  {PROGRAM}               lists them, and says which are solved
  {PROGRAM} check --json  the same as JSON, for grading: number, name, title, solved, and what is wrong

Exit status of `check`: 0 if all that it checked are solved, else 1.
"""


def main(arguments: Sequence[str], parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> int:
    """Follows the command line; its exit status."""
    parser = parser_class(prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", default="list", choices=("list", "start", "check", "hint", "solution"), help="default: list"
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="of exercises; `check` without checks all")
    parser.add_argument("--number", type=int, default=1, metavar="I", help="which hint, default 1")
    parser.add_argument("--folder", type=Path, default=Path(FOLDER), help=f"default ./{FOLDER}, or . inside of it")
    parser.add_argument("--json", action="store_true", help="of `check` and `list`: print JSON")
    parser.add_argument("--show", action="store_true", help="of `check`: write a page that plays what each file does")
    given = parser.parse_args(arguments)
    for number in given.numbers:
        if not 1 <= number <= len(EXERCISES):
            parser.error(f"there are exercises 1 to {len(EXERCISES)}, and no {number}")
    chosen = [EXERCISES[number - 1] for number in given.numbers] or list(EXERCISES)
    try:
        if (
            given.folder == Path(FOLDER)
            and not given.folder.exists()
            and any(_file(one, Path()).exists() for one in chosen)
        ):
            given.folder = Path()  # typed inside of it
        if given.what == "start":
            return _start(chosen, given.folder)
        is_there = given.folder.is_dir()
    except OSError as error:  # not a folder, or one that may not be looked into
        parser.error(f"{error.filename}: {error.strerror}")
    if given.what in ("hint", "solution"):
        if not given.numbers:
            parser.error(f"{given.what} wants an exercise's number, as in `{given.what} 1`")
        return _help(parser, given.what, chosen, given.number)
    if given.what == "check" and not is_there:
        parser.error(f"there is no folder {given.folder}; `{PROGRAM} start` makes it, --folder names another")
    try:
        if not INTERPRETED and is_there:
            return _interpreted(arguments)
        return _check(chosen, given.folder, listing=given.what == "list", as_json=given.json, show=given.show)
    except KeyboardInterrupt:  # in both processes
        if INTERPRETED:
            print("error: interrupted", file=sys.stderr)
        return 130


def _start(chosen: Sequence[Exercise], folder: Path) -> int:
    """Writes the files that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [exercise for exercise in chosen if not _file(exercise, folder).exists()]
    for exercise in made:
        _file(exercise, folder).write_text(exercise.unfilled, "utf-8")
    kept = f"; {len(chosen) - len(made)} were there, and are as they were" if len(made) < len(chosen) else ""
    print(f"{len(made)} of {len(chosen)} exercises copied to {folder}{kept}.")
    file, number = _file(chosen[0], folder), chosen[0].number
    print(f"Open {file}, fill in what is between FILL IN and END, then: {PROGRAM} check {number}")
    return 0


def _help(parser: argparse.ArgumentParser, what: str, chosen: Sequence[Exercise], number: int) -> int:
    for exercise in chosen:
        if what == "solution":
            print(exercise.solution, end="")
            continue
        count = len(exercise.hints)
        if not 1 <= number <= count:
            parser.error(f"exercise {exercise.number} has hints 1 to {count}, and no {number}")
        last = "`solution` is next" if number == count else f"next: hint {exercise.number} --number {number + 1}"
        of = f", exercise {exercise.number}" * (len(chosen) > 1)
        print(f"Hint {number} of {count}{of}: {exercise.hints[number - 1]} ({last})")
    return 0


def _interpreted(arguments: Sequence[str]) -> int:
    """The same command in a process whose kernels run in the interpreter, which is chosen before Triton is imported."""
    if importlib.util.find_spec("numpy") is None:
        print("error: Triton's interpreter needs NumPy: pip install numpy", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", __package__.rpartition(".")[0], "exercise", *arguments]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode


def _check(chosen: Sequence[Exercise], folder: Path, *, listing: bool, as_json: bool, show: bool) -> int:
    """A line for each exercise, and what is wrong with it; `listing` checks those alone that were changed, and `show`
    writes a page that plays each."""
    found = []
    for exercise in chosen:
        path, text, wrong, message = _file(exercise, folder), None, None, None
        if not as_json:
            print(f"{exercise.number:>2} {exercise.title}", flush=True)  # before what may take long
        try:
            text = path.read_text("utf-8", "replace")  # Python says what is wrong with another encoding
            wrong = "to do" if text == exercise.unfilled else None
        except FileNotFoundError:
            wrong = f"not copied: `{PROGRAM} start {exercise.number}` does" if not listing else "not copied"
        except OSError as error:
            wrong = f"it cannot be read: {error.strerror}"
        if text is not None and not (listing and wrong):
            from .checks import check  # NumPy and the interpreter are needed from here on

            try:
                with redirect_stdout(sys.stderr):  # what the learner's code prints
                    message = check(exercise, path, compiles=not listing)
            except SystemExit as left:
                message = f"it ends Python, by SystemExit({left.code!r})"
            wrong = message and (f"not filled in yet: {message}" if wrong else message)
        lost = exercise.missing(text) if text is not None and wrong is None else []
        one = {"number": exercise.number, "name": exercise.name, "title": exercise.title}
        found.append({**one, "solved": wrong is None, "wrong": wrong})
        if not as_json and folder.is_dir():
            more = f" Outside of the hole it has no `{lost[0]}`: not all is checked there." if lost else ""
            print(f"     {wrong or 'solved'}{'.' * bool(more)}{more}", flush=True)
        if show and text is not None and not (listing and wrong):
            print(f"     {_shown(exercise, path, message)}", file=sys.stderr if as_json else sys.stdout)
    unsolved = sum(not one["solved"] for one in found)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{len(chosen) - unsolved} of {len(chosen)} solved.")
    if not as_json and not folder.is_dir():
        print(f"`{PROGRAM} start` copies them into ./{folder}; --help says more.")
    return 0 if listing else int(unsolved > 0)


def _shown(exercise: Exercise, path: Path, wrong: str | None) -> str:
    """Writes the page that plays what a file did when it was checked."""
    from .player import of_run, page
    from .questions import RUNS

    run = RUNS[0 if wrong is None else -1] if RUNS else None
    if run is None or not (run if isinstance(run, list) else run.accesses):
        return "nothing to show: no kernel ran"
    made = path.with_suffix(".html")
    made.write_text(page([of_run(exercise.name, exercise.title, run, wrong)]), "utf-8")
    return f"{made} plays it: open it in a browser"


def _file(exercise: Exercise, folder: Path) -> Path:
    return folder / f"{exercise.name}.py"
