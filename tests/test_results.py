"""README's results against docs/results.json: the same numbers, of one commit, made by known commands."""

import json
import sys

import pytest

from bench import results
from tests import ROOT
from tests.test_docs import check_program, check_run
from tests.workers.start import run_command


MEASURED = json.loads(results.RESULTS.read_text())


def test_readme_shows_what_was_measured():
    """A row that is measured again is also written again, and all measured rows have one origin."""
    table = results.render(MEASURED, results.simulated_rows())
    assert results.BEGIN + table + results.END in results.README.read_text()


def test_a_page_has_the_numbers_of_its_row():
    for path, text in results.pages(MEASURED).items():
        assert path.read_text() == text, f"{path}: run bench/results.py --render"


def test_the_prose_of_readme_has_the_numbers_of_its_rows():
    """Whatever README's text says, a row of its table says too."""
    prose, _, _ = results.README.read_text().partition(results.BEGIN)
    prose = " ".join(prose.split())
    demo = {name: value["value"] for name, value in MEASURED["demo"]["values"].items()}
    many, many_central = results.scale_at("4,096")
    _, with_images = results.step_times()
    for words in (
        f"it got {100 * demo['before']:.1f} % of the held-out sums right; after 40 steps, {100 * demo['after']:.0f} %",
        f"after   0 steps: eval/accuracy {demo['before']:.3f} on held-out prompts",
        f"after  40 steps: eval/accuracy {demo['after']:.3f} on held-out prompts",
        f"run.py --mode partial # what `make run` runs: {demo['after']:.3f} right",
        f"the demo takes {demo['minutes']:.1f} minutes",
        f"the busiest holds {many} samples; a central one would hold all that are drawn in a step, {many_central}",
        f"takes {min(with_images):.2f} to {max(with_images):.2f} of the time",
    ):
        assert " ".join(words.split()) in prose, words


def test_every_command_is_understood():
    for row in results.ROWS.values():
        words = row.command.replace('"', "").split()
        check_run(words) if "run.py" in words else check_program(words)


@pytest.mark.slow
def test_a_small_save_is_measured():
    """bench/checkpoint.py builds as much of a controller as a save asks for."""
    small = ["--layers", "2", "--hidden", "128", "--repeats", "1"]
    run_command([sys.executable, str(ROOT / "bench/checkpoint.py"), *small])
