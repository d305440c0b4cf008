"""README's results against docs/results.json: the same numbers, from one commit, by known commands."""

import json
import re
import sys
from pathlib import Path

import pytest

from reproduce.bench import results
from tests import ROOT
from tests.house.test_docs import check_program, check_run
from tests.house.test_size import PRODUCT, is_extra
from tests.workers.start import run_command

CORE = [path for path in PRODUCT if not is_extra(path)]
MEASURED = json.loads(results.RESULTS.read_text())


def test_pages_show_what_was_measured():
    """A row that is measured again is also written again, to README and to its page."""
    for path, text in results.pages(MEASURED).items():
        assert path.read_text() == text, f"{path}: run reproduce/bench/results.py --render"


def lines_of(paths: list[Path]) -> int:
    """Count lines, in thousands."""
    return round(sum(len(path.read_text().splitlines()) for path in paths), -3)


def number_in(page: str, pattern: str) -> str:
    """Return the number in this place of a page."""
    found = re.search(pattern, " ".join((ROOT / "docs" / page).read_text().split()))
    assert found, f"docs/{page} has no {pattern}"
    return found[1]


def test_the_prose_of_readme_has_the_numbers_of_its_pages():
    prose, _, _ = results.README.read_text().partition("<!-- result: all -->")
    prose = " ".join(prose.split())
    demo = {name: value["value"] for name, value in MEASURED["demo"]["values"].items()}
    before, after = f"{demo['before']:.3f}", f"{demo['after']:.3f}"
    held, all_drawn = results.scale_at("4,096")
    _, images = results.step_times()
    ahead = number_in("modes.md", r"after 0, 10, 20, 30, 40 steps is .*?, ([\d.]+)\. ")
    pictures = number_in("images.md", r"after 40 steps: eval/accuracy ([\d.]+)")
    clips = number_in("images.md", r"accuracy of seeds 0, 1, 2 rose from [\d.]+ to ([\d.]+),")
    real = [
        round(22 * float(number_in("real_model.md", rf"22 held-out .*? 12 steps \\| {n}")))
        for n in (r"([\d.]+), ", r"[\d.]+, ([\d.]+) ")
    ]
    for words in (
        f"it got {100 * demo['before']:.1f} % of the held-out sums right; after 40 steps, "
        f"{100 * demo['after']:.0f} %.",
        f"after 0 steps: eval/accuracy {before} on held-out prompts",
        f"after 40 steps: eval/accuracy {after} on held-out prompts",
        f"--mode partial # what `make run` runs: {after} right",
        f"--mode fused # {after}",
        f"--ahead 1 # serves while it trains: {ahead}",
        f"--preset images # sums in pictures: {pictures[:4]}; `--preset video`: {clips[:4]}",
        f"the demo takes {demo['minutes']:.1f} minutes",
        f"the busiest holds {held} samples; a central one would hold all that are drawn in a step, "
        f"{all_drawn}.",
        f"a step with images takes {min(images):.2f} to {max(images):.2f} of a central one's time",
        f"[SmolLM2-135M](docs/real_model.md), from {real[0]} to {real[1]} of 22 sums",
        f"is the core, {lines_of(CORE):,} of {lines_of(PRODUCT):,} lines",
    ):
        assert words in prose, words


def test_the_lines_of_the_reading_path_are_counted(tmp_path, monkeypatch):
    """Of a file, of two parts, and from one part to another; `test_pages_show_...` compares README's."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        "import os\n\n\nclass A:\n    def f(self):\n        pass\n\n\ndef g():\n    pass\n"
    )
    rows = ["| a.py | 0 |", "| a.py: `A`, `g` | 9 |", "| a.py: `A.f` to `g` | 0 |"]
    page = results.with_path("in this order,\n0 lines\n" + "\n".join(rows))
    assert re.findall(r"(\d+) (?:\||lines)", page) == ["21", "10", "5", "6"]


def test_the_rooms_are_the_product():
    """Each file must be in one room, and the sums must be those of the rooms."""
    table = (
        results.CONTRIBUTING.read_text()
        .partition("| room | lines |")[2]
        .partition("| reproduce/")[0]
    )
    names = [row[1] for row in results.ROOM_ROW.finditer(table)]
    core, extras = names.index("*the core*"), names.index("*the extras*")
    lines = [results.lines_of_room(name) for name in names]
    assert (
        sum(lines[:core]) == lines[core] == sum(len(path.read_text().splitlines()) for path in CORE)
    )
    index = len((ROOT / "extras/__init__.py").read_text().splitlines())
    assert sum(lines[core + 1 : extras]) == lines[extras] - index


def test_every_command_is_understood():
    for row in results.ROWS.values():
        words = row.command.replace('"', "").split()
        check_run(words) if "run.py" in words else check_program(words)


@pytest.mark.slow
def test_a_small_save_is_measured():
    """reproduce/bench/checkpoint.py must build enough of a controller for a save."""
    small = ["--layers", "2", "--hidden", "128", "--repeats", "1"]
    run_command([sys.executable, str(ROOT / "reproduce/bench/checkpoint.py"), *small])
