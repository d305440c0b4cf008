"""Exercises in a checkout of their own: they start, fail, pass, and end as they began."""

import ast
import os
import re

import pytest

from exercises import __main__ as exercises
from exercises.table import EXERCISES
from tests import ROOT
from tests.runs.planted_bugs import copy_project
from tests.support.patience import run_process

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="originals are in git")
QUICK = ("karmarkar_karp", "bug_on_four_ranks")  # their tests take a second or two
CHECKED = [
    pytest.param(row, marks=[] if row.name in QUICK else pytest.mark.slow, id=row.name)
    for row in EXERCISES
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the project, all of it committed; whatever git hook started the tests."""
    path = tmp_path_factory.mktemp("checkout")
    who = ["-c", "user.name=student", "-c", "user.email=student@localhost"]
    commit = [*who, "-c", "commit.gpgsign=false", "commit", "-qm", "all"]
    with pytest.MonkeyPatch.context() as settings:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            settings.delenv(name)
        copy_project(path)
        for arguments in (["init", "-q"], ["add", "--force", "."], commit):
            run_process("git", *arguments, cwd=path, check=True)
        yield path


@pytest.fixture
def checkout(copied, monkeypatch):
    """That copy, where the exercises are."""
    monkeypatch.setattr(exercises, "ROOT", copied)
    yield copied
    run_process("git", "checkout", "-q", ".", cwd=copied, check=True)
    exercises.write_notes({})


def states(capsys) -> dict[str, str]:
    """The state of each exercise by its name, as `list` shows it."""
    capsys.readouterr()
    assert exercises.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = re.compile(r" *\d+  (\w+) .* min  (not begun|begun|passes) ")
    return dict(found.match(line).groups() for line in lines)


@pytest.mark.parametrize("row", EXERCISES, ids=lambda row: row.name)
def test_a_row_names_what_is_there(row):
    """A function with a docstring to write it from, or a bug of this function; tests of this name."""
    assert [other.name for other in EXERCISES].count(row.name) == 1
    function = exercises.find((ROOT / row.file).read_text(), row)
    assert row.bug or ast.get_docstring(function)
    file, *names = row.tests.split()
    there = [n for n in ast.parse((ROOT / "tests" / file).read_text()).body if "name" in vars(n)]
    assert {name.partition("[")[0] for name in names} <= {node.name for node in there}


@pytest.mark.parametrize("row", EXERCISES, ids=lambda row: row.name)
def test_what_is_started_is_solved(row, checkout, capsys):
    """A function loses its body and nothing else; a second start is refused; the original comes back."""
    path = checkout / row.file
    before = path.read_bytes()
    assert exercises.main(["start", row.name]) == 0
    started = path.read_bytes()
    assert before != started and (exercises.YOUR_TURN.encode() in started) != bool(row.bug)
    docstring = ast.get_docstring(exercises.find(before.decode(), row))
    assert ast.get_docstring(exercises.find(started.decode(), row)) == docstring
    assert (row.function in capsys.readouterr().out) != bool(row.bug)
    assert exercises.main(["start", row.name]) == 2
    assert path.read_bytes() == started
    assert capsys.readouterr().err.startswith(f"error: {row.file} has changes where")
    assert exercises.main(["solve", row.name]) == 0
    assert path.read_bytes() == before
    assert {line[0] for line in capsys.readouterr().out.splitlines()} == {*"-+@ "}


@pytest.mark.parametrize("row", CHECKED)
def test_a_check_fails_until_the_exercise_is_done(row, checkout, capsys):
    """Also with another exercise open, in the same file at times; what was done is said by `list`."""
    other = "gae" if row.name != "gae" else "group_norm"
    assert exercises.main(["start", row.name]) == 0
    assert exercises.main(["start", other]) == 0
    before = states(capsys)
    assert {name for name in before if before[name] == "begun"} == {row.name, other}
    assert exercises.main(["check", row.name]) == 1
    printed = capsys.readouterr().out
    assert f"What else is begun may be why: {other}\n" in printed
    assert row.bug or f"NotImplementedError: {exercises.YOUR_TURN} {row.name}\n" in printed
    assert exercises.main(["solve", other]) == 0
    exercises.put(row, exercises.original(row))
    assert exercises.main(["check", row.name]) == 0
    assert states(capsys)[row.name] == "passes"
    exercises.put(row, exercises.opened(row))
    assert states(capsys)[row.name] == "begun"
