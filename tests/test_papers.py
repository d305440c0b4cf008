"""What all papers' commands stand on: points with a source, constants with what they were fitted on, rows."""

import re
import subprocess
import sys

import pytest

from papers import tables
from papers.tables import COLUMNS, Paper, Point, Row, command, read_constants, read_points, values
from tests import ROOT

SUMMARY = r"^\d+ predicted rows: median error ([\d.]+)%, largest ([\d.]+)%\.$"
GOOD = "9,HybridFlow,7B,8,throughput,tokens/s,5500,0.02,FIG,arXiv,figure 9,"
POINT = Point(*GOOD.split(","))
SPEEDS = {"fitted_on": [POINT.name], "mfu": 0.5, "half": 2.0}
FITTED = {"speeds": SPEEDS, "device": {"source": "x", "hbm": 1}}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty papers/ with one paper, `mine`; returns its folder."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    (tmp_path / "published").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "published" / "mine_fig9.csv").write_text(f"{COLUMNS}\n{GOOD}\n")
    (tmp_path / "mine.toml").write_text('[speeds]\nsource = "guessed"\nmfu = 0.5\n')
    return tmp_path


def twice(paper):
    return [paper.row(point, 2 * float(point.value)) for point in paper.of("9")]


def run(*arguments, figures=None):
    return command("mine", "A paper.\n\nMore.", figures or {"9": twice}, [*map(str, arguments)])


@pytest.mark.parametrize(
    "line, named",
    [
        ("9,HybridFlow,7B,8", "could not convert string to float: ''"),
        (GOOD + ",more", "(columns: figure,system,"),
        (GOOD.replace("5500", "fast"), "could not convert string to float: 'fast'"),
        (GOOD.replace("5500", "0"), "0: no number above 0"),
        (GOOD.replace("5500", "nan"), "no number above 0"),
        (GOOD.replace("5500", "inf"), "no number above 0"),
        (GOOD.replace("9,Hybrid", "99,Hybrid"), "its figure is none of 9"),
    ],
)
def test_a_bad_line_is_named(house, capsys, line, named):
    """With its file and number, in one line; status 2."""
    path = house / "theirs.csv"
    path.write_text(f"{COLUMNS}\n{GOOD}\n{line}\n")
    assert run("--published", path) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{path}:3: ") and named in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_the_kinds_of_rows():
    """Fitted where its point was used; what follows from fitted points is no prediction."""
    paper, other = Paper([POINT], FITTED), POINT._replace(gpus="16")
    assert paper.row(POINT, 5500.0).kind == "fitted"
    assert paper.row(other, 5500.0).kind == "predicted"
    assert paper.row(POINT, 5500.0, "form").kind == "form"
    assert paper.row(other, 6050.0).error == pytest.approx(0.1)
    assert paper.row(other, None).error is None
    assert Row("9", "", None, 1.0, "", "form").error is None
    assert paper.of("9") == [POINT] and not paper.of("10")
    following = SPEEDS | {"follows": [other.name]}
    paper = Paper([], {"speeds": following})
    assert [paper.row(each, 5500.0).kind for each in (other, POINT)] == ["follows", "fitted"]
    assert values(following) == {"mfu": 0.5, "half": 2.0}
    assert values(FITTED["device"]) == {"hbm": 1}


def test_a_summary_counts_the_predicted_alone():
    """Over all figures, with the sign of an error left out; rows without a published value don't count."""
    ours = {"9": (110.0, 80.0, 100.0), "10": (130.0,)}
    rows = [Row(each, "", 100.0, v, "s", "predicted") for each, own in ours.items() for v in own]
    rows += [Row("9", "", 100.0, 900.0, "s", kind) for kind in ("fitted", "follows", "form")]
    rows.append(Row("9", "", None, 1.0, "s", "predicted"))
    first, _, second = tables.summary_of(rows, FITTED)
    assert first == "4 predicted rows: median error 15.0%, largest 30.0%."
    assert second.startswith("Rows: 1 fitted, 1 follows, 5 predicted, 1 form, 0 measured, ")
    assert second.endswith("2 constants were fitted on 1 points.")


def test_a_command_writes_its_page(house, capsys):
    assert run("--write") == 0
    page = (house / "docs" / "mine.md").read_text()
    assert page.startswith("# A paper.\n\nMore.\n1 predicted rows: median error 100.0%")
    assert capsys.readouterr().out in page and "HybridFlow, 7B, 8 GPUs, throughput | " in page


def test_readme_says_how_far_off_all_predicted_rows_are():
    """The median and the largest of each page, whatever stands between them."""
    readme = (ROOT / "README.md").read_text().replace(" %", "%")
    for page in sorted((ROOT / "docs" / "papers").glob("*.md")):
        for median, largest in re.findall(SUMMARY, page.read_text(), re.MULTILINE):
            assert f"{median}%" in readme and f"{largest}%" in readme, page.name


PUBLISHED = sorted((ROOT / "papers" / "published").glob("*.csv"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_every_published_number_has_a_source_and_one_place(path):
    points = read_points(path)
    names = [point.name for point in points]
    assert names and len(names) == len({*names})
    assert {point.label for point in points} <= {"P", "FIG", "CALC", "2ND", "RUN"}
    assert all(point.source and point.page and 0 <= float(point.precision) < 1 for point in points)


@pytest.mark.parametrize("path", sorted((ROOT / "papers").glob("*.toml")), ids=lambda p: p.stem)
def test_constants_are_at_most_half_of_the_points_that_they_were_fitted_on(path):
    """And each of these is published; other constants have a source."""
    published = (ROOT / "papers" / "published").glob(f"{path.stem}_*.csv")
    names = {point.name for each in published for point in read_points(each)}
    for table in read_constants(path).values():
        assert table.keys() & {"fitted_on", "source"}
        if points := table.get("fitted_on"):
            assert {*points} <= names and len(points) == len({*points})
            assert 2 * len(values(table)) <= len(points)
        assert {*table.get("follows", ())} <= names - {*table.get("fitted_on", ())}


@pytest.mark.parametrize("path", sorted((ROOT / "papers").glob("*.toml")), ids=lambda p: p.stem)
@pytest.mark.slow
def test_a_quick_command(path):
    """As a user starts it: status 0, nothing but its table."""
    command = [sys.executable, path.with_suffix(".py"), "--quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert re.search(SUMMARY, ran.stdout, re.MULTILINE) and ran.stdout.count(" | ") > 10
