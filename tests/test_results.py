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


def test_every_value_is_read_and_every_command_understood():
    printed = {
        "demo": "eval/accuracy 0.265 on\nstep 1\neval/accuracy 0.980 on\n",
        "central": "| parallel | 64 | 115 | 0.5 |\n| central | 4,096 | 42,744 | 1.0 |\n",
        "images": "| 2 | text | 0.01 | 1 |\n| 2 | media | 0.01 | 1 |\n| 2 | central | 32.68 | 1 |\n",
        "trl": "| step, s | 1.0 (1.0-1.0) | 2.0 (2.0-2.0) | 0.50 (0.50-0.50) |\n"
        "| tokens per wall-second, whole steps | 5401 (5-6) | 7174 (6-7) | 0.75 (0.69-0.79) |\n",
        "save": "checkpoint of 3.75 GiB\n| forked | 0.18 (0.16-0.59) |\n| synchronous | 8.5 (8.4-10.7) |\n",
    }
    values = {name: results.ROWS[name].values(text, 150.0) for name, text in printed.items()}
    assert values["demo"] == {"before": [0.265], "after": [0.98], "minutes": [2.5]}
    assert values["central"] == {"parallel": [115.0], "central": [42744.0]}
    assert values["images"] == {"media": [0.01], "central": [32.68]}
    assert values["trl"] == {"ratio": [0.75, 0.69, 0.79]}
    assert values["save"]["forked"] == [0.18, 0.16, 0.59] and values["save"]["size"] == [3.75]
    for row in results.ROWS.values():
        words = row.command.replace('"', "").split()
        check_run(words) if "run.py" in words else check_program(words)


@pytest.mark.slow
def test_a_small_save_is_measured():
    """bench/checkpoint.py builds as much of a controller as a save asks for."""
    small = ["--layers", "2", "--hidden", "128", "--repeats", "1"]
    run_command([sys.executable, str(ROOT / "bench/checkpoint.py"), *small])
