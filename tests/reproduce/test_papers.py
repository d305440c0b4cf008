"""The common parts of all papers' commands: points with sources, constants with fitted points, rows."""

import re
import sys

import pytest

from reproduce.papers.tables import Paper, Point, Row, errors, read_constants, read_points, values
from tests import ROOT
from tests.support.patience import run_process

SUMMARY = r"^(?:All )?\d+ predicted points: median error ([\d.]+) %, largest ([-+][\d.]+) % \("
GOOD = "9,HybridFlow,7B,8,throughput,tokens/s,5500,0.02,FIG,arXiv,figure 9,"
POINT = Point(*GOOD.split(","))
SPEEDS = {"fitted_on": [POINT.name], "mfu": 0.5, "half": 2.0}
FITTED = {"speeds": SPEEDS, "device": {"source": "x", "hbm": 1}}


def test_the_kinds_of_rows():
    """A row must be fitted where its point was used; what follows from fitted points is no prediction."""
    paper, other = Paper([POINT], FITTED), POINT._replace(gpus="16")
    assert paper.row(POINT, 5500.0).kind == "fitted"
    assert paper.row(other, 5500.0).kind == "predicted"
    assert paper.row(POINT, 5500.0, "closed form").kind == "closed form"
    assert paper.row(other, 6050.0).error == pytest.approx(0.1)
    assert paper.row(other, None).error is None
    assert paper.row(other, 1.0)._replace(published=None).error is None
    assert paper.of("9") == [POINT] and not paper.of("10")
    following = SPEEDS | {"follows": [other.name]}
    paper = Paper([], {"speeds": following})
    assert [paper.row(each, 5500.0).kind for each in (other, POINT)] == ["follows", "fitted"]
    assert values(following) == {"mfu": 0.5, "half": 2.0}
    assert values(FITTED["device"]) == {"hbm": 1}


def row_of(published, simulated, kind="predicted", setting="", figure="9", system="a"):
    return Row(figure, system, setting, "8", "time", published, simulated, "s", kind)


def test_errors_count_the_predicted_alone():
    """They must count all figures, as a median without sign; rows without a published value don't count."""
    rows = [row_of(100.0, simulated) for simulated in (110.0, 80.0, 100.0)]
    rows.append(row_of(100.0, 130.0, setting="far", figure="10"))
    rows += [row_of(100.0, 900.0, kind) for kind in ("fitted", "follows", "closed form")]
    rows += [row_of(None, 1.0), row_of(1.0, None, "not modelled")]
    far = "median error 15.0 %, largest +30.0 % (figure 10: a, far, 8 GPUs, time)"
    assert errors(rows) == f"4 predicted points: {far}"
    assert errors(rows[4:5]).startswith("1 fitted points: median error 800.0 %")
    assert errors(rows[-2:]) == ""
    assert errors(rows[2:3]) == "1 predicted points, all exact"


def test_readme_says_how_far_off_all_predicted_rows_are():
    """It must have each page's median and largest, whatever is written between them."""
    readme = (ROOT / "README.md").read_text()
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "papers").glob("*.md"))
    found = re.findall(SUMMARY, pages, re.MULTILINE)
    assert len(found) == 4
    for median, largest in found:
        assert f"median error {median} %, largest {largest} %" in readme


PUBLISHED = sorted((ROOT / "reproduce/papers" / "published").glob("*.csv"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_every_published_number_has_a_source_and_one_place(path):
    points = read_points(path)
    names = [point.name for point in points]
    assert names and len(names) == len({*names})
    assert {point.label for point in points} <= {"P", "FIG", "CALC", "2ND", "RUN"}
    assert all(point.source and point.page and 0 <= float(point.precision) < 1 for point in points)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "reproduce/papers").glob("*.toml")), ids=lambda p: p.stem
)
def test_constants_are_at_most_half_of_the_points_that_they_were_fitted_on(path):
    """Each of these points must be published; other constants need a source."""
    published = (ROOT / "reproduce/papers" / "published").glob(f"{path.stem}_*.csv")
    names = {point.name for each in published for point in read_points(each)}
    for table in read_constants(path).values():
        assert table.keys() & {"fitted_on", "source"}
        if points := table.get("fitted_on"):
            assert {*points} <= names and len(points) == len({*points})
            assert 2 * len(values(table)) <= len(points)
        assert {*table.get("follows", ())} <= names - {*table.get("fitted_on", ())}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "reproduce/papers").glob("*.toml")), ids=lambda p: p.stem
)
@pytest.mark.slow
def test_a_quick_command(path):
    """It must end with status 0 and print only its table, started as a user does."""
    ran = run_process(sys.executable, path.with_suffix(".py"), "--quick")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert re.search(SUMMARY, ran.stdout, re.MULTILINE) and ran.stdout.count(" | ") > 10
