"""The exercises: each names a function and tests that exist."""

import ast

import pytest

from examples.exercises import __main__ as exercises
from examples.exercises.table import EXERCISES
from tests import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="originals are in git")


@pytest.mark.parametrize("row", EXERCISES, ids=lambda row: row.name)
def test_a_row_names_what_is_there(row):
    """It must name a function with a docstring to write it from, or its bug, and tests of this name."""
    assert [other.name for other in EXERCISES].count(row.name) == 1
    function = exercises.find((ROOT / row.file).read_text(), row)
    assert row.bug or ast.get_docstring(function)
    file, *names = row.tests.split()
    there = [n for n in ast.parse((ROOT / "tests" / file).read_text()).body if "name" in vars(n)]
    assert {name.partition("[")[0] for name in names} <= {node.name for node in there}
