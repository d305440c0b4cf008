"""Rewrite eight functions of nanoYATT, and find two bugs, in your own checkout.

    python -m examples.exercises list
    python -m examples.exercises start gae     # removes the function's body, or plants the bug
    python -m examples.exercises check gae     # runs the project's own tests of it; `check all` checks
    every exercise
    python -m examples.exercises solve gae     # restores the original, and shows how yours differs

The originals come from git's HEAD, so don't commit while an exercise is open. The exit status is 1 if a check
fails, and 2 for a mistake in the command or the checkout; one line describes it.
"""

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from examples.exercises.table import EXERCISES, Exercise
from runtime.errors import UserError
from tests.runs.planted_bugs import read_bugs

ROOT = Path(__file__).parents[2]
YOUR_TURN = "your turn: python -m examples.exercises check"
LONGEST_S = 600  # time limit of a check, so that an endless loop fails
ENDED = (0, 1, 2)  # pytest's exit statuses: passed, failed, a file couldn't be imported
Function = ast.FunctionDef | ast.AsyncFunctionDef


def git(*arguments: str) -> str:
    """Return the output of a git command. Raises UserError if git is missing or fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("git isn't installed, and the originals are in git") from None
    if done.returncode:
        raise UserError(f"git has no originals here: {' '.join(done.stderr.split())}")
    return done.stdout


def find(text: str, exercise: Exercise) -> Function:
    """Return an exercise's function in the text of its file. Raises UserError if it isn't there."""
    try:
        node = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{exercise.file}:{error.lineno} isn't Python: {error.msg}") from None
    for name in exercise.function.split("."):
        inner = [n for n in node.body if isinstance(n, Function | ast.ClassDef) and n.name == name]
        if not inner:
            raise UserError(f"{exercise.file} has no {name}: restore the file with git")
        node = inner[-1]
    return node


def lines_of(function: Function) -> slice:
    """Return the lines of a function in its file, decorators included."""
    starts = [function.lineno, *(decorator.lineno for decorator in function.decorator_list)]
    return slice(min(starts) - 1, function.end_lineno)


def function_in(text: str, exercise: Exercise) -> str:
    return "".join(text.splitlines(keepends=True)[lines_of(find(text, exercise))])


def present(exercise: Exercise) -> str:
    """Return the function as it is now."""
    return function_in((ROOT / exercise.file).read_text(), exercise)


def original(exercise: Exercise) -> str:
    """Return the function in git's HEAD. Raises UserError if it was committed without its body."""
    found = function_in(git("show", f"HEAD:./{exercise.file}"), exercise)
    if YOUR_TURN in found:
        raise UserError(f"git's HEAD has {exercise.function} without its body: undo that commit")
    return found


def opened(exercise: Exercise) -> str:
    """Return the function for you to fix: only its docstring, or all of it with the bug."""
    if exercise.bug:
        bug = next(b for b in read_bugs() if f"{b.module}.{b.name}" == exercise.bug)
        assert original(exercise).count(bug.old) == 1, f"{exercise.bug} isn't in one place"
        return original(exercise).replace(bug.old, bug.new)
    text = git("show", f"HEAD:./{exercise.file}")
    function = find(text, exercise)
    docstring = function.body[0]
    kept = text.splitlines(keepends=True)[lines_of(function).start : docstring.end_lineno]
    left = f'raise NotImplementedError("{YOUR_TURN} {exercise.name}")\n'
    return "".join(kept) + " " * docstring.col_offset + left


def put(exercise: Exercise, function: str) -> None:
    """Replace the current function with this one; leave the rest of its file alone."""
    path = ROOT / exercise.file
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    lines[lines_of(find(text, exercise))] = [function]
    path.write_text("".join(lines))


def notes_path() -> Path:
    return ROOT / git("rev-parse", "--git-path", "exercises.json").strip()


def read_notes() -> dict[str, str]:
    """Return {name: the function that passed, "" before} for every exercise that was started."""
    return json.loads(notes_path().read_text()) if notes_path().exists() else {}


def write_notes(notes: dict[str, str]) -> None:
    notes_path().write_text(json.dumps(notes, indent=1) + "\n")


def state_of(exercise: Exercise, notes: dict[str, str]) -> str:
    """Return the current function's state: "not begun", "begun" or "passes"."""
    if exercise.name not in notes:
        return "not begun"
    return "passes" if notes[exercise.name] == present(exercise) else "begun"


def show_list() -> None:
    notes = read_notes()
    for number, exercise in enumerate(EXERCISES, 1):
        state = state_of(exercise, notes)
        facts = f"{number:2}  {exercise.name:22}  {exercise.file:31}  {exercise.minutes:2} min  {state:9}"
        print(f"{facts}  {exercise.story}")


def start(exercise: Exercise) -> None:
    """Remove the body, or plant the bug, and print the task. Raises UserError if work could be lost."""
    if present(exercise) != original(exercise):
        what = f"{exercise.file} has changes where {exercise.name} begins"
        raise UserError(f"{what}: commit them, or undo them with `solve {exercise.name}`")
    put(exercise, opened(exercise))
    write_notes(read_notes() | {exercise.name: ""})
    print(exercise.story)
    if exercise.bug:
        print(f"Find the bug without git diff. It takes about {exercise.minutes} minutes.")
    else:
        line = lines_of(find((ROOT / exercise.file).read_text(), exercise)).start + 1
        print(f"Write {exercise.function}, {exercise.file}:{line}. Its docstring describes it.")
        print(f"{exercise.source}. It takes about {exercise.minutes} minutes.")
    print(f"Then: python -m examples.exercises check {exercise.name}")


def failure_of(exercise: Exercise) -> str:
    """Run an exercise's tests; return the output of the first failing one, "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-qq", "-rN", "-n0", "--tb=short"]
    command += ["--no-header", "--disable-warnings", "-p", "no:cacheprovider"]
    file, *tests = exercise.tests.split()
    command += [f"tests/{file}::{test}" for test in tests]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    how = {"cwd": ROOT, "env": settings, "stdout": subprocess.PIPE, "text": True}
    try:
        done = subprocess.run(command, stderr=subprocess.STDOUT, timeout=LONGEST_S, **how)
    except subprocess.TimeoutExpired:
        return f"the tests didn't end within {LONGEST_S} s"
    assert done.returncode in ENDED, done.stdout
    return done.stdout if done.returncode else ""


def check(exercise: Exercise, shows_failure: bool) -> bool:
    """Run an exercise's tests; print and return whether they pass, and note it if it was begun."""
    began = time.monotonic()
    failure = failure_of(exercise)
    seconds = time.monotonic() - began
    notes = read_notes()
    if exercise.name in notes:
        notes[exercise.name] = "" if failure else present(exercise)
        write_notes(notes)
    if failure and shows_failure:
        print(failure)
    print(f"{exercise.name:22}  {'fails' if failure else 'passes':6}  {seconds:3.0f} s", flush=True)
    begun = [name for name, note in notes.items() if not note and name != exercise.name]
    if failure and shows_failure and begun:
        print(f"Other open exercises may be the reason: {', '.join(begun)}")
    return not failure


def solve(exercise: Exercise) -> None:
    """Restore the original, and print how yours differs from it."""
    yours = present(exercise)
    wanted = original(exercise)
    put(exercise, wanted)
    write_notes({name: note for name, note in read_notes().items() if name != exercise.name})
    names = {"fromfile": f"yours: {exercise.file}", "tofile": f"original: {exercise.file}"}
    texts = (yours.splitlines(), wanted.splitlines())
    diff = list(difflib.unified_diff(*texts, **names, lineterm=""))
    print("\n".join(diff) or f"{exercise.name}: yours is the original")


def main(arguments: list[str]) -> int:
    """Run the command line. Return the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("exercises", description=__doc__, formatter_class=style)
    parser.add_argument("command", choices=("list", "start", "check", "solve"))
    parser.add_argument("name", nargs="?", help="an exercise; `check all` checks every one")
    asked = parser.parse_args(arguments)
    chosen = [exercise for exercise in EXERCISES if exercise.name == asked.name]
    if (asked.command, asked.name) == ("check", "all"):
        chosen = [*EXERCISES]
    try:
        if asked.command == "list":
            show_list()
        elif not chosen:
            raise UserError(f"{asked.command} needs one of: {', '.join(e.name for e in EXERCISES)}")
        elif asked.command == "check":
            passed = [check(exercise, shows_failure=len(chosen) == 1) for exercise in chosen]
            return 0 if all(passed) else 1
        elif asked.command == "start":
            start(chosen[0])
        else:
            solve(chosen[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
