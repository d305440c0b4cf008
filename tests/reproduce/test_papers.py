"""The common parts of all papers' commands: points with sources, constants with fitted points, rows."""

import re
import sys

import pytest

from reproduce.papers import hybridflow, rlhfuse, tables
from reproduce.papers.tables import (
    Paper,
    Point,
    Row,
    errors,
    power_law,
    read_constants,
    read_points,
    skill,
    values,
)
from runtime.errors import UserError
from tests import ROOT
from tests.support.patience import run_process

ERRORS = r"median error [\d.]+ %, largest [-+][\d.]+ %"
SUMMARY = rf"^.*: (\d+ predicted points: {ERRORS}) \(.*: ({ERRORS}); (the prediction is nearer in [\d of]+)\."
GOOD = "9,HybridFlow,7B,8,throughput,tokens/s,5500,0.02,FIG,arXiv,figure 9,"
POINT = Point(*GOOD.split(","))
SPEEDS = {"fitted_on": [POINT.name], "mfu": 0.5, "half": 2.0}
FITTED = {"speeds": SPEEDS, "device": {"source": "x", "hbm": 1}}


def test_the_kinds_of_rows():
    """A row must be fitted where its point was used; what follows from fitted points is no prediction."""
    paper, other = Paper([POINT], FITTED), POINT._replace(gpus="16")
    assert paper.row(POINT, 5500.0).kind == "fitted"
    assert paper.row(other, 5500.0).kind == "predicted"
    assert paper.left_out(POINT, "why").kind == "not modelled"
    assert paper.row(other, 6050.0).error == pytest.approx(0.1)
    assert paper.row(other, 6050.0, trivial=4400.0).error_of("trivial") == pytest.approx(-0.2)
    assert paper.row(other, None).error is None
    assert paper.row(other, 1.0)._replace(published=None).error is None
    assert paper.of("9") == [POINT] and not paper.of("10")
    following = SPEEDS | {"follows": [other.name], "seen": ["10"]}
    paper = Paper([], {"speeds": following})
    assert [paper.row(each, 5500.0).kind for each in (other, POINT)] == ["follows", "fitted"]
    assert paper.row(POINT._replace(figure="10"), 1.0).kind == "seen"
    assert values(following) == {"mfu": 0.5, "half": 2.0}
    assert values(FITTED["device"]) == {"hbm": 1}


def test_a_point_without_a_value(tmp_path):
    """Its row must say why its value isn't entered; only such a point may lack one."""
    path = tmp_path / "a.csv"
    cells = GOOD.replace("5500", "").replace("FIG", "BACK")
    path.write_text(f"{tables.COLUMNS}\n{cells}\n{cells.replace('BACK', 'TOLD')}\n")
    rows = [Paper([], {}).row(point, 5500.0) for point in read_points(path)]
    assert [(row.kind, row.published, row.error) for row in rows] == [
        ("kept back", None, None),
        ("implied", None, None),
    ]
    path.write_text(f"{tables.COLUMNS}\n{cells.replace('BACK', 'FIG')}\n")
    with pytest.raises(UserError, match=r"a.csv:2: could not convert"):
        read_points(path)


def row_of(published, simulated, kind="predicted", setting="", figure="9", system="a", **more):
    row = Row(figure, system, setting, "8", "time", published, simulated, "s", kind)
    return row._replace(**more)


def test_errors_count_only_what_was_predicted():
    """They must count all figures, as a median without sign; rows without a published value don't count."""
    rows = [row_of(100.0, simulated) for simulated in (110.0, 80.0, 100.0)]
    rows.append(row_of(100.0, 130.0, setting="far", figure="10"))
    kinds = ("fitted", "follows", "seen")
    rows += [row_of(100.0, 900.0, kind, trivial=100.0) for kind in kinds]
    rows += [row_of(None, 1.0, "kept back"), row_of(1.0, None, "not modelled")]
    far = "median error 15.0 %, largest +30.0 % (figure 10: a, far, 8 GPUs, time)"
    assert errors(rows) == f"4 predicted points: {far}" and skill(rows) is None
    assert errors(rows[4:5]).startswith("1 fitted points: median error 800.0 %")
    assert errors(rows[-2:]) == ""
    assert errors(rows[2:3]) == "1 predicted points, all exact"


def test_skill_is_beside_a_trivial_predictor():
    """Predicted rows must be nearer than it without sign; rows without it or fitted don't count."""
    rows = [row_of(100.0, ours, trivial=130.0) for ours in (120.0, 71.0, 135.0, 100.0, 110.0)]
    rows += [row_of(100.0, 500.0), row_of(100.0, 500.0, "fitted", trivial=100.0)]
    found = skill(rows)
    assert (found.count, found.closer) == (5, 4)
    assert found.simulated == pytest.approx((0.2, 0.326, 0.35))
    assert found.trivial == pytest.approx((0.3, 0.3, 0.3))
    end = "; trivial predictor: median error 30.0 %, largest +30.0 %; the prediction is nearer in 4 of 5"
    assert errors(rows).endswith(end)


def test_a_power_law_is_found():
    at = [(1.0, 2.0), (3.0, 5.0), (7.0, 2.0), (2.0, 9.0)]
    law = power_law([(a, b, 3 * a**0.5 / b**2) for a, b in at])
    assert law(4.0, 3.0) == pytest.approx(3 * 2 / 9)


def law_of_hybridflow(paper):
    return hybridflow.scaling_law(paper)(48, 2e10)


def law_of_rlhfuse(paper):
    setting = rlhfuse.Setting(1024, "65", "33", 0.2)
    return [rlhfuse.trivial_of(paper)(setting, is_fused) for is_fused in (False, True)]


@pytest.mark.parametrize(
    "name, law", [("hybridflow", law_of_hybridflow), ("rlhfuse", law_of_rlhfuse)]
)
def test_a_trivial_predictor_knows_only_the_fitted_points(name, law, monkeypatch):
    """With other values at all other points it must be the same; with others at these it must not."""
    known = tables.all_published()
    constants = read_constants(ROOT / "reproduce/papers" / f"{name}.toml")
    names = tables.fitted_on(constants)
    laws = []
    for changes in (lambda p: False, lambda p: p.name not in names, lambda p: p.name in names):
        points = [p._replace(value="77") if changes(p) else p for p in known]
        monkeypatch.setattr(tables, "all_published", lambda points=points: points)
        laws.append(law(Paper([], constants)))
    assert laws[0] == laws[1] != laws[2]


def test_readme_has_each_headline():
    """It must have the papers' errors and the trivial predictor's beside, not the H20s'."""
    readme = (ROOT / "README.md").read_text()
    found = {}
    for page in sorted((ROOT / "docs" / "papers").glob("*.md")):
        for errors_of_page in re.findall(
            SUMMARY, page.read_text().partition("\n## ")[0], re.MULTILINE
        ):
            found[page.stem] = errors_of_page
    h20 = found.pop("wechat_yatt")
    assert found.keys() == {"hybridflow", "measured", "rlhfuse"}
    for ours, trivial, count in found.values():
        assert ours in readme and trivial in readme and count in readme
    assert h20[0] not in readme and "H20s" not in readme


PUBLISHED = sorted((ROOT / "reproduce/papers" / "published").glob("*.csv"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_every_published_number_has_a_source_and_one_place(path):
    points = read_points(path)
    names = [point.name for point in points]
    assert names and len(names) == len({*names})
    labels = {"P", "FIG", "CALC", "2ND", "RUN"} | tables.WITHOUT_VALUE.keys()
    assert {point.label for point in points} <= labels
    assert all(bool(p.value) != (p.label in tables.WITHOUT_VALUE) for p in points)
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
    assert re.search(ERRORS, ran.stdout) and ran.stdout.count(" | ") > 10
