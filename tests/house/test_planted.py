"""The lists of planted bugs: each can be planted, and each module has at least one."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.house.test_size import ROOMS, ROOT_FILES, room_of
from tests.runs.planted_bugs import read_bugs

BUGS = read_bugs()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.module}.{bug.name}")
def test_a_bug_can_be_planted(bug):
    """Its place must be there once, it must change something, and a test file is named that finds it."""
    assert bug.planted() != (ROOT / bug.file).read_text()
    assert Path(bug.found_by).name.startswith("test_")
    assert (ROOT / "tests" / bug.found_by).is_file()


def test_every_module_has_its_bugs():
    """Each root file and room must have a list of its own; extras/__init__.py only names modules."""
    assert all(bug.module == room_of(ROOT / bug.file) for bug in BUGS)
    assert {*map(room_of, ROOT_FILES), *ROOMS} - {"state"} <= {bug.module for bug in BUGS}
