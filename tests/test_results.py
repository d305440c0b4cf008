"""README's results against docs/results.json: the same numbers, of one commit, made by known commands."""

import json
import sys

import pytest

from bench import results
from tests import ROOT
from tests.test_docs import check_program, check_run
from tests.workers.start import run_command


def test_readme_shows_what_was_measured():
    """Whoever measures a row again has to write the table again, and rows of several origins are none."""
    table = results.render(json.loads(results.RESULTS.read_text()), results.paper_row())
    assert results.BEGIN + table + results.END in results.README.read_text()


def test_every_command_is_understood():
    for row in results.ROWS.values():
        words = row.command.replace('"', "").split()
        check_run(words) if "run.py" in words else check_program(words)


@pytest.mark.slow
def test_a_small_save_is_measured():
    """bench/checkpoint.py builds as much of a controller as a save asks for."""
    small = ["--layers", "2", "--hidden", "128", "--repeats", "1"]
    run_command([sys.executable, str(ROOT / "bench/checkpoint.py"), *small])
