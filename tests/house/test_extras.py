"""Each extra can be deleted: its row of extras/__init__.py, its files, and no other line."""

import pytest

from extras import EXTRAS
from tests.runs.without_extras import check_core, check_tests_of_core, check_without


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_the_demo_runs_without(name, tmp_path):
    check_without(name, tmp_path)


@pytest.mark.slow
def test_the_core_makes_the_same_samples(tmp_path):
    check_core(tmp_path)


@pytest.mark.long
def test_the_core_passes_the_default_tier(tmp_path):
    check_tests_of_core(tmp_path)
